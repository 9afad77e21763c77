"""From folders of pictures to a network in use: train, continue a day later, export, predict.

    python examples/deploy.py

Three folders of pictures are three tasks. Each has two classes, such as discs and squares. A network learns them one after another. A day
later a fourth folder arrives. Only the record of the run is needed to go on: the example deletes the old training pictures first. Then the
network is written into a file that needs neither this package nor the class of the network, and classifies one picture.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

import selfless
from selfless import Run
from selfless.trained import export, predict

SIDE, PICTURES, EPOCHS = 20, 40, 15  # the side of a picture, pictures of a class, epochs of a task
TASKS = {
    "1 shapes": ("disc", "square"),
    "2 stripes": ("across", "down"),
    "3 lines": ("rising", "falling"),
    "4 frames": ("ring", "box"),
}


def draw(kind: str, generator: np.random.Generator) -> Image.Image:
    """Draw one grey picture with noise, at a random place."""
    picture = Image.new("L", (SIDE, SIDE), 40)
    pen = ImageDraw.Draw(picture)
    x, y = generator.integers(1, 8, 2).tolist()
    box = (x, y, x + 11, y + 11)
    match kind:
        case "disc":
            pen.ellipse(box, fill=200)
        case "square":
            pen.rectangle(box, fill=200)
        case "ring":
            pen.ellipse(box, outline=200, width=2)
        case "box":
            pen.rectangle(box, outline=200, width=2)
        case "rising":
            pen.line((x, y + 11, x + 11, y), fill=200, width=3)
        case "falling":
            pen.line((x, y, x + 11, y + 11), fill=200, width=3)
        case "across" | "down":
            for at in range(x % 5, SIDE, 5):
                pen.line((0, at, SIDE, at) if kind == "across" else (at, 0, at, SIDE), fill=200, width=2)
    noisy = np.asarray(picture) + generator.normal(0, 25, (SIDE, SIDE))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def draw_folder(folder: Path, task: str, generator: np.random.Generator) -> None:
    """Fill FOLDER/<task>/<train|test>/<class> with pictures."""
    for kind in TASKS[task]:
        for part, count in (("train", PICTURES), ("test", PICTURES // 2)):
            place = folder / task / part / kind
            place.mkdir(parents=True)
            for i in range(count):
                draw(kind, generator).save(place / f"{i}.png")


def main(folder: Path | None = None) -> dict[str, object]:
    """Run the story in a folder; return what it found."""
    folder = Path(tempfile.mkdtemp()) if folder is None else folder
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    for task in list(TASKS)[:3]:
        draw_folder(folder / "pictures", task, generator)

    # Monday: train. The same on the command line: selfless run --stream folders:pictures --model mlp-64 --preserve packnet:0.7 …
    run = Run(stream=f"folders:{folder / 'pictures'}", model="mlp-64", preserve="packnet:0.7", epochs=EPOCHS, batch=10, lr=0.02)
    first = selfless.train(run, out=folder / "results")
    print(f"three tasks: {100 * first.average:.1f} % on average; recorded in results/{run.key}")

    # Tuesday: a fourth task. Nothing is left of Monday but the record: selfless run --continue results/KEY --stream folders:next
    shutil.move(folder / "pictures", folder / "elsewhere")
    draw_folder(folder / "next", "4 frames", generator)
    monday = selfless.load(folder / "results" / run.key)
    more = selfless.train(monday.continued(f"folders:{folder / 'next'}"), out=folder / "results")
    print(f"the fourth: {100 * more.accuracy[-1, 3]:.1f} %. {more.about['notes'][0]}.")

    # The network in use: selfless export results/KEY --format torch-export --task 4; selfless predict results/KEY --task 4 picture.png
    model = more.model(task="4 frames")
    difference = export(model, folder / "frames.pt2", "torch-export")
    print(f"frames.pt2: its outputs differ by at most {difference:.1g}")
    (found,) = predict(model, [folder / "next" / "4 frames" / "test" / "ring" / "0.png"])
    print("a ring is:", ", ".join(f"{name} {100 * chance:.0f} %" for name, chance in found.classes))

    # The old tasks, evaluated where their pictures are now: PackNet keeps them exactly.
    old = [evaluate(more, folder / "elsewhere" / task, task) for task in list(TASKS)[:3]]
    print("old tasks now:", ", ".join(f"{100 * accuracy:.1f} %" for accuracy in old))
    return {"first": first, "more": more, "difference": difference, "best": found.classes[0][0], "old": old}


def evaluate(result: selfless.Result, folder: Path, task: str) -> float:
    """Return the accuracy on the test pictures of a task."""
    pictures = sorted((folder / "test").glob("*/*.png"))
    found = predict(result.model(task=task), pictures, top=1)
    return float(np.mean([one.classes[0][0] == one.path.parent.name for one in found]))


if __name__ == "__main__":
    main()
