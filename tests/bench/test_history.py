"""The history of ratios: what a line holds, and which ratios fell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from selfless.bench import history
from selfless.bench.engine import cnn, mlp
from selfless.bench.limits import limit_of, products_of
from selfless.cli import app

FOUND: dict[str, Any] = {
    "hardware": {"hardware": "a CPU", "cores": 2, "threads": 1, "torch": "2.13", "commit": "abc", "time": "now"},
    "quick": True,
    "steps": [{"what": "a step", "times_eager": 3.0, "of_limit": 0.5, "seconds": 1.0}],
    "importance": [{"what": "a pass", "of_forward_backward": 1.25, "of_limit": None}, {"what": "the base", "of_forward_backward": 1.0}],
}


def line(value: float, commit: str = "abc", **machine: Any) -> dict[str, Any]:
    return {"commit": commit, "time": "now", "machine": {"hardware": "a CPU"} | machine, "ratios": {"a step: times_eager": value}}


def test_a_line_holds_ratios_of_which_larger_is_better() -> None:
    made = history.make_line(FOUND, ("steps", "importance"))
    assert made["ratios"] == {"a step: of_limit": 0.5, "a step: times_eager": 3.0, "a pass: 1 / of_forward_backward": 0.8}
    assert made["machine"] == {"hardware": "a CPU", "cores": 2, "threads": 1, "torch": "2.13", "quick": True}


def test_a_ratio_falls_below_two_thirds_of_the_median() -> None:
    known = [line(v, str(v)) for v in (3.0, 3.3, 30.0)]
    assert history.fallen(line(2.3), known) == {}
    assert history.fallen(line(2.1), known) == {"a step: times_eager": (2.1, 3.3)}


def test_other_machines_and_short_histories_are_not_compared() -> None:
    assert history.fallen(line(0.1), [line(3.0, threads=2)] * 5 + [line(3.0)] * 2) == {}
    assert history.fallen(line(0.1), [line(3.0)] * 3)


def test_the_better_of_two_measurements_counts() -> None:
    again = history.best(line(1.0), line(3.0))
    assert again["ratios"] == line(3.0)["ratios"]
    assert history.best(line(3.0), line(1.0))["ratios"] == line(3.0)["ratios"]


def test_a_commit_has_one_line_per_machine(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert history.read(path) == []
    for one in (line(1.0), line(2.0, "def"), line(3.0), line(4.0, threads=2), line(3.0) | {"ratios": {}}):
        history.append(path, one)
    assert [(o["commit"], *o["ratios"].values()) for o in history.read(path)] == [("def", 2.0), ("abc", 3.0), ("abc", 4.0)]
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1, is not a line of `selfless bench --history`; remove it"):
        history.read(path)


@pytest.mark.parametrize(("now", "status"), [(2.9, 0), (1.0, 1)])
def test_the_command_fails_if_a_ratio_fell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: float, status: int) -> None:
    path, calls = tmp_path / "history.jsonl", list[int]()
    for commit in "abc":
        history.append(path, history.make_line(FOUND, ("steps",)) | {"commit": commit})

    def measure(*_: Any, **__: Any) -> dict[str, Any]:
        calls.append(1)
        return FOUND | {"skipped": {}, "steps": [FOUND["steps"][0] | {"times_eager": now}]}

    monkeypatch.setattr("selfless.bench.main.bench", measure)
    done = CliRunner().invoke(app, ["bench", "--quick", "--device", "cpu", "--history", str(path), "--check", "--json"])
    assert done.exit_code == status, done.output
    assert ('"a step: times_eager": [1.0, 3.0]' in done.output) is bool(status)
    assert len(calls) == 1 + status  # a ratio that fell is measured again
    assert len(history.read(path)) == 3


def test_a_check_needs_a_history() -> None:
    done = CliRunner().invoke(app, ["bench", "--check"])
    assert done.exit_code == 1
    assert "--history benchmarks/history.jsonl" in " ".join(done.output.split())


# ------------------------------------------------------------------------------------------------------------------- the limit
def test_products_are_those_of_the_network() -> None:
    assert [(p.rows, p.inputs, p.outputs, p.is_first) for p in products_of(mlp(16), 5)] == [
        (5, 784, 16, True),
        (5, 16, 16, False),
        (5, 16, 10, False),
    ]
    first, second = products_of(cnn(16), 2)[:2]
    assert (first.rows, first.inputs, first.outputs, first.parameters) == (2 * 32 * 32, 27, 32, 28 * 32)
    assert (second.rows, second.inputs, second.outputs) == (2 * 30 * 30, 32 * 9, 32)


def test_the_limit_runs_every_product_of_every_member(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, flops = limit_of(mlp(16), 3, 5, torch.device("cpu")), list[int]()
    bmm = torch.bmm

    def count(x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
        flops.append(x.numel() * y.shape[-1])
        return bmm(x, y, **options)

    monkeypatch.setattr(torch, "bmm", count)
    limit()
    assert sum(flops) == 3 * 5 * (2 * 784 * 16 + 3 * 16 * 16 + 3 * 16 * 10)
