"""How much is measured: on a GPU the sizes of the real tasks, on a CPU less of them, with --quick only enough to see that it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

PARTS = ("steps", "importance", "penalty", "fleet", "sequence", "peers")
USUAL = PARTS[:4]  # the others need real data, a GPU, or another environment


class Unavailable(Exception):
    """A part that cannot be measured here: why, and the remedy."""


def _silent(message: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """Sizes of everything. Samples are those of one task, for the MLP and for the CIFAR network."""

    device: torch.device
    rounds: int
    mlp_samples: int
    cnn_samples: int
    eager_samples: tuple[int, int]  # of the passes in plain PyTorch, MLP and CIFAR network
    eager_width: int
    looped: int  # samples of the loop over samples
    eager_steps: int
    fleets: tuple[int, ...]
    measured: tuple[int, ...]  # fleet sizes whose importance pass is set against an epoch
    widths: tuple[int, ...]  # of the penalty
    scaled: tuple[int, ...]  # of whole steps
    tasks: int
    amounts: tuple[int, ...]  # samples of the importance pass
    batch: int = 200
    quick: bool = False
    data_dir: Path | None = None
    say: Callable[[str], None] = _silent  # what is being measured just now

    def eager_steps_of(self, samples: int) -> int:
        return max(1, min(self.eager_steps, samples // self.batch))


def plan(device: torch.device, quick: bool = False, data_dir: Path | None = None, say: Callable[[str], None] = _silent) -> Plan:
    widths = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    usual = Plan(
        device,
        rounds=5,
        mlp_samples=6_000,
        cnn_samples=400,
        eager_samples=(60_000, 2_000),
        eager_width=512,
        looped=200,
        eager_steps=10,
        fleets=(1, 2, 4, 8),
        measured=(1, 8),
        widths=widths,
        scaled=widths[:5],
        tasks=10,
        amounts=(1_000, 2_000, 4_000, 8_000),
        data_dir=data_dir,
        say=say,
    )
    if quick:
        return replace(
            usual,
            rounds=2,
            mlp_samples=500,
            cnn_samples=50,
            eager_samples=(500, 50),
            eager_width=128,
            looped=10,
            eager_steps=2,
            fleets=(1, 2),
            measured=(1, 2),
            widths=(128, 512),
            scaled=(128, 256),
            tasks=3,
            amounts=(250, 500),
            batch=50,
            quick=True,
        )
    if device.type == "cuda":
        amounts = (3_750, 7_500, 15_000, 30_000, 60_000)
        return replace(
            usual,
            mlp_samples=60_000,
            cnn_samples=5_000,
            eager_steps=50,
            fleets=(1, 2, 4, 8, 16, 32, 64),
            scaled=widths[:6],
            amounts=amounts,
        )
    return usual
