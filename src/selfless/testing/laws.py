"""The laws. Each is a function that raises an error, with the remedy, if a method breaks it; `LAWS` says for which methods it holds."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.engine.learner import Learner
from selfless.keeper import Keeper, attach
from selfless.keeper.pieces import consolidate
from selfless.keeper.storage import Storage
from selfless.preserve import PRESERVERS
from selfless.preserve.capabilities import Anchored, Distils, Gated, ProjectsSteps, Replays
from selfless.sparsify import SPARSIFIERS, Sparsifier, size_of
from selfless.spec import Run
from selfless.terms import Term, add, parse
from selfless.testing.loop import train_in_loop
from selfless.testing.small import small_net, small_run, small_task

RTOL, ATOL = 1e-3, 1e-4  # float32, after three tasks of six steps
ALL = 999  # more than all samples of the small tasks
FAR = 1e6  # a strength at which an ordinary gradient step would diverge


class Law(NamedTuple):
    """What a law says, which terms it holds for, and the function that tests it."""

    says: str
    holds_for: Callable[[Any], bool]
    test: Callable[[Any], None]


def is_value(term: Term) -> None:
    """A run with an equal term is the same run, so a term must be a value that nobody changes."""
    kind = type(term)
    if not (dataclasses.is_dataclass(term) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise AssertionError(f"{kind.__name__} is not a frozen dataclass; write @dataclass(frozen=True) above the class")
    twin = copy.deepcopy(term)
    if twin != term or hash(twin) != hash(term):
        raise AssertionError("a copy of it is not equal to it; options must be values, such as numbers, text and tuples")
    for strength in (math.nan, -1.0):
        try:
            dataclasses.replace(term, strength=strength)
        except ValueError:
            continue
        raise AssertionError(f"it takes the strength {strength}; call super().__post_init__() in your __post_init__")


def is_read_back(term: Term) -> None:
    """Records and commands hold a term as text."""
    kinds: Any = SPARSIFIERS if term.role == "sparsifier" else PRESERVERS
    found = parse(str(term), kinds, term.role)
    if found != term:
        raise AssertionError(f"{str(term)!r} is read as {found!r}; give every option a default, and use numbers, text, True and False")


# -------------------------------------------------------------------------------------------------------------- sparsifiers
def is_one_number(kind: Sparsifier) -> None:
    """R is one finite number with a finite gradient, with and without α, in every precision."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        h = _activations().to(dtype).requires_grad_()
        for alpha in (None, _alpha()):
            value = size_of(kind, h, alpha)
            if not torch.isfinite(value):
                raise AssertionError(f"penalty() is {value.item()} for ordinary activations in {_name(dtype)}")
            if not value.requires_grad:
                raise AssertionError("penalty() does not depend on what it gets; compute it from its first argument, without detach()")
            (gradient,) = torch.autograd.grad(value, h)
            if not torch.isfinite(gradient).all():
                raise AssertionError(f"the gradient of penalty() is not finite in {_name(dtype)}: a root or a quotient of 0?")


def is_finite_at_rest(kind: Sparsifier) -> None:
    """Silent neurons are what a sparsifier aims at."""
    for shape in ((7, 10), (1, 10)):
        h = torch.zeros(shape, requires_grad=True)
        (gradient,) = torch.autograd.grad(size_of(kind, h, _alpha()), h, allow_unused=True)
        if gradient is not None and not torch.isfinite(gradient).all():
            raise AssertionError(f"the gradient of penalty() is not finite if all activations are 0 (samples: {shape[0]}); add a little")


def scales_with_its_strength(kind: Sparsifier) -> None:
    """The keeper multiplies by λ, and λ = 0 is off."""
    (x, _), *_ = small_task(0)
    sizes = []
    for strength in (0.0, 1e-3, 2e-3):
        model = small_net()
        keeper = attach(model, sparsify=dataclasses.replace(kind, strength=strength))
        model(x)
        sizes.append(keeper.penalty().item())
    if sizes[0] != 0.0 or not math.isclose(sizes[2], 2 * sizes[1], rel_tol=1e-4, abs_tol=1e-12):
        raise AssertionError(f"at the strengths 0, 0.001 and 0.002 it costs {sizes}; leave the strength out of penalty()")


