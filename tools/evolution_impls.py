# SPDX-License-Identifier: BSD-3-Clause
# Who computes attention in each generation? Callables over the same tensors, with their formulas.
"""Standard attention, FlashAttention 1's order, our Ampere rows (2) and our Hopper rows (3).

Tensors lie as [B, H, S, D], so that nobody has to copy them first; our operators take the
transposed views.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import clone_package  # noqa: F401  isort: skip  (before everything that imports fa)
import bench_impls as impls
import evolution_bytes as count
import evolution_fa1 as fa1
import fa
import libfa
from bench_cells import Cell
from bench_timers import Impl

NAMES = ("standard", "fa1", "fa2", "fa3")
BACKENDS = {"fa2": "sm80", "fa3": "sm90"}
TOKENS, HIDDEN = 16384, 2048


def cell(length: int, dim: int, causal: bool, work: str = "forward", dtype: str = "") -> Cell:
    """16384 tokens (one longer sequence, where it is longer), hidden size 2048."""
    return Cell(
        dtype or "bfloat16",
        dim,
        causal,
        length,
        tokens=max(TOKENS, length),
        hidden=HIDDEN,
        work=work,
    )


def small(one: Cell, tokens: int = 200) -> Cell:
    """The cell with few tokens and two heads, for a CPU or an fp64 answer."""
    return replace(one, tokens=min(tokens, one.seqlen), hidden=2 * one.head_dim)


def tensors_of(one: Cell, device: str, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v [B, H, S, D], contiguous, standard normal; leaves where gradients are wanted."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, one.dtype)
    drawn = torch.bfloat16 if one.dtype == impls.FP8 else dtype
    shape = (one.batch, one.heads, one.seqlen, one.head_dim)
    made = (
        torch.randn(shape, generator=generator, device=device, dtype=drawn).to(dtype) for _ in "qkv"
    )
    return tuple(t.requires_grad_(one.work != "forward") for t in made)


def shape_of(one: Cell) -> count.Shape:
    """What the formulas need to know of a cell."""
    element = 1 if one.dtype == impls.FP8 else 2
    return count.Shape(one.batch, one.heads, one.seqlen, one.head_dim, one.causal, element)


# --- the generations ----------------------------------------------------------------------------


def standard(one: Cell, tensors: tuple[Tensor, ...]) -> Impl | str:
    """S = scale · Q Kᵀ, P = softmax(S), O = P V: three kernels, and one that masks S."""
    if one.dtype == impls.FP8:
        return "torch has no softmax of e4m3."
    q, k, v = (t.flatten(0, 1) for t in tensors)  # [B H, S, D], views
    scale = 1.0 / math.sqrt(one.head_dim)
    nothing = q.new_zeros(())
    hidden = None
    if one.causal:
        hidden = torch.ones(one.seqlen, one.seqlen, dtype=torch.bool, device=q.device).triu_(1)

    def call() -> Tensor:
        s = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0, alpha=scale)
        if hidden is not None:
            s = s.masked_fill_(hidden, -math.inf)
        return torch.bmm(torch.softmax(s, -1), v).view_as(tensors[0])

    return Impl("standard", call)


def first(one: Cell, tensors: tuple[Tensor, ...], kernel: fa1.Kernel | None) -> Impl | str:
    """The schedule of FlashAttention 1: its kernel on a GPU, its model on a CPU."""
    if one.work != "forward":
        return "there is a forward in FlashAttention 1's order only."
    if not tensors[0].is_cuda:
        return Impl("fa1", lambda: fa1.model_batch(*tensors, one.causal), row="model")
    if kernel is None:
        return "FlashAttention 1's kernel was not compiled."
    reason = kernel.refusal(tensors[0])
    if reason:
        return reason
    return Impl("fa1", lambda: kernel.forward(*tensors, one.causal)[0], row="fa1")


def ours(one: Cell, tensors: tuple[Tensor, ...], name: str) -> Impl | str:
    """Our rows, as dispatch chooses them: sm80 (FlashAttention 2) or sm90 (FlashAttention 3)."""
    on_gpu = tensors[0].is_cuda
    if not on_gpu and name == "fa3":
        return "Hopper rows run on a Hopper GPU."
    views = tuple(t.transpose(1, 2) for t in tensors)
    found = impls.ours(one, views, BACKENDS[name] if on_gpu else "cpu")
    if isinstance(found, str):
        return found
    inner = found.call
    return replace(found, name=name, call=lambda: inner().transpose(1, 2), samples_ms=[])


def all_of(
    one: Cell, tensors: tuple[Tensor, ...], kernel: fa1.Kernel | None
) -> tuple[list[Impl], dict[str, str]]:
    """Every generation that can do the cell, doing its work; and why the others cannot."""
    made: dict[str, Impl | str] = {
        "standard": standard(one, tensors),
        "fa1": first(one, tensors, kernel),
        **{name: ours(one, tensors, name) for name in BACKENDS},
    }
    refused = {name: text for name, text in made.items() if isinstance(text, str)}
    able = [impl for impl in made.values() if not isinstance(impl, str)]
    return [impls.trained(one, tensors, impl) for impl in able], refused


# --- formulas -----------------------------------------------------------------------------------


def tiles_of(row: str) -> tuple[int, int] | None:
    """Query rows and keys of a row's tiles; None for what is no row of this build."""
    for known in fa.kernels():
        if known["id"] == row:
            return known["tile_m"], known["tile_n"]
    return None


