"""The command line, as a person and as a script would use it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from selfless.cli import app
from selfless.config import options, plan, size

runner = CliRunner()


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = importlib.util.spec_from_file_location("engine_conftest", Path(__file__).parent / "engine" / "conftest.py")
    assert found is not None
    assert found.loader is not None
    engine = importlib.util.module_from_spec(found)  # by its place: every folder of tests may have a conftest
    found.loader.exec_module(engine)
    return str(engine.make(tmp_path_factory.mktemp("cli") / "tasks.npz"))


def small(stream: str, out: Path, *more: str) -> list[str]:
    return ["run", "--stream", stream, "--model", "mlp-12", "--epochs", "2", "--batch", "50", "--lr", "0.05", "--out", str(out), *more]


def test_run_prints_a_table_and_where_the_files_are(stream: str, tmp_path: Path) -> None:
    done = runner.invoke(app, small(stream, tmp_path, "--sparsify", "slnid:1e-2"))
    assert done.exit_code == 0, done.output
    assert "slnid:0.01" in done.output
    folder = next(tmp_path.iterdir())
    assert folder.name in done.output.replace("\n", "")


def test_json_is_one_object_with_full_precision(stream: str, tmp_path: Path) -> None:
    done = runner.invoke(app, small(stream, tmp_path, "--json"))
    value = json.loads(done.stdout)
    assert value["runs"][0]["status"] == "done"
    recorded = json.loads(next(tmp_path.glob("*/metrics.json")).read_text())
    assert value["runs"][0]["accuracy"] == recorded["accuracy"]
    assert value["average"]["mean"] == recorded["summary"]["average"]


def test_seeds_report_mean_and_deviation(stream: str, tmp_path: Path) -> None:
    done = runner.invoke(app, small(stream, tmp_path, "--seeds", "3", "--workers", "1", "--json"))
    value = json.loads(done.stdout)
    averages = [r["summary"]["average"] for r in value["runs"]]
    assert [r["run"]["seed"] for r in value["runs"]] == [0, 1, 2]
    assert value["average"]["mean"] == pytest.approx(sum(averages) / 3)
    assert value["average"]["std"] > 0


def test_config_and_flags_compose(stream: str, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text(
        f'stream = "{stream}"\nmodel = "mlp-9"\nepochs = 1\nbatch = 50\npreserve = {{name = "ewc", strength = 3.0}}\nseeds = 2\n'
    )
    made = plan(config, {"epochs": 2, "model": None})
    assert [r.seed for r in made.runs] == [0, 1]
    assert made.runs[0].epochs == 2
    assert made.runs[0].model == "mlp-9"
    assert str(made.runs[0].preserve) == "ewc:3"
    done = runner.invoke(app, ["run", "--config", str(config), "--seeds", "1", "--out", str(tmp_path / "out"), "--json"])
    assert json.loads(done.stdout)["runs"][0]["run"]["model"] == "mlp-9"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preserve", "mass:0.1"], "Did you mean 'mas'"),
        (["--preserve", "joint"], "Joint training is a stream: --stream joint-permuted-mnist"),
        (["--sparsify", "slnid:much"], "not a number"),
        (["--preserve", "ewc:10,alpha=function,alpha=loss"], "gives alpha twice"),
        (["--preserve", "ewc:10,alpha=norm"], "choose one of 'loss', 'function'"),
        (["--select", "best"], "choose one of last, held-out, best-on-test"),
        (["--stream", "permuted-mnits"], "permuted-mnist"),
        (["--model", "mpl-12"], "mlp"),
        (["--lr", "-1"], "lr is -1.0"),
        (["--config", "nowhere.toml"], "there is no file nowhere.toml"),
        (["--stream-option", "head"], "write key=value"),
        (["--device", "cuda"], "no usable GPU"),
        (["--budget", "much"], "not a size"),
        (["--engine", "ray"], "not available in this version"),
    ],
)
def test_bad_input_is_one_message_with_the_remedy(stream: str, tmp_path: Path, words: list[str], message: str) -> None:
    import torch

    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = runner.invoke(app, small(stream, tmp_path / "out", *words))
    assert done.exit_code == 1
    assert message in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*/metrics.json"))
    told = runner.invoke(app, small(stream, tmp_path / "out", *words, "--json"))
    assert message in json.loads(told.stdout)["error"]


def test_unknown_keys_are_errors_with_a_suggestion(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text("epoch = 3\n")
    with pytest.raises(ValueError, match=r"unknown key 'epoch'\. Did you mean 'epochs'"):
        plan(config, {})
    config.write_text("epochs = = 3\n")
    with pytest.raises(ValueError, match="not valid TOML"):
        plan(config, {})


def test_a_failed_run_is_shown_and_the_exit_is_not_zero(stream: str, tmp_path: Path) -> None:
    done = runner.invoke(app, small(stream, tmp_path, "--lr", "1e30", "--preserve", "none"))
    assert done.exit_code == 1
    assert "not finite" in done.output
    told = runner.invoke(app, small(stream, tmp_path, "--lr", "1e30", "--preserve", "none", "--json"))
    assert told.exit_code == 1
    assert json.loads(told.stdout)["runs"][0]["status"] == "failed"  # one object, and nothing after it


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_warning_is_one_line_without_a_path(stream: str, tmp_path: Path, workers: str) -> None:
    """Two runs that are no fleet warn twice, in this process or in workers; a person is told once."""
    words = ["--preserve", "packnet:0.5", "--scenario", "class", "--seeds", "2", "--workers", workers, "--json"]
    done = runner.invoke(app, small(stream, tmp_path, *words))
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["runs"]) == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("note: PackNet judges a task with what it kept for that task")
    assert ".py" not in line


def test_report_and_capacity_read_what_was_recorded(stream: str, tmp_path: Path) -> None:
    runner.invoke(app, small(stream, tmp_path, "--sparsify", "slnid:1e-2"))
    page = runner.invoke(app, ["report", str(tmp_path)])
    assert page.exit_code == 0, page.output
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    for form in ("md", "csv", "latex"):
        assert runner.invoke(app, ["report", str(tmp_path), "--format", form]).exit_code == 0
    room = json.loads(runner.invoke(app, ["capacity", str(tmp_path), "--json"]).stdout)
    assert len(room["runs"][0]["capacity"]) == 3
    assert "parameters: all" in runner.invoke(app, ["capacity", str(tmp_path)]).output
    empty = runner.invoke(app, ["report", str(tmp_path / "none")])
    assert empty.exit_code == 1
    assert "holds no results" in empty.output
    (tmp_path / "begun" / "0123456789abcdef").mkdir(parents=True)
    (tmp_path / "begun" / "0123456789abcdef" / "log.jsonl").write_text("{}\n")
    assert "holds no results, but 1 unfinished" in runner.invoke(app, ["report", str(tmp_path / "begun")]).output


def recorded(out: Path, free: float, **fields: Any) -> Any:
    """A result of two tasks as the store would write it; after the second, half of what was `free` after the first."""
    import numpy as np

    from selfless.files import write_json
    from selfless.spec import Result, Run

    run = Run(tasks=2, **fields)
    room = [
        {"tasks": t, "threshold": 0.01, "free_parameters": x, "free_neurons": x / 4, "parameters": {"fc1.weight": x}, "neurons": {"fc1": x}}
        for t, x in ((1, free), (2, free / 2))
    ]
    result = Result(run, np.full((2, 2), 0.9), np.full(2, 0.1), [], room)
    write_json(out / run.key / "metrics.json", result.as_dict())
    return result


def test_capacity_of_many_runs_is_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for runs that differ in the seed alone; layers of one run by its folder. Of a dozen, every layer of every run."""
    monkeypatch.setenv("COLUMNS", "80")
    for seed in range(6):
        recorded(tmp_path, 0.4 + 0.032 * seed, seed=seed)
        one = recorded(tmp_path, 0.8, seed=seed, sparsify="slnid:1e-3")
    few = runner.invoke(app, ["capacity", str(tmp_path)]).output
    assert few.count("parameters: fc1.weight") == 12
    recorded(tmp_path, 0.6, model="mlp-64")
    many = runner.invoke(app, ["capacity", str(tmp_path)])
    assert many.exit_code == 0, many.output
    *table, _, told = many.output.rstrip().splitlines()
    rows = [line.split() for line in table]
    assert [row[-5:] for row in rows if row and row[0].startswith("mas")] == [
        ["6", "12.0", "6.0", "48.0", "24.0"],
        ["6", "20.0", "10.0", "80.0", "40.0"],
        ["1", "15.0", "7.5", "60.0", "30.0"],
    ]
    assert ["permuted-mnist,", "mlp-64"] in rows
    assert "fc1" not in many.output
    assert max(map(len, table)) <= 80
    assert f"selfless capacity {tmp_path}/KEY" in told
    assert "--json" in told
    assert "parameters: fc1.weight" in runner.invoke(app, ["capacity", str(tmp_path / one.run.key)]).output
    everything = json.loads(runner.invoke(app, ["capacity", str(tmp_path), "--json"]).stdout)["runs"]
    assert {(r["key"], r["model"]) for r in everything} >= {(one.run.key, "mlp-128")}
    assert len(everything) == 13


