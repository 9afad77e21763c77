"""Capabilities: what a preserver may do besides a penalty on θ. A method inherits the ones it has; keeper and engine test for them.

    KnowsHeads   knows which parameters are the head of which task                              LwF, IMM, PackNet, HAT, AGSCL
    Anchored     has Ω and θ*, so that its penalty can be applied implicitly                    MAS, EWC, SI, RWalk, IMM
    Observes     reads every optimizer step                                                     SI, RWalk
    Distils      compares the outputs of old heads with those of a teacher, in the loss         LwF
    Encodes      trains an encoder of the task's features; compares codes, in the loss          EBLL
    Replays      keeps samples of old tasks; adds a loss on a batch of them                    Replay, DERpp
    Projects     resets some parameters after each step
    Holds        a Projects whose values change only with a phase or task                       PackNet, HAT, LwF's warm-up
    ProjectsSteps  projects each step, by what the inputs of a layer spanned in old tasks       GPM, SGP
    Proximal     takes a proximal step after each optimizer step, for penalties with a kink     AGSCL
    Phased       starts a new phase at some epochs                                              PackNet's pruning, LwF's warm-up
    Wired        knows which hidden neurons are at the two ends of every weight                 HAT, AGSCL
    Gated        multiplies hidden neurons by gates of the task                                 HAT
    WeighsNodes  reads how active each neuron was in a task; may restart weights afterwards     AGSCL
    Drops        replaces the parameters of random nodes during a training step                 IMM's drop-transfer
    Evaluates    evaluates a task with parameters other than the trained ones                   PackNet, IMM
    Freezes      keeps old tasks exactly, so the network must not have running statistics       PackNet, HAT

Every function is pure: state in, new state out. The keeper calls it on one state, the engine maps it over the states of a fleet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from selfless.functional import Anchor, damping, largest_curvature, reservoir
from selfless.network.wiring import Wiring

State = dict[str, dict[str, Tensor]]
Tensors = Mapping[str, Tensor]
Features = tuple[Tensor, Callable[[Tensor], Tensor]]  # features (F, M, N); the task loss summed over F, as a function of them


class KnowsHeads(ABC):  # noqa: B024
    """Knows which parameters belong to the head of a single task. Uses the groups "head" and "count" of the state."""

    def place_heads(self, state: State, owners: Tensors) -> State:
        """Return the state with the owner of each entry: the number of its task, or −1 if tasks share it."""
        return {**state, "head": {**state["head"], **owners}}

    @staticmethod
    def in_own_head(state: State, name: str) -> Tensor | None:
        """Return a mask of the entries that belong to the current task's head; None if the parameter is in no head."""
        head = state["head"].get(name)
        return None if head is None else head == state["count"]["tasks"]

    @staticmethod
    def in_other_head(state: State, name: str) -> Tensor | None:
        """Return a mask of the entries that belong to heads of other tasks; None if the parameter is in no head."""
        head = state["head"].get(name)
        return None if head is None else (head >= 0) & (head != state["count"]["tasks"])


class Anchored(ABC):
    """Penalises Σ Ω(θ − θ*)². It can be applied implicitly after each optimizer step, which is stable at any strength."""

    @abstractmethod
    def anchor(self, state: State) -> Anchor:
        """Return Ω and θ*; both are empty before the end of the first task."""


class Observes(ABC):
    """Reads every optimizer step of a task."""

    @abstractmethod
    def start_path(self, state: State, parameters: Tensors) -> State:
        """Return the state at the first step of a task, which begins at `parameters`."""

    @abstractmethod
    def observe(self, state: State, before: Tensors, after: Tensors, gradients: Tensors) -> State:
        """Return the state after a step from `before` to `after`; `gradients` are those of the task loss at `before`."""


