"""Figure 3 and its counterpart in the appendix: the four leading methods on CIFAR-100 and Tiny ImageNet, ten tasks each."""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import Claim, Experiment, Profile, at_least, at_most, more
from selfless.experiments.protocols import (
    ALL_LAYERS,
    CIFAR_128,
    CIFAR_IMPLICIT,
    TINY_ASIDE,
    TINY_IMPLICIT,
    TINY_PLAIN,
    Protocol,
    cifar,
    tiny_best,
    tiny_imagenet,
)

ROWS = ("No-Reg", "L1-Rep", "DeCov", "SLNID")


def fig_3a(profile: Profile) -> Experiment:
    """Figure 3a: CIFAR-100, 256 units."""
    protocol, title = cifar(256, profile), "CIFAR-100 in ten tasks, 256 units"
    return _figure("fig-3a", title, "figure 3a", protocol, {"No-Reg": 55.06, "SLNID": 63.30}, 4, 8.24, profile)


def fig_3a_128(profile: Profile) -> Experiment:
    """Appendix: CIFAR-100, 128 units."""
    protocol = cifar(128, profile)
    title, source = "CIFAR-100 in ten tasks, 128 units", "appendix, CIFAR with 128 units"
    return _figure("fig-3a-128", title, source, protocol, {"No-Reg": 55.3, "SLNID": 61.16}, 5, 5.86, profile)


def fig_3b(profile: Profile) -> Experiment:
    """Figure 3b: Tiny ImageNet, and SLNID in all layers in profile `ours`."""
    protocol = tiny_imagenet(profile)
    made = _figure("fig-3b", "Tiny ImageNet in ten tasks", "figure 3b", protocol, {}, 4, None, profile)
    if profile == "paper":
        return made
    if profile == "equal":
        few = tuple(dataclasses.replace(cell, most_seeds=5) for cell in made.cells)
        return dataclasses.replace(made, cells=few, notes=(*made.notes, TINY_PLAIN))
    text = "Ours: with inhibition between the channels of convolutions too, SLNID is three points or more above No-Reg"
    ours = Claim(text, (at_least((ALL_LAYERS, protocol.column), ("No-Reg", protocol.column), 3),), ours=True)
    return dataclasses.replace(
        made, cells=(*made.cells, *tiny_best()), claims=(*made.claims, ours), notes=(*made.notes, TINY_PLAIN, TINY_ASIDE)
    )


def _figure(
    name: str,
    title: str,
    source: str,
    protocol: Protocol,
    published: dict[str, float],
    gain: float,
    measured: float | None,
    profile: Profile,
) -> Experiment:
    at, in_figure = {row: (row, protocol.column) for row in ROWS}, name != "fig-3a-128"
    decov = at_least(at["SLNID"], at["DeCov"], 2, 2.0 if in_figure else None)
    l1 = at_most(at["L1-Rep"], at["No-Reg"], 1)
    claims: tuple[Claim, ...] = (
        Claim(f"SLNID improves over No-Reg by {gain:g} points or more", (at_least(at["SLNID"], at["No-Reg"], gain, measured),)),
        Claim("SLNID is two points or more above DeCov", (decov,), ours=not in_figure),
        Claim("SLNID performs best: ahead of L1-Rep and of DeCov", tuple(more(at["SLNID"], at[row]) for row in ("L1-Rep", "DeCov"))),
        Claim("DeCov improves over No-Reg", (more(at["DeCov"], at["No-Reg"]),)),
    )
    if in_figure:
        claims += (
            Claim("A plain L1 norm does not help here: L1-Rep at most a point above No-Reg", (l1,)),
            Claim("L1-Rep, too, improves over No-Reg", (more(at["L1-Rep"], at["No-Reg"]),)),
        )
    else:
        claims += (Claim("L1-Rep suffers: at most a point above No-Reg", (l1,)),)
    notes: tuple[str, ...] = (
        () if in_figure else ("The two points above DeCov are those of figure 3; the appendix says that SLNID is best",)
    )
    if profile == "paper":
        notes += (CIFAR_IMPLICIT if "cifar" in protocol.base.stream else TINY_IMPLICIT,)
    if name == "fig-3a-128" and profile == "paper":
        notes += (CIFAR_128,)
    if in_figure:
        notes += ("On L1-Rep the paper says both: figure 3's caption that it does not help, section 4.2 that it improves over No-Reg",)
    return Experiment(name, title, source, "bars", protocol.cells(ROWS, published), claims, notes=notes, profile=profile)
