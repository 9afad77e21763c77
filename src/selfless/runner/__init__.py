"""Runs to results: plan what to train, skip what is recorded, train the rest in fleets, record the results.

Built on spec, data and engine; report, experiments, bench and cli may import it. `plan` groups runs into fleets, `local` trains them here,
`worker` is a process that `local` starts, `store` is the folder of results.
"""

from selfless.runner.local import train, train_runs
from selfless.runner.options import TrainOptions
from selfless.runner.store import Store

__all__ = ["Store", "TrainOptions", "train", "train_runs"]
