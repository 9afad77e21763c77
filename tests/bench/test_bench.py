"""Every part measures something at the smallest sizes; the output has the form that scripts rely on."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from selfless import functional
from selfless.bench import growth, importance, penalty, scaling, sequence, steps
from selfless.bench.engine import EngineFleet, cnn, mlp, synthetic_source
from selfless.bench.main import bench, choose_parts
from selfless.bench.plan import PARTS, Plan, plan
from selfless.bench.plots import figures
from selfless.bench.table import format_duration, format_number, format_size, make_target, table
from selfless.bench.timing import Times, measure_memory, time_in_turn
from selfless.cli import app
from selfless.data import offer

CPU = torch.device("cpu")
runner = CliRunner()


@pytest.fixture
def tiny() -> Plan:
    """Sizes at which a part takes a second or two."""
    return dataclasses.replace(
        plan(CPU, quick=True),
        rounds=1,
        mlp_samples=40,
        cnn_samples=10,
        eager_samples=(40, 10),
        eager_width=16,
        loop_samples=2,
        eager_steps=1,
        penalty_widths=(16, 32),
        step_widths=(16, 32),
        tasks=2,
        sample_counts=(20, 40),
        growth_widths=(16, 32),
        growth_layers=(1, 3),
        growth_samples=(20, 40),
        batch=10,
    )


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a convolutional network of 16 units instead of 256."""
    for part in (steps, importance):
        monkeypatch.setattr(part, "cnn", lambda: cnn(16))


def positive(rows: list[dict[str, Any]], *names: str) -> None:
    for row in rows:
        for name in names:
            assert row[name] > 0, (row["what"], name)


