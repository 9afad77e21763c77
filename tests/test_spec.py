"""Runs as values: their keys, their checks, and what their fields say about themselves."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from selfless import EWC, MAS, SLNID, Run
from selfless.fields import Option
from tests.fabricated import result


def test_what_has_changed_has_other_names() -> None:
    """vgg-slim began with other weights, resized crops were mirrored otherwise; runs of then are not runs of now. All other names stay."""
    assert '"network":3' in Run(model="vgg-slim").canonical()
    assert '"augmentation":2' in Run(augment="resized").canonical()
    assert not {"network", "augmentation"} & set(json.loads(Run(model="mlp-128", augment="crop-flip").canonical()))


def test_a_field_that_came_later_changes_no_names() -> None:
    """EWC's `alpha`: left out of a run's name at its default, told otherwise, and read back either way."""
    plain, function = Run(preserve=EWC(10.0)), Run(preserve="ewc:10,alpha=function")
    assert plain.key == "2d8f13d7be42f9db"  # as before there was one
    assert "alpha" not in plain.as_dict()["preserve"]
    assert function.as_dict()["preserve"]["alpha"] == "function"
    assert function.key != plain.key
    for run in (plain, function):
        assert Run.from_dict(run.as_dict()) == run


def test_keys_stay_what_they_were() -> None:
    """Recorded results are found by these."""
    known = {
        Run(): "a196ecd2be91cc11",
        Run(preserve="mas:0.1,estimator=per-batch"): "1d792003cdb4c28b",
        Run(preserve="si:1", sparsify="decov:1e-3", lr=0.03): "ef038e2f5207daba",
        Run(preserve="lwf:1,damped=false", stream="split-mnist", scenario="class"): "2d9713560f8cc697",
        Run(preserve="lwf:1", stream="split-mnist", scenario="class"): "bc34d5dc9a7d9148",
        Run(preserve="packnet:0.5", epochs=3, ramp=1): "e76b873caed3c048",
        Run(preserve="ewc-online:3", model="vgg-slim", stream="split-cifar-100"): "fa9759552e97bfc1",
        Run(select="held-out", preserve="none", augment="resized"): "bd319ebb425cc781",
    }
    assert {run.key: key for run, key in known.items()} == {key: key for key in known.values()}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs is 0; it must be a whole number ≥ 1"),
        ({"batch": 1.5}, ValueError, "batch is 1.5; it must be a whole number ≥ 1"),
        ({"tasks": True}, ValueError, "tasks is True; it must be a whole number ≥ 1"),
        ({"seed": 2**63}, ValueError, "it must be below 9223372036854775808"),
        ({"lr": float("nan")}, ValueError, "lr is nan; it must be a number ≥ 0"),
        ({"weight_decay": True}, ValueError, "weight_decay is True; it must be a number ≥ 0"),
        ({"momentum": 1}, ValueError, "momentum is 1.0; it must be below 1"),
        ({"held_out": 1.0}, ValueError, "held_out is 1.0; it must be below 1"),
        ({"ramp": 10}, ValueError, "ramp is 10 of 10 epochs"),
        ({"schedule": "x"}, ValueError, "schedule is 'x'; choose one of constant, cosine, step, plateau, halving"),
        ({"stream": 3}, TypeError, "stream is a int; it must be a name, a Stream, or a list of tasks"),
        ({"stream_options": 3}, TypeError, "stream_options is 3; it must be a table of options"),
        ({"preserve": SLNID(1e-3)}, TypeError, "preserve= takes a preserver"),
        ({"sparsify": 3}, TypeError, "sparsify= takes a sparsifier"),
        ({"sparsify": "mas"}, ValueError, "no sparsifier is called 'mas'"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_must_be(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Run(**fields)


def test_every_field_describes_itself() -> None:
    for field in dataclasses.fields(Run):
        option = field.metadata["option"]
        assert isinstance(option, Option)
        assert option.help.endswith("."), field.name
        assert option.default, field.name
        assert all(choice in option.help for choice in option.choices), f"the help of {field.name} leaves out a choice"
    assert str(Run().preserve) == next(f for f in dataclasses.fields(Run) if f.name == "preserve").metadata["option"].default


def test_fields_can_be_read_without_torch() -> None:
    code = "import sys, selfless.spec; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'typer')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_field_that_does_not_exist_is_named_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"^Run has no field 'epoch'; did you mean 'epochs'\?$"):
        Run(epoch=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Run has no field 'strem'; did you mean 'stream'"):
        Run().replace(strem="split-mnist")
    with pytest.raises(TypeError, match="Run has no field 'zzz'; it has alpha, anchor"):
        Run(zzz=1)  # type: ignore[call-arg]


def test_an_option_that_a_term_does_not_have_is_named_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"^MAS has no option 'strenght'; did you mean 'strength'\?$"):
        MAS(strenght=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="SLNID has no option 'zzz'; it has absolute, "):
        SLNID(1e-3, zzz=1)  # type: ignore[call-arg]
    assert copy.deepcopy(SLNID(1e-3, sigma=4)) == pickle.loads(pickle.dumps(SLNID(1e-3, sigma=4))) == SLNID(1e-3, sigma=4)


def test_a_result_is_shown_in_a_few_lines(tasks_npz: str) -> None:
    shown = repr(result(Run(stream=tasks_npz, tasks=3), 0.5))
    assert "accuracy=" in shown
    assert "status='done'" in shown
    assert "history" not in shown
    assert len(shown) < 1000


@pytest.mark.parametrize("name", ["seed", "tasks", "held_out"])
def test_a_setting_of_the_run_is_no_option_of_its_stream(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name} is a setting of the run, not an option of its stream: {name}=3, or --{name.replace('_', '-')}$"
    ):
        Run(stream_options={name: 3})


def test_a_method_of_ones_own_is_named_by_its_module() -> None:
    @dataclasses.dataclass(frozen=True)
    class Softer(MAS):
        name: ClassVar[str] = "softer-mas"

    with pytest.raises(ValueError, match=r"softer-mas is a preserver: --preserve tests\.test_spec:\S*Softer:0\.1"):
        Run(preserve="softer-mas:0.1")
