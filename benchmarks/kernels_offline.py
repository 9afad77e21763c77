"""Compile the kernels for an H200 on a machine without a GPU, and look for products that the assembler dropped.

    pip install --no-deps triton==3.6.0        # in an environment with this package; PyTorch for CPUs does not bring it
    python benchmarks/kernels_offline.py       # about two minutes; the exit status is 1 if a kernel has lost products

The functions of `selfless.engine.kernels` are called with tensors of a CPU. Their launches are not run but compiled for sm_90, assembled
and disassembled with the programs in the wheel of Triton. An asynchronous product that reads no memory (`gdesc[URZ]`) is one that was
dropped, without any message: docs/lab-notes/pitfalls.md. Numbers are not checked here; the tests on a GPU do that.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

MEMBERS = 4
MAPS = [(32, 3, 32, 200), (32, 32, 32, 200), (16, 32, 64, 200), (16, 64, 64, 200), (64, 3, 64, 64), (28, 1, 8, 50)]  # size, C, O, batch
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int64: "i64"}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
ALIGNED = [["tt.divisibility", 16]]  # what Triton assumes of pointers, and of numbers where it is so

launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []


def remember(self: Any, *arguments: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
    """Take the place of a launch."""
    launches.append((self, arguments, options))


def machine_code(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], folder: Path) -> str:
    """Return the disassembled code of a launch."""
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(i,)] = f"*{TYPES[value.dtype]}", ALIGNED
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            attributes |= {(i,): ALIGNED} if isinstance(value, int) and value % 16 == 0 else {}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    chosen = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    (folder / "kernel.ptx").write_text(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen).asm["ptx"])
    cubin = folder / "kernel.cubin"
    subprocess.run([TOOLS / "ptxas", "-arch=sm_90a", "-o", cubin, folder / "kernel.ptx"], check=True)
    return subprocess.run([TOOLS / "nvdisasm", cubin], check=True, capture_output=True, text=True).stdout


def call_all(dtype: torch.dtype) -> None:
    """Call every function that multiplies, with the shapes of our networks and with every number of steps over pixels."""
    from selfless.engine import kernels as k

    def maps(batch: int, channels: int, size: int) -> torch.Tensor:
        return torch.empty(MEMBERS, batch, size, size, channels, dtype=dtype).permute(0, 1, 4, 2, 3)

    for size, inputs, outputs, batch in MAPS:
        x, weight = maps(batch, inputs, size), torch.empty(MEMBERS, 9, outputs, inputs, dtype=dtype)
        columns = k.columns_of(x, 1)
        g = k.conv(x, weight, None, 1, columns=columns, relu=True)
        k.conv(g, torch.empty(MEMBERS, 9, inputs, outputs, dtype=dtype), None, 1, mask=x, flip=True)
        for power in (0, 1):
            k.weight_sums(x, g, 1, power, columns)
    for size, (inputs, outputs) in product((2, 4, 8, 10, 13, 16, 17, 32), ((128, 64), (130, 70))):
        k.magnitudes(maps(60, inputs, size), maps(60, outputs, size), torch.nn.Conv2d(inputs, outputs, 3, padding=1), 1)
    k.covariance_matrix(torch.empty(MEMBERS, 4500, 64, dtype=dtype), torch.ones(MEMBERS), None)
    for n, rank in ((128, 20), (500, 40)):
        k.inhibit(*[torch.empty(MEMBERS, 64, n)] * 2, torch.empty(MEMBERS, n, rank), torch.empty(MEMBERS, n), 0.1)


def main() -> int:
    JITFunction.run = remember
    torch.backends.cuda.matmul.allow_tf32 = True
    for dtype in (torch.bfloat16, torch.float32):
        call_all(dtype)
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        for kernel, arguments, options in launches:
            code = machine_code(kernel, arguments, options, Path(folder))
            products = re.findall(r"\bHG?MMA\S* .*", code)
            dropped = sum("gdesc[URZ]" in line for line in products)
            lost += bool(dropped)
            types = {TYPES[a.dtype] for a in arguments[:2] if isinstance(a, torch.Tensor)}
            print(f"{kernel.__name__:<12} {'/'.join(sorted(types)):<5} {len(products):5d} products, {dropped} dropped", flush=True)
    print(f"{len(launches)} launches, {lost} with dropped products")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
