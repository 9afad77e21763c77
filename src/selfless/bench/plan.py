"""Sizes of a benchmark: on a GPU those of the real tasks, on a CPU smaller ones, with --quick just enough to see that it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

PARTS = ("steps", "importance", "penalty", "fleet", "growth", "sequence", "peers")
DEFAULT_PARTS = PARTS[:4]  # the others take minutes, or need real data, a GPU, or another Python environment


class Unavailable(Exception):
    """A part cannot be measured on this machine. The message gives the reason and the remedy."""


def _say_nothing(message: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """Sizes of all measurements. Samples are those of one task."""

    device: torch.device
    rounds: int
    mlp_samples: int
    cnn_samples: int
    eager_samples: tuple[int, int]  # samples of the importance passes in plain PyTorch: (MLP, CIFAR network)
    eager_width: int  # units of the MLP in those passes
    loop_samples: int  # samples of the loop over samples
    eager_steps: int  # at most so many training steps in plain PyTorch
    fleet_sizes: tuple[int, ...]  # in the part "steps"
    importance_fleets: tuple[int, ...]  # fleet sizes in the parts "importance" and "fleet"
    penalty_widths: tuple[int, ...]  # layer widths in the part "penalty"
    step_widths: tuple[int, ...]  # layer widths in the part "fleet"
    tasks: int  # tasks learnt one after another in the part "fleet"
    sample_counts: tuple[int, ...]  # samples of the importance passes in the part "fleet"
    growth_widths: tuple[int, ...]  # the sizes of the part "growth"
    growth_layers: tuple[int, ...]
    growth_tasks: tuple[int, ...]
    growth_fleets: tuple[int, ...]
    growth_samples: tuple[int, ...]
    growth_rounds: int = 3
    batch: int = 200
    quick: bool = False
    data_dir: Path | None = None
    say: Callable[[str], None] = _say_nothing  # is called with the name of each measurement as it begins

    def eager_steps_of(self, samples: int) -> int:
        """Return the number of training steps in plain PyTorch: at most one epoch of `samples`."""
        return max(1, min(self.eager_steps, samples // self.batch))


def plan(device: torch.device, quick: bool = False, data_dir: Path | None = None, say: Callable[[str], None] = _say_nothing) -> Plan:
    """Return the sizes for a device."""
    widths = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    cpu = Plan(
        device,
        rounds=5,
        mlp_samples=6_000,
        cnn_samples=400,
        eager_samples=(60_000, 2_000),
        eager_width=512,
        loop_samples=200,
        eager_steps=10,
        fleet_sizes=(1, 2, 4, 8),
        importance_fleets=(1, 8),
        penalty_widths=widths,
        step_widths=widths[:5],
        tasks=10,
        sample_counts=(1_000, 2_000, 4_000, 8_000),
        growth_widths=widths[:6],
        growth_layers=(1, 2, 5, 10, 20, 50, 100),
        growth_tasks=(1, 2, 5, 10, 20, 50, 100),
        growth_fleets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        growth_samples=(1_000, 10_000, 100_000, 1_000_000),
        data_dir=data_dir,
        say=say,
    )
    if quick:
        return replace(
            cpu,
            rounds=2,
            mlp_samples=500,
            cnn_samples=50,
            eager_samples=(500, 50),
            eager_width=128,
            loop_samples=10,
            eager_steps=2,
            fleet_sizes=(1, 2),
            importance_fleets=(1, 2),
            penalty_widths=(128, 512),
            step_widths=(128, 256),
            tasks=3,
            sample_counts=(250, 500),
            growth_widths=(128, 256),
            growth_layers=(2, 4),
            growth_tasks=(1, 2),
            growth_fleets=(1, 2),
            growth_samples=(250, 500),
            growth_rounds=1,
            batch=50,
            quick=True,
        )
    if device.type == "cuda":
        return replace(
            cpu,
            mlp_samples=60_000,
            cnn_samples=5_000,
            eager_steps=50,
            fleet_sizes=(1, 2, 4, 8, 16, 32, 64),
            step_widths=widths[:6],
            sample_counts=(3_750, 7_500, 15_000, 30_000, 60_000),
            growth_widths=(*widths, 32_768, 65_536),
            growth_samples=(1_000, 10_000, 100_000, 1_000_000, 10_000_000),
        )
    return cpu