class Distils(ABC):
    """Compares the outputs of old heads with those of a teacher network on the same batch.

    With the group "curvature" in its state, {"largest": κ}, its strength is damped, so that no strength diverges
    (`selfless.functional.damping`). Without that group the plain gradient is used.
    """

    @abstractmethod
    def teacher(self, state: State) -> Tensors:
        """Return the teacher's parameters."""

    @abstractmethod
    def distil(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Return the penalty on the outputs (M, C) of one old head, given those of the teacher; without the strength."""

    def classes_last(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return the outputs of a head in a user's loop as `distil` takes them; `labels` are those of the batch, if it has some."""
        return outputs

    def check_outputs(self, outputs: Tensor) -> None:  # noqa: B027
        """Raise ValueError if the outputs (M, C) of a head in a user's loop cannot be compared."""

    @staticmethod
    def is_damped(state: State) -> bool:
        """Return True if the strength is damped."""
        return bool(state.get("curvature"))

    @staticmethod
    def measure_curvature(state: State, value: Tensor, square: Tensor) -> State:
        """Return the state with κ after a measurement: D is `value`, ‖∇D‖² is `square`."""
        return {**state, "curvature": {"largest": largest_curvature(state["curvature"]["largest"], value, square)}}

    @staticmethod
    def damping(state: State, step_lambda: Tensor) -> Tensor:
        """Return the factor of the strength, 1/(1 + step λ κ); `step_lambda` is step λ."""
        return damping(step_lambda, state["curvature"]["largest"])


class Encodes(Distils):
    """Also keeps an encoder for each old task. It encodes the features, which are the input of the head."""

    @abstractmethod
    def fit(self, batches: Iterable[Features], task: int) -> Tensor:
        """Train the encoders of task `task`, one per member, on batches of features; return them, (F, …)."""

    @abstractmethod
    def add_encoder(self, state: State, encoder: Tensor) -> State:
        """Return the state with the encoder of one more task: the entry of one member in what `fit` returns."""

    @abstractmethod
    def code_drift(self, state: State, features: Tensor, teacher: Tensor) -> Tensor:
        """Return the penalty on features (M, N), given those of the teacher on the same batch; without the strength."""


class Replays(ABC):
    """Keeps samples of old tasks in the group "memory" of its state, and adds a loss on a batch drawn from them. It uses old data.

    The memory has one row per sample. Its tensors are

        key           a random number: the samples with the smallest keys stay (`selfless.functional.reservoir`)
        label         the class, as a column of the outputs
        first, last   the output columns of the sample's task: first ≤ column < last
        task          the number of the task
        logits        the outputs at the end of the task, if `keeps_logits`
        input.NAME    what the network is called with
    """

    keeps_logits: ClassVar[bool] = False
    samples: int  # how many samples the memory has
    batch: int  # how many of them a step replays

    @abstractmethod
    def replay_loss(self, outputs: Tensor, rows: Tensors, columns: Tensor) -> Tensor:
        """Return the loss of each sample (…, B), given its outputs (…, B, C) and the `rows` of the memory; without the strength.

        `columns` (…, B, C) is True for the columns that the sample is classified among. Axes before B are members of a fleet.
        """

    def memory(self, state: State) -> Tensors:
        """Return the rows of the memory; empty before the end of the first task."""
        return state["memory"]

    def remember(self, state: State, new: Tensors) -> State:
        """Return the state after more samples of the stream: of old and new rows, those with the smallest keys."""
        old = state["memory"]
        rows = {name: torch.cat([old[name], t]) for name, t in new.items()} if old else new
        kept = reservoir(rows["key"], self.samples)
        return self.with_memory(state, {name: t[kept] for name, t in rows.items()})

    @staticmethod
    def with_memory(state: State, rows: Tensors) -> State:
        """Return the state with other rows in the memory."""
        return {**state, "memory": dict(rows)}

    @staticmethod
    def own_columns(rows: Tensors, outputs: Tensor) -> Tensor:
        """Return a mask (…, B, C) of the output columns of each sample's task."""
        columns = torch.arange(outputs.shape[-1], device=outputs.device)
        return (rows["first"].unsqueeze(-1) <= columns) & (columns < rows["last"].unsqueeze(-1))


class Projects(ABC):
    """Resets parameters after each optimizer step, whatever the optimizer did."""

    @abstractmethod
    def project(self, state: State, parameters: Tensors) -> dict[str, Tensor]:
        """Return the corrected values of the parameters that the step must not change."""


class Holds(Projects):
    """Resets entries of the parameters to values that only a new phase or task changes, so a step can do it while it writes them."""

    @abstractmethod
    def held(self, state: State) -> dict[str, tuple[Tensor, Tensor]]:
        """Return {parameter: (mask, value)}: the entries that a step must not change, and the values that they have."""

    def project(self, state: State, parameters: Tensors) -> dict[str, Tensor]:
        """Reset the held entries."""
        held = {n: pair for n, pair in self.held(state).items() if n in parameters}
        return {n: torch.where(mask, value.to(parameters[n].dtype), parameters[n]) for n, (mask, value) in held.items()}


class ProjectsSteps(KnowsHeads):
    """Projects each optimizer step, by the inputs that each layer had in old tasks. Uses the groups "head" and "count" of the state.

    When a task ends, the network runs on `samples` of its samples. A weight of a linear layer or convolution has C = Σ x xᵀ (d, d), where x
    is what a row of the weight is multiplied with: an input, or a patch of it.
    """

    samples: int

    @abstractmethod
    def add_inputs(self, state: State, moments: Tensors, others: Iterable[str], like: Tensors) -> State:
        """Return the state after a task in which the layers had the inputs `moments`, {weight: C}.

        others   the names of all other parameters that the task used: biases, norms, embeddings, …
        like     the parameters, for precision and device
        """

    @abstractmethod
    def trim(self, state: State) -> State:
        """Return the state, of one member or stacked, without the entries that no member uses. Called after `add_inputs`."""

    @abstractmethod
    def project_step(self, state: State, before: Tensors, after: Tensors) -> dict[str, Tensor]:
        """Return the corrected parameters after an optimizer step from `before` to `after`; only those that differ."""

    @staticmethod
    def reads_inputs(state: State, name: str) -> bool:
        """Return False if a parameter belongs to the heads of single tasks, whose inputs do not matter."""
        head = state["head"].get(name)
        return head is None or bool((head < 0).any())


class Proximal(ABC):
    """Takes a proximal step after each optimizer step, in all tasks. A gradient step would never reach the kink of a norm exactly."""

    @abstractmethod
    def proximal_step(self, state: State, parameters: Tensors, steps: Tensors, strength: Tensor) -> dict[str, Tensor]:
        """Return argmin_θ ½‖θ − parameters‖² + step · R(θ), where R is the penalty with its strength; only parameters that may differ.

        steps   {parameter: how far a constant gradient of 1 moves it per iteration}; those of SGD with momentum μ are lr/(1 − μ)
        """


class Phased(ABC):
    """Has phases within a task: a warm-up, pruning."""

    @abstractmethod
    def starts_phase(self, epoch: int, epochs: int) -> bool:
        """Return True if a phase begins at epoch `epoch`, counted from 0, of a task with `epochs` epochs."""

    @abstractmethod
    def begin_phase(self, state: State, parameters: Tensors, epoch: int, epochs: int) -> tuple[State, dict[str, Tensor]]:
        """Return (state, changed parameters) at the start of that epoch."""

    def warms_up(self, task: int) -> bool:
        """Return True if task `task` should train its new head alone at first. The keeper warns if a loop skips this."""
        return False

    def without_warmup(self) -> Any:
        """Return the same method without its warm-up, which messages suggest; None if it cannot go without."""
        return None


class Wired(ABC):
    """Knows which hidden neurons are at the two ends of every weight."""

    @abstractmethod
    def wire(self, state: State, wiring: Wiring) -> State:
        """Return the state for a network with this wiring of neurons and weights."""


class WeighsNodes(Wired):
    """Reads how active every hidden neuron was in a task. The weights of the next task may start from other values.

    Uses the group "place" of the state: {layer: the numbers of its neurons}, from the wiring.
    """

    @staticmethod
    def places(state: State) -> Tensors:
        """Return {layer: the numbers of its neurons (N,)}."""
        return state["place"]

    @abstractmethod
    def add_activity(self, state: State, activity: Tensors) -> State:
        """Return the state with the mean |h| of every neuron over a task's samples, {layer: (N,)}. Called before `consolidate`."""

    @abstractmethod
    def restart(self, state: State, parameters: Tensors, strength: Tensor) -> dict[str, Tensor]:
        """Return the values that the next task starts from, only those that may differ. Called after `consolidate`."""


class Gated(Wired):
    """Multiplies the outputs of hidden neurons by gates that each task learns."""

    @property
    def has_own_rate(self) -> bool:
        """True if `step_gates` ignores the learning rate of the parameters, which may be that of another optimizer."""
        return True

    @abstractmethod
    def gate_count(self, state: State) -> int:
        """Return how many random numbers `start_gates` needs."""

    @abstractmethod
    def start_gates(self, state: State, noise: Tensor) -> State:
        """Return the state at the start of a task, with gates from `noise`: gate_count numbers drawn from N(0, 1)."""

    @abstractmethod
    def gate(self, state: State, share: Tensor | float) -> dict[str, Tensor]:
        """Return {layer: gates of its neurons (N,)} in training, after a share (0 to 1) of the epoch's batches."""

    @abstractmethod
    def hard_gate(self, state: State, task: int | None) -> dict[str, Tensor]:
        """Return the gates that task `task` is evaluated with; None means the current task, which has not ended."""

    @abstractmethod
    def gate_penalty(self, state: State, gates: Tensors) -> Tensor:
        """Return the penalty on the gates, without the strength."""

    @abstractmethod
    def step_gates(self, state: State, gradients: Tensors, share: Tensor | float, lr: Tensor) -> State:
        """Return the state after a training step of the gates, given ∂loss/∂gate."""


class Drops(ABC):
    """Turns random nodes of hidden layers off during training."""

    @property
    @abstractmethod
    def drop_rate(self) -> float:
        """The share of nodes that are off in a step; at 0 no node is ever off."""

    @abstractmethod
    def drop_nodes(self, state: State, parameters: Tensors, off: Tensors) -> dict[str, Tensor]:
        """Return the parameters for the forward pass of a step; `off[name]` (N,) is True for the nodes of a parameter that are off."""


class Evaluates(ABC):
    """Evaluates a task with parameters that differ from the trained ones."""

    by_task: ClassVar[bool] = False  # True if these parameters differ from task to task, so that the task must be known

    @abstractmethod
    def evaluated_parameters(self, state: State, parameters: Tensors, task: int) -> dict[str, Tensor]:
        """Return the parameters that task `task`, counted from 0, is evaluated with; only those that differ from `parameters`."""


class Freezes(ABC):  # noqa: B024
    """Keeps old tasks exactly. Batch normalisation is refused: its running statistics change with every batch of a new task."""

    def check_network(self, buffers: Iterable[str]) -> None:
        """Raise ValueError for a network with running statistics; `buffers` are the names of its buffers."""
        moving = [name for name in buffers if name.rpartition(".")[2] in ("running_mean", "running_var")]
        if moving:
            raise ValueError(
                f"{type(self).__name__} keeps old tasks exactly, but {moving[0]!r} changes with every batch of a new task; "
                "use a network without batch normalisation (LayerNorm and GroupNorm have no running statistics)"
            )
