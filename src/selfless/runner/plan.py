"""What to train: from flags and a TOML file to runs, and from runs to fleets.

Flags override the file, and the file overrides the defaults. An unknown key is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfless.data.traits import stream_traits
from selfless.inputs import check_recorded, collecting, raise_all, show
from selfless.preserve import PRESERVERS, Preserver
from selfless.recommendation import NAME, Recommendation, recommend_for_stream
from selfless.runner.loading import folder_of, load
from selfless.runner.network_traits import network_traits
from selfless.runner.options import TrainOptions
from selfless.sparsify import SPARSIFIERS, NoSparsifier
from selfless.spec import ON_HELD_OUT, Run
from selfless.terms import Term, add, parse_all

MOST_SEEDS = 100_000
# Fields of TrainOptions that are also keys of the TOML file.
HOW = ("out", "device", "workers", "data_dir", "budget", "checkpoints", "deterministic", "engine", "address")


@dataclass(frozen=True)
class Plan:
    """The runs of a command, how to train them, and what was recommended for them."""

    runs: list[Run]
    options: TrainOptions
    recommended: Recommendation | None = None


def plan(config: Path | None, flags: Mapping[str, Any], *, force: bool = False, seeds: int = 1) -> Plan:
    """Return the plan of `selfless run`. `flags` are the values on the command line, by field; None: not given.

    seeds   how many, if neither the flags nor the file say it
    """
    values = _read(config) if config is not None else {}
    fields = {f.name: f.metadata["option"] for f in dataclasses.fields(Run)}
    _check_keys(values, (*fields, "seeds", *HOW), config)
    for name, value in flags.items():
        if value is None:
            continue
        if name in fields and fields[name].kind is dict:  # merge its entries with those of the file
            value = {**values.get(name, {}), **parse_pairs(value, fields[name].flag)}
        values[name] = value
    parents = folder_of(values["parent"]) if values.get("parent") else None
    values = values if parents is None else _continue(values)
    recommended = recommend_for_stream(values) if values.get("preserve") == NAME else None
    if recommended is not None:  # the run holds the names of the methods, so its key is that of the same run by name
        values = {**recommended.settings, **values, "preserve": recommended.preserve}
    how = {name: values.pop(name) for name in HOW if name in values}
    problems: list[Exception] = []
    with collecting(problems):
        _check_whole("workers", how.get("workers"))
    with collecting(problems):
        how["budget"] = parse_size(how.get("budget"))
    for name in ("checkpoints", "deterministic"):
        with collecting(problems):
            if not isinstance(how.get(name, True), bool):
                raise ValueError(f"{name} is {show(how[name])}; it must be true or false")
    for name in ("out", "data_dir", "device", "engine", "address"):
        with collecting(problems):
            if name in how and not (isinstance(how[name], str | Path) and str(how[name]).isprintable()):
                raise ValueError(f"{name} is {show(how[name])}; it must be text")
    seeds = values.pop("seeds", seeds)
    with collecting(problems):
        _check_whole("seeds", seeds, f": how many seeds to run, from {show(values.get('seed', 0))} up", most=MOST_SEEDS)
    with collecting(problems):
        _check_text(values)
        first = Run.from_dict(values, recorded=False)
    raise_all(problems)
    runs = [dataclasses.replace(first, seed=first.seed + i) for i in range(seeds)]
    return Plan(runs, TrainOptions(**({"out": parents or "results"} | how), parents=parents, force=force), recommended)


def _continue(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that continues the one in the folder values["parent"]: the parent's, except those that are given."""
    if not values.get("stream"):
        raise ValueError("--continue needs the new tasks: --stream folders:PATH, which holds only them")
    base = load(values["parent"]).continued(str(values["stream"])).as_dict()
    if "model" not in values and ":" in base["model"]:
        check_recorded(base["model"])
    return {**base, **values, "parent": base["parent"]}


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raise ValueError if it is missing or not valid."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; --config takes a TOML file such as: model = 'mlp-64'") from None
    except (OSError, ValueError, RecursionError) as error:  # a folder, wrong TOML, text that is not UTF-8, too many digits or brackets
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def _check_keys(values: Mapping[str, Any], known: Sequence[str], config: Path | None) -> None:
    """Raise ValueError for a key that is not known."""
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            hint = " Write stream_options = {limit = 500}." if key == "limit" else hint  # a flag of its own on the command line
            raise ValueError(f"{config}: unknown key {key!r}.{hint} Known keys: {', '.join(known)}")


