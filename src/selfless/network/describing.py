"""Describe the layers of a model: each with its activation, and why it was taken or left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from selfless.network.calling import Forward, evaluating, run_batch, to_device, unwrap
from selfless.network.discovery import Discovery
from selfless.network.layers import Layers, Tap, is_automatic, resolve
from selfless.network.roles import hidden_layers, is_weighted, neuron_rows, uncounted, within

Status = Literal["taken", "left", "open"]


@dataclass(frozen=True)
class LayerRow:
    """One layer: its name, its form, the activation after it, and whether the keeper takes it."""

    name: str
    form: str
    activation: str
    status: Status
    reason: str


@dataclass(frozen=True)
class Description:
    """The layers of a model. `print` shows a table; iterate to get the rows."""

    rows: tuple[LayerRow, ...]

    def __iter__(self) -> Iterator[LayerRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def taken(self) -> tuple[str, ...]:
        """The names of the layers that are taken."""
        return tuple(row.name for row in self.rows if row.status == "taken")

    def __str__(self) -> str:
        head = ("layer", "form", "activation", "", "why")
        cells = [head, *((r.name, r.form, r.activation, r.status, r.reason) for r in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in cells]
        return "\n".join([*lines, f"{len(self.taken)} of {len(self)} layers taken"])


def describe(
    model: nn.Module, layers: Layers = "auto", *, heads: Iterable[str] = (), batch: Any = None, forward: Forward | None = None
) -> Description:
    """Return which layers `attach(model, layers=…, heads=…)` would take, and why.

    Where an activation is a function in `forward`, only a forward pass shows it: pass a `batch`, x or (x, y) or a dict.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"describe takes a torch.nn.Module, not {type(model).__name__}")
    model, heads = unwrap(model), tuple(heads)
    taps = resolve(model, layers, heads)
    if batch is not None:
        watch = watch_pass(model, batch, forward)
        taps = {name: watch.complete(name, tap) for name, tap in taps.items()}
        taps = {name: tap for name, tap in taps.items() if tap.complete or name not in watch.reached}
    return describe_taps(model, layers, heads, taps)


def watch_pass(model: nn.Module, batch: Any, forward: Forward | None) -> Discovery:
    """Return what a forward pass shows, in eval mode and without gradients: which activation follows which layer."""
    watch = Discovery(model)
    with evaluating(model), torch.no_grad():
        watch.start()
        try:
            run_batch(model, to_device(batch, model), forward)
        finally:
            watch.stop()
    return watch


def describe_taps(model: nn.Module, layers: Layers, heads: Iterable[str], taps: Mapping[str, Tap], compiled: bool = False) -> Description:
    """Return the rows of every layer with weights, and of every other layer that was named; `taps` are the layers that are taken."""
    heads, reasons, rows = tuple(heads), uncounted(model), []
    kinds = nn.Linear if isinstance(layers, str) and layers == "auto" else None
    hidden = hidden_layers(model, heads) if kinds is None else hidden_layers(model, heads, kinds)
    by_weights = {tap.weighted: (name, tap) for name, tap in taps.items() if tap.weighted is not None}
    names = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if is_weighted(module):
            found = (name, taps[name]) if name in taps else by_weights.get(module)
            if found is not None:
                rows.append(_taken(name, module, found, names))
                continue
            reason = reasons.get(name) or _why_left(name, module, layers, heads, name in hidden, compiled)
            rows.append(LayerRow(name, _form(module), "–", "left", reason))
        elif name in taps and taps[name].weighted is None:
            rows.append(_taken(name, module, (name, taps[name]), names))
    return Description(tuple(rows))


def _taken(name: str, module: nn.Module, found: tuple[str, Tap], names: Mapping[nn.Module, str]) -> LayerRow:
    layer, tap = found
    if not tap.complete:
        return LayerRow(name, _form(module), "?", "open", "its activation is found in the first forward pass")
    activation = tap.module if tap.at_input else tap.activation
    kind = type(activation).__name__ if isinstance(activation, nn.Module) else getattr(activation, "__name__", "a function")
    own = names.get(activation, "").rpartition(".")[2] if isinstance(activation, nn.Module) and activation is not module else ""
    place = f" {own!r}" if own else ""
    return LayerRow(name, _form(module), f"{kind}{place}", "taken", "" if layer == name else f"as {layer!r}")


def _why_left(name: str, module: nn.Module, layers: Layers, heads: tuple[str, ...], is_hidden: bool, compiled: bool) -> str:
    """Return why a layer was left out."""
    if not is_automatic(layers):
        return "not named in layers="
    if any(within(name, head) for head in heads):
        return "a head"
    if layers == "auto" and isinstance(module, nn.modules.conv._ConvNd):
        return "a convolution: layers='all' takes it"
    if not is_hidden:
        return "the head, because it was registered last: name other heads with heads="
    if compiled:
        return "no activation module follows it; a compiled model hides functions: attach and run one batch before torch.compile"
    return "no activation function of torch follows it"


def _form(module: nn.Module) -> str:
    """Return the class of a layer and its sizes."""
    if not is_weighted(module):
        return type(module).__name__
    into, out = (getattr(module, f"{way}_features", getattr(module, f"{way}_channels", None)) for way in ("in", "out"))
    if into is None or out is None:
        out, into = neuron_rows(module).shape
    return f"{type(module).__name__} {into} → {out}"
