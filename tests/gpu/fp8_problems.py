# SPDX-License-Identifier: BSD-3-Clause
# How is an e4m3 call made out of a drawn problem, and how far may its result be off?
"""Inputs in e4m3, guarded calls, and bounds against fp64 that follow from docs/numerics.md."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import harness
import torch
from harness import DEVICE
from torch import Tensor

import fa
import libfa
from cases import Case, Guarded, Inputs
from fa import reference
from fa.quantize import FP8, relative_rmse


def store(x: Tensor) -> Tensor:
    """e4m3, in rows of a multiple of 16 bytes as kernels need them; NaN stands between the rows."""
    dim = x.shape[-1]
    room = torch.full((*x.shape[:-1], -(-dim // 16) * 16), math.nan, device=x.device).to(FP8)
    room[..., :dim] = x.clamp(-448, 448).to(FP8)
    return room[..., :dim]


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_dtype: torch.dtype = torch.float32,
    backend: str = "",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Into guarded outputs that hold NaN; on the Hopper rows unless a backend is named."""
    out = Guarded((*q.shape[:-1], v.shape[-1]), out_dtype, DEVICE)
    packed = "cu_seqlens_q" in options
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = Guarded(lse_shape, torch.float32, DEVICE)
    with fa.backend(backend or ("cpu" if harness.ON_CPU else "sm90")):
        torch.ops.fa.forward_out(q, k, v, **options, out=out.tensor, lse=lse.tensor)
    out.check("out")
    lse.check("lse")
    return out.tensor, lse.tensor


def score_error(q: Tensor, k: Tensor, options: dict[str, Any]) -> float:
    """How far a score may be off: 4 · 2^-13 of the largest ‖q‖ ‖k‖, times scale and descales.

    An instruction cuts 32 products t and the sum so far towards 0, at 13 bits below the largest of
    them (tools/fp8_sum.py). With σ the deviation of t, d terms have ‖q‖ ‖k‖ = σ d. A score
    s = z σ √d has z √d E|t| / σ = 0.64 z √d more products of its own sign than of the other (normal
    q and k: E|t| = 2 σ / π). Each loses half a unit on average; what both signs lose cancels. A
    unit is 2^-13 of the sum so far, which on its way to s is s / 2 on average: the score loses
    0.64 z √d · (1/2) · 2^-13 · s / 2 = 0.16 z² · 2^-13 ‖q‖ ‖k‖, at z = 5, which one of 2 · 10^6
    scores reaches, 4 · 2^-13 ‖q‖ ‖k‖. That units are rounded down to powers of two, by 0.72 on
    average, leaves room for the scatter of the cuts. LSE errs by the mean of its scores' errors.
    """

    def norm(x: Tensor) -> float:
        return float(x.double().nan_to_num(0.0).norm(dim=-1).max()) if x.numel() else 0.0

    scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    for name in ("q_descale", "k_descale"):
        if name in options:
            scale *= float(options[name].max()) if options[name].numel() else 1.0
    return 4 * 2.0**-13 * scale * norm(q) * norm(k)


