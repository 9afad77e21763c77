"""Every table and figure of the paper as an experiment: its runs, its published values, its claims. Also other experiments.

    from selfless.experiments import experiment, NAMES
    fig = experiment("fig-2", profile="ours")

To add an experiment, write one module here with a function profile → Experiment, and add an entry to OTHER_EXPERIMENTS below. The same code
then chooses strengths, trains, computes statistics and writes record and report (docs/experiments.md).

Within the folder: base (what an experiment is) → protocols (runs and grids) → one module per table or figure; choosing, measures and
claims → record → reproduce. `report` reads the records, and neither imports the other.

Imports data, files, importance, keeper, metrics, models, network, preserve, runner, sparsify, spec and terms.
Imported by cli.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from selfless.experiments.base import PROFILES, Experiment, Profile
from selfless.experiments.beyond import beyond
from selfless.experiments.ewc import ewc
from selfless.experiments.fig_2 import fig_2, fig_2_64
from selfless.experiments.fig_3 import fig_3a, fig_3a_128, fig_3b
from selfless.experiments.fig_4 import fig_4_bottom, fig_4_top
from selfless.experiments.locality import locality
from selfless.experiments.quick import shrink
from selfless.experiments.rivals import rivals
from selfless.experiments.rivals_projection import rivals_projection
from selfless.experiments.rivals_published import rivals_published
from selfless.experiments.rule import rule_of_thumb
from selfless.experiments.table_1 import table_1
from selfless.experiments.table_2 import table_2, table_2_of
from selfless.experiments.table_3 import table_3
from selfless.experiments.variants import all_layers, augmented, rates, tiny_variants
from selfless.experiments.wide import wide

__all__ = ["EXPERIMENTS", "NAMES", "PAPER", "Experiment", "experiment"]

PAPER_EXPERIMENTS: dict[str, Callable[[Profile], Experiment]] = {
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
OTHER_EXPERIMENTS: dict[str, Callable[[Profile], Experiment]] = {
    "rivals": rivals,
    "rivals-published": rivals_published,
    "rivals-projection": rivals_projection,
    "beyond": beyond,
    "all-layers": all_layers,
    "augmented": augmented,
    "tiny-variants": tiny_variants,
    "rates": rates,
    "wide": wide,
}
EXPERIMENTS = PAPER_EXPERIMENTS | OTHER_EXPERIMENTS
DEPENDING_ON_DATA = {"table-2": table_2_of}  # their cells depend on the data on this machine, or on a record
PAPER = tuple(PAPER_EXPERIMENTS)  # what `all` means
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
    """Return the experiment of that name in a profile ("paper" or "ours"); with `quick`, its quick version.

    Table 2 depends on the object sets and weights in `data_dir` (`prepare` prepares them first), or on those that its `record` names.
    """
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no experiment is called {name!r}.{hint} Choose from: {', '.join(NAMES)}, or all")
    if profile not in PROFILES:
        raise ValueError(f"profile {profile!r} is unknown; choose ours, equal (equal grids for all rows) or paper (the authors' settings)")
    if name in DEPENDING_ON_DATA:
        made = DEPENDING_ON_DATA[name](profile, data_dir=data_dir, prepare=prepare, record=record)
    else:
        made = EXPERIMENTS[name](profile)
    return shrink(made) if quick else made