def _check_text(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless the stream and the network are names: a file holds no objects."""
    defaults = {f.name: f.default for f in dataclasses.fields(Run)}
    for name in ("stream", "model"):
        if not isinstance(values.get(name, ""), str):
            raise ValueError(f"{name} is {show(values[name])}; it must be text, as in {name} = {defaults[name]!r}")


def _check_whole(name: str, value: Any, explanation: str = "", most: int = 2**31) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
        high = f", and at most {most:,}" if isinstance(value, int) and value > most else ""
        raise ValueError(f"{name} is {show(value)}; it must be a whole number ≥ 1{high}{explanation}")


def parse_method(text: str) -> dict[str, Term]:
    """Return the fields of `Run` that a method names: of "mas:0.1 + slnid:1e-3" both, of "lwf:1+mas:0.1" `preserve`.

    "none" is the preserver, and beside another preserver no sparsifier: "mas:0.1 + none".
    """
    either: dict[str, type[Term]] = {**SPARSIFIERS, **PRESERVERS}
    found = parse_all(text, either, "method")
    if any(term.role not in ("preserver", "sparsifier") for term in found):
        raise TypeError(f"{text!r} is not a method: its classes must be subclasses of Preserver or Sparsifier (docs/write-your-own.md)")
    preserve = [term for term in found if term.role == "preserver"]
    sparsify = [term for term in found if term.role == "sparsifier"]
    if len(preserve) > 1 and not sparsify and preserve[-1].name == "none":
        preserve, sparsify = preserve[:-1], [NoSparsifier()]
    parts = {"preserve": preserve, "sparsify": sparsify}
    return {field: terms[0] if len(terms) == 1 else add(terms) for field, terms in parts.items() if terms}


def parse_pairs(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """Return {"p": 0.5, "head": "all"} for ["p=0.5", "head=all"]. Values are TOML; a value that is not valid TOML is text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{flag} {pair!r}: write key=value, as in {flag} classes_per_task=5")
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError, KeyError):
            found[key] = text
    return found


def parse_size(text: str | int | None) -> int | None:
    """Return the number of bytes of "2GB", "500 MiB" or a number."""
    if text is None:
        return None
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    plain = show(text).strip("'").strip().lower().replace(" ", "")
    number = plain.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        size = float(number) * units[plain[len(number) :]]
        if isinstance(text, bool) or not 1 <= size < 2**63:
            raise ValueError
        return int(size)
    except (KeyError, ValueError):
        raise ValueError(f"{show(text)} is not a size; write for example 2GB or 500MiB") from None


# -------------------------------------------------------------------------------------------------------------------- fleets
def fleets(runs: Sequence[Run], most: int | None = None) -> list[list[Run]]:
    """Group runs that can train together, at most `most` in a fleet. Members with the same methods are neighbours."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_shared_settings(run), []).append(run)
    found = []
    for group in groups.values():
        group.sort(key=lambda r: (repr(_without_strengths(r)), repr(r.sparsify.neutral())))
        size = len(group) if most is None else max(1, most)
        found += [group[i : i + size] for i in range(0, len(group), size)]
    return found


def split_evenly(fleet: Sequence[Run], count: int) -> Iterator[list[Run]]:
    """Split a fleet into `count` parts of nearly equal size, in order."""
    size, more = divmod(len(fleet), count)
    start = 0
    for i in range(count):
        stop = start + size + (i < more)
        if stop > start:
            yield list(fleet[start:stop])
        start = stop


def spread(groups: Sequence[Sequence[Run]], sizes: Sequence[int], slots: int, *, by_share: bool) -> list[list[Run]]:
    """Split groups of runs that can train together into fleets for `slots` devices; a fleet of group i has at most sizes[i] members.

    by_share   True: all groups together get about one fleet for each device, so that fleets stay large, as a GPU needs it.
               False: each group is split over all devices, as on the cores of one machine.
    """
    total, found = sum(map(len, groups)), list[list[Run]]()
    for group, size in zip(groups, sizes, strict=True):
        wanted = math.ceil(slots * len(group) / total) if by_share else slots
        found += split_evenly(group, max(wanted, math.ceil(len(group) / max(size, 1))))
    return found


def _without_strengths(run: Run) -> list[Term]:
    terms: tuple[Preserver, ...] = run.preserve.parts
    return [term.without_strength for term in terms]


def _shared_settings(run: Run) -> str:
    """Return the settings that the members of a fleet must share, as text: all but seed, strengths, lr, epochs, ramp and sparsifier.

    Preservers may differ if their steps are the same, as those of MAS and EWC are.
    A stream, network or preserver may require more: the same seed, the same number of epochs, or a fleet of one. Runs with a sparsifier of
    the user's share no fleet with others, so that an error in it ends no other run.
    """
    stream, network = stream_traits(run.stream, run.stream_options), network_traits(run)
    terms: tuple[Preserver, ...] = run.preserve.parts
    preserve = [term.step_kind for term in terms]
    fields = run.as_dict() | {"preserve": preserve, "sparsify": None, "seed": None, "lr": None, "epochs": None, "ramp": None}
    if own := [term.spelling() for term in run.sparsify.parts if term.is_custom()]:
        fields["sparsify"] = own
    if not stream.equal_sizes:
        fields["seed"] = run.seed
    # A member that has finished must not change while other members train, and phases must begin at the same epoch for all members.
    if stream.draws_after_last_epoch or network.has_running_statistics or any(term.has_phases for term in terms):
        fields["epochs"] = run.epochs
    stops_early = run.schedule in ON_HELD_OUT and network.has_running_statistics
    if stops_early or any(term.draws_randomly for term in terms):  # consolidation draws from one random generator
        fields["key"] = run.key
    return json.dumps(fields, sort_keys=True)
