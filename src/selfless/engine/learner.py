"""The training loop of a fleet: task → epochs → consolidate → evaluate → result.

The checkpoint contains the whole state after an epoch, so a run that was killed continues from there. The order of batches and all other
random numbers depend only on (seed, task, epoch). On a CPU the result is the same to the bit as without the interruption.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfless.data import DataDescription, Stream, Task, describe
from selfless.engine import rng, scenario
from selfless.engine.batches import FleetData
from selfless.engine.build import build_fleet, build_streams
from selfless.engine.checkpoint import CannotContinue, Checkpoint
from selfless.engine.continuing import Parent, check, inherit
from selfless.engine.faults import loss_fault, state_faults
from selfless.engine.kinds import kinds_of
from selfless.engine.native.hardware import using
from selfless.engine.penalties import has_penalty, penalty_tensors, read_penalties
from selfless.engine.plateaus import STOP, lower
from selfless.engine.progress import Event, Pace, Progress, Report
from selfless.engine.room import add_capacity
from selfless.engine.selection import keep_best, load_best
from selfless.engine.stack import Tensors
from selfless.spec import ON_HELD_OUT, Matrix, Result, Run

WORST = -1e9  # below every accuracy and every loss that is finite
CHOSEN = {"last": None, "held-out": "held_out", "best-on-test": "test"}  # Run.select → the part of a task whose score selects an epoch


class Learner:
    """Trains one fleet.

    budget       bytes of data to keep in memory; larger data is read from a memory map
    checkpoint   the file for the state of the fleet during training (None: no file); see `engine.checkpoint`
    stamp        identifies the data and networks; a checkpoint with another stamp is not continued
    parent       the finished run that these runs continue; None: they start with new networks
    report       called with an Event after every epoch and task, and with passing ones between
    """

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        device: torch.device | str = "cpu",
        data_dir: Path | None = None,
        budget: int | None = None,
        checkpoint: Path | None = None,
        stamp: str = "",
        parent: Parent | None = None,
        report: Report | None = None,
    ) -> None:
        self.runs, self.run, self.device = list(runs), runs[0], torch.device(device)
        self.data_dir, self.budget, self.parent = data_dir, budget, parent
        self.report = report or (lambda event: None)
        if parent is not None:
            check(self.run, parent)
        self.streams = build_streams(self.runs, data_dir, parent)
        if len(self.streams[0].heads) > 1:  # joint training forgets nothing
            for preserve, _ in kinds_of([r.preserve for r in self.runs]):
                scenario.warn(preserve, self.run.scenario)
        self.epochs = max(r.epochs for r in self.runs)
        self.best: Tensors = {}  # of each member's best epoch of this task; see `engine.selection`
        self._start()
        self.checkpoint = Checkpoint(checkpoint, stamp, self.fleet)
        self.resumed = self._resume()
        sizes = [math.ceil(len(t.train) / self.run.batch) for t in self.streams[0].tasks]
        self.pace = Pace([0] * self.streams[0].learned + sizes, self.epochs, len(self.runs))

    def _start(self) -> None:
        """Build the fleet, before any training."""
        self.fleet = build_fleet(self.runs, self.streams, self.data_dir, self.device)
        self.progress = Progress(history=[[] for _ in self.runs], capacity=[[] for _ in self.runs])

    def _resume(self) -> bool:
        """Continue from the checkpoint; return False if there is none that can be used."""
        try:
            found = self.checkpoint.resume(self.fleet)
        except CannotContinue:
            self._start()
            return False
        if found is None:
            return False
        self.progress, self.best = found
        return True

    # -------------------------------------------------------------------------------------------------------------- the loop
    def learn(self) -> list[Result]:
        """Train to the end, from the start or from the checkpoint; return one result per run."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch 2.9 warns once where its own settings are read
            before = matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()
        if self.device.type == "cpu":  # "medium": bfloat16 products with float32 sums, on CPUs with such instructions
            torch.set_float32_matmul_precision("medium" if self.run.precision == "bf16" else "highest")
        else:
            matmul.allow_tf32 = cudnn.allow_tf32 = self.run.precision != "fp32"
        torch.set_flush_denormal(True)  # the momentum of dead neurons becomes denormal, which is a hundred times slower on a CPU
        try:
            with using(self.device):
                return self._learn()
        finally:
            torch.set_flush_denormal(False)
            torch.set_float32_matmul_precision(before[2])
            matmul.allow_tf32, cudnn.allow_tf32 = before[:2]

    def rehearse(self) -> None:
        """Take one step with all data that training loads, to measure its memory. Do not train with this learner afterwards."""
        tests = [self.load([s.evaluate[u].test for s in self.streams]) for u in range(len(self.streams[0].evaluate))]
        task = self.streams[0].tasks[0]
        self.fleet.begin_task(self.load([s.tasks[0].train for s in self.streams]), task.heads, self.streams[0].outputs)
        self.fleet.begin_epoch(0, 0)
        self.fleet.stack.module.train()
        with using(self.device):
            self.fleet.step(min(self.run.batch, self.fleet.step.data.n))
        del tests

    def _learn(self) -> list[Result]:
        """Train and evaluate task by task, with the numeric settings of `learn`."""
        first, started = self.streams[0], time.perf_counter() - self.progress.seconds
        tests = [self.load([s.evaluate[u].test for s in self.streams]) for u in range(len(first.evaluate))]
        held_out = []
        if all(task.held_out is not None for task in first.evaluate):
            held_out = [self.load([s.evaluate[u].held_out for s in self.streams]) for u in range(len(first.evaluate))]
        if not self.progress.baseline:
            self.progress.baseline = self._evaluate(tests)
            if self.parent is not None:
                self._inherit(self.parent, tests)
        self.pace.place(self.progress.task, self.progress.epoch)
        for t in range(self.progress.task, len(first.heads)):
            self.learn_task(t, started)
            self.progress.accuracy.append(self._evaluate(tests))
            if any(task.group is not None for task in first.evaluate):
                self.progress.accuracy_all.append([self.fleet.evaluate(d, None, u) for u, d in enumerate(tests)])
            if held_out:
                self.progress.held_out.append(self._evaluate(held_out))
            self.progress.task, self.progress.epoch = t + 1, 0
            self.progress.seconds = time.perf_counter() - started
            if t + 1 < len(first.heads):  # after the last task the results are recorded
                self.checkpoint.save(self.fleet, self.progress, self.best)
            self.pace.begin_epoch(t + 1, 0)
            self._tell(t, self.epochs, [], self._average(), evaluated=True)
        return self.results()

    def _inherit(self, parent: Parent, tests: Sequence[FleetData]) -> None:
        """Go on from a finished run. Its measurements are copied; those that only its data could give are NaN."""
        first, members, old = self.streams[0], len(self.runs), parent.result
        inherit(self.fleet, parent, first.heads, first.outputs)
        new = self._evaluate(tests)[first.learned :]
        unknown = [[math.nan] * members] * len(new)
        known = [[[value] * members for value in row] for row in old.accuracy.tolist()]
        progress = self.progress
        progress.accuracy = [row + (new if t + 1 == first.learned else unknown) for t, row in enumerate(known)]
        progress.baseline = [[value] * members for value in old.baseline.tolist()] + progress.baseline[first.learned :]
        progress.history = [copy.deepcopy(old.history) for _ in self.runs]
        progress.capacity = [copy.deepcopy(old.capacity) for _ in self.runs]
        progress.task = first.learned

    def _average(self, tasks: int | None = None) -> list[float]:
        """Return the average test accuracy of each member over the first `tasks` tasks (None: those learnt so far); [] before the first."""
        rows = self.progress.accuracy[:tasks]
        learnt = None if self.streams[0].is_joint else len(rows)  # joint training learns all tasks at once
        return [float(np.nanmean([row[m] for row in rows[-1][:learnt]])) for m in range(len(self.runs))] if rows else []

    def _tell(self, t: int, epoch: int, loss: list[float], accuracy: list[float], **more: Any) -> None:
        """Report an event of task t."""
        stream, pace = self.streams[0], self.pace
        paced: dict[str, Any] = {"share": pace.share, "speed": pace.speed, "seconds_left": pace.seconds_left}
        name = stream.tasks[t - stream.learned].name
        self.report(Event(t, len(stream.heads), name, epoch, self.epochs, loss, accuracy, average=self._average(), **paced, **more))

    def _tell_passing(self, t: int, epoch: int, stage: str = "training") -> None:
        """Report where the training of task t is, with the loss and accuracy of its epoch before, if there is one."""
        past = [member[t][-1] for member in self.progress.history if len(member) > t and member[t]]
        known = len(past) == len(self.runs)
        loss, accuracy = ([entry[name] for entry in past] if known else [] for name in ("loss", "accuracy"))
        self._tell(t, epoch, loss, accuracy, passing=True, stage=stage, resumed=self.resumed)

    def log_lines(self, m: int) -> list[dict[str, Any]]:
        """Return the lines of member m's log up to the checkpoint, from its recorded history."""
        lines: list[dict[str, Any]] = []
        progress, first = self.progress, self.streams[0].learned
        for t in range(first, len(progress.history[m])):
            count = max(len(member[t]) for member in progress.history)  # a member whose epochs are over is logged with the others
            for e in range(count):
                entry = progress.history[m][t][min(e, len(progress.history[m][t]) - 1)]
                values = {"accuracy": entry["accuracy"], "loss": None if entry["loss"] < 0 else entry["loss"]}
                lines.append({"task": t + 1, "epoch": e + 1, "evaluated": False, **values})
            if t < progress.task:
                lines.append({"task": t + 1, "epoch": self.epochs, "evaluated": True, "accuracy": self._average(t + 1)[m]})
        return lines

    def _evaluate(self, parts: Sequence[FleetData]) -> list[list[float]]:
        """Return the accuracy of every member on each task."""
        tasks, fleet, kind = self.streams[0].evaluate, self.fleet, self.run.scenario
        learned = len(tasks) if self.streams[0].is_joint else fleet.tasks
        newest = max(fleet.tasks - 1, 0)  # where the task is not known, every image is evaluated with the newest task
        found = []
        for u, data in enumerate(parts):
            columns = scenario.columns_among(tasks, kind, learned, u)
            found.append(fleet.evaluate(data, columns, u if kind == "task" else newest))
        return found

    def results(self) -> list[Result]:
        """Return one result per run, for the tasks so far."""
        return [self._result(m) for m in range(len(self.runs))]

    def learn_task(self, t: int, started: float) -> None:
        """Train the remaining epochs of task t, load the selected epoch, consolidate. `started` is when the run started.

        Tasks are counted from the first one that the network learned, in this run or in the one that it continues.
        """
        tasks = [s.tasks[t - s.learned] for s in self.streams]
        names = [name for name in _epoch_parts(self.run) if getattr(tasks[0], name) is not None]
        data, parts = self.load([one.train for one in tasks]), {name: self.load([getattr(one, name) for one in tasks]) for name in names}
        self._begin_task(t, tasks[0], data)
        for epoch in range(self.progress.epoch, 0 if self.progress.over else self.epochs):
            self._learn_epoch(t, epoch, tasks[0], parts, started)
            if self.progress.over:
                break
        if CHOSEN[self.run.select] is not None:
            load_best(self.best, self.fleet)
        self._end_task(t, tasks[0])

    def _begin_task(self, t: int, task: Task, data: FleetData) -> None:
        """Begin a task, or go on within it: then the optimizer is as it was."""
        fleet, progress, members = self.fleet, self.progress, len(self.runs)
        past = [head for earlier in self.streams[0].heads[:t] for head in earlier]
        past = past[-1:] if self.run.scenario == "class" else past  # the last head contains the earlier ones
        changing = [fleet.lr, fleet.step_number, *fleet.optimizer_tensors()]
        saved = [value.clone() for value in changing]
        fleet.begin_task(data, task.heads, self.streams[0].outputs, past)
        if progress.epoch == 0:
            progress.best, progress.best_held_out = [WORST] * members, [WORST] * members
            progress.stalled, progress.over, self.best = [0] * members, False, {}
            for member in progress.history:
                member.append([])
            return
        for tensor, value in zip(changing, saved, strict=True):
            tensor.copy_(value)
        fleet.refresh_shares()

    def _learn_epoch(self, t: int, epoch: int, task: Task, parts: Mapping[str, FleetData], started: float) -> None:
        """Train one epoch, evaluate it on `parts`, note what it gave, and save."""
        fleet, progress, chosen, begun = self.fleet, self.progress, CHOSEN[self.run.select], time.perf_counter()
        if epoch and fleet.starts_phase(epoch):  # epochs before a new phase cannot be the best
            progress.best, self.best = [WORST] * len(self.runs), {}
        self.pace.begin_epoch(t, epoch)
        self._tell_passing(t, epoch + 1)
        costs: Tensors = {}
        after_step = partial(self._after_step, t, epoch + 1)
        loss, accuracy = fleet.train_epoch(t, epoch, after_step, lambda: costs.update(penalty_tensors(fleet)))
        self.pace.end_epoch()
        stopped = progress.stalled if self.run.schedule in ON_HELD_OUT else [0] * len(self.runs)
        active = [m for m, r in enumerate(self.runs) if epoch < r.epochs and stopped[m] < STOP]
        progress.training += time.perf_counter() - begun
        progress.run_steps += len(active) * math.ceil(fleet.step.data.n / self.run.batch)
        scores = {name: fleet.evaluate(part, task.columns) for name, part in parts.items()}
        if self.run.schedule == "halving":
            scores["held_out_loss"] = fleet.evaluate_loss(parts["held_out"], task.columns)
        penalties = read_penalties(costs)
        for m in active:
            own = {name: values for name, values in penalties.items() if has_penalty(self.runs[m], name)}
            self._note(m, t, epoch, task, {"loss": loss, "accuracy": accuracy} | scores | own)
        if chosen is not None:
            self._keep_best(self._followed(scores) if chosen == "held_out" else scores[chosen])
        running = self._lower_rates(self._followed(scores)) if self.run.schedule in ON_HELD_OUT else True
        progress.epoch, progress.over = epoch + 1, not running or len(progress.failed) == len(self.runs)
        progress.seconds = time.perf_counter() - started
        self.checkpoint.save(fleet, progress, self.best)
        self._tell(t, epoch + 1, loss, accuracy, penalties=penalties, resumed=self.resumed)

    def _note(self, m: int, t: int, epoch: int, task: Task, values: Mapping[str, Sequence[float]]) -> None:
        """Write the values of an epoch into the history of member m; a loss that is not finite ends its training."""
        entry = {name: members[m] for name, members in values.items()}
        self.progress.history[m][t].append({name: v if math.isfinite(v) else -1.0 for name, v in entry.items()})
        if not math.isfinite(entry["loss"]):
            if m not in self.progress.failed:
                self.progress.failed[m] = loss_fault(self.fleet, m, t, epoch, f"task {t + 1} ({task.name})")
            self.fleet.undo_epoch(m)

    def _end_task(self, t: int, task: Task) -> None:
        """Measure importances and what room is left."""
        self._tell_passing(t, self.progress.epoch, "measuring importance")
        with torch.random.fork_rng(devices=[]):  # for a sampled Fisher
            torch.manual_seed(rng.one_seed(self.run.seed, "consolidate", t))
            self.fleet.consolidate()
        self.progress.failed = state_faults(self.fleet, f"task {t + 1} ({task.name})") | self.progress.failed
        add_capacity(self.fleet, self.progress.capacity)

    def _after_step(self, t: int, epoch: int) -> None:
        if self.pace.step():
            self._tell_passing(t, epoch)

    def _keep_best(self, scores: list[float]) -> None:
        """Keep the tensors of the members whose score is the best so far in this task."""
        self.best = keep_best(self.best, self.fleet, [s > b for s, b in zip(scores, self.progress.best, strict=True)])
        self.progress.best = [max(s, b) for s, b in zip(scores, self.progress.best, strict=True)]

    def _followed(self, scores: Mapping[str, list[float]]) -> list[float]:
        """Return what is to grow on held-out data: the accuracy, or minus the loss if the schedule follows it."""
        return [-loss for loss in scores["held_out_loss"]] if self.run.schedule == "halving" else scores["held_out"]

    def _lower_rates(self, scores: list[float]) -> bool:
        """Lower the learning rate of stalled members; return False once every member has stopped."""
        progress, fleet = self.progress, self.fleet
        improved = [s > b for s, b in zip(scores, progress.best_held_out, strict=True)]
        progress.best_held_out = [max(s, b) for s, b in zip(scores, progress.best_held_out, strict=True)]
        shares = (fleet.lr / fleet.rates.base.clamp(min=torch.finfo(torch.float32).tiny)).tolist()
        progress.stalled, factor = lower(self.run.schedule, progress.stalled, improved, shares)
        fleet.set_lr(fleet.lr * torch.tensor(factor, device=self.device))
        return any(s < STOP for s in progress.stalled)

    def load(self, parts: Sequence[Any]) -> FleetData:
        """Return the data of one part (the training or test data of a task) of every member, on the device."""
        return FleetData(parts, self.device, self.budget)

    # ------------------------------------------------------------------------------------------------------------- results
    def _result(self, m: int) -> Result:
        """Return the result of member m."""
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
            data=self._describe(m),
            about={
                "seconds": progress.seconds,
                "fleet": len(self.runs),
                "run_steps_per_second": progress.run_steps / progress.training if progress.training else None,
                "memory": self._memory(),
                "device": str(self.device),
                "tasks": [task.name for task in self.streams[m].evaluate],
                "samples": _sizes(self.streams[m]),
                "notes": list(self.streams[m].notes),
                "parameters": sum(p[0].numel() for p in self.fleet.params.values()),
            }
            | ({"strengths": self.fleet.strengths(m)} if run.preserve.is_auto or run.sparsify.is_auto else {}),
        )

    def _describe(self, m: int) -> DataDescription:
        """Return the description of a member's data; old tasks of a continued run are as their own record describes them."""
        found = describe(self.streams[m], self.fleet.augment)
        if self.parent is None:
            return found
        old = self.parent.data.tasks
        return dataclasses.replace(found, tasks=(*old, *found.tasks[len(old) :]))

    def _memory(self) -> dict[str, float] | None:
        """Return the peak memory of this process on the GPU, in gigabytes and as a share of its memory; None on a CPU."""
        if self.device.type != "cuda":
            return None
        peak, total = torch.cuda.max_memory_allocated(self.device), torch.cuda.get_device_properties(self.device).total_memory
        return {"peak_gb": peak / 1e9, "share": peak / total}

    def member_tensors(self, m: int) -> dict[str, Tensor]:
        """Return the final parameters, Ω, θ* and α of one member, for its own checkpoint."""
        prefixes = ("params.", "buffers.", "alpha.", "state.", "scale.")
        tensors = {n: t for n, t in self.fleet.tensors().items() if n.startswith(prefixes)}
        return {n: (t[m] if t.dim() and len(t) == len(self.runs) else t).cpu().contiguous().clone() for n, t in tensors.items()}


def _sizes(stream: Stream) -> dict[str, list[int]]:
    """Return the number of samples of each task: for training, for testing, and held out if there are such."""
    sizes = {"train": [len(task.train) for task in stream.tasks], "test": [len(task.test) for task in stream.evaluate]}
    held_out = [len(task.held_out) for task in stream.evaluate if task.held_out is not None]
    return sizes | ({"held_out": held_out} if held_out else {})


def _epoch_parts(run: Run) -> list[str]:
    """Return the parts of a task that are evaluated after every epoch."""
    parts = ["held_out"] if run.held_out > 0 else []
    return [*parts, "test"] if run.select == "best-on-test" else parts
