"""Section 4.1's rule of thumb: choose λ by the first task alone. `selfless tune` does that for any stream and network.

The paper says "the minimum value that maintains similar or better accuracy on the first task compared to the unregularized case". Taken
literally, every small λ does, so the smallest of a grid wins, and the result depends on where the grid begins: here at 10⁻⁹, where the
paper's grid of the competing regularizers ends; for SLNID it names none. Its figure 4 says "remains close to the optimal performance on the
current task, while utilizing the minimum capacity": the largest λ that keeps the accuracy. That reading is judged as the paper's claim; the
literal one is ours, because a grid that begins high enough, as ours first did, makes it hold.
"""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import Cell, Choice, Claim, Experiment, Profile, at_least, at_most
from selfless.experiments.fig_4 import sweep
from selfless.experiments.protocols import DECADES
from selfless.sparsify import SLNID, NoSparsifier
from selfless.spec import Run

FIRST, AVERAGE = "task 1, held out", "average accuracy"
LARGEST, SMALLEST, BEST = "rule: largest λ that keeps task 1", "rule: smallest λ that keeps task 1", "best λ on held-out data"


def rule_of_thumb(profile: Profile) -> Experiment:
    """Both readings of the rule, beside the best λ on held-out data and every λ."""
    runs = sweep(profile)
    shown = {run.sparsify.strength for run in runs.values()}
    weak = sorted(strength for strength in DECADES if strength not in shown)
    none, *strong = runs.values()
    candidates = (none, *(dataclasses.replace(none, sparsify=SLNID(strength)) for strength in weak), *strong)
    seeds = (100, 101)
    readings = {LARGEST: Choice("rule-largest", seeds), SMALLEST: Choice("rule-smallest", seeds), BEST: Choice("held-out", seeds)}
    cells = [Cell(row, AVERAGE, candidates, choice=choice) for row, choice in readings.items()]
    cells += [Cell(row, AVERAGE, (run,)) for row, run in runs.items()]
    cells += [Cell(row, FIRST, (run,), value="first-held-out", then={"tasks": 1, "held_out": 0.1}) for row, run in runs.items()]
    claims = (
        Claim(
            "The largest λ that keeps task 1's accuracy is within half a point of the best λ",
            (at_least((LARGEST, AVERAGE), (BEST, AVERAGE), -0.5),),
        ),
        Claim(
            "Ours: the smallest λ that keeps task 1's accuracy, the rule taken literally, is half a point or more below the best λ",
            (at_most((SMALLEST, AVERAGE), (BEST, AVERAGE), -0.5),),
            ours=True,
        ),
    )
    return Experiment(
        "rule-of-thumb",
        "Choosing λ by the first task alone",
        "section 4.1",
        "rule",
        tuple(cells),
        claims,
        notes=(
            "“Keeps”: within half a point of No-Reg on held-out images of task 1, mean over two seeds that are not among those reported",
            "In a grid that begins low enough the smallest λ keeps task 1: here 1e-9; in a first grid it was 1e-4, as good as the best",
        ),
        profile=profile,
    )


def tuning(base: Run, strengths: tuple[float, ...], choice: Choice) -> Cell:
    """Return a cell that the rule chooses for, for any run of a user."""
    kind = base.sparsify if base.sparsify.is_on else SLNID()
    penalties = [NoSparsifier(), *(kind.with_strength(strength) for strength in strengths)]
    return Cell("rule", "task 1", tuple(dataclasses.replace(base, sparsify=penalty) for penalty in penalties), choice=choice)
