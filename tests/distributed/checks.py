"""Checks that several processes run together; `test_ranks.py` starts them once and reads the results.

    python checks.py RESULTS.json     # forks 2, then 4 processes with gloo; {"2 check": null or an error, …}

One process is the reference: it has the batches of all ranks, and its keeper has process_group=False.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
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
from selfless import EWC, HAT, IMM, MAS, SI, SLNID, DeCov, LwF, PackNet
from selfless.keeper import checkpoint
from selfless.preserve import EBLL, GPM, LocalMAS, OnlineEWC, Replay, RWalk
from selfless.sparsify import L1Param, L1Rep

CHECKS: dict[str, Callable[[int, int], None]] = {}
FOUR = ("ddp_decov", "checkpoint_load")  # those that four processes run too
FOLDER = Path(tempfile.gettempdir())


def check(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CHECKS[function.__name__] = function
    return function


def build(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 7), nn.ReLU(), nn.Linear(7, 3)  # 7 rows: uneven shards
    return nn.Sequential(*layers).double()


def task_batches(task: int, samples: tuple[int, ...] = (10, 10, 7)) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(100 + task)
    return [(torch.randn(m, 6, generator=g).double(), torch.randint(0, 3, (m,), generator=g)) for m in samples]


def own_part(batches: list[tuple[Tensor, Tensor]], rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The samples of one rank: 5 + 5, and 4 + 3 of the last batch."""
    return [(x[rank::size], y[rank::size]) for x, y in batches]


def train(model: nn.Module, keeper: Any, optimizer: Any, task: int, ranks: tuple[int, int] | None, inject: bool = False) -> list[float]:
    """One task. The loss of a rank is W/M Σ of its samples, so that its mean over ranks is the mean over the batch."""
    batches, penalties = task_batches(task), []
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
            footprint = keeper.footprint()
            assert footprint.bytes == 2 * footprint.model < 2 * sum(p.numel() * p.element_size() for p in model.parameters())
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


# --------------------------------------------------------------------------------------------------------------------------- DDP
@check
def ddp_slnid(rank: int, size: int) -> None:
    compare(rank, size, MAS(0.5), SLNID(0.1))
    compare(rank, size, MAS(0.5), SLNID(0.1), inject=True)


@check
def ddp_decov(rank: int, size: int) -> None:
    compare(rank, size, EWC(1.0, fisher="exact"), DeCov(0.1) + SLNID(0.1) + L1Rep(0.01), implicit=False)


@check
def ddp_auto(rank: int, size: int) -> None:
    compare(rank, size, MAS("auto"), SLNID("auto"))


@check
def ddp_anchors(rank: int, size: int) -> None:
    compare(rank, size, LocalMAS(0.5), L1Param(0.01))
    compare(rank, size, EWC(1.0, mode="per-task"), None, implicit=False)
    compare(rank, size, OnlineEWC(1.0) + MAS(0.1), None)


@check
def ddp_paths(rank: int, size: int) -> None:
    compare(rank, size, SI(1.0), SLNID(0.1), implicit=False)
    compare(rank, size, RWalk(1.0, every=2), SLNID(0.1))


@check
def ddp_moments(rank: int, size: int) -> None:
    compare(rank, size, IMM(0.01, drop=0.3), None)


@check
def ddp_distillation(rank: int, size: int) -> None:
    compare(rank, size, LwF(1.0), SLNID(0.1))
    compare(rank, size, LwF(1.0), None, inject=True)


@check
def ddp_masks(rank: int, size: int) -> None:
    compare(rank, size, PackNet(0.5), SLNID(0.1))
    compare(rank, size, HAT(0.5), None, layers=["1", "3"])


@check
def ddp_steps(rank: int, size: int) -> None:
    compare(rank, size, GPM(samples=100), SLNID(0.1), ignore=("states",))  # a basis is known up to rotations


