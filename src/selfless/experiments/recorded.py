"""Scores that earlier records contain: who adds seeds or rows to a recorded experiment does not choose its strengths again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from selfless.experiments.choosing import RecordedScore, Scored
from selfless.runner import Store
from selfless.spec import Run


def recorded_scores(out: Path) -> dict[str, RecordedScore]:
    """Return the score of every run that chose a strength, by key, from the records of a folder of results.

    Runs that failed are left out, because a failure may have been the machine's; so are runs with different scores in two records.
    """
    found: dict[str, RecordedScore] = {}
    conflicts: set[str] = set()
    for path in sorted((out / "experiments").glob("*.json")):
        try:
            own = _scores(json.loads(path.read_bytes()))
            conflicts |= {key for key in own.keys() & found.keys() if own[key].score != found[key].score}
            found = own | found
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not the record of an experiment ({error!r}); restore it, or move it elsewhere") from error
    return {key: one for key, one in found.items() if key not in conflicts}


def _scores(record: Mapping[str, Any]) -> dict[str, RecordedScore]:
    found: dict[str, RecordedScore] = {}
    about = {name: tuple(record["about"].get(name, ())) for name in ("hardware", "torch", "commit")}
    for one in (one for choice in record["choices"] for one in choice["candidates"]):
        times = one.get("seconds") or [None] * len(one["keys"])
        for key, score, seconds in zip(one["keys"], one["scores"], times, strict=True):
            if score is not None:
                found[key] = RecordedScore(float(score), seconds, one.get("made_from", ""), about)
    return found


def take(runs: Iterable[Run], recorded: Mapping[str, RecordedScore], store: Store) -> dict[Run, Scored]:
    """Return the recorded scores of these runs, except where the store has the result, or custom data, network or method has changed."""
    known = {run: recorded[run.key] for run in runs if run.key in recorded and not store.has(run.key)}
    return {run: score for run, score in known.items() if store.is_made_from(run, score.made_from)}
