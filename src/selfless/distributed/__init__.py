"""One model that several processes train: what torch.distributed has to reduce for a keeper.

Lives here: the ranks and their sums and means (`ranks`), the local rows of sharded parameters (`shards`), and the sums of one measurement
of Ω and α (`reduction`). A process alone communicates with nobody and computes what it would without this room, to the bit.

Imports nothing. Imported by importance and keeper.
"""

from selfless.distributed.ranks import ALONE, Ranks, find_ranks
from selfless.distributed.reduction import Reduction, reduction_for

__all__ = ["ALONE", "Ranks", "Reduction", "find_ranks", "reduction_for"]
