"""Triton kernels for the operations that take most of a GPU step. Each is one pass over its data, for all members of the fleet at once.

Every kernel has a PyTorch version where it is used (`native`, `fleet`, `batches`), which runs on a CPU or without Triton. Only
`selfless.engine` imports this folder, through `selfless.engine.native.kernels`, which checks that Triton is installed.
"""

from selfless.engine.kernels.conv import CHANNELS, conv, pool, unpool, weight_sums
from selfless.engine.kernels.dense import bias_, cross_entropy, gather, inhibit, rates_, unbias, update_

__all__ = [
    "CHANNELS",
    "bias_",
    "conv",
    "cross_entropy",
    "gather",
    "inhibit",
    "pool",
    "rates_",
    "unbias",
    "unpool",
    "update_",
    "weight_sums",
]