def maps_over_members(kind: Sparsifier) -> None:
    """A fleet maps `penalty` over its members."""
    h, alpha = _activations(3), torch.rand(3, 10, generator=torch.Generator().manual_seed(1))
    alone = torch.stack([size_of(kind, x, a) for x, a in zip(h, alpha, strict=True)])
    together = torch.func.vmap(kind.penalty)(h, alpha)
    _same("penalty() of one member", together, alone)


def is_the_mean_it_declares(kind: Sparsifier) -> None:
    """`is_mean`: over several ranks, the mean of their values is then the value of the whole batch."""
    h = _activations().repeat(2, 1) + 0.1 * torch.rand(14, 10, generator=torch.Generator().manual_seed(2))
    halves = torch.stack([size_of(kind, half, None) for half in h.chunk(2)]).mean()
    _same("is_mean = True, but the mean over the halves of a batch", halves, size_of(kind, h, None))


def has_the_gradient_it_declares(kind: Sparsifier) -> None:
    """`pair_form`: the engine adds the gradient 2Sh/M of the pair form itself, without calling `penalty`."""
    for alpha in (None, _alpha()):
        form = kind.pair_form(10, alpha)
        if form is not None:
            h = _activations().requires_grad_()
            (gradient,) = torch.autograd.grad(size_of(kind, h, alpha), h)
            _same("the gradient of pair_form()", form.gradient(h.detach()), gradient)


# --------------------------------------------------------------------------------------------------------------- preservers
def costs_nothing_where_a_task_ended(preserve: Any) -> None:
    """At θ* the penalty Σ Ω(θ − θ*)² is 0, and so is the distance to a teacher with the same parameters."""
    model = small_net()
    keeper = attach(model, preserve)
    _learn(model, keeper, 0, implicit=False)
    cost = keeper.penalty(small_task(0)[0]).item()
    if abs(cost) > 1e-5 * max(1.0, preserve.fixed_strength):
        raise AssertionError(f"it costs {cost:g} at θ*, the parameters with which the task ended; keep p.detach().clone() in consolidate()")


def stays_finite_at_any_strength(preserve: Any) -> None:
    """Methods with an implicit anchor and damped distillation do not diverge."""
    model = small_net()
    keeper = attach(model, dataclasses.replace(preserve, strength=FAR))
    for task in range(3):
        _learn(model, keeper, task)
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        raise AssertionError(f"parameters are not finite after three tasks at the strength {FAR:g}; is Ω ≥ 0?")


def keeps_the_precision(preserve: Any) -> None:
    """A network in float64 keeps a state in float64."""
    model = small_net(torch.float64)
    keeper = attach(model, preserve)
    for task in range(2):
        _learn(model, keeper, task, torch.float64)
    for part in keeper.parts:
        like = {group.name for group in part.term.groups if group.like_parameter}
        for group, tensors in part.state.items():
            for name, tensor in tensors.items() if group in like else ():
                if tensor.is_floating_point() and tensor.dtype != torch.float64:
                    raise AssertionError(
                        f"{group}[{name!r}] is {_name(tensor.dtype)}, the network float64; make it with torch.zeros_like(p)"
                    )


def consolidates_in_pieces(preserve: Any) -> None:
    """`splits`: a keeper calls `consolidate` for one parameter, or for some entries of it, at a time, to need less memory."""
    model = small_net()
    keeper = attach(model, preserve)
    _learn(model, keeper, 0)
    g = torch.Generator().manual_seed(0)
    parameters = {name: p.detach() + 0.1 for name, p in model.named_parameters()}
    for part in keeper.parts:
        omega = {name: torch.rand(p.shape, generator=g) for name, p in parameters.items()}
        whole = part.term.consolidate(copy.deepcopy(part.state), parameters, omega)
        split = consolidate(part.term, copy.deepcopy(part.state), parameters, dict(omega), Storage(), size=7)
        for group, tensors in whole.items():
            for name, tensor in tensors.items():
                _same(f'splits = "{part.term.splits}", but {group}[{name!r}], made in pieces,', split[group][name], tensor)


