"""The scale of a strength "auto": a slow oracle, and its laws."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing import assert_close

from selfless.functional.scale import AVERAGE, FIRST_LOOK, GROWTH, LATER, Scale, follow, scaled_strength, settle, start_scale

LAG = [1.0] * 20 + [2.0 ** (k / 4) for k in range(40)] + [2.0**10] * 400  # as in a network without normalisation: flat, growth, flat
SIZES = {"constant": [3.0] * 300, "lag": LAG, "falling": [5.0 / (1 + k) for k in range(300)], "growing": [1.02**k for k in range(300)]}


def run(sizes: list[float]) -> tuple[Scale, list[float]]:
    scale, strengths = start_scale(torch.zeros(())), []
    for size in sizes:
        scale = follow(scale, torch.tensor(size))
        strengths.append(float(scaled_strength(scale, 0.2)))
    return scale, strengths


def oracle(sizes: list[float]) -> list[float]:
    """λ after every step, written with plain numbers."""
    looks = itertools.accumulate(itertools.repeat(LATER), lambda look, factor: look * factor, initial=FIRST_LOOK)
    look, seen, settled, mean, peak, found = next(looks), 0.0, False, sizes[0], 0.0, []
    for step, size in enumerate(sizes, 1):
        mean = mean + AVERAGE * (size - mean)
        peak = max(peak, mean)
        if step >= look:
            settled, seen, look = settled or peak < GROWTH * seen, peak, next(looks)
        found.append(0.2 / peak if settled else 0.0)
    return found


@pytest.mark.parametrize("name", SIZES)
def test_the_scale_is_the_oracle(name: str) -> None:
    assert run(SIZES[name])[1] == pytest.approx(oracle(SIZES[name]), rel=1e-4)


def test_the_strength_waits_for_the_growth() -> None:
    _, strengths = run(LAG)
    first = next(k for k, strength in enumerate(strengths) if strength > 0)
    assert first > 60  # the growth ends at step 60
    assert strengths[first] == pytest.approx(0.2 / 2**10, rel=0.05)
    assert strengths[-1] <= strengths[first]


def test_a_larger_term_has_a_smaller_strength() -> None:
    """λR is the same for every unit of R."""
    for factor in (1e-6, 1e6):
        _, strengths = run([factor * size for size in LAG])
        assert [factor * s for s in strengths] == pytest.approx(run(LAG)[1], rel=1e-4)


def test_the_penalty_never_exceeds_its_share() -> None:
    """In the first task λR̄ ≤ ρ, R̄ the moving average."""
    scale = start_scale(torch.zeros(()))
    for size in SIZES["growing"]:
        scale = follow(scale, torch.tensor(size))
        assert float(scaled_strength(scale, 0.2) * scale["mean"]) <= 0.2 * (1 + 1e-6)


def test_a_short_task_settles_at_its_end() -> None:
    scale, strengths = run([4.0] * 10)
    assert strengths[-1] == 0.0
    assert float(scaled_strength(settle(scale), 0.2)) == pytest.approx(0.05)
    assert float(scaled_strength(settle(start_scale(torch.zeros(()))), 0.2)) == 0.0  # no step at all


def test_members_do_not_see_each_other() -> None:
    together = start_scale(torch.zeros(len(SIZES)))
    for sizes in itertools.islice(zip(*SIZES.values(), strict=False), 300):
        together = follow(together, torch.tensor(sizes))
    for m, sizes in enumerate(SIZES.values()):
        alone, _ = run(sizes[:300])
        for name, value in alone.items():
            assert_close(together[name][m], value)
