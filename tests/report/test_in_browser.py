"""The page in a real browser, as wide as a phone and as a desktop: nothing wider than the window, nothing flat, no console messages.

Needs Chromium (Debian: chromium); skipped where there is none.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from selfless.report import experiments as reporting
from selfless.report import write
from selfless.runner import Store
from tests.report.samples import PLAIN, failed, made
from tests.report.test_places import FOLDER

ROOT = Path(__file__).resolve().parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (390, 1280)
# Frames of both widths around the page: what is wider than its frame (scrolling boxes may be), and what is drawn without a height.
LOOK = """<!doctype html><meta charset="utf-8"><body><script>
const found = {};
for (const width of WIDTHS) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
  frame.onload = () => {
    const page = frame.contentDocument, room = page.documentElement.clientWidth, box = e => e.getBoundingClientRect();
    const all = [...page.querySelectorAll("body *")];
    found[width] = {
      scrolls: page.documentElement.scrollWidth > room,
      wide: all.filter(e => box(e).right > room + 1 && !e.closest(".box, figure, svg")).map(e => e.outerHTML.slice(0, 60)),
      flat: all.filter(e => e.matches("svg, table") && box(e).height < 10 && !e.closest("details:not([open])")).length,
      sections: page.querySelectorAll("section.experiment").length,
    };
    if (Object.keys(found).length === WIDTHS.length) document.body.textContent = JSON.stringify(found);
  };
  frame.src = "page.html";
  document.body.appendChild(frame);
}
</script></body>"""

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed (Debian: apt install chromium)"),
]


def inspect(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what was found at each width in folder/page.html, and the messages on the console."""
    (folder / "look.html").write_text(LOOK.replace("of WIDTHS", f"of {list(WIDTHS)}").replace("WIDTHS.length", str(len(WIDTHS))))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr", "--dump-dom"]
    command = [
        str(BROWSER),
        *options,
        "--virtual-time-budget=20000",
        f"--user-data-dir={folder / 'profile'}",
        (folder / "look.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    body = re.search(r"<body>(\{.*\})</body>", done.stdout, re.DOTALL)
    assert body, done.stdout[-500:]
    return json.loads(body[1]), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_recorded_reproduction_fits_a_phone_and_a_desk(tmp_path: Path) -> None:
    records = [reporting.marked(record) for record in reporting.load(ROOT / "results/reproduction") if record["profile"] == "ours"]
    write([], tmp_path / "page.html", experiments=records)
    found, messages = inspect(tmp_path)
    assert found == {str(width): {"scrolls": False, "wide": [], "flat": 0, "sections": len(records)} for width in WIDTHS}
    assert messages == []


def test_a_page_of_runs_does_too(tmp_path: Path) -> None:
    results = [result for result in Store(ROOT / "results/reproduction").all() if result.run.stream == "permuted-mnist"][:4]
    results += FOLDER  # several streams and networks, trials, tasks with names
    write(results, tmp_path / "page.html")
    found, messages = inspect(tmp_path)
    assert all((at["scrolls"], at["wide"], at["flat"]) == (False, [], 0) for at in found.values())
    assert messages == []


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """Names that try to run a script or load something are shown as they are; the policy is not even asked."""
    marks = ["<script>top.hit=1</script>", "<img src=x onerror=top.hit=1>", '"><svg onload=top.hit=1>', "javascript:top.hit=1", "</style>"]
    run = dataclasses.replace(PLAIN, model="mine.nets:build")
    about = {"seconds": 1.0, "tasks": marks[:3], "notes": marks, "hardware": marks[1], "commit": marks[2]}
    page = write([made(run, about=about), failed(run, 1, error=" ".join(marks))], tmp_path / "page.html")
    assert "default-src 'none'" in page.read_text(encoding="utf-8")
    found, messages = inspect(tmp_path)
    assert messages == []
    assert all(not at["scrolls"] for at in found.values())
    assert not re.search(r"<(script|img src=x|svg onload)", page.read_text(encoding="utf-8"))


def test_what_is_too_wide_or_flat_or_refused_would_be_seen(tmp_path: Path) -> None:
    records = [reporting.marked(record) for record in reporting.load(ROOT / "results/reproduction")[:1]]
    page = write([], tmp_path / "page.html", experiments=records)
    broken = '<p style="width: 600px">wide</p><svg style="height: 0"></svg><script>alert(1)</script></body>'
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", broken), encoding="utf-8")
    found, messages = inspect(tmp_path)
    assert found["390"]["scrolls"]
    assert "600px" in found["390"]["wide"][0]
    assert found["1280"]["flat"] == 1
    assert messages
