"""One model on several processes, with DistributedDataParallel or, with --shard, with FSDP2.

The three lines of `own_loop.py` stay as they are. Each rank calls them; importances and penalties are those of all ranks.

    torchrun --nproc-per-node 2 examples/ddp.py                      # gloo on a CPU, NCCL where there are enough GPUs
    torchrun --nproc-per-node 2 examples/ddp.py --shard --save at    # Ω and θ* are sharded like the parameters
    torchrun --nproc-per-node 4 examples/ddp.py --shard --load at    # goes on after the tasks of the checkpoint, with four ranks
    python examples/ddp.py                                           # one process

docs/scale.md says what is reduced, and which preservers work.
"""

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import selfless
from selfless import MAS, SLNID
from selfless.keeper import checkpoint

PIXELS, CLASSES, TASKS, EPOCHS, BATCH = 196, 10, 3, 6, 100


def build(shard: bool) -> nn.Module:
    """The same network on each rank; with `shard`, each rank has some rows of each weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(PIXELS, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, CLASSES))
    if shard:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    return model


def make_tasks() -> list[TensorDataset]:
    """Each task: the same ten classes of images, with the pixels in another order."""
    g = torch.Generator().manual_seed(0)
    prototypes = torch.rand(CLASSES, PIXELS, generator=g)
    tasks = []
    for _ in range(TASKS):
        order, y = torch.randperm(PIXELS, generator=g), torch.randint(CLASSES, (2000,), generator=g)
        tasks.append(TensorDataset((prototypes[y] + 0.6 * torch.randn(len(y), PIXELS, generator=g))[:, order], y))
    return tasks


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", action="store_true", help="shard the model with FSDP2")
    parser.add_argument("--save", metavar="DIR", help="save a checkpoint after each task")
    parser.add_argument("--load", metavar="DIR", help="go on from a checkpoint, also one of another number of ranks")
    parser.add_argument("--tasks", type=int, default=TASKS, help="stop after this many tasks")
    options = parser.parse_args(arguments)

    size, rank, local_rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if size > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(device)

    model = build(options.shard and size > 1).to(device)
    net = DistributedDataParallel(model) if size > 1 and not options.shard else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3))
    if options.load:
        checkpoint.load(options.load, keeper, optimizer)
    keeper.anchor_with(optimizer)

    accuracy = [0.0]
    for task in make_tasks()[keeper.tasks : options.tasks]:
        sampler = DistributedSampler(task, size, rank)
        loader = DataLoader(task, BATCH // size, sampler=sampler)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x.to(device)), y.to(device)) + keeper.penalty()
                loss.backward()
                optimizer.step()
        keeper.consolidate(loader)  # Ω and α of the samples of all ranks
        if options.save:
            checkpoint.save(options.save, keeper, optimizer)
        x, y = task.tensors
        with torch.no_grad():
            accuracy.append(float((model(x.to(device)).argmax(1).cpu() == y).float().mean()))
        capacity = keeper.capacity()  # with --shard all ranks must call it
        if rank == 0:
            print(f"task {keeper.tasks}: accuracy {accuracy[-1]:.3f}, free neurons {capacity.free_neurons:.3f}")
    if size > 1:
        dist.destroy_process_group()
    return {"accuracy": accuracy[1:], "tasks": keeper.tasks}


if __name__ == "__main__":
    main()