# ---------------------------------------------------------------------------------------------------------------------- timing
def test_rounds_are_interleaved_after_one_warm_up() -> None:
    calls: list[str] = []
    times = time_in_turn({name: lambda n=name: calls.append(n) for name in "ab"}, 2, CPU)
    assert calls == list("ababab")
    assert {name: len(spent) for name, spent in times.rounds.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_of_minima_or_the_median_over_rounds() -> None:
    times = Times({"a": [4.0, 2.0, 9.0], "b": [1.0, 2.0, 3.0]})
    assert times.ratio("a", "b") == 2.0
    assert times.median_ratio("a", "b") == 3.0


@pytest.mark.slow
def test_memory_is_the_most_that_is_held_at_a_time() -> None:
    def work() -> torch.Tensor:
        for _ in range(3):
            x = torch.zeros(1000)
        return x + 1

    result, held = measure_memory(work, CPU)
    assert result.sum() == 1000
    assert held == 2 * 4000  # four tensors are made, two of them exist at a time


def test_numbers_in_words() -> None:
    assert [format_duration(s) for s in (7.923, 3.06e-3, 4.3e-4)] == ["7.92 s", "3.06 ms", "430 µs"]
    assert [format_size(b) for b in (2**20, 1074 * 2**20)] == ["1.0 MiB", "1,074 MiB"]
    assert [format_number(x) for x in (1234.5, 0.9289)] == ["1,234", "0.929"]
    assert make_target(4.0, "≤", 5, " %") == {"value": 4.0, "text": "≤ 5 %", "met": True}
    assert make_target(299.0, "≥", 300, "×")["met"] is False


# ---------------------------------------------------------------------------------------------------------------------- engine
def test_the_fleet_is_in_the_middle_of_a_task() -> None:
    made = EngineFleet(mlp(16), 2, 40, CPU, batch=10)
    fleet = made.fleet
    assert (fleet.size, made.steps, fleet.tasks) == (2, 4, 1)
    assert fleet.anchored
    before = fleet.params[next(iter(fleet.params))].detach().clone()
    made.train_epoch()
    assert not torch.equal(before, fleet.params[next(iter(fleet.params))])


def test_synthetic_images_are_balanced_and_fill_every_task() -> None:
    source = synthetic_source(cnn(), 20)
    assert len(source.train[1]) == 200
    assert torch.bincount(source.train[1]).tolist() == [2] * 100


# ----------------------------------------------------------------------------------------------------------------------- parts
@pytest.mark.whole
@pytest.mark.usefixtures("narrow")
def test_steps(tiny: Plan) -> None:
    rows = list(steps.run(tiny))
    assert [(r["network"], r["members"]) for r in rows] == [(n, m) for n in ("mlp-128", "cnn-16") for m in (0, 0, 1, 2)]
    positive(rows, "seconds", "memory_bytes")
    fleets = [r for r in rows if r["members"]]
    positive(fleets, "run_step_seconds", "times_eager")
    for r in fleets:
        assert r["seconds"] == min(r["rounds"]["fleet"]) / r["steps"]
        assert r["times_eager"] == pytest.approx(r["members"] * r["eager_step_seconds"] / r["seconds"])


@pytest.mark.slow
@pytest.mark.usefixtures("narrow")
def test_importance(tiny: Plan) -> None:
    rows = list(importance.run(tiny))
    engine, eager = [r for r in rows if "members" in r], [r for r in rows if "members" not in r]
    assert [(r["network"], r["members"]) for r in engine] == [("mlp-128", 1), ("mlp-128", 2), ("cnn-16", 1), ("cnn-16", 2)]
    positive(engine, "seconds", "of_an_epoch")
    assert len(eager) == 10
    positive([r for r in eager if "per sample" in r["what"]], "of_forward_backward", "times_loop")


@pytest.mark.slow
def test_penalty(tiny: Plan) -> None:
    rows = list(penalty.run(tiny))
    formula, share = ([r for r in rows if r["kind"] == kind] for kind in ("formula", "share"))
    assert [r["n"] for r in formula] == [r["n"] for r in share] == [16, 32]
    positive(formula, "seconds", "times_dense", "memory_bytes", "dense_memory_bytes")
    for r in share:
        least = {name: min(spent) for name, spent in r["rounds"].items()}
        assert r["share"] == pytest.approx((least["with"] - least["without"]) / least["with"])


def test_the_dense_form_is_the_same_penalty() -> None:
    h, alpha = torch.rand(7, 12, dtype=torch.float64).requires_grad_(), torch.rand(12, dtype=torch.float64)
    penalty.dense_slnid(h, alpha, penalty.dense_kernel(12, CPU).double())
    dense, h.grad = h.grad, None
    functional.slnid(h, alpha).backward()
    torch.testing.assert_close(dense, h.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_growth(tiny: Plan) -> None:
    rows = list(scaling.run(tiny))
    assert [r["n"] for r in rows if r["kind"] == "width"] == [16, 32, 16, 32]
    assert [r["tasks"] for r in rows if r["kind"] == "tasks"] == [1, 2]
    assert [r["samples"] for r in rows if r["kind"] == "samples"] == [20, 40]
    positive(rows, "seconds")


@pytest.mark.slow
def test_growth_on_every_axis(tiny: Plan) -> None:
    rows = list(growth.run(tiny))
    sizes = {"layers": [1, 3], "tasks": [1, 2], "members": [1, 2], "samples": [20, 40], "width": [16, 32]}
    assert {axis: [r["size"] for r in rows if r["axis"] == axis] for axis in growth.AXES} == sizes
    positive(rows, "seconds")
    found = figures({"growth": rows})
    assert set(found) == {f"growth-{axis}" for axis in growth.AXES}
    assert all("exponent" in figure.axes[0].lines[0].get_label() for figure in found.values())


def test_the_exponent_is_that_of_the_larger_half() -> None:
    powers = [(n, 1e-6 * n**1.5) for n in (1, 2, 4, 8)]
    assert growth.exponent(powers) == pytest.approx(1.5)
    assert growth.exponent([(n / 100, 1.0) for n in (1, 2, 4, 8)] + powers) == pytest.approx(1.5)  # constant at first
    assert math.isnan(growth.exponent(powers[:1]))


def test_a_network_that_does_not_fit_ends_its_axis(tiny: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "free_bytes", lambda device: 300_000)
    plan = dataclasses.replace(tiny, growth_widths=(8, 512, 16), growth_layers=(), growth_tasks=(), growth_fleets=(), growth_samples=())
    assert [(r["size"], r["seconds"] is None) for r in growth.run(plan)] == [(8, False), (512, True)]


def test_images_in_a_file_are_those_in_memory(tmp_path: Path) -> None:
    (mapped, labels), (kept, _) = (source.train for source in (growth.mapped_source(1_500, tmp_path / "x"), synthetic_source(mlp(), 1_500)))
    assert torch.equal(mapped, kept)
    assert torch.bincount(labels).tolist() == [150] * 10


@pytest.mark.slow
def test_whole_sequences(tiny: Plan, tmp_path: Path) -> None:
    sources = [synthetic_source(mlp(), 40), synthetic_source(cnn(), 20)]
    for source in sources:
        offer(source, data_dir=tmp_path)
    here = dataclasses.replace(tiny, data_dir=tmp_path)
    two, one = sequence.permuted(here), sequence.cifar(here, 1, "tf32")
    assert (two["members"], one["members"]) == (2, 1)
    assert set(two["averages"]) == {"mas:0.01", "mas:0.01 + slnid:0.001"}
    assert one["seconds_a_run"] == min(one["rounds"]) > 0
    assert json.dumps([two, one], allow_nan=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("part", [steps, importance, penalty, scaling])
def test_parts_on_a_gpu(tiny: Plan, part: Any) -> None:
    rows = list(part.run(dataclasses.replace(tiny, device=torch.device("cuda"))))
    positive(rows, "seconds")
    assert all(r["memory_bytes"] > 0 for r in rows if r["memory_bytes"] is not None)


# ----------------------------------------------------------------------------------------------------------------- all together
@pytest.mark.slow
def test_everything_is_written_and_drawn(tiny: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFLESS_COMMIT", "abc1234")
    said: list[str] = []
    found = bench(["penalty", "fleet", "sequence"], dataclasses.replace(tiny, say=said.append), "selfless bench", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert written == json.loads(json.dumps(found, allow_nan=False))
    assert written["hardware"]["commit"] == "abc1234"
    assert {"device", "hardware", "cores", "threads", "torch", "python", "selfless", "commit", "time"} <= set(written["hardware"])
    assert "GPU" in written["skipped"]["sequence"]
    assert "sequence" not in written
    for row in written["penalty"] + written["fleet"]:
        assert {"what", "seconds", "rate", "says", "memory_bytes", "target", "rounds"} <= set(row)
    assert any(what.startswith("penalty: ") for what in said)
    assert table(found).row_count > 10
    for name in ("cost-width", "cost-step-width", "cost-tasks", "cost-samples"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5_000
        assert (tmp_path / "out" / f"{name}.svg").read_text().startswith("<svg")


def test_a_fleet_is_drawn_with_its_eager_line(tiny: Plan) -> None:
    rows = [
        {"network": "mlp-128", "members": m, "seconds": 1e-3, "run_step_seconds": 1e-3 / m, "eager_step_seconds": 2e-3} for m in (1, 2, 4)
    ]
    axes = figures({"steps": rows})["cost-fleet"].axes[0]
    assert [line.get_label() for line in axes.lines] == ["mlp-128, run-step", "mlp-128, eager"]
    assert axes.lines[0].get_color() == axes.lines[1].get_color()


# -------------------------------------------------------------------------------------------------------------- the command line
@pytest.mark.slow
def test_json_is_one_object(tiny: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfless.bench.plan.plan", lambda *_, **__: dataclasses.replace(tiny, penalty_widths=(16,)))
    done = runner.invoke(app, ["bench", "--quick", "--only", "penalty", "--device", "cpu", "--threads", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["quick"] is True
    assert [(r["n"], r["kind"]) for r in found["penalty"]] == [(16, "formula"), (16, "share")]


@pytest.mark.slow
def test_a_table_for_people(tiny: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfless.bench.plan.plan", lambda *_, **__: dataclasses.replace(tiny, penalty_widths=(16,)))
    done = runner.invoke(app, ["bench", "--only", "penalty,sequence", "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "SLNID by width" in done.output
    assert "sequence: skipped: " in done.output
    assert str(tmp_path / "bench.json") in done.output


def test_a_gpu_gets_the_real_sizes_and_quick_the_smallest() -> None:
    cpu, gpu, quick = plan(CPU), plan(torch.device("cuda")), plan(CPU, quick=True)
    assert (gpu.mlp_samples, gpu.cnn_samples, gpu.fleet_sizes[-1]) == (60_000, 5_000, 64)
    assert cpu.fleet_sizes[-1] == 8
    assert cpu.penalty_widths == gpu.penalty_widths == (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert quick.quick
    assert quick.mlp_samples < cpu.mlp_samples


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "stepz"], "no part is called 'stepz'; the parts are steps, importance"),
        (["--only", ","], "names no part"),
        (["--device", "cuda:9", "--only", "penalty"], "no usable GPU"),
        (["--only", "sequence", "--device", "cpu"], "nothing could be measured: sequence: "),
    ],
)
def test_a_user_error_is_one_message(words: list[str], message: str) -> None:
    if torch.cuda.is_available() and "cuda:9" in words:
        pytest.skip("this machine has a GPU")
    done = runner.invoke(app, ["bench", *words])
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())


def test_a_folder_without_write_permission_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = runner.invoke(app, ["bench", "--only", "penalty", "--device", "cpu", "--out", str(tmp_path / "file")])
    assert done.exit_code == 1
    assert "error: " in done.output


def test_parts_keep_their_order() -> None:
    assert choose_parts(None) == list(PARTS[:4])
    assert choose_parts(None, with_peers=True) == [*PARTS[:4], "peers"]
    assert choose_parts("penalty, steps") == ["steps", "penalty"]


def test_help_has_examples() -> None:
    done = runner.invoke(app, ["bench", "--help"])
    assert done.exit_code == 0
    assert "selfless bench --quick" in done.output
