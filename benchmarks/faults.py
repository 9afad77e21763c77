"""Numerical faults: every method at strengths from 10⁻¹² to 10¹², and data, losses and rates that are not finite.

    python benchmarks/faults.py --to faults.json

A tiny problem is trained three ways: a keeper in a loop of one's own, a run alone, and a fleet of all strengths with one healthy member.
Every case must end in one of three ways:

    finite    all numbers are finite
    named     an error, or a failed run, that says where: its layer, parameter, task or field
    refused   the value itself is refused before anything is trained

Anything else is a problem: NaN without a word, an error in torch's own words, a healthy member of a fleet that changed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless
from selfless import MAS, NoPreserver, NoSparsifier, Result, Run
from selfless.files import write_json
from selfless.preserve import PRESERVERS
from selfless.sparsify import SPARSIFIERS
from selfless.terms import Term

STRENGTHS = tuple(10.0**power for power in range(-12, 13, 3))
SMALL: dict[str, dict[str, Any]] = {  # options that make a method quick on a tiny problem
    "rwalk": {"every": 2},
    "ebll": {"code": 4, "steps": 9},
    "gpm": {"samples": 20},
    "sgp": {"samples": 20},
    "replay": {"samples": 20, "batch": 8},
    "der": {"samples": 20, "batch": 8},
}
WORDS = ("layer", "task", "parameter", "importance of", "penalty", "strength", "sample", "label", "class", "learning rate", "epoch", "loss")
Case = Callable[[], str]


def make_term(name: str, strength: float) -> Term:
    """Return a method of the registries at a strength; ValueError if the method refuses it."""
    kind = PRESERVERS.get(name) or SPARSIFIERS[name]
    return kind(strength, **SMALL.get(name, {}))  # type: ignore[call-arg]


def methods() -> dict[str, list[str]]:
    """Return the names of all methods that do something, by role."""
    preservers = [name for name, kind in PRESERVERS.items() if kind is not NoPreserver]
    return {"preserver": preservers, "sparsifier": [name for name, kind in SPARSIFIERS.items() if kind is not NoSparsifier]}


def describe(error: Exception) -> str:
    """Return "named" with the message, if it is one of this package and says where; else what is wrong with it."""
    is_ours = isinstance(error, ValueError) and any(word in str(error) for word in WORDS)
    return f"{'named' if is_ours else f'PROBLEM: {type(error).__name__}'}: {error}"


# -------------------------------------------------------------------------------------------------------------------- a keeper
def make_tasks(tasks: int = 3, samples: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Return (x, y) of small tasks."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(samples, 6, generator=generator) + t, torch.randint(0, 3, (samples,), generator=generator)) for t in range(tasks)]


def train_keeper(
    preserve: Term,
    sparsify: Term,
    tasks: list[tuple[Tensor, Tensor]],
    *,
    lr: float = 0.05,
    batch: int = 8,
    implicit: bool = True,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    norm: bool = False,
    loss: Callable[[Tensor, Any], Tensor] | None = None,
) -> str:
    """Train in a loop of one's own; return how it ended."""
    torch.manual_seed(0)
    middle = [nn.LayerNorm(8)] if norm else []
    model = nn.Sequential(nn.Linear(6, 8), *middle, nn.ReLU(), nn.Linear(8, 3))
    with selfless.attach(model, preserve, sparsify) as keeper:
        for x, y in tasks:
            taken = optimizer(model.parameters(), lr=lr)
            if implicit:
                keeper.anchor_with(taken)
            batches = list(zip(x.split(batch), y.split(batch), strict=True))
            for epoch in range(3):
                keeper.begin_epoch(epoch, 3, batches=len(batches))
                for one in batches:
                    output = model(one[0])
                    value = F.cross_entropy(output, one[1]) if loss is None else loss(output, one).mean()
                    value = value + keeper.penalty(one)
                    taken.zero_grad()
                    value.backward()
                    taken.step()
            keeper.consolidate(batches, loss=loss)
        for u in range(len(tasks)):
            with keeper.evaluating(u), torch.no_grad():
                if not bool(torch.isfinite(model(tasks[u][0])).all()):
                    return f"PROBLEM: outputs of task {u + 1} are not finite"
        wrong = [n for n, t in keeper.state_dict().items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
        wrong += [n for n, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
        return f"PROBLEM: {', '.join(wrong)} not finite" if wrong else "finite"


# ----------------------------------------------------------------------------------------------------------------- runs, fleets
def judge(result: Result) -> str:
    """Return how a run ended."""
    if result.status == "failed":
        return f"named: {result.error}" if "task" in result.error else f"PROBLEM: failed with {result.error!r}"
    wrong = [name for name, t in (result.weights or {}).items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]  # type: ignore[union-attr]
    if not np.isfinite(result.accuracy).all() or wrong:
        return f"PROBLEM: a run that is done has {', '.join(wrong) or 'accuracies'} that are not finite"
    return "finite"


def write_arrays(folder: Path, name: str = "tasks", **changes: Any) -> str:
    """Write three tasks of two classes, six by six pixels; return the name of their stream. `changes` replace arrays."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(6), 20)
    x = np.clip(rng.integers(0, 200, (6, 1, 6, 6))[y] + rng.normal(0, 60, (len(y), 1, 6, 6)), 0, 255).astype(np.uint8)
    arrays = {"x_train": x, "y_train": y, "x_test": x[::2], "y_test": y[::2], "task": y // 2, "task_test": y[::2] // 2}
    arrays |= {key: change(arrays[key]) if callable(change) else change for key, change in changes.items()}
    np.savez(folder / f"{name}.npz", **arrays)
    return f"arrays:{folder / f'{name}.npz'}"


def make_run(stream: str, **changes: Any) -> Run:
    """Return a small run."""
    base = {"stream": stream, "model": "mlp-8", "preserve": MAS(0.1), "sparsify": NoSparsifier(), "epochs": 2, "batch": 16, "lr": 0.05}
    return Run(**(base | changes))


def strength_cases(stream: str, role: str, name: str) -> dict[str, Case]:
    """Return the cases of one method: every strength with a keeper, in a run alone and in one fleet."""
    own: dict[float, Any] = {}
    for strength in STRENGTHS:
        try:
            own[strength] = make_term(name, strength)
        except ValueError as error:
            own[strength] = error
    good = {strength: term for strength, term in own.items() if isinstance(term, Term)}

    def pair(term: Term) -> tuple[Term, Term]:
        return (term, NoSparsifier()) if role == "preserver" else (MAS(0.1), term)

    def run(term: Term) -> Run:
        return make_run(stream, preserve=pair(term)[0], sparsify=pair(term)[1])

    def keeper(strength: float, **how: Any) -> str:
        if strength not in good:
            return describe(own[strength]).replace("named", "refused", 1)
        return train_keeper(*pair(good[strength]), make_tasks(), **how)

    def fleet() -> str:
        healthy = run(make_term(name, 0.5 if role == "preserver" else 1e-3)).replace(seed=1)
        alone = selfless.train(healthy, workers=1)
        found = selfless.train([*(run(term) for term in good.values()), healthy], workers=1)
        wrong = [f"{s:g}: {judge(r)}" for s, r in zip(good, found, strict=False) if judge(r).startswith("PROBLEM")]
        if found[-1].status != "done" or not np.allclose(alone.accuracy, found[-1].accuracy):
            wrong.append("the healthy member changed")
        named = [judge(r) for r in found[:-1] if r.status == "failed"]
        return f"PROBLEM: {'; '.join(wrong)}" if wrong else named[0] if named else "finite"

    cases: dict[str, Case] = {}
    for strength in STRENGTHS:
        cases[f"keeper {strength:g}"] = lambda s=strength: keeper(s)  # type: ignore[misc]
        cases[f"explicit anchor {strength:g}"] = lambda s=strength: keeper(s, implicit=False)  # type: ignore[misc]
        cases[f"adam {strength:g}"] = lambda s=strength: keeper(s, optimizer=torch.optim.Adam)  # type: ignore[misc]
    for strength in (STRENGTHS[0], 1.0, 1e6, STRENGTHS[-1]):
        if strength in good:
            cases[f"run {strength:g}"] = lambda t=good[strength]: judge(selfless.train(run(t), workers=1))  # type: ignore[misc]
    return cases | {"fleet": fleet}


# ------------------------------------------------------------------------------------------------------------------ other faults
def other_cases(folder: Path) -> dict[str, Case]:
    """Return the cases of data, losses and rates, with a keeper and in runs."""
    plain = make_tasks()

    def change(value: float) -> list[tuple[Tensor, Tensor]]:
        tasks = [(x.clone(), y) for x, y in plain]
        tasks[1][0][3, 2] = value
        return tasks

    def keeper(tasks: list[tuple[Tensor, Tensor]], **how: Any) -> Case:
        from selfless import EWC, SLNID

        return lambda: train_keeper(how.pop("preserve", EWC(1.0)), SLNID(1e-3), tasks, **how)

    def run(name: str, changes: dict[str, Any] | None = None, **settings: Any) -> Case:
        return lambda: judge(selfless.train(make_run(write_arrays(folder, name, **(changes or {})), **settings), workers=1))

    def fleet() -> str:
        stream = write_arrays(folder, "exploding")
        healthy = make_run(stream, seed=1)
        alone = selfless.train(healthy, workers=1)
        found = selfless.train([make_run(stream, lr=1e30), healthy, make_run(stream, lr=1e4, seed=2)], workers=1)
        is_same = found[1].status == "done" and np.array_equal(alone.accuracy, found[1].accuracy)
        return judge(found[0]) if is_same else "PROBLEM: the healthy member changed"

    def floats(x: Any) -> Any:
        return x.astype(np.float32) / 255

    def spoil(value: float) -> Callable[[Any], Any]:
        def spoilt(x: Any) -> Any:
            x = floats(x)
            x[7, 0, 1, 2] = value
            return x

        return spoilt

    far = [(x * 1e30, y) for x, y in plain]
    flat = [(torch.ones_like(x), y) for x, y in plain]
    one_class = [(x, torch.zeros_like(y)) for x, y in plain]
    one_sample = [(x[:1], y[:1]) for x, y in plain]
    outside = [(x, y + 7) for x, y in plain]
    lone = np.arange(120) % 20 == 0
    few = {"x_train": lambda x: x[lone], "y_train": lambda y: y[lone], "task": lambda t: t[lone]}
    both = {"x_train": floats, "x_test": floats}
    return {
        "keeper: NaN in the data": keeper(change(math.nan)),
        "keeper: infinity in the data": keeper(change(math.inf)),
        "keeper: inputs of 10³⁰": keeper(far),
        "keeper: a loss that is NaN": keeper(
            plain, loss=lambda output, batch: F.cross_entropy(output, batch[1], reduction="none") * math.nan
        ),
        "keeper: a loss that is infinite": keeper(plain, loss=lambda output, batch: output.sum(1) * math.inf),
        "keeper: learning rate 10⁴": keeper(plain, lr=1e4),
        "keeper: learning rate 10³⁰": keeper(plain, lr=1e30),
        "keeper: inputs without variance, layer norm": keeper(flat, norm=True),
        "keeper: one class": keeper(one_class),
        "keeper: one sample": keeper(one_sample),
        "keeper: batch larger than the data": keeper(plain, batch=4096),
        "keeper: an Ω that is NaN": _spoil_omega,
        "keeper: labels out of range": lambda: _labels(outside),
        "run: NaN in the data": run("nan", {**both, "x_train": spoil(math.nan)}),
        "run: infinity in the data": run("inf", {**both, "x_train": spoil(math.inf)}),
        "run: NaN in the test data": run("nan-test", {**both, "x_test": spoil(math.nan)}),
        "run: inputs of 10³⁰": run("far", {"x_train": lambda x: floats(x) * 1e30, "x_test": lambda x: floats(x) * 1e30}),
        "run: inputs without variance": run("flat", {"x_train": np.zeros_like, "x_test": np.zeros_like}),
        "run: one class in all tasks": run("one", {"y_train": np.zeros_like, "y_test": np.zeros_like}),
        "run: one sample of each class": run("few", few),
        "run: one sample in a task": run("single", {k: (lambda a: a[100 * [True] + [True] + 19 * [False]]) for k in few}),
        "run: batch larger than the data": run("batch", batch=4096),
        "run: negative labels": run("negative", {"y_train": lambda y: y - 3, "y_test": lambda y: y - 3}),
        "run: test labels without training data": run("unknown", {"y_test": lambda y: y + 3}),
        "run: learning rate 10⁴": run("rate", lr=1e4),
        "run: learning rate 10³⁰": run("rates", lr=1e30),
        "run: learning rate 10³⁰, Adam": run("adam", lr=1e30, optimizer="adam"),
        "run: weight decay 10⁶": run("decay", weight_decay=1e6),
        "fleet: one member explodes": fleet,
        "command: learning rate 10³⁰, exit status 1": lambda: _command(write_arrays(folder, "command"), folder / "out"),
    }


def _labels(tasks: list[tuple[Tensor, Tensor]]) -> str:
    """Measure Ω with labels out of range: the loop's own loss is torch's, so only `consolidate` is called."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with selfless.attach(model, selfless.EWC(1.0)) as keeper:
        keeper.consolidate([tasks[0]])
    return "PROBLEM: labels out of range were accepted"


def _spoil_omega() -> str:
    """Measure Ω with a loss that is NaN: the keeper and the model must stay as they were."""
    model, (task, *_) = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), make_tasks()
    with selfless.attach(model, selfless.EWC(1.0)) as keeper:
        keeper.consolidate([task])
        before = {name: tensor.clone() for name, tensor in keeper.state_dict().items()}
        try:
            keeper.consolidate([task], loss=lambda output, batch: output.sum(1) * math.nan)
        except ValueError as error:
            after = keeper.state_dict()
            is_kept = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
            return describe(error) if is_kept else "PROBLEM: the keeper has changed"
    return "PROBLEM: it was accepted"


def _command(stream: str, out: Path) -> str:
    """Run a command whose training diverges, and look at its exit status and message."""
    from typer.testing import CliRunner

    from selfless.cli import app

    words = ["run", "--stream", stream, "--model", "mlp-8", "--epochs", "2", "--lr", "1e30", "--workers", "1", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    lines = [line for line in done.output.splitlines() if "not finite" in line]
    is_named = done.exit_code == 1 and lines and "Traceback" not in done.output
    return f"named: {' '.join(lines[0].split())}" if is_named else f"PROBLEM: status {done.exit_code}, {done.output[-200:]}"


def attempt(case: Case) -> str:
    """Return how a case ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return case()
        except Exception as error:  # every kind is judged
            return describe(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="methods, or `other`")
    parser.add_argument("--to", type=Path, help="write the outcomes there as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="selfless-faults-") as place:
        groups = {name: strength_cases(write_arrays(Path(place)), role, name) for role, names in methods().items() for name in names}
        groups["other"] = other_cases(Path(place))
        for name, cases in groups.items():
            if given.only and name not in given.only:
                continue
            began = time.monotonic()
            found[name] = {label: attempt(case) for label, case in cases.items()}
            problems = {label: outcome for label, outcome in found[name].items() if outcome.startswith("PROBLEM")}
            counts = Counter(outcome.partition(":")[0] for outcome in found[name].values())
            print(f"{name}: {dict(counts)} {time.monotonic() - began:.0f} s", *(f"\n  {k}: {v}" for k, v in problems.items()), flush=True)
    every = [outcome for cases in found.values() for outcome in cases.values()]
    result = {
        "cases": len(every),
        "by_method": {name: dict(Counter(o.partition(":")[0] for o in cases.values())) for name, cases in found.items()},
        "other": found.get("other", {}),
        "problems": [f"{name}, {label}: {o}" for name, cases in found.items() for label, o in cases.items() if o.startswith("PROBLEM")],
    }
    print(json.dumps({"cases": result["cases"], "problems": len(result["problems"])}))
    if given.to:
        write_json(given.to, result)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
