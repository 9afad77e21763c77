"""What keeps old tasks: the contract of a preserver.

A preserver is a frozen value. Its state is explicit, {"omega": {name: Ω}, "anchor": {name: θ*}, …}, all tensors, and its methods are
pure: state in, new state out. The keeper holds one state; an engine may stack many and map the same functions over them.
To add one: a file here, an entry in `selfless.preserve.PRESERVERS`, a row in tests/test_contracts.py.

What a method may do besides a penalty on θ; the keeper and the engine call the same function, at the same place:

    distil      in the loss       compare the outputs of old heads with those of θ* on the same batch          (LwF)
    encode      after a task      train a code of its features, which is kept; `code_drift` in the loss compares codes  (EBLL)
    project     after each step   put parameters back to where they may be                                      (PackNet, warm-ups)
    turn        before an epoch   go from one phase of a task to the next: prune, end a warm-up                 (PackNet, LwF)
    evaluated   to judge a task   the parameters that a task is judged with                                     (PackNet, IMM)
    dropped     in the forward    put some nodes' parameters towards those of θ*                                 (IMM's drop-transfer)
    gate …      in the forward    multiply hidden neurons by gates of the task, which learn by `learn_gates`    (HAT)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.importance.loop import Estimator
from selfless.importance.objectives import FunctionNorm, Objective
from selfless.network.wiring import Wiring
from selfless.terms import Term

State = dict[str, dict[str, Tensor]]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Preserver(Term):
    """λ_Ω · penalty(θ), nothing before the first task ended. The base class preserves nothing."""

    strength: float
    measures: ClassVar[bool] = False  # whether `consolidate` wants Ω measured on the task's data
    watches: ClassVar[bool] = False  # whether `observe` wants every optimizer step
    distils: ClassVar[bool] = False  # whether `distil` is part of the loss; θ* is then state["anchor"]
    encodes: ClassVar[bool] = False  # whether features are coded too: `fit`, `coded` and `code_drift` (`selfless.preserve.ebll`)
    projects: ClassVar[bool] = False  # whether `project` changes parameters after a step
    turns: ClassVar[bool] = False  # whether `turn` wants the start of every epoch
    evaluates: ClassVar[bool] = False  # whether `evaluated` gives other parameters than the trained ones
    identifies: ClassVar[bool] = False  # whether `evaluated` must be told the task: without it a task cannot be judged
    drops: ClassVar[bool] = False  # whether `dropped` changes the parameters that a training step's forward pass has
    gates: ClassVar[bool] = False  # whether hidden neurons are multiplied by gates: `wire` and the four functions below it
    owns: ClassVar[bool] = False  # whether it must know whose head a parameter is: state["head"], see `mine`
    local: ClassVar[bool] = False  # whether Ω is measured layer by layer (`selfless.importance.Layerwise`)
    alike: ClassVar[bool] = False  # whether the members of a fleet must have the same strength
    recordable: ClassVar[bool] = True  # whether a GPU may record a step with it: no function that a step calls looks at a tensor's value
    stepped: ClassVar[tuple[str, ...]] = ()  # groups of the state that `observe` and `learn_gates` change; their tensors keep their shapes
    loose: ClassVar[tuple[str, ...]] = ()  # groups of the state whose tensors are not shaped like the parameters they are named after

    @property
    def objective(self) -> Objective:
        """What Ω and α are gradients of. The function's norm unless the preserver has its own."""
        return FunctionNorm()

    @property
    def spares(self) -> Objective | None:
        """What α alone, by which inhibition spares neurons, is the gradient of; None: of `objective`, as Ω is."""
        return None

    @property
    def how(self) -> Estimator:
        return "per-sample"

    def check_network(self, buffers: Iterable[str]) -> None:
        """Raise for a network, given by the names of its buffers, in which the method cannot do what it promises."""

    def init(self, parameters: Tensors) -> State:
        """The state before the first task."""
        return {}

    @property
    def penalises(self) -> bool:
        """Whether `penalty` is more than zero: a method's own. Only a `Quadratic` one can be taken implicitly instead."""
        return type(self).penalty is not Preserver.penalty

    def penalty(self, state: State, parameters: Tensors) -> Tensor:
        """The explicit penalty at `parameters`, without the strength."""
        return next(iter(parameters.values())).new_zeros(())

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """The state after a task that ended at `parameters`, with the importances `omega` measured on it."""
        return state

    def anchor(self, state: State, parameters: Tensors, step: Tensors) -> dict[str, Tensor]:
        """The parameters after an implicit step of the penalty, `step` (0-d or per entry) being the step size times the strength."""
        return {}

    def observe(self, state: State, before: Tensors, after: Tensors, gradients: Tensors) -> State:
        """The state after one optimizer step from `before` to `after`, `gradients` being the task loss's at `before`."""
        return state

    def distil(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """The penalty on one old head's outputs (M, C), `teacher` being those of θ* on the same batch; without the strength."""
        return outputs.new_zeros(())

    def code_drift(self, state: State, features: Tensor, teacher: Tensor) -> Tensor:
        """The penalty on features (M, N), `teacher` being those of θ* on the same batch; without the strength."""
        return features.new_zeros(())

    def fit(self, batches: Iterable[tuple[Tensor, Callable[[Tensor], Tensor]]], task: int) -> Tensor:
        """What codes the features of a task that ended, (F, …), one a member, trained on batches of (features (F, M, N), the task's loss,
        summed over members, with other features in their place)."""
        raise NotImplementedError

    def coded(self, state: State, encoder: Tensor) -> State:
        """The state with what `fit` found for one member."""
        return state

    def project(self, state: State, parameters: Tensors) -> dict[str, Tensor]:
        """Those parameters that must not stay where a step took them, put right."""
        return {}

    def turn(self, state: State, parameters: Tensors, epoch: int, epochs: int) -> tuple[State, dict[str, Tensor]]:
        """(state, changed parameters) at the start of an epoch, counted from 0, of a task of `epochs`."""
        return state, {}

    def turning(self, epoch: int, epochs: int) -> bool:
        """Whether `turn` does anything at the start of this epoch."""
        return False

    def evaluated(self, state: State, parameters: Tensors, task: int) -> dict[str, Tensor]:
        """The parameters (those that differ) with which task `task`, counted from 0, is judged; between tasks."""
        return {}

    @property
    def drop_rate(self) -> float:
        """The share of nodes that `dropped` is given as turned off."""
        return 0.0

    def dropped(self, state: State, parameters: Tensors, off: Tensors) -> dict[str, Tensor]:
        """The parameters of a training step's forward pass, of those that `off` (N,) names: whether each of its N nodes is turned off."""
        return {}

    def wire(self, state: State, wiring: Wiring) -> State:
        """For methods with gates: the state of a network wired like this."""
        return state

    def gate(self, state: State, share: Tensor | float) -> dict[str, Tensor]:
        """{layer: its neurons' gates (N,)} while training, `share` (0 to 1) of the epoch's batches being over."""
        return {}

    def kept_gate(self, state: State, task: int | None) -> dict[str, Tensor]:
        """The gates that task `task` is judged with; None: the present task, which has not ended."""
        return {}

    def gate_penalty(self, state: State, gates: Tensors) -> Tensor:
        """What the gates cost, without the strength."""
        return next(iter(gates.values())).new_zeros(())

    def learn_gates(self, state: State, gradients: Tensors, share: Tensor | float, lr: Tensor) -> State:
        """The state after one step of what the gates are made of, `gradients` being ∂loss/∂gate."""
        return state

    def importance(self, state: State) -> Tensors | None:
        """Ω by name, of which `capacity` counts what is free; None where the method has no such thing."""
        return state.get("omega")


@dataclass(frozen=True)
class NoPreserver(Preserver):
    """Plain fine-tuning: nothing is kept."""

    name: ClassVar[str] = "none"
    strength: float = 0.0


def counted(parameters: Tensors) -> dict[str, Tensor]:
    """{"tasks": 0}: how many tasks have ended, for states that must know."""
    return {"tasks": torch.zeros_like(next(iter(parameters.values())).detach().flatten()[0], dtype=torch.int64)}


def mine(state: State, name: str) -> Tensor | None:
    """Which entries are the present task's own head; None: none. state["head"] holds the number of an entry's task, −1: shared."""
    head = state.get("head", {}).get(name)
    return None if head is None else head == state["count"]["tasks"]


def foreign(state: State, name: str) -> Tensor | None:
    """Which entries are the heads of other tasks, which the present one has no say in; None: none."""
    head = state.get("head", {}).get(name)
    return None if head is None else (head >= 0) & (head != state["count"]["tasks"])


def refuse_statistics(preserve: Preserver, buffers: Iterable[str]) -> None:
    """For methods that keep old tasks exactly: running statistics would change them."""
    moving = [name for name in buffers if name.rpartition(".")[2] in ("running_mean", "running_var")]
    if moving:
        raise ValueError(
            f"{type(preserve).__name__} keeps old tasks to the bit, but {moving[0]!r} changes with every batch of a new one; "
            "use a network without batch normalisation (LayerNorm or GroupNorm have no such statistics)"
        )


def widened(parameter: Tensor) -> Tensor:
    """A detached copy in at least float32: importances and anchors outlive many small steps."""
    copy = parameter.detach().clone()
    return copy.float() if copy.dtype in (torch.float16, torch.bfloat16) else copy
