"""Trackers of experiments: TensorBoard, Weights & Biases and MLflow behind one small interface.

    with open_tracker("tensorboard", "runs/mine", name="MAS + SLNID", settings={"lr": 0.05}) as tracker:
        ...
        log_keeper(tracker, keeper, step, loss=float(loss))            # in any loop, as often as you like
        log_importance(tracker, keeper, step)                          # after consolidate(): capacity by layer, and maps of Ω

Everything stays on this machine unless you say otherwise: W&B is offline unless $WANDB_MODE is set, and MLflow writes a local database
unless $MLFLOW_TRACKING_URI is set.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from selfless.integrations.attachment import PREFIX
from selfless.integrations.extras import missing
from selfless.keeper import Keeper
from selfless.preserve.base import importance_of

Image = npt.NDArray[np.uint8]
PROJECT = "selfless"
WIDEST = 512  # pixels of a map


class Tracker(Protocol):
    """Where numbers and pictures of one run go. A context manager, which closes the run at its end."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name."""

    def log_images(self, images: Mapping[str, Image], step: int) -> None:
        """Log grey pictures (height, width) by name."""

    def __enter__(self) -> Tracker: ...
    def __exit__(self, *error: Any) -> None: ...


class TensorBoard:
    """Event files in `folder`."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("tensorboard") from error
        self.writer = SummaryWriter(str(folder / name))
        self.writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in settings.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def log_images(self, images: Mapping[str, Image], step: int) -> None:
        for name, image in images.items():
            self.writer.add_image(name, image, step, dataformats="HW")

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: Any) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases: offline files in `folder`, or what $WANDB_MODE says."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb") from error
        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.picture = wandb.Image
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self.run = wandb.init(project=project, dir=str(folder), name=name, config=dict(settings), mode=mode, reinit="create_new")
        self.run.define_metric("*", step_metric="step")  # W&B's own step cannot go back, and it would drop such values

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log({**values, "step": step})

    def log_images(self, images: Mapping[str, Image], step: int) -> None:
        self.run.log({**{name: self.picture(image) for name, image in images.items()}, "step": step})

    def __enter__(self) -> WandB:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.run.finish(exit_code=0 if kind is None else 1)


class MLflow:
    """A run of MLflow: a database in `folder`, or what $MLFLOW_TRACKING_URI says."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing("mlflow") from error
        folder.mkdir(parents=True, exist_ok=True)
        given = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(tracking_uri=given or f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        place = {} if given else {"artifact_location": (folder / "artifacts").resolve().as_uri()}
        known = self.client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known is not None else self.client.create_experiment(PROJECT, **place)
        self.run = self.client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self.client.log_param(self.run, key, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.client.log_metric(self.run, name, value, step=step)

    def log_images(self, images: Mapping[str, Image], step: int) -> None:
        for name, image in images.items():
            self.client.log_image(self.run, image, key=name, step=step)

    def __enter__(self) -> MLflow:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.client.set_terminated(self.run, "FINISHED" if kind is None else "FAILED")


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_tracker(kind: str) -> None:
    """Raise ValueError for a tracker that there is not."""
    if kind not in TRACKERS:
        raise ValueError(f"there is no tracker {kind!r}; choose one of {', '.join(TRACKERS)}")


def open_tracker(kind: str, folder: Path | str, name: str = "run", settings: Mapping[str, Any] | None = None) -> Tracker:
    """Return a tracker, one of TRACKERS, for one run: its files are in `folder`, and `settings` are shown beside it."""
    check_tracker(kind)
    tracker: Tracker = TRACKERS[kind](Path(folder), name, settings or {})
    return tracker


def log_keeper(tracker: Tracker, keeper: Keeper, step: int, **values: float) -> None:
    """Log what `keeper.log()` returns, each penalty apart, and numbers of yours such as loss=0.3."""
    tracker.log(values | {f"{PREFIX}{name}": value for name, value in keeper.log().items()}, step)


def log_importance(tracker: Tracker, keeper: Keeper, step: int) -> None:
    """Log the free share of each layer, and pictures of Ω by weight and of α by layer: after `consolidate`."""
    capacity = keeper.capacity()
    free = {f"parameters/{n}": f.share for n, f in capacity.parameters.items()} | {
        f"neurons/{n}": f.share for n, f in capacity.neurons.items()
    }
    tracker.log({f"{PREFIX}free/{name}": share for name, share in free.items() if not math.isnan(share)}, step)
    omega = importance_of([part.term for part in keeper.parts], [part.rows for part in keeper.parts]) or {}
    tracker.log_images(importance_maps(omega, keeper.alpha), step)


def importance_maps(omega: Mapping[str, Tensor], alpha: Mapping[str, Tensor]) -> dict[str, Image]:
    """Return pictures {name: (rows, columns)} of Ω of each weight, (neurons, inputs), and of α of each layer: white is the largest."""
    named = {f"omega/{n}": t for n, t in omega.items() if t.dim() > 1} | {f"alpha/{n}": t[None] for n, t in alpha.items() if t.dim() == 1}
    return {name: _picture(tensor.detach().flatten(1).float().cpu().numpy()) for name, tensor in named.items()}


def _picture(values: npt.NDArray[Any]) -> Image:
    """√(Ω / max Ω) as grey values: a root, because a few entries are far larger than all others."""
    rows, columns = (np.linspace(0, n - 1, min(n, WIDEST)).round().astype(int) for n in values.shape)
    values = values[np.ix_(rows, columns)]
    return (255 * np.sqrt(values / max(float(values.max()), 1e-30))).astype(np.uint8)
