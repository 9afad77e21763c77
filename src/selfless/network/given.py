"""Networks that are passed to a run as objects. A run holds a name, so that it stays a value that can be written as JSON.

    module:function       a function or class that can be imported: the name of a custom network
    given:NAME:DIGEST     a module, a digest of the files of its classes, its settings and its weights, if these determine what it computes
    given:NAME:once-…     anything else: a lambda, a closure, a partial, a class in the main program; a new name in every process

A run with a name of the last kind is trained each time: nothing can tell whether such an object is the one of an older record.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

PREFIX, ONCE = "given:", "once-"
_GIVEN: WeakValueDictionary[str, Any] = WeakValueDictionary()
_ONCE: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


def name_network(network: Any) -> tuple[str, Any]:
    """Return (name, object) of a function or class that makes networks, of an `nn.Module`, or of a name; None: there is no object."""
    if isinstance(network, str):
        return network, _GIVEN.get(network)
    if not callable(network):
        raise TypeError(f"model is a {type(network).__name__}; it must be a name, a function that makes a network, or an nn.Module")
    if (path := _import_path(network)) is not None:
        return path, None
    if isinstance(network, nn.Module) and (digest := digest_module(network)) is not None:
        name = f"{PREFIX}{type(network).__name__}:{digest[:16]}"
        held = _GIVEN.get(name)
        if held is None or (held is not network and digest_module(held) != digest):
            held = _GIVEN[name] = network
        return name, held
    if network not in _ONCE:
        kind = network if hasattr(network, "__qualname__") else type(network)
        title = re.sub(r"[^A-Za-z0-9_]+", "", kind.__qualname__.rpartition(".")[2]) or "network"
        _ONCE[network] = f"{PREFIX}{title}:{ONCE}{uuid.uuid4().hex[:12]}"
        _GIVEN[_ONCE[network]] = network
    return _ONCE[network], network


def network_title(name: str) -> str:
    """Return a name of a network for messages: that of its function or class, if it was passed as an object."""
    return f"the network {name.split(':')[1]}" if name.startswith(PREFIX) else name


def is_unnamed(name: str) -> bool:
    """True if the name says nothing about the network, so that its results cannot be looked up."""
    return name.startswith(PREFIX) and name.rpartition(":")[2].startswith(ONCE)


def find_factory(name: str) -> Callable[..., nn.Module] | None:
    """Return a function that makes the network of that name; of a module, it makes copies with the same weights."""
    network = _GIVEN.get(name)
    return (lambda: copy.deepcopy(network)) if isinstance(network, nn.Module) else network


def check_unchanged(name: str) -> None:
    """Raise ValueError if a module has changed since it was named."""
    network = _GIVEN.get(name)
    if isinstance(network, nn.Module) and not is_unnamed(name) and not name.endswith((digest_module(network) or "-")[:16]):
        del _GIVEN[name]
        raise ValueError(f"the {type(network).__name__} has changed since the run was created; create the run again")


def _import_path(network: Any) -> str | None:
    """Return module:attribute if importing this gives the same object."""
    module, attribute = getattr(network, "__module__", None), getattr(network, "__qualname__", None)
    if isinstance(network, nn.Module) or module is None or module == "__main__" or attribute is None or not attribute.isidentifier():
        return None
    return f"{module}:{attribute}" if getattr(sys.modules.get(module), attribute, None) is network else None


def digest_module(network: nn.Module) -> str | None:
    """Return the SHA-256 of classes, their files, settings and weights; None if something else may decide what the module computes."""
    digest, hooks = hashlib.sha256(), ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    standard = set(vars(nn.Module()))
    for name, module in network.named_modules():
        kind = type(module)
        settings = {key: value for key, value in vars(module).items() if key not in standard}
        file = _file_digest(kind)
        if file is None or any(getattr(module, hook) for hook in hooks) or not all(_is_plain(value) for value in settings.values()):
            return None
        digest.update(
            json.dumps([name, kind.__module__, kind.__qualname__, file, sorted((k, repr(v)) for k, v in settings.items())]).encode()
        )
    places: dict[int, int] = {}  # tensors that share their memory are one parameter
    for name, tensor in _tensors(network):
        place = places.setdefault(id(tensor), len(places))
        digest.update(json.dumps([name, place, str(tensor.dtype), list(tensor.shape), tensor.requires_grad]).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


def _is_plain(value: Any) -> bool:
    """True for values whose text says all about them."""
    if isinstance(value, tuple | list | dict):
        return all(_is_plain(one) for one in (value.items() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)


def _file_digest(kind: type) -> str | None:
    """Return the digest of the file of a class, "" for torch's own; None if it cannot be imported or has no file."""
    package = kind.__module__.partition(".")[0]
    if package == "torch":
        return ""
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return None
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None
