"""The same bits in every training on one GPU, for some speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Inside `with`: torch uses only algorithms that add up in a fixed order; where it has none, ValueError names the operation.

    The kernels of this package always do. On a CPU torch does, too, and nothing changes.
    """
    if not is_on:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason, remedy = str(error).partition(". ")[0], "leave --deterministic out, or use --device cpu"
        raise ValueError(f"deterministic training is not possible here: {reason}; {remedy}") from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
