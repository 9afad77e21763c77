"""CIFAR-100: the runs and grids of figure 3a, of half of table 1, and of table 3."""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import EQUAL, Cell, Choice, Profile
from selfless.experiments.protocols.protocol import Grid, Protocol, equal_grids
from selfless.preserve import MAS
from selfless.spec import Run

CIFAR_IMPLICIT = (
    "The authors' explicit anchor diverges on CIFAR at strengths that preserve anything (docs/lab-notes.md), and they published no λ for "
    "it: the anchor is implicit here, and strengths are chosen on test data with seed 0"
)
CIFAR_128 = (
    "At 128 units No-Reg, L1-Rep and DeCov have the strengths that 256 units took; SLNID and the rest of table 1 had two to choose from"
)
BLURRED_IMPLICIT = (
    "The anchor is implicit, not the authors' explicit one, which would probably survive at these strengths (docs/lab-notes.md)"
)
CIFAR_ANCHORS, CIFAR_INHIBITION = (1.0, 10.0), (1e-4, 1e-3, 1e-2)  # of every row in profile `equal`
CIFAR_EVERYWHERE = Grid((1.0, 3.0), (1e-3, 3e-3))
NATURAL = {"class_order": "natural"}  # the paper has "the first 10 classes", then "classes 11-20"


def cifar(width: int, profile: Profile) -> Protocol:
    """Return ten tasks of ten classes, conv 32-32-64-64 + FC N, a new head per task, fifty epochs.

    It uses bf16, which is twice as fast and just as accurate (docs/performance.md).
    """
    column = f"CIFAR {width}"
    run = Run(
        stream="split-cifar-100",
        stream_options=NATURAL,
        model=f"cnn-{width}",
        tasks=10,
        epochs=50,
        preserve=MAS(1.0),
        precision="bf16",
    )
    if profile == "paper":
        base = dataclasses.replace(run, preserve=MAS(10.0, estimator="per-batch"), select="best-on-test")
        grids = dict.fromkeys(("SNI", "SLNI", "SNID"), Grid((30.0,), (1e-3, 3e-3)))
        if width == 256:
            grids |= {"No-Reg": Grid((10.0, 30.0, 100.0)), "SLNID": Grid((10.0, 30.0, 100.0), (1e-3, 3e-3))}
            grids |= {"L1-Rep": Grid((30.0,), (1e-3, 1e-4, 1e-5)), "DeCov": Grid((30.0,), (1e-2, 1e-3, 1e-4))}
        else:  # the strengths chosen at 256 units, or their neighbours
            grids |= {"No-Reg": Grid((100.0,)), "SLNID": Grid((10.0, 30.0), (3e-3,))}
            grids |= {"L1-Rep": Grid((30.0,), (1e-5,)), "DeCov": Grid((30.0,), (1e-2,))}
        return Protocol(column, base, grids, Choice("test", seeds=(0,)))
    base = dataclasses.replace(run, lr=0.03, schedule="cosine")
    if profile == "equal":
        return Protocol(column, base, equal_grids(CIFAR_ANCHORS, CIFAR_INHIBITION), EQUAL)
    others = Grid((10.0,), (1e-3, 3e-3))
    grids = dict.fromkeys(("SNID", "SLNI"), others) | {"SNI": Grid((10.0,), (3e-4, 1e-3)), "L1-Rep": Grid((10.0,), (1e-4, 1e-3))}
    grids |= {"No-Reg": Grid((1.0, 3.0, 10.0)), "SLNID": Grid((3.0, 10.0), (1e-3, 2e-3, 3e-3)), "DeCov": Grid((10.0,), (1e-3, 1e-2))}
    return Protocol(column, base, grids, Choice("held-out", seeds=(100,)))


def cifar_best(width: int) -> tuple[Cell, ...]:
    """Return our best settings (same network and epochs, with shifts and mirroring), and No-Reg and joint training trained the same way."""
    plain = cifar(width, "ours")
    grids = {"No-Reg": Grid((1.0, 3.0)), "SLNID": Grid((0.3, 1.0), (3e-4, 1e-3))}
    ours = dataclasses.replace(plain, base=dataclasses.replace(plain.base, augment="crop-flip"), grids=grids)
    return (*ours.augmented(("No-Reg", "SLNID")), ours.joint(row="joint, augmented"))


def blurred_cifar(profile: Profile) -> Protocol:
    """Return ten groups without hard boundaries, the current one drawn with p = 2/3; 1,000 steps of batch 200 (four epochs), one head."""
    run = Run(
        stream="blurred-cifar-100",
        stream_options=NATURAL,
        model="cnn-256",
        tasks=10,
        epochs=4,
        preserve=MAS(0.01),
        precision="bf16",
    )
    if profile == "paper":
        base = dataclasses.replace(run, preserve=MAS(0.1, estimator="per-batch"), select="best-on-test")
        grids = {"No-Reg": Grid((0.01, 0.1))} | dict.fromkeys(("SLNI", "SLNID"), Grid((0.01, 0.1), (1e-3,)))
        return Protocol("", base, grids, Choice("test", seeds=(0,)))
    if profile == "equal":
        return Protocol("", run, equal_grids((0.001, 0.01), CIFAR_INHIBITION), EQUAL)
    anchors = (0.001, 0.01, 0.1)
    grids = {"No-Reg": Grid(anchors), "SLNI": Grid(anchors, (3e-4, 1e-3)), "SLNID": Grid(anchors, (3e-4, 1e-3, 3e-3))}
    return Protocol("", run, grids, Choice("held-out", seeds=(100,)))
