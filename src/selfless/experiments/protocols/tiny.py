"""Tiny ImageNet: the runs and grids of figure 3b."""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import EQUAL, Cell, Choice, Profile
from selfless.experiments.protocols.protocol import Grid, Protocol, equal_grids
from selfless.preserve import MAS
from selfless.spec import Run

TINY_IMPLICIT = "The anchor is implicit; whether the authors' explicit one survives here was not tried"
TINY_PLAIN = "No augmentation, as on CIFAR: with the authors' resized crops this network is underfitted after 15 epochs (docs/lab-notes.md)"
TINY_ANCHORS, TINY_INHIBITION = (0.1, 1.0), (1e-5, 1e-4, 1e-3)  # of every row in profile `equal`
TINY_ASIDE = "A tenth of the training images is kept aside in the reported runs too"


def tiny_imagenet(profile: Profile) -> Protocol:
    """Return ten tasks of twenty classes, the paper's VGG variant.

    `paper`: lr 1e-2, dropped when held-out accuracy stalls, at most 60 epochs, resized crops. `ours`: ten epochs with a cosine schedule,
    no augmentation.
    """
    run = Run(
        stream="split-tiny-imagenet",
        model="vgg-slim",
        tasks=10,
        epochs=60,
        schedule="plateau",
        augment="resized",
        alpha="mean",
        preserve=MAS(4.0),
    )
    if profile == "paper":
        base = dataclasses.replace(run, preserve=MAS(4.0, estimator="per-batch"), select="best-on-test")
        grids = {"No-Reg": Grid((4.0,)), "SLNID": Grid((4.0,), (1e-6,))} | dict.fromkeys(
            ("L1-Rep", "DeCov"), Grid((4.0,), (1e-4, 1e-6, 1e-8))
        )
        return Protocol("Tiny ImageNet", base, grids, Choice("test", seeds=(0,)))
    base = dataclasses.replace(run, epochs=10, batch=64, schedule="cosine", ramp=3, augment="none", alpha="sum", precision="bf16")
    if profile == "equal":  # `run` holds a tenth aside, for its plateau schedule; the recorded `ours` inherited that, by mistake
        return Protocol("Tiny ImageNet", dataclasses.replace(base, held_out=0.0), equal_grids(TINY_ANCHORS, TINY_INHIBITION), EQUAL)
    grids = {"No-Reg": Grid((0.1, 0.3, 1.0)), "SLNID": Grid((0.1, 0.3), (1e-5, 3e-5, 1e-4))}
    grids |= {"L1-Rep": Grid((0.3,), (1e-5, 1e-4)), "DeCov": Grid((0.3,), (1e-4, 1e-3))}
    return Protocol("Tiny ImageNet", base, grids, Choice("held-out", seeds=(100,)))


def tiny_best() -> tuple[Cell, ...]:
    """Return SLNID in all layers, and No-Reg and SLNID with one and a half times the epochs, shifts and mirroring."""
    plain = tiny_imagenet("ours")
    ours = dataclasses.replace(plain, grids={"No-Reg": Grid((0.1, 0.3)), "SLNID": Grid((0.3,), (1e-5, 3e-5))})
    return (plain.everywhere(Grid((0.1, 0.3), (3e-6, 1e-5, 3e-5))), *ours.augmented(("No-Reg", "SLNID"), epochs=15))
