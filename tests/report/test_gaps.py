"""Every method beside the best one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from selfless import MAS, SLNID, metrics, report
from selfless.report.gaps import gaps
from selfless.report.groups import best
from tests.report.samples import PLAIN, SPARSE, made


def test_differences_are_paired_by_seed() -> None:
    weak = dataclasses.replace(PLAIN, preserve=MAS(0.01))
    lone = dataclasses.replace(PLAIN, sparsify=SLNID(0.5))
    drops = {PLAIN: (0.05, 0.06, 0.09), SPARSE: (0.01, 0.02, 0.01), weak: (0.3, 0.2, 0.25)}
    results = [made(run, seed, drop=drop) for run, values in drops.items() for seed, drop in enumerate(values)]
    results += [made(lone, 0, drop=0.1), made(weak, 7, drop=0.4)]  # one seed has no interval; a seed that the best has not is left out
    found = gaps(report.groups(results))
    assert [gap.group.label for gap in found] == ["mas:0.1", "mas:0.01"]
    averages = {run: [r.average for r in results if r.run.replace(seed=0) == run and r.run.seed < 3] for run in drops}
    for gap, run in zip(found, (PLAIN, weak), strict=True):
        assert (gap.low, gap.high) == pytest.approx(metrics.paired_t_interval(averages[run], averages[SPARSE]))
        assert gap.low < gap.mean < gap.high
        assert (gap.ahead, gap.seeds) == (0, 3)


def test_a_seed_without_an_average_is_left_out() -> None:
    other = dataclasses.replace(PLAIN, preserve=MAS(0.5))
    results = [made(run, seed, drop=drop) for run, drop in ((SPARSE, 0.01), (PLAIN, 0.1)) for seed in range(3)]
    unknown = np.array([[np.nan, np.nan, np.nan], [np.nan, np.nan, np.nan], [np.nan, np.nan, 0.9]])
    found = gaps(report.groups([*results, *(made(other, seed, accuracy=unknown) for seed in range(3))]))
    assert [gap.group.label for gap in found] == ["mas:0.1"]


def test_a_method_with_failed_seeds_is_not_the_best_unless_all_have_some() -> None:
    results = [made(PLAIN, seed, drop=0.1) for seed in range(5)] + [made(SPARSE, seed, drop=0.01) for seed in range(2)]
    broken = [dataclasses.replace(made(SPARSE, seed), status="failed", error="diverged") for seed in range(2, 5)]
    top = best(report.groups([*results, *broken]))
    assert top is not None
    assert top.label == "mas:0.1"
    (gap,) = gaps(report.groups([*results, *broken]))
    assert gap.mean > 0  # ahead on the two seeds that it finished
    other = [dataclasses.replace(r, run=r.run.replace(preserve="lwf:1", sparsify="none")) for r in (*results[5:], *broken)]
    said = str(report.headline([*results[:5], *other]))
    assert said.startswith("MAS has ")  # the only one without failed seeds; the other one is named, with its failures
    assert "3 of 5 runs of LwF failed" in said
    all_broken = [*results, *broken, dataclasses.replace(made(PLAIN, 5), status="failed", error="diverged")]
    top = best(report.groups(all_broken))
    assert top is not None
    assert top.label == "mas:0.1 + slnid:0.001"


def test_the_page_and_the_table_show_them(tmp_path: Path) -> None:
    results = [made(run, seed, drop=drop + 0.01 * seed) for run, drop in ((PLAIN, 0.1), (SPARSE, 0.02)) for seed in range(3)]
    page = report.write(results, tmp_path / "report.html").read_text(encoding="utf-8")
    (gap,) = gaps(report.groups(results))
    assert "Beside mas:0.1 + slnid:0.001" in page
    for cell in gap.cells:
        assert cell in page
    assert "| mas:0.1 | " + " | ".join(gap.cells) + " |" in report.markdown(results)
    alone = report.write(results[:3], tmp_path / "alone.html").read_text(encoding="utf-8")
    assert "95 % interval" not in alone
