"""`attach`: preservers and sparsifiers for anybody's model and training loop.

Lives here: the `Keeper`, and one module for each thing it does to a model: collect activations, gate and drop neurons, distil, follow
the optimizer's path, anchor. Imports preservers and what they stand on; only the command line, benchmarks and users import it.
"""

from selfless.keeper.entry import attach
from selfless.keeper.keeper import Keeper

__all__ = ["Keeper", "attach"]
