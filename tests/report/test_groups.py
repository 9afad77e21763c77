"""Groups of runs, and the headline: numbers against `metrics`, and no claim beyond the data."""

import dataclasses
import math
import re

import numpy as np
import pytest

from selfless import MAS, SLNID, DERpp, LwF, PackNet, Replay, metrics, report
from selfless.data.description import DataDescription, TaskDescription
from selfless.report.groups import best
from tests.report.samples import PAIR, PLAIN, SPARSE, failed, made, noted, shown


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
        ([{}, {"preserve": MAS(0.1 + 1e-9)}], ["mas:0.1", "mas:0.100000001"]),
        ([{}, {"ramp": 2}], ["mas:0.1 (ramp 0)", "mas:0.1 (ramp 2)"]),
        ([{}, {"stream_options": {"order": [1, 2]}}], ["mas:0.1 (order default)", "mas:0.1 (order [1, 2])"]),
    ],
)
def test_labels_say_what_differs_and_no_more(changes, labels):
    assert [g.label for g in report.groups([made(dataclasses.replace(PLAIN, **c)) for c in changes])] == labels


def test_a_data_set_that_grew_between_seeds_is_another_group():
    run = dataclasses.replace(PLAIN, tasks=None)
    assert [g.label for g in report.groups([made(run, 0), made(run, 1, tasks=4)])] == ["mas:0.1 (3 tasks)", "mas:0.1 (4 tasks)"]


def test_holes_in_a_matrix_are_a_failure_not_a_crash():
    (group,) = report.groups([made(PLAIN, accuracy=np.array([[0.9, 0.1], [math.nan, 0.9]]), baseline=np.full(2, 0.1))])
    assert "A[1, 0]" in group.failures[0]


def test_what_was_never_measured_is_not_free():
    (group,) = report.groups([made(PLAIN, capacity=[{"free_parameters": 1.0, "free_neurons": 1.0, "parameters": {}, "neurons": {}}])])
    assert group.value("free_parameters").text() == "–"


def test_a_method_that_uses_old_data_is_marked_and_no_rival():
    """In every label and so in every table and legend; the best of the others is shown as the best."""
    runs = [dataclasses.replace(PLAIN, preserve=term) for term in (Replay(1.0), MAS(0.1), LwF(1.0) + DERpp(0.5, samples=9), LwF(1.0))]
    results = [made(run, drop=0.01 * (i + 1)) for i, run in enumerate(runs)]
    found = report.groups(results)
    assert [g.label for g in found] == ["replay:1 (uses old data)", "mas:0.1", "lwf:1+der:0.5,samples=9 (uses old data)", "lwf:1"]
    assert best(found) is found[1]
    assert "MAS has the highest average of two methods without old data" in str(report.headline(results))
    said = str(report.headline(results[:2]))  # one method without old data stays the best, and the other one is named
    assert re.match(r"MAS has [\d.]+ % on average over three tasks; Replay \(uses old data\) [\d.]+ %\.", said)
    for show in (report.markdown, report.latex, report.csv, shown):
        assert "uses old data" in show(results)


def test_a_method_that_is_told_the_task_is_marked_where_others_are_not():
    def described(first_columns):
        tasks = tuple(TaskDescription(f"{c}", range(c, c + 2), ("a", "b")) for c in first_columns)
        return DataDescription((1, 2, 2), (1, 2, 2), "uint8", None, None, max(first_columns) + 2, tasks)

    shared, own = described((0, 0, 0)), described((0, 2, 4))
    packed = dataclasses.replace(PLAIN, preserve=PackNet(0.75))
    assert "is told the task of each input" in " ".join(report.groups([made(packed, data=shared)])[0].remarks)
    assert "is told" not in " ".join(report.groups([made(packed, data=own)])[0].remarks)  # with a head each all methods are told it
    assert "is told" not in " ".join(report.groups([made(PLAIN, data=shared)])[0].remarks)
    lost = dataclasses.replace(packed, scenario="domain")
    assert "classified by the network of the newest task" in " ".join(report.groups([made(lost, data=shared)])[0].remarks)


def test_the_headline_names_the_best_if_it_is_not_of_the_pair():
    strong = dataclasses.replace(PLAIN, preserve=LwF(1.0))
    results = [*PAIR, *(made(strong, seed, drop=0.001) for seed in range(3))]
    said = str(report.headline(results))
    assert said.startswith("LwF has the highest average of three methods")
    assert "The 95 % interval of their difference is" in said
    equal = [made(run, seed) for run in (PLAIN, strong) for seed in range(2)]
    assert str(report.headline(equal)).startswith("MAS and LwF have the same average, the highest of two methods")


