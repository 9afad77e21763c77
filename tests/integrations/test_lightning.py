"""SelflessCallback: a fit of Lightning is the plain loop with `keeper.penalty()` in its loss, whatever the trainer does with the loss."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selfless
from selfless import EWC, MAS, SI, SLNID, LwF, PackNet
from tests.example_files import load_example

pl: Any = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed; make test-integrations installs it")
from selfless.integrations.lightning import SelflessCallback  # noqa: E402
from tests.integrations.lightning_nets import BATCHES, EPOCHS, QUIET, Net, build, tasks  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class TwoOptimizers(Net):
    """Manual optimization with one optimizer for each layer; they share a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.fc1.parameters(), lr=0.05), torch.optim.SGD(self.fc2.parameters(), lr=0.1)]


def fit(callback: SelflessCallback, module: Any, loader: Any, **options: Any) -> Any:
    trainer = pl.Trainer(callbacks=[callback], **QUIET, **({"max_epochs": EPOCHS} | options))
    trainer.fit(module, loader)
    return trainer


def plain_loop(module: Any, keeper: selfless.Keeper, *, accumulate: int = 1, clip: float = 0.0, half: Any = None) -> None:
    """The loop of docs/own-loop.md; `accumulate` batches share a step, and the last step of an epoch may have fewer."""
    autocast = contextlib.nullcontext() if half is None else torch.autocast("cpu", half)
    for loader in tasks():
        found = type(module).configure_optimizers(module)  # as Lightning does, for each fit
        optimizers = found if isinstance(found, list) else [found]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=half == torch.float16)
        for optimizer in optimizers:
            keeper.anchor_with(optimizer)
        for epoch in range(EPOCHS):
            keeper.begin_epoch(epoch, EPOCHS, batches=BATCHES)
            for i, (x, y) in enumerate(loader):
                with autocast:
                    loss = (F.cross_entropy(module(x), y) + keeper.penalty((x, y))) / accumulate
                scaler.scale(loss).backward()
                if (i + 1) % accumulate and i + 1 < len(loader):
                    continue
                for optimizer in optimizers:
                    if clip:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(module.parameters(), clip)
                    scaler.step(optimizer)
                scaler.update()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        keeper.consolidate(loader)


