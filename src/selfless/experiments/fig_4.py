"""Figure 4: how many weights inhibition leaves free (top), and how many neurons are near zero (bottom). Permuted MNIST, 128 units."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from selfless.experiments.base import Cell, Claim, Experiment, Profile, at_least, more
from selfless.experiments.protocols import permuted_mnist
from selfless.sparsify import SLNID, NoSparsifier
from selfless.spec import Run

SWEEP = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
FREE, END, AVERAGE = "free after task 1", "free at the end", "average accuracy"


def sweep(profile: Profile) -> dict[str, Run]:
    """Return row → run: No-Reg and each λ, with one anchor strength for all (the paper's 0.1; ours 0.01)."""
    base = permuted_mnist(128, profile).base
    runs = {"No-Reg": dataclasses.replace(base, sparsify=NoSparsifier())}
    return runs | {f"λ = {strength:g}": dataclasses.replace(base, sparsify=SLNID(strength)) for strength in SWEEP}


def fig_4_top(profile: Profile) -> Experiment:
    """Figure 4, top: free first-layer weights after each task, by λ."""
    runs = sweep(profile)
    rows = list(runs)
    columns = {FREE: "free", END: "free-last", AVERAGE: "average"}
    cells = tuple(Cell(row, column, (run,), value=value) for row, run in runs.items() for column, value in columns.items())
    claims = (
        Claim(
            "The more inhibition, the more parameters stay free: after task 1, every λ leaves at least as many as the one before",
            tuple(at_least((b, FREE), (a, FREE)) for a, b in pairwise(rows)),
        ),
        Claim(
            "At the end of the sequence, too, more inhibition leaves more parameters free",
            tuple(at_least((b, END), (a, END)) for a, b in pairwise(rows)),
        ),
        Claim(
            "With our grid: every λ but its highest, 0.03, improves over No-Reg",
            tuple(more((row, AVERAGE), ("No-Reg", AVERAGE)) for row in rows[1:-1]),
            ours=True,  # the paper says "apart from the highest λ", and its grid is not in the text
        ),
    )
    return Experiment(
        "fig-4-top",
        "Free first-layer weights after each task, by λ",
        "figure 4, top",
        "curves",
        cells,
        claims,
        notes=(f"A weight is free while Ω < 0.01. The anchor is {runs['No-Reg'].preserve} for every λ; nothing is chosen",),
        profile=profile,
    )


def fig_4_bottom(profile: Profile) -> Experiment:
    """Figure 4, bottom: mean activations of first-layer neurons."""
    protocol = permuted_mnist(128, profile)
    rows = ("SLNID", "DeCov", "L1-Rep", "L1-Param", "No-Reg")
    column = "near zero"
    claim = Claim(
        "SLNID's activations peak at zero, the others' are spread: more neurons below 0.05 than with any other, by five points or more",
        tuple(at_least(("SLNID", column), (row, column), 5) for row in rows[1:]),
    )
    return Experiment(
        "fig-4-bottom",
        "Mean activation of each first-layer neuron on the first task",
        "figure 4, bottom",
        "histogram",
        protocol.cells(rows, column=column, value="quiet"),
        (claim,),
        notes=("Each method as in figure 2, at the end of the sequence, over the first task's training images",),
        profile=profile,
    )
