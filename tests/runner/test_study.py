"""Notes about training, and reading them: what another process sees of a study."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import selfless
from selfless import Run
from selfless.engine.progress import Event
from selfless.files import write_json
from selfless.runner import live, study
from selfless.runner.live import FleetNote, announced
from selfless.runner.store import Store
from selfless.runner.study import StudyReader, estimate
from tests.fabricated import result as made
from tests.runner.small_runs import BASE

pytestmark = pytest.mark.usefixtures("every_epoch_saved")


def event(**changes: Any) -> Event:
    return Event(**({"task": 1, "tasks": 4, "name": "b", "epoch": 2, "epochs": 5, "loss": [0.5], "accuracy": [0.8]} | changes))


def states(reader: StudyReader) -> dict[int, str]:
    return {run.seed: run.state for run in reader.look().runs}


def test_a_study_is_followed_from_the_first_note_to_the_last_record(tasks_npz: str, tmp_path: Path) -> None:
    runs = [Run(stream=tasks_npz, seed=seed, **BASE) for seed in range(2)]
    seen: list[study.Snapshot] = []
    reader = StudyReader(tmp_path)

    def follow(_runs: Any, happened: Event) -> None:
        if not seen or happened.evaluated:
            seen.append(reader.look())

    results = selfless.train(runs, out=tmp_path, workers=1, follow=follow)
    assert [run.state for run in seen[0].runs] == ["running", "waiting"]
    assert seen[0].runs[0].event["stage"] == "loading the data"
    last = reader.look()
    assert last.is_over
    assert {run.key: run.accuracy for run in last.runs} == {r.run.key: r.average for r in results}
    assert not list(tmp_path.rglob("study-*"))
    assert not list(tmp_path.rglob("training-*"))
    assert StudyReader(tmp_path).look().count("done") == 2  # also for a reader that came too late


def test_events_between_epochs_are_for_those_who_follow(tasks_npz: str) -> None:
    watched, followed = list[Event](), list[Event]()
    selfless.train(Run(stream=tasks_npz, **BASE), watch=lambda _, e: watched.append(e), follow=lambda _, e: followed.append(e))
    assert [e for e in followed if not e.passing] == watched
    starts = [(e.task, e.epoch) for e in followed if e.passing and e.stage == "training"]
    ends = [(e.task, e.epoch) for e in watched if not e.evaluated]
    assert set(starts) == set(ends), "every epoch is announced before it is over"
    shares = [e.share for e in followed]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert followed[-1].seconds_left == 0
    assert (followed[-1].speed or 0) > 0
    assert followed[-1].average == followed[-1].accuracy


def test_a_run_that_waits_runs_fails_and_is_done(tasks_npz: str, tmp_path: Path) -> None:
    runs = [Run(stream=tasks_npz, seed=seed, **BASE) for seed in range(4)]
    store, reader = Store(tmp_path), StudyReader(tmp_path)
    with announced(runs, store):
        assert set(states(reader).values()) == {"waiting"}
        with FleetNote(runs[:1], store) as note:
            note.write(event(share=0.5, speed=100.0, average=[0.7]))
            record(store, runs[2], "failed", error="the loss was not finite in epoch 1 of task 1 (a)")
            record(store, runs[3], "done")
            found = reader.look()
            assert states(reader) == {0: "running", 1: "waiting", 2: "failed", 3: "done"}
            assert [run.reason for run in found.runs if run.state == "failed"] == ["the loss was not finite in epoch 1 of task 1 (a)"]
            assert found.runs[0].accuracy == 0.7
            assert found.speed == 100
            assert found.seconds_left is not None
            assert found.seconds_left >= 0
        assert states(reader)[0] == "waiting"
    assert states(reader) == {0: "stopped", 1: "stopped", 2: "failed", 3: "done"}


def record(store: Store, run: Run, status: str, error: str = "") -> None:
    folder = store.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"average": 0.9} if status == "done" else {}
    values = {"key": run.key, "run": run.as_dict(), "status": status, "error": error, "summary": summary}
    (folder / "metrics.json").write_text(json.dumps(values))


def test_a_study_that_stopped_says_why_until_it_goes_on(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **BASE)

    def stop(_runs: Any, happened: Event) -> None:
        if happened.evaluated:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selfless.train(run, out=tmp_path, follow=stop)
    (found,) = StudyReader(tmp_path).look().runs
    assert (found.state, found.reason) == ("stopped", "stopped by the user")
    selfless.train(run, out=tmp_path)
    assert states(StudyReader(tmp_path)) == {0: "done"}


def test_notes_of_a_killed_process_do_not_count_for_long(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = Run(stream=tasks_npz, **BASE), Store(tmp_path)
    note = FleetNote([run], store)
    note.write(event())
    assert states(StudyReader(tmp_path)) == {0: "running"}
    values = json.loads(note.path.read_text()) | {"process": 2**22 + 7}  # no such process
    note.path.write_text(json.dumps(values | {"processes": "pid:[1]"}))
    assert states(StudyReader(tmp_path)) == {0: "running"}, "in another container of the same name it may be one that we do not see"
    if values["processes"]:  # on Linux
        note.path.write_text(json.dumps(values))
        assert states(StudyReader(tmp_path)) == {}, "at once"
    values |= {"processes": "pid:[1]"}
    old = time.time() - live.SILENT - 1
    note.path.write_text(json.dumps(values | {"updated": old}))
    os.utime(note.path, (old, old))
    assert states(StudyReader(tmp_path)) == {}
    note.path.write_text(json.dumps(values | {"updated": old, "host": "elsewhere"}))
    os.utime(note.path, (old, old))
    assert states(StudyReader(tmp_path)) == {0: "running"}, "of another machine only silence is known"
    monkeypatch.setattr(live, "LOST", 1.0)
    assert states(StudyReader(tmp_path)) == {}


def test_notes_are_written_at_a_bounded_rate(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(live, "write_text", lambda path, text: (written.append(path), json.loads(text)))
    note = FleetNote([Run(stream=tasks_npz, **BASE)], Store(tmp_path))
    for _ in range(100):
        note.write(event(loss=[float("nan")]))
    assert len(written) == 1


def test_the_time_left_of_a_study_is_that_of_a_steady_rate() -> None:
    assert estimate(10.0, [1.0, 0.5, 0.5, 0.0]) == 10.0
    assert estimate(10.0, [0.0, 0.0]) is None
    assert estimate(10.0, [1.0]) == 0.0


def test_records_and_logs_that_cannot_be_read_are_shown_with_the_reason(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **BASE)
    Store(tmp_path).folder(run).mkdir(parents=True)
    for text, method in (("{", "unreadable"), ("[]", "unreadable")):
        (tmp_path / run.key / "metrics.json").write_text(text)
        (found,) = StudyReader(tmp_path).look().runs
        assert (found.state, found.method) == ("failed", method)
        assert found.reason.startswith("its record cannot be read (")
        assert found.reason.endswith("); train it again with --force")
    (tmp_path / run.key / "metrics.json").unlink()
    for text, reason in (
        ('{"task": 2, "epoch": 5}\n', "its log ends after task 2, epoch 5"),
        ("", "its log is empty"),
        ('{"task": []}\n', "its log is empty"),
    ):
        (tmp_path / run.key / "log.jsonl").write_text(text)
        (found,) = StudyReader(tmp_path).look().runs
        assert (found.key, found.state, found.reason) == (run.key, "stopped", reason)


def test_a_method_that_is_not_here_has_its_recorded_name(tmp_path: Path) -> None:
    values = made(Run(), 0.9).as_dict()
    for preserve, name in (({"name": "gone:Mine", "strength": 1.0}, "gone:Mine"), ({"sum": []}, "a sum of methods")):
        write_json(tmp_path / "a" / "metrics.json", values | {"run": values["run"] | {"preserve": preserve}})
        (found,) = StudyReader(tmp_path).look().runs
        assert (found.method, found.stream, found.state) == (name, "permuted-mnist", "done")
    write_json(tmp_path / "a" / "metrics.json", values)
    assert StudyReader(tmp_path).look().runs[0].method == Run().method


def test_a_record_of_before_the_study_does_not_count(tasks_npz: str, tmp_path: Path) -> None:
    run, store = Run(stream=tasks_npz, **BASE), Store(tmp_path)
    record(store, run, "done")
    long_ago = time.time() - 1000
    os.utime(store.folder(run) / "metrics.json", (long_ago, long_ago))
    (tmp_path / "study-x.json").write_text("not a note")
    with announced([run], store):
        assert states(StudyReader(tmp_path)) == {0: "waiting"}


def test_a_study_on_a_machine_with_another_clock_changes_no_time_left(tasks_npz: str, tmp_path: Path) -> None:
    runs = [Run(stream=tasks_npz, seed=seed, **BASE) for seed in range(2)]
    store, other = Store(tmp_path / "one"), Store(tmp_path / "two")
    with announced(runs[:1], store), FleetNote(runs[:1], store) as note:
        note.write(event(share=0.5, average=[0.7]))
        alone = StudyReader(tmp_path).look().seconds_left
        with announced(runs[1:], other), FleetNote(runs[1:], other) as later:
            later.write(event(share=0.5, average=[0.7]))
            for path in other.out.rglob("*.json"):  # an hour ahead
                values = json.loads(path.read_text())
                path.write_text(json.dumps({k: v + 3600 if k in ("started", "updated") else v for k, v in values.items()}))
            assert StudyReader(tmp_path).look().seconds_left == pytest.approx(alone, abs=60)
