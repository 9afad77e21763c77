"""The numbers of the documentation are the recorded ones."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from selfless.bench.sequence import LIMITS, SIXTY
from selfless.functional.scale import TARGET
from tests.pages import PAGES, RECORDED, ROOT, load, page_name, read

# ------------------------------------------------------------------------------------------------------- numbers: experiments

SPREAD = r"\d+\.\d+ ± \d+\.\d+"
INTERVAL = r"[+−]\d+\.\d+ \[[+−]\d+\.\d+, [+−]\d+\.\d+\]"


def block(page: str, name: str) -> str:
    """The text of a page between `<!-- name -->` and `<!-- /name -->`."""
    found = re.search(rf"^<!-- {name} -->\n(.*?)\n<!-- /{name} -->$", read(page), re.S | re.M)
    assert found, f"{page} has no block {name}"
    return found.group(1)


def number(x: float, digits: int = 2) -> str:
    return f"{x:.{digits}f}".replace("-", "−")


def records(profile: str) -> list[Any]:
    return [load(path) for path in sorted((RECORDED / "experiments").glob(f"*-{profile}.json"))]


@pytest.mark.slow
def test_tables_are_those_of_the_recorded_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `make tables` after every change of the records or of the report."""
    from typer.testing import CliRunner

    from selfless.cli import app, report
    from selfless.report import experiments
    from selfless.runner.store import Store

    results, found = Store(RECORDED).all(), experiments.load(RECORDED)  # read once for the three forms
    monkeypatch.setattr(Store, "all", lambda self, skip=False: results)
    monkeypatch.setattr(experiments, "load", lambda folder: found)
    today = {(record["name"], record["profile"]): report.declared_today(record) for record in found}
    monkeypatch.setattr(report, "declared_today", lambda record: today[record["name"], record["profile"]])
    for form, suffix in (("md", "md"), ("csv", "csv"), ("latex", "tex")):
        made = CliRunner().invoke(app, ["report", str(RECORDED), "--format", form])
        assert made.stdout == read(RECORDED / f"tables.{suffix}"), f"run make tables: tables.{suffix} is old"


def test_results_page_is_the_generated_one() -> None:
    """Run `make tables` after every change of the records or of the page's template."""
    from selfless.report.records import load as load_records
    from selfless.report.results import relative_to, results_page, second_runs

    folders = [folder for folder in (RECORDED, RECORDED.parent / "equal") if folder.is_dir()]
    found = relative_to([record for folder in folders for record in load_records(folder)], ROOT)
    assert read("docs/results.md") == results_page(found, second_runs(re.findall(r"\w+=results/\S+", read("Makefile")), ROOT))


def test_times_of_experiments_are_the_recorded_ones() -> None:
    rows = {f"| `{r['name']}` | {r['about']['runs']} | {r['about']['seconds']:.0f} s |" for r in records("ours")}
    assert rows == set(re.findall(r"^\| `[\w-]+` \| \d+ \| \d+ s \|$", read("docs/experiments.md"), re.M))


def rivals() -> dict[tuple[str, str], Any]:
    return {(cell["row"], cell["column"]): cell for cell in load(RECORDED / "experiments/rivals-ours.json")["cells"]}


def test_table_of_methods_is_the_recorded_one() -> None:
    cells = rivals()
    for table, data in (("rivals-mnist", "pMNIST 128"), ("rivals-cifar", "CIFAR 256")):
        rows = block("docs/choosing.md", table).splitlines()[2:]
        columns = [f"{data}{lost}{term}" for term in ("", " + SLNID") for lost in ("", " lost")]
        assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in dict.fromkeys(name for name, _ in cells)]
        for row in rows:
            name, *values = row.strip("| ").split(" | ")
            for column, value in zip(columns, values, strict=False):
                cell = cells.get((name, column))
                assert value.strip() == (f"{number(cell['mean'])} ± {number(cell['std'])}" if cell else ""), (name, column)


