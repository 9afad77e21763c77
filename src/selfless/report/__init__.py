"""Recorded results as tables, figures and one HTML page. It reads numbers, never models; importing it loads neither torch nor matplotlib.
Imports files, inputs, metrics, runner and spec. Imported by bench and cli.

groups(results)                  runs that differ in the seed only, with mean ± std over seeds
headline(results)                the main finding in one sentence, and what supports it in another
terminal, markdown, csv, latex   the same numbers as tables; `room` is the table of free capacity, `beside` that of differences
write(results, path)             all of it as one self-contained HTML page
plots                            figures of results
experiments, claims, against     recorded experiments as tables; all claims in one table; two folders compared
experiment_plots                 figures of recorded experiments, one module of `figures/` per kind
"""

from selfless.report.groups import Group, Value, groups
from selfless.report.headline import headline
from selfless.report.page import write
from selfless.report.tables import beside, csv, latex, markdown, room, terminal

__all__ = ["Group", "Value", "beside", "csv", "groups", "headline", "latex", "markdown", "room", "terminal", "write"]
