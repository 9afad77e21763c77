"""How a keeper stores the state of its preservers: the precision and the device of each group, and which parameters it covers.

Ω may be stored in bfloat16: 8 bits of mantissa, a relative error of at most 0.4 %. θ* may not, if the model is in float32: the rounding
of θ* is larger than the drift that the anchor is to hold. So a group of parameter values has at least the precision of the parameters.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfless.functional.shapes import wide
from selfless.preserve import Group, Preserver, State

Choice = Callable[[str, nn.Parameter], bool]
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Storage:
    """The precision of importances and the device of the state; None: as they are measured, and with the model."""

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    @property
    def is_plain(self) -> bool:
        """True if the state is stored as the preserver made it."""
        return self.dtype is None and self.device is None

    def dtype_for(self, group: Group, tensor: Tensor, parameter: Tensor | None) -> torch.dtype:
        """Return the precision to store a tensor of a group in; never a wider one than it has."""
        if self.dtype is None or group.precision == "full" or not tensor.is_floating_point():
            return tensor.dtype
        like = tensor if parameter is None else parameter
        wanted = self.dtype if group.precision == "low" else torch.promote_types(self.dtype, like.dtype)
        return wanted if wanted.itemsize < tensor.dtype.itemsize else tensor.dtype

    def store(self, term: Preserver, state: State, parameters: Mapping[str, Tensor]) -> State:
        """Return the state in the precision and on the device that it is stored in; only groups with the shape of parameters change."""
        if self.is_plain:
            return state
        groups = {group.name: group for group in term.groups if group.like_parameter}
        return {
            name: {n: t.to(self.device or t.device, self.dtype_for(groups[name], t, parameters.get(n))) for n, t in tensors.items()}
            if name in groups
            else tensors
            for name, tensors in state.items()
        }

    def load(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a stored tensor as the preserver computes with it: in at least float32, on the device of the model."""
        return tensor if self.is_plain else wide(tensor.to(device))

    def load_state(self, state: State, device: torch.device) -> State:
        """Return the whole stored state as the preserver computes with it."""
        return state if self.is_plain else {g: {n: self.load(t, device) for n, t in ts.items()} for g, ts in state.items()}


def resolve_storage(dtype: torch.dtype | None, device: torch.device | str | None) -> Storage:
    """Return the storage that `state_dtype=` and `state_device=` of `attach` stand for."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"state_dtype is {dtype}; choose torch.bfloat16 (half of the memory for Ω) or torch.float32")
    return Storage(dtype, None if device is None else _device(device))


def _device(given: torch.device | str) -> torch.device:
    """Return a device that exists on this machine."""
    remedy = 'choose "cpu", or leave state_device out to keep the state with the model'
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise ValueError(f"state_device is {given!r}, which torch does not know; {remedy}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"state_device is {str(device)!r}, but torch finds no GPU on this machine; {remedy}")
    return device


def resolve_choice(parameters: Choice | str | Iterable[str] | None, model: nn.Module) -> Choice | None:
    """Return `parameters=` of `attach` as a predicate (name, parameter) → bool; None for all parameters.

    A name is that of a parameter or of a module, or a glob: "encoder", "encoder.*.weight".
    """
    if parameters is None:
        return None
    if callable(parameters):
        choice = parameters
        if not any(choice(n, p) for n, p in model.named_parameters()):
            raise ValueError("parameters= chooses no parameter of the model; return True for those that are to be preserved")
        return choice
    wanted = [parameters] if isinstance(parameters, str) else list(parameters)
    known = [n for n, _ in model.named_parameters()]
    for item in wanted:
        if not isinstance(item, str):
            raise TypeError(f"parameters= takes names, globs or a function (name, parameter) → bool, not {item!r}")
        if not any(_matches(n, item) for n in known):
            raise ValueError(
                f"parameters= names {item!r}, but no parameter of the model is in it; the first ones are {', '.join(known[:4])}"
            )
    return lambda name, _: any(_matches(name, item) for item in wanted)


def _matches(name: str, item: str) -> bool:
    """Return True if a parameter is the one, or is in the module, that a name or glob stands for."""
    return name == item or name.startswith(f"{item}.") or fnmatch.fnmatchcase(name, item)


@contextmanager
def leaving_out(model: nn.Module, choice: Choice | None) -> Iterator[None]:
    """Inside `with`: parameters that are not chosen need no gradient, so that nothing is measured for them."""
    others = [p for n, p in model.named_parameters() if p.requires_grad and choice is not None and not choice(n, p)]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
