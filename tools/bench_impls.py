# SPDX-License-Identifier: BSD-3-Clause
# Who computes a cell? Ours and the peers side by side, and who of them is right.
"""Callables of ours and of the peers for one cell. bench_timers.py times them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa
from bench_cells import Cell
from bench_timers import Impl

# Largest difference of two right answers.
TOLERANCE = {"bfloat16": 4e-2, "float16": 8e-3, "float8_e4m3fn": 1e-1}
FP8 = "float8_e4m3fn"


def cell_tensors(cell: Cell, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v [B, S, H, D], packed [total, H, D], of standard normal values."""
    generator = torch.Generator(device).manual_seed(seed)
    rows, keys = (cell.batch, cell.seqlen), (cell.batch, cell.keys)
    if cell.lengths:
        rows = keys = (sum(cell.lengths),)
    shapes = (
        (*rows, cell.heads, cell.head_dim),
        (*keys, cell.key_heads, cell.head_dim),
        (*keys, cell.key_heads, cell.head_dim_v),
    )
    dtype = getattr(torch, cell.dtype)
    drawn = torch.bfloat16 if cell.dtype == FP8 else dtype
    tensors = [
        torch.randn(shape, generator=generator, device=device, dtype=drawn).to(dtype)
        for shape in shapes
    ]
    return tuple(t.requires_grad_(cell.work != "forward") for t in tensors)


def sequence_starts(cell: Cell, device: str) -> torch.Tensor:
    """cu_seqlens of a packed cell."""
    ends = torch.tensor((0, *cell.lengths), device=device).cumsum(0)
    return ends.to(torch.int32)


def cell_sinks(cell: Cell, device: str) -> torch.Tensor:
    """One logit per query head, the same for everyone who computes the cell."""
    generator = torch.Generator(device).manual_seed(2)
    return torch.randn(cell.heads, generator=generator, device=device)


def row_of(text: str) -> str | None:
    """The id of the kernel row that a plan's text names: the first word sm80_… or sm90_…"""
    for word in text.replace(",", " ").replace(":", " ").replace("(", " ").split():
        if word.startswith(("sm80_", "sm90_")):
            return word.rstrip(".;)")
    return None


def ours(
    cell: Cell, tensors: tuple[torch.Tensor, ...], backend: str, deterministic: bool = False
) -> Impl | str:
    """The cell on one of our backends, or the reason why that cannot run."""
    q, k, v = tensors
    options: dict[str, Any] = {"causal": cell.causal, "window_size": cell.window}
    function = fa.attention
    if cell.lengths:
        starts = sequence_starts(cell, str(q.device))
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        function = fa.attention_varlen
    if cell.softcap:
        options["softcap"] = cell.softcap
    if cell.sinks:
        options["sinks"] = cell_sinks(cell, str(q.device))

    def call() -> torch.Tensor:
        return function(q, k, v, **options)

    def context() -> AbstractContextManager[Any]:
        return fa.backend(backend)

    if cell.work != "forward":
        options["deterministic"] = deterministic

    with context():
        reason = fa.supports(q, k, v, **options)
        if reason is not True:
            return str(reason)
        plan = "" if backend == "cpu" else fa.explain(q, k, v, **options)
    # The plan of the backward stands behind that of the forward.
    row = "cpu" if backend == "cpu" else row_of(plan[plan.rfind("\nrow ") :])
    return Impl("fa", call, context, row, deterministic=deterministic)


def trained(cell: Cell, tensors: tuple[torch.Tensor, ...], impl: Impl) -> Impl:
    """`impl` of the forward made to do the work of the cell, through torch.autograd."""
    if cell.work == "forward":
        return impl
    forward, kept = impl.call, []
    generator = torch.Generator(tensors[0].device).manual_seed(1)

    def dout(out: torch.Tensor) -> torch.Tensor:
        if len(kept) < 2:
            kept.append(torch.randn(out.shape, generator=generator, device=out.device).to(out))
        return kept[1]

    def backward() -> tuple[torch.Tensor, ...]:
        if not kept:
            kept.append(forward())
        return torch.autograd.grad(kept[0], tensors, dout(kept[0]), retain_graph=True)

    def step() -> tuple[torch.Tensor, ...]:
        out = forward()
        if not kept:
            kept.append(out.detach())
        return torch.autograd.grad(out, tensors, dout(out))

    return replace(impl, call=backward if cell.work == "backward" else step, samples_ms=[])


