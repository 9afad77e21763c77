"""What the checks of several processes share: a small network and its tasks, the comparison with one process, and the launcher.

One process is the reference: it has the batches of all ranks, and its keeper has process_group=False.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils  # here, not once in each process
import torch.distributed as dist
import torch.distributed.checkpoint._fsspec_filesystem
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import selfless
from selfless.distributed import ALONE, Ranks

CHECKS: dict[str, Callable[[int, int], None]] = {}
FOUR = ("ddp_decov", "checkpoint_load")  # those that four processes run too
SEVERAL = ("ddp_errors", "empty_batches", "fsdp_transformer", "rank_dies")  # those that need a second rank


@dataclass
class World:
    """Where the checks of this process run."""

    folder: Path = Path(tempfile.gettempdir())
    device: str = "cpu"
    backend: str = "gloo"


WORLD = World()


def check(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CHECKS[function.__name__] = function
    return function


def build(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 7), nn.ReLU(), nn.Linear(7, 3)  # 7 rows: uneven shards
    return nn.Sequential(*layers).double().to(WORLD.device)


def task_batches(task: int, samples: tuple[int, ...] = (10, 10, 7)) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(100 + task)
    batches = [(torch.randn(m, 6, generator=g).double(), torch.randint(0, 3, (m,), generator=g)) for m in samples]
    return [(x.to(WORLD.device), y.to(WORLD.device)) for x, y in batches]


def own_part(batches: list[tuple[Tensor, Tensor]], rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The samples of one rank: 5 + 5, and 4 + 3 of the last batch."""
    return [(x[rank::size], y[rank::size]) for x, y in batches]


def train(
    model: nn.Module,
    keeper: Any,
    optimizer: Any,
    task: int,
    ranks: tuple[int, int] | None,
    inject: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    """One task. The loss of a rank is W/M Σ of its samples, so that its mean over ranks is the mean over the batch."""
    batches, penalties = [(x.to(dtype), y) for x, y in task_batches(task)], list[float]()
    for epoch in range(2):
        keeper.begin_epoch(epoch, 2, batches=len(batches))
        for whole in batches:
            x, y = whole if ranks is None else own_part([whole], *ranks)[0]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction="sum") * (1 if ranks is None else ranks[1]) / len(whole[0])
            if not inject:
                penalty = keeper.penalty((x, y))
                penalties.append(float(penalty.detach()))
                loss = loss + penalty
            loss.backward()
            optimizer.step()
    keeper.consolidate(batches if ranks is None else own_part(batches, *ranks))
    return penalties


def attach(net: nn.Module, rank: int, alone: bool, preserve: Any, sparsify: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """A keeper, and an optimizer that it anchors with. Random numbers are those of the first rank in one process, others on each rank."""
    keeper = selfless.attach(net, preserve, sparsify, process_group=False if alone else None, **options)
    seed = 1 if alone else rank + 1
    for part in keeper.parts:
        part.draw_noise = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        if part.drops is not None:
            part.drops.draw = partial(torch.rand, generator=torch.Generator().manual_seed(seed))
    return keeper, optimizer(net.parameters())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def compare(
    rank: int,
    size: int,
    preserve: Any,
    sparsify: Any,
    optimizer: Any = sgd,
    implicit: bool = True,
    sharded: bool = False,
    ignore: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Two tasks on all ranks equal two tasks in one process, which the first rank trains: parameters, states, α, capacity, penalties.

    The keeper itself checks that the other ranks agree with the first.
    """
    found: list[dict[str, Any]] = []
    for alone in (False, True)[: 2 if rank == 0 else 1]:
        model = build() if alone or not sharded else shard(build())
        net = model if alone or sharded else DistributedDataParallel(model)
        keeper, opt = attach(net, rank, alone, preserve, sparsify, optimizer, **options)
        if implicit:
            keeper.anchor_with(opt)
        penalties = [train(net, keeper, opt, task, None if alone else (rank, size), "inject" in options) for task in range(2)]
        if sharded and not alone:
            for tensors in keeper.state.values():
                assert all(t.to_local().shape == model.get_parameter(name).to_local().shape for name, t in tensors.items())
            footprint, bytes_of_all = keeper.footprint(), sum(p.numel() * p.element_size() for p in model.parameters())
            assert footprint.bytes == 2 * footprint.model
            assert footprint.model < bytes_of_all or size == 1
        log = keeper.log()
        found.append(
            {
                "penalties": penalties,
                "parameters": {name: whole(p.detach()) for name, p in model.named_parameters()},
                "states": [{g: {n: whole(t) for n, t in ts.items()} for g, ts in state.items()} for state in keeper.states],
                "alpha": keeper.alpha,
                "capacity": {k: v for k, v in keeper.capacity().as_dict().items() if not sharded or k not in ("layers", "network")},
                "strengths": keeper.strengths,
                "log": {name: log[name] for name in ("anchor", "drift", "inhibition") if name in log},
            }
        )
    for key in (key for key in found[0] if rank == 0 and key not in ignore):
        assert_close(found[0][key], found[1][key], msg=lambda text, key=key: f"{key}: {text}")


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear | nn.TransformerEncoderLayer):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def raises(kind: type[Exception], text: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except kind as error:
        if text not in str(error):
            raise
    else:
        raise AssertionError(f"no error with {text!r}")


# ---------------------------------------------------------------------------------------------------------------------- launcher
def stop() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(rank: int, size: int, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    if size == 1:  # a world of one sends everything, too
        Ranks.is_alone = property(lambda self: self is ALONE)  # type: ignore[method-assign,assignment]
    if WORLD.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(WORLD.backend, init_method=f"file://{WORLD.folder}/meet{size}", rank=rank, world_size=size)
    results: dict[str, str | None] = {}
    for name in names:
        try:
            CHECKS[name](rank, size)
            results[f"{size} {name}"] = None
        except Exception:
            results[f"{size} {name}"] = traceback.format_exc()
            if "lost another rank" in results[f"{size} {name}"]:
                break
        (WORLD.folder / f"{size}-{rank}.json").write_text(json.dumps(results))
    stop()


def launch(sizes: Sequence[int], only: Sequence[str]) -> dict[str, str | None]:
    """Run the checks whose names begin with one of `only`, or all, with each number of processes: {"2 check": null or an error, …}."""
    results: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        WORLD.folder = Path(folder)
        for size in sizes:
            names = [name for name in CHECKS if not only or name.startswith(tuple(only))]
            names = [name for name in names if (size < 4 or name in FOUR) and (size > 1 or name not in SEVERAL)]
            children = []
            for rank in range(size):
                child = os.fork()  # before any thread: it costs no second import of torch
                if not child:
                    run_rank(rank, size, names)
                children.append(child)
            for child in children:
                os.waitpid(child, 0)
            for rank in range(size):
                file = WORLD.folder / f"{size}-{rank}.json"
                found = json.loads(file.read_text()) if file.exists() else {}
                for name in names:
                    error = found.get(f"{size} {name}", None if (rank, name) == (1, "rank_dies") else "this rank stopped before")
                    results[f"{size} {name}"] = results.get(f"{size} {name}") or (error and f"rank {rank}: {error}")
    return results
