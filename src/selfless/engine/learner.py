"""The loop: task → epochs → consolidate → evaluate → record, for a fleet of one or of hundreds.

The state after every epoch is complete in one file, so a killed run goes on where it stopped: the order of batches and every other draw
depend on (seed, task, epoch) alone, and on a CPU the numbers are the same to the bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfless.capacity import Capacity, count_free
from selfless.engine import rng, scenario
from selfless.engine.batches import FleetData
from selfless.engine.build import build_fleet, build_streams
from selfless.engine.checkpoint import CannotContinue, Checkpoint
from selfless.engine.progress import Event, Progress, Report
from selfless.engine.stack import Tensors
from selfless.preserve.base import importance_of
from selfless.spec import Matrix, Result, Run

PATIENCE, STOP, DROP = 5, 10, 0.1  # the paper's plateau rule: ×0.1 after 5 stalled epochs, stop after 10


class Learner:
    """Trains one fleet. `checkpoint` is the file that holds its state while it trains (None: none); see `engine.checkpoint`."""

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
        self.data_dir, self.budget = data_dir, budget
        self.report = report or (lambda event: None)
        self.streams = build_streams(self.runs, data_dir)
        if len(self.streams[0].tasks) > 1:  # joint training loses nothing
            scenario.warn(self.run.preserve, self.run.scenario)
        self.epochs = max(r.epochs for r in self.runs)
        self.best: Tensors = {}  # the parameters of each member's best epoch of this task
        self._start()
        self.checkpoint = Checkpoint(checkpoint, stamp, self.fleet)
        self.resumed = self._resume()

    def _start(self) -> None:
        self.fleet = build_fleet(self.runs, self.streams, self.data_dir, self.device)
        self.progress = Progress(history=[[] for _ in self.runs], capacity=[[] for _ in self.runs])

    def _resume(self) -> bool:
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
        tests = [self.load([s.evaluate[u].test for s in self.streams]) for u in range(len(self.streams[0].evaluate))]
        task = self.streams[0].tasks[0]
        self.fleet.begin_task(self.load([s.tasks[0].train for s in self.streams]), task.heads, self.streams[0].outputs)
        self.fleet.begin_epoch(0, 0)
        self.fleet.stack.module.train()
        self.fleet.step(min(self.run.batch, self.fleet.step.data.n))
        del tests

    def _learn(self) -> list[Result]:
        first, begun = self.streams[0], time.perf_counter() - self.progress.seconds
        tests = [self.load([s.evaluate[u].test for s in self.streams]) for u in range(len(first.evaluate))]
        asides = []
        if all(task.held_out is not None for task in first.evaluate):
            asides = [self.load([s.evaluate[u].held_out for s in self.streams]) for u in range(len(first.evaluate))]
        if not self.progress.baseline:
            self.progress.baseline = self._evaluate(tests)
        for t in range(self.progress.task, len(first.tasks)):
            self.learn_task(t, begun)
            self.progress.accuracy.append(self._evaluate(tests))
            if any(task.group is not None for task in first.evaluate):
                self.progress.accuracy_all.append([self.fleet.evaluate(d, None, u) for u, d in enumerate(tests)])
            if asides:
                self.progress.held_out.append(self._evaluate(asides))
            self.progress.task, self.progress.epoch = t + 1, 0
            self.progress.seconds = time.perf_counter() - begun
            self.checkpoint.save(self.fleet, self.progress, self.best, last=t + 1 == len(first.tasks))
            seen = [float(np.mean([row[m] for row in self.progress.accuracy[-1][: t + 1]])) for m in range(len(self.runs))]
            self.report(Event(t, len(first.tasks), first.tasks[t].name, self.epochs, self.epochs, [], seen, evaluated=True))
        return self.results()

    def _evaluate(self, parts: Sequence[FleetData]) -> list[list[float]]:
        """The accuracy of every member on each task."""
        tasks, fleet, kind = self.streams[0].evaluate, self.fleet, self.run.scenario
        seen = fleet.tasks if len(self.streams[0].tasks) == len(tasks) else len(tasks)
        newest = max(fleet.tasks - 1, 0)  # without the task's identity, every task is evaluated as this one
        found = []
        for u, data in enumerate(parts):
            columns = scenario.columns_among(tasks, kind, seen, u)
            found.append(fleet.evaluate(data, columns, u if kind == "task" else newest))
        return found

    def results(self) -> list[Result]:
        """One a run, as far as the fleet has come."""
        return [self._result(m) for m in range(len(self.runs))]

    def learn_task(self, t: int, begun: float) -> None:
        """Train task t from where it stands, keep the chosen epoch, consolidate."""
        task, fleet, progress = self.streams[0].tasks[t], self.fleet, self.progress
        data = self.load([s.tasks[t].train for s in self.streams])
        chosen = {"last": None, "held-out": "held_out", "best-on-test": "test"}[self.run.select]
        watched = {w: self.load([getattr(s.tasks[t], w) for s in self.streams]) for w in _watched(self.run) if getattr(task, w) is not None}
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
            if epoch and fleet.starts_phase(epoch):  # a new phase: the best epoch is one of those to come
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
            self.checkpoint.save(self.fleet, self.progress, self.best)
            self.report(Event(t, len(self.streams[0].tasks), task.name, epoch + 1, self.epochs, loss, accuracy, resumed=self.resumed))
            if progress.over:
                break
        if chosen is not None and self.best:
            with torch.no_grad():
                for n, t_best in self.best.items():
                    (fleet.params[n] if n in fleet.params else fleet.buffers[n]).copy_(t_best)
        with torch.random.fork_rng(devices=[]):  # a sampled Fisher draws from here
            torch.manual_seed(rng.one_seed(self.run.seed, "consolidate", t))
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
        omega = importance_of([part.term for part in self.fleet.parts], self.fleet.states) or {}
        alpha = self.fleet.alpha
        for m in range(len(self.runs)):
            parameters = {n: count_free(o[m]) for n, o in omega.items()}
            neurons = {n: count_free(a[m]) for n, a in alpha.items()}
            self.progress.capacity[m].append(Capacity(parameters, neurons, self.fleet.tasks).as_dict())

    def load(self, parts: Sequence[Any]) -> FleetData:
        """One part of the data for every member, on the device."""
        return FleetData(parts, self.device, self.budget)

    # ------------------------------------------------------------------------------------------------------------- results
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


def _watched(run: Run) -> list[str]:
    """The parts that are evaluated after every epoch."""
    parts = ["held_out"] if run.held_out > 0 else []
    return [*parts, "test"] if run.select == "best-on-test" else parts
