"""What a user hands to the package is checked here: values, their own code, and the content of records.

Lives here: `values` checks numbers and lists several problems at once, `custom` imports a user's module, `records` checks what was read
from a file against its schema.

Imports nothing. Imported by cli, fields, models, report, runner, spec, terms, testing and trained.
"""

from selfless.inputs.custom import NotHere, check_recorded, describe_error, import_custom, is_own_file, own_place, trust
from selfless.inputs.records import check_experiment, check_note, check_outcome, check_result, check_seal, seal
from selfless.inputs.values import collecting, is_finite, raise_all, show, unknown_name

__all__ = [
    "NotHere",
    "check_experiment",
    "check_note",
    "check_outcome",
    "check_recorded",
    "check_result",
    "check_seal",
    "collecting",
    "describe_error",
    "import_custom",
    "is_finite",
    "is_own_file",
    "own_place",
    "raise_all",
    "seal",
    "show",
    "trust",
    "unknown_name",
]
