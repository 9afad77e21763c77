"""The page of results: it needs nothing but itself, escapes what it is given, and its links lead somewhere."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from tests.report.page_reader import Reader
from tests.report.samples import NASTY, PAIR, PLAIN, failed, made, page


@pytest.mark.slow
def test_the_page_needs_nothing_but_itself(tmp_path):
    for result in PAIR[1:]:
        folder = tmp_path / "runs" / result.run.key
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(json.dumps(result.as_dict()))
    text = page(PAIR, tmp_path, out=tmp_path / "runs")
    reader = Reader(text)
    assert len(reader.ids) == len(set(reader.ids))
    outside = [value for value in reader.links if not value.startswith(("#", "data:,"))]
    assert sorted(outside) == sorted(f"runs/{r.run.key}/metrics.json" for r in PAIR[1:])  # and none that leads nowhere
    assert all((tmp_path / value).exists() for value in outside)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    assert not {"script", "img", "iframe", "object"} & set(reader.tags)
    assert reader.tags.count("svg") == 6  # four figures, two matrices


@pytest.mark.slow
def test_the_same_results_make_the_same_page(tmp_path):
    assert page(PAIR[:1], tmp_path) == page(PAIR[:1], tmp_path)


@pytest.mark.slow
def test_the_page_escapes_what_it_is_given(tmp_path):
    run = dataclasses.replace(PLAIN, stream=NASTY, model=NASTY)
    results = [
        failed(run, 1, NASTY),
        made(dataclasses.replace(run, model="m"), about={"hardware": NASTY, "commit": NASTY, "tasks": [NASTY] * 3, "notes": [NASTY]}),
        made(run),
    ]
    text = page(results, tmp_path, title=NASTY)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert sum(NASTY in part for part in Reader(text).texts) > 8


def test_importing_the_report_loads_neither_torch_nor_matplotlib():
    code = "import sys, selfless.report; sys.exit(bool({'torch', 'matplotlib', 'jinja2'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
