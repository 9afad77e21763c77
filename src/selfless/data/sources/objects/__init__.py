"""The eight object sets of table 2, one module each: what was published, and how its layout is read.

To add an object set, write a module here: a function `read(files, options) -> Listing` and one `ObjectSet` with the published files,
numbers and addresses. Then add it to `OBJECTS`, whose order is that of the stream `objects`. `scenes.py` is a short example.

Files: `files` (loose or in archives), `matlab` (MAT-files), `listing` (what a reader returns), `base` (ObjectSet), one module per set;
`fitting` and `preparing` (images at 224×224 in the cache); `checks` (is a copy what was published). `data/objects.py` uses them by name.

Imports the helpers of `data`. Imported by the modules of `data` that deal with object sets: `objects`, `object_stream`, `named`.
"""

from __future__ import annotations

from selfless.data.sources.base import suggest
from selfless.data.sources.objects.actions import ACTIONS
from selfless.data.sources.objects.aircraft import AIRCRAFT
from selfless.data.sources.objects.base import ObjectSet
from selfless.data.sources.objects.birds import BIRDS
from selfless.data.sources.objects.cars import CARS
from selfless.data.sources.objects.flowers import FLOWERS
from selfless.data.sources.objects.letters import LETTERS
from selfless.data.sources.objects.scenes import SCENES
from selfless.data.sources.objects.svhn import SVHN

__all__ = ["OBJECTS", "ObjectSet", "find_object_set"]

OBJECTS: dict[str, ObjectSet] = {item.name: item for item in (FLOWERS, SCENES, BIRDS, CARS, AIRCRAFT, ACTIONS, LETTERS, SVHN)}


def find_object_set(name: str) -> ObjectSet:
    """Return the set of that name. Raise ValueError with the nearest name and all names if there is none."""
    if name not in OBJECTS:
        raise ValueError(f"no object set is called {name!r}{suggest(name, OBJECTS)} (known: {', '.join(OBJECTS)})")
    return OBJECTS[name]
