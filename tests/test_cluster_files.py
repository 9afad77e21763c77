"""The scripts and the manifest in examples/cluster can be read by the programs that they are for, as far as this machine can tell."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))
DIRECTIVES = {
    "job-name",
    "array",
    "gpus-per-task",
    "gpus-per-node",
    "cpus-per-task",
    "time",
    "signal",
    "output",
    "nodes",
    "ntasks-per-node",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_bash_with_known_directives_and_real_commands(script: Path) -> None:
    from typer.main import get_command

    from selfless.cli import app

    text = script.read_text(encoding="utf-8")
    if shutil.which("bash"):
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    assert text.startswith("#!/bin/bash\n")
    assert "set -euo pipefail" in text
    found = re.findall(r"^#SBATCH --([\w-]+)=\S+$", text, re.M)
    assert len(found) == text.count("\n#SBATCH")
    assert set(found) <= DIRECTIVES
    known = get_command(app).commands["reproduce"].params  # type: ignore[attr-defined]
    flags = {name for parameter in known for name in parameter.opts}
    used = re.findall(r"selfless reproduce (.*)$", text, re.M)
    assert used
    for line in used:
        assert set(re.findall(r"--[a-z-]+", line)) <= flags


def test_the_manifest_has_what_kuberay_requires() -> None:
    manifest = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert manifest["metadata"]["name"]
    spec = manifest["spec"]
    assert re.fullmatch(r"selfless reproduce .* --engine ray --address auto", spec["entrypoint"])
    head, (workers,) = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert workers["groupName"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (head, workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"]
        assert container["image"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"name": "SELFLESS_DATA", "value": "/shared/data"} in head["template"]["spec"]["containers"][0]["env"]
