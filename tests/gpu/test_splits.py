# SPDX-License-Identifier: BSD-3-Clause
# Do the parts of split keys give the result of one pass, and does fa::combine merge what it should?

from __future__ import annotations

import math
import re
from typing import Any

import harness
import pytest
import torch
from harness import DEVICE, call, call_guarded, inputs_from, randn

import fa
import libfa
from cases import Case
from compare import Result, assert_bitwise_result, assert_result, expected

BACKEND = "cpu" if harness.ON_CPU else "sm80"  # the rows that split
PARTS = (1, 2, 3, 7, 50)

pytestmark = pytest.mark.skipif(
    BACKEND not in harness.backends(), reason=f"this build holds no {BACKEND} row"
)

BASE: dict[str, Any] = {"backward": False, "tag": "splits"}
CASES = [
    Case(**BASE, dim=128, q=1, k=1500, batch=2, heads_q=8, heads_k=2),
    Case(**BASE, dim=128, q=80, k=1500, batch=2, heads_q=8, heads_k=2),
    Case(**BASE, dim=256, q=3, k=1100, heads_q=10, heads_k=2, causal=True, sinks="same"),
    Case(**BASE, dtype="fp16", q=7, k=2000, heads_q=9, heads_k=1, window=(500, 0)),
    Case(**BASE, dim=128, q=5, k=1000, causal=True, heads_q=4, heads_k=1, values="x3"),
    Case(**BASE, dtype="fp16", q=70, k=900, window=(100, 20), batch=2),
    Case(**BASE, q=300, k=200, causal=True, sinks="fp32", heads_q=4, heads_k=2),
    Case(**BASE, q=130, k=1030, causal=True, chunk=300, out_fp32=True),
    Case(**BASE, dim=128, q=3, k=700, batch=4, seqused_k=(700, 0, 1, 65), sinks="same"),
    Case(**BASE, q=(1, 0, 70, 3), k=(900, 64, 0, 129), slack_q=9, heads_q=4, causal=True),
    Case(**BASE, q=(5, 140), k=333, batch=2, leftpad_k=(7, 0), seqused_k=(300, 20)),
    Case(**BASE, dim=72, dim_v=40, q=33, k=500, layout=("bhsd", "sbhd", "bhsd", "bshd")),
    Case(**BASE, q=64, k=0, sinks="fp32"),
    Case(**BASE, q=17, k=800, values="x20", scale=1.0),
]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_parts_are_right(case: Case, parts: int) -> None:
    if not harness.covered(case):
        pytest.skip(f"this build holds no row for {case.dtype}, head dim {case.dim}")
    inputs = harness.inputs_of(case)
    assert_result(call_guarded(inputs, BACKEND, num_splits=parts), harness.expected_of(case))


# Hopper rows that pack query heads into tiles: groups are a power of two.
PACKED = [
    Case(**BASE, dim=128, q=32, k=4100, batch=2, heads_q=8, heads_k=2),
    Case(**BASE, dim=128, q=5, k=1500, heads_q=8, heads_k=1, causal=True, sinks="fp32"),
    Case(**BASE, dim=256, q=77, k=1100, heads_q=8, heads_k=2, causal=True, sinks="same"),
    Case(**BASE, dtype="fp16", q=40, k=2000, heads_q=16, heads_k=1, window=(500, 0)),
    Case(**BASE, dim=128, q=50, k=1000, causal=True, heads_q=4, heads_k=1, values="x3"),
    Case(**BASE, q=300, k=200, causal=True, sinks="fp32", heads_q=4, heads_k=2),
    Case(**BASE, q=130, k=1030, causal=True, chunk=300, out_fp32=True, heads_q=4, heads_k=2),
    Case(**BASE, dim=128, q=9, k=700, batch=4, seqused_k=(700, 0, 1, 65), heads_q=8, heads_k=2),
    Case(**BASE, q=(1, 0, 70, 3), k=(900, 64, 0, 129), slack_q=9, heads_q=4, heads_k=2),
    Case(**BASE, q=(5, 140), k=333, batch=2, leftpad_k=(7, 0), heads_q=8, heads_k=4, causal=True),
    Case(**BASE, dim=72, dim_v=40, q=33, k=500, heads_q=4, heads_k=2),
    Case(**BASE, dim=256, q=64, k=0, sinks="fp32", heads_q=4, heads_k=2),
    Case(**BASE, q=17, k=800, values="x20", scale=1.0, heads_q=4, heads_k=2),
]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
def test_parts_of_packed_hopper_rows_are_right(case: Case, parts: int, cuda_only: None) -> None:
    if not any(libfa.packs_heads(row) and row.backend == "sm90" for row in harness.rows()):
        pytest.skip("this build holds no Hopper row that packs query heads")
    inputs = harness.inputs_of(case)
    result = call_guarded(inputs, "sm90", num_splits=parts)
    assert_result(result, harness.expected_of(case))
    assert_bitwise_result(result, call(inputs, "sm90", num_splits=parts))


