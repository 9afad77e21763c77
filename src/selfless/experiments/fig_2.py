"""Figure 2 and its counterpart in the appendix: nine methods on five permuted-MNIST tasks, accuracy on each task after the last one."""

from __future__ import annotations

from selfless.experiments.base import Cell, Claim, Comparison, Experiment, Profile, at_least, at_most, more
from selfless.experiments.protocols import permuted_mnist

ROWS = ("SLNID", "DeCov", "L1-Rep", "Maxout", "LWTA", "No-Reg", "OrthReg", "L2-WD", "L1-Param")
REPRESENTATION = ROWS[:3]
PUBLISHED = {
    128: {"No-Reg": 92.67, "SLNID": 95.83},
    64: {"No-Reg": 90.72, "SLNID": 93.89},
}  # of table 1; the figure's legend is not in the text
LAST = "last two tasks"
RELEASED = "Maxout, as released"


def fig_2(profile: Profile) -> Experiment:
    """Figure 2: 128 units."""
    return _figure("fig-2", 128, "figure 2", profile)


def fig_2_64(profile: Profile) -> Experiment:
    """Appendix: 64 units."""
    return _figure("fig-2-64", 64, "appendix, permuted MNIST with 64 units", profile)


def _among_best(width: int) -> tuple[Claim, ...]:
    """Return that SLNID is among the best: at 64 units by the average, at 128 units in every task, as the paper's words are."""
    text, column = "SLNID is among the best: within half a point of DeCov and L1-Rep", f"pMNIST {width}"

    def near(every_task: bool) -> tuple[Comparison, ...]:
        return tuple(at_least(("SLNID", column), (row, column), -0.5, every_task=every_task) for row in ("DeCov", "L1-Rep"))

    if width == 64:
        return (Claim(text, near(False)),)
    return Claim(f"{text}, in every task", near(True)), Claim("Ours: by the average, SLNID is among the best", near(False), ours=True)


def _figure(name: str, width: int, source: str, profile: Profile) -> Experiment:
    protocol = permuted_mnist(width, profile)
    at = {row: (row, protocol.column) for row in ROWS}
    gain = round(PUBLISHED[width]["SLNID"] - PUBLISHED[width]["No-Reg"], 2)
    others = [row for row in ROWS if row != "SLNID"]
    claims: tuple[Claim, ...] = (
        Claim("SLNID improves over No-Reg by two points or more", (at_least(at["SLNID"], at["No-Reg"], 2, gain),)),
        Claim("Sparsity of activations beats sparsity of parameters: L1-Rep > L1-Param", (more(at["L1-Rep"], at["L1-Param"]),)),
        Claim(
            "Regularizers of the representation beat OrthReg, the best of those of the parameters",
            tuple(more(at[row], at["OrthReg"]) for row in REPRESENTATION),
        ),
        Claim(
            "Regularizers of the representation are superior to all the others in all the tasks",
            tuple(more(at[row], at[other], every_task=True) for row in REPRESENTATION for other in ROWS if other not in REPRESENTATION),
        ),
        *_among_best(width),
        Claim("Maxout and LWTA improve slightly over ReLU", tuple(more(at[row], at["No-Reg"]) for row in ("Maxout", "LWTA"))),
        Claim(
            "Maxout and LWTA perform alike: within a point",
            (at_least(at["Maxout"], at["LWTA"], -1), at_most(at["Maxout"], at["LWTA"], 1)),
        ),
    )
    if width == 128:
        text = "L2-WD and L1-Param do not improve over the activation functions: at most level with the best, Maxout"
        claims += (
            Claim("SLNID is best on the last two tasks", tuple(at_least(("SLNID", LAST), (row, LAST)) for row in others)),
            Claim(text, tuple(at_most(at[row], at["Maxout"]) for row in ("L2-WD", "L1-Param"))),
        )
    cells = protocol.cells(ROWS, PUBLISHED[width]) + protocol.cells(ROWS, column=LAST, value="last-two")
    if width == 64:
        wide = permuted_mnist(128, profile)
        cells += wide.cells(("No-Reg",), PUBLISHED[128])
        half = PUBLISHED[64]["SLNID"] - PUBLISHED[128]["No-Reg"]
        text = "SLNID with 64 units does better than No-Reg with 128"
        claims += (Claim(text, (more(at["SLNID"], ("No-Reg", wide.column), 0, round(half, 2)),)),)
    notes: tuple[str, ...] = ("Published averages are table 1's; those in the figure's legend are not in the text",)
    if profile == "equal":
        released = protocol.candidates("Maxout", model_options={"released": True})
        cells += (Cell(RELEASED, protocol.column, released, choice=protocol.choice),)
        text = "Ours: Maxout as released improves over ReLU"
        claims += (Claim(text, (more((RELEASED, protocol.column), at["No-Reg"]),), ours=True),)
        halves = f"{width} → {width // 2} and {width // 2} → {width // 4}"
        notes += (f"Maxout has as many parameters as ReLU; as released, its pairs leave {halves} units. LWTA is as released",)
    return Experiment(
        name,
        f"Nine ways to leave room: permuted MNIST, {width} units a layer",
        source,
        "bars",
        cells,
        claims,
        notes=notes,
        profile=profile,
    )
