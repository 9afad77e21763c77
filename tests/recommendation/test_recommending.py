"""`recommend` returns the best measured row that a case allows; a run and a keeper take it by name."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import selfless
from selfless.preserve import PRESERVERS
from selfless.recommendation import CASES, Case, NotMeasured, Recommendation, recommend, recommend_for_stream
from selfless.recommendation.table import HELD_OUT, load
from selfless.runner.plan import plan
from selfless.terms import parse

ROOT = Path(__file__).resolve().parent.parent.parent


def of(case: Case, **more: Any) -> Recommendation:
    return recommend(inputs=case.inputs, heads=case.heads, augment=case.augment, tasks=case.tasks, **more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_winner_is_the_highest_average_that_is_allowed(case: Case) -> None:
    rows = [row for row in load()[0] if row.case == case.name]
    for task_known, memory, simple in itertools.product((True, False), (None, 1.0, 2.0), (True, False)):
        if case.heads == "own" and not task_known:
            continue
        terms = {row: parse(row.preserve, PRESERVERS, "preserver") for row in rows}
        allowed = [row for row in rows if memory is None or row.memory <= memory]
        allowed = [row for row in allowed if (task_known and not simple) or not any(part.needs_task for part in terms[row].parts)]
        allowed = [row for row in allowed if not simple or not getattr(terms[row], "warmup", 0)]
        found = of(case, task_known=task_known, memory=memory, simple_loop=simple)
        assert found.measured.average == max(row.average for row in allowed)
        assert found.preserve == terms[found.measured]
        assert f"{found.measured.average:.1f} %" in found.why
        assert set(found.strengths) == {part.name for t in (found.preserve, found.sparsify) for part in t.parts if part.name != "none"}


def test_the_case_with_the_nearest_number_of_tasks_answers() -> None:
    """Few tasks leave room to PackNet and LwF alike; the more there are, the less PackNet has."""
    found = {n: recommend(inputs="same", heads="own", augment=True, tasks=n).measured.case for n in (2, 14, 15, 20, 30)}
    assert found == {2: "cifar-aug", 14: "cifar-aug", 15: "cifar-20", 20: "cifar-20", 30: "cifar-20"}


def test_a_condition_never_raises_the_average() -> None:
    for case in CASES:
        averages = [of(case, memory=memory).measured.average for memory in (1.0, 2.0, 7.0, None)]
        assert averages == sorted(averages)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_command_of_the_winner_trains_its_recorded_runs(case: Case) -> None:
    """The first run of the command has a key that is in the record."""
    measured = of(case).measured
    flags: dict[str, Any] = {}
    words = shlex.split(measured.command)[2:]
    for flag, text in zip(words[::2], words[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        if name == "stream_option":
            flags.setdefault("stream_options", []).append(text)
        else:
            kind = type(getattr(selfless.Run(), name, 0))
            flags[name] = kind(text) if kind in (int, float) else text
    runs = plan(None, flags).runs
    assert len(runs) == measured.seeds
    if measured.chosen_on == HELD_OUT:
        record = (ROOT / measured.record).read_text(encoding="utf-8")
        assert [run.key for run in runs if f'"{run.key}"' not in record] == []
    else:
        from selfless.runner import Store

        assert all(Store((ROOT / measured.record).parent).has(run.key) for run in runs)


def test_what_was_not_measured_is_an_error_that_names_the_nearest_case() -> None:
    with pytest.raises(NotMeasured, match=r"not measured: tasks with different inputs and a head each; the nearest is ten CIFAR-100 tasks"):
        recommend(inputs="different", heads="own")
    with pytest.raises(NotMeasured, match=r"not measured: 9 tasks; the nearest is five .* recommend\(inputs='different', heads='shared'\)"):
        recommend(inputs="different", heads="shared", tasks=9)
    twenty = r"the nearest is twenty .* recommend\(inputs='same', heads='own', augment=True, tasks=20\)"
    with pytest.raises(NotMeasured, match=rf"not measured: 16 tasks, without augmentation; {twenty}"):
        recommend(inputs="same", heads="own", tasks=16)
    with pytest.raises(NotMeasured, match=rf"not measured: 31 tasks, with augmentation; {twenty}"):
        recommend(inputs="same", heads="own", augment=True, tasks=31)
    assert recommend(inputs="same", heads="own", tasks=15) == recommend(inputs="same", heads="own")
    with pytest.raises(NotMeasured, match=r"at most 0.5 times the parameters"):
        recommend(inputs="same", heads="own", augment=True, memory=0.5)
    with pytest.raises(NotMeasured, match=r"der:1, which keeps old samples"):
        recommend(inputs="same", heads="own", task_known=False)
    with pytest.raises(ValueError, match=r"inputs is 'alike'; choose one of 'same', 'different'"):
        recommend(inputs="alike", heads="own")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Use selfless run --preserve recommended"):
        selfless.Run(preserve="recommended")


@pytest.mark.parametrize("stream", ["folders:my/tasks", "blurred-cifar-100", "joint-permuted-mnist", "objects"])
def test_a_stream_of_an_unknown_kind_is_not_guessed(stream: str) -> None:
    with pytest.raises(NotMeasured, match=r"call selfless\.recommend"):
        recommend_for_stream({"stream": stream})


# ------------------------------------------------------------------------------------------------------------------- in a run
def test_a_run_by_recommendation_has_the_key_of_the_run_by_name() -> None:
    settings: dict[str, Any] = {"stream": "split-cifar-100", "model": "cnn-256", "augment": "crop-flip", "seeds": 2}
    planned = plan(None, {**settings, "preserve": "recommended"})
    found = planned.recommended
    assert found is not None
    assert found == recommend(inputs="same", heads="own", augment=True)
    by_name = plan(None, {**settings, "preserve": str(found.preserve), "sparsify": str(found.sparsify), "layers": found.layers})
    assert [run.key for run in planned.runs] == [run.key for run in by_name.runs]
    assert by_name.recommended is None


def test_what_is_named_beside_the_recommendation_is_kept(tmp_path: Path) -> None:
    (run,) = plan(None, {"preserve": "recommended", "sparsify": "none", "scenario": "domain"}).runs
    assert run.preserve == recommend(inputs="different", heads="shared", task_known=False).preserve
    assert run.sparsify.name == "none"
    config = tmp_path / "my.toml"
    config.write_text('preserve = "recommended"\nlayers = "all"\n')
    (run,) = plan(config, {}).runs
    assert (run.preserve, run.layers) == (recommend(inputs="different", heads="shared").preserve, "all")


# ------------------------------------------------------------------------------------------------------------------ in a loop
class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_attach_takes_the_recommendation_for_its_heads() -> None:
    """Of those that need no further calls in the loop."""
    shared, own = recommend(inputs="different", heads="shared", task_known=False), recommend(inputs="same", heads="own", simple_loop=True)
    keeper = selfless.attach(net(), "recommended")
    assert (keeper.preserve, keeper.sparsify) == (shared.preserve, shared.sparsify)
    with pytest.warns(UserWarning, match="measured on tasks with the same kind of inputs"):
        keeper = selfless.attach(Heads(), "recommended", heads=["heads.0", "heads.1"])
    assert (keeper.preserve, keeper.sparsify) == (own.preserve, own.sparsify)


def test_attach_takes_a_recommendation_and_keeps_what_is_named() -> None:
    found = recommend(inputs="different", heads="shared")
    keeper = selfless.attach(net(), found)
    assert (keeper.preserve, keeper.sparsify) == (found.preserve, found.sparsify)
    keeper = selfless.attach(net(), found, sparsify="l1-rep:1e-5")
    assert (keeper.preserve, str(keeper.sparsify)) == (found.preserve, "l1-rep:1e-05")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"augment": "crop-flip"}, "augment is 'crop-flip'; choose one of True, False"),
        ({"task_known": "yes"}, "task_known is 'yes'; choose one of True, False"),
        ({"tasks": "5"}, "tasks is '5'; write how many tasks"),
        ({"tasks": 0}, "tasks is 0; write how many tasks"),
        ({"memory": -1}, "memory is -1; write how many copies"),
        ({"memory": "1"}, "memory is '1'; write how many copies"),
    ],
)
def test_wrong_values_are_said_with_the_remedy(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        recommend(inputs="different", heads="shared", **wrong)


def test_without_memory_there_is_no_preserver() -> None:
    found = str(recommend(inputs="different", heads="shared", memory=0))
    assert found.startswith("no preserver with slnid")
    assert "no preserver was measured that holds so little. SLNID without one has" in found
