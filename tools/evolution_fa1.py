# SPDX-License-Identifier: BSD-3-Clause
# How does FlashAttention 1 order its work? The schedule in Python, and the kernel that follows it.
"""FlashAttention 1's loop order for tools/evolution.py: `model` on any device, `Kernel` on a GPU.

Algorithm 1 of Dao et al., 2022: the outer loop takes a block of keys and values, the inner loop
passes the query rows by it. A row's output, maximum and sum live in global memory between passes,
the output normalised by the sum so far.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import toolchain

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tools" / "evolution" / "fa1.cu"
ROWS, KEYS = 64, 128  # of a tile of Q and of a block of K and V, as in fa1.cu
DTYPES = {torch.float16: 1, torch.bfloat16: 2}
DIMS = (64, 128)


@dataclass
class Traffic:
    """Bytes that one sequence and head moves between global memory and the chip, by what they are.

    `q`, `kv`, `state` (O, m and l of unfinished rows, fp32) and `out` (O and LSE).
    """

    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def add(self, side: dict[str, int], name: str, *tensors: Tensor) -> None:
        """Counts the bytes of `tensors`."""
        side[name] = side.get(name, 0) + sum(t.numel() * t.element_size() for t in tensors)


def model(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, rows: int = ROWS, keys: int = KEYS
) -> tuple[Tensor, Tensor, Traffic]:
    """q, k, v [S, D] of one sequence and head → out [S, D], lse [S] (natural logarithm), traffic.

    Statistics and sums are fp32 (fp64 for fp64 inputs), probabilities have the inputs' dtype, as in
    the kernel. `rows` and `keys` are the sizes of the tiles; `keys` must be a multiple of `rows`.
    """
    if keys % rows:
        raise ValueError(
            f"keys={keys} must be a multiple of rows={rows}: causal tiles would be cut."
        )
    length, dim = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = dim**-0.5
    # Global memory: what survives from one pass to the next.
    sum_o = torch.full((length, dim), math.nan, dtype=wide, device=q.device)
    row_max, row_sum = (torch.full((length,), math.nan, dtype=wide, device=q.device) for _ in "ml")
    out = torch.empty_like(q)
    lse = torch.empty(length, dtype=wide, device=q.device)
    traffic = Traffic()

    for first_key in range(0, length, keys):
        block = slice(first_key, min(first_key + keys, length))
        k_block, v_block = k[block], v[block]
        traffic.add(traffic.read, "kv", k_block, v_block)
        for first in range(first_key // rows * rows if causal else 0, length, rows):
            tile = slice(first, min(first + rows, length))
            q_tile = q[tile]
            traffic.add(traffic.read, "q", q_tile)
            s = (q_tile.to(wide) @ k_block.to(wide).T) * scale
            if causal:
                key = torch.arange(first_key, block.stop, device=q.device)
                row = torch.arange(first, tile.stop, device=q.device)
                s = s.masked_fill(key > row[:, None], -math.inf)
            m = s.amax(1)
            p = torch.exp(s - m[:, None])
            total = p.sum(1)
            product = p.to(q.dtype).to(wide) @ v_block.to(wide)
            if first_key == 0:
                m_new, old_part = m, torch.zeros_like(m)
                o_old = torch.zeros_like(product)
            else:
                m_old, l_old, o_old = row_max[tile], row_sum[tile], sum_o[tile]
                traffic.add(traffic.read, "state", m_old, l_old, o_old)
                m_new = torch.maximum(m_old, m)
                old_part = l_old * torch.exp(m_old - m_new)
            factor = torch.exp(m - m_new)
            l_new = old_part + factor * total
            o_new = (o_old * old_part[:, None] + product * factor[:, None]) / l_new[:, None]
            last = block.stop == length or (causal and block.stop > first + rows - 1)
            if last:
                out[tile] = o_new.to(q.dtype)
                lse[tile] = m_new + torch.log(l_new)
                traffic.add(traffic.written, "out", out[tile], lse[tile])
            else:
                row_max[tile], row_sum[tile], sum_o[tile] = m_new, l_new, o_new
                traffic.add(traffic.written, "state", m_new, l_new, o_new)
    return out, lse, traffic


def model_batch(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """`model` over [B, H, S, D]: a CPU's stand-in for the kernel."""
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    outs = [model(*tensors, causal)[0] for tensors in zip(*flat, strict=True)]
    return torch.stack(outs).view_as(q)


