"""From flags and a TOML file to runs, and from runs to fleets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from selfless import MAS, Run
from selfless.runner.network_traits import network_traits
from selfless.runner.plan import fleets, parse_pairs, parse_size, plan, split_evenly
from tests.testing.methods import Share


def test_fleets_hold_what_differs_in_numbers_only() -> None:
    runs = [Run(seed=s, lr=lr, sparsify=kind) for s in range(2) for lr in (0.1, 0.2) for kind in ("none", "slnid:1e-3", "slnid:1e-2")]
    assert [len(f) for f in fleets(runs)] == [12]
    assert [len(f) for f in fleets([*runs, Run(epochs=3), Run(sparsify="slni:1,sigma=3"), Run(model="mlp-64")])] == [14, 1]
    assert len(fleets([Run(stream="blurred-cifar-100", epochs=e) for e in (3, 4)])) == 2
    assert [len(f) for f in fleets(runs, most=5)] == [5, 5, 2]


def test_a_method_may_refuse_the_strength_0() -> None:
    """Fleets are made without calling `__post_init__` of a method at strength 0."""
    assert [len(f) for f in fleets([Run(preserve=Share(s)) for s in (0.5, 0.6)])] == [2]


@dataclass(frozen=True, slots=True)
class Slotted(MAS):
    """A method of the user's without a dictionary."""


def test_a_method_may_have_slots() -> None:
    assert Slotted(0.3).neutral().strength == 0.0


@dataclass(frozen=True)
class Own(MAS):
    """A method of the user's."""


def test_preservers_with_the_same_step_share_a_fleet() -> None:
    """MAS and EWC pull to θ* by Ω, and differ only in how Ω is measured. Members with the same preserver are neighbours."""

    def sizes(*preservers: str) -> list[int]:
        return [len(f) for f in fleets([Run(preserve=name) for name in preservers])]

    (fleet,) = fleets([Run(preserve=name) for name in ("mas:1", "ewc:1", "mas:2", "ewc-online:3", "mas:1,estimator=per-batch")])
    assert [str(run.preserve) for run in fleet] == ["ewc:1", "mas:1,estimator=per-batch", "mas:1", "mas:2", "ewc-online:3"]
    assert sizes("lwf:1+mas:1", "lwf:1+ewc:1", "lwf:2+mas:2") == [3]
    assert sizes("mas:1", "ewc:1,mode=per-task") == [1, 1]  # has a constant in its penalty
    assert sizes("mas:1", "si:1", "rwalk:1") == [1, 1, 1]  # read each step
    assert sizes("mas:1", "mas-local:1") == [1, 1]  # is measured layer by layer
    assert sizes("mas:1", "mas:auto", "ewc:auto") == [1, 1, 1]
    assert sizes("mas:1", "none") == [1, 1]
    assert sizes("mas:1", "ewc:1,fisher=sampled") == [1, 1]  # draws labels
    assert [len(f) for f in fleets([Run(preserve=MAS(1.0)), Run(preserve=Own(1.0))])] == [1, 1]  # an error in it ends no other run


def test_unbalanced_streams_and_sampled_labels_do_not_share_a_fleet() -> None:
    assert [len(f) for f in fleets([Run(stream="split-mnist", seed=s) for s in range(2)])] == [1, 1]
    assert [len(f) for f in fleets([Run(stream="split-cifar-100", model="cnn-8", seed=s) for s in range(2)])] == [2]
    assert [len(f) for f in fleets([Run(preserve="ewc:1,fisher=sampled", seed=s) for s in range(2)])] == [1, 1]
    assert [len(f) for f in fleets([Run(model="cnn-8", model_options={"dropout": 0.5}, seed=s) for s in range(2)])] == [2]


def test_members_share_epochs_where_stream_or_network_or_preserver_asks_for_it() -> None:
    def sizes(**fields: Any) -> list[int]:
        return [len(f) for f in fleets([Run(epochs=e, **fields) for e in (3, 4)])]

    assert sizes() == [2]
    assert sizes(stream="blurred-cifar-100") == [1, 1]  # draws after the last epoch
    assert sizes(stream="arrays:x.npz", stream_options={"kind": "blurred"}) == [1, 1]
    assert sizes(model="mynet:build") == [1, 1]  # may have running statistics
    assert sizes(model="vgg-slim", model_options={"batch_norm": True}) == [1, 1]
    assert sizes(preserve="packnet:0.5") == [1, 1]  # has phases
    assert sizes(model="vgg-slim", schedule="plateau") == [2]
    same_epochs = [Run(model="mynet:build", schedule="plateau", lr=lr) for lr in (0.1, 0.2)]
    assert [len(f) for f in fleets(same_epochs)] == [1, 1]
    assert [len(f) for f in fleets([Run(preserve=f"packnet:{s}") for s in (0.5, 0.6)])] == [2]
    assert [len(f) for f in fleets([Run(preserve=f"gpm:{s}") for s in (0.5, 0.6)])] == [1, 1]  # one strength for all


