"""What this machine supports: Triton kernels and GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from selfless.functional.shapes import has_mkl

if TYPE_CHECKING:
    from types import ModuleType


Result = TypeVar("Result")
STREAMS = 4  # of a captured step, for convolutions of several members at a time
HAS_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)  # bmm(..., out_dtype=)


def kernels(x: Tensor) -> ModuleType | None:
    """Return `selfless.engine.kernels` for a tensor on a GPU that Triton supports; None otherwise."""
    return _triton() if x.is_cuda else None


@cache
def memory_of(device: torch.device) -> int:
    """Return the total memory of a GPU in bytes. Unlike free memory it is constant, so batch sizes derived from it are, too."""
    return int(torch.cuda.get_device_properties(device).total_memory)


@cache
def _triton() -> ModuleType | None:
    """Return the module of kernels; None without Triton or on a GPU that is too old."""
    if find_spec("triton") is None or torch.version.hip or torch.cuda.get_device_capability() < (8, 0):
        return None  # older matrix units have neither TF32 nor bfloat16
    from selfless.engine import kernels as module

    return module


def side_by_side(work: Callable[[int], Result], members: int) -> list[Result]:
    """Return work(f) of every member f. In a CUDA graph that is being captured, members run on several streams of it.

    One member's kernel on a small batch leaves most of the GPU free. All streams wait for what was done before, and what is done next
    waits for all of them, so no tensor is used too early or freed too early. Memory that is freed on a stream serves that stream alone, so
    a step needs a little more of it.
    """
    if members == 1 or not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return [work(f) for f in range(members)]
    current, found = torch.cuda.current_stream(), []
    streams = streams_of(current.device)[:members]
    for stream in streams:
        stream.wait_stream(current)
    try:
        for f in range(members):
            with torch.cuda.stream(streams[f % len(streams)]):
                found.append(work(f))
    finally:  # a capture whose streams are not joined hides the error, and never frees its memory
        for stream in streams:
            current.wait_stream(stream)
    return found


def using(device: torch.device) -> AbstractContextManager[object]:
    """Inside `with`: kernels and graphs are launched on this GPU, which need not be the first one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def prepare_backward(device: torch.device) -> None:
    """Let autograd's own thread launch a kernel on a GPU: PyTorch warns of a missing context if a matrix product is its first one."""
    if device.type == "cuda":
        torch.ones(1, device=device, requires_grad=True).square().sum().backward()


@cache
def streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the streams that members share on a GPU."""
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


def runs_in_triton(layer: nn.Conv2d, x: Tensor) -> bool:
    """Return True for 3×3 convolutions that the Triton kernel supports."""
    fast = kernels(x)
    if fast is None or (layer.stride, layer.dilation, layer.groups, layer.kernel_size) != ((1, 1), (1, 1), 1, (3, 3)):
        return False
    return layer.padding in ((0, 0), (1, 1), (2, 2)) and max(layer.in_channels, layer.out_channels) <= int(fast.CHANNELS)


def is_small_pool(layer: nn.Module, x: Tensor) -> bool:
    """Return True for 2×2 max-pooling of channels-last feature maps, which the Triton kernel supports."""
    if kernels(x) is None or type(layer) is not nn.MaxPool2d or x.dim() != 5 or not x.permute(0, 1, 3, 4, 2).is_contiguous():
        return False
    size = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
    return size == (2, 2, 0, 1, False)


def prefers_native(module: nn.Module, device: torch.device) -> bool:
    """Return True if one member of a native network is faster natively than as a plain module."""
    return device.type == "cuda" or not (has_mkl() or any(isinstance(layer, nn.Conv2d) for layer in module.modules()))
