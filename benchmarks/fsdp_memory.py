"""Measure the memory of a keeper under FSDP2 on a shrunken language model, beside what `footprint()` predicts.

    torchrun --nproc-per-node 4 benchmarks/fsdp_memory.py --width 512 --layers 8 --out memory.json

The model has the shape of a Llama of 7 billion parameters (width 4096, 32 layers). Each rank reports the bytes that it holds, and by how
much the second `consolidate` raises the peak of the process: on a CPU its resident set, which also holds activations and buffers of FSDP2,
and on a GPU that of CUDA's allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import selfless
from selfless import MAS

WORDS = 32000 / 4096  # entries of the vocabulary per unit of width


class Block(nn.Module):
    """One layer: attention and a gated feed-forward network, with RMS norms."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        inner = 11008 * width // 4096
        self.heads, self.norms = heads, nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


def build(width: int, layers: int) -> nn.Sequential:
    words = int(WORDS * width)
    blocks = [Block(width, max(1, width // 128)) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.RMSNorm(width), nn.Linear(width, words, bias=False))


def peak_bytes(device: torch.device) -> int:
    """Return the peak so far: of CUDA's allocator, or of the resident set."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write one JSON file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = build(options.width, options.layers).to(device)
    count = sum(p.numel() for p in model.parameters())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    keeper = selfless.attach(model, MAS(0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    keeper.anchor_with(optimizer)
    batches = [torch.randint(len(model[-1].weight), (2, options.tokens), device=device) for _ in range(2)]

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (F.cross_entropy(model(x).flatten(0, 1), x.flatten()) + keeper.penalty()).backward()
        optimizer.step()

    step(batches[0])
    keeper.consolidate(batches[:1])
    step(batches[1])
    before, predicted = peak_bytes(device), keeper.footprint()
    keeper.consolidate(batches)
    held = sum(t.to_local().nbytes for tensors in keeper.state.values() for t in tensors.values())
    found = {
        "ranks": dist.get_world_size(), "parameters": count, "width": options.width, "layers": options.layers, "device": device.type,
        "model": predicted.model, "held": held, "predicted_held": sum(predicted.after.values()), "predicted_peak": predicted.peak,
        "peak_growth": max(0, peak_bytes(device) - before),
    }  # fmt: skip
    every: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, found)
    if rank == 0:
        largest = {key: max(one[key] for one in every) if isinstance(found[key], int) else found[key] for key in found}
        print(json.dumps(largest, indent=1))
        if options.out:
            options.out.write_text(json.dumps({"largest": largest, "ranks": every}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
