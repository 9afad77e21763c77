"""How far the other methods of one stream and network are from the best: paired by seed, with the interval of the t test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from selfless.metrics import paired_t_interval
from selfless.report.groups import Group, best, signed


class Gap(NamedTuple):
    """mean   of the differences of the averages, this method minus the best, over the seeds that both have; low, high: 95 % interval"""

    group: Group
    mean: float
    low: float
    high: float
    ahead: int
    seeds: int

    @property
    def cells(self) -> list[str]:
        """The difference in points, its interval, and on how many seeds this method is ahead."""
        return [signed(self.mean, 2), f"{signed(self.low, 2)} to {signed(self.high, 2)}", f"{self.ahead} of {self.seeds}"]


HEADINGS = ["difference", "95 % interval", "seeds ahead"]
SHOWN = 20  # methods that a table shows


def gaps(found: Sequence[Group]) -> list[Gap]:
    """Return the groups beside the best one, the nearest first; those that share fewer than two seeds with it are left out."""
    top = best(found)
    if top is None:
        return []
    of_top = {result.run.seed: result.average for result in top.done if math.isfinite(result.average)}
    made = []
    for group in found:
        own = {r.run.seed: r.average for r in group.done if r.run.seed in of_top and math.isfinite(r.average)}
        if group is top or len(own) < 2:
            continue
        pairs = [(value, of_top[seed]) for seed, value in own.items()]
        a, b = zip(*pairs, strict=True)
        low, high = paired_t_interval(a, b)
        made.append(Gap(group, sum(x - y for x, y in pairs) / len(pairs), low, high, sum(x > y for x, y in pairs), len(pairs)))
    return sorted(made, key=lambda gap: -gap.mean)
