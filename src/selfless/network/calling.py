"""Call any model on any batch: x, (x, y, …) or a dict."""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100  # the label of positions that do not count, as in F.cross_entropy
Forward = Callable[[nn.Module, Any], Any]


class CalledModel(nn.Module):
    """A model and the function that calls it, as one module: `torch.func.functional_call` needs a module."""

    def __init__(self, model: nn.Module, forward: Forward | None, *, keep_shape: bool = False) -> None:
        super().__init__()
        self.model, self.call, self.keep_shape = model, forward, keep_shape

    def forward(self, batch: Any) -> Tensor:
        return run_batch(self.model, batch, self.call, keep_shape=self.keep_shape)


def check_batches(batches: Any, forward: Any = None) -> None:
    """Raise TypeError unless `batches` is an iterable of batches, and `forward` None or a function. A single batch is refused too."""
    _check_forward(forward)
    if isinstance(batches, Tensor):
        raise TypeError("batches must be an iterable of batches, not one tensor; wrap a single batch as [x]")
    if isinstance(batches, tuple) and len(batches) > 1 and all(isinstance(b, Tensor) for b in batches):
        raise TypeError(
            "batches must be an iterable of batches, not one (x, y); wrap a single batch as [(x, y)]. If these are batches without labels, "
            "give them as a list"
        )
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of batches, not {batches!r}; pass the task's DataLoader")


def _check_forward(forward: Any) -> None:
    """Raise TypeError unless `forward` is None or a function of (model, batch)."""
    if forward is None:
        return
    wrong = f"not {forward!r}"
    if callable(forward):
        try:
            signature = inspect.signature(forward)
        except ValueError:  # a built-in function without a signature
            return
        try:
            signature.bind(None, None)
            return
        except TypeError:
            wrong = f"but yours takes {signature}"
    raise TypeError(f"forward= must be a function of (model, batch), {wrong}; write forward=lambda model, batch: model(batch[0])")


def variables_of(function: Forward) -> dict[str, object]:
    """Return the whole numbers and texts outside of a function that it reads, by name: of its closure and of its module."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    module, loads, stores = getattr(function, "__globals__", {}), set[str](), set[str]()
    for step in dis.get_instructions(code):
        (loads if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else stores if step.opname == "STORE_GLOBAL" else set[str]()).add(step.argval)
    found: dict[str, object] = {name: module[name] for name in loads - stores if name in module}
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return {name: value for name, value in found.items() if type(value) in (int, str)}


def check_labels(labels: Tensor, classes: int, *, ignored: int | None = IGNORED) -> None:
    """Raise ValueError for a label that is no column of an output with so many `classes`; labels of `ignored` do not count."""
    kept = labels if ignored is None else labels[labels != ignored]
    if not kept.numel():
        return
    low, high = kept.aminmax()
    if int(low) < 0 or int(high) >= classes:
        wrong, many = int(low if int(low) < 0 else high), f"{classes} column{'s' * (classes != 1)}"
        raise ValueError(
            f"a label of these batches is {wrong}, but the model's output has {many}, so labels are 0 … {classes - 1}; number the classes "
            "of each head from 0, or pass forward=lambda model, batch: <the output over all classes>"
            + ("" if ignored is None else f". Mark what has no label by {ignored}")
        )


def class_numbers(labels: Tensor, otherwise: str) -> Tensor:
    """Return labels as int64. Raise ValueError for numbers with a fraction; `otherwise`: what to do where labels are no classes."""
    if labels.is_floating_point():
        raise ValueError(
            f"labels must be class numbers (integers), not {labels.dtype}; convert them with y.long(), or, if they are no classes "
            f"(regression, several labels), {otherwise}"
        )
    return labels.long()


def check_shape(labels: Tensor, output: Tensor) -> None:
    """Raise ValueError unless there is one label for each row of an output whose last axis has the classes."""
    if labels.numel() * output.shape[-1] != output.numel():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit an output of shape {tuple(output.shape)}: write one class number for each "
            "sample or position (one-hot labels: y.argmax(-1)); a method that takes another loss gets it by consolidate(…, loss=…)"
        )


def run_batch(model: nn.Module, batch: Any, forward: Forward | None = None, *, keep_shape: bool = False) -> Tensor:
    """Return the output on a batch: model(x) for x or (x, y, …), model(**batch) for a dict, or `.logits` of what that returns.

    An output (M,) becomes (M, 1), unless `keep_shape`. An output (M, T, …) is 0 at padded tokens, where the dict has an `attention_mask`.
    """
    if forward is not None:
        output = forward(model, batch)
    else:
        try:
            output = model(**batch) if isinstance(batch, dict) else model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        except Exception as error:
            call = "model(**batch)" if isinstance(batch, dict) else "model(x), where x is the batch or its first item"
            error.add_note(f"selfless called {call}; to call the model in another way, pass forward=lambda model, batch: …")
            raise
    if not isinstance(output, Tensor):
        found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
        if not isinstance(found, Tensor):
            what = f"a dict of {', '.join(map(repr, output))}" if isinstance(output, dict) else f"a {type(output).__name__}"
            raise TypeError(
                "the model's output is not a tensor and has no .logits; pass forward=lambda model, batch: <the output tensor>. It is "
                f"{what}; join several outputs with torch.cat([…], -1)"
            )
        output = found
    mask = token_mask(batch) if forward is None and isinstance(batch, dict) and output.dim() > 2 else None
    if mask is not None and mask.shape == output.shape[:2]:
        output = output.masked_fill(~mask.view(*mask.shape, *[1] * (output.dim() - 2)), 0.0)
    if output.dim() < 2 and not keep_shape:
        output = output.unsqueeze(-1) if output.dim() == 1 else output.view(1, 1)
    return output


def call_with(model: nn.Module, parameters: Mapping[str, Tensor], batch: Any, forward: Forward | None = None) -> Tensor:
    """Return what `run_batch` gives with these values in place of the model's parameters, cast to the precision of the model."""
    current = dict(model.named_parameters())
    replaced = {f"model.{n}": t.to(current[n].dtype) for n, t in parameters.items() if n in current}
    output: Tensor = torch.func.functional_call(CalledModel(model, forward), replaced, (batch,))
    return output


