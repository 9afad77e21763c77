"""Triton kernels for the operations that take most of a GPU step. Each is one pass over its data, for all members of the fleet at once.

Every kernel has a PyTorch version where it is used (`native`, `fleet`, `batches`), which runs on a CPU or without Triton. Only
`selfless.engine` imports this folder, through `selfless.engine.native.kernels`, which checks that Triton is installed.
"""

from selfless.engine.kernels.batch import gather
from selfless.engine.kernels.conv import CHANNELS, columns_of, conv, pool, unpool
from selfless.engine.kernels.dense import bias_, cross_entropy, inhibit, masked_into, rates_, unbias, update_
from selfless.engine.kernels.pairs import add_product, covariance_matrix, is_map
from selfless.engine.kernels.sums import magnitudes, weight_sums

__all__ = [
    "CHANNELS",
    "add_product",
    "bias_",
    "columns_of",
    "conv",
    "covariance_matrix",
    "cross_entropy",
    "gather",
    "inhibit",
    "is_map",
    "magnitudes",
    "masked_into",
    "pool",
    "rates_",
    "unbias",
    "unpool",
    "update_",
    "weight_sums",
]
