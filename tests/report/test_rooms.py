"""Tables of the room of one run: a column per task, a column per layer, and nothing for records without activations."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

import selfless
from selfless import Run
from selfless.report.rooms import room_by_layer, room_over_tasks
from tests.report.samples import PLAIN, made


def shown(table: object) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_tables_show_every_task_and_layer(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, model="mlp-16", sparsify="slnid:1e-3", tasks=2, epochs=1, batch=50, seed=0)
    result = selfless.train(run, out=tmp_path)
    again = selfless.load(tmp_path / run.key)
    tasks, layers = shown(room_over_tasks(again)), shown(room_by_layer(again))
    assert tasks == shown(room_over_tasks(result))
    use = result.capacity[-1]["network"]["importance"]
    assert f"{100 * use['overlap']:.0f} ({100 * use['chance']:.0f})" in tasks
    assert all(name in layers for name in result.capacity[-1]["layers"])
    assert "Layers after task 2" in layers


def test_a_record_without_activations_has_no_such_table() -> None:
    result = made(PLAIN)
    assert room_over_tasks(result) is None
    assert room_by_layer(result) is None
