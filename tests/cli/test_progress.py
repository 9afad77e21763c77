"""Live progress: what it says, in which widths, and where there is no terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from selfless import Run
from selfless.cli.lines import clock, describe, label, short, wrap
from selfless.cli.progress import ASIDE, Fleets, progress_lines
from selfless.engine.progress import Event

pytestmark = pytest.mark.usefixtures("every_epoch_saved")

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")


def event(**changes: Any) -> Event:
    now: dict[str, Any] = {"task": 1, "tasks": 5, "name": "b", "epoch": 3, "epochs": 10, "loss": [0.25], "accuracy": [0.9]}
    now |= {"average": [0.95], "share": 0.25, "speed": 812.0, "seconds_left": 80.0}
    return Event(**(now | changes))


WORDS = ["task 2/5", "epoch 3/10", "test average 95.0 %", "train 90.0 %", "loss 0.25", "812 steps/s", "time left 1:20"]


def test_progress_says_task_epoch_accuracy_speed_and_time_left() -> None:
    assert describe(event()) == WORDS
    assert describe(event(loss=[], accuracy=[], average=[], speed=None, seconds_left=None)) == WORDS[:2], "the first epoch has begun"
    assert describe(Event(0, 0, "", 0, 0, [], [], stage="loading the data")) == ["loading the data"]
    assert "time left" not in " ".join(describe(event(task=4, evaluated=True, seconds_left=0.0)))


def test_fleets_are_named_by_method_and_number_of_runs() -> None:
    assert label([Run()]) == "mas:0.1"
    assert label([Run(), Run(seed=1)]) == "mas:0.1 × 2 runs"
    assert label([Run(), Run(sparsify="slnid:1e-3")]) == "2 methods × 2 runs"


@pytest.mark.parametrize("width", [24, 40, 50, 60, 80, 120, 200])
def test_every_phrase_is_shown_whole_in_any_width(width: int) -> None:
    fleets = Fleets(total=3)
    fleets.put([Run(sparsify="slnid:1e-3")], event())
    fleets.put([Run(seed=1)], event(task=4, evaluated=True, share=1.0))
    lines = [line.plain for line in fleets.lines(width)]
    assert max(map(len, lines)) <= width
    text = "  ".join(line.strip() for line in lines)
    assert all(word in text for word in [*WORDS, "1 of 3 runs done"])
    assert ("mas:0.1 + slnid:0.001" in text) == (width > 21)


def test_a_phrase_that_is_too_long_is_cut() -> None:
    assert wrap(["abcdefgh", "ij", "kl"], 6) == ["abcde…", "  ij", "  kl"]
    assert wrap(["abc", "de"], 6, between=" ") == ["abc de"]


def test_durations_and_speeds_are_short() -> None:
    assert [clock(s) for s in (0.4, 42, 725, 11100, 190000)] == ["0:00", "0:42", "12:05", "3 h 05 min", "2 d 4 h"]
    assert [short(x) for x in (0.8, 9.99, 812, 999.6, 1234, 257491, 3.1e6)] == ["0.8", "10", "812", "1.0k", "1.2k", "257k", "3.1M"]


def test_a_terminal_shows_the_lines_and_takes_them_away() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=44, height=20, no_color=True)
    with progress_lines(console, 1) as follow:
        follow([Run()], event())
    text = shown.getvalue()
    assert "time left 1:20" in text
    assert "epoch 3/10" in text
    assert not COLOUR.search(text)
    assert text.count("\x1b[2K") >= text.count("\n"), "what was drawn is erased: the results follow"
    assert max(len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line)) for line in text.splitlines()) <= 44 - ASIDE


def test_more_fleets_than_lines_fit_into_a_low_terminal() -> None:
    shown = io.StringIO()
    with progress_lines(Console(file=shown, force_terminal=True, width=60, height=8), 40) as follow:
        for seed in range(20):
            follow([Run(seed=seed)], event())
    assert "lines more" in shown.getvalue()


@pytest.mark.parametrize("terminal", [{}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}])
def test_a_log_file_gets_a_plain_line_now_and_then(terminal: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from selfless.cli import progress

    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = io.StringIO()
    with progress_lines(Console(file=shown, width=40, **terminal), 1) as follow:
        for _ in range(3000):  # an event a second for 50 minutes
            now += 1
            follow([Run()], event())
    lines = shown.getvalue().splitlines()
    assert 20 <= len(lines) <= 150
    assert set(lines) == {", ".join(["mas:0.1", *WORDS])}
    assert not CONTROL.search(shown.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_leaves_each_fleet_once(terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=200, height=20)

    def train() -> None:
        with progress_lines(console, 2) as follow:
            follow([Run()], event())
            follow([Run(preserve="ewc:1")], event())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    rest = shown.getvalue().rpartition("\x1b[2K")[2]  # after the last line that was erased
    assert rest.count("mas:0.1") == rest.count("ewc:1") == 1
    assert rest.count("time left 1:20") == 2, "each fleet"
    assert rest.count("all in 1:20") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_a_fleet_that_goes_on_from_a_checkpoint_says_so_once(terminal: bool) -> None:
    shown = io.StringIO()
    with progress_lines(Console(file=shown, force_terminal=terminal, width=200, height=20), 2) as follow:
        for run, resumed in ((Run(), True), (Run(preserve="ewc:1"), False)):
            follow([run], Event(0, 0, "", 0, 0, [], [], passing=True, stage="loading the data"))
            for epoch in (3, 4):
                follow([run], event(epoch=epoch, resumed=resumed))
            follow([run], event(evaluated=True))  # the end of a task does not say whether it was resumed
            follow([run], event(task=2, epoch=1, resumed=resumed))
    assert shown.getvalue().count("goes on from the last saved epoch") == 1
    assert "mas:0.1: goes on from the last saved epoch, at task 2 of 5, epoch 3" in shown.getvalue()
