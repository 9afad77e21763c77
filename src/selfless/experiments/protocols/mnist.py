"""Permuted MNIST: the runs and grids of figures 2 and 4, of half of table 1, and of section 4.3."""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import EQUAL, Cell, Choice, Profile
from selfless.experiments.protocols.protocol import (
    ACTIVATIONS,
    COMPETITORS,
    DECADES,
    INHIBITION,
    Grid,
    Protocol,
    equal_grids,
)
from selfless.preserve import EWC, MAS
from selfless.spec import Run

PMNIST_ANCHORS = (0.001, 0.003, 0.01, 0.03, 0.1)
EWC_ANCHORS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # of the curve in profile `equal`; one is chosen from the decades
EWC_DEMO = ((50.0, 2e-3), (200.0, 1e-2))  # λ_Ω and λ of earlier commits of the released demo; the last one has 10 and 2e-3
EWC_INHIBITION = (1e-4, 1e-3, 1e-2)
PMNIST_INHIBITION = (1e-4, 3e-4, 1e-3, 3e-3)


def permuted_mnist(width: int, profile: Profile) -> Protocol:
    """Return five tasks, 784-N-N-10, one head, ten epochs at lr 1e-2."""
    column = f"pMNIST {width}"
    if profile == "paper":
        base = Run(model=f"mlp-{width}", preserve=MAS(0.1, estimator="per-batch"), anchor="explicit", select="best-on-test")
        grids = dict.fromkeys(("No-Reg", *ACTIVATIONS), Grid((0.1,))) | dict.fromkeys(INHIBITION, Grid((0.1,), (1e-3,)))
        return Protocol(column, base, grids | dict.fromkeys(COMPETITORS, Grid((0.1,), DECADES)), Choice("test", seeds=(0, 1)))
    base = Run(model=f"mlp-{width}", preserve=MAS(0.01))
    if profile == "equal":
        return Protocol(column, base, equal_grids(PMNIST_ANCHORS[::2], DECADES), EQUAL)
    grids = dict.fromkeys(("No-Reg", *ACTIVATIONS), Grid(PMNIST_ANCHORS))
    grids |= dict.fromkeys(INHIBITION, Grid(PMNIST_ANCHORS, PMNIST_INHIBITION))
    return Protocol(column, base, grids | dict.fromkeys(COMPETITORS, Grid(PMNIST_ANCHORS, DECADES)), Choice("held-out", seeds=(100, 101)))


def permuted_mnist_best(width: int) -> tuple[Cell, ...]:
    """Return our best settings (same network and epochs, a cosine schedule), and joint training trained the same way."""
    plain = permuted_mnist(width, "ours")
    cosine = dataclasses.replace(plain.base, schedule="cosine")
    rates = (0.01, 0.03, 0.1)
    ours = dataclasses.replace(plain, base=cosine, grids={"SLNID": Grid((0.001, 0.003, 0.01, 0.03), (1e-4, 3e-4, 1e-3))})
    best = tuple(run for lr in rates for run in ours.candidates("SLNID", lr=lr))
    return Cell("SLNID, best of ours", plain.column, best, choice=plain.choice), ours.joint(row="joint, best of ours", lr=rates)


def with_ewc(width: int, profile: Profile) -> Protocol:
    """Return permuted MNIST with EWC in place of MAS."""
    plain = permuted_mnist(width, profile)
    if profile == "paper":
        grids = {"No-Reg": Grid((10.0,)), "SLNID": Grid((10.0,), (2e-3,))}
        return dataclasses.replace(plain, base=dataclasses.replace(plain.base, preserve=EWC(10.0, estimator="per-batch")), grids=grids)
    if profile == "equal":
        grids = equal_grids(EWC_ANCHORS[::2], EWC_INHIBITION)
        return dataclasses.replace(plain, base=dataclasses.replace(plain.base, preserve=EWC(10.0)), grids=grids)
    anchors = (1.0, 10.0, 100.0, 1000.0)
    grids = {"No-Reg": Grid((0.1, *anchors, 1e4)), "SLNID": Grid(anchors, (1e-4, 3e-4, 1e-3, 2e-3))}
    return dataclasses.replace(plain, base=dataclasses.replace(plain.base, preserve=EWC(10.0)), grids=grids)
