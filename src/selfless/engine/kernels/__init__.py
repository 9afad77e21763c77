"""The few operations of a stacked step that a GPU spends its time on, in Triton: each one pass over its data, for all members at once.

Everything here has a plain PyTorch twin where it is used (`native`, `fleet`, `batches`); on a CPU, or where Triton is not installed, the
twin runs. Import it through `selfless.engine.native.kernels`, which knows whether it can be.
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
