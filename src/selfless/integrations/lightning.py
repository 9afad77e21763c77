"""`SelflessCallback`: preservers and sparsifiers in a Lightning `Trainer`, without a change of the module.

    callback = SelflessCallback(preserve=MAS(0.1), sparsify=SLNID(1e-3))
    for loader in tasks:
        Trainer(callbacks=[callback], max_epochs=5).fit(module, loader)

The gradients of all terms are added in the backward pass (`attach(..., inject=True)`), so whatever the module does with its loss (scaling,
accumulation, manual optimization, several optimizers) holds for them too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from selfless.importance.objectives import Loss
from selfless.integrations.attachment import Anchor, Attachment
from selfless.integrations.extras import missing
from selfless.keeper import Keeper
from selfless.network.calling import Forward
from selfless.network.layers import Layers
from selfless.preserve.capabilities import Distils

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
except ImportError as error:
    raise missing("lightning") from error


class SelflessCallback(Callback):
    """Attach a keeper to a LightningModule, and end a task when a fit ends.

    preserve, sparsify, layers   as in `selfless.attach`; **options too (heads, parameters, state_dtype, …)
    model         the name of the submodule to attach to, as in "net"; None: the module itself, or its only child if it has no `forward`
    anchor        "implicit" or "explicit"
    end_with_fit  True: a task ends with `fit`, and its training loader gives Ω. False: call `end_task(loader)`
    forward       forward(model, batch) → output, if `model(x)` or `model(**batch)` is not the right call
    loss          loss(output, batch) → one loss per sample, for EWC and IMM, if it is not the cross-entropy of labels
    log           log `keeper.log()` with the module's logger, every `trainer.log_every_n_steps` steps
    """

    def __init__(
        self,
        preserve: Any = None,
        sparsify: Any = None,
        layers: Layers = "auto",
        *,
        model: str | None = None,
        anchor: Anchor = "implicit",
        end_with_fit: bool = True,
        forward: Forward | None = None,
        loss: Loss | None = None,
        log: bool = True,
        **options: Any,
    ) -> None:
        settings = {"preserve": preserve, "sparsify": sparsify, "layers": layers, "inject": True} | options
        self.attachment = Attachment(anchor, forward, loss, settings)
        self.model, self.end_with_fit, self.log = model, end_with_fit, log

    @property
    def keeper(self) -> Keeper:
        """The keeper, from the first `fit` on."""
        return self.attachment.keeper

    @property
    def state_key(self) -> str:
        """The name of the state in Lightning's checkpoints, which differs for callbacks of different submodules."""
        return self._generate_state_key(model=self.model)  # type: ignore[no-any-return]

    def end_task(self, loader: Iterable[Any]) -> None:
        """End a task: measure importances on `loader`. With several processes, each passes its own share of the data."""
        self.attachment.end_task(loader)

    def evaluating(self, task: int) -> AbstractContextManager[nn.Module]:
        """Inside `with`: the model as task `task` is evaluated, as in `with callback.evaluating(0): trainer.test(…)`."""
        return self.attachment.evaluating(task)

    # ------------------------------------------------------------------------------------------------------- hooks of Lightning
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach. The weights and the state of a checkpoint are loaded by now."""
        _check_strategy(trainer)
        target = self._target(pl_module)
        keeper = self.attachment.attach(target)
        distils = any(isinstance(part.term, Distils) for part in keeper.parts)
        if trainer.world_size > 1 and target is pl_module and distils:
            raise ValueError(
                f"{keeper.preserve} reads the inputs of the network, but with several processes Lightning passes whole batches to the "
                "module; write SelflessCallback(…, model='net') with the name of the network inside of it"
            )
        keeper.scale = lambda: _loss_scale(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Anchor the optimizers."""
        self.attachment.anchor_with(trainer.optimizers)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch of the task."""
        limit = trainer.max_epochs
        batches, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
        steps = math.ceil(batches / accumulated) if math.isfinite(batches) else batches
        self.attachment.begin_epoch(trainer.current_epoch, None if limit in (None, -1) else limit, steps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the parts of the step."""
        if self.log and trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self.attachment.log(), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the task, if it ends with the fit."""
        if self.end_with_fit:
            self.end_task(_Batches(trainer))
        self.keeper.scale = 1.0

    # -------------------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the keeper, for Lightning's checkpoints."""
        return self.attachment.state()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned; before the first fit it is kept until the model is there."""
        self.attachment.load(state_dict)

    def _target(self, module: LightningModule) -> nn.Module:
        """Return the module to attach to."""
        names = ", ".join(name for name, _ in module.named_children()) or "none"
        if self.model is not None:
            try:
                found: nn.Module = module.get_submodule(self.model)
            except AttributeError:
                raise ValueError(f"the module has no submodule {self.model!r}; its children: {names}") from None
            return found
        if type(module).forward is not LightningModule.forward:
            whole: nn.Module = module
            return whole
        children: list[nn.Module] = [child for child in module.children() if any(True for _ in child.parameters())]
        if len(children) != 1:
            raise ValueError(
                f"{type(module).__name__} has no forward, so it is not clear what to attach to; define forward, or write "
                f"SelflessCallback(…, model=NAME) with one of its children: {names}"
            )
        return children[0]


def _check_strategy(trainer: Trainer) -> None:
    """Raise ValueError for strategies under which the keeper would lose its state or see only a part of a parameter."""
    if getattr(trainer.strategy, "_start_method", "popen") != "popen":
        raise ValueError("this strategy trains in processes whose importances are lost when they end; use strategy='ddp'")
    if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy) or "deepspeed" in type(trainer.strategy).__name__.lower():
        raise ValueError(f"{type(trainer.strategy).__name__} splits parameters, which a keeper needs whole; use strategy='ddp'")


def _loss_scale(trainer: Trainer, module: LightningModule) -> float:
    """Return by what Lightning multiplies the loss before backward: the factor of its GradScaler, over the number of batches of a step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    factor = 1.0 if scaler is None else float(scaler.get_scale())
    return factor / (trainer.accumulate_grad_batches if module.automatic_optimization else 1)


class _Batches:
    """The training batches of a trainer, on its device and through the module's transfer hooks."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        if isinstance(trainer.train_dataloader, dict | list | tuple):
            raise ValueError(
                "this fit has several training loaders; write SelflessCallback(…, end_with_fit=False) and call end_task(loader)"
            )

    def __iter__(self) -> Iterator[Any]:
        trainer, count = self.trainer, self.trainer.num_training_batches
        batches = trainer.train_dataloader if count == float("inf") else itertools.islice(trainer.train_dataloader, int(count))
        return (trainer.strategy.batch_to_device(batch) for batch in batches)
