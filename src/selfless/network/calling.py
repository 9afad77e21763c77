"""Call anybody's model on anybody's batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Any]


class CalledModel(nn.Module):
    """A model and a way to call it, as one module: `torch.func.functional_call` needs a module."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self.call = model, forward

    def forward(self, batch: Any) -> Tensor:
        return run_batch(self.model, batch, self.call)


def check_batches(batches: Any) -> None:
    """Refuse what is one batch, or none, in place of an iterable of them."""
    if isinstance(batches, Tensor):
        raise TypeError("batches must be an iterable of batches, not one tensor; wrap a single batch as [x]")
    if (
        isinstance(batches, tuple)
        and len(batches) == 2
        and all(isinstance(b, Tensor) for b in batches)
        and batches[1].dim() < batches[0].dim()
    ):
        raise TypeError("batches must be an iterable of batches, not one (x, y); wrap a single batch as [(x, y)]")
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of batches, not {batches!r}; pass the task's DataLoader")


def run_batch(model: nn.Module, batch: Any, forward: Forward | None = None) -> Tensor:
    """The output on a batch: model(x) for x or (x, y, …), model(**batch) for a dict; `.logits` is taken where there is one."""
    if forward is not None:
        output = forward(model, batch)
    else:
        try:
            output = model(**batch) if isinstance(batch, dict) else model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        except Exception as error:
            called = "model(**batch)" if isinstance(batch, dict) else "model(x), x being the batch or its first item"
            error.add_note(f"selfless called {called}; to call the model otherwise pass forward=lambda model, batch: …")
            raise
    if not isinstance(output, Tensor):
        output = output["logits"] if isinstance(output, dict) else getattr(output, "logits", None)
        if not isinstance(output, Tensor):
            raise TypeError("the model's output is neither a tensor nor has .logits; pass forward=lambda model, batch: <the output tensor>")
    if output.dim() < 2:
        output = output.unsqueeze(-1) if output.dim() == 1 else output.view(1, 1)
    return output


def call_with(model: nn.Module, parameters: Mapping[str, Tensor], batch: Any, forward: Forward | None = None) -> Tensor:
    """`run_batch` with other values of (some) parameters, in their own precision."""
    own = dict(model.named_parameters())
    replaced = {f"model.{n}": t.to(own[n].dtype) for n, t in parameters.items() if n in own}
    output: Tensor = torch.func.functional_call(CalledModel(model, forward), replaced, (batch,))
    return output


def labels_of(batch: Any) -> Tensor | None:
    """The labels in a batch: the second item of a tuple, 'labels' or 'label' of a dict."""
    if isinstance(batch, dict):
        found = batch.get("labels", batch.get("label"))
    else:
        found = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    return found if isinstance(found, Tensor) else None


def to_device(batch: Any, model: nn.Module) -> Any:
    """The batch on the model's device; dict-likes (a tokenizer's BatchEncoding) become dicts."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        batch = {key: batch[key] for key in batch.keys()}  # noqa: SIM118
    return torch.utils._pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile(model)`; any other model as it is."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and eager calls, each module's own mode restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    compiled = {module: module._compiled_call_impl for module in modes if getattr(module, "_compiled_call_impl", None) is not None}
    model.eval()
    for module in compiled:
        module._compiled_call_impl = None
    device = next((p.device.type for p in model.parameters()), "cpu")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, call in compiled.items():
            module._compiled_call_impl = call