@check
def ddp_replay(rank: int, size: int) -> None:
    """One memory for all ranks, with samples of each of them; the drift of ranks would be an error of `consolidate`."""
    model = build()
    keeper = selfless.attach(model, Replay(1.0, samples=16, batch=4))
    optimizer, parallel = torch.optim.SGD(model.parameters(), 0.05), DistributedDataParallel(model)
    torch.manual_seed(rank)
    for task in range(2):
        train(parallel, keeper, optimizer, task, (rank, size))
    memory = keeper.state["memory"]
    assert len(memory["key"]) == 16
    for other in keeper.ranks.gather(memory["input.0"]):
        assert_close(other, memory["input.0"], rtol=0, atol=0)
    stored = {tuple(row.tolist()) for row in memory["input.0"]}
    for part in range(size):
        assert stored & {tuple(x.tolist()) for task in range(2) for b in own_part(task_batches(task), part, size) for x in b[0]}


@check
def ddp_errors(rank: int, size: int) -> None:
    encoder = selfless.attach(build(), EBLL(1.0))
    raises(ValueError, "trains an encoder on the samples of one process", lambda: encoder.penalty(task_batches(0)[0]))
    model = build()
    keeper = selfless.attach(model, MAS(1.0))
    raises(ValueError, "rank 1 has no batches", lambda: keeper.consolidate([] if rank == 1 else task_batches(0)))
    assert keeper.tasks == 0 == len(keeper.state["omega"])
    with torch.no_grad():
        model[0].weight += 1e-3 * rank
    raises(RuntimeError, "parameter '0.weight' differs between ranks", lambda: keeper.consolidate(task_batches(0)))
    single = selfless.attach(copy.deepcopy(model), MAS(1.0), process_group=False)
    single.consolidate(task_batches(0))


# ------------------------------------------------------------------------------------------------------------------------- FSDP2
def shard(model: nn.Module) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear | nn.TransformerEncoderLayer):
            fully_shard(layer)
    return fully_shard(model)


@check
def fsdp_slnid(rank: int, size: int) -> None:
    compare(rank, size, MAS(0.5), SLNID(0.1), sharded=True)


@check
def fsdp_decov(rank: int, size: int) -> None:
    compare(rank, size, EWC("auto"), DeCov(0.1), lambda p: torch.optim.Adam(p, 0.01), sharded=True)


