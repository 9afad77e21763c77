"""Grids of strengths: their ends, the next value beyond an end, the half decades between, and every candidate that these can add.

A grid is a tuple of runs that differ in λ_Ω, λ or lr. Values are decades or half decades: … 0.1, 0.3, 1, 3, 10 … The strength of PackNet
is a share s below 1; there 1 − s goes on as it did: 0.75, 0.85, 0.91 …
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from selfless.experiments.base import Choice
from selfless.spec import Run

NUMBERS: dict[str, Callable[[Run], float]] = {
    "λ_Ω": lambda run: run.preserve.fixed_strength,
    "λ": lambda run: run.sparsify.fixed_strength,
    "lr": lambda run: run.lr,
}
SET: dict[str, Callable[[Run, float], Run]] = {  # the numbers that can be extended
    "λ_Ω": lambda run, value: dataclasses.replace(run, preserve=run.preserve.with_strength(value)),
    "λ": lambda run, value: dataclasses.replace(run, sparsify=run.sparsify.with_strength(value)),
}
SHARES = frozenset({"packnet"})  # whose strength is a share below 1


def axis(candidates: Sequence[Run], name: str) -> list[float]:
    """Return the values of a number in a grid, in ascending order. λ = 0 is not part of a grid."""
    of = NUMBERS[name]
    return sorted({of(run) for run in candidates if name != "λ" or of(run) > 0})


def edges(candidates: Sequence[Run], index: int) -> tuple[str, ...]:
    """Return a sentence for each number chosen at an end of its grid, where a wider grid might do better."""
    found = []
    for name, of in NUMBERS.items():
        values = axis(candidates, name)
        if len(values) > 1 and of(candidates[index]) in (values[0], values[-1]):
            found.append(f"{name} = {of(candidates[index]):g} is an end of its grid")
    return tuple(found)


def beyond(values: Sequence[float], up: bool, share: bool = False) -> float:
    """Return the next value after an end of an axis: a decade further if its last step was one, else half a decade.

    Of a share s the next value has (1 − s) / (1 − end) = (1 − end) / (1 − inner), but no value is below a third of the last.
    """
    end, inner = (values[-1], values[-2]) if up else (values[0], values[1])
    if share:
        return round(max(1 - (1 - end) ** 2 / (1 - inner), end / 3), 4)
    step = 2 if abs(math.log10(end / inner)) > 0.75 else 1
    return half_decade(end, step if up else -step)


def extend(declared: Sequence[Run], candidates: Sequence[Run], index: int, most: int) -> tuple[Run, ...]:
    """Return the candidates to add because candidate `index` stands at an end of its grid; none if it is inside, or at the limit.

    declared   the grid as it was given: at most `most` values are added at each end of each number
    """
    chosen, added = candidates[index], list[Run]()
    for name, put in SET.items():
        of, values, given = NUMBERS[name], axis(candidates, name), axis(declared, name)
        if len(given) < 2:
            continue
        for up in (False, True):
            end = values[-1] if up else values[0]
            outside = sum(value > given[-1] if up else value < given[0] for value in values)
            if of(chosen) == end and outside < most:
                new = beyond(values, up, name == "λ_Ω" and chosen.preserve.name in SHARES)
                added += [put(run, new) for run in (*candidates, *added) if of(run) == end]  # a product stays a product
    return tuple(run for run in dict.fromkeys(added) if run not in candidates)


def refine(candidates: Sequence[Run], index: int) -> tuple[Run, ...]:
    """Return the candidates half a decade from candidate `index`, inside the grid, that are not in it: up to two for each number."""
    chosen, added = candidates[index], list[Run]()
    for name, put in SET.items():
        of, values = NUMBERS[name], axis(candidates, name)
        if len(values) < 2 or of(chosen) not in values or (name == "λ_Ω" and chosen.preserve.name in SHARES):
            continue
        near = (half_decade(of(chosen), -1), half_decade(of(chosen), 1))
        added += [put(chosen, value) for value in near if values[0] < value < values[-1]]
    return tuple(run for run in dict.fromkeys(added) if run not in candidates)


def middle(candidates: Sequence[Run]) -> int:
    """Return the number of the candidate in the middle of its grid."""
    at = {name: values[len(values) // 2] for name in SET if (values := axis(candidates, name))}
    found = (i for i, run in enumerate(candidates) if all(NUMBERS[name](run) == value for name, value in at.items()))
    return next(found, len(candidates) // 2)


def half_decade(value: float, steps: int) -> float:
    """Return the value a number of half decades away: … 0.1, 0.3, 1, 3, 10 …"""
    half_decades = round(2 * math.log10(value)) + steps
    return float(f"{'3' if half_decades % 2 else '1'}e{half_decades // 2}")


def reachable(candidates: Sequence[Run], choice: Choice) -> tuple[Run, ...]:
    """Return every candidate that extending and refining could ever add to a grid, the given ones first."""
    found = tuple(candidates)
    for name, put in SET.items() if choice.extend else ():
        values = axis(candidates, name)
        share = name == "λ_Ω" and candidates[0].preserve.name in SHARES
        if len(values) < 2:
            continue
        wider = list(values)
        for up in (False, True):
            for _ in range(choice.extend):
                new = beyond(wider, up, share)
                wider = [*wider, new] if up else [new, *wider]
        if choice.refine and not share:
            count = round(2 * math.log10(wider[-1] / wider[0]))
            wider = sorted({*wider, *(half_decade(wider[0], step) for step in range(1, count))})
        sample = [run for run in found if NUMBERS[name](run) == values[0]]
        found = tuple(dict.fromkeys([*found, *(put(run, value) for value in wider for run in sample)]))
    return found
