"""Checks that several processes run together; `test_ranks.py` starts them once and reads the results.

    python -m tests.distributed.checks RESULTS.json                                            # gloo: 2, then 4 processes
    python -m tests.distributed.checks RESULTS.json --device cuda --backend nccl --sizes 1     # one GPU

RESULTS.json is {"2 check": null or an error, …}. In a world of one process, too, every number goes through the backend.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import selfless
from selfless import EWC, HAT, IMM, MAS, SI, SLNID, DeCov, LwF, PackNet
from selfless.keeper import checkpoint
from selfless.preserve import AGSCL, EBLL, GPM, SGP, DERpp, LocalMAS, OnlineEWC, Replay, RWalk
from selfless.sparsify import L1Param, L1Rep
from tests.distributed.world import (
    WORLD,
    attach,
    build,
    check,
    compare,
    launch,
    own_part,
    raises,
    sgd,
    shard,
    stop,
    task_batches,
    train,
    whole,
)


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
    compare(rank, size, EBLL(1.0, code=3, steps=12), SLNID(0.1))


@check
def ddp_masks(rank: int, size: int) -> None:
    compare(rank, size, PackNet(0.5), SLNID(0.1))
    compare(rank, size, HAT(0.5), None, layers=["1", "3"])


@check
def ddp_steps(rank: int, size: int) -> None:
    compare(rank, size, GPM(samples=100), SLNID(0.1), ignore=("states",))  # a basis is known up to rotations
    compare(rank, size, SGP(samples=100, alpha=1.0), None, ignore=("states",))
    compare(rank, size, AGSCL(0.01, mu=0.001), SLNID(0.1))


@check
def ddp_replay_of_all(rank: int, size: int) -> None:
    """A memory of all samples, each of them replayed in each step: nothing is left to chance but their order."""
    compare(rank, size, Replay(1.0, samples=99, batch=99), None, ignore=("states",))
    compare(rank, size, DERpp(1.0, samples=99, batch=99), None, ignore=("states",))


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
    raises(ValueError, "rank 1 has no batches", lambda: encoder.consolidate([] if rank == 1 else task_batches(0)))
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
@check
def fsdp_slnid(rank: int, size: int) -> None:
    compare(rank, size, MAS(0.5), SLNID(0.1), sharded=True)


@check
def fsdp_decov(rank: int, size: int) -> None:
    compare(rank, size, EWC("auto"), DeCov(0.1), lambda p: torch.optim.Adam(p, 0.01), sharded=True)


@check
def fsdp_anchors(rank: int, size: int) -> None:
    compare(rank, size, LocalMAS(0.5), None, sharded=True)
    compare(rank, size, OnlineEWC(1.0), SLNID(0.1), sharded=True)


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
def fsdp_rank_without_gradients(rank: int, size: int) -> None:
    """The whole network is one shard, and on the first rank no gradient reaches it: all ranks still add their sums in one order."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False)]
    net, x = nn.Sequential(*layers).double(), torch.randn(4 * size, 6).double()
    x[:4] = 0
    alone = selfless.importance.mas(net, [x])
    sharded = selfless.importance.mas(fully_shard(net), [x[4 * rank : 4 * rank + 4]], ranks=selfless.distributed.find_ranks())
    for (name, omega), p in zip(sharded.items(), net.parameters(), strict=True):
        assert_close(selfless.distributed.shards.like(omega, p).full_tensor(), alone[name])


@check
def fsdp_mixed_precision(rank: int, size: int) -> None:
    """FSDP2 computes in bfloat16: Ω, θ* and parameters stay float32, and two tasks are those of one process in float32, nearly."""
    found: list[dict[str, Any]] = []
    for alone in (False, True)[: 2 if rank == 0 else 1]:
        model = build().float()
        if not alone:
            shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        keeper, optimizer = attach(model, rank, alone, MAS(0.5), SLNID(0.1), sgd)
        keeper.anchor_with(optimizer)
        for task in range(2):
            train(model, keeper, optimizer, task, None if alone else (rank, size), dtype=torch.float32)
        found.append({"parameters": {name: whole(p.detach()) for name, p in model.named_parameters()}})
        found[-1] |= {group: {name: whole(t) for name, t in tensors.items()} for group, tensors in keeper.state.items()}
    for group in found[0] if rank == 0 else ():
        for name, wanted in found[1][group].items():
            value = found[0][group][name]
            assert value.dtype == torch.float32
            assert (value - wanted).norm() <= 0.03 * wanted.norm(), f"{group} of {name}: {(value - wanted).norm() / wanted.norm():.3f}"


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
@check
def empty_batches(rank: int, size: int) -> None:
    """The last batch has one sample, which the first rank gets: the others have none, and the means are those of one process."""
    batches = task_batches(0, (10, 1))
    alone = build()
    reference = selfless.attach(alone, MAS(0.5), process_group=False)
    reference.consolidate(batches)
    for net in (DistributedDataParallel(build()), shard(build())):
        keeper = selfless.attach(net, MAS(0.5))
        keeper.anchor_with(sgd(net.parameters()))
        keeper.consolidate(own_part(batches, rank, size))
        for name, omega in reference.state["omega"].items():
            assert_close(whole(keeper.state["omega"][name]), omega)
        assert_close(keeper.alpha, reference.alpha)


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
    checkpoint.save(WORLD.folder / "at", keeper, optimizer)
    train(model, keeper, optimizer, 1, (rank, size))
    wanted = {name: p.full_tensor() for name, p in model.named_parameters()}
    omega = {name: t.full_tensor() for name, t in keeper.state["omega"].items()}
    if rank == 0:
        torch.save({"parameters": wanted, "omega": omega, "alpha": keeper.alpha}, WORLD.folder / "wanted.pt")
    dist.barrier()


@check
def checkpoint_load(rank: int, size: int) -> None:
    """A checkpoint goes on with as many ranks or with four, sharded or whole, to the same network."""
    wanted = torch.load(WORLD.folder / "wanted.pt", map_location=WORLD.device)
    for sharded in (True, False)[: 1 if size == 4 else 2]:
        model = shard(build()) if sharded else build()
        net = model if sharded else DistributedDataParallel(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        keeper = selfless.attach(model, MAS(0.5), SLNID(0.1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        checkpoint.load(WORLD.folder / "at", keeper, optimizer)
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
    assert checkpoint.is_whole(WORLD.folder / "at")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("only", nargs="*", help="names of checks, or how they begin")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    given = parser.parse_args()
    WORLD.device, WORLD.backend = given.device, given.backend
    given.results.write_text(json.dumps(launch(given.sizes, given.only)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
