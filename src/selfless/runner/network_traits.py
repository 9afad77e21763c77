"""Facts about networks that a runner must know before it builds them."""

from __future__ import annotations

from dataclasses import dataclass

from selfless.spec import Run

SMALL = 512  # units per layer; steps of a perceptron up to here are too short to share between threads


@dataclass(frozen=True)
class NetworkTraits:
    """What decides with which runs, and how, the network of a run is trained.

    convolves               it has convolutions, which a CPU does not train faster when they are stacked
    has_running_statistics  it has batch normalisation, or may have: a custom network is unknown until it is built
    draws_randomly          it has dropout
    has_short_steps         it is a small perceptron
    """

    convolves: bool
    has_running_statistics: bool
    draws_randomly: bool
    has_short_steps: bool


def network_traits(run: Run) -> NetworkTraits:
    """The traits of the network that `selfless.models.build` makes for a run, by its name and options."""
    family, _, rest = run.model.partition("-")
    width = rest.partition("-")[0]
    return NetworkTraits(
        convolves=family in ("cnn", "vgg", "alexnet"),
        has_running_statistics=":" in run.model or bool(run.model_options.get("batch_norm")),
        draws_randomly=bool(run.model_options.get("dropout")),
        has_short_steps=family == "mlp" and width.isdigit() and int(width) <= SMALL,
    )
