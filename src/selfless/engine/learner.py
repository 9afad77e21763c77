"""The loop: task → epochs → consolidate → evaluate → record, for a fleet of one or of hundreds.

The state after every epoch is complete in one file, so a killed run goes on where it stopped: the order of batches and every other draw
depend on (seed, task, epoch) alone, and on a CPU the numbers are the same to the bit.
"""

from __future__ import annotations

import copy
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from selfless.capacity import Capacity, free_share
from selfless.data import Stream, stream
from selfless.data import locate_weights as located
from selfless.engine import draws, scenario
from selfless.engine.batches import FleetData
from selfless.engine.fleet import AUGMENT, Fleet
from selfless.engine.native import native
from selfless.engine.stack import Stack, Tensors
from selfless.files import write_atomically
from selfless.layers import chain
from selfless.models import build, hidden_layers
from selfless.spec import Matrix, Result, Run

PATIENCE, STOP, DROP = 5, 10, 0.1  # the paper's plateau rule: ×0.1 after 5 stalled epochs, stop after 10
WRITTEN = 1e9  # bytes a second
SAVING = 0.05  # saving may take this share of the time; on a CPU what takes no twentieth of a second is saved after every epoch


class Alone(ValueError):
    """These runs cannot train as one fleet; each can by itself."""


@dataclass(frozen=True)
class Event:
    """What just happened, for a progress bar or a log: the end of an epoch, or of a task (`evaluated`)."""

    task: int
    tasks: int
    name: str
    epoch: int
    epochs: int
    loss: list[float]
    accuracy: list[float]
    evaluated: bool = False
    resumed: bool = False


Report = Callable[[Event], None]


@dataclass
class Progress:
    """Where a fleet stands, beside its tensors. `epoch` counts the finished epochs of `task`."""

    task: int = 0
    epoch: int = 0
    accuracy: list[list[list[float]]] = field(default_factory=list)  # [task][evaluated task][member]
    accuracy_all: list[list[list[float]]] = field(default_factory=list)
    held_out: list[list[list[float]]] = field(default_factory=list)
    baseline: list[list[float]] = field(default_factory=list)
    history: list[list[list[dict[str, float]]]] = field(default_factory=list)  # [member][task][epoch]
    capacity: list[list[dict[str, Any]]] = field(default_factory=list)  # [member][task]
    failed: dict[int, str] = field(default_factory=dict)
    best: list[float] = field(default_factory=list)
    best_held_out: list[float] = field(default_factory=list)
    stalled: list[int] = field(default_factory=list)
    over: bool = False  # the epochs of `task` ended early: every member stopped or failed
    seconds: float = 0.0
    training: float = 0.0  # of them, in training steps
    run_steps: int = 0  # steps of every member, added up

    def text(self) -> str:
        return json.dumps({k: list(v.items()) if isinstance(v, dict) else v for k, v in self.__dict__.items()})

    @classmethod
    def parse(cls, text: str) -> Progress:
        values = json.loads(text)
        return cls(**(values | {"failed": {int(k): v for k, v in values["failed"]}}))


