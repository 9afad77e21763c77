"""A Ray cluster on this machine for tests: nodes whose processes lack a file or a disk, and networks that disturb training on nodes.

An odd node starts its processes with ODD_NODE on their PYTHONPATH: a file called hidden.npz does not exist there, and nothing can be
written below a folder called full. A fault depends on files and settings, never on time.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def small_cluster(folder: Path) -> Iterator[Any]:
    """Yield a cluster with a head that trains nothing, and two nodes of one core: `plain` and an odd one. Connect to it."""
    import ray
    from ray.cluster_utils import Cluster

    (folder / "odd").mkdir(parents=True)
    (folder / "odd" / "sitecustomize.py").write_text(ODD_NODE)
    odd = {"PYTHONPATH": os.pathsep.join([str(folder / "odd"), os.environ.get("PYTHONPATH", "")])}
    sizes: dict[str, Any] = {"object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **sizes})
    try:
        cluster.plain = cluster.add_node(num_cpus=1, wait=False, **sizes)
        cluster.add_node(num_cpus=1, wait=False, env_vars=odd, **sizes)
        cluster.wait_for_nodes(timeout=120)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
