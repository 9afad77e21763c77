"""Results as tables: for the terminal, Markdown and LaTeX in percent, and as CSV for programs (fractions at full precision)."""

from __future__ import annotations

import csv as csv_format
import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from selfless.report.gaps import HEADINGS, SHOWN, gaps
from selfless.report.groups import Group, best, footnotes, groups, measured, number, over_seeds, uses_old_data, why_not_compared
from selfless.report.places import divide, is_numbered, is_trial, task_heading, task_names, trial_rows

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

    from selfless.spec import Result

MEASURES = {  # name in Result.summary → heading, digits in percent
    "average": ("average accuracy", 2),
    "forgetting": ("forgetting", 2),
    "backward_transfer": ("BWT", 2),
    "forward_transfer": ("FWT", 2),
    "free_parameters": ("free parameters", 1),
    "free_neurons": ("free neurons", 1),
}
LAST = ("FWT", "BWT", "free neurons", "free parameters", "forgetting")  # what a narrow terminal shows last
CAPTION = "In percent, after the last task; mean ± standard deviation over seeds."
BESIDE = (
    "Differences of the average accuracy in points, paired by seed; 95 % interval of the t test, of each comparison alone. The best is "
    "that of methods without old data, if there is one. Methods that share fewer than two seeds with it are left out, and all but the "
    f"nearest {SHOWN}."
)
TRIALS = ["method", "stream, network", "seeds", "held-out accuracy"]
CHUNK = 10  # tasks side by side in a terminal


def columns(tasks: int, names: Sequence[str] = ()) -> list[str]:
    """Return the headings of a table with this number of tasks, by name if the name is known."""
    return ["method", "seeds", *(heading for heading, _ in MEASURES.values()), *(task_heading(u, names) for u in range(tasks))]


def cells(group: Group, tasks: int) -> list[str]:
    """Return one row under `columns`, without label and marks."""
    if not group.done:
        return ["0", "failed", *["–"] * (len(MEASURES) - 1 + tasks)]
    per_task = [value.text(1, std=False) for value in group.per_task]
    measures = [group.value(name).text(digits) for name, (_, digits) in MEASURES.items()]
    return [str(len(group.done)), *measures, *per_task, *["–"] * (tasks - group.tasks)]


def line_of(row: Sequence[str]) -> str:
    """Return one line of a GitHub table."""
    return "| " + " | ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for text in row) + " |"


def markdown(results: Sequence[Result]) -> str:
    """Return a GitHub table, the best average in bold, footnotes below; one for each stream and network, and one of trials."""
    places, trials = divide(results)
    parts = [(f"### {place.title}\n\n" if len(places) > 1 else "") + _markdown(place.results) for place in places]
    if trials or not parts:
        lines = [line_of(TRIALS), line_of(["---", "---", "---:", "---:"]), *(line_of(row) for row in _trials(trials))]
        parts.append("\n".join([*(["### Trials of strengths", ""] if parts else []), *lines, ""]) if trials else _markdown([]))
    return "\n".join(parts)


def _trials(trials: Sequence[Result]) -> list[list[str]]:
    """Return one row per candidate strength under TRIALS."""
    return [[row.method, row.where, str(row.seeds), row.held_out.text(2)] for row in trial_rows(trials)]


def _markdown(results: Sequence[Result]) -> str:
    found = groups(results)
    marks, notes = footnotes(found)
    top, tasks = best(found), _tasks(found)
    headings = columns(tasks, task_names(found))
    rows = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for group, mark in zip(found, marks, strict=True):
        seeds, average, *rest = cells(group, tasks)
        rows.append([_marked(group.label, mark), seeds, f"**{average}**" if group is top else average, *rest])
    said = [CAPTION, *(f"{mark} {text}" for mark, text in notes)]
    return "\n\n".join(["\n".join(map(line_of, rows)), *said, *_markdown_beside(found)]) + "\n"


def _markdown_beside(found: Sequence[Group]) -> list[str]:
    """Return a table of every method beside the best one, or why there is none."""
    rows, said = _beside(found)
    table = ["\n".join(map(line_of, [rows[0], ["---", "---:", "---:", "---:"], *rows[1:]]))] if rows else []
    return [*table, said] if said else table