def test_strengths_of_methods_are_the_chosen_ones() -> None:
    cells = rivals()
    for row in block("docs/strengths.md", "strengths").splitlines()[2:]:
        name, *values = row.strip("| ").split(" | ")
        columns = ("pMNIST 128", "pMNIST 128 + SLNID", "CIFAR 256", "CIFAR 256 + SLNID")
        assert [value.replace("`", "") for value in values] == [cells[name, column]["method"] for column in columns]


def test_gaps_of_the_rules_of_tune_are_the_recorded_ones() -> None:
    gaps = load("results/trials/tune/rules.json")["mean_gap"]
    rows = [row.strip("| ").split(" | ")[1:] for row in block("docs/strengths.md", "tune-rules").splitlines()[2:]]
    assert rows == [[f"{gaps[f'{rule}, {seen} tasks']:.2f}" for seen in (2, 3)] for rule in ("largest", "best", "smallest")]


def test_auto_beside_tuned_strengths_are_the_recorded_ones() -> None:
    rows = [
        [cell.strip(" `") for cell in row.strip("| ").split(" | ")] for row in block("docs/strengths.md", "five-networks").splitlines()[2:]
    ]
    for row, one in zip(rows, load("results/trials/auto/h200.json")["networks"], strict=True):
        tuned, auto = one["tuned"], [run for run in one["auto"] if run["target"] == TARGET]
        gaps = [a["test"] - b["test"] for a, b in zip(auto, tuned, strict=True)]
        means = [f"{statistics.mean(run['test'] for run in runs):.1f}" for runs in (tuned, auto)]
        gap = f"{statistics.mean(gaps):+.1f} ({statistics.stdev(gaps) / len(gaps) ** 0.5:.1f})".replace("-", "−")
        measured = [statistics.median(run["strengths"][kind] for run in auto) for kind in ("mas", "slnid")]
        pairs = ["mas:{:g}, slnid:{:g}".format(*one["chosen"]), "mas:{:.2g}, slnid:{:.2g}".format(*measured)]
        assert row == [one["network"], *means, gap, *pairs]


def test_shares_of_injected_gradients_are_the_recorded_ones() -> None:
    record, page = load("results/bench/neoverse/eager-penalty.json"), read("docs/performance.md")
    for row in record["after"]:
        assert f"| {row['n']} | {100 * row['share']:.0f} % | {100 * row['injected']:.0f} % |" in page


def test_the_start_of_a_command_is_the_recorded_one() -> None:
    record, page = load("results/bench/neoverse/start.json"), " ".join(read("docs/performance.md").split())
    now, before, plain = (f"{statistics.median(record[name]):.2f} s" for name in ("help", "help_before", "import"))
    assert f"`selfless --help` takes {now} on" in page
    assert f"it took {before} before" in page
    assert f"`import selfless` takes {plain};" in page


def test_how_many_methods_inhibition_helps_is_the_recorded_number() -> None:
    claims, page = read("results/reproduction/claims.md"), " ".join(read("docs/choosing.md").split())
    found = {}
    for column in ("pMNIST 128", "CIFAR 256"):
        rows = [row for row in claims.splitlines() if row.startswith(f"| {column}: leaving room helps")]
        ends = [[float(end.replace("−", "-")) for end in re.findall(r"\[([+−][\d.]+), ([+−][\d.]+)\]", row)[0]] for row in rows]
        holds = sum("| holds |" in row for row in rows)
        found[column] = len(rows), sum(low > 0 for low, _ in ends), holds, sum(high < 0 for _, high in ends)
    methods, above, holds, _ = found["pMNIST 128"]
    assert f"On permuted MNIST SLNID helps {above} of the {methods} rows: the interval of the difference is above 0." in page
    assert f"If Holm's method corrects for all claims of the experiment, {holds} are left." in page
    _, above, holds, below = found["CIFAR 256"]
    assert above == holds
    assert f"On CIFAR-100 it helps {above}, by seven to nine points, also after the correction." in page
    assert f"It lowers the accuracy of {below} others (each tested alone)." in page


