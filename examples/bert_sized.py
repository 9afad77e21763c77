"""What it costs to consolidate a BERT-sized encoder: time in forward + backward passes, memory in models.

EWC needs the gradient of every sequence apart. Closed forms give its importances in one pass, without a loop over sequences.
This example shows:

- the time of `keeper.consolidate`, divided by that of plain forward + backward passes over the same batches;
- its memory at the peak, above what was there before, divided by the size of the model. Ω and θ*, which stay, are two models.

    python examples/bert_sized.py                           # a small encoder, a few seconds
    python examples/bert_sized.py --full --device cuda      # 12 layers of 768, 1,000 sequences of 128 tokens
"""

import argparse
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import selfless
from selfless import EWC

SMALL = {"depth": 2, "width": 256, "words": 2000, "length": 16, "sequences": 32, "batch": 4}
FULL = {"depth": 12, "width": 768, "words": 30522, "length": 128, "sequences": 1000, "batch": 5}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), width // 64

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = self.norm1(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(self.act(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, depth: int, width: int, words: int, length: int) -> None:
        super().__init__()
        self.token, self.place, self.norm = nn.Embedding(words, width), nn.Embedding(length, width), nn.LayerNorm(width)
        self.blocks, self.head = nn.Sequential(*(Block(width) for _ in range(depth))), nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.head(self.blocks(self.norm(self.token(tokens) + self.place(places)))[:, 0])


def storages(tree: Any) -> list[Any]:
    tensors = (t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.layout == torch.strided)
    return [t.untyped_storage() for t in tensors]


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside `with`: torch has such a counter for GPUs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(storage) for storage in storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage not in self.seen and id(storage) not in given:
                self.seen.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return result

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def measure(work: Callable[[], object], cuda: bool, memory: bool = False) -> float:
    """Return the seconds that `work` takes, or the bytes that it holds at its peak above what was there before."""
    if memory and not cuda:
        with PeakMemory() as counted:
            work()
        return counted.peak
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before if memory else time.perf_counter() - start


def main(sizes: dict[str, int] = SMALL, device: str = "cpu") -> dict[str, float]:
    torch.manual_seed(0)
    model = Encoder(sizes["depth"], sizes["width"], sizes["words"], sizes["length"]).to(device)
    tokens = torch.randint(sizes["words"], (sizes["sequences"], sizes["length"]), device=device)
    batches = list(zip(tokens.split(sizes["batch"]), (tokens[:, 0] % 2).split(sizes["batch"]), strict=True))

    def passes() -> None:
        for x, y in batches:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()

    def consolidate() -> None:
        with selfless.attach(model, EWC(10.0)) as keeper:
            keeper.consolidate(batches)

    cuda, size = device != "cpu", sum(p.numel() * p.element_size() for p in model.parameters())
    times = [measure(work, cuda) for work in (passes, consolidate) * 3][2:]  # the first calls are slower
    model.zero_grad()
    peak = measure(consolidate, cuda, memory=True)
    found = {"passes": sum(times[1::2]) / sum(times[::2]), "models": peak / size}
    print(f"{size / 4e6:.1f} million parameters, {sizes['sequences']} sequences of {sizes['length']} tokens, {device}")
    print(f"consolidate: {sum(times[1::2]) / 2:.2f} s, as long as {found['passes']:.2f} forward + backward passes over the data")
    print(f"its memory at the peak: {peak / 2**20:.0f} MiB, {found['models']:.2f} models")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the size of BERT; batches of 5")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.set_num_threads(1 if not options.full else torch.get_num_threads())
    main(FULL if options.full else SMALL, options.device)