def _beside(found: Sequence[Group]) -> tuple[list[list[str]], str]:
    """Return (the rows of a table of every method beside the best one, headings first; what is said below it, or why there is none)."""
    top, others = best(found), gaps(found)[:SHOWN]
    if top is None or not others:
        return [], why_not_compared(found)
    return [[f"beside {top.label}", *HEADINGS], *([gap.group.label, *gap.cells] for gap in others)], BESIDE


def latex(results: Sequence[Result]) -> str:
    """Return a booktabs tabular, the best average in bold, footnotes below; one for each stream and network, and one of trials."""
    places, trials = divide(results)
    parts = [(f"% {place.title}\n" if len(places) > 1 else "") + _latex(place.results) for place in places]
    if trials:
        rows = [" & ".join(map(tex, row)) + r" \\" for row in _trials(trials)]
        head = [r"% trials of strengths", r"\begin{tabular}{llrr}", r"\toprule", " & ".join(map(tex, TRIALS)) + r" \\", r"\midrule"]
        parts.append("\n".join([*head, *rows, r"\bottomrule", r"\end{tabular}", ""]))
    return "\n".join(parts or [_latex([])])


def _latex(results: Sequence[Result]) -> str:
    found = groups(results)
    marks, notes = footnotes(found)
    top, tasks = best(found), _tasks(found)
    headings = columns(tasks, task_names(found))
    lines = [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(tex, headings)) + r" \\", r"\midrule"]
    for group, mark in zip(found, marks, strict=True):
        seeds, average, *rest = map(tex, cells(group, tasks))
        strong = rf"\textbf{{{average}}}" if group is top else average
        lines.append(" & ".join([tex(_marked(group.label, mark)), seeds, strong, *rest]) + r" \\")
    said = [CAPTION, *(f"{mark} {text}" for mark, text in notes)]
    lines += [r"\bottomrule", r"\end{tabular}", *map(_small, said), *_latex_beside(found)]
    return "\n".join(lines) + "\n"


