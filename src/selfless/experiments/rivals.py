"""Not in the paper: every preserver alone and with SLNID, on the same network with the same training; joint training as the upper bound.

One table for permuted MNIST (784-128-128-10, five tasks, one head) and one for split CIFAR-100 (cnn-256, ten tasks, one head per task). In
each table all methods have the same training: SGD with momentum, ten epochs at lr 1e-2, or 25 (half of table 1's) from 5e-2 with a cosine
schedule. Strengths are chosen on held-out data, around the values of the methods' papers (in the comments) and of this library, whose Ω are
means over samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from selfless.experiments.base import Cell, Claim, Experiment, Figure, Profile, at_least, at_most, more
from selfless.experiments.protocols import Grid, Protocol, cifar, over, permuted_mnist
from selfless.experiments.table_1 import PUBLISHED as TABLE_1
from selfless.preserve import EBLL, EWC, HAT, IMM, MAS, SI, LocalMAS, LwF, NoPreserver, OnlineEWC, PackNet, Preserver, RWalk
from selfless.sparsify import SLNID
from selfless.spec import Run

METHODS: dict[str, Preserver] = {
    "Finetune": NoPreserver(),
    "LwF": LwF(damped=False),  # as recorded
    "EBLL": EBLL(damped=False),
    "IMM-mean": IMM(merge="mean"),
    "IMM-mode": IMM(merge="mode"),
    "SI": SI(),
    "RWalk": RWalk(),
    "EWC": EWC(),
    "online EWC": OnlineEWC(),
    "MAS": MAS(),
    "local MAS": LocalMAS(),
    "HAT": HAT(),
    "PackNet": PackNet(),
}
ON_CIFAR = METHODS | {"HAT": HAT(s_max=50.0), "EBLL": EBLL(warmup=0, damped=False)}  # why: see NOTES
EXACT = ("HAT", "PackNet")  # they freeze the weights of old tasks; only the last task shows if they froze too many
PENDING = "Not in the paper, so it has no such profile: use --profile ours"
NOTES = (
    "Lost: by how many points the accuracy on a task has fallen since it was learnt, mean over the old tasks",
    "HAT and PackNet lose nothing by construction: what an old task uses is frozen. SLNID acts on what their gates and masks let through",
    "Joint training sees all tasks at once: an upper bound, not a method",
    "Permuted MNIST has one head for all tasks: LwF and EBLL hold the very outputs that a new task is to change",
    "CIFAR: 25 epochs from lr 0.05, where table 1 has 50 from 0.03: its values are not the same",
    "CIFAR: EBLL without its warm-up, which breaks half of the runs at this rate (docs/lab-notes.md)",
    "CIFAR: EWC and IMM with SLNID choose what α is of",
    "CIFAR: HAT's gates have a slope of 50 at most, where its paper has 400: with 400 it has hardly begun to learn in half of these epochs",
)


def rivals(profile: Profile) -> Experiment:
    """Every preserver on permuted MNIST and on split CIFAR-100, alone and with SLNID."""
    equal = profile == "equal"
    on_mnist, on_cifar = permuted_mnist(128, "equal" if equal else "ours"), _on_cifar(equal=equal)
    where = (on_mnist.column, on_cifar.column)
    published = TABLE_1[on_mnist.column]
    if equal:
        methods = METHODS | {"LwF": LwF(), "EBLL": EBLL()}  # damped: no strength diverges
        spared: dict[str, Preserver] = {"EWC": EWC(alpha="function"), "IMM-mean": IMM(merge="mean", alpha="function")}
        spared |= {"IMM-mode": IMM(merge="mode", alpha="function"), "HAT": HAT(s_max=50.0)}
        cells = _cells(on_mnist, EQUAL_MNIST, EQUAL_INHIBITION, methods=methods, published=published)
        cells += _cells(on_cifar, EQUAL_CIFAR, EQUAL_INHIBITION, methods=methods | spared)
    else:
        cells = _cells(on_mnist, MNIST_STRENGTHS, (1e-4, 3e-4, 1e-3), published=published)
        cells += _cells(on_cifar, CIFAR_STRENGTHS, (3e-3,), methods=ON_CIFAR, choose_alpha=True)
    helped = [(column, row) for column in where for row in METHODS]
    claims = [Claim(f"{column}: leaving room helps {row}", (more((row, _inhibited(column)), (row, column)),)) for column, row in helped]
    lost = [name(_lost(column)) for column in where for name in (str, _inhibited)]
    claims.append(Claim("HAT and PackNet forget nothing", tuple(at_most((row, column), None) for row in EXACT for column in lost)))
    reached = tuple(at_least(c.place, None, c.published - 1) for c in cells if c.row == "MAS" and c.published is not None)
    claims.append(Claim("pMNIST 128: MAS is within a point of what this paper publishes for it, or above", reached))
    return outside_the_paper("rivals", "Every way to keep old tasks, alone and with SLNID", "pairs", cells, claims, NOTES, profile)


MNIST_STRENGTHS: dict[str, tuple[float, ...]] = {
    "Finetune": (0.0,),
    "LwF": (0.1, 0.3, 1.0, 2.0, 4.0),  # 1 (Li & Hoiem 2016)
    "EBLL": (0.1, 0.3, 1.0, 2.0),
    "IMM-mean": (1e-4, 1e-3, 1e-2, 1e-1),  # L2-transfer 1e-4 … 1e-1 (Lee et al. 2017)
    "IMM-mode": (1e-3, 3e-3, 1e-2, 3e-2),
    "SI": (0.3, 1.0, 3.0, 10.0),  # c = 0.1, by Adam and ten times as many neurons (Zenke et al. 2017)
    "RWalk": (0.3, 1.0, 3.0, 10.0),  # 1 and more, Ω being at most 2 (Chaudhry et al. 2018)
    "EWC": (1.0, 10.0, 100.0),  # as in the experiment `ewc`
    "online EWC": (1.0, 10.0, 100.0),
    "MAS": (0.001, 0.003, 0.01, 0.03),  # 1 (Aljundi et al. 2018), on other networks; here as in table 1
    "local MAS": (0.01, 0.03, 0.1, 0.3),
    "HAT": (0.1, 0.75, 2.0),  # c = 0.75, s_max = 400 (Serrà et al. 2018)
    "PackNet": (0.65, 0.75, 0.85, 0.9),  # 0.5 and 0.75 for two and three tasks (Mallya & Lazebnik 2018)
}
# Anchors are some 500 times those of permuted MNIST, as MAS's are: λ is scaled by the mean Ω of each method after the first task
# (docs/lab-notes.md).
CIFAR_STRENGTHS: dict[str, tuple[float, ...]] = {
    "Finetune": (0.0,),
    "LwF": (0.3, 1.0, 3.0),
    "EBLL": (0.3, 1.0, 3.0),
    "IMM-mean": (1e-2, 1e-1, 1.0),
    "IMM-mode": (1e-2, 1e-1, 1.0),
    "SI": (1e2, 1e3, 1e4),
    "RWalk": (1e2, 1e3, 1e4),
    "EWC": (1e2, 1e3, 1e4),
    "online EWC": (1e2, 1e3, 1e4),
    "MAS": (1.0, 3.0, 10.0),  # as in table 1
    "local MAS": (0.03, 0.3, 3.0),
    "HAT": (0.1, 0.75, 2.0),
    "PackNet": (0.75, 0.85, 0.9),  # ten tasks: the last tasks have only the weights that the first ones leave
}


# Profile `equal`: three decades for every method, times three λ with SLNID; grids grow and are refined by themselves. PackNet's strength is
# a share, which has no decades: it has five.
EQUAL_INHIBITION = (1e-4, 1e-3, 1e-2)
EQUAL_MNIST: dict[str, tuple[float, ...]] = {
    "Finetune": (0.0,),
    **dict.fromkeys(("LwF", "EBLL", "SI", "RWalk", "HAT"), (0.1, 1.0, 10.0)),
    **dict.fromkeys(("IMM-mean", "IMM-mode", "MAS"), (1e-3, 1e-2, 1e-1)),
    **dict.fromkeys(("EWC", "online EWC"), (1.0, 10.0, 100.0)),
    "local MAS": (0.01, 0.1, 1.0),
    "PackNet": (0.5, 0.65, 0.75, 0.85, 0.9),
}
EQUAL_CIFAR = EQUAL_MNIST | {
    **dict.fromkeys(("IMM-mean", "IMM-mode"), (1e-2, 1e-1, 1.0)),
    **dict.fromkeys(("SI", "RWalk", "EWC", "online EWC"), (1e2, 1e3, 1e4)),
    "MAS": (0.1, 1.0, 10.0),
}


def _on_cifar(*, equal: bool = False) -> Protocol:
    """Return the protocol of split CIFAR-100: half of table 1's epochs, and four tasks to choose by (`equal`: all ten)."""
    plain = cifar(256, "equal" if equal else "ours")
    shorter = dataclasses.replace(plain.base, epochs=25, lr=0.05)
    if equal:
        return dataclasses.replace(plain, base=shorter)
    return dataclasses.replace(plain, base=shorter, choice=dataclasses.replace(plain.choice, tasks=4))


