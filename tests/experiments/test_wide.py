"""The experiment `wide`: equal budgets, and networks that train as fleets."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from selfless import Run
from selfless.data.digests import Contents
from selfless.experiments import experiment, wide_networks
from selfless.experiments.wide import BASES
from selfless.runner.sources import is_made_from

SHAPE = (3, 8, 8)


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the pretrained transformer by one with its first weights; return those."""
    torch.manual_seed(0)
    state = wide_networks.vit(outputs=50, input_shape=SHAPE, width=8, depth=1).state_dict()
    monkeypatch.setattr(wide_networks, "pretrained", lambda shape, steps, base: state)
    return state


def test_every_method_of_a_column_has_the_same_number_of_candidates() -> None:
    for column in BASES:
        cells = [cell for cell in experiment("wide").cells if cell.column == column and cell.row not in ("joint", "Finetune")]
        assert len({len(set(cell.candidates)) for cell in cells}) == 1
        assert len({cell.candidates[0].epochs for cell in cells}) == 1


def test_no_task_has_classes_that_the_transformer_with_lora_knows() -> None:
    base = BASES["LoRA"]
    assert base.tasks * base.stream_options["classes_per_task"] <= 50  # it learns the last 50 of 100
    assert base.stream_options["class_order"] == "natural"


@pytest.mark.parametrize("name", ["resnet18", "vit", "lora_vit"])
def test_members_of_a_fleet_compute_what_they_compute_alone(name: str, no_data: dict[str, Any]) -> None:
    options = {"width": 8} if name == "resnet18" else {"width": 8, "depth": 1}
    members = [getattr(wide_networks, name)(outputs=5, input_shape=SHAPE, **options) for _ in range(2)]
    params, buffers = torch.func.stack_module_state(members)
    x = torch.randn(2, 3, *SHAPE)
    together = torch.func.vmap(lambda p, b, x: torch.func.functional_call(members[0], (p, b), (x,)))(params, buffers, x)
    for member, own, found in zip(members, x, together, strict=True):
        assert torch.allclose(found, member(own), atol=1e-5)


def test_lora_starts_as_the_frozen_transformer_and_trains_adapters_and_head(no_data: dict[str, Any]) -> None:
    model = wide_networks.lora_vit(outputs=50, input_shape=SHAPE, width=8, depth=1)
    plain = wide_networks.vit(outputs=50, input_shape=SHAPE, width=8, depth=1)
    plain.load_state_dict(no_data)
    plain.head = nn.Linear(8, 50)
    plain.head.load_state_dict(model.head.state_dict())
    x = torch.randn(2, *SHAPE)
    assert torch.allclose(model(x), plain(x), atol=1e-6)
    trained = {n.rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad and not n.startswith("head.")}
    assert trained == {"a", "b"}


def test_recorded_runs_are_made_from_the_networks_of_today() -> None:
    """A change of `wide_networks.py`, even of a docstring, would train hours of recorded runs again: their digests count every letter."""
    with lzma.open(Path(__file__).parents[2] / "results" / "wide" / "runs.jsonl.xz", "rt") as lines:
        values = [json.loads(line) for line in lines]
    found = [(Run.from_dict(one["run"]), one["about"]["made_from"]) for one in values if ":" in one.get("run", {}).get("model", "")]
    assert found
    assert all(is_made_from(run, digest, contents=Contents()) for run, digest in found)
