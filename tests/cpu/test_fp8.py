# SPDX-License-Identifier: BSD-3-Clause
# Is attention over e4m3 numbers that over the real numbers they stand for?
"""e4m3 inputs, descales, transposed V, 16-bit queries over an e4m3 cache; without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fa
from compare import assert_bitwise
from fa import _cpu_tiles, reference
from paging import to_pages

OPS = torch.ops.fa
INT = torch.int32
FP8 = torch.float8_e4m3fn
B, HQ, HK, SQ, SK, D, DV = 2, 4, 2, 37, 70, 32, 16


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


def tensors(q_dtype: torch.dtype = FP8, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, DV))
    q, k, v = (torch.randn(*s, generator=g) for s in shapes)
    return [q.to(q_dtype), k.to(FP8), v.to(FP8)]


def positive(*shape: int, seed: int = 3) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.25


DESCALES: dict[str, dict[str, Any]] = {
    "none": {},
    "scalar": {n: torch.tensor(f) for n, f in (("q_descale", 0.5), ("v_descale", 3.0))},
    "tensor": {"k_descale": torch.tensor([2.0]), "v_descale": torch.tensor([[0.25]])},
    "head": {f"{x}_descale": positive(B, HK, seed=n) for n, x in enumerate("qkv")},
    "key head": {"k_descale": positive(HK), "q_descale": positive(B, 1)},
    "blocks": {
        "q_descale": positive(B, HQ, 3),
        "k_descale": positive(B, HK, 5),
        "v_descale": positive(1, HK, 5, seed=4),
        "descale_block_q": 16,
        "descale_block_k": 16,
    },
    "blocks of one side": {
        "q_descale": positive(B, HK),
        "v_descale": positive(B, 1, 10),
        "descale_block_k": 7,
    },
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scores": {
        "softcap": 5.0,
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.05]),
        "sinks": torch.tensor([0.5, 0.0, -1.0, 2.0]),
        "window_left": 30,
    },
    "leftpad": {"leftpad_k": ints(9, 20), "seqused_k": ints(70, 51)},
    "dropout": {"dropout_p": 0.3, "philox_seed_offset": torch.tensor([3, 4])},
}


def close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], bound: float = 2e-5) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.isfinite(), b.isfinite())
        error = (a.double() - b).nan_to_num(0.0).abs().max()
        assert error < bound, float(error)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("descales", DESCALES.values(), ids=DESCALES.keys())
def test_against_the_reference(
    descales: dict[str, Any], features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, options = tensors(), {**descales, **features}
    want = reference.attention(*inputs, **options)
    close(OPS.forward(*inputs, **options, out_dtype=torch.float32), want)
    for name, size in (("TILE_M", 16), ("TILE_N", 8), ("TILE_SCORES", 900)):
        monkeypatch.setattr(_cpu_tiles, name, size)
    close(OPS.forward(*inputs, **options, out_dtype=torch.float32), want)


@pytest.mark.parametrize("descales", DESCALES.values(), ids=DESCALES.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_queries(descales: dict[str, Any], dtype: torch.dtype) -> None:
    options = {n: x for n, x in descales.items() if n not in ("q_descale", "descale_block_q")}
    inputs = tensors(dtype)
    want = reference.attention(*inputs, **options, causal=True)
    close(OPS.forward(*inputs, **options, causal=True, out_dtype=torch.float32), want)
    out, _ = OPS.forward(*inputs, **options, causal=True)
    assert out.dtype == dtype and (out - want[0]).abs().max() < 2e-2 * want[0].abs().max()


def test_the_reference_by_hand() -> None:
    """Blocks count keys from the start of their place, rows from the first of the sequence."""
    inputs, options = tensors(), dict(DESCALES["blocks"])
    q, k, v = (t.double() for t in inputs)
    for b in range(B):
        for h in range(HQ):
            for i in range(SQ):
                q[b, i, h] *= float(options["q_descale"][b, h, i // 16])
        for h in range(HK):
            for j in range(SK):
                k[b, j, h] *= float(options["k_descale"][b, h, j // 16])
                v[b, j, h] *= float(options["v_descale"][0, h, j // 16])
    for features in ({}, FEATURES["leftpad"]):
        close(
            reference.attention(*inputs, **options, **features),
            reference.attention(q, k, v, **features),
            1e-12,
        )


def test_descales_of_every_batch_entry_and_head() -> None:
    """vllm PR#51363: a descale dropped on one path."""
    inputs = tensors(seed=5)
    factors = {
        "q_descale": torch.tensor([[0.5, 0.25], [1.0, 2.0]]),
        "k_descale": torch.tensor([[2.0, 1.5], [0.5, 0.25]]),
        "v_descale": torch.tensor([[3.0, 0.5], [1.0, 7.0]]),
    }
    real = [
        t.bfloat16() * f.repeat_interleave(t.shape[2] // HK, dim=1)[:, None, :, None].bfloat16()
        for t, f in zip(inputs, factors.values(), strict=True)
    ]
    want = fa.attention(*real, causal=True)
    got = fa.attention(*inputs, causal=True, **factors)
    assert (got - want).abs().max() < 2e-2 * want.abs().max()
    for name in factors:
        one = {**factors, name: torch.ones(B, HK)}
        assert (fa.attention(*inputs, causal=True, **one) - want).abs().max() > 0.1


def test_packed_and_paged_and_cache_rows() -> None:
    q, k, v = tensors()
    used = ints(70, 33)
    per_head = DESCALES["head"]
    want = OPS.forward(q, k, v, seqused_k=used, causal=True, **per_head)
    g = torch.Generator().manual_seed(0)
    pools, table = to_pages([k, v], 16, g, used=used.tolist())
    got = OPS.forward(q, *pools, seqused_k=used, page_table=table, causal=True, **per_head)
    close(got, want, 1e-2)
    # Factors belong to the sequence, not to the row of the cache that it reads.
    rows = [t.flip(0) for t in (k, v)]
    got = OPS.forward(q, *rows, seqused_k=used, kv_batch_idx=ints(1, 0), causal=True, **per_head)
    close(got, want, 1e-2)
    cu_q, cu_k = ints(0, SQ, 2 * SQ), ints(0, 70, 103)
    packed = q.flatten(0, 1), torch.cat([k[0], k[1, :33]]), torch.cat([v[0], v[1, :33]])
    out, lse = OPS.forward(*packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, **per_head)
    close((out.view(B, SQ, HQ, DV), lse.view(HQ, B, SQ).transpose(0, 1)), want, 1e-2)
    blocks = {**DESCALES["blocks"], "v_descale": positive(B, HK, 5)}
    want = OPS.forward(q, k, v, seqused_k=used, **blocks)
    out, _ = OPS.forward(*packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **blocks)
    assert (out.view(B, SQ, HQ, DV) - want[0]).abs().max() < 1e-2


def test_transposed_v_and_other_strides() -> None:
    q, k, v = tensors()
    want = OPS.forward(q, k, v, causal=True, **DESCALES["head"])
    columns = v.view(torch.uint8).permute(0, 2, 3, 1).contiguous().view(FP8).permute(0, 3, 1, 2)
    assert columns.stride(1) == 1 and columns.stride(-1) == SK
    for got in (
        OPS.forward(q, k, columns, causal=True, **DESCALES["head"]),
        OPS.forward(
            q, k.transpose(1, 2).contiguous().transpose(1, 2), v, causal=True, **DESCALES["head"]
        ),
    ):
        assert_bitwise("out", got[0], want[0])
        assert_bitwise("lse", got[1], want[1])


def test_bytes_outside_the_problem() -> None:
    q, k, v = tensors()
    used = ints(41, 9)
    results = []
    for poison in (math.nan, 448.0):
        dirty = [t.clone() for t in (k, v)]
        for t in dirty:
            for b, n in enumerate(used.tolist()):
                t[b, n:] = torch.full((), poison).to(FP8)
        results.append(OPS.forward(q, *dirty, seqused_k=used, causal=True, **DESCALES["blocks"]))
    assert torch.isfinite(results[0][0]).all()
    for name, a, b in zip(("out", "lse"), *results, strict=True):
        assert_bitwise(name, a, b)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 130, 257, 512, 1023])
