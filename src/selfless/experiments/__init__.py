"""Every table and figure of the paper as an experiment: its runs, its published values, its claims. And its rivals, which it has not.

    from selfless.experiments import experiment, NAMES
    fig = experiment("fig-2", profile="ours")

To add one: a module here with a function of the profile that returns an Experiment, and its entry in EXPERIMENTS (docs/experiments.md).
base (what an experiment is) → protocols (runs and grids) → one module a table or figure; choosing, measures and claims → reproduce.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from selfless.experiments.base import PROFILES, Experiment, Profile
from selfless.experiments.ewc import ewc
from selfless.experiments.fig_2 import fig_2, fig_2_64
from selfless.experiments.fig_3 import fig_3a, fig_3a_128, fig_3b
from selfless.experiments.fig_4 import fig_4_bottom, fig_4_top
from selfless.experiments.locality import locality
from selfless.experiments.quick import quick as reduced
from selfless.experiments.rivals import rivals, rivals_published
from selfless.experiments.rule import rule_of_thumb
from selfless.experiments.table_1 import table_1
from selfless.experiments.table_2 import here, recorded, table_2
from selfless.experiments.table_3 import table_3

__all__ = ["EXPERIMENTS", "NAMES", "PAPER", "Experiment", "experiment"]

EXPERIMENTS: dict[str, Callable[[Profile], Experiment]] = {
    "fig-2": fig_2,
    "fig-2-64": fig_2_64,
    "fig-3a": fig_3a,
    "fig-3a-128": fig_3a_128,
    "fig-3b": fig_3b,
    "fig-4-top": fig_4_top,
    "fig-4-bottom": fig_4_bottom,
    "table-1": table_1,
    "table-2": table_2,
    "table-3": table_3,
    "ewc": ewc,
    "locality": locality,
    "rule-of-thumb": rule_of_thumb,
}
PAPER = tuple(EXPERIMENTS)  # what `all` means
EXPERIMENTS |= {"rivals": rivals, "rivals-published": rivals_published}
NAMES = tuple(EXPERIMENTS)


def experiment(
    name: str,
    profile: str = "ours",
    *,
    quick: bool = False,
    data_dir: Path | None = None,
    prepare: bool = False,
    record: Mapping[str, Any] | None = None,
) -> Experiment:
    """The experiment of that name in a profile ("paper" or "ours"); `quick` is its small version.

    Table 2 is made of the object sets and weights that are in `data_dir`, prepared first if `prepare`, or that its `record` was made of.
    """
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no experiment is called {name!r}.{hint} Choose from: {', '.join(NAMES)}, or all")
    if profile not in PROFILES:
        raise ValueError(f"profile {profile!r} is unknown; choose paper (the authors' settings) or ours")
    if name == "table-2":
        made = table_2(profile, here(data_dir, prepare=prepare) if record is None else recorded(record))
    else:
        made = EXPERIMENTS[name](profile)
    return reduced(made) if quick else made
