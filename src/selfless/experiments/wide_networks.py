"""Networks of the experiment `wide`, as a user would write them: a ResNet-18 with group norm, a small ViT, the ViT with LoRA.

None of them has batch statistics, so that a sample has a gradient of its own, and none has dropout.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.data import stream

Shape = tuple[int, int, int]
HEADS, PATCH = 4, 4


class Residual(nn.Module):
    """Two 3×3 convolutions with group norm, and what they read is added."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.short = nn.Identity() if stride == 1 and inputs == width else nn.Conv2d(inputs, width, 1, stride, bias=False)
        self.conv1, self.norm1, self.act1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.GroupNorm(4, width), nn.ReLU()
        self.conv2, self.norm2, self.act2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.GroupNorm(4, width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        out: Tensor = self.act2(h + self.short(x))
        return out


def resnet18(*, outputs: int, input_shape: Shape, width: int = 16, stride: int = 2) -> nn.Sequential:
    """ResNet-18 (He et al. 2016): a 3×3 stem, then four stages of two blocks with `width`, 2, 4 and 8 times as many channels."""
    stem = [nn.Conv2d(input_shape[0], width, 3, stride, 1, bias=False), nn.GroupNorm(4, width), nn.ReLU()]
    blocks, inputs = list[nn.Module](), width
    for stage in range(4):
        for block in range(2):
            channels = width * 2**stage
            blocks.append(Residual(inputs, channels, 2 if stage and not block else 1))
            inputs = channels
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, outputs))


class Block(nn.Module):
    """A block of a transformer: attention, then a perceptron, each after layer norm and added to what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.act, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)  # written out: vmap has no rule for the fused kernels of a CPU
        x = x + self.out((attention @ v).transpose(1, 2).flatten(2))
        added: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return added


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021) on patches of 4×4; the head reads the mean over patches."""

    def __init__(self, outputs: int, input_shape: Shape, width: int, depth: int) -> None:
        super().__init__()
        channels, height, across = input_shape
        self.patches = nn.Conv2d(channels, width, PATCH, PATCH)
        self.place = nn.Parameter(0.02 * torch.randn((height // PATCH) * (across // PATCH), width))
        self.blocks, self.norm = nn.Sequential(*(Block(width) for _ in range(depth))), nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.place
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


def vit(*, outputs: int, input_shape: Shape, width: int = 64, depth: int = 4) -> ViT:
    """A ViT of four blocks with four heads of attention."""
    return ViT(outputs, input_shape, width, depth)


class LoRA(nn.Module):
    """W x + B A x (Hu et al. 2022): W is frozen, the thin matrices A and B train."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + x @ self.a.T @ self.b.T
        return out


def lora_vit(*, outputs: int, input_shape: Shape, rank: int = 8, steps: int = 3000, **base: int) -> ViT:
    """The ViT after `steps` steps on the last 50 classes of CIFAR-100, frozen, with LoRA in every linear layer and a new head."""
    model = vit(outputs=outputs, input_shape=input_shape, **base)
    learned = pretrained(input_shape, steps, tuple(base.items()))
    model.load_state_dict({**model.state_dict(), **{n: t for n, t in learned.items() if not n.startswith("head.")}})
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name), rank))
    model.head.requires_grad_()
    return model


@functools.cache
def pretrained(input_shape: Shape, steps: int, base: tuple[tuple[str, int], ...]) -> dict[str, Tensor]:
    """Return the parameters of a ViT that was trained on the last 50 classes of CIFAR-100, mirrored at random: once in each process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"class_order": "natural", "classes_per_task": 50}
    part = stream("split-cifar-100", tasks=2, **options).tasks[1].train.resident(torch.device(device))
    with torch.random.fork_rng(devices=[0] if device == "cuda" else []):
        torch.manual_seed(0)
        model = vit(outputs=50, input_shape=input_shape, **dict(base)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
        for _ in range(steps):
            x, y = part.batch(torch.randint(len(part.y), (256,), device=device))
            x = torch.where(torch.rand(len(x), 1, 1, 1, device=device) < 0.5, x.flip(-1), x)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = F.cross_entropy(model(x), y - int(part.y.min()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
    return {n: t.detach().float().cpu() for n, t in model.state_dict().items()}
