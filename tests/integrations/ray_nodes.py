"""A Ray cluster on this machine for tests: nodes whose processes lack a file or a disk, and networks that disturb training on nodes.

An odd node starts its processes with ODD_NODE on their PYTHONPATH: a file called hidden.npz does not exist there, and nothing can be
written below a folder called full. A fault depends on files and settings, never on time.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

# Ray reads these when it is imported. With a token of our own, none is written into the home folder. Workers get a fair share of the cores.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

ODD_NODE = """
import errno, os, sys

def refuse(event, args):
    if event != "open" or not isinstance(args[0], str):
        return
    path, flags = args[0], args[2] if isinstance(args[2], int) else 0
    if path.endswith("hidden.npz"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    if "/full/" in path and flags & (os.O_WRONLY | os.O_RDWR):
        raise OSError(errno.ENOSPC, "No space left on device", path)

sys.addaudithook(refuse)
"""

HOSTILE = """
import os, signal, sys, time
from pathlib import Path
from torch import nn
from selfless.engine.learner import Learner

HERE = Path(__file__).parent

def build(outputs, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, outputs))

poison = crowded = deadly = gated = build
learn = Learner.learn

def disturbed(self):
    module, _, kind = self.runs[0].model.partition(":")
    if module != __name__:  # a worker that trained for another test has its module, too
        return learn(self)
    if kind == "poison" and any(run.lr == 0.03 for run in self.runs):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "crowded" and len(self.runs) > 1:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    if kind == "deadly" and not (HERE / "died").exists():
        (HERE / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "gated" and self.runs[0].seed and not (HERE / "open").exists():
        time.sleep(0.05)
    return learn(self)

if "default_worker" in sys.argv[0]:  # on a node, not in the program that starts the study
    Learner.learn = disturbed
"""


STARTS = 4  # a node whose processes need more than 30 seconds, which Ray gives them, is given up; by then the disk has been read


@contextmanager
def small_cluster(folder: Path) -> Iterator[Any]:
    """Yield a cluster with a head that trains nothing, and two nodes of one core: `plain` and an odd one. Connect to it."""
    import ray

    (folder / "odd").mkdir(parents=True)
    (folder / "odd" / "sitecustomize.py").write_text(ODD_NODE)
    cluster = _started({"PYTHONPATH": os.pathsep.join([str(folder / "odd"), os.environ.get("PYTHONPATH", "")])})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _started(odd: dict[str, str]) -> Any:
    """Start the three nodes, all again if one was too slow. On a machine that is too slow each time, the tests are skipped."""
    import psutil  # comes with Ray
    from ray.cluster_utils import Cluster

    sizes: dict[str, Any] = {"object_store_memory": 80_000_000, "include_dashboard": False}
    for _ in range(STARTS):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=0, **sizes)
            cluster.plain = cluster.add_node(num_cpus=1, wait=False, **sizes)
            cluster.add_node(num_cpus=1, wait=False, env_vars=odd, **sizes)
            cluster.wait_for_nodes(timeout=60)
        except Exception as error:  # Ray has no class of its own for a node that was too slow
            if not isinstance(error, TimeoutError) and "timed out during startup" not in str(error):
                raise
            for process in psutil.Process().children(recursive=True):  # Ray keeps those of a node that it gave up
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        else:
            return cluster
    pytest.skip(f"the processes of a Ray node did not start within 30 seconds, {STARTS} times: this machine is too slow")
