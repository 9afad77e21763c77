"""`--deterministic`: torch's settings inside and after it, what cannot be done, and the same numbers on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import selfless
from selfless.engine.determinism import deterministic
from selfless.runner.plan import plan
from tests.engine.small_runs import small


def settings() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, not cudnn.benchmark


def test_settings_are_those_of_before_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = settings()
    with deterministic(False):
        assert settings() == before
    with deterministic(True):
        assert settings() == (True, True, True)
    assert settings() == before
    with pytest.raises(KeyError), deterministic(True):
        raise KeyError
    assert settings() == before


def test_an_operation_that_has_no_fixed_order_is_named() -> None:
    text = "pool_cuda does not have a deterministic implementation, but you set so. You can turn it off"
    with (
        pytest.raises(ValueError, match=r"possible here: pool_cuda .* you set so; leave --deterministic out"),
        deterministic(True),
    ):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match=r"^out of memory$"), deterministic(True):
        raise RuntimeError("out of memory")


def test_on_a_cpu_nothing_changes(tasks_npz: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("deterministic = true")
    assert plan(tmp_path / "a.toml", {}).options.deterministic
    (tmp_path / "a.toml").write_text("deterministic = 1")
    with pytest.raises(ValueError, match="deterministic is 1; it must be true or false"):
        plan(tmp_path / "a.toml", {})
    run = small(tasks_npz, epochs=1)
    one, two = (selfless.train(run, out=tmp_path / str(on), device="cpu", deterministic=on) for on in (False, True))
    assert one.run.key == two.run.key
    assert one.history == two.history
    assert (one.accuracy == two.accuracy).all()