class Learner:
    """Trains one fleet. `checkpoint` is the file its state is kept in while it trains (None: nowhere); one with another `stamp` (of the
    data and networks it was made from) is not continued."""

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        device: torch.device | str = "cpu",
        data_dir: Path | None = None,
        budget: int | None = None,
        checkpoint: Path | None = None,
        stamp: str = "",
        report: Report | None = None,
    ) -> None:
        self.runs, self.run, self.device = list(runs), runs[0], torch.device(device)
        self.data_dir, self.budget, self.checkpoint, self.stamp = data_dir, budget, checkpoint, stamp
        self.report = report or (lambda event: None)
        self.streams = _streams(self.runs, data_dir)
        if len(self.streams[0].tasks) > 1:  # joint training loses nothing
            scenario.warn(self.run.preserve, self.run.scenario)
        self.epochs = max(r.epochs for r in self.runs)
        self._build()
        self._saved_at = time.perf_counter()
        self._saving = sum(t.nbytes for t in self.fleet.tensors().values()) / WRITTEN  # seconds, until it has been measured
        self.best: Tensors = {}
        self.resumed = self._resume()

    def _build(self) -> None:
        """The members at their initialisation, checked by one forward pass."""
        first = self.streams[0]
        augment = AUGMENT[self.run.augment]
        shape = augment.shape(first.input_shape) if augment else first.input_shape
        options = located(self.run.model, self.run.model_options, self.data_dir)
        modules = [build(r.model, outputs=first.outputs, input_shape=shape, seed=r.seed, **options) for r in self.runs]
        layers = hidden_layers(modules[0])
        if self.run.layers == "all":
            layers = (*hidden_layers(modules[0], conv=True), *layers)
        if not layers and any(r.sparsify.strength > 0 and r.sparsify.reads != "parameters" for r in self.runs):
            raise ValueError(f"{self.run.model} names no hidden activation module for {self.run.sparsify} to act on; use nn.ReLU() modules")
        if not layers and self.run.preserve.encodes:
            raise ValueError(f"{self.run.model} names no hidden activation module whose output {self.run.preserve} could code")
        _check_output(modules[0], shape, first.outputs, self.run.model)
        gated = (*hidden_layers(modules[0], conv=True), *hidden_layers(modules[0])) if self.run.preserve.gates else ()
        if gated and self.run.select != "last":
            raise ValueError(
                f"{self.run.preserve.name} learns its gates epoch by epoch, and select={self.run.select!r} would keep one epoch's weights "
                "with another's gates; use --select last"
            )
        _check_together(modules, shape, self.run.model)
        stack = Stack(modules[0], layers, gated)
        self.fleet = Fleet(self.runs, stack, *stack.stacked(modules, self.device), self.device)
        if self.run.preserve.gates:
            self.fleet.hooks.wire(chain(stack.module, {name: stack.module.get_submodule(name) for name in gated}))
        if self.run.scenario == "task":  # in the others no head is a task's own
            self.fleet.hooks.own_heads([task.heads for task in first.tasks], first.outputs)
        self.progress = Progress(history=[[] for _ in self.runs], capacity=[[] for _ in self.runs])

    # -------------------------------------------------------------------------------------------------------------- the loop
    def learn(self) -> list[Result]:
        """Train to the end, or on from where the checkpoint stands."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()
        if self.device.type == "cpu":  # "medium": bfloat16 products with float32 sums, on CPUs that have units for them
            torch.set_float32_matmul_precision("medium" if self.run.precision == "bf16" else "highest")
        else:
            matmul.allow_tf32 = cudnn.allow_tf32 = self.run.precision != "fp32"
        torch.set_flush_denormal(True)  # momentum of dead neurons decays into numbers a CPU is a hundred times slower with
        try:
            return self._learn()
        finally:
            torch.set_flush_denormal(False)
            torch.set_float32_matmul_precision(before[2])
            matmul.allow_tf32, cudnn.allow_tf32 = before[:2]

    def rehearse(self) -> None:
        """One step with everything in place that training needs: for measuring how much memory that is. Do not train afterwards."""
        tests = [self._data([s.evaluate[u].test for s in self.streams]) for u in range(len(self.streams[0].evaluate))]
        task = self.streams[0].tasks[0]
        self.fleet.begin_task(self._data([s.tasks[0].train for s in self.streams]), task.heads, self.streams[0].outputs)
        self.fleet.begin_epoch(0, 0)
        self.fleet.stack.module.train()
        self.fleet.step(min(self.run.batch, self.fleet.data.n))
        del tests

    def _learn(self) -> list[Result]:
        first, begun = self.streams[0], time.perf_counter() - self.progress.seconds
        tests = [self._data([s.evaluate[u].test for s in self.streams]) for u in range(len(first.evaluate))]
        asides = []
        if all(task.held_out is not None for task in first.evaluate):
            asides = [self._data([s.evaluate[u].held_out for s in self.streams]) for u in range(len(first.evaluate))]
        if not self.progress.baseline:
            self.progress.baseline = self._judged(tests)
        for t in range(self.progress.task, len(first.tasks)):
            self._task(t, begun)
            self.progress.accuracy.append(self._judged(tests))
            if any(task.group is not None for task in first.evaluate):
                self.progress.accuracy_all.append([self.fleet.evaluate(d, None, u) for u, d in enumerate(tests)])
            if asides:
                self.progress.held_out.append(self._judged(asides))
            self.progress.task, self.progress.epoch = t + 1, 0
            self.progress.seconds = time.perf_counter() - begun
            self._save(last=t + 1 == len(first.tasks))
            seen = [float(np.mean([row[m] for row in self.progress.accuracy[-1][: t + 1]])) for m in range(len(self.runs))]
            self.report(Event(t, len(first.tasks), first.tasks[t].name, self.epochs, self.epochs, [], seen, evaluated=True))
        return self.results()

    def _judged(self, parts: Sequence[FleetData]) -> list[list[float]]:
        """The accuracy of every member on each task."""
        tasks, fleet, kind = self.streams[0].evaluate, self.fleet, self.run.scenario
        seen = fleet.tasks if len(self.streams[0].tasks) == len(tasks) else len(tasks)
        newest = max(fleet.tasks - 1, 0)  # without the task's identity, every task is judged as this one
        return [
            fleet.evaluate(data, scenario.judged(tasks, kind, seen, u), u if kind == "task" else newest) for u, data in enumerate(parts)
        ]

    def results(self) -> list[Result]:
        """One a run, as far as the fleet has come."""
        return [self._result(m) for m in range(len(self.runs))]

    def _task(self, t: int, begun: float) -> None:
        """Train task t from where it stands, keep the chosen epoch, consolidate."""
        task, fleet, progress = self.streams[0].tasks[t], self.fleet, self.progress
        data = self._data([s.tasks[t].train for s in self.streams])
        chosen = {"last": None, "held-out": "held_out", "best-on-test": "test"}[self.run.select]
        watched = {
            w: self._data([getattr(s.tasks[t], w) for s in self.streams]) for w in _watched(self.run) if getattr(task, w) is not None
        }
        fresh = progress.epoch == 0
        saved = (fleet.lr.clone(), fleet.step_number.clone(), {n: v.clone() for n, v in fleet.momentum.items()})
        past = [head for earlier in self.streams[0].tasks[:t] for head in earlier.heads]
        past = past[-1:] if self.run.scenario == "class" else past  # its head holds the earlier ones
        fleet.begin_task(data, task.heads, self.streams[0].outputs, past)
        if fresh:
            progress.best, progress.best_held_out = [-1.0] * len(self.runs), [-1.0] * len(self.runs)
            progress.stalled, progress.over, self.best = [0] * len(self.runs), False, {}
            for member in progress.history:
                member.append([])
        else:  # resumed within the task: the optimizer goes on
            fleet.lr.copy_(saved[0])
            fleet.step_number.copy_(saved[1])
            for n, v in saved[2].items():
                fleet.momentum[n].copy_(v)
            fleet.refresh_shares()
        for epoch in range(progress.epoch, 0 if progress.over else self.epochs):
            started = time.perf_counter()
            if epoch and fleet.preserve.turning(epoch, self.run.epochs):  # a new phase: the best epoch is one of those to come
                progress.best, self.best = [-1.0] * len(self.runs), {}
            loss, accuracy = fleet.train_epoch(t, epoch)
            stopped = progress.stalled if self.run.schedule == "plateau" else [0] * len(self.runs)
            going = [m for m, r in enumerate(self.runs) if epoch < r.epochs and stopped[m] < STOP]
            progress.training += time.perf_counter() - started
            progress.run_steps += len(going) * math.ceil(data.n / self.run.batch)
            scores = {w: fleet.evaluate(d, scenario.columns(task)) for w, d in watched.items()}
            for m in going:
                entry = {"loss": loss[m], "accuracy": accuracy[m]} | {w: s[m] for w, s in scores.items()}
                progress.history[m][t].append({k: v if math.isfinite(v) else -1.0 for k, v in entry.items()})
                if not math.isfinite(loss[m]) and m not in progress.failed:
                    progress.failed[m] = f"the loss was not finite in epoch {epoch + 1} of task {t + 1} ({task.name})"
            if chosen is not None:
                self._keep_best(scores[chosen])
            running = self._plateau(scores["held_out"]) if self.run.schedule == "plateau" else True
            progress.epoch, progress.over = epoch + 1, not running or len(progress.failed) == len(self.runs)
            progress.seconds = time.perf_counter() - begun
            self._save()
            self.report(Event(t, len(self.streams[0].tasks), task.name, epoch + 1, self.epochs, loss, accuracy, resumed=self.resumed))
            if progress.over:
                break
        if chosen is not None and self.best:
            with torch.no_grad():
                for n, t_best in self.best.items():
                    (fleet.params[n] if n in fleet.params else fleet.buffers[n]).copy_(t_best)
        with torch.random.fork_rng(devices=[]):  # a sampled Fisher draws from here
            torch.manual_seed(draws.one_seed(self.run.seed, "consolidate", t))
            fleet.consolidate()
        for m, finite in enumerate(fleet.finite()):
            if not finite and m not in progress.failed:
                progress.failed[m] = f"parameters or importances were not finite after task {t + 1} ({task.name})"
        self._count_free()

    def _keep_best(self, scores: list[float]) -> None:
        """Members that are better than ever in this task: remember their parameters."""
        live = {n: p.detach() for n, p in (self.fleet.params | self.fleet.buffers).items()}
        better = torch.tensor([s > b for s, b in zip(scores, self.progress.best, strict=True)], device=self.device)
        if not self.best:
            self.best = {n: p.clone() for n, p in live.items()}
        for n, p in live.items():
            self.best[n][better] = p[better]
        self.progress.best = [max(s, b) for s, b in zip(scores, self.progress.best, strict=True)]

    def _plateau(self, scores: list[float]) -> bool:
        """Lower the rate of stalled members; False once every member has stopped."""
        better = [s > b for s, b in zip(scores, self.progress.best_held_out, strict=True)]
        self.progress.best_held_out = [max(s, b) for s, b in zip(scores, self.progress.best_held_out, strict=True)]
        stalled = [0 if improved else s + 1 for improved, s in zip(better, self.progress.stalled, strict=True)]
        factor = [0.0 if s >= STOP else DROP if s == PATIENCE else 1.0 for s in stalled]
        self.progress.stalled = stalled
        self.fleet.set_lr(self.fleet.lr * torch.tensor(factor, device=self.device))
        return any(s < STOP for s in stalled)

    def _count_free(self) -> None:
        omega, alpha = self.fleet.preserve.importance(self.fleet.state) or {}, self.fleet.alpha
        for m in range(len(self.runs)):
            parameters = {n: free_share(o[m]) for n, o in omega.items()}
            neurons = {n: free_share(a[m]) for n, a in alpha.items()}
            self.progress.capacity[m].append(Capacity(parameters, neurons, self.fleet.tasks).as_dict())

    def _data(self, parts: Sequence[Any]) -> FleetData:
        return FleetData(parts, self.device, self.budget)

    # --------------------------------------------------------------------------------------------------------------- files
    def _save(self, last: bool = False) -> None:
        """Everything into one file; a large fleet not after every epoch, and not after the last, when its results are there."""
        now = time.perf_counter()
        cheap = 0.05 if self.device.type == "cpu" else 0.0
        dear = self._saving > cheap and (last or now - self._saved_at < self._saving / SAVING)
        if self.checkpoint is not None and not dear:
            tensors = self.fleet.tensors() | {f"best.{n}": t for n, t in self.best.items()}
            plain = {n: t.cpu().contiguous() for n, t in tensors.items()}
            meta = {"progress": self.progress.text(), "tasks": str(self.fleet.tasks), "threads": str(torch.get_num_threads())}
            meta |= {"keys": json.dumps([run.key for run in self.runs]), "stamp": self.stamp}
            write_atomically(self.checkpoint, lambda path: save_file(plain, path, meta))
            self._saved_at = time.perf_counter()
            self._saving = self._saved_at - now

    def _resume(self) -> bool:
        if self.checkpoint is None or not self.checkpoint.exists():
            return False
        try:
            with safe_open(self.checkpoint, framework="pt") as file:
                meta = file.metadata()
            if meta.get("stamp", "") != self.stamp:
                raise ValueError("its data or network has changed since")
            tensors = load_file(self.checkpoint, device=str(self.device))
            progress = Progress.parse(meta["progress"])
            self.fleet.restore(tensors, int(meta["tasks"]))
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            warnings.warn(f"{self.checkpoint} cannot be continued ({error}); training starts again", stacklevel=2)
            self.checkpoint.unlink()
            self._build()
            return False
        self.progress = progress
        if self.device.type == "cpu":
            torch.set_num_threads(int(meta.get("threads", torch.get_num_threads())))  # the same bits need the same order of sums
        self.best = {n.removeprefix("best."): t for n, t in tensors.items() if n.startswith("best.")}
        return True

    def _result(self, m: int) -> Result:
        progress, run = self.progress, self.runs[m]
        failed = progress.failed.get(m, "")

        def pick(rows: list[list[list[float]]]) -> Matrix:
            return np.array([[cell[m] for cell in row] for row in rows], dtype=np.float64)

        return Result(
            run=run,
            accuracy=pick(progress.accuracy),
            baseline=pick([progress.baseline])[0],
            history=progress.history[m],
            capacity=progress.capacity[m],
            accuracy_all=pick(progress.accuracy_all) if progress.accuracy_all else None,
            held_out=pick(progress.held_out) if progress.held_out else None,
            status="failed" if failed else "done",
            error=failed,
            about={
                "seconds": progress.seconds,
                "fleet": len(self.runs),
                "run_steps_per_second": progress.run_steps / progress.training if progress.training else None,
                "memory": self._memory(),
                "device": str(self.device),
                "tasks": [task.name for task in self.streams[m].evaluate],
                "notes": list(self.streams[m].notes),
                "parameters": sum(p[0].numel() for p in self.fleet.params.values()),
            },
        )

    def _memory(self) -> dict[str, float] | None:
        """Peak gigabytes of a GPU that this process took, and their share of it."""
        if self.device.type != "cuda":
            return None
        peak, total = torch.cuda.max_memory_allocated(self.device), torch.cuda.get_device_properties(self.device).total_memory
        return {"peak_gb": peak / 1e9, "share": peak / total}

    def member_tensors(self, m: int) -> dict[str, Tensor]:
        """The final parameters, Ω, θ* and α of one member, for its own checkpoint."""
        kept = ("params.", "buffers.", "alpha.", "state.")
        tensors = {n: t for n, t in self.fleet.tensors().items() if n.startswith(kept)}
        return {n: (t[m] if t.dim() and len(t) == len(self.runs) else t).cpu().contiguous().clone() for n, t in tensors.items()}


def _check_together(modules: Sequence[nn.Module], shape: tuple[int, int, int], name: str) -> None:
    """Networks that would learn otherwise in company, or cannot be mapped over members, train alone."""
    if len(modules) == 1:
        return
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in modules[0].modules()):
        raise Alone(f"{name} has dropout, whose draws the members of a fleet would share; train its runs one by one")
    if not native(modules[0]):
        states = [dict(m.state_dict()) for m in modules[:2]]
        stacked = {n: torch.stack([s[n].detach() for s in states]) for n in states[0]}
        probe = copy.deepcopy(modules[0]).eval()
        try:
            with torch.no_grad():
                torch.func.vmap(lambda state, x: torch.func.functional_call(probe, state, (x,)))(stacked, torch.zeros(2, 2, *shape))
        except Exception as error:
            raise Alone(
                f"{name} cannot run for several members at once ({str(error).splitlines()[0][:120]}); train its runs one by one"
            ) from error


def _check_output(module: nn.Module, shape: tuple[int, int, int], outputs: int, name: str) -> None:
    """One's own network must give (batch, outputs)."""
    mode = module.training
    try:
        with torch.no_grad():
            made = module.eval()(torch.zeros(2, *shape))
    except Exception as error:
        raise ValueError(f"{name} cannot run on images of shape {shape} (channels, height, width): {error}") from error
    finally:
        module.train(mode)
    if not isinstance(made, Tensor) or made.shape != (2, outputs):
        got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(
            f"{name} gives {got} for two inputs of shape {shape}; it must give a tensor of shape (2, {outputs}): (batch, outputs)"
        )


def _watched(run: Run) -> list[str]:
    """The parts that are evaluated after every epoch."""
    parts = ["held_out"] if run.held_out > 0 else []
    return [*parts, "test"] if run.select == "best-on-test" else parts


def _streams(runs: Sequence[Run], data_dir: Path | None) -> list[Stream]:
    """The stream of every run; runs that share one share its data."""
    made: dict[int, Stream] = {}
    for r in runs:
        if r.seed not in made:
            found = stream(r.stream, tasks=r.tasks, seed=r.seed, held_out=r.held_out, data_dir=data_dir, **r.stream_options)
            made[r.seed] = scenario.arranged(found, r.scenario)
    return [made[r.seed] for r in runs]