def test_the_headline_says_what_the_sparsifier_brings():
    sentence, support = report.headline(PAIR)
    a, b = (100 * np.mean([r.average for r in part]) for part in (PAIR[3:], PAIR[:3]))
    assert sentence == (
        f"MAS + SLNID keeps {a:.1f} % on average over three tasks; MAS alone {b:.1f} %: +{a - b:.1f} points, "
        "and leaves 60 % of the parameters free instead of 40 %."
    )
    assert support.startswith("MAS + SLNID is ahead on 3 of 3 seeds; the 95 % interval")


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([], "No run has finished."),
        ([failed(PLAIN)], "One run failed, none finished."),
        (PAIR[:1], "MAS ends at 91.0 % on average over three tasks, after losing 7.5 points on earlier ones. One seed."),
        ([made(PLAIN, accuracy=np.array([[0.9, 0.7, 0.1], [0.9, 0.5, 0.1], [0.9, 0.5, 0.7]]))], "after losing 0.0 points"),  # a guess
        ([made(PLAIN, accuracy=np.array([[0.5, 0.9, 0.1], [0.8, 0.6, 0.1], [0.7, 0.5, 0.9]]))], "after losing 10.0 points"),  # 0.8, 0.6
        ([made(PLAIN, tasks=1)], "MAS ends at 97.0 % on its one task. One seed."),
        ([made(PLAIN), made(SPARSE, drop=0.09)], "−4.0 points. One seed each"),
        ([made(PLAIN), made(SPARSE, drop=0.09, free=0.6)], "−4.0 points, but leaves 60 %"),
        ([made(PLAIN), made(SPARSE, drop=0.01, free=0.2)], "+4.0 points, but leaves 20 %"),
        ([made(PLAIN, 0), made(PLAIN, 1), made(SPARSE, 0, drop=0.04), made(SPARSE, 1, drop=0.06)], "cannot be told apart by these seeds"),
        (
            [made(PLAIN), made(dataclasses.replace(PLAIN, preserve="ewc:1"), drop=0.01)],
            "EWC has the highest average of two methods: 95.0 %",
        ),
        ([made(PLAIN), made(dataclasses.replace(PLAIN, stream="b"))], "not comparable"),
        (
            [made(PLAIN), *(made(dataclasses.replace(SPARSE, sparsify=s), drop=0.01) for s in ("slnid:1", "sni:1"))],
            "Best of two sparsifiers: ",
        ),
        ([noted(PLAIN), made(SPARSE)], "tiny-imagenet is reduced"),
        ([made(dataclasses.replace(PLAIN, select="best-on-test"))], "Best-on-test: "),
        ([made(PLAIN), failed(PLAIN, 1)], "1 of 2 runs of MAS failed."),
    ],
)
def test_the_headline_claims_no_more_than_the_data(results, words):
    assert words in str(report.headline(results))


@pytest.mark.parametrize(("accuracy", "remark"), [(0.11, True), (0.2, False)])
def test_tasks_at_chance_are_called_so(accuracy: float, remark: bool):
    tasks = tuple(TaskDescription(f"task {t}", range(10), tuple("0123456789"), "") for t in range(3))
    described = DataDescription((1, 28, 28), (1, 28, 28), "uint8", None, None, 10, tasks)
    result = dataclasses.replace(made(PLAIN, accuracy=np.full((3, 3), accuracy)), data=described)
    said = "Guessing gives 10.0 %, so hardly anything was learnt: more --epochs, or another --lr." in str(report.headline([result]))
    assert said is remark


@pytest.mark.parametrize(
    ("scenario", "widths", "accuracy", "remark"),
    [
        ("class", (2, 2, 2), np.diag([0.5, 0.45, 0.35]), False),  # chance is 1/2, 1/4, 1/6
        ("class", (2, 2, 2), np.diag([0.5, 0.25, 0.17]), True),
        ("class", (1, 1), np.diag([1.0, 0.97]), False),
        ("task", (50, 2), np.array([[0.2, 0.95]]), False),  # joint training has one row
        ("task", (100, 100), np.diag([0.028, 0.028]), False),
    ],
)
def test_chance_is_that_of_the_classes_that_are_told_apart(scenario: str, widths: tuple[int, ...], accuracy: np.ndarray, remark: bool):
    starts = np.cumsum((0, *widths))
    tasks = tuple(TaskDescription(f"task {t}", range(starts[t], starts[t + 1]), ("",) * w, "") for t, w in enumerate(widths))
    described = DataDescription((1, 28, 28), (1, 28, 28), "uint8", None, None, int(starts[-1]), tasks)
    run = dataclasses.replace(PLAIN, scenario=scenario, tasks=len(widths))
    result = dataclasses.replace(made(run, accuracy=accuracy, baseline=np.full(len(widths), 0.1)), data=described)
    assert ("hardly anything was learnt" in str(report.headline([result]))) is remark


def test_a_difference_is_that_of_the_seeds_in_common():
    results = [made(PLAIN, seed, drop=0.3 if seed < 2 else 0.0) for seed in range(4)] + [made(SPARSE, seed, drop=0.2) for seed in range(2)]
    sentence, support = report.headline(results)
    kept, other, gain = (float(value) for value in re.findall(r"\+?([\d.]+) (?:%|points)", sentence)[:3])
    assert gain == pytest.approx(kept - other, abs=0.11)
    assert f": +{gain} points" in sentence
    assert "ahead on 2 of 2 seeds" in support
    apart = [made(PLAIN, seed) for seed in (0, 1)] + [made(SPARSE, seed) for seed in (2, 3)]
    assert report.headline(apart).support.startswith("No seeds in common, so the difference has no error bar.")
