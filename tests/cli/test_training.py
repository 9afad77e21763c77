"""What commands that train have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless.cli import app

runner = CliRunner()


def test_a_line_for_every_fleet_says_how_fast_it_was() -> None:
    from types import SimpleNamespace

    from selfless.cli.training import fleet_speeds

    gpu = {
        "fleet": 60,
        "hardware": "NVIDIA H200",
        "seconds": 4.4,
        "run_steps_per_second": 257491.2,
        "memory": {"peak_gb": 6.2, "share": 0.041},
    }
    cpu = {"fleet": 1, "hardware": "a CPU, 2 cores", "seconds": 12.0, "run_steps_per_second": 700.4, "memory": None}
    found = [SimpleNamespace(about=about) for about in (gpu, gpu, cpu, {"fleet": 1, "seconds": 1.0, "hardware": "x"})]
    assert fleet_speeds(found) == [
        "60 runs as one fleet on NVIDIA H200: 4.4 s, 257,491 run-steps a second, 6.2 GB (4% of its memory)",
        "1 run on a CPU, 2 cores: 12.0 s, 700 run-steps a second",
    ]


def test_figures_from_checkpoints_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    done = runner.invoke(app, ["reproduce", "fig-4-bottom", "locality", "--quick", "--no-checkpoints", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "fig-4-bottom, locality" in done.output
    assert not (tmp_path / "out").exists()


def test_tune_refuses_where_every_strength_failed() -> None:
    from selfless import Run
    from selfless.cli.tune import show_tuning

    with pytest.raises(ValueError, match="every strength failed; try a smaller --lr"):
        show_tuning([Run()], [[float("nan")]], None, None, 0.5, as_json=False)


def test_a_tie_of_strengths_is_explained() -> None:
    from selfless.cli.tune import explain_tie

    assert "4 held-out images are too few to tell strengths apart" in explain_tie(1.0, 1, 4, 2)
    assert explain_tie(1.0, 2, 8, 2) == "", "eight of eight, twice, is no guess"
    assert "is what guessing among 10 classes gives" in explain_tie(0.104, 2, 5000, 10)
    assert explain_tie(0.115, 2, 5000, 10) == "", "of ten thousand images so many are no guess"
    assert "every strength gives the same accuracy" in explain_tie(0.5, 2, 0, 0)


def test_the_order_of_folders_is_said(tmp_path: Path) -> None:
    from selfless import Run
    from selfless.cli.training import folder_order

    for name in ("task10", "task2", ".hidden"):
        (tmp_path / name).mkdir()
    said = folder_order(Run(stream=f"folders:{tmp_path}"))
    assert said.startswith("tasks in the order of their names: task2, task10; ")
    assert said.endswith("""--stream-option 'task_order=["task10", "task2"]'""")
    assert folder_order(Run(stream=f"folders:{tmp_path}", stream_options={"task_order": ["task10", "task2"]})) == ""
    assert folder_order(Run()) == ""
    assert folder_order(Run(stream=f"folders:{tmp_path}", tasks=1)) == ""
