"""Continual learning that leaves room: a network learns tasks one after another, keeps the old ones, and has capacity for the next.

In your own training loop, in this order:

    keeper = selfless.attach(model, preserve=MAS(0.1), sparsify=SLNID(1e-3))     attach     returns a Keeper
    keeper.anchor_with(optimizer)                                                once for each optimizer
    loss = F.cross_entropy(model(x), y) + keeper.penalty()                       in every step
    keeper.consolidate(loader)                                                   when a task has ended
    print(keeper.capacity())                                                     Capacity   what is free for the next task

Whole runs, from data to a table:

    run = selfless.Run(stream="permuted-mnist", sparsify="slnid:1e-3", seed=0)   Run        all settings as one value
    run = selfless.Run(**selfless.recommend(inputs="different", heads="shared").settings)   recommend   the best measured methods
    result = selfless.train(run, out="results")                                  train      returns a Result, or a list of them
    result.accuracy[t, u], result.summary()                                      Result     accuracy on task u after task t
    stream = selfless.stream([(train, test), …])                                 stream     your own data sets, for train(stream=…)
    model = selfless.load("results/KEY").model(task=0)                           load       a recorded result, and its trained network

    preservers    MAS LocalMAS EWC OnlineEWC SI RWalk LwF EBLL IMM HAT PackNet GPM SGP AGSCL NoPreserver
    with old data Replay DERpp
    sparsifiers   SNI SNID SLNI SLNID L1Rep DeCov SparingDeCov L1Param L2Param OrthReg NoSparsifier
    activations   Maxout LWTA
    modules       functional (the formulas), importance, preserve, sparsify, models, data, trained, metrics, capacity, experiments, testing

The command line is `selfless --help`. Importing the package is fast: torch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "attach": "keeper",
    "Keeper": "keeper",
    "tune": "experiments.tuning",
    **dict.fromkeys(["recommend", "Recommendation"], "recommendation"),
    "describe": "network.describing",
    "Capacity": "capacity",
    **dict.fromkeys(
        ["MAS", "LocalMAS", "EWC", "OnlineEWC", "SI", "RWalk", "LwF", "EBLL", "IMM", "HAT", "PackNet", "GPM", "SGP", "NoPreserver"],
        "preserve",
    ),
    "AGSCL": "preserve",
    **dict.fromkeys(["Replay", "DERpp"], "preserve"),  # they keep samples of old tasks
    **dict.fromkeys(["SNI", "SNID", "SLNI", "SLNID", "L1Rep", "DeCov", "L1Param", "L2Param", "OrthReg", "NoSparsifier"], "sparsify"),
    "SparingDeCov": "sparsify",
    **dict.fromkeys(["Run", "Result"], "spec"),
    **dict.fromkeys(["train", "load"], "runner"),
    "stream": "data",
    **dict.fromkeys(["Maxout", "LWTA"], "activations"),
}
_MODULES = {
    "capacity",
    "data",
    "experiments",
    "functional",
    "importance",
    "metrics",
    "models",
    "preserve",
    "sparsify",
    "testing",
    "trained",
}

# Written out, because type checkers read it: a name that is missing here is private to them.
__all__ = [
    "AGSCL",
    "EBLL",
    "EWC",
    "GPM",
    "HAT",
    "IMM",
    "LWTA",
    "MAS",
    "SGP",
    "SI",
    "SLNI",
    "SLNID",
    "SNI",
    "SNID",
    "Capacity",
    "DERpp",
    "DeCov",
    "Keeper",
    "L1Param",
    "L1Rep",
    "L2Param",
    "LocalMAS",
    "LwF",
    "Maxout",
    "NoPreserver",
    "NoSparsifier",
    "OnlineEWC",
    "OrthReg",
    "PackNet",
    "RWalk",
    "Recommendation",
    "Replay",
    "Result",
    "Run",
    "SparingDeCov",
    "__version__",
    "attach",
    "capacity",
    "data",
    "describe",
    "experiments",
    "functional",
    "importance",
    "load",
    "metrics",
    "models",
    "preserve",
    "recommend",
    "sparsify",
    "stream",
    "testing",
    "train",
    "trained",
    "tune",
]

if TYPE_CHECKING:
    from selfless import capacity, data, experiments, functional, importance, metrics, models, preserve, sparsify, testing, trained
    from selfless.activations import LWTA, Maxout
    from selfless.capacity import Capacity
    from selfless.data import stream
    from selfless.experiments.tuning import tune
    from selfless.keeper import Keeper, attach
    from selfless.network.describing import describe
    from selfless.preserve import (
        AGSCL,
        EBLL,
        EWC,
        GPM,
        HAT,
        IMM,
        MAS,
        SGP,
        SI,
        DERpp,
        LocalMAS,
        LwF,
        NoPreserver,
        OnlineEWC,
        PackNet,
        Replay,
        RWalk,
    )
    from selfless.recommendation import Recommendation, recommend
    from selfless.runner import load, train
    from selfless.sparsify import SLNI, SLNID, SNI, SNID, DeCov, L1Param, L1Rep, L2Param, NoSparsifier, OrthReg, SparingDeCov
    from selfless.spec import Result, Run


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"selfless.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"selfless.{name}")
    raise AttributeError(f"module 'selfless' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
