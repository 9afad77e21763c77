"""Every kind of case by name. A function makes one case from a seeded generator and hands it to the package as a user would."""

from __future__ import annotations

from tests.fuzz.files import archive, cifar, gz, idx, image, mat, npz, picture
from tests.fuzz.records import checkpoint, experiment, folder, record
from tests.fuzz.texts import flags, spec, toml
from tests.fuzz.world import Target

TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (spec, toml, flags, idx, gz, cifar, archive, mat, npz, image, picture, checkpoint, record, experiment, folder)
}
