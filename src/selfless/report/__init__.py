"""Recorded results → tables, plots and one HTML page. It reads numbers, never models; nothing here loads torch.

groups(results)                  runs that are equal but for the seed, with mean ± std over the seeds
headline(results)                the point in one sentence, and what supports it in another
terminal, markdown, csv, latex   the same numbers as tables; room: what is free, a row a group
plots                            the same numbers as pictures (matplotlib is loaded with it)
write(results, path)             all of it as one self-contained HTML page
"""

from selfless.report.groups import Group, Value, groups
from selfless.report.headline import headline
from selfless.report.page import write
from selfless.report.tables import csv, latex, markdown, room, terminal

__all__ = ["Group", "Value", "csv", "groups", "headline", "latex", "markdown", "room", "terminal", "write"]
