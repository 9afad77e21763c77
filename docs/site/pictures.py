"""Draw the pictures of docs/pictures.md: what inhibition does to a layer, and what an anchor does to a step.

    python -m docs.site.pictures            # writes docs/images/idea-*.svg; takes a few seconds

Nothing is drawn by hand: every picture shows small networks that this script trains with the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor, nn

import selfless
from selfless import MAS, SLNID
from selfless.functional import PairForm

IMAGES = Path(__file__).resolve().parents[1] / "images"
INK, SOFT, LINE = "#1f2933", "#7b8794", "#d5dbe1"
OLD, NEW, FREE = "#2f6fb0", "#d9622b", "#c7ced6"
HEAT = LinearSegmentedColormap.from_list("heat", ["#f6f8fa", "#bcd4ea", "#5b96cd", "#1d5a99", "#0b2f57"])
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": LINE, "axes.labelcolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "text.color": INK, "axes.titlecolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "selfless", "svg.fonttype": "path",
    "axes.linewidth": 0.8, "xtick.major.width": 0.8, "ytick.major.width": 0.8,
}  # fmt: skip
CLASSES, NEURONS, PIXELS = 4, 48, 24


# ---- data and training -------------------------------------------------------------------------------------------------------
def make_task(seed: int, samples: int = 400) -> tuple[Tensor, Tensor]:
    """Return a classification task: each class is a pattern of pixels, with noise."""
    source = torch.Generator().manual_seed(seed)
    patterns = (torch.rand(CLASSES, PIXELS, generator=source) < 0.4).float()
    y = torch.arange(samples) % CLASSES
    x = patterns[y] + 0.35 * torch.randn(samples, PIXELS, generator=source)
    return x[y.argsort(stable=True)], y.sort().values


@dataclass
class Trained:
    """A network after two tasks: the activations of its hidden layer for the first one, and α after each task."""

    activations: Tensor
    alpha: list[Tensor]
    accuracy: list[float]


def train(sparsify: SLNID | None, tasks: list[tuple[Tensor, Tensor]], epochs: int = 60) -> Trained:
    """Train a network with one hidden layer on the tasks, with MAS and a sparsifier."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(PIXELS, NEURONS), nn.ReLU(), nn.Linear(NEURONS, CLASSES))
    keeper = selfless.attach(model, MAS(3.0), sparsify)
    found = Trained(torch.empty(0), [], [])
    for x, y in tasks:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        keeper.anchor_with(optimizer)
        for epoch in range(epochs):
            for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(40):
                loss = F.cross_entropy(model(x[rows]), y[rows]) + keeper.penalty()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        keeper.consolidate([(x, y)])
        found.alpha.append(next(iter(keeper.alpha.values())).clone())
        if len(found.activations) == 0:
            with torch.no_grad():
                found.activations = model[:2](x)
    with torch.no_grad():
        found.accuracy = [float((model(x).argmax(1) == y).float().mean()) for x, y in tasks]
    return found


# ---- what inhibition does to a layer -----------------------------------------------------------------------------------------
def draw_layer() -> None:
    """One layer without and with inhibition: its activations, and how many neurons are free after two tasks."""
    tasks = [make_task(1), make_task(2)]
    pair = {"MAS alone": train(None, tasks), "MAS with SLNID": train(SLNID(0.02), tasks)}
    figure, axes = plt.subplots(2, 2, figsize=(9.2, 5.9), height_ratios=[2.1, 1], layout="constrained", sharex="col")
    top = max(float(found.activations.quantile(0.995)) for found in pair.values())
    level = 0.05 * max(float(found.alpha[0].max()) for found in pair.values())
    height = 1.08 * max(float(found.alpha[1].max()) for found in pair.values())
    for column, (name, found) in enumerate(pair.items()):
        _heat(axes[0, column], found, name, top)
        _bars(axes[1, column], found, level, height)
        print(f"{name}: accuracy {found.accuracy}, active {(found.activations > 0).float().mean():.2f}")
    axes[0, 0].set_ylabel("samples of task 1, by class")
    axes[1, 0].set_ylabel("importance α")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (OLD, NEW)]
    handles.append(plt.Line2D([], [], color=FREE, marker="o", linestyle="", markersize=4))
    names = ["importance added by task 1", "added by task 2", "free after both tasks"]
    figure.legend(handles, names, loc="outside lower center", ncols=3, handlelength=1)
    save(figure, "idea-layer")


