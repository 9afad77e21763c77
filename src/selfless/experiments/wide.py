"""Not in the paper: do the best methods of `beyond` also lead on other streams and networks?

    CIFAR, 20 tasks   twenty tasks of five classes, cnn-256, 20 epochs, SGD along a cosine from 0.03
    ResNet-18         ten tasks of ten classes, group norm, 16 to 128 channels, ten epochs, SGD along a cosine from 0.05
    ViT               ten tasks of ten classes, four blocks of width 64 from scratch, 20 epochs, AdamW along a cosine from 1e-3
    LoRA              ten tasks of five classes of the first 50; the ViT learned the other 50 classes before, is frozen, and has LoRA
    Tiny ImageNet     ten tasks of twenty classes, vgg-slim, ten epochs, SGD along a cosine from 0.01; λ grows over three epochs

All have crops and flips, a head for each task, bf16, and sparsifiers in all layers. Every method of a column has four
candidates, scored by one held-out seed on the first four tasks; PackNet by all tasks, because its last tasks have only what the first
ones leave. A grid grows by one value at an end where its winner stands, that of ResNet-18 by three, and that of the 20 tasks, which was
trained first, by none. The chosen one is trained on other seeds, with all training images, and evaluated on test images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from selfless.experiments.base import Cell, Choice, Claim, Experiment, Profile, more
from selfless.experiments.beyond import Pair, grid
from selfless.experiments.protocols import Protocol
from selfless.experiments.rivals import outside_the_paper
from selfless.preserve import MAS, LwF, NoPreserver, PackNet
from selfless.sparsify import SLNID, DeCov
from selfless.spec import Run

CHOICE, FIRST = Choice("held-out", seeds=(100,), tasks=4, extend=1), "CIFAR, 20 tasks"
EXTEND = {FIRST: 0, "ResNet-18": 3}
FINETUNE, LWF, PACKNET, ANCHORED = "Finetune", "LwF + DeCov", "PackNet + DeCov", "MAS + SLNID"
NOTES = (
    "ResNet-18: grids were widened after its seeds had been seen, when every winner had the smallest λ; LwF + DeCov was not ahead then",
    "Every method of a column had the same number of candidates before grids grew; joint training is an upper bound, not a method",
    "ResNet-18 has 16 channels in its first stage and a stem with stride 2, so that its runs are short",
    "LoRA: the transformer learns the last 50 classes of CIFAR-100 when the network is built, 3,000 steps; no task has these classes",
)
_BASE = Run(
    stream="split-cifar-100",
    stream_options={"class_order": "natural"},
    model="cnn-256",
    preserve=NoPreserver(),
    tasks=10,
    epochs=20,
    lr=0.03,
    schedule="cosine",
    augment="crop-flip",
    layers="all",
    precision="bf16",
)
_NETWORKS = "selfless.experiments.wide_networks"
_FIVE = {"class_order": "natural", "classes_per_task": 5}
BASES: dict[str, Run] = {
    FIRST: dataclasses.replace(_BASE, stream_options=_FIVE, tasks=20),
    "ViT": dataclasses.replace(_BASE, model=f"{_NETWORKS}:vit", optimizer="adamw", lr=1e-3),
    "ResNet-18": dataclasses.replace(_BASE, model=f"{_NETWORKS}:resnet18", epochs=10, lr=0.05),
    "LoRA": dataclasses.replace(_BASE, stream_options=_FIVE, model=f"{_NETWORKS}:lora_vit", optimizer="adamw", lr=1e-3),
    "Tiny ImageNet": dataclasses.replace(
        _BASE, stream="split-tiny-imagenet", stream_options={}, model="vgg-slim", epochs=10, batch=64, lr=0.01, ramp=3
    ),
}
_TEACHERS, _SHARES = [LwF(1.0), LwF(3.0)], [PackNet(0.75), PackNet(0.85)]
_ON_CIFAR: dict[str, tuple[Pair, ...]] = {
    LWF: grid(_TEACHERS, [DeCov(3e-3), DeCov(1e-2)]),
    PACKNET: grid(_SHARES, [DeCov(3e-3), DeCov(1e-2)]),
    ANCHORED: grid([MAS(0.3), MAS(3.0)], [SLNID(1e-4), SLNID(1e-3)]),
}
_ON_OTHERS: dict[str, tuple[Pair, ...]] = {  # the layers are wider or more: a penalty on pairs is larger there
    LWF: grid(_TEACHERS, [DeCov(3e-4), DeCov(3e-3)]),
    PACKNET: grid(_SHARES, [DeCov(3e-4), DeCov(3e-3)]),
    ANCHORED: grid([MAS(0.1), MAS(1.0)], [SLNID(1e-4), SLNID(1e-3)]),
}
_ON_TINY: dict[str, tuple[Pair, ...]] = {
    LWF: grid(_TEACHERS, [DeCov(1e-4), DeCov(1e-3)]),
    PACKNET: grid(_SHARES, [DeCov(1e-4), DeCov(1e-3)]),
    ANCHORED: grid([MAS(0.1), MAS(0.3)], [SLNID(1e-5), SLNID(3e-5)]),
}
CANDIDATES = dict.fromkeys(BASES, _ON_OTHERS) | {FIRST: _ON_CIFAR, "Tiny ImageNet": _ON_TINY}


def wide(profile: Profile) -> Experiment:
    """Three methods, fine-tuning and joint training on five streams and networks; a column is complete before the next one begins."""
    cells = [cell for column, base in BASES.items() for cell in _column(column, base, CANDIDATES[column])]
    claims = [
        Claim(f"{column}: {LWF} is ahead of {other}", (more((LWF, column), (other, column)),), ours=True)
        for column in BASES
        for other in (ANCHORED, PACKNET)
    ]
    return outside_the_paper("wide", "The best methods on other streams and networks", "dots", cells, claims, NOTES, profile)


def _column(column: str, base: Run, pairs_of: Mapping[str, Sequence[Pair]]) -> list[Cell]:
    """Return the cells of a column in the order in which they are worth training."""
    choice = dataclasses.replace(CHOICE, extend=EXTEND.get(column, CHOICE.extend))
    plain = dataclasses.replace(base, layers="hidden", ramp=0)
    cells = [_cell(row, column, base, pairs, choice) for row, pairs in pairs_of.items()]
    return [cells[0], Cell(FINETUNE, column, (plain,), choice=choice), Protocol(column, plain, {}, choice).joint(), *cells[1:]]


def _cell(row: str, column: str, base: Run, pairs: Sequence[Pair], choice: Choice) -> Cell:
    runs = tuple(dataclasses.replace(base, preserve=preserve, sparsify=sparsify) for preserve, sparsify in pairs)
    return Cell(row, column, runs, choice=dataclasses.replace(choice, tasks=None) if row == PACKNET else choice)
