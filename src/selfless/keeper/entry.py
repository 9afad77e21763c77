"""`attach`: return a keeper for a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from selfless.keeper.keeper import Keeper
from selfless.keeper.storage import Choice, resolve_choice, resolve_storage
from selfless.network.layers import Layers
from selfless.preserve import PRESERVERS, NoPreserver, Preserver
from selfless.preserve.capabilities import Freezes
from selfless.recommendation import NAME, Recommendation, recommend
from selfless.sparsify import SPARSIFIERS, NoSparsifier, Sparsifier
from selfless.terms import Term, parse


def attach(
    model: nn.Module,
    preserve: Preserver | Term | str | Recommendation | None = None,
    sparsify: Sparsifier | Term | str | None = None,
    layers: Layers = "auto",
    *,
    heads: Sequence[str] = (),
    check_finite: bool = True,
    inject: bool = False,
    parameters: Choice | str | Iterable[str] | None = None,
    state_dtype: torch.dtype | None = None,
    state_device: torch.device | str | None = None,
    process_group: Any = None,
) -> Keeper:
    """Return a keeper for `model`.

    preserve      MAS(0.1), LwF(1) + MAS(0.1) or any other preserver of `selfless.preserve`, or "mas:0.1"; None: no preserver.
                  "recommended": the best measured one that needs no further calls in your loop, with its sparsifier and layers unless
                  you name them: for tasks with the same inputs if `heads` are named, else for tasks with different inputs, one head, and
                  tasks that are not known at evaluation. For another case give what `selfless.recommend(…)` returns.
    sparsify      SLNID(1e-3) or any other sparsifier of `selfless.sparsify`, or "slnid:1e-3"; None: no sparsifier
    layers        where the sparsifier acts and neurons are counted: names, globs ("blocks.*.act") or modules. "auto": the activation
                  after every hidden nn.Linear; "all": also after every convolution, whose neurons are its channels. The layer that was
                  registered last counts as the head. A layer is named by its activation module or by the module before it.
    heads         if each task has its own output layer, their names in the order of the tasks: ["heads.0", "heads.1"]. A head may be
                  added to the model later. LwF, EBLL, IMM, PackNet, HAT, GPM, SGP and AGS-CL treat them differently.
    check_finite  raise an error if activations are NaN or infinite, and warn if distillation is too strong for the steps; this costs one
                  synchronisation per step on a GPU
    inject        add the gradients of all terms in the backward pass of your loss, instead of `keeper.penalty()` in the loss. Set
                  `keeper.scale` if the loss is multiplied before backward: a GradScaler, or 1/4 for four accumulated batches.
    parameters    which parameters are preserved: names of parameters or modules, globs, or a function (name, parameter) → bool
    state_dtype   torch.bfloat16 stores Ω in half of the memory; θ* keeps the precision of the parameters
    state_device  "cpu" stores Ω and θ* there; each step then moves them to the model's device, piece by piece for the implicit anchor
    process_group  the ranks that train this model together, with DistributedDataParallel or FSDP2; None: all ranks, if torch.distributed
                  is initialised; False: this process alone
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach takes a torch.nn.Module, not {type(model).__name__}")
    if preserve == NAME:
        case: Any = {"inputs": "same", "heads": "own"} if heads else {"inputs": "different", "heads": "shared", "task_known": False}
        preserve = recommend(**case, simple_loop=True)
        if heads:
            best = recommend(**case).text
            more = "" if best == preserve.text else f" {best} measured higher, but needs more calls in your loop."
            warnings.warn(
                f'"recommended" with heads is {preserve.text}, which was measured on tasks with the same kind of inputs, classes of one '
                f"data set.{more} If tasks have inputs of their own, name another one. To say which case is yours, without this warning: "
                "attach(model, selfless.recommend(inputs=…, heads=…, simple_loop=True), heads=…). Write keeper.penalty((x, y)): a "
                "recommended method may need the batch",
                stacklevel=2,
            )
    if isinstance(preserve, Recommendation):
        sparsify = preserve.sparsify if sparsify is None else sparsify
        layers = preserve.layers if layers == "auto" and preserve.layers == "all" else layers
        preserve = preserve.preserve
    preserver = _term(preserve, PRESERVERS, Preserver, NoPreserver(), "preserve")
    choice = resolve_choice(parameters, model)
    if choice is not None and any(isinstance(part, Freezes) for part in preserver.parts):
        raise ValueError(f"{preserver} keeps old tasks exactly, which needs all parameters; leave parameters= out")
    return Keeper(
        model,
        preserver,
        _term(sparsify, SPARSIFIERS, Sparsifier, NoSparsifier(), "sparsify"),
        layers,
        heads,
        check_finite,
        resolve_storage(state_dtype, state_device),
        choice,
        inject,
        process_group,
    )


def _term(value: Any, kinds: Mapping[str, Any], base: Any, none: Term, argument: str) -> Term:
    """Return the term that an argument of `attach` stands for; `none` for None."""
    if isinstance(value, str):
        value = parse(value, kinds, base.role)
    value = none if value is None else value
    if not isinstance(value, Term) or value.role != base.role:
        known = ", ".join(dict.fromkeys(k.__name__ for k in kinds.values()))
        remedy = f"; write {value.__name__}(…)" if isinstance(value, type) and issubclass(value, base) else ""
        raise TypeError(f"{argument}= takes one of {known}, or a subclass of {base.__name__}, not {value!r}{remedy}")
    return value