@check
def fsdp_transformer(rank: int, size: int) -> None:
    """Closed forms by operation and by module, and a rank with fewer batches than the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), nn.Linear(6, 3)).double()
    x = torch.randn(12, 5, 6).double()
    alone = selfless.importance.mas(net, [x])
    batches = [x[:4], x[4:6]] if rank == 0 else [x[6 + rank - 1 :: size - 1]]
    sharded = selfless.importance.mas(shard(net), batches, ranks=selfless.distributed.find_ranks())
    for (name, omega), p in zip(sharded.items(), net.parameters(), strict=True):
        assert_close(selfless.distributed.shards.like(omega, p).full_tensor(), alone[name])


@check
def fsdp_errors(rank: int, size: int) -> None:
    x, y = task_batches(0)[0]

    def penalty(preserve: Any, sparsify: Any = None, anchor: bool = True, **options: Any) -> Any:
        model = shard(build())
        keeper = selfless.attach(model, preserve, sparsify, **options)
        if anchor:
            keeper.anchor_with(torch.optim.SGD(model.parameters(), 0.1))
        model(x)
        return keeper.penalty((x, y))

    raises(ValueError, "needs whole parameters", lambda: penalty(LwF(1.0)))
    raises(ValueError, "needs whole parameters", lambda: penalty(SI(1.0)))
    raises(ValueError, "needs whole parameters", lambda: penalty(EWC(1.0, mode="per-task")))
    raises(ValueError, "anchor_with(optimizer)", lambda: penalty(MAS(1.0), anchor=False))
    raises(ValueError, "reads weights", lambda: penalty(MAS(1.0), L1Param(0.1)))
    raises(ValueError, "CPUOffloadPolicy", lambda: penalty(MAS(1.0), state_device="cpu"))
    model = shard(build())
    measure, ranks = selfless.importance.mas, selfless.distributed.find_ranks()
    raises(ValueError, "use 'per-sample'", lambda: measure(model, [x], estimator="per-batch", ranks=ranks))


# ------------------------------------------------------------------------------------------------------------------- checkpoints
def trained(rank: int, size: int) -> tuple[nn.Module, Any, Any]:
    model = shard(build())
    keeper = selfless.attach(model, MAS(0.5), SLNID(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    keeper.anchor_with(optimizer)
    return model, keeper, optimizer


@check
def checkpoint_save(rank: int, size: int) -> None:
    model, keeper, optimizer = trained(rank, size)
    train(model, keeper, optimizer, 0, (rank, size))
    checkpoint.save(FOLDER / "at", keeper, optimizer)
    train(model, keeper, optimizer, 1, (rank, size))
    wanted = {name: p.full_tensor() for name, p in model.named_parameters()}
    omega = {name: t.full_tensor() for name, t in keeper.state["omega"].items()}
    if rank == 0:
        torch.save({"parameters": wanted, "omega": omega, "alpha": keeper.alpha}, FOLDER / "wanted.pt")
    dist.barrier()


@check
def checkpoint_load(rank: int, size: int) -> None:
    """A checkpoint of two ranks goes on with two or four ranks, sharded or whole, to the same network."""
    wanted = torch.load(FOLDER / "wanted.pt")
    for sharded in (True, False)[: 2 if size == 2 else 1]:
        model = shard(build()) if sharded else build()
        net = model if sharded else DistributedDataParallel(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        keeper = selfless.attach(model, MAS(0.5), SLNID(0.1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        checkpoint.load(FOLDER / "at", keeper, optimizer)
        keeper.anchor_with(optimizer)
        assert keeper.tasks == 1
        train(net, keeper, optimizer, 1, (rank, size))
        for name, p in model.named_parameters():
            assert_close(p.full_tensor() if sharded else p.detach(), wanted["parameters"][name])
            omega = keeper.state["omega"][name]
            assert_close(omega.full_tensor() if sharded else omega, wanted["omega"][name])
        assert_close(keeper.alpha, wanted["alpha"])


@check
def rank_dies(rank: int, size: int) -> None:
    """The last check: the other ranks stop with a message, and the checkpoint is whole."""
    keeper = trained(rank, size)[1]
    if rank == 1:
        stop()
    raises(RuntimeError, "lost another rank", lambda: keeper.ranks.sum_([torch.ones(3)]))
    assert checkpoint.is_whole(FOLDER / "at")


# ---------------------------------------------------------------------------------------------------------------------- launcher
def stop() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(rank: int, size: int, names: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{size}", rank=rank, world_size=size)
    results: dict[str, str | None] = {}
    for name in names:
        try:
            CHECKS[name](rank, size)
            results[f"{size} {name}"] = None
        except Exception:
            results[f"{size} {name}"] = traceback.format_exc()
            if "lost another rank" in results[f"{size} {name}"]:
                break
        (folder / f"{size}-{rank}.json").write_text(json.dumps(results))
    stop()


def main(path: str, only: list[str]) -> None:
    global FOLDER
    results: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        FOLDER = Path(folder)
        for size in (2, 4):
            names = [name for name in CHECKS if (size == 2 or name in FOUR) and (not only or name in only)]
            children = []
            for rank in range(size):
                child = os.fork()  # before any thread: it costs no second import of torch
                if not child:
                    run_rank(rank, size, names, FOLDER)
                children.append(child)
            for child in children:
                os.waitpid(child, 0)
            for rank in range(size):
                file = FOLDER / f"{size}-{rank}.json"
                found = json.loads(file.read_text()) if file.exists() else {}
                for name in names:
                    error = found.get(f"{size} {name}", None if (rank, name) == (1, "rank_dies") else "this rank stopped before")
                    results[f"{size} {name}"] = results.get(f"{size} {name}") or (error and f"rank {rank}: {error}")
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
