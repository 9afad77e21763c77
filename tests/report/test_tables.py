"""Results as tables: the numbers of `metrics`, marks in every form, and a shape that no label can break."""

import csv as csv_format
import dataclasses
import io
import math
import re

import numpy as np
import pytest
from rich.console import Console

from selfless import SLNID, Run, metrics, report
from selfless.report.gaps import gaps
from tests.fabricated import result
from tests.report.page_reader import Reader
from tests.report.samples import EVERY, FORMS, NASTY, NOTE, PAIR, PLAIN, SPARSE, failed, made, noted, shown


def test_tables_carry_the_numbers_of_metrics():
    mean, std = metrics.spread([metrics.average(r.accuracy) for r in PAIR[3:]])
    cell = f"{100 * mean:.2f} ± {100 * std:.2f}"
    assert cell in shown(PAIR)
    assert f"**{cell}**" in report.markdown(PAIR)
    assert r"\textbf{" + cell.replace("±", r"$\pm$") + "}" in report.latex(PAIR)
    plain, sparse = csv_format.DictReader(io.StringIO(report.csv(PAIR)))
    assert (float(sparse["average"]), float(sparse["average_std"])) == (mean, std)
    assert float(plain["task_1"]) == metrics.spread([r.accuracy[-1, 0] for r in PAIR[:3]])[0]
    assert (plain["seeds"], plain["failed"], plain["select"], plain["notes"]) == ("3", "0", "last", "")
    assert max(map(len, shown(PAIR).splitlines())) <= 80


def test_latex_has_the_differences_and_intervals_of_markdown():
    (gap,) = gaps(report.groups(PAIR))
    text = report.latex(PAIR)
    for cell in gap.cells:
        assert cell in report.markdown(PAIR)
        assert report.tables.tex(cell) in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    assert r"mean $\pm$ standard deviation over seeds" in text
    differing = [made(PLAIN), made(dataclasses.replace(SPARSE, epochs=99))]
    assert "Not compared with each other, because the epochs differ" in report.latex(differing)


def test_csv_has_the_differences_and_intervals_of_markdown():
    (gap,) = gaps(report.groups(PAIR))
    other = [dataclasses.replace(r, run=dataclasses.replace(r.run, model="mlp-64")) for r in PAIR[:3]]  # alone on its network
    plain, sparse, alone = csv_format.DictReader(io.StringIO(report.csv([*PAIR, *other])))
    names = ["beside_best", "beside_best_low", "beside_best_high"]
    assert [float(plain[name]) for name in names] == [gap.mean, gap.low, gap.high]
    assert [row[name] for row in (sparse, alone) for name in names] == [""] * 6


def test_csv_says_in_which_scenario_tasks_were_evaluated():
    results = [made(PLAIN), made(dataclasses.replace(PLAIN, scenario="class"))]
    head, *_ = csv_format.reader(io.StringIO(report.csv(results)))
    assert head[head.index("tasks") + 1] == "scenario"
    assert [row["scenario"] for row in csv_format.DictReader(io.StringIO(report.csv(results)))] == ["task", "class"]


def test_tables_keep_their_shape_whatever_labels_and_tasks_are_called():
    named = [made(run, about={"tasks": [NASTY, "b", "c"]}) for run in (PLAIN, SPARSE)]
    head, rule, *rows = report.markdown(named).split("\n\n")[0].splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in (head, rule, *rows)} == {len(report.tables.columns(3)) + 1}
    assert r"\$a\_b\$" in report.latex(named)
    assert "[red]" in shown(named, 200)
    results = [made(PLAIN), made(dataclasses.replace(SPARSE, model=NASTY))]
    assert "[red]" in shown(results, 200)
    assert next(iter(csv_format.reader(io.StringIO(report.csv(results)).readlines()[2:])))[3] == NASTY


@pytest.mark.parametrize("width", range(30, 121, 5))
def test_a_narrow_terminal_shows_fewer_columns_and_never_breaks_a_word_or_a_number(width):
    many = [made(run, seed, tasks=12) for run in (PLAIN, SPARSE) for seed in range(3)]
    beside = io.StringIO()
    Console(file=beside, width=width).print(report.beside(many))
    text = shown(many, width)
    for group in report.groups(many):
        assert set(group.label.split()) <= set(text.split())
        assert group.average.text(2) in text
        assert all(value.text(1, std=False) in text for value in group.per_task)
    hidden = " ".join(text.split()).partition("Not shown, for want of room: ")[2]
    assert all(name in hidden or name.split()[0] in text for name in ("BWT", "FWT", "forgetting"))
    assert ("BWT" in hidden) <= ("FWT" in hidden)  # the least important goes first
    assert width < 80 or not hidden
    assert gaps(report.groups(many))[0].cells[0] in beside.getvalue()
    assert max(map(len, [*text.splitlines(), *beside.getvalue().splitlines()])) <= width