POISONED = [
    Case(**BASE, dim=128, q=40, k=700, batch=3, seqused_k=(700, 65, 513), heads_q=8, heads_k=2),
    Case(**BASE, q=40, k=700, batch=2, leftpad_k=(7, 300), heads_q=8, heads_k=1, causal=True),
    Case(
        **BASE,
        dim=256,
        q=(33, 140),
        k=500,
        batch=2,
        leftpad_k=(129, 3),
        seqused_k=(400, 490),
        heads_q=8,
        heads_k=2,
    ),
    Case(**BASE, dim=96, q=(9, 0, 70), k=(900, 64, 129), heads_q=4, heads_k=2, causal=True),
]


@pytest.mark.parametrize("backend", harness.backends())
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("case", POISONED, ids=lambda case: case.id)
def test_poison_around_parts_changes_no_bit(case: Case, parts: int, backend: str) -> None:
    """Bytes before the first key are the last part's to hide, those behind the last the first's."""
    if backend == "sm90" and not any(
        libfa.packs_heads(row) and row.backend == backend for row in harness.rows()
    ):
        pytest.skip("this build holds no Hopper row that packs query heads")
    if not harness.covered(case, backend):
        pytest.skip(f"this build holds no {backend} row for head dim {case.dim}")
    results = [
        call_guarded(case.make(DEVICE, poison=poison), backend, num_splits=parts)
        for poison in (math.nan, math.inf, 0.0)
    ]
    assert_bitwise_result(results[0], results[1])
    assert_bitwise_result(results[0], results[2])
    assert_result(results[0], harness.expected_of(case))


def test_every_head_dim(cuda_only: None) -> None:
    for row in harness.rows():
        if row.backend != BACKEND or row.op != 1:
            continue
        dtype = getattr(torch, row.dtype)
        q, k = (randn(1, n, 2, row.dim_qk, dtype=dtype, seed=n) for n in (70, 300))
        v = randn(1, 300, 2, row.dim_v, dtype=dtype, seed=2)
        inputs = inputs_from(q, k, v, causal=True)
        result = call_guarded(inputs, BACKEND, num_splits=3)
        assert_result(result, expected(inputs, backward=False))


def test_a_long_cache_is_split_without_being_asked(cuda_only: None) -> None:
    q, k, v = randn(1, 1, 4, 128), randn(1, 9000, 2, 128, seed=1), randn(1, 9000, 2, 128, seed=2)
    with fa.backend(BACKEND):
        parts = re.search(r"^splits\s+(\d+)", fa.explain(q, k, v), re.MULTILINE)
    assert parts is not None
    assert int(parts[1]) > 1
    inputs = inputs_from(q, k, v)
    chosen = call_guarded(inputs, BACKEND)
    assert_result(chosen, expected(inputs, backward=False))
    assert_bitwise_result(chosen, call(inputs, BACKEND, num_splits=int(parts[1])))


def test_same_bits_whatever_else_is_in_the_batch() -> None:
    q, k, v = randn(3, 4, 8, 64), randn(3, 2000, 2, 64, seed=1), randn(3, 2000, 2, 64, seed=2)
    for options in ({"num_splits": 5}, {}):
        whole = call(inputs_from(q, k, v, batch_invariant=True, **options), BACKEND)
        for b in range(3):
            one = slice(b, b + 1)
            alone = call(
                inputs_from(q[one], k[one], v[one], batch_invariant=True, **options), BACKEND
            )
            assert_bitwise_result(alone, Result(whole.out[one], whole.lse[one]))


