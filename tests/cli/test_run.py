"""`selfless run`, as a person and as a script would use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless.cli import app
from tests.cli.small_commands import small

runner = CliRunner()


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


@pytest.mark.slow
def test_seeds_report_mean_and_deviation(stream: str, tmp_path: Path) -> None:
    done = runner.invoke(app, small(stream, tmp_path, "--seeds", "3", "--workers", "1", "--json"))
    value = json.loads(done.stdout)
    averages = [r["summary"]["average"] for r in value["runs"]]
    assert [r["run"]["seed"] for r in value["runs"]] == [0, 1, 2]
    assert value["average"]["mean"] == pytest.approx(sum(averages) / 3)
    assert value["average"]["std"] > 0


def test_config_and_flags_compose(stream: str, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text(f'stream = "{stream}"\nmodel = "mlp-9"\nepochs = 1\nbatch = 50\nseeds = 2\nmodel_options = {{layers = 1}}\n')
    words = ["--config", str(config), "--seeds", "1", "--model-option", "layers=3", "--out", str(tmp_path / "out")]
    made = json.loads(runner.invoke(app, ["run", *words, "--json"]).stdout)["runs"]
    assert [(r["run"]["model"], r["run"]["epochs"], r["run"]["model_options"]) for r in made] == [("mlp-9", 1, {"layers": 3})]


def test_a_limit_is_an_option_of_the_stream(stream: str, tmp_path: Path) -> None:
    made = json.loads(runner.invoke(app, small(stream, tmp_path, "--limit", "30", "--stream-option", "head=shared", "--json")).stdout)
    assert made["runs"][0]["run"]["stream_options"] == {"head": "shared", "limit": 30}


def test_a_limit_in_a_file_is_an_option_of_the_stream(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("limit = 30\n")
    done = runner.invoke(app, ["run", "--config", str(tmp_path / "my.toml")])
    assert "unknown key 'limit'. Write stream_options = {limit = 500}." in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preserve", "mass:0.1"], "Did you mean 'mas'"),
        (["--preserve", "slnid:1e-3"], "slnid is a sparsifier: --sparsify slnid:1e-3"),
        (["--sparsify", "mas:0.1"], "mas is a preserver: --preserve mas:0.1"),
        (["--preserve", "joint"], "Joint training is a stream: selfless run --stream joint-permuted-mnist"),
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
        (["--engine", "dask"], "engine 'dask' is not known; choose local or ray"),
        (["--address", "auto"], "add --engine ray"),
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
    shown = runner.invoke(app, small(stream, tmp_path / "out", *words, "--json"))
    assert message in json.loads(shown.stdout)["error"]


def test_a_failed_run_is_shown_and_the_exit_is_not_zero(stream: str, tmp_path: Path) -> None:
    done = runner.invoke(app, small(stream, tmp_path, "--lr", "1e30", "--preserve", "none"))
    assert done.exit_code == 1
    assert "not finite" in done.output
    shown = runner.invoke(app, small(stream, tmp_path, "--lr", "1e30", "--preserve", "none", "--json"))
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["runs"][0]["status"] == "failed"  # one object, and nothing after it


@pytest.mark.slow
def test_own_data_and_own_network_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/own-data.md says: pictures in folders and a factory in a module."""
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
    with (tmp_path / "mynet.py").open("a") as file:
        file.write("# a comment changes nothing\n")
    same = runner.invoke(app, [*words, "--epochs", "15"])
    assert "1 of 1 run recorded" in same.stderr
    with (tmp_path / "mynet.py").open("a") as file:
        file.write("version = 2\n")
    again = runner.invoke(app, [*words, "--epochs", "15"])
    assert "1 recorded run was made from other files (your data, network or method has changed) and will be replaced" in again.stderr