def _heat(ax: Axes, found: Trained, name: str, top: float) -> None:
    shown = torch.cat([part[:20] for part in found.activations.split(len(found.activations) // CLASSES)])
    ax.imshow(shown, cmap=HEAT, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    for edge in range(1, CLASSES):
        ax.axhline(20 * edge - 0.5, color="white", linewidth=2.5)
    active = 100 * float((found.activations > 0).float().mean())
    ax.set_title(name, pad=22)
    ax.text(0, 1.03, f"a sample activates {active:.0f} % of the neurons", transform=ax.transAxes, color=SOFT)
    ax.set_yticks([20 * c + 9.5 for c in range(CLASSES)], [f"class {c + 1}" for c in range(CLASSES)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _bars(ax: Axes, found: Trained, level: float, height: float) -> None:
    first, last = found.alpha[0].numpy(), found.alpha[1].numpy()
    places = np.arange(NEURONS)
    ax.bar(places, first, color=OLD, width=0.8)
    ax.bar(places, last - first, bottom=first, color=NEW, width=0.8)
    free = np.flatnonzero(last < level)
    ax.plot(free, np.full(len(free), -0.045 * height), "o", color=FREE, markersize=3.4, clip_on=False)
    ax.set(ylim=(0, height), xlim=(-0.7, NEURONS - 0.3), yticks=[])
    average = 100 * sum(found.accuracy) / len(found.accuracy)
    ax.set_xlabel(f"{len(free)} of {NEURONS} neurons are free; average accuracy {average:.0f} %", labelpad=9)
    ax.tick_params(length=0, labelbottom=False)
    ax.spines["left"].set_visible(False)


# ---- which pairs are inhibited -----------------------------------------------------------------------------------------------
def draw_pairs() -> None:
    """The weight of every pair of neurons in SNI, SLNI, SNID and SLNID, after the first task of the network above."""
    alpha = train(SLNID(0.02), [make_task(1)]).alpha[0]
    alpha = 3 * alpha / alpha.max()
    like, sigma = torch.empty(0), NEURONS / 6
    forms = {
        "SNI": (PairForm(NEURONS), "every pair alike"),
        "SLNI": (PairForm(NEURONS, sigma), "neighbours"),
        "SNID": (PairForm(NEURONS, None, alpha), "spares what task 1 uses"),
        "SLNID": (PairForm(NEURONS, sigma, alpha), "both"),
    }
    figure, axes = plt.subplots(1, 4, figsize=(9.2, 2.9), layout="constrained")
    for ax, (name, (form, says)) in zip(axes, forms.items(), strict=True):
        image = ax.imshow(form.matrix(like), cmap=HEAT, vmin=0, vmax=1, interpolation="nearest")
        ax.set_title(name, pad=20)
        ax.text(0, 1.04, says, transform=ax.transAxes, color=SOFT)
        ax.set(xticks=[], yticks=[], xlabel="neuron j")
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("neuron i")
    bar = figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.set_label("weight of the pair")
    save(figure, "idea-pairs")


# ---- what an anchor does to a step -------------------------------------------------------------------------------------------
def make_line_tasks() -> list[tuple[Tensor, Tensor]]:
    """Two regressions with two weights. The first depends on weight 1 much more than on weight 2; the second wants both elsewhere."""
    source = torch.Generator().manual_seed(3)
    x = torch.randn(256, 2, generator=source)
    first, second = x * torch.tensor([1.4, 0.35]), x * torch.tensor([0.8, 0.8])
    return [(first, first @ torch.tensor([[1.0], [0.4]])), (second, second @ torch.tensor([[-0.6], [1.9]]))]


def squared_error(weights: Tensor, task: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error of weights (…, 2)."""
    return (weights @ task[0].T - task[1][:, 0]).square().mean(-1)


def walk(strength: float | None, implicit: bool, steps: int, lr: float = 0.08) -> Tensor:
    """Return the weights after each step on the second task, (steps + 1, 2). None: no anchor."""
    first, second = make_line_tasks()
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(*first).solution.T)  # the first task is learned
    keeper = selfless.attach(model, MAS(strength or 0.0), check_finite=False)
    keeper.consolidate([first])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if implicit:
        keeper.anchor_with(optimizer)
    path = [model.weight.detach()[0].clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        (F.mse_loss(model(second[0]), second[1]) + keeper.penalty()).backward()
        optimizer.step()
        path.append(model.weight.detach()[0].clone())
    return torch.stack(path)


def draw_step() -> None:
    """The path of two weights on a new task, and how far one goes at any strength of the anchor."""
    figure, (plane, stable) = plt.subplots(1, 2, figsize=(9.2, 4.2), width_ratios=[1.15, 1], layout="constrained")
    _plane(plane)
    _stability(stable)
    save(figure, "idea-step")


def _plane(ax: Axes) -> None:
    first, second = make_line_tasks()
    xs, ys = torch.linspace(-1.25, 1.75, 160), torch.linspace(-0.35, 2.55, 160)
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1)
    for task, color in ((first, OLD), (second, NEW)):
        levels = [0.02, 0.1, 0.28, 0.6, 1.1]
        ax.contour(xs, ys, squared_error(grid, task), levels=levels, colors=color, alpha=0.45, linewidths=1)
    paths = {"no anchor": (walk(None, False, 80), SOFT), "MAS, anchored": (walk(0.8, True, 80), INK)}
    start = paths["no anchor"][0][0]
    for path, color in paths.values():
        ax.plot(path[:, 0], path[:, 1], "-", color=color, linewidth=1.6, zorder=3)
        ax.plot(path[1:14:1, 0], path[1:14:1, 1], "o", color=color, markersize=2.6, zorder=3)
        ax.plot(*path[-1], "o", color=color, markersize=7, markeredgecolor="white", zorder=4)
    ax.plot(*start, "o", color=OLD, markersize=9, markeredgecolor="white", zorder=5)
    ax.annotate("θ*, end of task 1", start, (start[0] - 0.12, start[1] - 0.42), color=OLD)
    plain, held = (path[-1] for path, _ in paths.values())
    ax.annotate("no anchor", plain, (plain[0] - 0.28, plain[1] + 0.14), color=SOFT)
    ax.annotate("anchored", held, (held[0] + 0.1, held[1] + 0.07), color=INK, fontweight="bold")
    ax.set(xlabel="weight 1: task 1 needs it", ylabel="weight 2: task 1 hardly needs it", xticks=[], yticks=[])
    ax.set_title("Where the steps of task 2 lead", pad=22)
    ax.text(0, 1.03, "contours: error of task 1 (blue) and of task 2 (orange)", transform=ax.transAxes, color=SOFT)
    for path, (task_1, task_2) in ((name, [float(squared_error(p[-1], t)) for t in (first, second)]) for name, (p, _) in paths.items()):
        print(f"{path}: error of task 1 {task_1:.3f}, of task 2 {task_2:.3f}")


def _stability(ax: Axes) -> None:
    strengths = np.logspace(-2, 3, 51)
    ends = {kind: np.array([_distance(walk(float(s), kind, 60)) for s in strengths]) for kind in (True, False)}
    fails = strengths[np.flatnonzero(~(ends[False] < 20))[0]]
    ax.axvspan(fails, strengths[-1], color=NEW, alpha=0.09, linewidth=0)
    ax.text(np.sqrt(fails * strengths[-1]), 3.2, "explicit:\ndiverges", color=NEW, ha="center", va="center")
    ax.plot(strengths, ends[True], color=INK, linewidth=4, solid_capstyle="butt")
    ax.plot(strengths[strengths < fails], ends[False][strengths < fails], "--", color=NEW, linewidth=2)
    ax.text(0.016, 0.05, "implicit: after the step", color=INK, fontweight="bold", ha="left")
    ax.text(0.016, 0.024, "explicit: in the loss", color=NEW, ha="left")
    ax.set(xscale="log", yscale="log", ylim=(1e-3, 10), xlim=(strengths[0], strengths[-1]))
    ax.set(xlabel="strength λ of the anchor", ylabel="distance from θ* after 60 steps")
    ax.minorticks_off()
    ax.set_title("No strength diverges", pad=22)
    ax.text(0, 1.03, "the same pull, computed in two ways", transform=ax.transAxes, color=SOFT)


def _distance(path: Tensor) -> float:
    return float((path[-1] - path[0]).norm().nan_to_num(torch.inf))


def save(figure: plt.Figure, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    plt.close(figure)


def main() -> None:
    torch.set_num_threads(1)
    IMAGES.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        draw_layer()
        draw_pairs()
        draw_step()


if __name__ == "__main__":
    main()