def check(
    q: Tensor, k: Tensor, v: Tensor, out_dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """Each weight is rounded to e4m3, each score errs by `score_error`, O is rounded once.

    Rounding to 3 bits errs by 1/16 at most, 1/16/√3 = 0.036 on average just above a power of two.
    """
    out, lse = run(q, k, v, out_dtype, **options)
    options.pop("backend", None)
    want, want_lse = reference.attention(q, k, v, **options)
    weighed = weights_times_v(q, k, v, want, options)
    off = score_error(q, k, options)
    assert torch.equal(torch.isfinite(lse), torch.isfinite(want_lse))
    finite = torch.isfinite(want_lse)
    gap = (lse.double() - want_lse)[finite].abs()
    if len(gap):
        bound = 2e-5 + off + 1e-6 * float(want_lse[finite].abs().max())
        assert gap.max() <= bound, f"LSE is off by {float(gap.max()):.2e}, allowed is {bound:.2e}"
    assert torch.isfinite(out).all()
    error = (out.double() - want).abs()
    allowed = (2.0**-4 + 2 * off) * weighed + torch.finfo(out_dtype).eps * want.abs() + 1e-5
    allowed += lost_weights(v, options)
    assert (error <= allowed).all(), f"error {float((error / allowed).max()):.2f} x its bound"
    if out.numel() >= 4096 and want.any():
        assert relative_rmse(out, want) < 0.037


def lost_weights(v: Tensor, options: dict[str, Any]) -> float:
    """Weights below 2^-16 of a row's largest may become 0; their sum is one of random signs."""
    if not v.numel():
        return 0.0
    largest = float(v.double().nan_to_num(0.0).abs().max())
    factor = float(options["v_descale"].max()) if "v_descale" in options else 1.0
    keys = v.shape[0] if "cu_seqlens_k" in options else v.shape[1]
    return 2.0**-16 * keys**0.5 * largest * factor


def weights_times_v(
    q: Tensor, k: Tensor, v: Tensor, want: Tensor, options: dict[str, Any]
) -> Tensor:
    """P · |V|: what an error of the weights is multiplied by."""
    others = {n: x for n, x in options.items() if n != "out_dtype"}
    factor = others.pop("v_descale", None)
    if factor is not None and "descale_block_k" in others:  # a bound is enough
        others["v_descale"] = factor
        return reference.attention(q, k, v.float().abs().to(FP8), **others)[0]
    weighed, _ = reference.attention(q, k, v.double().abs(), **others)
    if factor is not None:  # of e4m3 values only: there are none left
        plain, _ = reference.attention(q, k, v, **others, v_descale=torch.ones_like(factor))
        ratio = torch.where(plain == 0, 0.0, want / plain).abs().amax(dim=-1, keepdim=True)
        weighed = weighed * ratio
    return weighed


# ---- drawn problems ---------------------------------------------------------------------------


def e4m3_case(case: Case) -> Case:
    """The problem that a drawn 16-bit one becomes: values that e4m3 holds, no gradient."""
    values = case.values if case.values in ("normal", "constant") else "normal"
    return replace(case, backward=False, dlse=False, values=values)


def draw_factors(case: Case, inputs: Inputs, rng: random.Random) -> dict[str, Any]:
    """Descales of one or all three tensors: per tensor, key head or block; or none."""
    kind = rng.choice(("none", "tensor", "head", "head", "block"))
    heads_k = inputs.k.shape[-2]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def positive(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(DEVICE)

    names = [n for n in "qkv" if kind != "none" and rng.random() < 0.8]
    if kind != "block":
        shape = (1,) if kind == "tensor" else (case.sequences, heads_k)
        return {f"{n}_descale": positive(*shape) for n in names}
    factors: dict[str, Any] = {}
    for side, tensor, lengths in (("q", inputs.q, case.q), ("k", inputs.k, case.k)):
        block = rng.choice((16, 64, 128))
        longest = max(lengths) if isinstance(lengths, tuple) else lengths
        packed = f"cu_seqlens_{side}" in inputs.options
        count = max(int(packed), -(-longest // block))  # dense: exact, none for no rows
        factors[f"descale_block_{side}"] = block
        for n in ("q",) if side == "q" else ("k", "v"):
            factors[f"{n}_descale"] = positive(case.sequences, tensor.shape[-2], count)
    return factors


def drawn_call(
    case: Case, inputs: Inputs, rng: random.Random
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k, v and the options of `fa::forward`; bytes outside of the problem stay NaN."""
    options = {n: x for n, x in inputs.options.items() if n != "out_dtype"}
    if "sinks" in options:
        options["sinks"] = options["sinks"].float()
    options |= draw_factors(case, inputs, rng)
    return (store(inputs.q), store(inputs.k), store(inputs.v)), options


def covered(case: Case, options: dict[str, Any], backend: str) -> bool:
    """Whether a backend must run such a call: the CPU backend any, Hopper where it has a row."""
    if backend == "cpu" or harness.ON_CPU:
        return True
    masked = bool(case.features & {"causal", "window_left", "window_right", "chunk"})
    blocks = {n: b for n, b in options.items() if n.startswith("descale_block")}
    scored = bool(case.features & harness.SCORES) or bool(blocks)
    block_k = blocks.get("descale_block_k", 0) if {"k_descale", "v_descale"} & {*options} else 0
    return not (block_k and "leftpad_k" in options) and any(
        row.op == libfa.FORWARD
        and row.dtype == "float8_e4m3fn"
        and backend in (row.backend, "auto")
        and row.dim_qk >= case.dim
        and row.dim_v >= (case.dim_v or case.dim)
        and (row.mask == "band" or not masked)
        and (row.score == "any" or not scored)
        and block_k % row.tile_n == 0
        and (row.dim_v <= 128 or not blocks)
        for row in harness.rows()
    )


def check_drawn(case: Case, inputs: Inputs, rng: random.Random, backend: str) -> str:
    """Runs a drawn problem in e4m3 and compares; "ran" or the sentence of a lawful refusal."""
    tensors, options = drawn_call(case, inputs, rng)
    before = [t.view(torch.uint8).clone() for t in tensors]
    outcome = "ran"
    try:
        check(*tensors, backend=backend, **options)
    except NotImplementedError as error:
        outcome = str(error)
        assert not covered(case, options, backend), f"{backend} must run this, but: {outcome}"
        assert len(outcome) > 40 and "." in outcome, f"a refusal is a sentence, not {outcome!r}"
    else:
        assert covered(case, options, backend), f"no row covers this, yet {backend} returned"
    for name, t, old in zip("qkv", tensors, before, strict=True):
        assert torch.equal(t.view(torch.uint8), old), f"{name}: the call wrote to its input"
    return outcome
