"""`attach`: preservers and sparsifiers for any model and training loop.

Lives here: the `Keeper`, and one module for each of its tasks: collect activations, gate and drop neurons, distil, follow the path of the
optimizer, anchor, inject gradients, store the state and count its memory. Users import it; runs are trained by the engine.

Imports capacity, distributed, functional, importance, network, preserve, recommendation, sparsify and terms.
Imported by bench, experiments, integrations and testing.
"""

from selfless.keeper.entry import attach
from selfless.keeper.keeper import Keeper

__all__ = ["Keeper", "attach"]
