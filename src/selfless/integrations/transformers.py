"""`SelflessTrainerCallback`: preservers and sparsifiers in the Trainer of Hugging Face; LoRA and frozen parameters cost what they train.

    callback = SelflessTrainerCallback(EWC(10), SLNID(1e-3, absolute=True))
    for data in tasks:
        Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()

The callback adds gradients in the backward pass (`attach(..., inject=True)`), and the Trainer stays as it is. With `SelflessMixin` the
penalty is in the loss instead, so that the Trainer reports it:

    class MyTrainer(SelflessMixin, Trainer): ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfless.importance.objectives import Loss, next_token_loss
from selfless.integrations.attachment import Anchor, Attachment
from selfless.integrations.extras import missing
from selfless.keeper import Keeper
from selfless.network.calling import Forward
from selfless.network.layers import Layers

try:
    from transformers import TrainerCallback
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise missing("transformers") from error

FILE = "selfless.safetensors"  # in every checkpoint of the Trainer


class SelflessTrainerCallback(TrainerCallback):
    """Attach a keeper to the model of a Trainer, and end a task when training ends.

    preserve, sparsify, layers   as in `selfless.attach`; **options too (heads, parameters, state_dtype, …)
    anchor              "implicit" or "explicit"
    end_with_training   True: a task ends with `trainer.train()`, and its training batches give Ω. False: call `end_task(loader)`
    forward             forward(model, batch) → output, if `model(**batch).logits` is not the right one
    loss                loss(output, batch) → one loss per sample, for EWC and IMM. None: the next token for causal language models, and
                        the cross-entropy of `labels` for all others; labels of −100 are ignored
    """

    def __init__(
        self,
        preserve: Any = None,
        sparsify: Any = None,
        layers: Layers = "auto",
        *,
        anchor: Anchor = "implicit",
        end_with_training: bool = True,
        forward: Forward | None = None,
        loss: Loss | None = None,
        **options: Any,
    ) -> None:
        settings = {"preserve": preserve, "sparsify": sparsify, "layers": layers, "inject": True} | options
        self.attachment = Attachment(anchor, forward, loss, settings)
        self.end_with_training = end_with_training
        self._steps = 0  # optimizer steps in this epoch

    @property
    def keeper(self) -> Keeper:
        """The keeper, from the first `trainer.train()` on."""
        return self.attachment.keeper

    def end_task(self, loader: Iterable[Any]) -> None:
        """End a task: measure importances on `loader`. With several processes, each passes its own share of the data."""
        if self.attachment.loss is None and _is_causal(self.keeper.model):
            self.attachment.loss = next_token_loss
        with _full_precision(self.keeper.model):
            self.attachment.end_task(loader)

    def evaluating(self, task: int) -> AbstractContextManager[nn.Module]:
        """Inside `with`: the model as task `task` is evaluated, as in `with callback.evaluating(0): trainer.evaluate()`."""
        return self.attachment.evaluating(task)

    def save(self, folder: Path | str) -> None:
        """Write the state of the keeper into a folder; the Trainer's own checkpoints have it already."""
        _write(self.attachment.state(), Path(folder))

    def load(self, folder: Path | str) -> None:
        """Load the state of the keeper from a checkpoint of the Trainer; before training, it is kept until the model is there."""
        from safetensors.torch import load_file

        self.attachment.load(load_file(Path(folder) / FILE))

    # ------------------------------------------------------------------------------------------------------- hooks of the Trainer
    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Attach, and anchor the optimizer. A training that is resumed finds its state beside the checkpoint."""
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.global_step and (saved / FILE).exists():
            self.load(saved)
        keeper = self.attachment.attach(found["model"])
        if state.global_step and not (saved / FILE).exists() and not keeper.tasks:
            raise ValueError(
                f"training resumes at step {state.global_step}, but {saved / FILE} is missing; call callback.load(FOLDER) first"
            )
        optimizer, loader = found["optimizer"], found["train_dataloader"]
        self.attachment.anchor_with([getattr(optimizer, "optimizer", optimizer)])
        scaler = getattr(optimizer, "scaler", None)
        if keeper.injector is not None:
            keeper.scale = lambda: (1.0 if scaler is None else scaler.get_scale()) / self._window(args.gradient_accumulation_steps, loader)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Begin an epoch of the task."""
        batches = _length(found["train_dataloader"])
        steps = -(-batches // args.gradient_accumulation_steps) if batches else None
        self._steps = state.global_step % steps if steps else 0
        epoch = state.epoch or 0.0
        epoch = math.floor(epoch + 0.5 / steps) if steps else round(epoch)  # a fraction, if training goes on within an epoch
        self.attachment.begin_epoch(epoch, state.num_train_epochs or None, steps, first=0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the steps of an epoch."""
        self._steps += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add the parts of the last step to the Trainer's history, where the Trainer logs a training loss."""
        if logs is not None and "loss" in logs and state.log_history:
            state.log_history[-1].update(self.attachment.log())

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state into the checkpoint."""
        tensors = self.attachment.state()  # with several processes, all take part in it
        if state.is_world_process_zero:
            _write(tensors, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """End the task, if it ends with training."""
        if self.end_with_training:
            self.end_task(found["train_dataloader"])
        self.keeper.scale = 1.0

    def _window(self, accumulated: int, loader: Any) -> int:
        """Return how many batches share this step; at the end of an epoch there may be fewer."""
        batches = _length(loader)
        return accumulated if batches is None else max(1, min(accumulated, batches - self._steps * accumulated))


class SelflessMixin:
    """Put the penalty into the loss of a Trainer: `class MyTrainer(SelflessMixin, Trainer)`. It needs a SelflessTrainerCallback."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with the penalty in the loss, not in the backward pass."""
        callback = self._callback()
        if callback is None:
            raise ValueError("SelflessMixin needs a SelflessTrainerCallback among the callbacks of the Trainer")
        callback.attachment.options["inject"] = False
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Return the Trainer's loss plus the penalty, both divided in the same way by the batches that share a step."""
        batch = dict(inputs)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
        if model.training and torch.is_grad_enabled():
            loss = loss + self._penalty(batch, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the parts of the last step beside the training loss, with every tracker of the Trainer."""
        callback = self._callback()
        more = callback.attachment.log() if callback is not None and "loss" in logs else {}
        super().log({**logs, **more}, *args, **kwargs)  # type: ignore[misc]

    def _penalty(self, batch: Any, items: Any) -> Tensor:
        trainer: Any = self
        callback = self._callback()
        assert callback is not None
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
        return callback.keeper.penalty(batch) / (trainer.current_gradient_accumulation_steps if scaled else 1)

    def _callback(self) -> SelflessTrainerCallback | None:
        handler: Any = self.callback_handler  # type: ignore[attr-defined]
        return next((one for one in handler.callbacks if isinstance(one, SelflessTrainerCallback)), None)


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / FILE)


def _is_causal(model: nn.Module) -> bool:
    """Return True for a model that predicts the next token, also inside of PEFT's wrapper."""
    return any(type(module).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for module in model.modules())


@contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """Inside `with`: the model without the autocast that accelerate wraps around its `forward`; per-sample gradients need all digits."""
    wrapped, plain = model.__dict__.get("forward"), model.__dict__.get("_original_forward")
    if wrapped is None or plain is None:
        yield
        return
    model.forward = plain
    try:
        yield
    finally:
        model.forward = wrapped


def _length(loader: Any) -> int | None:
    """Return the number of batches of a loader; None if it has no length."""
    try:
        return len(loader)
    except TypeError:
        return None
