"""Several processes equal one: `checks.py` runs once, with two and with four processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import selfless.distributed.ranks as ranks_module
from selfless.distributed import ALONE, Ranks, find_ranks
from selfless.distributed.reduction import ShardedReduction

FILE = Path(__file__).with_name("checks.py")
COMMAND = [sys.executable, "-W", "ignore", "-m", "tests.distributed.checks"]


@pytest.mark.whole
def test_several_processes_equal_one(tmp_path: Path) -> None:
    """All checks in one test: the processes start once, on one worker of pytest-xdist."""
    if importlib.util.find_spec("torch.distributed") is None or not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    path = tmp_path / "results.json"
    done = subprocess.run([*COMMAND, str(path)], cwd=FILE.parents[2], capture_output=True, text=True, timeout=120, check=False)
    assert path.exists(), done.stderr
    results: dict[str, str | None] = json.loads(path.read_text())
    names = [line.split("(")[0].removeprefix("def ") for line in FILE.read_text().split("@check\n")[1:]]
    assert {f"2 {name}" for name in names} < results.keys()
    assert {name: error for name, error in results.items() if error is not None} == {}


def test_one_process_sends_nothing_and_returns_the_same_tensors() -> None:
    assert find_ranks() is ALONE
    x = torch.randn(3, 2, requires_grad=True)
    assert ALONE.global_rows(x) is x
    assert ALONE.global_mean([x], [3])[0] is x
    assert ALONE.first(x) is x
    assert ALONE.gather_rows(x)[0] is x
    ALONE.sum_([x.detach()])
    ALONE.check_same({"x": x}, "")


class Fake(Ranks):
    """Two ranks in one process: `other` is what the second one has."""

    other: torch.Tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, type(self).other.to(tensor)]


def test_ranks_that_differ_are_named() -> None:
    ranks, x = Fake(2, 0), torch.tensor([1.0, 2.0, 2.0])
    Fake.other = torch.tensor([[5.0, 3.0]])
    ranks.check_same({"Ω": x}, "remedy")  # Σx = 5, ‖x‖ = 3
    Fake.other = torch.tensor([[5.0, 3.1]])
    with pytest.raises(RuntimeError, match=r"Ω differs between ranks \(its norm is 3 on rank 0, 3.1 on rank 1\): remedy"):
        ranks.check_same({"Ω": x}, "remedy")


def test_a_rank_whose_batches_are_over_repeats_its_last_one_without_weight() -> None:
    reduction = ShardedReduction(Fake(2, 0), {"w": torch.zeros(1)})
    Fake.other = torch.tensor(1)
    run = iter(reduction.batches(["a", "b"]))
    assert [(next(run), reduction.is_live) for _ in range(3)] == [("a", True), ("b", True), ("b", False)]
    Fake.other = torch.tensor(0)
    assert list(run) == []


def test_a_bucket_keeps_the_order_and_the_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "BUCKET", 8)
    tensors = [torch.zeros(2), torch.zeros(3), torch.zeros(1, dtype=torch.float64), torch.zeros(8), torch.zeros(1)]
    assert [[len(t) for t in bucket] for bucket in ranks_module.buckets(tensors)] == [[2, 3], [1], [8], [1]]