def build(folder: Path | None = None) -> Path:
    """fa1.cu compiled by nvcc, for 8.0, 9.0 and by PTX what comes later; once per text of it.

    FA_EVOLUTION_FA1 names a ready library instead. Raises toolchain.ToolchainError with a sentence.
    """
    named = os.environ.get("FA_EVOLUTION_FA1")
    if named:
        if not Path(named).is_file():
            raise toolchain.ToolchainError(
                f"FA_EVOLUTION_FA1={named}: there is no such file. Name a library built from "
                f"{SOURCE.relative_to(ROOT)}, or unset it to compile one."
            )
        return Path(named).resolve()
    folder = folder or ROOT / "build" / "evolution"
    mark = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = folder.resolve() / f"libfa1_{mark}.so"
    if library.is_file():
        return library
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        raise toolchain.ToolchainError(
            "FlashAttention 1's kernel is compiled when it is asked for, and no nvcc 12.8 or newer "
            "was found. Install CUDA, or set FA_NVCC to the compiler's path."
        )
    folder.mkdir(parents=True, exist_ok=True)
    fresh = library.with_suffix(f".{os.getpid()}.tmp")
    command = [
        *(nvcc, "-std=c++20", "-O3", "--use_fast_math", "-lineinfo"),
        *("-Xcompiler=-Wall,-Wextra,-fPIC,-fvisibility=hidden", "-shared"),
        *("-gencode", "arch=compute_80,code=[sm_80,sm_90,compute_80]"),
        *(f"-L{toolchain.cuda_library_folder(nvcc)}", "-o", str(fresh), str(SOURCE)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise toolchain.ToolchainError(f"nvcc could not compile {SOURCE}:\n{done.stderr.strip()}")
    fresh.replace(library)
    return library


class Kernel:
    """The compiled fa1.cu."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or build()
        self.c = ctypes.CDLL(str(self.path))
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.c.fa1_forward.argtypes = [pointer] * 8 + [number] * 6 + [ctypes.c_float, pointer]
        self.c.fa1_error.argtypes, self.c.fa1_error.restype = [number], ctypes.c_char_p

    def refusal(self, q: Tensor) -> str | None:
        """Why the kernel cannot take inputs like q, or None."""
        if q.dtype in DTYPES and q.shape[-1] in DIMS:
            return None
        return (
            f"dtype {str(q.dtype).removeprefix('torch.')} and head dim {q.shape[-1]}: this kernel "
            "takes float16 and bfloat16 with 64 and 128."
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """q, k, v [B, H, S, D], contiguous on a GPU → out, lse [B, H, S] (natural logarithm).

        Raises ValueError for other inputs, RuntimeError where the launch fails.
        """
        reason = self.refusal(q)
        if reason:
            raise ValueError(reason)
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.shape != q.shape or t.dtype != q.dtype or not (t.is_cuda and t.is_contiguous()):
                raise ValueError(f"{name}: must be contiguous on the GPU, of q's shape and dtype.")
        batch, heads, length, dim = q.shape
        out = torch.empty_like(q)
        lse, row_max, row_sum = (
            torch.empty((batch, heads, length), device=q.device, dtype=torch.float32)
            for _ in range(3)
        )
        sum_o = torch.empty((batch, heads, length, dim), device=q.device, dtype=torch.float32)
        tensors = (q, k, v, out, lse, sum_o, row_max, row_sum)
        status = self.c.fa1_forward(
            *(t.data_ptr() for t in tensors),
            *(batch, length, heads, dim, DTYPES[q.dtype], int(causal), dim**-0.5),
            torch.cuda.current_stream().cuda_stream,
        )
        if status != 0:
            text = self.c.fa1_error(status).decode()
            raise RuntimeError(f"FlashAttention 1's kernel could not be launched: {text}.")
        return out, lse