def test_every_length_is_near_the_16_bit_run(length: int) -> None:
    """FA#2577: the output was wrong at lengths just beyond a tile."""
    g = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(1, n, h, 128, generator=g) for n, h in ((1, 6), (length, 1), (length, 1))
    )
    out = fa.attention(*(t.to(FP8) for t in (q, k, v)), out_dtype=torch.float32)
    want = fa.attention(*(t.bfloat16() for t in (q, k, v))).float()
    cosine = torch.nn.functional.cosine_similarity(out.flatten(), want.flatten(), dim=0)
    assert cosine > 0.99
    rounded = fa.attention(*(t.to(FP8).bfloat16() for t in (q, k, v))).float()
    assert torch.nn.functional.cosine_similarity(out.flatten(), rounded.flatten(), dim=0) > 0.9999


def test_a_long_sum_does_not_drift() -> None:
    """vllm#23813: V = 1 over 131072 keys gives 1."""
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 1, 8, 128, generator=g), torch.randn(1, 131072, 1, 128, generator=g)
    v = torch.ones(1, 131072, 1, 8)
    out = fa.attention(*(t.to(FP8) for t in (q, k, v)), out_dtype=torch.float32)
    assert (out - 1).abs().max() < 1e-4


def test_windows_over_an_e4m3_cache() -> None:
    """flashinfer#3864: several query tokens, a window, bf16 queries, e4m3 keys."""
    g = torch.Generator().manual_seed(2)
    q = torch.randn(1, 8, 4, 256, generator=g).bfloat16()
    k, v = (torch.randn(1, 3000, 1, 256, generator=g).to(FP8) for _ in range(2))
    options: dict[str, Any] = {"window_left": 1023, "window_right": 0}
    want = reference.attention(q, k, v, **options)
    close(OPS.forward(q, k, v, **options, out_dtype=torch.float32), want)


