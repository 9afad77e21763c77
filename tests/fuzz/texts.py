"""Texts: runs, TOML files and command lines."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.fuzz.changes import VALUES, WORDS, change_text
from tests.fuzz.world import MODELS, SPECS, World, command, not_training


def spec(world: World, rng: random.Random) -> None:
    """A run from changed texts: its terms, its network, its stream."""
    from selfless import Run
    from selfless.runner.checks import check_runs
    from selfless.runner.options import TrainOptions

    fields: dict[str, Any] = {"stream": world.stream, "model": "mlp-8", "tasks": 2}
    for name in rng.sample(
        ["preserve", "sparsify", "model", "stream", "tasks", "epochs", "lr", "select", "seed", "outputs"], rng.randint(1, 3)
    ):
        if name in ("preserve", "sparsify"):
            fields[name] = rng.choice(SPECS) if rng.random() < 0.3 else change_text(rng.choice(SPECS), rng)
        elif name in ("model", "stream"):
            start = rng.choice(
                MODELS if name == "model" else [world.stream, "permuted-mnist", "split-cifar-100", "folders:x", "objects:flowers"]
            )
            fields[name] = start if rng.random() < 0.3 else change_text(start, rng)
        else:
            fields[name] = rng.choice(VALUES)
    made = Run(**fields)
    assert len(made.key) == 16
    if made.stream == world.stream:
        check_runs([made], TrainOptions(device="cpu"))


def toml(world: World, rng: random.Random) -> None:
    """A TOML file with changed values, keys or characters."""
    import dataclasses

    from selfless import Run

    names = [f.name for f in dataclasses.fields(Run)] + "seeds out device workers data_dir budget checkpoints deterministic".split()
    values = [
        *WORDS,
        "true",
        "1",
        "1.5",
        "1e300",
        "[1, 2]",
        "{a = 1}",
        "1979-05-27",
        "07:32:00",
        "[[1]]",
        '"x"',
        "'permuted-mnist'",
        "-5",
        "1e9",
    ]
    lines = [f"stream = {world.stream!r}", "model = 'mlp-8'", "tasks = 2"]
    for _ in range(rng.randint(1, 3)):
        value = rng.choice(values)
        lines.append(f"{rng.choice(names)} = {value if rng.random() < 0.7 else json.dumps(value)}")
    text = "\n".join(rng.sample(lines, len(lines)))
    path = world.folder / "case.toml"
    path.write_text(change_text(text, rng) if rng.random() < 0.3 else text, encoding="utf-8", errors="surrogatepass")
    with not_training():
        command(["run", "--config", str(path), *(["--json"] if rng.random() < 0.3 else [])])


def flags(world: World, rng: random.Random) -> None:
    """A command line with odd values."""
    import dataclasses

    from selfless import Run

    known = [f.metadata["option"].flag or f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(Run)]
    known += [
        "--seeds",
        "--out",
        "--device",
        "--workers",
        "--data-dir",
        "--budget",
        "--engine",
        "--config",
        "--stream-option",
        "--model-option",
    ]
    values = [
        *WORDS,
        *SPECS,
        *MODELS,
        "cpu",
        "cuda:99",
        "x",
        "2GB",
        "1e400",
        "1e9",
        "5",
        "0.5",
        "classes_per_task=0",
        "p=nan",
        "layers=1e9",
        "kind=split",
    ]
    words = ["run", "--stream", world.stream, "--model", "mlp-8", "--tasks", "2"]
    if rng.random() < 0.15:
        known, words = (
            ["--stream", "--model", "--sparsify", "--strengths", "--tolerance", "--epochs", "--lr", "--limit", "--device"],
            ["tune"],
        )
        words += ["--stream", world.stream, "--model", "mlp-8"]
    if rng.random() < 0.15:
        place = rng.choice([str(world.place), str(world.folder / "results"), rng.choice(WORDS), str(world.folder)])
        words = [rng.choice(["report", "capacity", "predict", "export", "watch", "results"]), place]
        known = ["--format", "--to", "--task", "--json", "--once", "--against", "--figures"]
        words += ["--once"] if words[0] == "watch" else []
    for _ in range(rng.randint(1, 3)):
        value = rng.choice(values)
        words += [rng.choice(known), change_text(value, rng) if rng.random() < 0.3 else value]
    words = [word.replace("\x00", "") for word in words]
    if any(flag in words for flag in ("--to", "--figures")) or "\x00" in "".join(words):
        words = [word for word in words if word not in ("--to", "--figures")]
    with not_training():
        command(words)
