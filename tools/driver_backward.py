# SPDX-License-Identifier: BSD-3-Clause
# Are the gradients of a backward row right on one small case, called from C without torch?
"""The backward half of tools/driver.py: one call of fa_backward, compared with numpy in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np

import libfa

GUARD = 64  # elements around each gradient that must keep their bytes
FILL = 0xFF
# Of the device, of 8.0, of 8.6 and 8.9: a row for less runs where only that much may be used.
SHARED_MEMORY = (0, 166912, 101376)
SOFTCAP = 6.0  # of a row with the score `any`


def softcap_of(row: libfa.Row) -> float:
    """The softcap with which this row is the one that runs; 0: none."""
    return SOFTCAP if "_any" in row.id else 0.0


def fill_shapes(p: libfa.Params, problem: Any) -> None:
    """Gradients and options of the call; the forward's part is filled already."""
    row = problem.row
    totals = tuple(sum(side) for side in zip(*problem.lengths, strict=True))
    for name, heads, dim, total in (
        ("dout", problem.heads_q, row.dim_v, totals[0]),
        ("dq", problem.heads_q, row.dim_qk, totals[0]),
        ("dk", problem.heads_k, row.dim_qk, totals[1]),
        ("dv", problem.heads_k, row.dim_v, totals[1]),
    ):
        strides = (heads * dim, dim, 1)
        dense = (total * heads * dim, *strides)
        p.tensor(f"grad.{name}", 0, strides if problem.packed else dense, row.dtype)
    p["score.softcap"] = softcap_of(row)
    p["options.deterministic"] = int(problem.packed)  # one case of each


def gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, causal: bool, softcap: float
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """fp64 gradients of one sequence, what their rounding may be in units of 2⁻ⁿ, out and lse."""
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    wide_k, wide_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    s = np.einsum("ihd,jhd->hij", q, wide_k) * scale
    slope = np.ones_like(s)
    if softcap:
        bent = np.tanh(s / softcap)
        s, slope = softcap * bent, 1 - bent**2
    if causal:
        i, j = np.arange(s.shape[1])[:, None], np.arange(s.shape[2])[None, :]
        s = np.where(j <= i + s.shape[2] - s.shape[1], s, -np.inf)
    top = s.max(axis=2, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(axis=2, keepdims=True)
    p = p / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(top), top, 0))[:, :, 0]
    out = np.einsum("hij,jhd->ihd", p, wide_v)
    dp = np.einsum("ihd,jhd->hij", dout, wide_v)
    delta = np.einsum("ihd,ihd->hi", dout, out)[:, :, None]
    ds = p * (dp - delta) * slope
    # O is rounded before its dot with dO is taken; P and dS are rounded before their products.
    loose = np.abs(ds) + p * np.einsum("ihd,ihd->hi", np.abs(dout), np.abs(out))[:, :, None]

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), -1, group, x.shape[-1]).sum(axis=2)

    exact = {
        "dq": scale * np.einsum("hij,jhd->ihd", ds, wide_k),
        "dk": scale * grouped(np.einsum("hij,ihd->jhd", ds, q)),
        "dv": grouped(np.einsum("hij,ihd->jhd", p, dout)),
    }
    bound = {
        "dq": scale * np.einsum("hij,jhd->ihd", loose, np.abs(wide_k)),
        "dk": scale * grouped(np.einsum("hij,ihd->jhd", loose, np.abs(q))),
        "dv": grouped(np.einsum("hij,ihd->jhd", p, np.abs(dout))),
    }
    return exact, {n: x + np.abs(exact[n]) for n, x in bound.items()}, out, lse


def _ends(problem: Any) -> tuple[np.ndarray, np.ndarray]:
    ends = np.zeros((2, len(problem.lengths) + 1), np.int32)
    ends[:, 1:] = np.cumsum(np.array(problem.lengths, np.int32).T, axis=1)
    return ends[0], ends[1]


def run(
    library: libfa.Library, memory: Any, problem: Any, seed: int, fill_forward: Any
) -> dict[str, float]:
    """Largest error of each gradient in units of its bound; guards are asserted."""
    row = problem.row
    rng = np.random.default_rng(seed)
    ends_q, ends_k = _ends(problem)
    rows_q, rows_k = int(ends_q[-1]), int(ends_k[-1])
    shapes = {
        "q": (rows_q, problem.heads_q, row.dim_qk),
        "k": (rows_k, problem.heads_k, row.dim_qk),
        "v": (rows_k, problem.heads_k, row.dim_v),
        "dout": (rows_q, problem.heads_q, row.dim_v),
    }
    bits = {n: libfa.to_bits(rng.standard_normal(s), row.dtype) for n, s in shapes.items()}
    values = {n: libfa.from_bits(b, row.dtype) for n, b in bits.items()}
    exact = {n: np.zeros(shapes[n[1:]]) for n in ("dq", "dk", "dv")}
    bound = {n: np.zeros(x.shape) for n, x in exact.items()}
    out, lse = np.zeros(shapes["dout"]), np.full((problem.heads_q, rows_q), -np.inf)
    for b in range(len(problem.lengths)):
        i, j = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        if i.start == i.stop or j.start == j.stop:
            continue
        part = (values["q"][i], values["k"][j], values["v"][j], values["dout"][i])
        right, loose, out[i], lse[:, i] = gradients(*part, problem.causal, softcap_of(row))
        for name, at in (("dq", i), ("dk", j), ("dv", j)):
            exact[name][at], bound[name][at] = right[name], loose[name]

    p = libfa.Params(library)
    fill_forward(p, problem)
    fill_shapes(p, problem)
    for name, array in bits.items():
        p[f"{'grad.' if name == 'dout' else ''}{name}.data"] = memory.upload(array)
    p["out.data"] = memory.upload(libfa.to_bits(out, row.dtype))
    p["lse.data"] = memory.upload(lse.astype(np.float32))
    if problem.packed:
        p["seq.cu_q"], p["seq.cu_k"] = memory.upload(ends_q), memory.upload(ends_k)
    addresses = {n: memory.empty(2 * (x.size + 2 * GUARD), FILL) for n, x in exact.items()}
    for name, address in addresses.items():
        p[f"grad.{name}.data"] = address + 2 * GUARD
    for limit in SHARED_MEMORY:
        p["options.smem_limit"] = limit
        plan = p.explain(libfa.BACKWARD)
        if row.id in plan.split():
            break
    else:
        raise RuntimeError(f"the plan does not name {row.id}: {plan}")
    size = p.workspace_bytes(libfa.BACKWARD)
    p.backward(memory.stream(), memory.empty(size) if size else 0, size)

    code, unit = (np.float16, 2.0**-11) if row.dtype == "float16" else (np.uint16, 2.0**-8)
    worst = {}
    for name, address in addresses.items():
        held = memory.download(address, (exact[name].size + 2 * GUARD,), code)
        edges = np.concatenate([held[:GUARD], held[-GUARD:]]).view(np.uint8)
        if not (edges == FILL).all():
            raise RuntimeError(f"{name}: bytes outside of the gradient were written.")
        got = libfa.from_bits(held[GUARD:-GUARD], row.dtype).reshape(exact[name].shape)
        error = np.abs(got - exact[name]) / (unit * bound[name] + 1e-5)
        worst[name] = float(np.nan_to_num(error, nan=np.inf).max())
    return worst
