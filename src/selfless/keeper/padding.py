"""Which tokens of a forward pass count: those where the `attention_mask` of the model's call is not 0. Padding is no sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfless.keeper.hook import Hook, is_forward_pass
from selfless.network.calling import token_mask


@dataclass(frozen=True)
class Counted:
    """The tokens of a batch that count: the shape (samples, tokens) of the mask, and the numbers of these tokens in it."""

    shape: tuple[int, int]
    tokens: Tensor

    def select(self, h: Tensor) -> Tensor:
        """Return the rows (tokens, neurons) of h that count; h: (samples, tokens, neurons), or other shapes, which count whole."""
        rows = h.flatten(0, -2)
        has_tokens = h.shape[:-1] == self.shape or (h.dim() == 2 and len(h) == self.shape[0] * self.shape[1])
        return rows.index_select(0, self.tokens.to(h.device)) if has_tokens else rows


class Padding:
    """Hooks on a model that read its `attention_mask`. `now` is None outside of a pass, and if every token counts."""

    def __init__(self, model: nn.Module) -> None:
        self.now: Counted | None = None
        self.last: Counted | None = None  # of the pass that runs or has just ended
        self._handles = [
            model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True),
            model.register_forward_hook(Hook(self._end), always_call=True),
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not is_forward_pass():
            return
        self.now = self.last = None
        mask = token_mask(kwargs) if module.training and torch.is_grad_enabled() else None
        if mask is not None:
            tokens = mask.flatten().nonzero().squeeze(1)
            if len(tokens) < mask.numel():
                self.now = self.last = Counted((mask.shape[0], mask.shape[1]), tokens)

    def _end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and is_forward_pass():
            self.now = None