def lambda_grid() -> set[str]:
    """mean ± standard deviation of every setting of the trial."""
    rows = load("results/trials/lambda-grid.json")["rows"]
    settings = {(row["preserve"], row["sparsify"]) for row in rows}
    averages = [[100 * row["average"] for row in rows if (row["preserve"], row["sparsify"]) == setting] for setting in settings]
    return {f"{number(statistics.mean(a))} ± {number(statistics.stdev(a))}" for a in averages}


def growth_over_fifty_tasks() -> set[str]:
    """The growth of time and memory in percent per task, with its interval, as the lab notes on capacity have it."""
    found = json.loads(read("results/trials/capacity/fifty.json")).values()
    parts = [part for one in found for part in one["growth"].values()]
    return {f"{part['percent_per_task']:+.2f} ± {part['interval']:.2f}".replace("-", "−") for part in parts}


def rows_of_the_recommendation() -> set[str]:
    """The averages of measured.json, which tests/recommendation/test_table.py compares with the records."""
    found = json.loads(read("src/selfless/recommendation/measured.json"))
    return {f"{row['average']:.2f} ± {row['std']:.2f}" for row in [*found["rows"], *found["joint"]] if row["std"] is not None}


def records_outside_the_paper() -> set[str]:
    """mean ± standard deviation of every cell of the studies that `benchmarks/beyond.py` trains."""
    found = [
        load(path) for name in ("beyond", "wide", "rivals-projection") for path in RECORDED.parent.glob(f"*/experiments/{name}-ours.json")
    ]
    cells = [cell for record in found for cell in record["cells"] if cell["mean"] is not None and cell["std"] is not None]
    return {f"{number(cell['mean'])} ± {number(cell['std'])}" for cell in cells}


def sums_of_methods() -> set[str]:
    """Of each row of compositions.json: mean ± standard deviation, and the paired difference to the first row with its 95 % t interval."""
    first, *others = (row["accuracy"] for row in load("results/trials/compositions/compositions.json")["rows"])
    found = {f"{number(statistics.mean(row))} ± {number(statistics.stdev(row))}" for row in (first, *others)}
    for row in others:
        gaps = [a - b for a, b in zip(row, first, strict=True)]
        middle, half = statistics.mean(gaps), 2.776445 * statistics.stdev(gaps) / len(gaps) ** 0.5  # t of 4 degrees of freedom
        found.add(f"{middle:+.2f} [{middle - half:+.2f}, {middle + half:+.2f}]".replace("-", "−"))
    return found


OLD_RECORDS = {"64.40 ± 0.35", "+0.83 [+0.33, +1.23]"}  # of records that are in the history of the repository


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "performance.md"], ids=page_name)
def test_values_with_a_spread_are_the_recorded_ones(page: Path) -> None:
    """Every "a ± b" and every "+a [+b, +c]" is in a file made from the records."""
    known = read(RECORDED / "tables.md") + read("results/again/against.md") + " ".join(lambda_grid() | OLD_RECORDS)
    known += "".join(read(path) for path in sorted((RECORDED.parent / "equal").glob("*.md")))
    known += read("results/trials/replay/table.md") + " ".join(
        growth_over_fifty_tasks() | rows_of_the_recommendation() | records_outside_the_paper() | sums_of_methods()
    )
    assert [value for value in re.findall(f"{SPREAD}|{INTERVAL}", read(page)) if value not in known] == []


@pytest.mark.slow
def test_every_reported_run_is_there_and_gives_the_reported_value() -> None:
    from selfless.runner.store import Store

    results = {result.run.key: result for result in Store(RECORDED).all()}
    reported = set()
    for record in [*records("ours"), *records("paper")]:
        for cell in record["cells"]:
            for run in cell["runs"]:
                reported.add(run["key"])
                if run["value"] is None:
                    assert results[run["key"]].status == "failed"
                elif cell["value"] == "average":
                    assert 100 * results[run["key"]].average == pytest.approx(run["value"], abs=1e-9)
    assert reported == results.keys()


# -------------------------------------------------------------------------------------------------------------- numbers: speed


def significant(x: float) -> str:
    """Two decimals below 10, one above."""
    return f"{x:.2f}" if x < 10 else f"{x:.1f}"