def test_a_single_run_shows_its_matrix():
    text = shown(PAIR[:1])
    assert "learnt" in text
    for value in PAIR[0].accuracy.ravel():
        assert f"{100 * value:.1f}" in text.split("learnt")[-1]
    assert "learnt" not in shown(PAIR)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_marks_selection_reduction_and_failure(form, tmp_path):
    chosen = dataclasses.replace(SPARSE, select="best-on-test")
    text = EVERY[form]([made(chosen), noted(PLAIN, 0), failed(PLAIN, 1)], tmp_path)
    assert "best-on-test" in text
    assert NOTE in text
    assert "1 of 2" in text if form != "csv" else ",3,task,1,1,last," in text
    clean = EVERY[form](PAIR[:1], tmp_path)
    assert "best-on-test" not in clean
    assert "reduced" not in clean
    assert "failed" not in clean.replace("seeds,failed,select", "")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "results",
    [
        [],
        [failed(PLAIN, s) for s in range(2)],
        [failed(PLAIN), made(SPARSE, tasks=2)],
        [made(PLAIN, tasks=1)],
        [made(PLAIN, tasks=11), made(PLAIN, 1, tasks=1)],
        [made(PLAIN, accuracy=np.array([[0.9, math.nan], [0.8, 0.9]]), baseline=np.array([0.1, math.nan]), capacity=[])],
        [made(PLAIN, accuracy=np.array([[0.9, 0.1], [math.nan, 0.9]]), baseline=np.full(2, 0.1))],
        [made(dataclasses.replace(PLAIN, stream="joint"), accuracy=np.full((1, 3), 0.9))],
        [made(dataclasses.replace(PLAIN, sparsify=SLNID(10.0**-i)), s) for i in range(1, 9) for s in (0, 1)],
        [
            made(PLAIN, about={}),
            made(SPARSE, about={"notes": None}, capacity=[{"free_parameters": 1.0, "parameters": {}, "neurons": {}}] * 3),
        ],
    ],
    ids="none failed half-failed one-task uneven nan holes joint many bare".split(),
)
def test_every_form_takes_every_result(form, results, tmp_path):
    text = EVERY[form](results, tmp_path)
    assert not re.search(r"\bnan\b|\bNone\b", re.sub(r"is nan[:;,]", "", text))
    if form == "page":
        reader = Reader(text)
        assert len(reader.ids) == len(set(reader.ids))


def test_csv_marks_trials_of_strengths():
    trial = dataclasses.replace(SPARSE, tasks=1, held_out=0.1)
    results = [made(PLAIN), made(trial, accuracy=np.array([[0.5]]), baseline=np.array([0.1]), held_out=np.array([[0.75]]))]
    plain, tried = csv_format.DictReader(io.StringIO(report.csv(results)))
    assert (plain["trial"], plain["held_out"]) == ("0", "")
    assert (tried["trial"], tried["held_out"]) == ("1", "0.75")


def test_it_is_said_why_methods_are_not_compared(tmp_path):
    runs = [Run(preserve=preserve, seed=seed) for preserve in ("mas:1", "lwf:1") for seed in (0, 1)]
    results = [result(run, 0.9) for run in runs]
    assert "Not compared" not in report.markdown(results)
    more = [*results, result(runs[0].replace(epochs=3), 0.8)]
    why = "Not compared with each other, because the epochs differ"
    assert why in report.markdown(more)
    assert why in report.write(more, tmp_path / "report.html", out=tmp_path).read_text(encoding="utf-8")


def ended_without(run):
    """A run whose method raised an error: nothing is known of its tasks."""
    unknown = np.full((1, 1), math.nan)
    return dataclasses.replace(result(run, 0.9, status="failed"), accuracy=unknown, baseline=unknown[0], error="boom")


def test_a_method_that_raises_does_not_stop_the_comparison_of_others(tmp_path):
    runs = [Run(preserve=preserve, seed=seed) for preserve in ("mas:1", "lwf:1") for seed in (0, 1)]
    others = [ended_without(Run(preserve="ewc:1", seed=seed)) for seed in (0, 1)]
    results = [*(result(run, 0.9 + 0.01 * (run.preserve.name == "mas")) for run in runs), *others]
    found = report.groups(results)
    assert [g.label for g in found] == ["mas:1", "lwf:1", "ewc:1"]
    assert len(gaps(found)) == 1
    assert "Not compared" not in report.markdown(results)
    plain = list(csv_format.DictReader(io.StringIO(report.csv(results))))
    assert [bool(row["beside_best"]) for row in plain] == [False, True, False]
    half = report.groups([results[0], ended_without(runs[1])])  # a seed of the same method, in the order of its seeds or not
    assert [(len(g.results), g.tasks) for g in half] == [(2, 5)]
    assert [(len(g.results), g.tasks) for g in report.groups([ended_without(runs[0]), results[1]])] == [(2, 5)]


def test_seeds_of_two_versions_of_a_file_are_marked():
    found = [result(Run(seed=seed), 0.9) for seed in (0, 1)]
    for seed, version in enumerate(("a", "b")):
        found[seed].about["made_from"] = version
    assert "trained with 2 versions of your data, network or method" in report.markdown(found)
    found[1].about["made_from"] = "a"
    assert "versions" not in report.markdown(found)
    found[1].about["made_from"] = "code-c"  # recorded by a newer version of the library, without comments: it cannot be compared
    assert "versions" not in report.markdown(found)