def _latex_beside(found: Sequence[Group]) -> list[str]:
    """Return the lines of a tabular of every method beside the best one, or why there is none."""
    rows, said = _beside(found)
    if not rows:
        return [_small(said)] if said else []
    head, *body = [" & ".join(map(tex, row)) + r" \\" for row in rows]
    tabular = [r"\begin{tabular}{lrrr}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return [r"\bigskip", *tabular, _small(said)]


def _small(text: str) -> str:
    """Return a paragraph in small letters."""
    return rf"\par{{\footnotesize {tex(text)}\par}}"


def csv(results: Sequence[Result]) -> str:
    """Return one line per group: fractions at full precision, named as in metrics.json; unknown values are empty.

    `trial` is 1 for a trial of a strength, as `selfless tune` trains them, else 0; such a group is judged by its `held_out` accuracy.
    `beside_best` is its average minus that of the best group of its stream and network, over the seeds that both have, with the 95 %
    interval.
    """
    found = groups(results)
    beside = {gap.group.results[0].run.key: gap for place in divide(results)[0] for gap in gaps(groups(place.results))}
    tasks = _tasks(found)
    file = io.StringIO()
    rows = csv_format.writer(file, lineterminator="\n")
    values = [f"{name}{end}" for name in ("held_out", *MEASURES) for end in ("", "_std")] + [
        f"task_{u + 1}{e}" for u in range(tasks) for e in ("", "_std")
    ]
    names = "label method stream model tasks scenario seeds failed select trial notes".split()
    rows.writerow([*names, *values, "beside_best", "beside_best_low", "beside_best_high"])
    for g in found:
        pairs = [g.held_out, *(g.value(name) for name in MEASURES), *g.per_task]
        shares = ["" if math.isnan(x) else repr(x) for pair in pairs for x in pair] + [""] * 2 * (tasks - g.tasks)
        what = [*map(defuse, (g.label, g.run.method, g.run.stream, g.run.model)), g.tasks, g.run.scenario]
        notes = defuse("; ".join(g.notes))
        gap = beside.get(g.results[0].run.key)
        between = ["", "", ""] if gap is None else ["" if math.isnan(x) else repr(x) for x in (gap.mean, gap.low, gap.high)]
        rows.writerow([*what, len(g.done), len(g.failures), g.select, int(is_trial(g.results[0])), notes, *shares, *between])
    return file.getvalue()


def defuse(text: str) -> str:
    """Return the text of a CSV cell so that a spreadsheet does not run it as a formula: one that begins like a formula gets a quote."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def terminal(results: Sequence[Result]) -> RenderableType:
    """Return what `rich.print` shows in 80 columns: one row per method, then accuracy on each task; for a single run its matrix."""
    from rich.console import Group as Stack
    from rich.text import Text

    found = groups(results)
    if not found:
        return Text("no results")
    marks, notes = footnotes(found)
    labels = [[Text(group.label), *([Text(mark)] if notes else [])] for group, mark in zip(found, marks, strict=True)]
    parts: list[RenderableType] = [Text("After the last task (%)", style="bold"), _summary(found, labels)]
    if len(results) == 1 and found[0].done:
        if 1 < found[0].tasks <= 1.5 * CHUNK:
            parts += [Text("\nAccuracy (%): rows, the tasks learnt so far; columns, the task tested", style="bold"), _matrix(found[0])]
    elif any(group.done for group in found):
        parts.append(Text("\nAccuracy on each task after the last one (%)", style="bold"))
        parts.append(_PerTask(found, labels))
    names = [task_heading(u, named) for named in [task_names(found)] for u in range(len(named)) if not is_numbered(u, named[u])]
    if names:
        parts.append(Text(f"Tasks: {', '.join(names)}", style="dim"))
    notes_below = [Text(f"{mark} {text}", style="yellow") for mark, text in notes]
    return Stack(*parts, *([Text()] if notes else []), *notes_below)


def beside(results: Sequence[Result]) -> RenderableType | None:
    """Return what `rich.print` shows of each method beside the best one, or why it is not compared; None if there is nothing to say."""
    from rich.console import Group as Stack
    from rich.text import Text

    found = groups(results)
    top, others = best(found), gaps(found)
    if top is None or not others:
        return Text(why, style="yellow") if (why := why_not_compared(found)) else None
    labels = [gap.group.label for gap in others]

    def make(shown: Sequence[str]) -> Table:
        table = _table(shown, labels=labels)
        for gap in others:
            table.add_row(Text(gap.group.label), *(cell for name, cell in zip(HEADINGS, gap.cells, strict=True) if name in shown))
        return table

    old = not uses_old_data(top.run) and any(uses_old_data(group.run) for group in found)
    measure = "points of average accuracy, paired by seed; t intervals, each of one comparison alone"
    what = f"\nBeside {top.label}, the best{' without old data' * old}: {measure}"
    left = [group.label for group in found if group is not top and all(group is not gap.group for gap in others)]
    note = [Text(f"Not in the table, because fewer than two seeds have finished: {', '.join(left)}", style="yellow")] if left else []
    return Stack(Text(what, style="bold"), _Fitting(make, HEADINGS, HEADINGS[:0:-1], labels), *note, Text())


def room(results: Sequence[Result]) -> Table:
    """Return a table for `rich.print`: free capacity after the first and the last task, one row per group, means over seeds.

    If streams or networks differ, each (stream, network) has its own section, so that labels need not repeat them.
    """
    from rich.text import Text

    table = _table(["seeds", "neurons\nfirst", "\nlast", "param.\nfirst", "\nlast"], "free, in %, after task")
    where = {(r.run.stream, r.run.model) for r in results}
    for stream, model in sorted(where):
        if len(where) > 1:
            table.add_section()
            table.add_row(Text(f"{stream}, {model}", style="bold"))
        found = groups([r for r in results if (r.run.stream, r.run.model) == (stream, model)])
        for group in sorted(found, key=lambda g: g.label):  # there may be many, and a copied folder has lost the order of recording
            known = [r.capacity for r in group.done if r.capacity]
            shares = [over_seeds([measured(free[t], f"free_{k}") for free in known]) for k in ("neurons", "parameters") for t in (0, -1)]
            table.add_row(Text(group.label), str(len(group.done)), *(share.text(1, std=False) for share in shares))
    return table


class _Fitting:
    """A table that leaves out some columns in a terminal that is too narrow for all of them, and says which.

    make     the table with some of the columns behind the labels
    names    these columns, as they are named
    order    which of them to leave out, the first ones first
    labels   they are folded before a column is left out
    """

    def __init__(self, make: Callable[[Sequence[str]], Table], names: Sequence[str], order: Sequence[str], labels: Sequence[str]) -> None:
        self.make, self.names, self.order, self.labels = make, names, order, labels

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        for count in range(len(self.order) + 1):
            table = self.make([name for name in self.names if name not in self.order[:count]])
            if _width(table, self.labels, console, options) <= options.max_width:
                break
        yield table
        if count:
            yield Text(f"Not shown, for want of room: {', '.join(self.order[:count])}", style="dim")


def _width(table: Table, labels: Sequence[str], console: Console, options: ConsoleOptions) -> int:
    """Return the columns of the terminal that a table needs if its labels are folded."""
    from rich.measure import Measurement

    folded = max(map(len, labels), default=0) - _longest_word(labels)
    return Measurement.get(console, options.update(width=1_000), table).maximum - folded


def _longest_word(labels: Sequence[str]) -> int:
    return min(24, max((len(word) for label in labels for word in label.split()), default=0))


def _table(rest: Sequence[str], first: str = "method", marks: bool = False, labels: Sequence[str] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", min_width=_longest_word(labels))  # in a narrow terminal the label is folded, never a number
    if marks:
        table.add_column("")
    for heading in rest:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _summary(found: Sequence[Group], labels: Sequence[Sequence[Text]]) -> RenderableType:
    from rich.text import Text

    top, plain = best(found), [group.label for group in found]
    names = {heading: name for name, (heading, _) in MEASURES.items()}

    def make(shown: Sequence[str]) -> Table:
        headings = [heading.replace(" ", "\n").replace("parameters", "param.") for heading in shown]
        table = _table(headings, marks=len(labels[0]) > 1, labels=plain)
        for group, label in zip(found, labels, strict=True):
            if not group.done:
                table.add_row(*label, Text("failed", style="red"), *["–"] * (len(shown) - 1))
                continue
            texts = [group.value(names[h]).text(MEASURES[names[h]][1], std=names[h] == "average") for h in shown]
            table.add_row(*label, Text(texts[0], style="bold green" if group is top else ""), *texts[1:])
        return table

    return _Fitting(make, list(names), LAST, plain)


class _PerTask:
    """Accuracy on each task after the last one: as many tasks side by side as the terminal has room for, at most CHUNK."""

    def __init__(self, found: Sequence[Group], labels: Sequence[Sequence[Text]]) -> None:
        self.found, self.labels, self.plain = found, labels, [group.label for group in found]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        tasks = _tasks(self.found)
        fits = (n for n in range(min(CHUNK, tasks), 1, -1) if _width(self._table(0, n), self.plain, console, options) <= options.max_width)
        size = math.ceil(tasks / math.ceil(tasks / next(fits, 1)))  # tables of nearly the same width
        yield from (self._table(start, min(start + size, tasks)) for start in range(0, tasks, size))

    def _table(self, start: int, stop: int) -> Table:
        table = _table([str(u + 1) for u in range(start, stop)], marks=len(self.labels[0]) > 1, labels=self.plain)
        for group, label in zip(self.found, self.labels, strict=True):
            table.add_row(*label, *(value.text(1, std=False) for value in group.per_task[start:stop]))
        return table


def _matrix(group: Group) -> Table:
    from rich.text import Text

    A = group.accuracy[0]
    table = _table([str(u + 1) for u in range(A.shape[1])], "learnt")
    for t, row in enumerate(A):
        texts = ["–" if math.isnan(a) else number(a) for a in row]
        joint = len(A) == 1
        table.add_row("all" if joint else str(t + 1), *(Text(x, style="" if joint or u <= t else "dim") for u, x in enumerate(texts)))
    return table


def _tasks(found: Sequence[Group]) -> int:
    return max((group.tasks for group in found), default=0)


def _marked(label: str, mark: str) -> str:
    return f"{label} {mark}".rstrip()


TEX = {c: rf"\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
TEX |= {
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "†": r"\textdagger{}",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "λ": r"$\lambda$",
    "Ω": r"$\Omega$",
    "α": r"$\alpha$",
    "Σ": r"$\sum$",
    "×": r"$\times$",
    "“": "``",
    "”": "''",
    "\n": " ",
}
TEX |= {mark: rf"\textsuperscript{{{digit}}}" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}


def tex(text: str) -> str:
    """Return the text with the special characters of LaTeX replaced."""
    return "".join(TEX.get(c, c) for c in text)
