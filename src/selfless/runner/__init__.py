"""From runs to results: skip runs that are recorded, train all others in fleets, record the results.

Lives here: `plan` groups runs into fleets, `local` trains them on this machine, `worker` is a process that `local` starts, `store` is the
folder of results. Imports spec, data and engine; report, experiments, bench and cli may import it.
"""

from selfless.runner.loading import load
from selfless.runner.local import train, train_runs
from selfless.runner.options import TrainOptions
from selfless.runner.store import Store

__all__ = ["Store", "TrainOptions", "load", "train", "train_runs"]