def missing(values: list[str]) -> list[str]:
    page = read("docs/performance.md")
    return [value for value in values if value not in page]


def test_speed_on_a_gpu_is_the_recorded_one() -> None:
    gpu, steps = load("results/bench/h200/bench.json"), load("results/bench/h200/steps.json")
    sixty, *cifar = load("results/bench/h200/sequence.json")["sequence"]
    tf32_alone, bf16_alone, tf32, bf16 = (row["seconds_a_run"] for row in cifar)
    aims = [SIXTY, *(LIMITS[members, precision] for members in (1, 8) for precision in ("bf16", "tf32"))]
    found = [sixty["seconds"], bf16_alone, tf32_alone, bf16, tf32]
    assert all(value > aim for value, aim in zip(found, aims, strict=True))  # the page says that these aims are missed
    wanted = [f"≤ {aims[0]:g} s | {found[0]:.2f} s ✗ |"]
    wanted += [f"≤ {aims[k]:g} s / ≤ {aims[k + 1]:g} s | {found[k]:.2f} s ✗ / {found[k + 1]:.2f} s ✗ |" for k in (1, 3)]
    step = load("results/bench/h200/alone.json")["rows"]["mas+slnid none"]["profile"]["kernel_ms"]
    wanted.append(f"take {step:.2f} ms, {12.5 * step:.1f} s of")
    wanted += [re.findall(SPREAD, cifar[3]["says"])[0], re.findall(SPREAD, cifar[2]["says"])[0]]
    wanted.append(f"**{next(r for r in steps['steps'] if r['target'])['times_eager']:.0f}×** ✓")
    wanted.append(f"**{100 * next(r for r in gpu['penalty'] if r['target'])['share']:.1f} %** ✓")
    wanted += [f"| {r['n']:,} | {100 * r['share']:.1f} % |" for r in gpu["penalty"] if r["kind"] == "share"]
    passes = [f"**{r['target']['value']:.2f}×**" for r in steps["importance"]]
    wanted += [f"{passes[0]} / {passes[1]} ✓", f"{passes[2]} / {passes[3]} ✓"]
    assert missing(wanted) == []


def test_speed_on_a_cpu_is_the_recorded_one() -> None:
    cpu = load("results/bench/cpu/bench.json")
    wanted = []
    for n in (128, 512, 2048, 4096, 16384):
        formula, share = (next(r for r in cpu["penalty"] if r["n"] == n and r["kind"] == kind) for kind in ("formula", "share"))
        times = f"{significant(1e3 * formula['seconds'])} ms | {significant(formula['times_dense'])}"
        wanted.append(f"| {n:,} | {times} | {100 * share['share']:.1f} % | {100 * share['share_eager']:.1f} % |")
    exact = [r for r in load("results/bench/cpu/importance.json")["importance"] if "per sample" in r["what"]]
    for mas, ewc in (exact[:2], exact[2:]):
        wanted.append(f"| {mas['of_forward_backward']:.2f}× | {ewc['of_forward_backward']:.2f}× |")
        wanted.append(f"| {mas['times_loop']:.0f}× / {ewc['times_loop']:.0f}× faster |")
    assert missing(wanted) == []


@pytest.mark.parametrize("machine", ["neoverse", "h200"])
def test_growth_of_cost_is_the_recorded_one(machine: str) -> None:
    rows, wanted = [row for row in load(f"results/bench/{machine}/growth.json")["growth"] if row["seconds"] is not None], []
    for axis in dict.fromkeys(row["axis"] for row in rows):
        first, *_, last = (row for row in rows if row["axis"] == axis)
        times = last["seconds"] / first["seconds"]
        grown = f"{times:.0f}×" if times >= 10 else f"{times:.2f}×"
        wanted.append(f"| {first['size']:,} | {last['size']:,} | {grown} | {number(last['exponent'])} |")
    assert missing(wanted) == []