def _sdpa(cell: Cell, tensors: tuple[torch.Tensor, ...], name: str, kind: SDPBackend) -> Impl:
    q, k, v = (t.transpose(1, 2) for t in tensors)  # [B, H, S, D] views

    grouped = {"enable_gqa": True} if cell.heads != cell.key_heads else {}

    def call() -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=cell.causal, **grouped
        )
        return out.transpose(1, 2)

    return Impl(name, call, lambda: sdpa_kernel(kind))


def _module_call(cell: Cell, tensors: tuple[torch.Tensor, ...], name: str, module: str) -> Impl:
    found = importlib.import_module(module)
    q, k, v = tensors
    options: dict[str, Any] = {"causal": cell.causal}
    if cell.window != (-1, -1):
        options["window_size"] = cell.window
    if cell.softcap:
        options["softcap"] = cell.softcap
    if cell.sinks:
        options["learnable_sink"] = cell_sinks(cell, str(q.device)).bfloat16()
    function = found.flash_attn_func
    if cell.lengths:
        function = found.flash_attn_varlen_func
        starts, longest = sequence_starts(cell, str(q.device)), max(cell.lengths)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def call() -> torch.Tensor:
        result = function(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return Impl(name, call)


MODULES = {
    "fa3": ("fa3_fwd_interface", "flash_attn_interface"),
    "fa4": ("flash_attn.cute", "flash_attn.cute.interface"),
}
# FlashAttention 4 compiles a kernel per kind of call, seconds each: keep them for the next process.
KEEP_COMPILED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
# What a module never takes; what else it refuses stands among the notes of a run.
LEFT_OUT = {
    "fa3_fwd_interface": "; no backward, no fp16",
    "flash_attn.cute": "; 16 bits forward and backward, compiled at the first call of a kind",
}


def _first_module(*names: str) -> str | None:
    for name in names:
        try:
            if hasattr(importlib.import_module(name), "flash_attn_func"):
                return name
        except Exception as error:  # a peer that is broken here must not stop the others
            if not isinstance(error, ModuleNotFoundError):
                print(f"peer {name} cannot be imported: {type(error).__name__}: {error}")
    return None


def peer_modules() -> dict[str, str]:
    """Importable peers outside of torch: {"fa3": module, "fa4": module}."""
    os.environ.setdefault(KEEP_COMPILED, "1")
    found = {name: _first_module(*modules) for name, modules in MODULES.items()}
    return {name: module for name, module in found.items() if module}


def peer_report(modules: dict[str, str], cuda: bool) -> list[str]:
    """One line per peer: what it is here, or that it is absent and what would bring it."""
    if not cuda:
        return ["peer sdpa: PyTorch's math path; the others need CUDA tensors"]
    cudnn = torch.backends.cudnn.version() or "absent"
    lines = [
        f"peer fa2: scaled_dot_product_attention's flash backend of torch {torch.__version__}",
        f"peer cudnn: scaled_dot_product_attention's cuDNN backend, cuDNN {cudnn}",
    ]
    for name, tried in MODULES.items():
        if name in modules:
            version = _version_of(modules[name])
            lines.append(f"peer {name}: {modules[name]}{version}{LEFT_OUT.get(modules[name], '')}")
        else:
            lines.append(f"peer {name}: absent, no module {' or '.join(tried)}")
    frontend = importlib.util.find_spec("cudnn") is not None
    state = "cudnn-frontend" if frontend else "absent, no module cudnn (nvidia-cudnn-frontend)"
    return [*lines, f"peer cudnn for e4m3: {state}"]


def _version_of(module: str) -> str:
    top = module.split(".")[0]
    for name in importlib.metadata.packages_distributions().get(top, ()):
        return f" of {name} {importlib.metadata.version(name)}"
    return ""


def _by_sdpa(cell: Cell) -> bool:
    """SDPA has no windows, packed sequences, softcap or sinks; its causal mask is top left."""
    plain = not cell.lengths and cell.window == (-1, -1) and cell.score == "scale"
    return plain and not (cell.causal and cell.seqlen != cell.keys)


def peers(cell: Cell, tensors: tuple[torch.Tensor, ...], modules: dict[str, str]) -> list[Impl]:
    """Everyone else who can compute this cell."""
    if tensors[0].device.type == "cpu":
        sdpa = _sdpa(cell, tensors, "sdpa", SDPBackend.MATH)
        return [trained(cell, tensors, sdpa)] if _by_sdpa(cell) else []
    found = []
    if cell.dtype == FP8:
        return _fp8_peers(cell, tensors, modules)
    if _by_sdpa(cell):
        found += [
            _sdpa(cell, tensors, "fa2", SDPBackend.FLASH_ATTENTION),
            _sdpa(cell, tensors, "cudnn", SDPBackend.CUDNN_ATTENTION),
        ]
    for name, module in modules.items():
        if cell.sinks and name != "fa4":  # the only one of these with sinks
            continue
        if cell.work == "forward" or module != "fa3_fwd_interface":  # that wheel has no backward
            found.append(_module_call(cell, tensors, name, module))
    return [trained(cell, tensors, impl) for impl in found]


def _fp8_peers(
    cell: Cell, tensors: tuple[torch.Tensor, ...], modules: dict[str, str]
) -> list[Impl]:
    """FlashAttention 3, and cuDNN's graph where `nvidia-cudnn-frontend` can be imported."""
    found = [_module_call(cell, tensors, "fa3", modules["fa3"])] if "fa3" in modules else []
    plain = not cell.lengths and cell.window == (-1, -1) and cell.seqlen == cell.keys
    if plain and importlib.util.find_spec("cudnn") is not None:
        try:
            found.append(_cudnn_fp8(cell, tensors))
        except Exception as error:  # a peer that is broken here must not stop the others
            print(f"peer cudnn has no fp8 graph for {cell.name}: {str(error).splitlines()[0]}")
    return found


def _cudnn_fp8(cell: Cell, tensors: tuple[torch.Tensor, ...]) -> Impl:
    """cuDNN's fp8 attention; the output is e4m3 as its graph wants it, all factors are 1."""
    cudnn = importlib.import_module("cudnn")
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=cudnn.create_handle(),
    )

    def described(t: torch.Tensor) -> Any:
        kind = cudnn.data_type.FLOAT if t.dtype == torch.float32 else cudnn.data_type.FP8_E4M3
        return graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=kind)

    q, k, v = (t.transpose(1, 2) for t in tensors)  # [B, H, S, D] views
    one = torch.ones(1, 1, 1, 1, device=q.device)
    inputs = {name: described(t) for name, t in (("q", q), ("k", k), ("v", v))}
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    factors = {name: described(one) for name in names}
    out, _, amax_s, amax_o = graph.sdpa_fp8(
        **inputs,
        **factors,
        is_inference=True,
        attn_scale=cell.head_dim**-0.5,
        use_causal_mask=cell.causal,
    )
    result = torch.empty(tensors[0].shape, dtype=q.dtype, device=q.device).transpose(1, 2)
    out.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
    for amax in (amax_s, amax_o):
        amax.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
        amax.set_data_type(cudnn.data_type.FLOAT)
    graph.build([cudnn.heur_mode.A])
    largest = torch.empty(2, 1, 1, 1, 1, device=q.device)
    pack = {inputs["q"]: q, inputs["k"]: k, inputs["v"]: v, out: result}
    pack |= dict.fromkeys(factors.values(), one)
    pack |= {amax_s: largest[0], amax_o: largest[1]}
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

    def call() -> torch.Tensor:
        graph.execute(pack, workspace)
        return result.transpose(1, 2)

    return Impl("cudnn", call)


