"""The laws of a preserver in a loop: where it pulls, how far, and what its state keeps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from selfless.keeper import attach
from selfless.keeper.pieces import consolidate
from selfless.keeper.storage import Storage
from selfless.preserve import capabilities
from selfless.preserve.base import cost_of
from selfless.preserve.capabilities import Anchored, Drops, Encodes, KnowsHeads, Observes, ProjectsSteps, Replays, Wired
from selfless.testing.comparing import Broken, at_strength, descends, learn, name_of, same
from selfless.testing.small import small_net, small_task

# Their first state needs more than `init`: the wiring of a network, samples, heads, or the start of a path.
SPECIAL = (Wired, Observes, KnowsHeads, Replays, Encodes, ProjectsSteps, Drops)
FAR = 1e6  # a strength at which an ordinary gradient step would diverge


def pulls_nowhere_where_a_task_ended(preserve: Any) -> None:
    """At θ* the gradient of Σ Ω(θ − θ*)² is 0, and so is that of the distance to a teacher with the same parameters."""
    model = small_net()
    keeper = attach(model, at_strength(preserve, 1.0))
    learn(model, keeper, small_task(0), implicit=False)
    batch, pulls = small_task(0)[0], []
    for _ in range(2):
        model.zero_grad()
        model(batch[0])
        cost = keeper.penalty(batch)
        if cost.requires_grad:
            cost.backward()
        pulls.append(max(0.0 if p.grad is None else p.grad.abs().max().item() for p in model.parameters()))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05)
    if pulls[0] > 1e-3 * pulls[1]:
        raise Broken(f"it pulls at θ*, where the task ended: {pulls[0]:.2g}, and {pulls[1]:.2g} nearby; keep p.detach().clone() as θ*")


def has_pure_functions(preserve: Any) -> None:
    """State in, new state out: its functions change nothing that they get, and give the same when called again."""
    model = small_net()
    parameters = {name: p.detach() + 0.1 for name, p in model.named_parameters()}
    for part in preserve.parts:
        _check_capabilities(part)
        if isinstance(part, SPECIAL):  # whose first state is not made by `init` alone
            keeper = attach(model, part)  # type: ignore[arg-type]
            learn(model, keeper, small_task(0))
            state = keeper.state
        else:
            state = part.init(parameters)
        try:
            if isinstance(part, Observes):
                _check_path(part, state, parameters)
            for _ in range(2):
                state = _consolidated(part, state, parameters)
                _check_penalty(part, state, parameters)
        except KeyError as error:
            if error.args[0] in parameters and not part.measures:
                raise Broken("it reads Ω, which is measured only if the class says measures: ClassVar[bool] = True") from None
            if error.args[0] in {group.name for group in part.groups} or not str(error.args[0]).isidentifier():
                raise  # "fc1.wieght" and messages are no names of groups
            raise Broken(f"the state has no group {error.args[0]!r}; declare it: groups = (Group({error.args[0]!r}),)") from None


def _check_capabilities(term: Any) -> None:
    """Raise Broken if the method has a function of a capability that it does not inherit: nothing would call it."""
    kinds = [kind for kind in vars(capabilities).values() if isinstance(kind, type) and kind.__module__ == capabilities.__name__]
    for kind in kinds:
        for name in sorted(getattr(kind, "__abstractmethods__", ())):
            owners = [other for other in kinds if hasattr(other, name)]
            if hasattr(term, name) and not isinstance(term, tuple(owners)):
                raise Broken(f"it has {name}(), which nothing calls; inherit {kind.__name__} of selfless.preserve.capabilities")


def _check_path(term: Any, state: Any, parameters: dict[str, Tensor]) -> None:
    """Raise Broken if a function that reads the steps of a task is not pure."""
    gradients = {name: torch.ones_like(p) for name, p in parameters.items()}
    moved = {name: p - 0.05 for name, p in parameters.items()}
    started = _pure(term, "start_path", state, parameters)
    _pure(term, "observe", started, parameters, moved, gradients)


def _pure(term: Any, function: str, *given: Any) -> Any:
    """Return what a function of the method returns; raise Broken if it changes what it gets, or gives something else when called again."""
    before = copy.deepcopy(given)
    new, again = getattr(term, function)(*given), getattr(term, function)(*copy.deepcopy(before))
    if not _equal(before, given):
        raise Broken(f"{function}() changes what it gets; return a new state, and do not use functions that end with _")
    if not _equal(new, again):
        raise Broken(f"{function}() gives another state when it is called again; keep everything in the state")
    return new


def _consolidated(term: Any, state: Any, parameters: dict[str, Tensor]) -> Any:
    """Return the state after a task; raise Broken if `consolidate` is not pure, or its state not as declared."""
    g = torch.Generator().manual_seed(0)
    omega = {name: torch.rand(p.shape, generator=g) for name, p in parameters.items()} if term.measures else {}
    new = _pure(term, "consolidate", state, parameters, omega)
    if not isinstance(new, dict):
        raise Broken(f"consolidate() returned {new!r}; return the new state, a dictionary of its groups")
    declared = {group.name for group in term.groups}
    if missing := [group for group in new if group not in declared]:
        raise Broken(f"the state has the group {missing[0]!r}, which is not declared; add Group({missing[0]!r}) to groups")
    own = {p.untyped_storage().data_ptr() for p in parameters.values()}
    for group, tensors in new.items():
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise Broken(f"consolidate() returned {group}[{name!r}] with values that are not finite, from finite parameters and Ω")
            if tensor.untyped_storage().data_ptr() in own:
                raise Broken(f"{group}[{name!r}] is the parameter itself, which training changes; keep p.detach().clone()")
    return new


def _check_penalty(term: Any, state: Any, parameters: dict[str, Tensor]) -> None:
    """Raise Broken if the penalty is not pure, or is not the one that the method declares."""
    moved = {name: p + 0.05 for name, p in parameters.items()}
    for name, omega in (term.importance(state) or {}).items():
        if not (omega >= 0).all():
            raise Broken(f"the importance of {name} is negative or not a number; Ω must be ≥ 0")
    if term.penalises:
        before = copy.deepcopy((state, moved))
        try:
            cost, again = cost_of(term, state, moved), cost_of(term, state, moved)
        except Exception:
            shaped = [group.name for group in term.groups if group.like_parameter]
            if not shaped or any(state.get(group) for group in shaped):
                raise
            raise Broken(f"consolidate() left the group {shaped[0]!r} empty; return it with an entry for each parameter") from None
        if not _equal(before, (state, moved)):
            raise Broken("penalty() changes the state that it gets; only consolidate() returns a new one")
        same("penalty(), called again,", again, cost)
        if not term.is_auto:
            stronger = at_strength(term, 2 * term.fixed_strength)
            same("the runtime multiplies penalty() by the strength, but at twice the strength it", cost_of(stronger, state, moved), cost)
        descends(lambda at: cost_of(term, state, at), moved)
        start = float(cost_of(term, state, parameters))
        if all(float(cost_of(term, state, other)) < start for other in _around(parameters)):
            raise Broken("penalty() is smaller wherever the parameters leave those at the end of the task; has it the wrong sign?")
        if isinstance(term, Anchored):
            same("anchor() must describe penalty(), but its Σ Ω(θ − θ*)²", term.anchor(state).value(moved), cost)


def _around(parameters: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield parameters very near these, along random directions and against each of them."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        way = {name: 1e-3 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in parameters.items()}
        yield {name: p + way[name] for name, p in parameters.items()}
        yield {name: p - way[name] for name, p in parameters.items()}


def _equal(one: Any, other: Any) -> bool:
    """Return whether two trees of tensors have equal values."""
    leaves, others = (torch.utils._pytree.tree_leaves(tree) for tree in (one, other))
    pairs = zip(leaves, others, strict=False)
    return len(leaves) == len(others) and all(_same(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal entries; two that are not numbers are equal."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def stays_finite_at_any_strength(preserve: Any) -> None:
    """Methods with an implicit anchor and damped distillation do not diverge."""
    model = small_net()
    keeper = attach(model, at_strength(preserve, FAR))
    for task in range(3):
        learn(model, keeper, small_task(task))
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        raise Broken(f"parameters are not finite after three tasks at a strength of {FAR:g}; is Ω ≥ 0?")


def keeps_the_precision(preserve: Any) -> None:
    """A network in float64 keeps a state in float64; here one with a convolution."""
    model = small_net(torch.float64)
    if not any(isinstance(part, Wired) for part in preserve.parts):  # which take chains of layers alone
        model = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).double()
    keeper = attach(model, preserve)
    for task in range(2):
        learn(model, keeper, small_task(task, torch.float64))
    for part in keeper.parts:
        like = {group.name for group in part.term.groups if group.like_parameter}
        for group, tensors in part.state.items():
            for name, tensor in tensors.items() if group in like else ():
                if tensor.is_floating_point() and tensor.dtype != torch.float64:
                    raise Broken(f"{group}[{name!r}] is {name_of(tensor.dtype)}, the network float64; make it with torch.zeros_like(p)")


def consolidates_in_pieces(preserve: Any) -> None:
    """`splits`: a keeper calls `consolidate` for one parameter, or for some entries of it, at a time, to need less memory."""
    model = small_net()
    keeper = attach(model, preserve)
    learn(model, keeper, small_task(0))
    g = torch.Generator().manual_seed(0)
    parameters = {name: p.detach() + 0.1 for name, p in model.named_parameters()}
    for part in keeper.parts:
        omega = {name: torch.rand(p.shape, generator=g) for name, p in parameters.items()}
        whole = part.term.consolidate(copy.deepcopy(part.state), parameters, omega)
        split = consolidate(part.term, copy.deepcopy(part.state), parameters, dict(omega), Storage(), size=7)
        for group, tensors in whole.items():
            for name, tensor in tensors.items():
                same(f'splits = "{part.term.splits}", but {group}[{name!r}], made in pieces,', split[group][name], tensor)


def goes_on_from_a_saved_state(preserve: Any) -> None:
    """`state_dict` and `load_state_dict` lose nothing: a third task ends at the same parameters, in the same state."""
    model = small_net()
    keeper = attach(model, preserve)
    for task in range(2):
        learn(model, keeper, small_task(task))
    other = small_net()
    other.load_state_dict(model.state_dict())
    twin = attach(other, preserve)
    twin.load_state_dict(copy.deepcopy(keeper.state_dict()))
    ends = []
    for network, held in ((model, keeper), (other, twin)):
        torch.manual_seed(0)
        learn(network, held, small_task(2))
        ends.append(dict(network.named_parameters()))
    for name, p in ends[0].items():
        same(f"{name} after a task that began with a saved state", ends[1][name], p)
    for key, value in keeper.state_dict().items():
        if isinstance(value, Tensor):
            same(f"{key} after a task that began with a saved state", twin.state_dict()[key], value)