def test_speed_of_convolutions_with_many_channels_is_the_recorded_one() -> None:
    record, page, notes = load("results/bench/h200/vgg-slim.json"), read("docs/performance.md"), read("docs/lab-notes/speed-gpu.md")
    before, after, now = record["before"], record["after"], record["now"]
    assert f"**{now['seconds_a_run']:.1f} s** (aim ≤ 9)" in page
    assert f"It was {before['seconds_a_run']:.1f} s before" in page
    for title, value, unit in [
        ("a step", lambda r: f"{r['step_ms_task_3']:.1f}", " ms"),
        ("kernels a step", lambda r: f"{r['kernels_a_step']:.0f}", ""),
        ("the end of a task", lambda r: f"{min(r['end_of_task_s']):.1f}", " s"),
        ("a run of 10 tasks × 10 epochs", lambda r: f"{r['seconds_a_run']:.1f}", " s"),
    ]:
        assert f"| {title} | {value(before)}{unit} | {value(after)}{unit} | {value(now)}{unit} |" in notes


def test_memory_of_a_keeper_is_the_recorded_one() -> None:
    rows = {row["method"]: f"{row['held']:.2f}" for row in load("results/bench/neoverse/keeper-memory.json")["rows"]}
    found = re.findall(r"^\| (`[\w-]+`(?:, `[\w-]+`)*) \| ([\d.]+) \|$", read("docs/performance.md"), re.M)
    assert {name: held for names, held in found for name in re.findall(r"`([\w-]+)`", names)} == rows
    assert all(float(rows[name]) <= 2.0 for name in ("mas", "ewc"))


def test_speed_without_mkl_is_the_recorded_one() -> None:
    _, mas, ewc = load("results/bench/neoverse/importance.json")["importance"]
    titles = {"MAS per sample": mas, "EWC per sample": ewc}
    assert missing([f"| {title} | {row['of_forward_backward']:.2f}× | ≤ 1.3× ✓ |" for title, row in titles.items()]) == []
    assert max(row["of_forward_backward"] for row in titles.values()) <= 1.3


def test_speed_beside_avalanche_is_the_recorded_one() -> None:
    found = {r["what"].removesuffix(", a task-epoch"): r for r in load("results/bench/peers-cpu/bench.json")["peers"]}
    rows = {
        name: [name] for name in ("Avalanche MAS, its PermutedMNIST", "Avalanche MAS, fed from memory", "selfless MAS + SLNID, one run")
    }
    rows["selfless MAS (exact Ω), one run"] = ["selfless MAS, one run"]
    for kind in ("selfless MAS", "selfless MAS + SLNID", "selfless MAS in bf16"):
        fleet = f"{kind}, a run in a fleet of 8"
        rows[fleet] = [f"{fleet}, one process", f"{fleet}, 2 workers"]
    plain = read("docs/performance.md").replace("**", "")
    for title, names in rows.items():
        best = min((found[name] for name in names), key=lambda r: r["seconds"])
        ratios = f"{best['times_its_permuted_mnist']:.1f} | {best['times_from_memory']:.1f} |"
        assert f"| {title} | {best['seconds']:.2f} | {ratios}" in plain, (title, best["seconds"], ratios)


def test_speed_beside_avalanche_on_a_neoverse_is_the_recorded_one() -> None:
    found = {r["what"].removesuffix(", a task-epoch"): r for r in load("results/bench/neoverse/peers.json")["peers"]}
    names = {"selfless MAS (exact Ω), one run": "selfless MAS, one run"}
    names["selfless MAS, a run in a fleet of 8"] = "selfless MAS, a run in a fleet of 8, 2 workers"
    for title in ("Avalanche MAS, its PermutedMNIST", "Avalanche MAS, fed from memory", *names):
        row = found[names.get(title, title)]
        ratios = f"{row['times_its_permuted_mnist']:.1f} | {row['times_from_memory']:.1f} |"
        assert missing([f"| {title}, Neoverse | {row['seconds']:.2f} | {ratios}"]) == []


def test_rate_of_preparing_images_is_the_recorded_one() -> None:
    best = load("results/bench/prepare-cpu/bench.json")["prepare"][0]
    assert f"{best['seconds']:.1f} s ({best['rate']}, the best of three rounds)" in " ".join(read("docs/data.md").split())
