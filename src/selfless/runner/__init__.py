"""From runs to results: skip runs that are recorded, train all others in fleets, record the results.

Lives here: `plan` groups runs into fleets, `local` trains them on this machine, `worker` is a process that `local` starts, `jobs` what such
processes are told, `cluster` and `node` do the same with Ray, `store` is the folder of results.

Imports data, engine, files, inputs, network, preserve, recommendation, sparsify, spec, terms, trained and workers.
Imported by bench, cli, experiments and report.
"""

from selfless.runner.loading import load
from selfless.runner.local import train, train_runs
from selfless.runner.options import TrainOptions
from selfless.runner.store import Store

__all__ = ["Store", "TrainOptions", "load", "train", "train_runs"]