def test_parts_in_a_graph(cuda_only: None) -> None:
    q, k, v = randn(1, 2, 4, 64), randn(1, 4000, 2, 64, seed=1), randn(1, 4000, 2, 64, seed=2)
    inputs = inputs_from(q, k, v)
    call(inputs, BACKEND, num_splits=8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(inputs, BACKEND, num_splits=8)
    q.copy_(randn(1, 2, 4, 64, seed=9))
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise_result(captured, call(inputs, BACKEND, num_splits=8))


# ---- fa::combine -------------------------------------------------------------------------------


def parts_of(
    n: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial O [n, *shape, dim] and LSE; every third part of some rows is absent and holds NaN."""
    *batch, rows, heads = shape
    out = randn(n, *shape, dim, dtype=torch.float32).to(dtype)
    lse = randn(n, *batch, heads, rows, dtype=torch.float32, seed=1) * 5
    absent = randn(n, *batch, heads, rows, dtype=torch.float32, seed=2) > 1
    absent[:, ..., 0] = True  # all parts of row 0
    lse.masked_fill_(absent, -math.inf)
    out.masked_fill_(absent.transpose(-1, -2).unsqueeze(-1), math.nan)
    return out, lse


def in_fp64(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula of docs/numerics.md."""
    total = torch.logsumexp(lse.double(), dim=0)
    weights = (lse.double() - total.masked_fill(total == -math.inf, 0)).exp()
    parts = out.double().masked_fill((lse == -math.inf).transpose(-1, -2).unsqueeze(-1), 0)
    return (weights.transpose(-1, -2).unsqueeze(-1) * parts).sum(0), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2, 5, 33, 70])
def test_combine_is_the_formula(n: int, dtype: torch.dtype) -> None:
    for shape, dim in (
        ((2, 7, 3), 64),
        ((19, 4), 128),
        ((1, 3, 2), 256),
        ((5, 1), 40),
        ((3, 2), 7),
    ):
        out, lse = parts_of(n, shape, dim, dtype)
        exact, total = in_fp64(out, lse)
        for out_dtype in (dtype, torch.float32, torch.bfloat16):
            merged, merged_lse = fa.combine(out, lse, out_dtype=out_dtype)
            assert merged.dtype == out_dtype
            assert not merged[..., 0, :, :].any()  # row 0 of every sequence: no part
            assert torch.equal(merged_lse.isneginf(), total.isneginf())
            seen = ~total.isneginf()
            assert torch.allclose(merged_lse[seen].double(), total[seen], atol=2e-6, rtol=1e-6)
            eps = torch.finfo(out_dtype).eps
            error = (merged.double() - exact).abs()
            assert (error <= eps * exact.abs() + 4e-6 * (1 + exact.abs())).all()


def test_combine_takes_any_strides(cuda_only: None) -> None:
    out, lse = parts_of(4, (2, 6, 3), 64, torch.float32)
    want = fa.combine(out, lse)
    views = [
        out.transpose(2, 3).contiguous().transpose(2, 3),
        out.permute(1, 2, 3, 0, 4).contiguous().permute(3, 0, 1, 2, 4),
        torch.stack([out, out], dim=-1)[..., 0],
    ]
    for view in views:
        got = fa.combine(view, lse.transpose(-1, -2).contiguous().transpose(-1, -2))
        assert_bitwise_result(Result(*got), Result(*want))


def test_gradient_of_combine() -> None:
    out, lse = (t.clone() for t in parts_of(3, (2, 5, 2), 64, torch.float32))
    lse = lse.nan_to_num(neginf=-1.0)
    out = out.nan_to_num(nan=0.5)
    ours = [t.clone().requires_grad_() for t in (out, lse)]
    right = [t.double().clone().requires_grad_() for t in (out, lse)]
    given = [randn(2, 5, 2, 64, dtype=torch.float32, seed=7), randn(2, 2, 5, dtype=torch.float32)]
    grads = torch.autograd.grad(fa.combine(*ours), ours, given)
    exact = torch.autograd.grad(in_fp64(*right), right, [g.double() for g in given])
    for mine, wanted in zip(grads, exact, strict=True):
        assert torch.allclose(mine.double(), wanted, atol=1e-5, rtol=1e-5)


def test_combine_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="n = 0"):
        fa.combine(
            torch.empty(0, 1, 4, 1, 64, device=DEVICE), torch.empty(0, 1, 1, 4, device=DEVICE)
        )
