"""The report says what the results say: numbers against `metrics`, marks that cannot be missed, a page that needs nothing else."""

import csv as csv_format
import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from selfless import MAS, SLNID, metrics, report
from selfless.report import plots
from selfless.spec import Result, Run

PLAIN, SPARSE = Run(preserve=MAS(0.1), tasks=3), Run(preserve=MAS(0.1), sparsify=SLNID(1e-3), tasks=3)
NOTE = "tiny-imagenet is reduced: 20 of 200 classes"
NASTY = "<script>alert('x')</script>&\"$a_b$[red]|"


def made(run, seed=0, *, drop=0.05, tasks=3, free=0.4, **fields):
    """A result whose accuracy falls by `drop` a task; task u starts at 0.97 − u/100, and each seed is a little different."""
    A = np.full((tasks, tasks), 0.1)
    for t in range(tasks):
        for u in range(t + 1):
            A[t, u] = 0.97 - 0.01 * u - drop * (t - u) + 0.001 * seed * (u + 1)
    room = [
        {"tasks": t + 1, "threshold": 0.01, "free_parameters": 1 - (1 - free) * (t + 1) / tasks, "free_neurons": 0.2} for t in range(tasks)
    ]
    about = {"seconds": 1.5, "hardware": "a machine", "torch": "2.13.0", "commit": "abc1234", "tasks": [f"task {u}" for u in range(tasks)]}
    values = {"accuracy": A, "baseline": np.full(tasks, 0.1), "history": [], "capacity": room, "about": about} | fields
    return Result(dataclasses.replace(run, seed=seed), **values)


def failed(run, seed=0, error="the loss was not finite in epoch 1 of task 1"):
    return made(run, seed, accuracy=np.empty((0,)), capacity=[], status="failed", error=error)


def noted(run, seed=0, note=NOTE):
    return made(run, seed, about={"notes": [note]})


def shown(results, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(report.terminal(results))
    return console.file.getvalue()


def page(results, folder, **options):
    return report.write(results, folder / "report.html", date="today", **options).read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Tags, attributes that load or lead somewhere, ids, text; and whether every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.ids, self.texts, self.open = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [(name, value) for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data", "action")]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


PAIR = [made(PLAIN, s) for s in range(3)] + [made(SPARSE, s, drop=0.01, free=0.6) for s in range(3)]


def test_groups_are_runs_equal_but_for_the_seed():
    mixed = [PAIR[i] for i in (0, 3, 1, 4, 2, 5)]
    plain, sparse = report.groups(mixed)
    assert [plain.label, sparse.label] == ["mas:0.1", "mas:0.1 + slnid:0.001"]
    assert [r.run.seed for r in plain.results] == [0, 1, 2]
    for name in plain.results[0].summary():
        want = metrics.spread([r.summary()[name] for r in plain.results])
        np.testing.assert_array_equal(plain.value(name), want)
    last = np.array([r.accuracy[-1] for r in sparse.results])
    np.testing.assert_allclose([v.mean for v in sparse.per_task], last.mean(0), rtol=1e-15)
    np.testing.assert_allclose([v.std for v in sparse.per_task], last.std(0, ddof=1), rtol=1e-12)


def test_a_run_recorded_twice_counts_once():
    (group,) = report.groups([made(PLAIN), made(PLAIN, drop=0.2)])
    assert group.average.mean == metrics.average(made(PLAIN, drop=0.2).accuracy)


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([{}, {"lr": 0.1}], ["mas:0.1 (lr 0.01)", "mas:0.1 (lr 0.1)"]),
        ([{}, {"model": "mlp-64"}], ["mas:0.1 (mlp-128)", "mas:0.1 (mlp-64)"]),
        ([{"stream": "a"}, {"stream": "b", "sparsify": SLNID(1e-3)}], ["mas:0.1 (a)", "mas:0.1 + slnid:0.001 (b)"]),
        ([{}, {"lr": 0.1, "sparsify": SLNID(1e-3)}], ["mas:0.1", "mas:0.1 + slnid:0.001"]),
        ([{}, {"anchor": "explicit"}], ["mas:0.1 (anchor implicit)", "mas:0.1 (anchor explicit)"]),
        ([{}, {"preserve": MAS(0.1 + 1e-9)}], ["mas:0.1 (strength 0.1)", "mas:0.1 (strength 0.100000001)"]),
        ([{}, {"ramp": 2}], ["mas:0.1 (ramp 0)", "mas:0.1 (ramp 2)"]),
        ([{}, {"stream_options": {"order": [1, 2]}}], ["mas:0.1 (order default)", "mas:0.1 (order [1, 2])"]),
    ],
)
def test_labels_say_what_differs_and_no_more(changes, labels):
    assert [g.label for g in report.groups([made(dataclasses.replace(PLAIN, **c)) for c in changes])] == labels


