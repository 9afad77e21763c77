"""The penalties by name and the tensors that they are tested on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfless import functional as f


def relu(m: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).relu().to(dtype)


def alphas(n: int) -> Tensor:
    """Importances spread over [0, 2), in no order; not random, so that transforms may call it."""
    return 2 * (torch.arange(n) * 0.6180339887 % 1)


WIDE = (64, 600)  # on either side of the switch from the dense form to Fourier features


PENALTIES: dict[str, Any] = {
    "sni": f.sni,
    "slni": f.slni,
    "snid": lambda h: f.snid(h, alphas(h.shape[1])),
    "snid max": lambda h: f.snid(h, alphas(h.shape[1]), discount="max"),
    "slnid": lambda h: f.slnid(h, alphas(h.shape[1])),
    "slnid max": lambda h: f.slnid(h, alphas(h.shape[1]), discount="max"),
    "l1_rep": f.l1_rep,
    "decov": f.decov,
    "sparing_decov": lambda h: f.sparing_decov(h, f.PairForm(h.shape[1], h.shape[1] / 6, alphas(h.shape[1]))),
    "orth_reg": f.orth_reg,
}


INHIBITIONS = ("sni", "slni", "snid", "snid max", "slnid", "slnid max")