def test_large_heads_over_pages_of_e4m3() -> None:
    """flashinfer#574: bf16 queries, e4m3 pages of 32 keys, head dim 256; unused slots are NaN."""
    g = torch.Generator().manual_seed(4)
    q = torch.randn(1, 100, 8, 256, generator=g).bfloat16()
    k, v = (torch.randn(1, 100, 2, 256, generator=g).to(FP8) for _ in range(2))
    pools, table = to_pages([k, v], 32, g)
    options = {"causal": True, "k_descale": positive(1, 2), "v_descale": positive(1, 2, seed=8)}
    want = reference.attention(q, k, v, **options)
    got = OPS.forward(
        *(q, *pools), page_table=table, seqused_k=ints(100), out_dtype=torch.float32, **options
    )
    close(got, want, 1e-4)


def test_dtypes_of_the_result() -> None:
    inputs = tensors()
    wide, lse = OPS.forward(*inputs, out_dtype=torch.float32)
    assert wide.dtype == torch.float32 and lse.dtype == torch.float32
    for dtype in (None, torch.bfloat16, torch.float16):
        out, _ = OPS.forward(*inputs, out_dtype=dtype)
        assert out.dtype == (dtype or torch.bfloat16)
        assert_bitwise("out", out, wide.to(out.dtype))
    buffers = {"out": torch.empty(B, SQ, HQ, DV).half(), "lse": torch.empty(B, HQ, SQ)}
    OPS.forward_out(*inputs, **buffers)
    assert_bitwise("out", buffers["out"], wide.half())
    with pytest.raises(ValueError, match="out_dtype: torch.float8_e4m3fn.*bfloat16, torch.float16"):
        OPS.forward(*inputs, out_dtype=FP8)
    mixed = tensors(torch.float16)
    with pytest.raises(ValueError, match="out_dtype: torch.bfloat16.*torch.float16"):
        OPS.forward(*mixed, out_dtype=torch.bfloat16)