def test_a_data_set_that_grew_between_seeds_is_another_group():
    run = dataclasses.replace(PLAIN, tasks=None)
    assert [g.label for g in report.groups([made(run, 0), made(run, 1, tasks=4)])] == ["mas:0.1 (3 tasks)", "mas:0.1 (4 tasks)"]


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


def test_csv_says_in_which_scenario_tasks_were_judged():
    results = [made(PLAIN), made(dataclasses.replace(PLAIN, scenario="class"))]
    head, *_ = csv_format.reader(io.StringIO(report.csv(results)))
    assert head[head.index("tasks") + 1] == "scenario"
    assert [row["scenario"] for row in csv_format.DictReader(io.StringIO(report.csv(results)))] == ["task", "class"]


def test_tables_keep_their_shape_whatever_the_labels_say():
    results = [made(PLAIN), made(dataclasses.replace(SPARSE, model=NASTY))]
    head, rule, *rows = report.markdown(results).split("\n\n")[0].splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in (head, rule, *rows)} == {len(report.tables.columns(3)) + 1}
    assert r"\$a\_b\$" in report.latex(results)
    assert "[red]" in shown(results, 200)
    assert next(iter(csv_format.reader(io.StringIO(report.csv(results)).readlines()[2:])))[3] == NASTY


def test_a_single_run_shows_its_matrix():
    text = shown(PAIR[:1])
    assert "learnt" in text
    for value in PAIR[0].accuracy.ravel():
        assert f"{100 * value:.1f}" in text.split("learnt")[-1]
    assert "learnt" not in shown(PAIR)


EVERY = {
    "terminal": lambda results, folder: shown(results, 200),
    "markdown": lambda results, folder: report.markdown(results),
    "latex": lambda results, folder: report.latex(results),
    "csv": lambda results, folder: report.csv(results),
    "page": page,
}


@pytest.mark.parametrize("form", EVERY)
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


@pytest.mark.parametrize("form", EVERY)
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
    assert not re.search(r"\bnan\b|\bNone\b", text.replace("is nan:", ""))
    if form == "page":
        reader = Reader(text)
        assert len(reader.ids) == len(set(reader.ids))


def test_holes_in_a_matrix_are_a_failure_not_a_crash():
    (group,) = report.groups([made(PLAIN, accuracy=np.array([[0.9, 0.1], [math.nan, 0.9]]), baseline=np.full(2, 0.1))])
    assert "A[1, 0]" in group.failures[0]


def test_what_was_never_measured_is_not_free():
    (group,) = report.groups([made(PLAIN, capacity=[{"free_parameters": 1.0, "free_neurons": 1.0, "parameters": {}, "neurons": {}}])])
    assert group.value("free_parameters").text() == "–"


