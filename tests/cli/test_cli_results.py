"""`selfless results`: pack, extract, merge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

import selfless
from selfless import MAS, Run
from selfless.cli import app
from selfless.runner import Store


def call(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["results", *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def test_parts_of_a_study_are_packed_merged_and_taken_out(tasks_npz: str, tmp_path: Path) -> None:
    runs = [Run(stream=tasks_npz, model="mlp-8", preserve=MAS(0.1), epochs=1, batch=50, seed=seed) for seed in range(3)]
    parts = [tmp_path / "a", tmp_path / "b"]
    first = selfless.train(runs[:2], out=parts[0], workers=1, checkpoints=False)
    last = selfless.train(runs[1:], out=parts[1], workers=1, checkpoints=False)
    assert call("pack", parts[0], "--remove") == (0, f"{parts[0] / 'runs.jsonl.xz'}")
    assert [path.name for path in parts[0].iterdir()] == ["runs.jsonl.xz"]
    code, said = call("merge", *parts, "--out", tmp_path / "all")
    assert code == 0
    assert "3 runs from 2 folders; 1 were in more than one" in said
    found = Store(tmp_path / "all").all()
    assert {result.run for result in found} == set(runs)
    for result in (*first, last[1]):
        np.testing.assert_array_equal(next(r.accuracy for r in found if r.run == result.run), result.accuracy)
    code, said = call("extract", tmp_path / "all", runs[2].key, "--to", tmp_path / "out")
    assert (code, said) == (0, str(tmp_path / "out" / runs[2].key))
    assert Store(tmp_path / "out").load(runs[2]) is not None


def test_what_is_not_there_is_said_with_the_remedy(tmp_path: Path) -> None:
    for words in (("pack", tmp_path), ("merge", tmp_path, "--out", tmp_path / "all")):
        code, said = call(*words)
        assert code == 1
        assert "holds no results to" in said
    code, said = call("extract", tmp_path, "0" * 16)
    assert code == 1
    assert f"has no run '{'0' * 16}'" in said
