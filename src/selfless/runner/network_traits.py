"""Facts about the network of a run that are needed before the network is built."""

from __future__ import annotations

from dataclasses import dataclass

from selfless.spec import Run

SMALL = 512  # units per layer; up to this width the steps of an MLP are too short to be split between threads


@dataclass(frozen=True)
class NetworkTraits:
    """Facts that decide which runs share a fleet and how they train.

    convolves               it has convolutions; stacking them does not make a CPU faster
    has_running_statistics  it has batch normalisation, or it may have it: a custom network is unknown until it is built
    has_short_steps         it is a small MLP
    """

    convolves: bool
    has_running_statistics: bool
    has_short_steps: bool


def network_traits(run: Run) -> NetworkTraits:
    """Return the traits of the network that `selfless.models.build` builds for a run, from its name and options."""
    family, _, rest = run.model.partition("-")
    width = rest.partition("-")[0]
    return NetworkTraits(
        convolves=family in ("cnn", "vgg", "alexnet"),
        has_running_statistics=":" in run.model or bool(run.model_options.get("batch_norm")),
        has_short_steps=family == "mlp" and width.isdigit() and int(width) <= SMALL,
    )
