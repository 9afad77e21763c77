"""`python -m tests.mutants`: put faults into the code, one at a time, and count those that the tests find.

python -m tests.mutants --plan-only                         # write build/mutants/plan.json, the list of all faults (needs mutmut)
python -m tests.mutants --workers 2 --seconds 3600          # as many of them as fit, in random order; again to continue
python -m tests.mutants --again survived --slow             # those that no test found, once more, with the slow tests alone
python -m tests.mutants --summary results/reliability/mutants.json      # the table of docs/lab-notes/testing.md, from the record
"""

from __future__ import annotations

import argparse
import ast
import compileall
import functools
import importlib
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.mutants.cover import cover
from tests.mutants.rooms import FILES, TESTS
from tests.mutants.running import Job, run_jobs, run_tests

ROOT = Path(__file__).resolve().parents[2]
CONTROL = 40  # one job in so many changes nothing: a test that fails there would have counted a fault as found
MOST = 30.0  # seconds of tests for a fault, by the time they took without it


def main() -> int:
    given = _arguments()
    out = Path(given.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not given.plan.exists() or given.plan_only:
        from tests.mutants.plan import faults

        given.plan.write_text(json.dumps(faults(ROOT / "src", FILES)), encoding="utf-8")
    faults_ = json.loads(given.plan.read_text(encoding="utf-8"))
    if given.plan_only:
        print(f"{len(faults_)} faults")
        return 0
    record = given.record or out / "mutants.json"
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {"faults": [], "controls": {"tried": 0, "failed": []}}
    if given.summary:
        summarise(given.summary, faults_, before)
        return 0
    end = time.monotonic() + given.seconds
    for folder in ("src", "tests"):
        compileall.compile_dir(ROOT / folder, quiet=2, workers=given.workers)
    import_much()
    place = out / "work"
    kept = out / "tests.json"
    tests = _covered(out / "slow-tests.json" if given.slow else kept, place, given, end)
    fast = set(json.loads(kept.read_text(encoding="utf-8"))["seconds"]) if given.slow and given.again and kept.exists() else set()
    results = {one["id"]: one for one in before["faults"]}
    wanted = [f for f in faults_ if f["id"] in given.only] if given.only else faults_
    wanted = [f for f in wanted if not given.room or f["file"].startswith(tuple(given.room))]
    if given.again:
        wanted = [f for f in wanted if results.get(f["id"], {}).get("status") in given.again]
    else:
        wanted = [f for f in wanted if f["id"] not in results]
    random.Random(given.seed).shuffle(wanted)
    controls, saved = before["controls"], time.monotonic()
    jobs = _jobs(wanted[: given.count], tests, results, MOST * (4 if given.slow else 1), fast)
    by_id = {f["id"]: f for f in wanted}
    for job, found, seconds in run_jobs(jobs, ROOT / "src", place, given.workers, end):
        if job.name == "control":
            controls["tried"] += 1
            if found != {"status": "survived"}:
                controls["failed"].append(found and found.get("by"))
        else:
            late = {"status": "killed", "by": "time limit"} if seconds > job.seconds else {"status": "killed", "by": "process died"}
            results[job.name] = by_id[job.name] | (found or late) | {"seconds": round(seconds, 2)}
        if time.monotonic() - saved > 20:
            _write(record, results, len(faults_), given.seed, controls, tests)
            saved = time.monotonic()
    _write(record, results, len(faults_), given.seed, controls, tests)
    print(_summary(results, len(faults_)))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no fault after so many seconds")
    parser.add_argument("--seed", type=int, default=0, help="the order of the faults")
    parser.add_argument("--count", type=int, default=10**9, help="try at most so many faults")
    parser.add_argument("--out", default="build/mutants", help="the folder of all files")
    parser.add_argument("--record", type=Path, help="the record of the faults; default: mutants.json in --out")
    parser.add_argument("--plan", type=Path, help="the list of faults; default: plan.json in --out, made if it is missing")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--again", action="append", choices=("survived", "no_test"), help="try these once more")
    parser.add_argument("--tests", action="append", help="a file or folder of tests; default: those of the rooms")
    parser.add_argument("--room", action="append", help="the beginning of a path in src, such as selfless/keeper/log")
    parser.add_argument("--only", action="append", help="the id of a fault")
    parser.add_argument("--slow", action="store_true", help="with the slow tests")
    parser.add_argument("--summary", type=Path, help="write the numbers of each room, and what was not found, there; try nothing")
    given = parser.parse_args()
    given.plan = given.plan or Path(given.out, "plan.json")
    return given


def import_much() -> None:
    """Import what the tests import, without the package itself: forks have it already."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before torch is imported: its threads do not survive a fork, and every core has a process
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)
    names = "numpy hypothesis.strategies safetensors.torch typer.testing rich.console PIL.Image torch.func torch.distributed torch._dynamo"
    names += " torch.distributed.fsdp torch.distributed.checkpoint"
    for name in names.split():
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"{name} is not imported in advance: {error!r}"[:200], file=sys.stderr)


def _covered(kept: Path, place: Path, given: argparse.Namespace, end: float) -> dict[str, Any]:
    """Run every file of tests once on the code as it is. What fails here is not used."""
    marked, chosen = "not whole" if given.slow else "not slow and not whole", given.tests or TESTS
    files = sorted({str(p) for t in chosen for p in ([Path(t)] if t.endswith(".py") else Path(t).glob("test_*.py"))})
    if kept.exists() and (tests := json.loads(kept.read_text(encoding="utf-8")))["asked"] == [marked, *files]:
        return dict(tests)
    by_size = sorted(files, key=lambda file: -Path(file).stat().st_size)
    jobs = iter([Job(file, lambda source, file=file: cover(source, FILES, file, marked), 400.0) for file in by_size])  # type: ignore[misc]
    tests: dict[str, Any] = {"asked": [marked, *files], "seconds": {}, "lines": defaultdict(lambda: defaultdict(list)), "left_out": []}
    numbers: dict[str, int] = {}  # of the tests, so that a name is written once
    for job, found, seconds in run_jobs(jobs, ROOT / "src", place, given.workers, end):
        print(
            f"{job.name}: {seconds:.0f} s, " + ("DIED" if found is None else f"{len(found['seconds'])} passed"), file=sys.stderr, flush=True
        )
        if found is None:
            tests["left_out"].append(job.name)
            continue
        tests["left_out"] += found["failed"]
        tests["seconds"] |= found["seconds"]
        for file, lines in found["lines"].items():
            for line, names in lines.items():
                tests["lines"][file][line] += [numbers.setdefault(name, len(numbers)) for name in names]
    tests["names"] = list(numbers)
    kept.write_text(json.dumps(tests), encoding="utf-8")
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def _jobs(
    wanted: list[dict[str, Any]], tests: Mapping[str, Any], results: dict[str, Any], most: float, without: Collection[str]
) -> Iterator[Job]:
    for number, fault in enumerate(wanted):
        text = (ROOT / "src" / fault["file"]).read_text(encoding="utf-8")
        if text[fault["start"] : fault["end"]] != fault["old"]:
            raise SystemExit(f"{fault['file']} is not the file of the list of faults; make the list again with --plan-only")
        changed = text[: fault["start"]] + fault["new"] + text[fault["end"] :]
        try:
            compile(changed, fault["file"], "exec")
        except SyntaxError:
            results[fault["id"]] = fault | {"status": "no program"}
            continue
        chosen, complete = _tests_of(fault, tests, most, without)
        if not chosen:
            results.setdefault(fault["id"], fault | {"status": "no_test"})
            continue
        limit = 20 + 5 * sum(tests["seconds"][name] for name in chosen)
        work = lambda _, chosen=chosen, complete=complete: run_tests(chosen) | ({} if complete else {"complete": False})  # noqa: E731
        yield Job(fault["id"], work, limit, (fault["file"], changed))  # type: ignore[arg-type]
        if number % CONTROL == 0:
            yield Job("control", lambda _, chosen=chosen: run_tests(chosen), limit)  # type: ignore[misc]


def _tests_of(fault: Mapping[str, Any], tests: Mapping[str, Any], most: float, without: Collection[str]) -> tuple[list[str], bool]:
    """Return the tests that run the line of a fault, the quickest first, and whether they are all of them; `without` ran already.

    A line that runs when its module is imported is tested by all tests that run a line of the module.
    """
    lines = tests["lines"].get(fault["file"], {})
    here = [lines[str(n)] for n in range(fault["lines"][0], fault["lines"][1] + 1) if str(n) in lines]
    found = {number for one in here for number in one}
    if here and (not found or not _in_function(fault["file"], fault["line"])):
        found = {number for one in lines.values() for number in one}
    names = [name for number in found if (name := tests["names"][number]) not in without]
    chosen, seconds = [], 0.0
    for name in sorted(names, key=lambda name: (tests["seconds"][name], name)):
        seconds += tests["seconds"][name]
        if seconds > most and chosen:
            return chosen, False
        chosen.append(name)
    return chosen, True


@functools.cache
def _bodies(file: str) -> list[tuple[int, int]]:
    """Return the first and last line of the body of each function of a file."""
    tree = ast.parse((ROOT / "src" / file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [(node.body[0].lineno, node.end_lineno or node.lineno) for node in functions]


def _in_function(file: str, line: int) -> bool:
    """Return False for a line that runs when its module is imported, which a test may do, too."""
    return any(first <= line <= last for first, last in _bodies(file))


def _write(path: Path, results: Mapping[str, Any], all_: int, seed: int, controls: Any, tests: Mapping[str, Any]) -> None:
    counts = Counter(one["status"] for one in results.values())
    text = {"planned": all_, "seed": seed, "counts": dict(counts), "controls": controls, "tests": len(tests["seconds"])}
    text |= {"left_out": tests["left_out"], "python": sys.version.split()[0], "torch": sys.modules["torch"].__version__}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(text | {"faults": list(results.values())}, indent=0), encoding="utf-8")
    new.replace(path)


def _summary(results: Mapping[str, Any], all_: int) -> str:
    counts = Counter(one["status"] for one in results.values() if one["status"] != "no program")
    return f"{len(results)} of {all_} planned faults: {counts['killed'] / max(counts.total(), 1):.1%} found, {dict(counts)}"


def summarise(path: Path, planned: list[dict[str, Any]], record: Mapping[str, Any]) -> None:
    """Write the record of docs/lab-notes/testing.md. A fault that was found by a test that also failed without a fault is undecided."""
    unsure = {test for test in record["controls"]["failed"] if test}
    rooms = {room: {"planned": 0, "tried": 0, "found": 0, "undecided": 0} for room in sorted({_room(f) for f in planned})}
    for fault in planned:
        rooms[_room(fault)]["planned"] += 1
    known, missed = {f["id"] for f in planned}, []
    for fault in record["faults"]:
        if fault["status"] == "no program" or fault["id"] not in known:
            continue
        room = rooms[_room(fault)]
        room["tried"] += 1
        if fault["status"] == "killed":
            room["undecided" if fault.get("by") in unsure else "found"] += 1
        else:
            missed.append({"file": fault["file"], "line": fault["line"], "old": fault["old"][:100], "new": fault["new"][:100]})
    rooms["all"] = {name: sum(room[name] for room in rooms.values()) for name in ("planned", "tried", "found", "undecided")}
    about = {"date": time.strftime("%Y-%m-%d"), **{name: record[name] for name in ("seed", "python", "torch", "tests", "left_out")}}
    failed = {"tried": record["controls"]["tried"], "failed": len(record["controls"]["failed"]), "tests": sorted(unsure)}
    lines = json.dumps(about | {"rooms": rooms, "controls": failed, "not_found": missed}, indent=1, ensure_ascii=False)
    path.write_text(lines + "\n", encoding="utf-8")
    for room, one in rooms.items():
        share = 100 * one["found"] / max(one["tried"] - one["undecided"], 1)
        print(f"| {room} | {one['planned']:,} | {one['tried']:,} | {one['found']:,} | {one['undecided']} | {share:.0f} % |")


def _room(fault: Mapping[str, Any]) -> str:
    room = str(fault["file"]).removeprefix("selfless/").split("/")[0].removesuffix(".py")
    return {"runner": "store"}.get(room, room)


if __name__ == "__main__":
    sys.exit(main())
