"""The scale of a strength "auto": a slow oracle, and its laws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from selfless.functional.scale import (
    AVERAGE,
    FIRST_LOOK,
    GROWTH,
    LARGEST,
    LATER,
    RAISE,
    TARGET,
    Scale,
    complete,
    follow,
    scaled_strength,
    settle,
    start_scale,
)

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
    look, seen, settled, mean, peak, raised, found = next(looks), 0.0, False, sizes[0], 0.0, 1.0, []
    for step, size in enumerate(sizes, 1):
        mean = mean + AVERAGE * (size - mean)
        peak = max(peak, mean)
        if step >= look:
            raised = min(RAISE * raised, LARGEST) if settled and mean > TARGET * peak else raised
            settled, seen, look = settled or peak < GROWTH * seen, peak, next(looks)
        found.append(0.2 * raised / peak if settled else 0.0)
    return found


@pytest.mark.parametrize("name", SIZES)
def test_the_scale_is_the_oracle(name: str) -> None:
    assert run(SIZES[name])[1] == pytest.approx(oracle(SIZES[name]), rel=1e-4)


def test_the_mean_follows_the_newest_tenth() -> None:
    """After R = 0 and then 1, the mean is 1 − 0.9ᵏ: it comes near, step by step, and never overshoots."""
    scale = follow(start_scale(torch.zeros(())), torch.tensor(0.0))
    for k in range(1, 6):
        scale = follow(scale, torch.tensor(1.0))
        assert float(scale["mean"]) == pytest.approx(1 - 0.9**k, rel=1e-5)


def test_the_strength_waits_for_the_growth() -> None:
    _, strengths = run(LAG)
    first = next(k for k, strength in enumerate(strengths) if strength > 0)
    assert first > 60  # the growth ends at step 60
    assert strengths[first] == pytest.approx(0.2 / 2**10, rel=0.05)


def test_a_larger_term_has_a_smaller_strength() -> None:
    """λR is the same for every unit of R."""
    for factor in (1e-6, 1e6):
        _, strengths = run([factor * size for size in LAG])
        assert [factor * s for s in strengths] == pytest.approx(run(LAG)[1], rel=1e-4)


def held(stiffness: float, steps: int) -> tuple[float, float]:
    """Return R/R₁ and λR₁ of activations s·h that a loss ½ k log² s holds; every step goes a part of the way to the minimum."""
    scale, log_s, size = start_scale(torch.zeros(())), 0.0, 1.0
    for _ in range(steps):
        scale = follow(scale, torch.tensor(size))
        log_s -= 0.1 * (log_s + 2 * float(scaled_strength(scale, 0.05)) * size / stiffness)
        size = math.exp(2 * log_s)
    return size, float(scaled_strength(scale, 0.05))


@pytest.mark.parametrize("stiffness", [0.03, 0.1, 0.4])
def test_inhibition_is_raised_until_it_acts(stiffness: float) -> None:
    """However firmly the loss holds the activations, R falls to its target T; λR₁ ≥ k log(1/T)/(4T), and more only by the delay of R."""
    size, strength = held(stiffness, 400)
    least = stiffness * math.log(1 / TARGET) / (4 * TARGET)
    assert TARGET / 3 < size <= TARGET
    assert 0.99 * least < strength < 2 * RAISE * least


def test_a_term_that_does_not_react_is_not_raised_for_ever() -> None:
    assert held(1e9, 400)[1] == pytest.approx(LARGEST * 0.05)


def test_a_short_task_settles_at_its_end() -> None:
    scale, strengths = run([4.0] * 10)
    assert strengths[-1] == 0.0
    assert float(scaled_strength(settle(scale), 0.2)) == pytest.approx(0.05)
    assert float(scaled_strength(settle(start_scale(torch.zeros(()))), 0.2)) == 0.0  # no step at all


def test_a_scale_of_an_older_state_keeps_its_strength() -> None:
    saved = {name: value for name, value in settle(run([4.0] * 10)[0]).items() if name != "raised"}
    assert float(scaled_strength(complete(saved), 0.05)) == pytest.approx(0.1 / 4)


def test_members_do_not_see_each_other() -> None:
    together = start_scale(torch.zeros(len(SIZES)))
    for sizes in itertools.islice(zip(*SIZES.values(), strict=False), 300):
        together = follow(together, torch.tensor(sizes))
    for m, sizes in enumerate(SIZES.values()):
        alone, _ = run(sizes[:300])
        for name, value in alone.items():
            assert_close(together[name][m], value)
