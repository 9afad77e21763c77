"""What is read off a run and off its checkpoint, against direct computation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import selfless
from selfless import MAS, SLNID, Run
from selfless.data import stream
from selfless.engine.learner import Learner
from selfless.experiments.measures import MEASURES, QUIET, FinishedRun, MissingCheckpoint, effective, importances, reuse
from tests.fabricated import result


@pytest.fixture
def run(tmp_path: Path) -> Run:
    rng = np.random.Generator(np.random.PCG64(0))
    y = np.repeat(np.arange(6), 40)
    x = np.clip(rng.integers(0, 200, (6, 1, 6, 6))[y] + rng.normal(0, 60, (240, 1, 6, 6)), 0, 255).astype(np.uint8)
    np.savez(tmp_path / "tasks.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    own = {"stream": f"arrays:{tmp_path / 'tasks.npz'}", "stream_options": {"kind": "permuted"}}
    return Run(**own, model="mlp-12", preserve=MAS(0.1), sparsify=SLNID(1e-2), epochs=2, batch=50, lr=0.05)  # type: ignore[arg-type]


@pytest.mark.slow
def test_activations_and_importances_are_the_trained_networks(run: Run, tmp_path: Path) -> None:
    runs = [dataclasses.replace(run, tasks=t) for t in (1, 2, 3)]
    results = selfless.train(runs, out=tmp_path / "out", workers=1)
    made = FinishedRun(results[2], tmp_path / "out")
    learner = Learner([runs[2]])
    learner.learn()
    x, _ = stream(run.stream, tasks=3, kind="permuted").tasks[0].train.resident().batch(torch.arange(240))
    weights = {n: p[0].detach() for n, p in learner.fleet.params.items()}
    h = torch.relu(x.flatten(1) @ weights["fc1.weight"].T + weights["fc1.bias"]).mean(0)
    quiet = MEASURES["quiet"]
    np.testing.assert_allclose(quiet.detail(made), h.numpy(), rtol=1e-4, atol=1e-6)
    assert quiet.value(made) == pytest.approx(100 * (h < QUIET).double().mean().item())
    np.testing.assert_allclose(importances(made, 3), learner.fleet.alpha["act1"][0].numpy(), rtol=1e-5)
    alphas = [np.array(importances(made, t)) for t in (1, 2, 3)]
    assert (np.diff(alphas, axis=0) >= -1e-6).all()  # it adds up over tasks
    own = alphas[2] - alphas[1]
    assert reuse(made) == pytest.approx(100 * alphas[0] @ own / np.linalg.norm(alphas[0]) / np.linalg.norm(own))
    assert MEASURES["neurons"].value(made) == pytest.approx(effective(importances(made, 3)))
    free = MEASURES["free"]
    assert free.detail(made) == [100 * after["parameters"]["fc1.weight"] for after in results[2].capacity]
    assert free.value(made) == free.detail(made)[0]
    (tmp_path / "out" / runs[0].key / "checkpoint.safetensors").unlink()
    with pytest.raises(MissingCheckpoint, match="selfless reproduce NAME --force"):
        reuse(made)


def test_effective_neurons() -> None:
    assert effective([1.0] * 8) == pytest.approx(8)
    assert effective([3.0, 0.0, 0.0]) == pytest.approx(1)
    assert effective([0.0, 0.0]) == 0
    assert effective([2.0, 2.0, 0.0]) == pytest.approx(effective([200.0, 200.0, 0.0]))


def test_own_and_last_model_within_the_group_and_of_all(tmp_path: Path) -> None:
    made = FinishedRun(result(Run(stream="blurred-cifar-100", model="cnn-8", tasks=2), 0.6), tmp_path)
    A = np.array([[0.7, 0.1], [0.5, 0.8]])
    made = dataclasses.replace(made, result=dataclasses.replace(made.result, accuracy=A, accuracy_all=A / 2))
    assert MEASURES["own-model"].value(made) == pytest.approx(75)
    assert MEASURES["average"].value(made) == pytest.approx(65)
    assert MEASURES["own-model-all"].value(made) == pytest.approx(37.5)
    assert MEASURES["last-model-all"].value(made) == pytest.approx(32.5)
    assert MEASURES["last-two"].value(made) == pytest.approx(65)
    plain = dataclasses.replace(made, result=dataclasses.replace(made.result, accuracy_all=None))
    with pytest.raises(ValueError, match="no head wider than a task"):
        MEASURES["last-model-all"].value(plain)
    with pytest.raises(ValueError, match="has no held-out accuracy"):
        MEASURES["first-held-out"].value(made)


def test_overlap_by_chance_is_the_mean_over_permutations() -> None:
    """Slowly: the cosine with every permutation of the second vector. Dense vectors overlap by chance alone."""
    from itertools import permutations

    from selfless.experiments.measures import chance_overlap

    rng = np.random.default_rng(0)
    a, b = rng.uniform(size=5), rng.uniform(size=5) * (rng.uniform(size=5) > 0.4)
    cosines = [a @ np.array(p) / (np.linalg.norm(a) * np.linalg.norm(b)) for p in permutations(b)]
    assert chance_overlap(a, b) == pytest.approx(np.mean(cosines))
    assert chance_overlap(np.ones(4), np.ones(4)) == pytest.approx(1.0)
    assert chance_overlap(np.eye(4)[0], np.eye(4)[1]) == pytest.approx(0.25)
    assert chance_overlap(np.ones(4), np.zeros(4)) == 0.0
