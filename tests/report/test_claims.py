"""All claims in one table, and the values of each experiment in a small one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless import Run
from selfless.cli.app import app
from selfless.experiments.base import Claim, at_least, at_most
from selfless.experiments.reproduce import reproduce
from selfless.report.claims import claims_table, decisive, values_tables
from selfless.report.families import correct
from selfless.report.records import Record, load
from selfless.runner import Store
from tests.fabricated import A, B, result, score, small, trainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    """Both profiles of one experiment; in `paper` its second claim does not fail."""
    claims = (*small().claims, Claim("several at once", (at_least(A, B, 1), at_most(A, B, 60), at_least(A, B, 2))))
    reproduce(dataclasses.replace(small(), claims=claims), seeds=3, out=tmp_path, train=trainer(score))
    eased = (claims[0], dataclasses.replace(claims[1], parts=(at_least(A, B, -50),)), *claims[2:])
    reproduce(dataclasses.replace(small(profile="paper"), claims=eased), seeds=3, out=tmp_path, train=trainer(score))
    reproduce(dataclasses.replace(small(quick=True), claims=claims), seeds=1, out=tmp_path, train=trainer(score))
    return correct(load(tmp_path))


def test_every_claim_is_one_row_with_both_profiles(records: list[Record]) -> None:
    rows = [line.split(" | ") for line in claims_table(records).splitlines() if line.startswith("| ")]
    head, _, *body = rows
    assert [cell.strip("| ") for cell in head] == ["claim", "where", "published", "`ours`", "`paper`", "verdict", "what would change it"]
    found = {row[0].strip("| "): [cell.strip(" |") for cell in row[1:]] for row in body}
    assert list(found) == ["SLNID is ahead", "SLNID is far ahead", "SLNID is not ahead", "later is ahead", "several at once"]
    where, published, ours, paper, verdict, change = found["SLNID is ahead"]
    assert (where, published, verdict) == ("figure 2 (`fig-2`)", "+3.16", "holds")
    assert ours.startswith("✓ +")
    assert paper.startswith("✓ +")
    assert change.startswith("`ours`: a margin above +")
    assert found["SLNID is far ahead"][-2] == "`ours`: fails, `paper`: holds"
    assert found["later is ahead"][1:] == ["–", "–", "–", "not tested", ""]
    assert "(SLNID ≥ No-Reg + 2 (MNIST); worst of 3)" in found["several at once"][2]


def test_our_own_claims_have_a_table_of_their_own(records: list[Record]) -> None:
    own = [record | {"source": "not in the paper"} for record in records]
    assert "## Our own claims" not in claims_table(records)
    assert "## Claims of the paper" not in claims_table(own)


def test_the_decisive_comparison_is_the_worst_and_the_closest() -> None:
    def part(verdict: str, low: float | None, high: float | None, relation: str = "≥") -> dict[str, object]:
        return {"verdict": verdict, "low": low, "high": high, "margin": 1.0, "relation": relation}

    close, far, upper = part("holds", 1.1, 3.0), part("holds", 5.0, 6.0), part("holds", -9.0, 0.95, "≤")
    assert decisive({"parts": [far, close]}) is close
    assert decisive({"parts": [far, close, upper]}) is upper
    assert decisive({"parts": [close, part("missing", None, None), (lost := part("fails", -3.0, -2.0))]}) is lost


def test_values_stand_beside_published_ones(records: list[Record]) -> None:
    text = values_tables(records)
    whole = next(record for record in records if not record["quick"])
    cell = next(c for c in whole["cells"] if c["row"] == "SLNID")
    assert f"| SLNID | {cell['mean']:.2f} ± {cell['std']:.2f} (published 95.83) |" in text
    assert "| later | – (published 50.00) |" in text
    assert text.count("## fig-2, ") == 2  # no quick version


@pytest.mark.slow
def test_the_recorded_tables_are_up_to_date() -> None:
    """`make tables` after every change of the records or of how they are shown."""
    found = correct(load(ROOT / "results/reproduction"))
    assert (ROOT / "results/reproduction/claims.md").read_text(encoding="utf-8") == claims_table(found)
    assert (ROOT / "results/reproduction/values.md").read_text(encoding="utf-8") == values_tables(found)


@pytest.mark.slow
def test_the_command_prints_them(tmp_path: Path) -> None:
    runner, again = CliRunner(), str(ROOT / "results/again")
    assert "## Claims of the paper" in runner.invoke(app, ["report", again, "--format", "claims"]).stdout
    assert runner.invoke(app, ["report", again, "--format", "values"]).stdout == values_tables(correct(load(Path(again))))
    Store(tmp_path).record(result(Run(), 0.5), dict)  # a run, and no experiment
    refused = runner.invoke(app, ["report", str(tmp_path), "--format", "claims"])
    assert refused.exit_code == 1
    assert "holds no record of an experiment. Make one: selfless reproduce" in refused.output.replace("\n", " ")
