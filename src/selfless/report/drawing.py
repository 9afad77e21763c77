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
from matplotlib.figure import Figure

from selfless.report.groups import Group

INK = "#2f3742"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8F98")
MARKERS = "osD^vPX"
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


def looks(found: Sequence[Group]) -> list[Look]:
    n = len(COLOURS)
    return [Look(COLOURS[i % n], MARKERS[(i + i // n) % n], i >= n) for i in range(len(found))]


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Our settings and the defaults for the rest, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def save_png(figure: Figure, path: Path | str, dpi: int = 200) -> Path:
    """On white, so that it reads wherever it is shown."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _drawing():
        figure.savefig(path, format="png", dpi=dpi, facecolor="white")
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
