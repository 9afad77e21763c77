"""Running runs: skip what is done, train the rest in fleets, record the results."""

from selfless.runner.local import train
from selfless.runner.store import Store

__all__ = ["Store", "train"]