def formulas(one: Cell, name: str, row: str | None) -> dict[str, int | None]:
    """Bytes by the formulas: DRAM, read from L2 by the multiprocessors, allocated by a forward."""
    shape, forward = shape_of(one), one.work == "forward"
    none: dict[str, int | None] = {"model_dram": None, "model_l2_read": None, "model_memory": None}
    if name == "standard":
        moved = count.standard(shape) if forward else count.standard_backward(shape)
        none["model_dram"] = moved.total
        none["model_memory"] = count.standard_memory(shape) if forward else None
        return none
    if name == "fa1":
        none["model_l2_read"] = count.fa1(shape, fa1.ROWS, fa1.KEYS).read
        none["model_dram"] = count.flash(shape).total
        none["model_memory"] = count.fa1_memory(shape)
        return none
    tiles = tiles_of(row) if row and row != "cpu" else None
    none["model_dram"] = (count.flash(shape) if forward else count.flash_backward(shape)).total
    none["model_memory"] = count.flash_memory(shape) if forward else None
    if tiles:
        by_tiles = count.flash_l2 if forward else count.flash_backward_l2
        none["model_l2_read"] = by_tiles(shape, *tiles).read
    return none


# --- ablations ----------------------------------------------------------------------------------


def ablation(
    library: libfa.Library, one: Cell, tensors: tuple[Tensor, ...], name: str = ""
) -> Impl:
    """A library's forward, called through its C interface, always into the same output.

    An ablation's library holds one row. The shipped one has to be called the same way to be
    compared: through torch's operator, which allocates an output per call, it took 2 to 3 % longer.
    Raises libfa.Refused where no row takes the cell.
    """
    q, k, v = (t.transpose(1, 2) for t in tensors)  # [B, S, H, D]
    out = torch.empty_like(tensors[0]).transpose(1, 2)
    lse = torch.empty(tensors[0].shape[:3], dtype=torch.float32, device=q.device)
    p = libfa.Params(library)
    p.dense(q, k, v, out, lse)
    if one.causal:
        p["mask.window_right"] = 0
    row = impls.row_of(p.explain()[p.explain().rfind("\nrow ") :])
    size = p.workspace_bytes()
    workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=q.device)
    stream = torch.cuda.current_stream().cuda_stream
    kept = (tensors, workspace, lse)

    def call() -> Any:
        p.forward(stream, workspace.data_ptr(), size)
        return out.transpose(1, 2) if kept else None

    return Impl(name or f"ablation {row}", call, row=row)


def ablation_libraries(folder: Path) -> list[libfa.Library]:
    """Every `*.so` of the folder; each was built from one row: -DFA_ONLY=<row>."""
    return [libfa.Library(path.resolve()) for path in sorted(folder.glob("*.so"))]


# --- memory and errors --------------------------------------------------------------------------


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Most bytes that torch's allocator held beside what was there; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def errors(out: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest and root mean square difference from the fp64 answer."""
    gap = out.double() - exact
    return gap.abs().max().item(), gap.square().mean().sqrt().item()


def exact_answer(one: Cell, tensors: tuple[Tensor, ...]) -> Tensor:
    """fa.reference in fp64, [B, H, S, D]."""
    from fa import reference

    views = (t.detach().to(torch.float64).transpose(1, 2) for t in tensors)
    return reference.attention(*views, causal=one.causal)[0].transpose(1, 2)


def name_of(one: Cell) -> str:
    """How progress lines call a cell."""
    return f"{one.work} {one.name}"
