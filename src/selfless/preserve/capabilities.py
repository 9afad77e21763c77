"""Capabilities: what a preserver may do besides a penalty on θ. A method inherits those it has; keeper and engine ask for them.

    KnowsHeads   is told whose head each parameter is                                          LwF, IMM, PackNet, HAT
    Anchored     has Ω and θ*, so that its penalty can be taken implicitly                      MAS, EWC, SI, RWalk, IMM
    Observes     sees every optimizer step                                                     SI, RWalk
    Distils      compares the outputs of old heads with those of a teacher, in the loss         LwF
    Encodes      trains a code of the task's features; compares codes, in the loss              EBLL
    Projects     puts parameters back after each step                                          PackNet, HAT, LwF's warm-up
    Phased       changes its phase at the start of some epochs                                 PackNet's pruning, LwF's warm-up
    Gated        multiplies hidden neurons by gates of the task                                HAT
    Drops        replaces the parameters of some nodes during a training step                  IMM's drop-transfer
    Evaluates    evaluates a task with other parameters than those trained                     PackNet, IMM
    Freezes      keeps old tasks to the bit, so the network may have no running statistics     PackNet, HAT

Every function is pure: state in, new state out. The keeper calls it on one state, the engine maps it over the states of a fleet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from torch import Tensor

from selfless.functional import Anchor
from selfless.network.wiring import Wiring

State = dict[str, dict[str, Tensor]]
Tensors = Mapping[str, Tensor]
Features = tuple[Tensor, Callable[[Tensor], Tensor]]  # features (F, M, N), and the task's loss summed over F, as a function of features


class KnowsHeads(ABC):  # noqa: B024
    """Is told which parameters belong to the head of one task alone. Uses the state's group "head" and its count of tasks."""

    def place_heads(self, state: State, owners: Tensors) -> State:
        """Return the state with the owner of each entry: the number of its task, or −1 where tasks share it."""
        return {**state, "head": {**state["head"], **owners}}

    @staticmethod
    def in_own_head(state: State, name: str) -> Tensor | None:
        """The entries of a parameter that are the present task's own head; None if no head is known there."""
        head = state["head"].get(name)
        return None if head is None else head == state["count"]["tasks"]

    @staticmethod
    def in_other_head(state: State, name: str) -> Tensor | None:
        """The entries of a parameter that are heads of other tasks; None if no head is known there."""
        head = state["head"].get(name)
        return None if head is None else (head >= 0) & (head != state["count"]["tasks"])


class Anchored(ABC):
    """Penalises Σ Ω(θ − θ*)², which can be taken implicitly after each optimizer step: stable at any strength."""

    @abstractmethod
    def anchor(self, state: State) -> Anchor:
        """Return Ω and θ*; both empty before the first task ended."""


class Observes(ABC):
    """Sees every optimizer step of a task."""

    @abstractmethod
    def start_path(self, state: State, parameters: Tensors) -> State:
        """Return the state at the first step of a task, which begins at `parameters`."""

    @abstractmethod
    def observe(self, state: State, before: Tensors, after: Tensors, gradients: Tensors) -> State:
        """Return the state after a step from `before` to `after`; `gradients` are the task loss's at `before`."""