def goes_on_from_a_saved_state(preserve: Any) -> None:
    """`state_dict` and `load_state_dict` lose nothing: a third task ends at the same parameters, in the same state."""
    model = small_net()
    keeper = attach(model, preserve)
    for task in range(2):
        _learn(model, keeper, task)
    other = small_net()
    other.load_state_dict(model.state_dict())
    twin = attach(other, preserve)
    twin.load_state_dict(copy.deepcopy(keeper.state_dict()))
    ends = []
    for network, held in ((model, keeper), (other, twin)):
        torch.manual_seed(0)
        _learn(network, held, 2)
        ends.append(dict(network.named_parameters()))
    for name, p in ends[0].items():
        _same(f"{name} after a task that began with a saved state", ends[1][name], p)
    for key, value in keeper.state_dict().items():
        if isinstance(value, Tensor):
            _same(f"{key} after a task that began with a saved state", twin.state_dict()[key], value)


# ----------------------------------------------------------------------------------------------------- in loops and in runs
def acts_alike_in_loops_and_runs(term: Term) -> None:
    """`attach` in a plain loop and a run of the engine end at the same parameters, with the same α."""
    run = _run_of(_reading_all(term))
    made, learner = train_in_loop(run), Learner([run])
    learner.learn()
    for name, p in made.model.named_parameters():
        if not torch.isfinite(p).all():
            raise AssertionError(f"{name} is not finite after three small tasks; check it at a smaller strength")
        _same(f"{name} of a run, beside that of a loop", learner.fleet.params[name][0], p)
    for name, alpha in made.keeper.alpha.items():
        _same(f"α of {name} in a run, beside that of a loop", learner.fleet.alpha[name][0], alpha)


def acts_alike_in_fleets(term: Any) -> None:
    """Runs end alike, alone and in a fleet of three; they differ in their seeds and, if they may, in their strengths.

    The first one is not trained alone: `acts_alike_in_loops_and_runs` does that.
    """
    one_strength = any(getattr(part, "same_strength", False) for part in term.parts)
    strengths = [1.0] * 3 if one_strength or term.is_auto else [1.0, 0.5, 0.0]
    terms = [term if share == 1.0 else term.with_strength(share * term.fixed_strength) for share in strengths]
    runs = [_run_of(one, seed=seed) for seed, one in enumerate(terms)]
    fleet = Learner(runs)
    fleet.learn()
    for member in (1, 2):
        alone = Learner([runs[member]])
        alone.learn()
        for name, p in alone.fleet.params.items():
            _same(f"{name} of member {member + 1} of a fleet, beside the same run alone", fleet.fleet.params[name][member], p[0])