def test_an_e4m3_cache_grows() -> None:
    g = torch.Generator().manual_seed(3)
    new = [torch.randn(2, 5, 2, 16, generator=g).to(FP8) for _ in range(2)]
    caches = [torch.randn(2, 30, 2, 16, generator=g).to(FP8) for _ in range(2)]
    q = torch.randn(2, 5, 4, 16, generator=g).bfloat16()
    factors = {"k_descale": positive(2, 2), "v_descale": positive(2, 2, seed=9)}
    lengths = ints(3, 20)
    out = fa.attention_kvcache(q, *caches, *new, cache_seqlens=lengths, causal=True, **factors)
    for b, n in enumerate(lengths.tolist()):
        for cache, t in zip(caches, new, strict=True):
            assert torch.equal(cache[b, n : n + 5].view(torch.uint8), t[b].view(torch.uint8))
    want, _ = reference.attention(q, *caches, seqused_k=lengths + 5, causal=True, **factors)
    assert (out - want).abs().max() < 2e-2 * want.abs().max()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_are_refused(which: int) -> None:
    """FA#1711."""
    for q_dtype in (FP8, torch.bfloat16):
        inputs = tensors(q_dtype)
        inputs[which].requires_grad_()
        for call in (OPS.forward, fa.attention):
            with pytest.raises(
                NotImplementedError, match=r"[qk]: torch.float8_e4m3fn has no backward"
            ):
                call(*inputs)
        with torch.no_grad():
            OPS.forward(*inputs)
    inputs = tensors()
    factor = torch.ones(1, requires_grad=True)
    with pytest.raises(NotImplementedError, match="k_descale: requires_grad"):
        fa.attention(*inputs, k_descale=factor)
    out, lse = OPS.forward(*inputs)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn has no backward"):
        OPS.backward(out, *inputs, out, lse)


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        ((FP8, FP8), {"k_descale": torch.ones(4, HK)}, ["k_descale", "[4, 2]", "[2, 2]"]),
        ((FP8, FP8), {"q_descale": torch.ones(B, HQ)}, ["q_descale", "[2, 4]", "[2, 2]"]),
        ((FP8, FP8), {"v_descale": torch.ones(1).double()}, ["v_descale", "float64", "float32"]),
        ((FP8, FP8), {"v_descale": torch.ones(1, device="meta")}, ["v_descale", "meta", "Move"]),
        ((torch.bfloat16, FP8), {"q_descale": torch.ones(1)}, ["q_descale", "bfloat16", "e4m3fn"]),
        (
            (FP8, FP8),
            {"k_descale": torch.ones(B, HK), "descale_block_k": 16},
            ["k_descale", "[2, 2]", "[2, 2, 5]"],
        ),
        (
            (FP8, FP8),
            {"k_descale": torch.ones(B, HK, 4), "descale_block_k": 16},
            ["k_descale", "[2, 2, 4]", "[2, 2, 5]", "exact"],
        ),
        (
            (FP8, FP8),
            {"k_descale": torch.ones(B, HK), "descale_block_q": 16},
            ["descale_block_q", "16", "q_descale"],
        ),
        ((torch.float32, FP8), {}, ["k", "float8_e4m3fn", "torch.float32"]),
        ((FP8, torch.bfloat16), {}, ["k", "bfloat16", "float8_e4m3fn"]),
    ],
)
def test_bad_calls(
    inputs: tuple[torch.dtype, torch.dtype], options: dict[str, Any], words: list[str]
) -> None:
    q, k, v = tensors()
    q, k = q.to(inputs[0]), k.to(inputs[1])
    with pytest.raises(ValueError) as caught:
        OPS.forward(q, k, v, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_blocks_of_packed_sequences_must_reach() -> None:
    q, k, v = (t[0] for t in tensors())
    cu = {"cu_seqlens_q": ints(0, 20, SQ), "cu_seqlens_k": ints(0, 20, SK)}
    factors = {"k_descale": torch.ones(2, HK, 3), "descale_block_k": 16}
    with pytest.raises(ValueError, match="k_descale: 3 blocks of 16 rows.*50 rows. Pass 4 blocks"):
        OPS.forward(q, k, v, **cu, **factors)
    with pytest.raises(ValueError, match=r"k_descale: shape \[4, 2\] must broadcast to"):
        OPS.forward(q, k, v, **cu, k_descale=torch.ones(4, HK))  # a padded batch (sglang PR#37785)
    OPS.forward(q, k, v, **cu, k_descale=torch.ones(1, 1))


@pytest.mark.parametrize("q_dtype", [FP8, torch.bfloat16], ids=str)
def test_opcheck_and_compile(q_dtype: torch.dtype) -> None:
    inputs = tensors(q_dtype)
    options = {n: x for n, x in DESCALES["blocks"].items() if q_dtype == FP8 or "q" not in n}
    # Not test_schema: torch compares the inputs by arithmetic that it does not have for e4m3.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, given in (
        (OPS.forward, {**options, "causal": True}),
        (OPS._forward, {"out_dtype": torch.float32}),
    ):
        before = [t.clone() for t in inputs]
        torch.library.opcheck(op.default, inputs, given, test_utils=tests)
        for a, b in zip(inputs, before, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *t: fa.attention(*t, **options), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*inputs), fa.attention(*inputs, **options))