def assert_equal(callback: SelflessCallback, module: Any, keeper: selfless.Keeper, tolerance: float = 1e-5) -> None:
    assert callback.keeper.tasks == keeper.tasks == 2
    for one, other in zip(module.state_dict().values(), keeper.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    found, wanted = callback.keeper.state_dict(), keeper.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=10 * tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("preserve", [MAS(1.0), EWC(10.0), SI(1.0), LwF(1.0), PackNet(0.5)], ids=lambda term: term.name)
def test_a_fit_is_the_plain_loop(preserve: Any) -> None:
    module, callback = build(), SelflessCallback(preserve, SLNID(0.1))
    for loader in tasks():
        fit(callback, module, loader)
    other = build()
    keeper = selfless.attach(other, preserve, SLNID(0.1))
    plain_loop(other, keeper)
    assert_equal(callback, module, keeper)


@pytest.mark.parametrize("anchor", ["implicit", "explicit"])
def test_accumulation_and_clipping(anchor: Any) -> None:
    """Five batches in steps of two: the last step of an epoch has one batch, and Lightning divides it by two as well."""
    make = torch.optim.AdamW
    module, callback = build(make=make), SelflessCallback(MAS(1.0), SLNID(0.1), anchor=anchor)
    for loader in tasks():
        fit(callback, module, loader, accumulate_grad_batches=2, gradient_clip_val=0.05)
    other = build(make=make)
    keeper = selfless.attach(other, MAS(1.0), SLNID(0.1))
    keeper.anchor_with = (lambda _: keeper) if anchor == "explicit" else keeper.anchor_with  # type: ignore[method-assign]
    plain_loop(other, keeper, accumulate=2, clip=0.05)
    assert_equal(callback, module, keeper)
    assert callback.keeper.implicit == (anchor == "implicit")


def test_bfloat16() -> None:
    module, callback = build(), SelflessCallback(MAS(1.0), SLNID(0.1), anchor="explicit")
    for loader in tasks():
        fit(callback, module, loader, precision="bf16-mixed")
    other = build()
    keeper = selfless.attach(other, MAS(1.0), SLNID(0.1))
    keeper.anchor_with = lambda _: keeper  # type: ignore[method-assign]
    plain_loop(other, keeper, half=torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in module.parameters())
    assert_equal(callback, module, keeper, tolerance=1e-2)


def test_float16_with_a_grad_scaler() -> None:
    """Injected gradients have the factor of Lightning's scaler: without it, they would be a thousand times too small."""
    from lightning.pytorch.plugins import MixedPrecision

    module, callback = build(), SelflessCallback(MAS(1.0), SLNID(1.0), anchor="explicit")
    for loader in tasks():
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        fit(callback, module, loader, plugins=[plugin], accumulate_grad_batches=2)
    other = build()
    keeper = selfless.attach(other, MAS(1.0), SLNID(1.0))
    keeper.anchor_with = lambda _: keeper  # type: ignore[method-assign]
    plain_loop(other, keeper, accumulate=2, half=torch.float16)
    assert_equal(callback, module, keeper, tolerance=5e-3)


def test_several_optimizers_by_hand() -> None:
    module, callback = build(TwoOptimizers), SelflessCallback(MAS(1.0), SLNID(0.1))
    for loader in tasks():
        fit(callback, module, loader)
    other = build(TwoOptimizers)
    keeper = selfless.attach(other, MAS(1.0), SLNID(0.1))
    plain_loop(other, keeper)
    assert_equal(callback, module, keeper)


def test_a_checkpoint_in_the_middle_of_a_task(tmp_path: Path) -> None:
    """Weights, Ω, the path of SI and the epoch of the task go on from Lightning's own file."""
    first, second = tasks()
    module, callback = build(), SelflessCallback(SI(1.0), SLNID(0.1))
    fit(callback, module, first)
    fit(callback, module, second, max_epochs=3)

    module_2, callback_2 = build(), SelflessCallback(SI(1.0), SLNID(0.1))
    fit(callback_2, module_2, first)
    callback_2.end_with_fit = False
    fit(callback_2, module_2, second, max_epochs=1).save_checkpoint(tmp_path / "middle.ckpt")
    module_3, callback_3 = build(), SelflessCallback(SI(1.0), SLNID(0.1))
    trainer = pl.Trainer(callbacks=[callback_3], max_epochs=3, **QUIET)
    trainer.fit(module_3, second, ckpt_path=tmp_path / "middle.ckpt")
    assert_equal(callback_3, module_3, callback.keeper)


def test_end_task_when_the_user_says_so() -> None:
    module, callback = build(), SelflessCallback(MAS(1.0), end_with_fit=False)
    first, _ = tasks()
    fit(callback, module, first)
    assert callback.keeper.tasks == 0
    callback.end_task(first)
    assert callback.keeper.tasks == 1
    with callback.evaluating(0) as found:
        assert found is module


def test_a_network_inside_of_a_module_and_a_new_module_for_each_task() -> None:
    class Wrapped(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> Any:
            return {"loss": F.cross_entropy(self.net(batch[0]), batch[1])}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    callback = SelflessCallback(MAS(1.0), SLNID(0.1))
    for loader in tasks():
        fit(callback, Wrapped(net), loader)
    assert callback.keeper.model is net
    assert callback.keeper.tasks == 2
    with pytest.raises(ValueError, match="no submodule 'nets'; its children: net"):
        fit(SelflessCallback(MAS(1.0), model="nets"), Wrapped(net), tasks()[0])


def test_the_parts_of_a_step_are_logged(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    options = QUIET | {"logger": logger}
    trainer = pl.Trainer(callbacks=[SelflessCallback(MAS(1.0), SLNID(0.1))], max_epochs=1, log_every_n_steps=1, **options)
    trainer.fit(build(), tasks()[0])
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert {"selfless/inhibition", "selfless/active"} <= set(header.split(","))


def test_phases_need_a_number_of_epochs() -> None:
    with pytest.raises(ValueError, match="has phases within a task, which need a number of epochs"):
        fit(SelflessCallback(PackNet(0.5)), build(), tasks()[0], max_epochs=-1, max_steps=3)


def test_strategies_that_lose_the_state_are_refused() -> None:
    with pytest.raises(ValueError, match="use strategy='ddp'"):
        SelflessCallback(MAS(1.0)).on_fit_start(pl.Trainer(strategy="ddp_spawn", devices=1, **QUIET), build())


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The callback alone makes the difference between forgetting and not."""
    found = load_example("lightning_tasks").main()
    assert found["MAS + SLNID"] > found["plain"] + 0.1
    assert "free after 3 tasks" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path) -> None:
    """Rank r has samples r, r + 2, …: two batches of four are one of eight. Weights, Ω and α are those of one process, on both ranks."""
    root = Path(__file__).parents[2]
    paths = [str(root / "src"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, str(Path(__file__).with_name("lightning_ddp.py")), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    module, callback = build(), SelflessCallback(MAS(1.0), SLNID(0.1))
    for loader in tasks():
        fit(callback, module, loader)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        torch.testing.assert_close(found["model"], dict(module.state_dict()), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["keeper"], callback.keeper.state_dict(), rtol=1e-3, atol=1e-5)