# ------------------------------------------------------------------------------------------------------------------ helpers
def _learn(model: nn.Module, keeper: Keeper, task: int, dtype: torch.dtype = torch.float32, implicit: bool = True) -> None:
    """Train two epochs of a small task in a plain loop."""
    data = small_task(task, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if implicit:
        keeper.anchor_with(optimizer)
    for epoch in range(2):
        keeper.begin_epoch(epoch, 2, batches=len(data))
        for x, y in data:
            loss = F.cross_entropy(model(x), y) + keeper.penalty((x, y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    keeper.consolidate(data)


def _reading_all(term: Any) -> Term:
    """Return a method that draws samples of a task as one that takes all of them: loops and runs draw different ones."""
    parts = []
    for part in term.parts:
        counts = {f.name for f in dataclasses.fields(part)} & {"samples", "batch"} if _has(Replays, ProjectsSteps)(part) else set()
        parts.append(dataclasses.replace(part, **dict.fromkeys(counts, ALL)))
    found: Term = add(parts)
    return found


def _run_of(term: Term, **changes: Any) -> Run:
    """Return a small run of a preserver with SLNID, or of a sparsifier with MAS."""
    return small_run(**{"sparsify" if term.role == "sparsifier" else "preserve": term}, **changes)


def _activations(members: int | None = None) -> Tensor:
    shape = (7, 10) if members is None else (members, 7, 10)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu()


def _alpha() -> Tensor:
    return torch.rand(10, generator=torch.Generator().manual_seed(1))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same(what: str, found: Tensor, wanted: Tensor) -> None:
    """Raise AssertionError unless the two are equal up to rounding."""
    found, wanted = found.double(), wanted.double()
    if not torch.allclose(found, wanted, rtol=RTOL, atol=ATOL):
        raise AssertionError(f"{what} differs by {(found - wanted).abs().max().item():.2g}, of {wanted.abs().max().item():.2g} at most")


def _is_importable(term: Term) -> bool:
    """Return False for a class of a notebook or inside a function, which no other process can import."""
    return not any(type(part).__module__ == "__main__" or "<locals>" in type(part).__qualname__ for part in term.parts)


def _sparsifies(term: Term) -> bool:
    return term.role == "sparsifier" and term.name != "none"


def _is_single(term: Term) -> bool:
    return len(term.parts) == 1


def _declares_a_mean(kind: Any) -> bool:
    return bool(kind.is_mean)


def _preserves(term: Any) -> bool:
    return bool(term.role == "preserver")


def _is_stable(term: Any) -> bool:
    """Return whether a preserver promises to be stable at any strength: by its implicit anchor, or by its damping."""
    return _is_single(term) and not term.is_auto and (isinstance(term, Anchored) or (isinstance(term, Distils) and _damped(term)))


def _damped(term: Any) -> bool:
    return any(group.name == "curvature" for group in term.groups) and getattr(term, "damped", True)


def _draws(term: Any) -> bool:
    return any(getattr(part, "draws_randomly", False) for part in term.parts)


def _all_of(*conditions: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda term: all(condition(term) for condition in conditions)


def _has(*kinds: type) -> Callable[[Any], bool]:
    return lambda term: any(isinstance(part, kinds) for part in term.parts)


LAWS = (
    Law("it is a frozen value, and refuses a strength that is none", _is_single, is_value),
    Law("its text form is read back as the same method", _is_importable, is_read_back),
    Law("its penalty is one finite number with a finite gradient", _all_of(_sparsifies, _is_single), is_one_number),
    Law("its gradient is finite where all neurons are silent", _all_of(_sparsifies, _is_single), is_finite_at_rest),
    Law("its cost grows with its strength, and strength 0 is off", _all_of(_sparsifies, _is_single), scales_with_its_strength),
    Law("its penalty can be mapped over the members of a fleet", _all_of(_sparsifies, _is_single), maps_over_members),
    Law(
        "it is a mean over samples if it says so",
        lambda term: _is_single(term) and getattr(term, "is_mean", False),
        is_the_mean_it_declares,
    ),
    Law("its pair form has the gradient of its penalty", _all_of(_sparsifies, _is_single), has_the_gradient_it_declares),
    Law(
        "it costs nothing where a task ended",
        lambda term: _has(Anchored, Distils)(term) and not _has(Gated, Replays)(term),
        costs_nothing_where_a_task_ended,
    ),
    Law("nothing diverges at any strength", _is_stable, stays_finite_at_any_strength),
    Law("its state has the precision of the network", _preserves, keeps_the_precision),
    Law(
        "it can be consolidated in pieces if it says so",
        lambda term: _preserves(term) and any(part.splits != "whole" for part in term.parts),
        consolidates_in_pieces,
    ),
    Law("it goes on from a saved state", _preserves, goes_on_from_a_saved_state),
    Law("a run trains it as a loop does", lambda term: not _draws(term), acts_alike_in_loops_and_runs),
    Law("a fleet trains it as single runs do", lambda term: True, acts_alike_in_fleets),
)
