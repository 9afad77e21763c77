"""How figures look, and how they are saved: colour-blind safe, legible on dark and on light, the same bytes for the same numbers.

Colours are Okabe and Ito's; marker and hatch repeat what colour says. Text and axes are drawn in INK, which `svg` turns into
currentColor, so that a page's own colour scheme decides; `save_png` puts them on white.
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
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#2f3742"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8F98")
MARKERS = "osD^vPX"
WIDTH, HEIGHT = 5.2, 3.0  # inches; at most what a phone shows without shrinking the type
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
    "svg.fonttype": "none",  # real text: small, searchable, in the page's own font
    "svg.hashsalt": "selfless",
}


class Look(NamedTuple):
    """How one group is drawn, in every figure the same."""

    colour: str
    marker: str
    again: bool  # the colours went round: hatched, dashed


def looks(found: Sequence[Any]) -> list[Look]:
    n = len(COLOURS)
    return [Look(COLOURS[i % n], MARKERS[(i + i // n) % n], i >= n) for i in range(len(found))]


# The paper's rows look the same in every figure: colour, and a hatch for regularizers of parameters and for activation functions.
ROWS = {"SLNID": 0, "No-Reg": 6, "DeCov": 1, "L1-Rep": 2, "Maxout": 3, "LWTA": 4, "OrthReg": 5, "L2-WD": 1, "L1-Param": 2}
PARAMETERS, FUNCTIONS = ("OrthReg", "L2-WD", "L1-Param"), ("Maxout", "LWTA")


def looks_of(rows: Sequence[str]) -> list[Look]:
    """The paper's look for a row of the paper, the colours that are left for others; in turn for all, where two would look alike."""
    fixed = [(COLOURS[ROWS[row]], row in PARAMETERS) if row in ROWS else None for row in rows]
    known = [look for look in fixed if look]
    left = [colour for colour in (*COLOURS[3:], *COLOURS[:3]) if colour not in dict(known)]  # those of the rarer rows first
    if not known or len(set(known)) < len(known) or len(left) < len(rows) - len(known):
        return looks(rows)
    rest = iter(left)
    drawn = [look or (next(rest), False) for look in fixed]
    return [Look(colour, MARKERS[i % len(MARKERS)], again) for i, (colour, again) in enumerate(drawn)]


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Our settings and the defaults for the rest, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def save_png(figure: Figure, path: Path | str, dpi: int = 200) -> Path:
    """On white, so that it reads wherever it is shown."""
    return _save(figure, path, format="png", dpi=dpi)


def save_pdf(figure: Figure, path: Path | str) -> Path:
    """For a paper; the same bytes for the same figure."""
    return _save(figure, path, format="pdf", metadata={"CreationDate": None})


def _save(figure: Figure, path: Path | str, **how: Any) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _drawing():
        figure.savefig(path, facecolor="white", **how)
    return path


def svg(figure: Figure) -> str:
    """The figure as one <svg> element, the same text for the same figure: no background, ink in currentColor, ids of its own."""
    file = io.StringIO()
    with _drawing():
        figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="none")
    text = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :].replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    text = re.sub(r"(?<=px )'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text).replace(INK, "currentColor")
    own = hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{own}-", text)
    alt = html.escape(str(figure.get_label()))
    return text.replace("<svg", f'<svg role="img" aria-label="{alt}" color="#78808c"', 1).strip()


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    with style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the reader's font may well have it
        yield


def panel(width: float, labels: Sequence[str], alt: str) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, tall enough for its legend below."""
    rows = -(-len(labels) // across(width, labels))
    figure = Figure(figsize=(width, HEIGHT + 0.19 * rows), layout="constrained")
    figure.set_label(alt)
    axes = figure.add_subplot()
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    return figure, axes


def across(width: float, labels: Sequence[str]) -> int:
    """How many legend entries fit side by side: averages included or not, so that figures side by side are of one height."""
    longest = max((len(label.partition("\u2003")[0]) + len("95.83 ± 0.21") for label in labels), default=1)
    return min(max(1, int((72 * width - 20) / (5.7 * longest + 36))), max(1, len(labels)))


def legend(figure: Figure, axes: Axes, labels: Sequence[str]) -> None:
    if labels:
        columns = across(figure.get_figwidth(), labels)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, columnspacing=1.4, handlelength=1.6)


def floor(values: Sequence[float]) -> float:
    """Where the axis starts: a round number a third of the spread below the lowest value; 0 when that is near."""
    low, high = min(values, default=0.0), max(values, default=100.0)
    step = 10 if high - low > 10 else 5
    start = step * np.floor((low - max((high - low) / 3, 1)) / step)
    return float(start) if start >= 30 else 0.0
