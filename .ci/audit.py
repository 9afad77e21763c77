"""Look up the packages of an environment in a public list of known holes, with pip-audit in an environment of its own.

    python .ci/audit.py .venv/bin/python .venv-audit

Exit status: 0 no known hole, 1 a hole, 2 nothing was checked, because pip-audit or the service cannot be reached.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 120  # for the answers of the service
INSTALL = 300  # for pip-audit


def main(python: str, place: str) -> int:
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True).stdout
    packages = {p["name"]: p["version"].partition("+")[0] for p in json.loads(listed) if "editable_project_location" not in p}
    audit = Path(place, "bin/pip-audit")
    if not audit.is_file():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        install = [f"{place}/bin/python", "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "pip-audit"]
        try:
            subprocess.run(install, check=True, timeout=INSTALL)
        except subprocess.SubprocessError as error:
            print(f"audit: pip-audit cannot be installed ({type(error).__name__}); NOTHING WAS CHECKED", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "packages.txt")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
        command = [
            str(audit),
            "--requirement",
            str(wanted),
            "--no-deps",
            "--disable-pip",
            "--format",
            "json",
            "--progress-spinner",
            "off",
            "--timeout",
            "10",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            print(f"audit: the list of known holes did not answer within {SECONDS} s; NOTHING WAS CHECKED", file=sys.stderr)
            return 2
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"audit: the list of known holes cannot be read ({reason[:200]}); NOTHING WAS CHECKED", file=sys.stderr)
        return 2
    skipped = [one["name"] for one in found if "skip_reason" in one]
    if len(skipped) == len(found):
        print(
            f"audit: none of {len(found)} packages is known to the service ({found[0]['skip_reason']}); NOTHING WAS CHECKED",
            file=sys.stderr,
        )
        return 2
    holes = [(one["name"], one["version"], hole["id"], hole["fix_versions"]) for one in found for hole in one.get("vulns", ())]
    for name, version, hole, fixed in holes:
        print(f"audit: {name} {version} has {hole}; fixed in {', '.join(fixed) or 'no version'}")
    print(f"audit: {len(found) - len(skipped)} packages checked, {len(holes)} known holes; not in the list: {', '.join(skipped) or 'none'}")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
