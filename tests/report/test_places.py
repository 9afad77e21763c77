"""Reports of a real folder: grouped by stream and network, trials apart, tasks and classes by name, legends that fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from selfless import report
from selfless.data.description import DataDescription, TaskDescription
from selfless.report import plots
from selfless.report.drawing import folded, shorten
from selfless.report.places import class_names, divide, task_heading, task_names, trial_rows
from selfless.spec import Result, Run
from tests.report.samples import PAIR, PLAIN, SPARSE, made, page, shown

LONG = "lwf:1,temperature=3,warmup=1+mas:0.1,estimator=per-batch"


def pictures(names: list[str]) -> dict[str, Any]:
    tasks = tuple(TaskDescription(name, range(2 * u, 2 * u + 2), (f"red {name}", f"blue {name}")) for u, name in enumerate(names))
    return {"about": {"tasks": names}, "data": DataDescription((3, 8, 8), (3, 8, 8), "uint8", None, None, 2 * len(names), tasks)}


NAMES = ["cats", "dogs of the north", "ships"]
OWN = [made(dataclasses.replace(run, stream="folders:photos", tasks=None), **pictures(NAMES)) for run in (PLAIN, SPARSE)]
OTHER = [made(dataclasses.replace(PLAIN, model="mlp-64"))]
TRIALS = [
    dataclasses.replace(made(Run(sparsify=f"slnid:{x}", tasks=1, held_out=0.1), seed, tasks=1), held_out=np.array([[0.9 - x]]))
    for x in (1e-2, 1e-3)
    for seed in range(2)
]
FOLDER: list[Result] = [*PAIR, *TRIALS, *OWN, *OTHER]


def test_each_stream_and_network_has_its_place_and_trials_have_none() -> None:
    places, trials = divide(FOLDER)
    assert [(place.title, len(place.results)) for place in places] == [
        ("permuted-mnist, mlp-128", 6),
        ("folders:photos, mlp-128", 2),
        ("permuted-mnist, mlp-64", 1),
    ]
    assert trials == TRIALS
    assert [(row.method, row.seeds, row.held_out.text(1)) for row in trial_rows(trials)] == [
        ("mas:0.1 + slnid:0.001", 2, "89.9 ± 0.0"),
        ("mas:0.1 + slnid:0.01", 2, "89.0 ± 0.0"),
    ]


def test_options_tell_two_places_of_one_name_apart() -> None:
    runs = [dataclasses.replace(PLAIN, stream_options=options) for options in ({}, {"limit": 500})]
    titles = [place.title for place in divide([made(run) for run in runs])[0]]
    assert titles == ["permuted-mnist, mlp-128 (no options)", "permuted-mnist, mlp-128 (limit 500)"]


def test_tables_have_one_part_for_each_place_with_the_names_of_the_tasks() -> None:
    text = report.markdown(FOLDER)
    assert text.index("### permuted-mnist, mlp-128") < text.index("### folders:photos, mlp-128") < text.index("### Trials of strengths")
    assert "| 1 cats | 2 dogs of the north | 3 ships |" in text
    assert "| task 1 | task 2 | task 3 |" not in text.split("### folders:photos")[1].split("###")[0]
    assert "###" not in report.markdown(PAIR)
    assert "1 cats & 2 dogs of the north & 3 ships" in report.latex(FOLDER)
    assert report.latex(FOLDER).count(r"\begin{tabular}") == 5  # three places, the differences of one, trials
    assert "Tasks: 1 cats, 2 dogs of the north, 3 ships" in " ".join(shown(OWN).split())


def test_names_are_used_where_all_runs_agree() -> None:
    assert task_names(report.groups(OWN)) == NAMES
    assert task_names(report.groups([*OWN, made(SPARSE, about={"tasks": ["birds"]})])) == []
    shorter = made(dataclasses.replace(PLAIN, tasks=2), tasks=2, about={"tasks": NAMES[:2]})
    assert task_names(report.groups([*OWN, shorter])) == NAMES, "a run of the first tasks agrees"
    assert class_names(report.groups(OWN))[0] == ("red cats", "blue cats")
    assert class_names(report.groups(PAIR)) == []
    assert [task_heading(0, names) for names in ([], ["permutation 1"], ["cats"])] == ["task 1", "task 1", "1 cats"]


@pytest.mark.slow
def test_the_page_has_a_section_for_each_place_and_one_of_trials(tmp_path: Path) -> None:
    text = page(FOLDER, tmp_path)
    assert text.count('<section class="place"') == 4
    assert "9 runs: 2 streams, 2 networks." in text
    assert "<b>cats</b>: red cats, blue cats" in text
    assert "dogs of the north" in text
    assert text.count("slnid:0.01<") == 1, "a trial is in the table of trials alone"


def test_axes_have_the_names_and_legends_break_long_labels() -> None:
    results = [made(dataclasses.replace(PLAIN, preserve=LONG, sparsify="slnid:1e-3,sigma=0.3+decov:1e-3"), **pictures(NAMES)), *OWN]
    for figure in plots.figures(results).values():
        figure.draw_without_rendering()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        width, height = figure.bbox.width, figure.bbox.height
        assert (box.x0, box.x1) == (pytest.approx(box.x0), pytest.approx(box.x1))
        assert box.x0 >= 0
        assert box.x1 <= width
        assert box.y0 >= 0
        assert box.y1 <= figure.axes[0].get_tightbbox().y0 + 1, "the legend is below the axes"
        assert figure.axes[0].get_window_extent().height > 0.35 * height, "and leaves them room"
        assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == NAMES
    drawn = plots.matrix(OWN[0]).axes[0]
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == NAMES


def test_many_bars_become_points() -> None:
    results = [made(dataclasses.replace(PLAIN, preserve=f"mas:{i}", tasks=20), tasks=20, drop=0.01) for i in range(1, 8)]
    axes = plots.per_task(results).axes[0]
    assert not axes.patches
    assert len([line for line in axes.lines if line.get_marker() != "None" and len(line.get_xdata()) == 20]) == 7


def test_long_labels_are_folded_at_signs_and_names_are_shortened() -> None:
    (text,) = folded(3.0, [LONG])
    assert max(map(len, text.split("\n"))) <= 3.0 * 72 / 5.7
    assert text.replace("\n", "") == LONG
    assert all(line.endswith((",", "+")) for line in text.split("\n")[:-1])
    assert folded(5.2, ["mas:0.1"]) == ["mas:0.1"]
    assert shorten("large natural outdoor scenes") == "large natural outdoor…"
