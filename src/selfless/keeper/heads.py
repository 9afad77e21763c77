"""Checks of `heads=`: a wrong name is found when the keeper is attached or in the first step of its task, not when the task ends."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

from selfless.network.roles import within

_NO_HEADS = tuple(f"torch.nn.modules.{name}" for name in ("activation", "dropout", "flatten", "pooling"))


def check_heads(heads: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """Return the names of the heads. A head may be added to the model later, but the module that will contain it must be there."""
    if isinstance(heads, str):
        raise TypeError(f"heads= takes a list of names, one per task, not {heads!r}; write heads=[{heads!r}]")
    names = tuple(heads)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"heads= takes names of modules, as ['heads.0', 'heads.1'], not {name!r}")
        parent = name.rpartition(".")[0]
        if parent not in dict(model.named_modules()):
            raise ValueError(f"heads= names {name!r}, but the model has no module {parent!r} to hold it{_hint(parent, model)}")
        _check_one(name, model, len(names) == 1)
        found = dict(model.named_modules()).get(name)
        if found is not None and type(found).__module__ in _NO_HEADS and next(found.parameters(), None) is None:
            raise ValueError(f"heads= names {name!r}, but a {type(found).__name__} has no parameters; name the output layer of the task")
    return names


def _check_one(name: str, model: nn.Module, is_only: bool) -> None:
    """Raise ValueError if the name stands for several heads: a pattern, or, as the only name, a container of them."""
    is_pattern = bool(set(name.rpartition(".")[2]) & set("*?["))
    container = name.rpartition(".")[0] if is_pattern else name
    found = dict(model.named_modules())[container] if is_pattern else dict(model.named_modules()).get(name)
    is_container = found is not None and type(found) in (nn.ModuleList, nn.ModuleDict)
    if is_pattern or (is_only and is_container and not _is_chain(found)):
        children = [f"{container}.{key}".lstrip(".") for key, _ in found.named_children()] if found is not None else []
        raise ValueError(
            f"heads= names {name!r}, which is no single head; name each one, also those that you add later: "
            f"heads={children[:3] or [f'{container}.0', f'{container}.1']}"
        )


def _is_chain(container: nn.Module | None) -> bool:
    """Return True if the layers of a container follow each other, as in one head of two layers: they read inputs of different widths."""
    return container is not None and len({module.in_features for module in container.children() if isinstance(module, nn.Linear)}) > 1


def check_head(heads: Sequence[str], model: nn.Module, task: int, trained: Iterable[str] | None = None) -> None:
    """Raise ValueError if the head of the current task is not in the model, or not among the `trained` parameters if these are given."""
    if task >= len(heads):
        return
    if trained is not None and not any(within(name, heads[task]) for name in trained):
        if any(within(name, heads[task]) for name, _ in model.named_parameters()):
            raise ValueError(
                f"the head {heads[task]!r} of task {task + 1} is frozen, or parameters= leaves it out; let it train, or take a preserver "
                "that does not treat heads differently"
            )
        what = "no trainable parameter of the model is in it"
    elif not any(within(name, heads[task]) for name, _ in model.named_parameters()):
        what = "no parameter of the model is in it"
    else:
        return
    remedy = "add it before the task, or repeat a name if tasks share a head"
    raise ValueError(f"heads= names {heads[task]!r} for task {task + 1}, but {what}; {remedy}{_hint(heads[task], model)}")


def _hint(name: str, model: nn.Module) -> str:
    """Return the nearest name of a module, or the modules that there are, as the end of a sentence."""
    known = [other for other, _ in model.named_modules() if other]
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; its modules are {', '.join(known[:8])}{' …' * (len(known) > 8)}"
