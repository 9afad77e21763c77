"""Two networks that are no chain of layers: a ResNet-18 with group norm and a small vision transformer, both for 32×32 images.

selfless run --model networks:resnet18 --layers all --preserve mas:1 --stream split-cifar-100      # with benchmarks/ on PYTHONPATH
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, int, int]


class Block(nn.Module):
    """Two 3×3 convolutions with group norm, and a connection around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(32, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(32, outputs)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()
        around = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)]
        self.around = nn.Sequential(*around) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        return self.act2(h + self.around(x))


class ResNet18(nn.Module):
    """ResNet-18 as it is used on CIFAR: a 3×3 convolution, then four stages of two blocks, 64 to 512 channels at `width` 64."""

    hidden = ()
    hidden_conv = ("blocks.7.act2",)

    def __init__(self, outputs: int, channels: int, width: int = 64) -> None:
        super().__init__()
        widths = [width << k for k in range(4)]
        self.conv, self.norm, self.act = nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.GroupNorm(32, width), nn.ReLU()
        sizes = [(before, now, 1 + (k > 0)) for k, (before, now) in enumerate(zip([width, *widths], widths, strict=False))]
        pairs = [(Block(before, now, stride), Block(now, now, 1)) for before, now, stride in sizes]
        self.blocks = nn.Sequential(*(block for pair in pairs for block in pair))
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.act(self.norm(self.conv(x)))).mean((2, 3)))


class Layer(nn.Module):
    """Attention and a hidden layer, each with layer norm before and a connection around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, tokens, width)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer on patches of 4×4 pixels; the mean of its tokens is classified."""

    def __init__(self, outputs: int, shape: Shape, width: int = 192, depth: int = 12, heads: int = 3, patch: int = 4) -> None:
        super().__init__()
        channels, height, across = shape
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(height // patch * (across // patch), width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)
        self.hidden, self.hidden_conv = tuple(f"layers.{k}.act" for k in range(depth)), ()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.layers(tokens)).mean(1))


def resnet18(outputs: int, input_shape: Shape) -> nn.Module:
    """11 million parameters."""
    return ResNet18(outputs, input_shape[0])


def vit_tiny(outputs: int, input_shape: Shape) -> nn.Module:
    """5 million parameters: 12 layers of width 192 with 3 heads."""
    return ViT(outputs, input_shape)


def small_resnet(outputs: int, input_shape: Shape) -> nn.Module:
    """The ResNet with half of the channels."""
    return ResNet18(outputs, input_shape[0], 32)


def small_vit(outputs: int, input_shape: Shape) -> nn.Module:
    """Two layers of width 32."""
    return ViT(outputs, input_shape, 32, 2, 2, 8)
