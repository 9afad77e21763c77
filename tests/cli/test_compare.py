"""`selfless compare`: several methods with the same settings and seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless import LwF, Run
from selfless.cli import app
from selfless.metrics import paired_t_interval
from selfless.preserve import MAS, NoPreserver
from selfless.runner import Store
from selfless.runner.plan import parse_method
from selfless.sparsify import SLNID, DeCov, NoSparsifier
from tests.cli.small_commands import small

runner = CliRunner()


def compared(stream: str, out: Path, *words: str) -> list[str]:
    return ["compare", *words, *small(stream, out)[1:], "--workers", "1"]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("mas:0.1", {"preserve": MAS(0.1)}),
        ("slnid:1e-3", {"sparsify": SLNID(1e-3)}),
        ("mas:0.1 + slnid:1e-3", {"preserve": MAS(0.1), "sparsify": SLNID(1e-3)}),
        ("slnid:1e-3+mas:1e+1", {"preserve": MAS(10.0), "sparsify": SLNID(1e-3)}),
        ("lwf:1+mas:0.1", {"preserve": LwF(1.0) + MAS(0.1)}),
        ("lwf:1+slnid:1e-3+decov:1e-2", {"preserve": LwF(1.0), "sparsify": SLNID(1e-3) + DeCov(1e-2)}),
        ("selfless.preserve:MAS:0.1+decov", {"preserve": MAS(0.1), "sparsify": DeCov()}),
        ("none", {"preserve": NoPreserver()}),
        ("none + slnid:1e-3", {"preserve": NoPreserver(), "sparsify": SLNID(1e-3)}),
        ("mas:0.1+none", {"preserve": MAS(0.1), "sparsify": NoSparsifier()}),
    ],
)
def test_a_method_names_a_preserver_or_a_sparsifier_or_both(text: str, fields: dict[str, object]) -> None:
    assert parse_method(text) == fields


def test_a_method_is_read_as_a_report_writes_it() -> None:
    run = Run(preserve=LwF(1.0) + MAS(0.1), sparsify=DeCov(3e-3))
    assert parse_method(run.method) == {"preserve": run.preserve, "sparsify": run.sparsify}


def test_every_method_has_the_same_seeds_and_the_best_is_named(stream: str, tmp_path: Path) -> None:
    words = compared(stream, tmp_path, "mas:0.1", "mas:0.1+slnid:1e-2", "none", "--seeds", "2")
    value = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    methods = ["mas:0.1", "mas:0.1 + slnid:0.01", "none"]
    of = {m: {r["run"]["seed"]: r["summary"]["average"] for r in value["runs"] if Run.from_dict(r["run"]).method == m} for m in methods}
    assert [sorted(seeds) for seeds in of.values()] == [[0, 1]] * 3
    means = {method: sum(seeds.values()) / 2 for method, seeds in of.items()}
    best = max(means, key=lambda method: means[method])
    assert value["best"] == best
    assert set(value["beside"]) == set(methods) - {best}
    for method, gap in value["beside"].items():
        low, high = paired_t_interval([of[method][s] for s in (0, 1)], [of[best][s] for s in (0, 1)])
        assert [gap[k] for k in ("difference", "low", "high")] == pytest.approx([means[method] - means[best], low, high])
    table = runner.invoke(app, words)
    assert f"Beside {best}" in " ".join(table.output.split())
    assert "6 of 6 runs recorded" in table.output  # shown again, not trained again


def test_what_a_method_does_not_name_comes_from_the_flags_and_the_file(stream: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('preserve = "ewc:7"\nseeds = 1\n')
    words = compared(stream, tmp_path / "out", "slnid:1e-3", "decov:1e-3", "si:2", "--config", str(tmp_path / "my.toml"), "--json")
    runs = [Run.from_dict(r["run"]) for r in json.loads(runner.invoke(app, words).stdout)["runs"]]
    assert [run.method for run in runs] == ["ewc:7 + slnid:0.001", "ewc:7 + decov:0.001", "si:2"]


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (["mas:0.1"], "compare takes two methods or more"),
        (["mas:0.1", "mas:1e-1"], "mas:0.1 and mas:1e-1 are both mas:0.1 here"),
        (["mas:0.1", "ewc", "mas:0.1"], "mas:0.1 and mas:0.1 are both mas:0.1 here"),
        (["mas:0.1", "mas:0.1+slnid:1e-3", "--sparsify", "slnid:1e-3"], "are both mas:0.1 + slnid:0.001 here; +none names no sparsifier"),
        (["mas:0.1", "ewc", "--preserve", "lwf"], "every METHOD names a preserver, so --preserve lwf would not be used"),
        (["none", "slnid", "--preserve", "mas"], "none means no preserver, so it does not use --preserve mas"),
        (["mas:0.1", "selfless.terms:Term:1"], "its classes must be subclasses of Preserver or Sparsifier"),
        (["mas:0.1", "slnidd:1e-3"], "no method is called 'slnidd'. Did you mean 'slnid'?"),
        (["mas:0.1", "joint"], "Joint training is a stream"),
        (["mas:0.1", "recommended"], "selfless run --preserve recommended"),
    ],
)
def test_a_wrong_method_is_one_clear_message(methods: list[str], says: str, stream: str, tmp_path: Path) -> None:
    done = runner.invoke(app, compared(stream, tmp_path, *methods))
    assert done.exit_code == 1
    assert says in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_best_is_that_without_old_data(stream: str, tmp_path: Path) -> None:
    words = compared(stream, tmp_path, "mas:0.1", "none", "replay:1,samples=50", "--seeds", "2")
    value = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    assert value["uses_old_data"] == ["replay:1,samples=50"]
    assert value["best"] in ("mas:0.1", "none")
    assert "the best without old data" in " ".join(runner.invoke(app, words).output.split())


def test_recommended_is_refused_because_it_brings_settings_of_its_own(tmp_path: Path) -> None:
    done = runner.invoke(app, ["compare", "slnid:1e-3", "decov:1e-3", "--preserve", "recommended", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "recommended brings settings of its own; name its methods instead" in " ".join(done.stderr.split())


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_an_error_in_a_method_of_ones_own_names_its_file_and_line_and_others_go_on(
    workers: str, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["from selfless import MAS", "class Boom(MAS):", "    def consolidate(self, *given):", "        raise RuntimeError('boom')"]
    (tmp_path / f"boom_{workers}.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["compare", "mas:0.1", f"boom_{workers}:Boom:0.1", *small(stream, tmp_path / "out")[1:], "--seeds", "2", "--workers", workers]
    done = runner.invoke(app, words)
    assert done.exit_code == 1
    assert f"boom_{workers}.py, line 4: RuntimeError: boom" in " ".join(done.stderr.split())
    assert sorted(r.status for r in Store(tmp_path / "out").all()) == ["done", "done", "failed", "failed"]