def usable(cell: Cell, impls: list[Impl]) -> tuple[list[Impl], list[str]]:
    """Who runs and agrees with the others; sentences about who does not.

    The first peer that runs is the measure; the times of a wrong answer are worth nothing. What has
    a row is ours and said that it can do the cell: unless memory ran out, a failure is WRONG too.
    """
    good: list[Impl] = []
    notes: list[str] = []
    answers: list[tuple[torch.Tensor, ...]] = []
    for impl in sorted(impls, key=lambda impl: impl.name == "fa"):
        try:
            with impl.context():
                answer = impl.call()
            answer = tuple(t.float() for t in (answer if isinstance(answer, tuple) else (answer,)))
            if answer[0].is_cuda:
                torch.cuda.synchronize()
        except Exception as error:
            failure = impl.row is not None and not isinstance(error, torch.OutOfMemoryError)
            who = f"WRONG: {impl.name} {impl.row}" if failure else impl.name
            notes.append(
                f"{cell.name}: {who} did not run: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}"
            )
            continue
        if answers:
            gap = max(_gap(a, b) for a, b in zip(answer, answers[0], strict=True))
            if not gap <= TOLERANCE.get(cell.dtype, 1e-4):
                notes.append(
                    f"{cell.name}: WRONG: {impl.name} {impl.row or ''} differs from "
                    f"{good[0].name} by {gap:.3g}; it is not timed."
                )
                continue
        else:
            answers.append(answer)
        good.append(impl)
    return good, notes


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest element where that is above 1."""
    return (a - b).abs().max().item() / max(1.0, b.abs().max().item())
