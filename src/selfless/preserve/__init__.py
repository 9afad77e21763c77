"""Preservers: methods that keep old tasks from being forgotten. One file per family, one entry in `PRESERVERS` per method.

Lives here: the base class, the capabilities that a method may have, and the methods.

Imports functional, importance, network and terms.
Imported by bench, cli, engine, experiments, integrations, keeper, recommendation, runner, spec, testing and trained.
"""

from selfless.preserve.ags_cl import AGSCL
from selfless.preserve.base import Group, NoPreserver, Preserver
from selfless.preserve.capabilities import State, Tensors
from selfless.preserve.ebll import EBLL
from selfless.preserve.gpm import GPM, SGP
from selfless.preserve.hat import HAT
from selfless.preserve.imm import IMM
from selfless.preserve.lwf import LwF
from selfless.preserve.packnet import PackNet
from selfless.preserve.quadratic import EWC, MAS, SI, LocalMAS, OnlineEWC, Quadratic
from selfless.preserve.replay import DERpp, Replay
from selfless.preserve.rwalk import RWalk

PRESERVERS: dict[str, type[Preserver]] = {
    kind.name: kind
    for kind in (NoPreserver, MAS, LocalMAS, EWC, OnlineEWC, SI, RWalk, LwF, EBLL, IMM, HAT, PackNet, GPM, SGP, AGSCL, Replay, DERpp)
}
PRESERVERS["finetune"] = NoPreserver  # its name in the paper's tables

__all__ = [
    "AGSCL",
    "EBLL",
    "EWC",
    "GPM",
    "HAT",
    "IMM",
    "MAS",
    "PRESERVERS",
    "SGP",
    "SI",
    "DERpp",
    "Group",
    "LocalMAS",
    "LwF",
    "NoPreserver",
    "OnlineEWC",
    "PackNet",
    "Preserver",
    "Quadratic",
    "RWalk",
    "Replay",
    "State",
    "Tensors",
]