def test_the_headline_says_what_the_sparsifier_brings():
    sentence, support = report.headline(PAIR)
    a, b = (100 * np.mean([r.average for r in part]) for part in (PAIR[3:], PAIR[:3]))
    assert sentence == (
        f"MAS + SLNID keeps {a:.1f} % on average over three tasks; MAS alone {b:.1f} %: +{a - b:.1f} points, "
        "and leaves 60 % of the parameters free instead of 40 %."
    )
    assert support.startswith("Ahead on 3 of 3 seeds")


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([], "No run has finished."),
        ([failed(PLAIN)], "One run failed, none finished."),
        (PAIR[:1], "MAS ends at 91.0 % on average over three tasks, with 7.5 points lost since they were learnt. One seed."),
        ([made(PLAIN, accuracy=np.array([[0.9, 0.7, 0.1], [0.9, 0.5, 0.1], [0.9, 0.5, 0.7]]))], "with 0.0 points lost"),  # 0.7 was a guess
        ([made(PLAIN, accuracy=np.array([[0.5, 0.9, 0.1], [0.8, 0.6, 0.1], [0.7, 0.5, 0.9]]))], "with 10.0 points lost"),  # from 0.8, 0.6
        ([made(PLAIN, tasks=1)], "MAS ends at 97.0 % on its one task. One seed."),
        ([made(PLAIN), made(SPARSE, drop=0.09)], "−4.0 points. One seed each"),
        ([made(PLAIN), made(SPARSE, drop=0.09, free=0.6)], "−4.0 points, but leaves 60 %"),
        ([made(PLAIN), made(SPARSE, drop=0.01, free=0.2)], "+4.0 points, but leaves 20 %"),
        ([made(PLAIN, 0), made(PLAIN, 1), made(SPARSE, 0, drop=0.04), made(SPARSE, 1, drop=0.06)], "are level within the spread"),
        (
            [made(PLAIN), made(dataclasses.replace(PLAIN, preserve="ewc:1"), drop=0.01)],
            "EWC has the highest average of two methods: 95.0 %",
        ),
        ([made(PLAIN), made(dataclasses.replace(PLAIN, stream="b"))], "not comparable"),
        (
            [made(PLAIN), *(made(dataclasses.replace(SPARSE, sparsify=s), drop=0.01) for s in ("slnid:1", "sni:1"))],
            "Best of two sparsifiers: ",
        ),
        ([noted(PLAIN), made(SPARSE)], "Tiny-imagenet is reduced"),
        ([made(dataclasses.replace(PLAIN, select="best-on-test"))], "Best-on-test: "),
        ([made(PLAIN), failed(PLAIN, 1)], "1 of 2 runs of MAS failed."),
    ],
)
def test_the_headline_claims_no_more_than_the_data(results, words):
    assert words in str(report.headline(results))


def test_the_page_needs_nothing_but_itself(tmp_path):
    for result in PAIR[1:]:
        folder = tmp_path / "runs" / result.run.key
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(json.dumps(result.as_dict()))
    text = page(PAIR, tmp_path, out=tmp_path / "runs")
    reader = Reader(text)
    assert len(reader.ids) == len(set(reader.ids))
    outside = [value for _, value in reader.links if not value.startswith(("#", "data:,"))]
    assert sorted(outside) == sorted(f"runs/{r.run.key}/metrics.json" for r in PAIR[1:])  # and none that leads nowhere
    assert all((tmp_path / value).exists() for value in outside)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    assert not {"script", "img", "iframe", "object"} & set(reader.tags)
    assert reader.tags.count("svg") == 6  # four figures, two matrices


def test_the_same_results_make_the_same_page(tmp_path):
    assert page(PAIR[:1], tmp_path) == page(PAIR[:1], tmp_path)


def test_the_page_escapes_what_it_is_given(tmp_path):
    run = dataclasses.replace(PLAIN, stream=NASTY, model=NASTY)
    results = [
        failed(run, 1, NASTY),
        made(dataclasses.replace(run, model="m"), about={"hardware": NASTY, "commit": NASTY, "tasks": [NASTY] * 3, "notes": [NASTY]}),
        made(run),
    ]
    text = page(results, tmp_path, title=NASTY)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert sum(NASTY in part for part in Reader(text).texts) > 8


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
    from selfless.report.drawing import COLOURS, ROWS, looks_of

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


def test_importing_the_report_loads_neither_torch_nor_matplotlib():
    code = "import sys, selfless.report; sys.exit(bool({'torch', 'matplotlib', 'jinja2'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
