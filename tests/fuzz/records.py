"""What runs and experiments record: checkpoints, records, folders of results."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from tests.fuzz.changes import change_bytes, change_json
from tests.fuzz.world import World, command, not_training


def checkpoint(world: World, rng: random.Random) -> None:
    """A recorded network with changed bytes."""
    import selfless

    place = _copy(world, rng)
    (place / "checkpoint.safetensors").write_bytes(change_bytes(world.tensors, rng))
    selfless.load(place).model()


def record(world: World, rng: random.Random) -> None:
    """A record with changed values or characters, read by every command that reads records."""
    place = _copy(world, rng)
    if rng.random() < 0.7:
        plain = {key: value for key, value in world.record.items() if key != "sha256"}  # otherwise the checksum finds every change
        (place / "metrics.json").write_text(json.dumps(change_json(plain, rng)), encoding="utf-8", errors="surrogatepass")
    else:
        (place / "metrics.json").write_bytes(change_bytes(json.dumps(world.record).encode(), rng))
    folder = str(place.parent)
    choices = [
        ["report", folder, "--format", "md"],
        ["report", folder, "--format", "csv"],
        ["capacity", folder],
        ["watch", folder, "--once"],
    ]
    choices += [["run", "--stream", world.stream, "--model", "mlp-8", "--epochs", "1", "--batch", "30", "--tasks", "2", "--out", folder]]
    choices += [["results", "pack", folder], ["capacity", folder, "--json"], ["predict", str(place), str(world.folder / "none.png")]]
    with not_training():
        command(rng.choice(choices))


def experiment(world: World, rng: random.Random) -> None:
    folder = world.folder / "study"
    (folder / "experiments").mkdir(parents=True, exist_ok=True)
    text = json.dumps(change_json(world.experiment, rng))
    (folder / "experiments" / "fig-2-ours.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    command(["report", str(folder), "--format", rng.choice(["md", "csv", "latex"])])


def folder(world: World, rng: random.Random) -> None:
    """A folder of results with odd notes, logs and archives."""
    place = _copy(world, rng)
    note = {
        "host": "a",
        "process": 1,
        "updated": 1e9,
        "started": 1e9,
        "runs": [{"key": "k", "method": "m", "stream": "s", "model": "n", "seed": 0}],
    }
    event = {"average": [], "speed": 1.0, "share": 0.5, "seconds_left": 1.0, "task": 0, "tasks": 2}
    (place.parent / "study-a-1-0.json").write_text(json.dumps(change_json(note, rng)), errors="surrogatepass")
    (place / "training-0.json").write_text(json.dumps(change_json(note | {"event": event, "updated": 4e9}, rng)), errors="surrogatepass")
    (place / "log.jsonl").write_bytes(change_bytes(b'{"task": 1, "epoch": 1}\n', rng))
    (place.parent / "runs.jsonl.xz").write_bytes(change_bytes(b"\xfd7zXZ\x00" + bytes(60), rng)) if rng.random() < 0.2 else None
    if rng.random() < 0.3:
        (place / "metrics.json").unlink()
    command(
        rng.choice(
            [["watch", str(place.parent), "--once"], ["report", str(place.parent), "--format", "md"], ["capacity", str(place.parent)]]
        )
    )


def _copy(world: World, rng: random.Random) -> Path:
    """Return the folder of the recorded run in a fresh copy of its results."""
    out = world.folder / "copy"
    shutil.rmtree(out, ignore_errors=True)
    (out / world.run.key).mkdir(parents=True)
    for name in ("metrics.json", "spec.json", "checkpoint.safetensors"):
        shutil.copyfile(world.place / name, out / world.run.key / name)
    return out / world.run.key
