"""Figures of results: they draw the numbers, leave no trace in matplotlib, and give a method one look."""

import dataclasses

import numpy as np

from selfless import report
from selfless.report import plots
from selfless.report.drawing import COLOURS, ROWS, looks_of
from tests.report.samples import PAIR, PLAIN, SPARSE, made


def test_figures_draw_the_numbers_and_leave_no_trace(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn = plots.figures(PAIR)
    assert list(drawn) == ["per-task", "over-time", "first-task", "capacity"]
    heights = [bar.get_height() for bar in drawn["per-task"].axes[0].patches]
    np.testing.assert_allclose(heights, [100 * v.mean for g in report.groups(PAIR) for v in g.per_task])
    line = drawn["over-time"].axes[0].lines[0].get_ydata()
    want = [100 * np.mean([r.accuracy[t, : t + 1].mean() for r in PAIR[:3]]) for t in range(3)]
    np.testing.assert_allclose(line, want)
    np.testing.assert_allclose(drawn["capacity"].axes[0].lines[1].get_ydata()[-1], 60)
    numbers = [text.get_text() for text in plots.matrix(PAIR[0]).axes[0].texts]
    assert numbers == [f"{100 * v:.1f}" for v in PAIR[0].accuracy.ravel()]
    assert dict(matplotlib.rcParams) == before
    text = plots.svg(drawn["per-task"])
    assert text == plots.svg(plots.per_task(PAIR))
    assert text.startswith("<svg")
    assert "currentColor" in text
    assert plots.save_png(drawn["capacity"], tmp_path / "a" / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_has_one_colour_in_every_figure():
    """As in the experiments' figures where every group has its own; in turn where two would be alike."""

    def colours(*runs):
        return [look.colour for look in plots.looks(report.groups([made(run) for run in runs]))]

    def sparse(name):
        return dataclasses.replace(PLAIN, sparsify=name)

    known = {"No-Reg": PLAIN, "SLNID": SPARSE, "DeCov": sparse("decov:1"), "L1-Rep": sparse("l1-rep:1")}
    known["Maxout"] = dataclasses.replace(PLAIN, model="mlp-128-maxout")
    for rows in (list(known), ["SLNID", "No-Reg"], ["DeCov"]):
        assert colours(*(known[row] for row in rows)) == [COLOURS[ROWS[row]] for row in rows] == [look.colour for look in looks_of(rows)]
    bars = plots.per_task(PAIR).axes[0].patches
    assert bars[0].get_facecolor() != bars[3].get_facecolor()
    other = colours(PLAIN, sparse("sni:1"), SPARSE)
    assert (other[0], other[2]) == (COLOURS[ROWS["No-Reg"]], COLOURS[ROWS["SLNID"]])
    assert len(set(other)) == 3
    assert colours(sparse("sni:1"), sparse("snid:1")) == list(COLOURS[:2])
    assert colours(PLAIN, dataclasses.replace(PLAIN, preserve="ewc:1"), SPARSE) == list(COLOURS[:3])
    hatched = plots.looks(report.groups([made(sparse(name)) for name in ("decov:1", "l2-wd:1")]))
    assert [look.again for look in hatched] == [False, True]
    many = [sparse(f"slnid:{i}") for i in range(1, 10)]
    assert len({(look.colour, look.again) for look in plots.looks(report.groups([made(run) for run in many]))}) == 9


def test_no_axis_of_accuracies_goes_beyond_100():
    """Also where methods reach 100 %, with seeds that differ; what is drawn at 100 stays whole."""
    perfect = [dataclasses.replace(r, accuracy=np.ones_like(r.accuracy) - 0.01 * (i % 2)) for i, r in enumerate(PAIR)]
    for draw in (plots.per_task, plots.over_time, plots.first_task):
        axes = draw(perfect).axes[0]
        assert axes.get_ylim()[1] == 100
        assert max(axes.get_yticks()) <= 100.0001 or draw is not plots.per_task
        assert not any(line.get_clip_on() for line in axes.lines if line.get_marker() not in ("None", "_", ""))
    numbers = plots.per_task(perfect).axes[0].texts
    assert numbers
    assert all(text.xy[1] <= 100 for text in numbers)
