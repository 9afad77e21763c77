"""What keeps old tasks. One file a family, one entry here."""

from selfless.preserve.base import NoPreserver, Preserver, State
from selfless.preserve.ebll import EBLL
from selfless.preserve.hat import HAT
from selfless.preserve.imm import IMM
from selfless.preserve.lwf import LwF
from selfless.preserve.packnet import PackNet
from selfless.preserve.quadratic import EWC, MAS, SI, LocalMAS, OnlineEWC, Quadratic
from selfless.preserve.rwalk import RWalk

PRESERVERS: dict[str, type[Preserver]] = {
    kind.name: kind for kind in (NoPreserver, MAS, LocalMAS, EWC, OnlineEWC, SI, RWalk, LwF, EBLL, IMM, HAT, PackNet)
}
PRESERVERS["finetune"] = NoPreserver  # as tables call it

__all__ = [
    "EBLL",
    "EWC",
    "HAT",
    "IMM",
    "MAS",
    "PRESERVERS",
    "SI",
    "LocalMAS",
    "LwF",
    "NoPreserver",
    "OnlineEWC",
    "PackNet",
    "Preserver",
    "Quadratic",
    "RWalk",
    "State",
]
