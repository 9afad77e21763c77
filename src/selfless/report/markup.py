"""Small pieces of the HTML page: inline figures, links, counted nouns."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure


def inline(figure: Figure) -> Markup:
    """Return a figure as an <svg> element of the page; matplotlib has escaped its labels."""
    from markupsafe import Markup

    from selfless.report.drawing import svg

    return Markup(svg(figure).replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def breakable(label: str) -> Markup:
    """Return a label that may break after a comma or a plus sign, besides at spaces."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([,+])(?=\S)", r"\1<wbr>", str(escape(label))))


def inches(figure: Figure) -> float:
    """Return the width of a figure."""
    return float(figure.get_figwidth())


def link(file: Path | None, here: Path) -> str:
    """Return the address of a file relative to the folder of the page; an empty string if there is no file."""
    return quote(Path(os.path.relpath(file, here)).as_posix()) if file is not None else ""


def counted(n: int, noun: str) -> str:
    """Return "1 task", "5 tasks"."""
    return f"{n} {noun}{'s' * (n != 1)}"