def test_help_is_quick_and_does_not_load_torch() -> None:
    code = "import sys, selfless.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    begun = time.process_time()
    done = runner.invoke(app, ["run", "--help"])
    assert done.exit_code == 0
    assert "selfless run" in done.output
    assert time.process_time() - begun < 5


def test_own_data_and_own_network_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/your-own.md says: pictures in folders and a factory in a module."""
    import numpy as np
    from PIL import Image

    rng = np.random.Generator(np.random.PCG64(0))
    for task, classes in (("animals", ("cat", "dog")), ("things", ("cup", "pen"))):
        for k, name in enumerate(classes):
            for part, count in (("train", 30), ("test", 10)):
                folder = tmp_path / "tasks" / task / part / name
                folder.mkdir(parents=True)
                for i in range(count):
                    pixels = np.clip(rng.normal(80 + 90 * k, 20, (8, 8, 3)), 0, 255).astype(np.uint8)
                    Image.fromarray(pixels).save(folder / f"{i}.png")
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n\n"
        "def build(outputs, input_shape):\n"
        "    channels, height, width = input_shape\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 16), nn.ReLU(), nn.Linear(16, outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["run", "--stream", "folders:tasks", "--model", "mynet:build", "--epochs", "15", "--batch", "10", "--sparsify", "slnid:1e-3"]
    done = runner.invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"][0]["summary"]["average"] > 0.8


def test_options_and_sizes() -> None:
    given: dict[str, Any] = options(["p=0.5", "head=all", "angles=[0, 30]", "flag=true"], "--stream-option")
    assert given == {"p": 0.5, "head": "all", "angles": [0, 30], "flag": True}
    assert [size(t) for t in ("2GB", "500 MiB", "12", None, 7)] == [2 * 10**9, 500 * 2**20, 12, None, 7]


def test_utilisation_says_what_each_fleet_made_of_the_machine() -> None:
    from types import SimpleNamespace

    from selfless.cli_common import utilisation

    gpu = {
        "fleet": 60,
        "hardware": "NVIDIA H200",
        "seconds": 4.4,
        "run_steps_per_second": 257491.2,
        "memory": {"peak_gb": 6.2, "share": 0.041},
    }
    cpu = {"fleet": 1, "hardware": "a CPU, 2 cores", "seconds": 12.0, "run_steps_per_second": 700.4, "memory": None}
    found = [SimpleNamespace(about=about) for about in (gpu, gpu, cpu, {"fleet": 1, "seconds": 1.0, "hardware": "x"})]
    assert utilisation(found) == [
        "60 runs as one fleet on NVIDIA H200: 4.4 s, 257,491 run-steps a second, 6.2 GB (4% of its memory)",
        "1 run on a CPU, 2 cores: 12.0 s, 700 run-steps a second",
    ]


def test_figures_from_checkpoints_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    done = runner.invoke(app, ["reproduce", "fig-4-bottom", "locality", "--quick", "--no-checkpoints", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "fig-4-bottom, locality" in done.output
    assert not (tmp_path / "out").exists()


def test_whoever_stops_reading_is_not_told_off() -> None:
    """`selfless … | head`: no error, no traceback."""
    code = "import typer; from selfless.cli_common import told\ndef f():\n  with told():\n    for i in range(10**6): print(i)\ntyper.run(f)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"0\n"
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 141
