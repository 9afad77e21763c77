"""Measure the room of any model on any data: hooks that sum activations, and one call for the tasks of a finished network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from selfless.capacity.activity import MOST_PAIRS, Activity, observe, rows_of
from selfless.capacity.counts import THRESHOLD, Capacity, count_free
from selfless.capacity.rooms import Sets, add_sets, rooms, task_sets
from selfless.importance import measure as measure_importance
from selfless.importance.objectives import FunctionNorm
from selfless.network.calling import Forward, batch_size, check_batches, evaluating, run_batch, to_device, unwrap
from selfless.network.describing import watch_pass
from selfless.network.layers import Layers, Tap, is_automatic, resolve
from selfless.network.roles import first_tensor, neuron_axis

SAMPLES = 2000  # samples of a task that are read; the measures change little with more
ROWS = 8 * SAMPLES  # rows of every layer (samples × positions) after which a keeper reads no more samples


class Peeked:
    """Batches whose first ones were read before: `first` holds them, and the first pass over this object yields every batch once.

    A generator is used up by that pass; a DataLoader is opened once, so that its order is drawn once.
    """

    def __init__(self, batches: Iterable[Any], samples: int) -> None:
        self.batches, self.first = batches, []
        rest, count = iter(batches), 0
        while count < samples and (batch := next(rest, None)) is not None:
            self.first.append(batch)
            count += batch_size(batch)
        self._rest: Iterator[Any] | None = itertools.chain(self.first, rest)

    def __iter__(self) -> Iterator[Any]:
        rest, self._rest = self._rest, None
        return iter(self.batches) if rest is None else rest

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # TypeError for a generator, as it is for the generator itself


class Meter:
    """Inside `with`: forward passes of the model add the activations of its taps to `found`, {layer: Activity}."""

    def __init__(self, taps: dict[str, Tap], most: int = MOST_PAIRS) -> None:
        self.most = most
        self.taps = {name: tap for name, tap in taps.items() if tap.complete}
        self.found: dict[str, Activity] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Meter:
        self._handles = [tap.module.register_forward_hook(self._hook(name, tap)) for name, tap in self.taps.items()]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str, tap: Tap) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            n = first_tensor((output,), {})
            if n is None or n.dim() < 2:
                return
            h = n if tap.activation is None else tap.activation(n)
            axis = neuron_axis(h, tap.axis)
            one = observe(rows_of(h.unsqueeze(0), axis if axis < 0 else axis + 1).squeeze(0), self.most)
            known = self.found.get(name)
            self.found[name] = one if known is None or known.total.shape != one.total.shape else known + one

        return hook


def measure_activity(
    model: nn.Module,
    batches: Iterable[Any],
    taps: dict[str, Tap],
    forward: Forward | None = None,
    most: int = MOST_PAIRS,
    rows: float = math.inf,
) -> dict[str, Activity]:
    """Return the activity of each complete tap on these batches, in eval mode and without gradients.

    Once every tap has `rows` rows, the other batches are not read.
    """
    with evaluating(model), torch.no_grad(), Meter(taps, most) as meter:
        for batch in batches:
            run_batch(model, to_device(batch, model), forward)
            if meter.found and min(one.rows for one in meter.found.values()) >= rows:
                break
    return {name: one.cpu() for name, one in meter.found.items()}


def measure(
    model: nn.Module,
    tasks: Sequence[Iterable[Any]],
    *,
    layers: Layers = "auto",
    heads: Sequence[str] = (),
    forward: Forward | None = None,
    samples: int = SAMPLES,
    threshold: float = THRESHOLD,
) -> list[Capacity]:
    """Return the capacity after each task of a finished network, as far as it shows on the data of its tasks.

    tasks      the batches of each task, in the order of training: x, (x, y, …) or dicts
    layers     as in `selfless.attach`
    forward    forward(model, batch) → output, for models that take more than x
    samples    how many samples of each task to read

    α is mean |∂‖f‖²/∂n|, summed over tasks for `Capacity.neurons`. Free parameters need a preserver and are not counted.
    """
    model, earlier, counts = unwrap(model), 0, Sets()
    taps = resolve(model, layers, heads)
    total: dict[str, Tensor] = {}
    found: list[Capacity] = []
    for batches in tasks:
        check_batches(batches)
        first = Peeked(batches, samples).first
        if not first:
            raise ValueError(f"task {earlier + 1} has no batches; was a generator used before? Pass a DataLoader or a list")
        taps = _complete(model, taps, first[0], forward)
        activity = measure_activity(model, first, taps, forward)
        lenient = is_automatic(layers)
        alpha = measure_importance(model, first, FunctionNorm(), taps=taps, parameters=False, forward=forward, lenient=lenient).alpha
        sets = task_sets(alpha, activity)
        total = {name: total[name] + a if name in total else a for name, a in alpha.items()}
        neurons = {name: count_free(a, threshold) for name, a in total.items()}
        found.append(Capacity({}, neurons, earlier + 1, threshold, rooms(sets, counts, earlier, activity)))
        counts, earlier = add_sets(counts, sets), earlier + 1
    return found


def _complete(model: nn.Module, taps: dict[str, Tap], batch: Any, forward: Forward | None) -> dict[str, Tap]:
    """Return the taps with the activations that a forward pass shows; taps that have none stay as they are."""
    if all(tap.settled for tap in taps.values()):
        return taps
    watch = watch_pass(model, batch, forward)
    return {name: watch.complete(name, tap) for name, tap in taps.items()}
