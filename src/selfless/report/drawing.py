"""The style of figures and how they are saved: safe for colour-blind readers, legible on dark and light, reproducible to the byte.

The colours are those of Okabe and Ito; marker and hatch carry the same information as the colour. Text and axes are drawn in INK. `svg`
turns INK into currentColor, so that the colour scheme of the page sets the colour; `save_png` draws on white.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#2f3742"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8F98")
MARKERS = "osD^vPX"
WIDTH, HEIGHT = 5.2, 3.0  # inches; a phone shows this width without shrinking the text
FLAT = 10  # more names than these are steep
LETTER = 5.7  # points: the mean width of a letter in a legend
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "xtick.bottom", "ytick.left", "legend.frameon"), False),
    **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 10),
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.alpha": 0.18,
    "hatch.linewidth": 0.8,
    "hatch.color": "white",
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.parse_math": False,  # a label is never a formula
    "svg.fonttype": "none",  # real text: small, searchable, in the font of the page
    "svg.hashsalt": "selfless",
}


class Look(NamedTuple):
    """How one group is drawn, the same in every figure."""

    colour: str
    marker: str
    again: bool  # the colour is used a second time: hatched, dashed


def looks(found: Sequence[Any]) -> list[Look]:
    """Give each group the next colour and marker."""
    n = len(COLOURS)
    return [Look(COLOURS[i % n], MARKERS[(i + i // n) % n], i >= n) for i in range(len(found))]


# The paper's rows look the same in every figure: colour, and a hatch for regularizers of parameters and for activation functions.
ROWS = {"SLNID": 0, "No-Reg": 6, "DeCov": 1, "L1-Rep": 2, "Maxout": 3, "LWTA": 4, "OrthReg": 5, "L2-WD": 1, "L1-Param": 2}
PARAMETERS, FUNCTIONS = ("OrthReg", "L2-WD", "L1-Param"), ("Maxout", "LWTA")


def looks_of(rows: Sequence[str]) -> list[Look]:
    """Give a row of the paper its usual look and other rows the colours that are left; if two would look alike, give colours in turn."""
    fixed = [(COLOURS[ROWS[row]], row in PARAMETERS) if row in ROWS else None for row in rows]
    known = [look for look in fixed if look]
    left = [
        colour for colour in (*COLOURS[3:], *COLOURS[:3]) if colour not in dict(known)
    ]  # first the colours of rows that are rarely drawn
    if not known or len(set(known)) < len(known) or len(left) < len(rows) - len(known):
        return looks(rows)
    rest = iter(left)
    drawn = [look or (next(rest), False) for look in fixed]
    return [Look(colour, MARKERS[i % len(MARKERS)], again) for i, (colour, again) in enumerate(drawn)]


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Use our settings and matplotlib's defaults, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def save_png(figure: Figure, path: Path | str, dpi: int = 200) -> Path:
    """Save as PNG on white, which is legible everywhere; return the path."""
    return _save(figure, path, format="png", dpi=dpi)


def save_pdf(figure: Figure, path: Path | str) -> Path:
    """Save as PDF, the same bytes for the same figure; return the path."""
    return _save(figure, path, format="pdf", metadata={"CreationDate": None})


def _save(figure: Figure, path: Path | str, **options: Any) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _drawing():
        figure.savefig(path, facecolor="white", **options)
    return path


def svg(figure: Figure) -> str:
    """Return the figure as one <svg> element: no background, INK as currentColor, ids that no other figure has."""
    file = io.StringIO()
    with _drawing():
        figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="none")
    text = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :].replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    text = re.sub(r"(?<=px )'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text).replace(INK, "currentColor")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{digest}-", text)
    alt = html.escape(str(figure.get_label()))
    return text.replace("<svg", f'<svg role="img" aria-label="{alt}" color="#78808c"', 1).strip()


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    with style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the font of the reader may have the glyph
        yield


def panel(width: float, labels: Sequence[str], alt: str, more: float = 0.0) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, tall enough for its legend below and for `more` inches of tick labels."""
    columns = across(width, labels)
    lines = [label.count("\n") + 1 for label in folded(width, labels)]
    rows = sum(max(lines[i::rows]) for rows in [-(-len(lines) // columns)] for i in range(rows))  # matplotlib fills column by column
    figure = Figure(figsize=(width, HEIGHT + 0.19 * rows + more), layout="constrained")
    figure.set_label(alt)
    axes = figure.add_subplot()
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    return figure, axes


def across(width: float, labels: Sequence[str]) -> int:
    """Return how many legend entries fit side by side. Averages always count, so that figures in a row get the same height."""
    longest = max((len(label.partition("\u2003")[0]) + len("95.83 ± 0.21") for label in labels), default=1)
    return min(max(1, int((72 * width - 20) / (LETTER * longest + 36))), max(1, len(labels)))


def folded(width: float, labels: Sequence[str]) -> list[str]:
    """Return the labels with line breaks where one is wider than the figure: after a sign, if there is one."""
    most = max(10, int((72 * width - 56) / LETTER))
    return [label if len(label) <= most else _fold(label, most) for label in labels]


def _fold(label: str, most: int) -> str:
    """Break a label into lines of at most `most` characters, at spaces, else after "," or "+"."""
    lines = [""]
    for piece in re.findall(r"[^ ,+]*[ ,+]?", label):
        if len(lines[-1]) + len(piece.rstrip()) > most and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1]) > most + 1:  # one word that is wider than the figure
            lines[-1:] = [lines[-1][:most], lines[-1][most:]]
    return "\n".join(line.strip(" ") for line in lines)


def legend(figure: Figure, axes: Axes, labels: Sequence[str]) -> None:
    """Put the legend below the axes."""
    if labels:
        width = figure.get_figwidth()
        handles, texts = axes.get_legend_handles_labels()
        look: Any = {"loc": "outside lower center", "columnspacing": 1.4, "handlelength": 1.6}
        figure.legend(handles, folded(width, texts), ncols=across(width, labels), **look)


def name_ticks(axes: Axes, names: Sequence[str], *, width: float) -> None:
    """Write the names of the tasks 1, 2, … under the axes: level if they fit into `width` inches, else slanted."""
    slanted = is_slanted(names, width)
    steep = len(names) > FLAT
    look: dict[str, Any] = {"rotation": 60 if steep else 38, "fontsize": 7 if steep else 8, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(1, len(names) + 1), [shorten(name) for name in names], **(look if slanted else {}))


def is_slanted(names: Sequence[str], width: float) -> bool:
    """Return True if the names are too long to be level."""
    return max((len(shorten(name)) for name in names), default=0) * LETTER * len(names) > 72 * (width - 0.9)


def ticks_height(names: Sequence[str], width: float) -> float:
    """Return the inches that slanted names need beyond those of a level line."""
    letter = 0.055 if len(names) > FLAT else 0.045
    return letter * max(len(shorten(name)) for name in names) if is_slanted(names, width) else 0.0


def shorten(name: str, most: int = 22) -> str:
    """Return the name, or its beginning with "…" if it is longer than `most` characters."""
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"


def floor(values: Sequence[float]) -> float:
    """Return where the axis starts: a round number about a third of the spread below the lowest value; 0 if that is below 30."""
    low, high = min(values, default=0.0), max(values, default=100.0)
    step = 10 if high - low > 10 else 5
    start = step * np.floor((low - max((high - low) / 3, 1)) / step)
    return float(start) if start >= 30 else 0.0


def limit_accuracy(axes: Axes, low: float, top: float) -> None:
    """Let an axis of accuracies in percent go from `low` to `top`, but not above 100, with ticks at round numbers."""
    top = min(top, 100.0)
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10], integer=True).tick_values(low, top)
    axes.set_yticks([tick for tick in ticks if low <= tick <= top])
    axes.set_ylim(low, top)


def end_at_100(axes: Axes, direction: Literal["x", "y"] = "y") -> None:
    """Cut an axis of percentages at 100, if its margin goes beyond. Draw markers with `clip_on=False`: those at 100 stay whole."""
    low, high = axes.get_xlim() if direction == "x" else axes.get_ylim()
    (axes.set_xlim if direction == "x" else axes.set_ylim)(low, min(high, 100.0))
