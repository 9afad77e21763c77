"""Build a fleet from its runs: the streams and the initialised networks, checked by one forward pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from selfless.data import Stream, locate_weights, stream
from selfless.engine import scenario
from selfless.engine.continuing import Parent, append
from selfless.engine.draws import draws_in_training
from selfless.engine.fleet import AUGMENT, Fleet
from selfless.engine.native.forward import is_native
from selfless.engine.native.hardware import prepare_backward
from selfless.engine.stack import Stack
from selfless.models import build, hidden_activations
from selfless.network.given import network_title
from selfless.network.wiring import chain
from selfless.preserve.capabilities import Encodes, Gated, Wired
from selfless.spec import Run


class CannotShareFleet(ValueError):
    """These runs cannot train as one fleet, but each can train alone."""


def build_streams(runs: Sequence[Run], data_dir: Path | None, parent: Parent | None = None) -> list[Stream]:
    """Return the stream of every run. Runs with the same seed share the stream and its data."""
    by_seed: dict[int, Stream] = {}
    for r in runs:
        if r.seed not in by_seed:
            shape = None if parent is None else parent.data.image_shape
            found = stream(r.stream, tasks=r.tasks, seed=r.seed, held_out=r.held_out, data_dir=data_dir, shape=shape, **r.stream_options)
            arranged = scenario.arrange(found, r.scenario) if parent is None else append(found, parent, r.scenario)
            by_seed[r.seed] = _reserve(arranged, r.outputs)
    return [by_seed[r.seed] for r in runs]


def _reserve(stream: Stream, outputs: int | None) -> Stream:
    """Return the stream for a network with so many output columns; None: those of its tasks."""
    if outputs is not None and outputs < stream.outputs:
        raise ValueError(
            f"the tasks of {stream.name} need {stream.outputs} output columns, and outputs is {outputs}; give at least as many"
        )
    return stream if outputs is None else replace(stream, outputs=outputs)


def build_fleet(runs: Sequence[Run], streams: Sequence[Stream], data_dir: Path | None, device: torch.device) -> Fleet:
    """Return the fleet of these runs with initialised networks."""
    run, first = runs[0], streams[0]
    augment = AUGMENT[run.augment]
    shape = augment.shape(first.input_shape) if augment else first.input_shape
    options = locate_weights(run.model, run.model_options, data_dir)
    modules = [build(r.model, outputs=first.outputs, input_shape=shape, seed=r.seed, **options) for r in runs]
    hidden, every = hidden_activations(modules[0]), (*hidden_activations(modules[0], conv=True), *hidden_activations(modules[0]))
    layers = every if run.layers == "all" else hidden
    _check_layers(runs, layers, every)
    _check_output(modules[0], shape, first.outputs, run.model)
    gated = any(isinstance(term, Gated) for term in run.preserve.parts)
    if run.optimizer != "sgd" and not all(term.has_own_rate for term in run.preserve.parts if isinstance(term, Gated)):
        raise ValueError(
            f"{run.preserve.name} trains its gates by SGD at the learning rate of the run, which is too small where that is one of "
            f"{run.optimizer}; use --optimizer sgd, or give the gates a rate of their own: {run.preserve},rate=0.05"
        )
    is_mapped = _check_together(modules, shape, run.model, device)
    draws = len(modules) > 1 and draws_in_training(modules[0], shape)
    stack = Stack(modules[0], layers, every if gated else (), is_mapped, draws)
    fleet = Fleet(runs, stack, *stack.stack_modules(modules, device), device)
    prepare_backward(device)
    if any(isinstance(term, Wired) for term in run.preserve.parts):
        fleet.wire(chain(stack.module, {name: stack.module.get_submodule(name) for name in every}))
    if run.scenario == "task":  # in the other scenarios no head belongs to a single task
        fleet.place_heads(first.heads, first.outputs)
    return fleet


def count_parameters(run: Run, stream: Stream) -> int:
    """Return how many parameters the network of a run has; 0 for a custom network, which only its own code can tell. No memory is used."""
    if ":" in run.model:
        return 0
    augment = AUGMENT[run.augment]
    shape = augment.shape(stream.input_shape) if augment else stream.input_shape
    options = {k: v for k, v in run.model_options.items() if k != "weights"}  # which are read later; they do not change the size
    if options.get("fc") == "pretrained":
        del options["fc"]
    return sum(p.numel() for p in build(run.model, outputs=stream.outputs, input_shape=shape, device="meta", **options).parameters())


def _check_layers(runs: Sequence[Run], layers: Sequence[str], every: Sequence[str]) -> None:
    """Raise ValueError if the network has no hidden activation modules but a method needs them."""
    run = runs[0]
    terms = [] if layers else [str(r.sparsify) for r in runs if any(t.is_on and t.reads != "parameters" for t in r.sparsify.parts)]
    for kind, found in ((Encodes, layers), (Wired, every)):
        terms += [str(run.preserve)] if not found and any(isinstance(term, kind) for term in run.preserve.parts) else []
    if terms:
        raise ValueError(
            f"{network_title(run.model)} has no hidden activation module, which {terms[0]} needs; use modules such as nn.ReLU() instead of "
            "functions, right after their layers, or name them in the class of the network: hidden = ('act1', 'act2')"
        )


def _check_together(modules: Sequence[nn.Module], shape: tuple[int, int, int], name: str, device: torch.device) -> bool:
    """Return True if `vmap` can run the networks. Raise CannotShareFleet if nothing else can run them together, as on a CPU."""
    if len(modules) == 1:
        return True
    if not is_native(modules[0]):
        states = [dict(m.state_dict()) for m in modules[:2]]
        stacked = {n: torch.stack([s[n].detach() for s in states]) for n in states[0]}
        probe = copy.deepcopy(modules[0]).eval()
        try:
            with torch.no_grad():
                torch.func.vmap(lambda state, x: torch.func.functional_call(probe, state, (x,)))(stacked, torch.zeros(2, 2, *shape))
        except Exception as error:
            if device.type != "cpu":
                return False
            raise CannotShareFleet(
                f"{network_title(name)} cannot run several members at once ({str(error).splitlines()[0][:120]}): its runs train one by one"
            ) from error
    return True


def _check_output(module: nn.Module, shape: tuple[int, int, int], outputs: int, name: str) -> None:
    """Raise ValueError unless the network returns (batch, outputs); a custom network may not."""
    mode = module.training
    try:
        with torch.no_grad():
            output = module.eval()(torch.zeros(2, *shape))
    except Exception as error:
        raise ValueError(f"{network_title(name)} cannot run on images of shape {shape} (channels, height, width): {error}") from error
    finally:
        module.train(mode)
    if isinstance(output, Tensor) and output.shape == (2, outputs):
        return
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    remedy = "return one row of outputs per input: flatten the input first, x.flatten(1)"
    if isinstance(output, Tensor) and output.dim() == 2 and len(output) == 2:
        has = output.shape[1]
        remedy = f"take the number from the argument outputs: def build(outputs, input_shape), or give the network {outputs} outputs"
        if has > outputs:
            remedy += f", or keep the other {has - outputs} for tasks to come: Run(outputs={has})"
    raise ValueError(
        f"{network_title(name)} returns {got} for two inputs of shape {shape}; it must return a tensor of shape (2, {outputs}): (batch, "
        f"outputs of all tasks together); {remedy}"
    )
