"""Table 3: no hard task boundaries. Six variants; each group of classes is evaluated right after it was learnt, and at the end."""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import Cell, Claim, Experiment, Profile, at_least, at_most, more
from selfless.experiments.protocols import BLURRED_IMPLICIT, CIFAR_INHIBITION, KINDS, Protocol, blurred_cifar, cifar
from selfless.preserve import NoPreserver
from selfless.spec import Run

OWN, LAST = "own model", "last model"
COLUMNS = {OWN: "own-model", LAST: "average", f"{OWN}, of all 100": "own-model-all", f"{LAST}, of all 100": "last-model-all"}
FREE = " w/o MAS"
LOST, LOST_SPLIT = "lost", "lost with hard boundaries"
PUBLISHED = {
    "No-Reg w/o MAS": (69.20, 65.15),
    "SLNI w/o MAS": (72.14, 63.54),
    "SLNID w/o MAS": (73.03, 70.75),
    "No-Reg": (66.88, 66.33),
    "SLNI": (71.32, 64.50),
    "SLNID": (72.33, 70.94),
}
ALONE = {"paper": (1e-3,), "ours": (3e-4, 1e-3, 3e-3), "equal": CIFAR_INHIBITION}  # λ of the variants without MAS
SWEPT = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # λ of SLNI without MAS in profile `equal`


def _swept(strength: float) -> str:
    return f"SLNI w/o MAS, λ = {strength:g}"


def _candidates(protocol: Protocol, row: str, profile: Profile) -> tuple[Run, ...]:
    """Return the runs that a row chooses from; without MAS there is only λ to choose."""
    kind = row.removesuffix(FREE)
    if kind == row:
        return protocol.candidates(row)
    strengths = ALONE[profile] if kind != "No-Reg" else (0.0,)
    return tuple(dataclasses.replace(protocol.base, preserve=NoPreserver(), sparsify=KINDS[kind](strength)) for strength in strengths)


def table_3(profile: Profile) -> Experiment:
    """Table 3: No-Reg, SLNI and SLNID, with and without MAS."""
    protocol = blurred_cifar(profile)
    cells = []
    for row, (own, last) in PUBLISHED.items():
        for column, value in COLUMNS.items():
            published = {OWN: own, LAST: last}.get(column)
            cells.append(Cell(row, column, _candidates(protocol, row, profile), published, value, protocol.choice))
    if profile == "equal":
        for strength in SWEPT:  # SLNI's own model and last model are statements about one λ
            free = dataclasses.replace(protocol.base, preserve=NoPreserver(), sparsify=KINDS["SLNI"](strength))
            cells += [Cell(_swept(strength), column, (free,), value=COLUMNS[column], most_seeds=5) for column in (OWN, LAST)]
        hard = cifar(256, profile)
        for row in ("No-Reg", "SLNID", "No-Reg w/o MAS", "SLNID w/o MAS"):
            cells.append(Cell(row, LOST, _candidates(protocol, row, profile), value="lost", choice=protocol.choice))
            cells.append(Cell(row, LOST_SPLIT, _candidates(hard, row, profile), value="lost", choice=hard.choice))
    claims: tuple[Claim, ...] = (
        Claim(
            "Even without MAS, SLNID improves considerably, by more than four points (last model)",
            (at_least(("SLNID w/o MAS", LAST), ("No-Reg w/o MAS", LAST), 4, 5.6),),
        ),
        Claim("With MAS, SLNID is three points or more above No-Reg (last model)", (at_least(("SLNID", LAST), ("No-Reg", LAST), 3, 4.61),)),
        Claim(
            "SLNI, without the discount, improves the groups' own models on average",
            (more(("SLNI w/o MAS", OWN), ("No-Reg w/o MAS", OWN), 0, 2.94),),
        ),
        Claim(
            "SLNI, without the discount, does not improve the last model",
            (at_most(("SLNI w/o MAS", LAST), ("No-Reg w/o MAS", LAST), 0.5, -1.61),),
        ),
        Claim(
            "SLNID without MAS is already better than No-Reg with it (last model)",
            (more(("SLNID w/o MAS", LAST), ("No-Reg", LAST), 0, 4.42),),
        ),
        Claim(
            "MAS adds only a moderate gain: at most two points, with and without SLNID (last model)",
            (at_most(("SLNID", LAST), ("SLNID w/o MAS", LAST), 2, 0.19), at_most(("No-Reg", LAST), ("No-Reg w/o MAS", LAST), 2, 1.18)),
        ),
    )
    if profile == "equal":
        mixed, without, kept = (
            tuple(more((f"{row}{hard}", LOST_SPLIT), (f"{row}{soft}", LOST)) for row in ("No-Reg", "SLNID"))
            for hard, soft in (("", FREE), (FREE, FREE), ("", ""))
        )
        claims += (
            Claim("Less is forgotten without hard boundaries and without MAS than with both, as in section 4.2", mixed),
            Claim("Ours: without MAS in both, less is forgotten without hard boundaries", without, ours=True),
            Claim("Ours: with MAS, too, less is forgotten without hard boundaries", kept, ours=True),
        )
    notes: tuple[str, ...] = (
        "Own and last model are evaluated among the ten classes of the group, as the published values must be; among all 100 is harder",
    )
    if profile == "equal":
        notes += ("With hard boundaries: the runs of figure 3a, 1,250 steps a task along a cosine from 0.03; without: 1,000 steps at 0.01",)
    if profile == "paper":
        notes += (BLURRED_IMPLICIT,)
    return Experiment("table-3", "Without hard task boundaries", "table 3", "dots", tuple(cells), claims, notes=notes, profile=profile)