def labels_of(batch: Any) -> Tensor | None:
    """Return the labels of a batch: the second item of a tuple, or 'labels' or 'label' of a dict; None if there are none."""
    if isinstance(batch, dict):
        found = batch.get("labels", batch.get("label"))
    else:
        found = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    return found if isinstance(found, Tensor) else None


def token_mask(values: Any) -> Tensor | None:
    """Return where tokens are no padding, (samples, tokens): the `attention_mask` of a dict; None if there is none."""
    mask = values.get("attention_mask") if isinstance(values, dict) else None
    return mask != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None


def to_device(batch: Any, model: nn.Module) -> Any:
    """Return the batch on the model's device. A mapping that is not a dict (a tokenizer's BatchEncoding) becomes a dict."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        batch = {key: batch[key] for key in batch.keys()}  # noqa: SIM118
    return torch.utils._pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile(model)`, DataParallel or DistributedDataParallel, or any other model unchanged."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    inner = getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def is_compiled(model: nn.Module) -> bool:
    """Return True for a model that torch.compile wraps or was called on in place."""
    inner = model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model
    return hasattr(inner, "_orig_mod") or inner._compiled_call_impl is not None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside `with`: eval mode, eager calls, no autocast, no fused attention. Afterwards each module has its old mode again.

    The fused path of `nn.TransformerEncoder` passes nested tensors from layer to layer, which hooks cannot read.
    """
    modes = {module: module.training for module in model.modules()}
    compiled = {module: module._compiled_call_impl for module in modes if getattr(module, "_compiled_call_impl", None) is not None}
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    for module in compiled:
        module._compiled_call_impl = None
    device = next((p.device.type for p in model.parameters()), "cpu")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in modes.items():
            module.training = mode
        for module, call in compiled.items():
            module._compiled_call_impl = call


def batch_size(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor; 1 if it has none."""
    leaves = torch.utils._pytree.tree_leaves(dict(batch) if hasattr(batch, "keys") else batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)
