"""`python -m tests.fuzz`: the long form, with a summary by kind and the first example of every different find."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from tests.fuzz.cases import run_cases
from tests.fuzz.targets import TARGETS

LIMIT = 12 << 30  # bytes of memory, so that a bomb ends this process and not the machine


def main() -> int:
    parser = argparse.ArgumentParser(description="Hand odd texts and files to the package; exit with 1 if one of them gives a traceback.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cases", type=int, default=10**9, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other cases")
    parser.add_argument("--kind", choices=sorted(TARGETS), action="append")
    parser.add_argument("--number", type=int, help="repeat one case")
    given = parser.parse_args()
    with contextlib.suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    first, cases = (given.seed * 10**7, given.cases) if given.number is None else (given.number, 1)
    tally = run_cases(given.kind or TARGETS, first, cases, given.seconds)
    seen: set[str] = set()
    for kind, number, text in tally.found:
        key = kind + "".join(text.splitlines()[-1:])[:60]
        if key not in seen:
            print(f"--- --kind {kind} --number {number}\n{text}")
        seen.add(key)
    print(json.dumps({"cases": sum(tally.counts.values()), "found": len(tally.found), "kinds": len(seen), "by_kind": dict(tally.counts)}))
    return 1 if tally.found else 0


sys.exit(main())