class Distils(ABC):
    """Compares the outputs of old heads with those of a teacher network on the same batch."""

    @abstractmethod
    def teacher(self, state: State) -> Tensors:
        """Return the teacher's parameters."""

    @abstractmethod
    def distil(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Return the penalty on the outputs (M, C) of one old head, given the teacher's; without the strength."""


class Encodes(Distils):
    """Also keeps a code of each old task's features: the input of the head."""

    @abstractmethod
    def fit(self, batches: Iterable[Features], task: int) -> Tensor:
        """Train the encoders of task `task`, one for each member, (F, …), on batches of features."""

    @abstractmethod
    def add_encoder(self, state: State, encoder: Tensor) -> State:
        """Return the state with the encoder of one more task, one member's part of what `fit` returns."""

    @abstractmethod
    def code_drift(self, state: State, features: Tensor, teacher: Tensor) -> Tensor:
        """Return the penalty on features (M, N), given the teacher's on the same batch; without the strength."""


class Projects(ABC):
    """Puts parameters back after each optimizer step, whatever the optimizer did."""

    @abstractmethod
    def project(self, state: State, parameters: Tensors) -> dict[str, Tensor]:
        """Return the parameters that must not stay where the step took them, corrected."""


class Phased(ABC):
    """Has phases within a task: a warm-up, pruning."""

    @abstractmethod
    def starts_phase(self, epoch: int, epochs: int) -> bool:
        """Return True if a phase begins at epoch `epoch`, counted from 0, of a task of `epochs`."""

    @abstractmethod
    def begin_phase(self, state: State, parameters: Tensors, epoch: int, epochs: int) -> tuple[State, dict[str, Tensor]]:
        """Return (state, changed parameters) at the start of that epoch."""

    def warms_up(self, task: int) -> bool:
        """Return True if the task's own head is to be trained alone at first: a caller that skips it is warned."""
        return False


class Gated(ABC):
    """Multiplies the outputs of hidden neurons by gates that each task learns."""

    @abstractmethod
    def wire(self, state: State, wiring: Wiring) -> State:
        """Return the state for a network whose neurons and weights are wired like this."""

    @abstractmethod
    def gate_count(self, state: State) -> int:
        """Return how many numbers `start_gates` needs."""

    @abstractmethod
    def start_gates(self, state: State, noise: Tensor) -> State:
        """Return the state at the start of a task, its gates made of `noise` from N(0, 1), (gate_count,)."""

    @abstractmethod
    def gate(self, state: State, share: Tensor | float) -> dict[str, Tensor]:
        """Return {layer: its neurons' gates (N,)} in training, after a share (0 to 1) of the epoch's batches."""

    @abstractmethod
    def hard_gate(self, state: State, task: int | None) -> dict[str, Tensor]:
        """Return the gates that task `task` is evaluated with; None: the present task, which has not ended."""

    @abstractmethod
    def gate_penalty(self, state: State, gates: Tensors) -> Tensor:
        """Return what the gates cost, without the strength."""

    @abstractmethod
    def step_gates(self, state: State, gradients: Tensors, share: Tensor | float, lr: Tensor) -> State:
        """Return the state after a training step of the gates, given ∂loss/∂gate."""


class Drops(ABC):
    """Turns nodes of hidden layers off at random during training."""

    @property
    @abstractmethod
    def drop_rate(self) -> float:
        """The share of nodes that are turned off in a step; 0 switches dropping off."""

    @abstractmethod
    def drop_nodes(self, state: State, parameters: Tensors, off: Tensors) -> dict[str, Tensor]:
        """Return the parameters of a step's forward pass; `off[name]` (N,) says which of a parameter's N nodes are turned off."""


class Evaluates(ABC):
    """Evaluates a task with other parameters than those that were trained last."""

    by_task: ClassVar[bool] = False  # True if these parameters differ between tasks, so that the task must be known

    @abstractmethod
    def evaluated_parameters(self, state: State, parameters: Tensors, task: int) -> dict[str, Tensor]:
        """Return the parameters (those that differ) that task `task`, counted from 0, is evaluated with, between tasks."""


class Freezes(ABC):  # noqa: B024
    """Keeps old tasks to the bit. Batch normalisation is refused: its running statistics change with every batch of a new task."""

    def check_network(self, buffers: Iterable[str]) -> None:
        """Raise for a network, given by the names of its buffers, that has running statistics."""
        moving = [name for name in buffers if name.rpartition(".")[2] in ("running_mean", "running_var")]
        if moving:
            raise ValueError(
                f"{type(self).__name__} keeps old tasks to the bit, but {moving[0]!r} changes with every batch of a new one; "
                "use a network without batch normalisation (LayerNorm or GroupNorm have no such statistics)"
            )


CAPABILITIES = (KnowsHeads, Anchored, Observes, Distils, Encodes, Projects, Phased, Gated, Drops, Evaluates, Freezes)
