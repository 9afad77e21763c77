"""A fleet: stacked networks that train one task after another. The training step is in `selfless.engine.step`.

Members differ in numbers (seed, strengths, σ, lr, epochs, ramp), in the sparsifier, and in preservers whose steps are the same. They share
all other settings. The loss of a member depends only on its own parameters, so the gradient of the summed loss contains the gradient of
every member. A member whose epochs are over has the learning rate 0 and does not change. A step reads and writes only tensors that outlive
it, so a CUDA graph can capture it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from selfless.data import Augment
from selfless.engine import rng
from selfless.engine.batches import EVALUATE, FleetData, Numbers
from selfless.engine.cuda_graph import CannotCapture, capture, copied, undone
from selfless.engine.importance import measure_task
from selfless.engine.inhibition import slots
from selfless.engine.inputs import add_activity, add_inputs
from selfless.engine.kinds import kinds_of
from selfless.engine.memory import fill_memory
from selfless.engine.part import Part
from selfless.engine.rates import Rates
from selfless.engine.stack import Stack, Tensors, column
from selfless.engine.step import Step
from selfless.network.given import network_title
from selfless.network.wiring import Wiring
from selfless.preserve import State
from selfless.preserve.base import read_states
from selfless.preserve.capabilities import Anchored, Freezes, Observes
from selfless.spec import Run

AUGMENT = {"none": None, "flip": Augment(flip=True), "crop-flip": Augment(crop=4, flip=True), "resized": Augment(resized=56, flip=True)}


class Fleet:
    """Stacked parameters, momentum, preservers' states, α and the rates of each member."""

    def __init__(self, runs: Sequence[Run], stack: Stack, params: Tensors, buffers: Tensors, device: torch.device) -> None:
        self.runs, self.stack, self.device = list(runs), stack, device
        self.run = runs[0]  # for the settings that all members share
        self.size = len(runs)
        self.params, self.buffers = params, buffers
        self.trained = {n: self.params[n] for n in stack.trainable}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.trained.items()}  # SGD: u = lr v; Adam: m
        self.second = {n: torch.zeros_like(p) for n, p in self.trained.items() if self.run.optimizer != "sgd"}  # Adam: v
        for term in self.run.preserve.parts:
            if isinstance(term, Freezes):
                term.check_network(buffers)
        self.parts = [Part(terms, stack, self.trained) for terms in zip(*(r.preserve.parts for r in runs), strict=True)]
        self.kinds = kinds_of([r.preserve for r in runs])
        self.slots = slots([r.sparsify for r in runs])
        self.rates = Rates(runs, self.slots, device)
        self.seeds = torch.tensor([r.seed for r in runs], device=device)
        self.augment = AUGMENT[self.run.augment]
        self.alpha: Tensors = {}
        self.task_alpha: Tensors = {}  # α of the newest task alone, for its capacity
        self.tasks = 0
        self._per_sample: Numbers | None = None
        self.refused = False  # True if a step of this network could not be captured
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # (batch size, measures) → the captured step
        self.loss_sums = torch.empty(0, self.size, device=device)  # of the epoch so far, after each of its steps
        self.before: list[Tensor] = []  # what a step changes, as it was at the start of the epoch
        self.step = Step(self)

    @property
    def states(self) -> list[State]:
        """The stacked state of each preserver."""
        return [part.state for part in self.parts]

    @property
    def state(self) -> State:
        """The stacked state of the only preserver; for a sum use `states`."""
        (part,) = self.parts
        return part.state

    @property
    def lr(self) -> Tensor:
        return self.rates.lr

    @property
    def step_number(self) -> Tensor:
        return self.step.step_number

    def wire(self, wiring: Wiring) -> None:
        """Tell the preservers that need it which neurons are at the two ends of every weight."""
        for part in self.parts:
            part.wire(wiring)

    def place_heads(self, tasks: Sequence[tuple[range, ...]], outputs: int) -> None:
        """Tell the preservers which outputs belong to the head of a single task."""
        for part in self.parts:
            part.place_heads(tasks, outputs)

    # ----------------------------------------------------------------------------------------------------------------- a task
    def begin_task(self, data: FleetData, heads: tuple[range, ...], outputs: int, past: Sequence[range] = ()) -> None:
        """Start a task with a new optimizer, as in the authors' code; `heads` are its output columns, `past` those of earlier tasks."""
        self.graphs = {}
        self.step.begin_task(data, heads, outputs, tuple(dict.fromkeys(past)))
        for v in self.optimizer_tensors():
            v.zero_()
        self.rates.begin_task(math.ceil(data.n / self.run.batch), self.run.schedule)
        self._prepare_penalties()
        self.refresh_shares()
        self.step.update.hold_entries()

    def _prepare_penalties(self) -> None:
        """Prepare the pair forms of this task, whose gradients join the backward pass. All other penalties are added to the loss."""
        x, _ = self._sample(self.step.data)
        self.stack.watch(x)
        if self.stack.inhibits and self.stack.layers and not any(isinstance(part.term, Observes) for part in self.parts):
            widths = self.stack.widths(self.params, self.buffers, x)
            for slot in self.slots:
                slot.prepare(widths, self.alpha, self.lr)

    def set_lr(self, lr: Tensor) -> None:
        """Set new learning rates between epochs, and scale the momentum of SGD, which contains them."""
        ratio = torch.where(self.lr > 0, lr / self.lr, torch.zeros_like(lr))
        for v in self.momentum.values() if self.run.optimizer == "sgd" else ():
            v.mul_(column(ratio, v))
        self.lr.copy_(lr)
        self.refresh_shares()

    def refresh_shares(self) -> None:
        """Recompute all values that depend on the learning rates, after a change of rate or at a new task."""
        self.rates.refresh()
        self.step.update.refresh_shares()

    def anchored(self, part: Part) -> bool:
        """Return True if the penalty of this preserver is applied implicitly and a task has ended."""
        implicit = self.run.anchor == "implicit" and self.tasks > 0 and isinstance(part.term, Anchored)
        return implicit and isinstance(part.term, Anchored) and bool(part.term.anchor(part.state).omega)

    def begin_epoch(self, task: int, epoch: int) -> None:
        """Stop members whose epochs are over, start phases, draw the order of samples."""
        rates = self.rates
        if rates.factors is None and epoch in rates.epochs:
            self.set_lr(torch.where(torch.tensor([epoch < e for e in rates.epochs], device=self.device), self.lr, 0.0))
        if rates.ramp(epoch):
            self.refresh_shares()
        if sum(part.begin_epoch(self.seeds, task, epoch, self.run.epochs) for part in self.parts):
            self.graphs = {}  # they contain the addresses of the old state
            self.step.update.hold_entries()
        self.step.begin_epoch(task, epoch)
        self.before = copied([t.detach() for t in self.changing()], self.before)

    def starts_phase(self, epoch: int) -> bool:
        """Return True if a preserver starts a phase at this epoch."""
        return any(part.starts_phase(epoch, self.run.epochs) for part in self.parts)

    def train_epoch(
        self, task: int, epoch: int, after_step: Callable[[], object] = lambda: None, at_end: Callable[[], object] = lambda: None
    ) -> tuple[list[float], list[float]]:
        """Train one epoch; return the mean task loss and the training accuracy of every member.

        after_step   called after each step; on a GPU the step may still be running
        at_end       called after the last one, before anything waits for the GPU
        """
        self.begin_epoch(task, epoch)
        batch, n = self.run.batch, self.step.data.n
        self.loss_sums = torch.empty(math.ceil(n / batch), self.size, device=self.device)
        self._take_steps(task, epoch, len(self.loss_sums), after_step)
        if epoch + 1 < self.run.epochs:  # while the GPU still takes these steps
            self.step.prepare_epoch(task, epoch + 1)
        at_end()
        return (self.step.loss_sum.double() / n).tolist(), (self.step.hits.double() / n).tolist()

    def _take_steps(self, task: int, epoch: int, count: int, after_step: Callable[[], object]) -> None:
        """Take the first `count` steps of an epoch."""
        batch, n, drawing = self.run.batch, self.step.data.n, self.runs if self.stack.draws else self.runs[:1]
        with torch.random.fork_rng(devices=[]):
            self.stack.begin_training([rng.one_seed(run.seed, "dropout", task, epoch) for run in drawing])
            phase = max((e for e in range(epoch + 1) if self.starts_phase(e)), default=0)
            for number, start in enumerate(range(0, count * batch, batch), (epoch - phase) * math.ceil(n / batch)):
                size, measures = min(batch, n - start), self.step.measures(number)
                graph = self._captured(size, measures, start == 0) if self.capturable else None
                if graph is not None:
                    graph.replay()
                else:
                    self.step(size, measures)
                self.loss_sums[start // batch].copy_(self.step.loss_sum)
                after_step()

    @contextmanager
    def rewound(self, task: int, epoch: int, steps: int) -> Iterator[None]:
        """Inside `with`: the fleet as it was after the first `steps` steps of the epoch that has just ended. They are taken again."""
        with undone(self.changing()):
            with torch.no_grad():
                for tensor, old in zip(self.changing(), self.before, strict=True):
                    tensor.copy_(old)
            self._take_steps(task, epoch, steps, lambda: None)
            yield

    def undo_epoch(self, m: int) -> None:
        """Give member m, whose numbers are not finite, its state at the start of the epoch again, and the learning rate 0.

        It keeps this rate for the rest of the task, except in the schedules cosine and step, which set the rate in every step.
        """
        own = [*self.params.values(), *self.buffers.values(), *self.optimizer_tensors(), *(t for p in self.parts for t in p.step_tensors())]
        with torch.no_grad():
            for tensor, old in zip(own, self.before, strict=False):  # `changing` begins with them
                tensor[m] = old[m]
        self.set_lr(torch.where(torch.arange(self.size, device=self.device) == m, 0.0, self.lr))

    def _sample(self, data: FleetData) -> tuple[Tensor, Tensor]:
        """Return the first sample of every member twice, (F, 2, …): batch statistics need two."""
        return data.batch(torch.zeros(self.size, 2, dtype=torch.int64, device=self.device), self.still)

    def at_once(self, data: FleetData, least: int = EVALUATE, *, trains: bool = False) -> int:
        """Return how many samples per member to put into one pass (`FleetData.at_once`)."""
        if self._per_sample is None:
            self._per_sample = self.stack.numbers(self._sample(data)[0], self.step.dtype.itemsize)
        return data.at_once(self._per_sample, self.stack.mixes_samples, least, trains=trains)

    @property
    def still(self) -> Augment | None:
        """The augmentation without its randomness, for evaluation."""
        return self.augment.still() if self.augment else None

    # ------------------------------------------------------------------------------------------------------------ CUDA graphs
    @property
    def capturable(self) -> bool:
        """True if a step can be captured as a CUDA graph."""
        plain = self.device.type == "cuda" and not self.step.data.first.mapped
        return plain and not self.refused and all(part.term.capturable for part in self.parts)

    def _captured(self, size: int, measures: bool, is_first: bool) -> torch.cuda.CUDAGraph | None:
        """Return the captured step on `size` samples, captured now if need be; None if it cannot be. `is_first`: it begins an epoch."""
        if (size, measures) not in self.graphs:
            try:
                self._capture(size, measures, self.before if is_first else [])
            except CannotCapture as error:
                self.refused = True
                self.stack.forget()
                warnings.warn(
                    f"a training step of {network_title(self.run.model)} cannot be captured as a CUDA graph ({error}), so it trains "
                    "without one, which is slower; avoid .item(), .cpu() and shapes that depend on values in its forward pass",
                    stacklevel=3,
                )
        return self.graphs.get((size, measures))

    def _capture(self, size: int, measures: bool, before: list[Tensor]) -> None:
        """Capture the step on `size` samples; of a network that `vmap` cannot differentiate, with its members in turn."""
        try:
            rewind, drawn = self.step.clock.zero_, [] if self.stack.draws is None else self.stack.draws.generators
            self.graphs[size, measures] = capture(lambda: self.step(size, measures), rewind, self.changing(), drawn, before)
        except (CannotCapture, torch.cuda.OutOfMemoryError):
            raise
        except RuntimeError:
            if self.stack.native or self.stack.bound or self.stack.in_turn:
                raise
            self.stack.in_turn = True
            self._capture(size, measures, before)

    def optimizer_tensors(self) -> list[Tensor]:
        """Return the state of the optimizer."""
        return [*self.momentum.values(), *self.second.values()]

    def changing(self) -> list[Tensor]:
        """Return every tensor that a step changes and that outlives it."""
        tensors = [*self.params.values(), *self.buffers.values(), *self.optimizer_tensors()]
        tensors += [t for part in self.parts for t in part.step_tensors()] + [t for slot in self.slots for t in slot.scaled_tensors()]
        return [*tensors, *self.rates.changing(), *self.step.changing()]

    # -------------------------------------------------------------------------------------------------------- after the epochs
    def consolidate(self) -> None:
        """End a task: measure Ω and α of every member in one pass over its training data, and set θ*."""
        data, self.before = self.step.data, []  # no epoch is undone from here on: its memory is free for the importances
        for part in self.parts:
            part.close_gates(None, self.tasks)
        head = self.step.head_columns
        # A blurred task samples rows by weight. Its importance is measured on such a sample, not on all rows.
        order = None if data.weights is None else data.order(self.seeds, self.tasks, self.run.epochs)
        omegas, alpha = measure_task(self, head, order)
        for part, omega in zip(self.parts, omegas, strict=True):
            part.encode(lambda: self._shuffled("encoder"), self.params, self.buffers, head, self.tasks)
            fill_memory(part, self, head, order)
            add_inputs(part, self, order)
            add_activity(part, self, order)
            part.consolidate(omega)
        for part, strength in zip(self.parts, self.rates.preserve, strict=True):
            part.restart(strength)
        self.task_alpha = alpha
        for name, a in alpha.items():
            old = self.alpha.get(name)
            self.alpha[name] = a if old is None else old + a if self.run.alpha == "sum" else old + (a - old) / (self.tasks + 1)
        self.tasks += 1
        self.step.update.forget_shares()
        self.rates.auto.end_task()
        self._set_measured()

    def _set_measured(self) -> None:
        """Set λ of strengths "auto" to the measured ones."""
        self.rates.set_auto()
        for part, strength in zip(self.parts, self.rates.preserve, strict=True):
            if part.measured is not None:
                strength.copy_(part.measured)

    def strengths(self, m: int) -> dict[str, float]:
        """Return λ of every term of member m, by name; 0 for "auto" before it is measured."""
        found = {term.name: s for term, s in zip(self.runs[m].preserve.parts, self.rates.preserve, strict=True)}
        found |= {slot.kinds[m].name: self.rates.full(k) for k, slot in enumerate(self.slots)}
        return {name: float(s[m]) for name, s in found.items() if name != "none"}

    def _shuffled(self, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the task's data in batches, in one order drawn for this purpose."""
        data = self.step.data
        order = rng.order(rng.stream_key(self.seeds, purpose, self.tasks), data.n, data.weights)
        for rows in order.split(self.run.batch, 1):
            x, y = data.batch(rows, self.still)
            yield x.to(self.step.dtype), y

    @torch.no_grad()
    def evaluate(self, data: FleetData, columns: range | None, task: int | None = None) -> list[float]:
        """Return the accuracy of every member on `data`, among the output `columns` (None: all).

        `task` selects the parameters and gates that the preservers keep for that task; None: those that are being trained. Without
        data (an old task of a continued run) the accuracy is NaN.
        """
        hits = torch.zeros(self.size, device=self.device)
        for logits, y in self._outputs(data, columns, task):
            hits += (logits.argmax(-1) == y).sum(1)
        return (hits.double() / data.n).tolist() if data.n else [math.nan] * self.size

    @torch.no_grad()
    def evaluate_loss(self, data: FleetData, columns: range | None) -> list[float]:
        """Return the mean cross-entropy of every member on `data`, among the output `columns`, with the parameters being trained."""
        loss = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for logits, y in self._outputs(data, columns, None):
            loss += -logits.double().log_softmax(-1).gather(-1, y.unsqueeze(-1)).sum((1, 2))
        return (loss / data.n).tolist()

    def _outputs(self, data: FleetData, columns: range | None, task: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits (F, M, C) in the output `columns` and labels (F, M), counted from the first of them."""
        other: Tensors = {}
        for part in self.parts:
            other |= part.evaluated_parameters(task, self.tasks)
            part.close_gates(task, self.tasks)
        self.stack.module.eval()
        for x, y in data.passes(self.at_once(data), self.still) if data.n else ():
            with self.step.precision():
                if other:
                    logits, _ = self.stack.outputs(self.params | other, self.buffers, x.to(self.step.dtype))
                else:
                    logits, _ = self.stack.forward(self.params, self.buffers, x.to(self.step.dtype))
            yield (logits, y) if columns is None else (logits[..., columns.start : columns.stop], y - columns.start)

    # ------------------------------------------------------------------------------------------------------- saving, restoring
    def tensors(self) -> Tensors:
        """Return everything that training depends on, as flat named tensors. The states of several preservers are numbered."""
        flat = {f"params.{n}": p for n, p in self.params.items()} | {f"buffers.{n}": b for n, b in self.buffers.items()}
        flat |= {f"momentum.{n}": v for n, v in self.momentum.items()} | {f"second.{n}": v for n, v in self.second.items()}
        flat |= {f"alpha.{n}": a for n, a in self.alpha.items()}
        for number, part in zip(self._numbers, self.parts, strict=True):
            flat |= {f"state.{number}{g}.{n}": t for g, ts in part.state.items() for n, t in ts.items()}
        flat |= self.rates.auto.tensors() | {f"scale.preserve.{k}": p.measured for k, p in enumerate(self.parts) if p.measured is not None}
        return {n: t.detach() for n, t in flat.items()} | {"lr": self.lr, "step_number": self.step_number}

    @property
    def _numbers(self) -> list[str]:
        return [""] if len(self.parts) == 1 else [f"{i}." for i in range(len(self.parts))]

    def restore(self, tensors: Tensors, tasks: int) -> None:
        """Restore the state from what `tensors` returned after `tasks` tasks."""
        with torch.no_grad():
            groups = {"params": self.params, "buffers": self.buffers, "momentum": self.momentum, "second": self.second}
            for group, current in groups.items():
                for n, t in current.items():
                    t.copy_(tensors[f"{group}.{n}"])
            self.lr.copy_(tensors["lr"])
            self.step_number.copy_(tensors["step_number"])
            self.rates.auto.restore(tensors)
        self.alpha = {n.removeprefix("alpha."): t.to(self.device) for n, t in tensors.items() if n.startswith("alpha.")}
        on_device = {n: t.to(self.device) for n, t in tensors.items() if n.startswith("state.")}
        for part, state in zip(self.parts, read_states([part.term for part in self.parts], on_device), strict=True):
            part.state = state
        for k, part in enumerate(self.parts):
            measured = tensors.get(f"scale.preserve.{k}") if part.term.is_auto else None
            part.measured = None if measured is None else measured.to(self.device)
            if tasks:  # a continued run may have had a number
                part.measure_strength()
        self._set_measured()
        self.tasks = tasks
        self.step.update.forget_shares()
