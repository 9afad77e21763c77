"""The generated results page: claims first, one profile leads, nothing is ticked by another profile's number."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from selfless.experiments.fig_2 import fig_2
from selfless.experiments.fig_3 import fig_3a
from selfless.experiments.fig_4 import fig_4_bottom
from selfless.experiments.table_3 import table_3
from selfless.report.claims import claim_rows, profiles_of
from selfless.report.families import correct
from selfless.report.quotes import WORDS
from selfless.report.records import Record, load
from selfless.report.results import main, relative_to, results_page

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recorded() -> list[Record]:
    return relative_to(load(ROOT / "results/reproduction"), ROOT)


def test_equal_chances_lead_once_they_are_recorded(recorded: list[Record]) -> None:
    """The record of figure 2 as if it were made with equal chances: its column comes first and decides; other experiments keep theirs."""
    equal = [record | {"profile": "equal"} for record in recorded if (record["name"], record["profile"]) == ("fig-2", "paper")]
    assert profiles_of(recorded) == ["ours", "paper"]
    assert profiles_of([*recorded, *equal]) == ["equal", "ours", "paper"]
    assert profiles_of(equal) == ["equal"]  # no empty columns
    assert profiles_of([]) == ["ours"]
    rows = {(row.name, row.text): row for row in claim_rows([*recorded, *equal])}
    lead = rows["fig-2", "SLNID is best on the last two tasks"]
    assert (lead.leading_profile, lead.verdict) == ("equal", "holds")
    assert lead.shown["equal"] == lead.shown["paper"] != lead.shown["ours"]
    assert rows["fig-3a", "DeCov improves over No-Reg"].leading_profile == "ours"
    page = results_page([*recorded, *equal])
    head = next(line for line in page.splitlines() if line.startswith("| claim |"))
    assert head == "| claim | the paper's words | where | published | `equal` | `ours` | `paper` | verdict | what would change it |"
    assert "Shown is [`equal`]" in page.replace("\n", " ")
    assert "`equal` and `ours`" in page  # figure 2's table has 128 units in one profile and 64 in the other, and says so


def test_the_page_is_in_its_order_and_names_its_profile(recorded: list[Record]) -> None:
    page = results_page(recorded)
    assert re.findall(r"^## (.*)$", page, re.M) == [
        "The claims", "Figure by figure", "What we changed, and why", "What does not hold, in our hands",
    ]  # fmt: skip
    assert "**Profile shown:** `ours`" in page
    prose = [line for line in page.splitlines() if not line.startswith("|")]
    assert not [line for line in prose if "✓" in line and "✓ holds" not in line]
    rows = [row for row in claim_rows(correct(recorded)) if not row.ours]
    failing = page[page.index("## What does not hold") :]
    assert all(f"| {row.text} |" in failing for row in rows if row.verdict == "fails" and not row.leading.get("repeats"))
    undecided = [line for line in page.splitlines() if re.search(r"\| undecided: (correction|margin|noise) \| [^|]+ \|$", line)]
    counted = [row for row in rows if row.verdict == "undecided" and not row.leading.get("repeats")]
    alone = [row for row in counted if row.leading["alone"] != "undecided"]
    assert len(undecided) == len(counted)
    is_ = "is" if len(alone) == 1 else "are"
    said = f"Of the {len(counted)} undecided claims, {len(alone)} {is_} decided alone but not after the correction,"
    assert said in page.replace("\n", " ")


def test_the_page_is_made_of_every_experiment_in_profile_equal(recorded: list[Record]) -> None:
    """Records of all experiments as if they were made with equal chances, judged twice: no row of another profile is needed."""
    looks = {"fig-2": [5, 10, 60], "fig-2-64": [5, 10, 60]}
    ours = [record for record in recorded if record["profile"] == "ours"]
    equal = [record | {"profile": "equal", "looks": looks.get(record["name"], [5, 10])} for record in ours]
    narrow = [record | {"cells": [c for c in record["cells"] if "all layers" not in c["row"]]} for record in equal]
    rates = next(record for record in narrow if record["name"] == "table-1")
    page = results_page([*recorded, *narrow, rates | {"name": "rates"}], {"equal": ("12 of 12 verdicts are the same", "x.md")})
    assert "] (`ours`) to SLNID" in page  # the all-layers row is in `ours` alone, and the sentence says so
    assert "**Rate and schedule chosen too**" in page
    said = page.replace("\n", " ")
    assert "[Where seeds were added](experiments.md#what-is-recorded-with-equal), p-values are multiplied" in said
    assert "**[Other seeds](../x.md)**, `equal`: 12 of 12 verdicts are the same." in said
    assert "Grids are unequal in `ours`" in page  # whose column is shown whatever leads
    assert len(page.splitlines()) <= 180


def test_the_program_prints_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    same = "5 of 6 verdicts are the same (of the paper's claims 4 of 4), 1 opposite."
    said = f"# A\n\n2 experiments in both. 3 of 4 verdicts are the same.\n\n# B\n\n{same}\n"
    (tmp_path / "against.md").write_text(said)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        sys, "argv", ["results", "results/reproduction", str(tmp_path / "none"), "--again", f"ours={tmp_path / 'against.md'}"]
    )
    main()
    told = "2 experiments, 3 of 4 verdicts are the same; " + same
    assert f"against.md)**, `ours`: {told}" in capsys.readouterr().out.replace("\n", " ")
    monkeypatch.setattr(sys, "argv", ["results", "results/reproduction", "--again", str(tmp_path / "against.md")])
    with pytest.raises(SystemExit):
        main()
    assert "--again takes PROFILE=FILE" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["results", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"holds no record of an experiment. Make one: selfless reproduce fig-2 --out"):
        main()


def test_quotes_are_of_claims(recorded: list[Record]) -> None:
    """Every quotation belongs to a claim that is recorded, or that only profile `equal` makes."""
    new = {claim.text for make in (fig_2, fig_3a, fig_4_bottom, table_3) for claim in make("equal").claims}
    assert WORDS.keys() <= {row.text for row in claim_rows(recorded)} | new