def _inhibited(column: str) -> str:
    return f"{column} + SLNID"


def _lost(column: str) -> str:
    return f"{column} lost"


def _cells(
    protocol: Protocol,
    strengths: Mapping[str, tuple[float, ...]],
    inhibition: tuple[float, ...],
    *,
    methods: Mapping[str, Preserver] = METHODS,
    published: Mapping[str, float] | None = None,
    choose_alpha: bool = False,
) -> list[Cell]:
    """Return four columns of a protocol, in order: accuracy alone and with SLNID, points lost alone and with SLNID.

    published      table 1's column, where the training is the same
    choose_alpha   with SLNID, EWC and IMM may take α from the function too

    HAT and PackNet are chosen by all tasks: their last tasks have only the capacity that the first ones leave.
    """
    published = published or {}
    accuracy, lost = protocol.column, _lost(protocol.column)
    known = {("MAS", accuracy): published.get("No-Reg"), ("MAS", _inhibited(accuracy)): published.get("SLNID")}
    cells: list[Cell] = []
    for row, values in strengths.items():
        penalties = inhibition if len(values) * len(inhibition) > 1 else (1e-3, *inhibition)  # Finetune has no anchor to choose
        for name, grid in ((str, Grid(values)), (_inhibited, Grid(values, penalties))):
            method = methods[row]
            runs = candidates(protocol.base, method, grid)
            if choose_alpha and grid.strengths and isinstance(method, EWC | IMM):
                runs += candidates(protocol.base, dataclasses.replace(method, alpha="function"), grid)
            choice = dataclasses.replace(protocol.choice, tasks=None) if row in EXACT else protocol.choice
            cells.append(Cell(row, name(accuracy), runs, known.get((row, name(accuracy))), choice=choice))
            cells.append(Cell(row, name(lost), runs, value="lost", choice=choice))
    order = [accuracy, _inhibited(accuracy), lost, _inhibited(lost)]
    return [*sorted(cells, key=lambda cell: order.index(cell.column)), protocol.joint(published.get("joint"))]


def candidates(base: Run, method: Preserver, grid: Grid) -> tuple[Run, ...]:
    """Return one run for every strength of the method and of SLNID in the grid."""
    plain = over(base, preserve=[method.with_strength(strength) for strength in grid.anchors])
    return tuple(run for one in plain for run in over(one, sparsify=[SLNID(s) for s in grid.strengths] or [one.sparsify]))


def outside_the_paper(
    name: str, title: str, figure: Figure, cells: Sequence[Cell], claims: Sequence[Claim], notes: tuple[str, ...], profile: Profile
) -> Experiment:
    """Return an experiment that the paper does not have; its `paper` profile has cells but nothing to run."""
    if profile == "paper":
        cells = [dataclasses.replace(cell, candidates=()) for cell in cells]
    return Experiment(
        name,
        title,
        "not in the paper",
        figure,
        tuple(cells),
        tuple(claims),
        notes=notes,
        pending=PENDING if profile == "paper" else "",
        profile=profile,
    )