def test_a_fleet_is_split_evenly() -> None:
    runs = [Run(seed=s) for s in range(7)]
    parts = list(split_evenly(runs, 3))
    assert [len(part) for part in parts] == [3, 2, 2]
    assert [run for part in parts for run in part] == runs
    assert [len(part) for part in split_evenly(runs[:2], 4)] == [1, 1]


def test_network_traits() -> None:
    def names(**fields: Any) -> set[str]:
        return {name for name, holds in vars(network_traits(Run(**fields))).items() if holds}

    assert names(model="mlp-128") == names(model="mlp-512-lwta") == {"has_short_steps"}
    assert names(model="mlp-513") == set()
    assert names(model="cnn-16", model_options={"dropout": 0.5}) == {"convolves"}
    assert names(model="vgg-slim", model_options={"batch_norm": True}) == {"convolves", "has_running_statistics"}
    assert names(model="alexnet") == {"convolves"}
    assert names(model="mlp-9:build") == {"has_running_statistics"}


# ------------------------------------------------------------------------------------------------------------- flags and TOML
def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text(
        'model = "mlp-9"\nepochs = 1\nbatch = 50\npreserve = {name = "ewc", strength = 3.0}\nseeds = 2\nseed = 5\n'
        'budget = "2GB"\nout = "there"\n\n[stream_options]\nlimit = 100\nangles = [0, 30]\n'
    )
    made = plan(config, {"epochs": 2, "model": None, "stream_options": ["limit=7"], "device": "cpu"}, force=True)
    assert [r.seed for r in made.runs] == [5, 6]
    assert made.runs[0].epochs == 2
    assert made.runs[0].model == "mlp-9"
    assert str(made.runs[0].preserve) == "ewc:3"
    assert made.runs[0].stream_options == {"limit": 7, "angles": [0, 30]}
    how = made.options
    assert (how.out, how.budget, how.device, how.workers, how.force) == (Path("there"), 2 * 10**9, "cpu", None, True)
    assert plan(None, {}).options.out == Path("results")
    assert plan(None, {}).runs == [Run()]


def test_unknown_keys_are_errors_with_a_suggestion(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text("epoch = 3\n")
    with pytest.raises(ValueError, match=r"unknown key 'epoch'\. Did you mean 'epochs'"):
        plan(config, {})
    config.write_text("epochs = = 3\n")
    with pytest.raises(ValueError, match="not valid TOML"):
        plan(config, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers = 0", "workers is 0; it must be a whole number ≥ 1"),
        ("seeds = 1.5", "seeds is 1.5; it must be a whole number ≥ 1: how many seeds to run, from 0 up"),
        ("preserve = {strength = 1.0}", r"\[preserve\] needs a name"),
        ("preserve = {sum = []}", r"\[preserve\] needs a name, .* a sum is"),
        ("preserve = {sum = [1]}", r"\[preserve\] needs a name"),
        ("preserve = {sum = [{strength = 1.0}]}", r"\[preserve\] needs a name"),
        ('budget = "much"', "'much' is not a size"),
        ('lr = "fast"', "lr is 'fast'; it must be a number ≥ 0"),
    ],
)
def test_wrong_values_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "my.toml"
    config.write_text(text + "\n")
    with pytest.raises(ValueError, match=message):
        plan(config, {})


@pytest.mark.parametrize(
    "text",
    [
        'preserve = "lwf:1+mas:0.1"',
        'preserve = "lwf:1 + mas:0.1"',
        'preserve = {sum = ["lwf:1", "mas:0.1"]}',
        'preserve = {sum = [{name = "lwf", strength = 1.0}, {name = "mas", strength = 0.1}]}',
        "[[preserve.sum]]\nname = 'lwf'\n[[preserve.sum]]\nname = 'mas'",
    ],
)
def test_a_sum_in_a_file(tmp_path: Path, text: str) -> None:
    """As text, as a list, and as `Run.as_dict` writes it."""
    config = tmp_path / "my.toml"
    config.write_text(text + "\n")
    (run,) = plan(config, {}).runs
    assert run == Run(preserve="lwf:1+mas:0.1")
    assert run.key != Run(preserve="mas:0.1+lwf:1").key  # the order of a sum is part of the key


def test_options_and_sizes() -> None:
    given = parse_pairs(["p=0.5", "head=all", "angles=[0, 30]", "flag=true"], "--stream-option")
    assert given == {"p": 0.5, "head": "all", "angles": [0, 30], "flag": True}
    assert [parse_size(t) for t in ("2GB", "500 MiB", "12", None, 7)] == [2 * 10**9, 500 * 2**20, 12, None, 7]
