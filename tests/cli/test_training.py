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
