# SPDX-License-Identifier: BSD-3-Clause
# Which faults have attention libraries had, and does the CPU backend have none of these kinds?
"""One test per kind of fault in sections A to F of the list that tests/cases.py tags refer to.

Kinds that are a single problem stand in cases.py (tags A2 to F92); here are those of pages, caches,
descales, partial results and strides. Kinds about masks as tensors, bias objects and plans that the
user keeps do not exist here; races and workspaces are for a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fa
from fa import reference
from fa.flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata
from paging import to_pages

FP8 = torch.float8_e4m3fn


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g).to(dtype)


def close(q: Tensor, k: Tensor, v: Tensor, got: Tensor, **options: Any) -> None:
    """Within twice the error of plain attention in q's dtype."""
    want, _ = reference.attention(q, k, v, **options)
    plain, _ = reference.attention(q, k, v, **options, dtype=q.dtype)
    allowed = 2 * (plain.double() - want).abs().max() + 1e-5
    assert got.isfinite().all() and (got.double() - want).abs().max() <= allowed


def pages(k: Tensor, v: Tensor, size: int, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    (k, v), table = to_pages([k, v], size, torch.Generator().manual_seed(0), **more)
    return k, v, table


def partials(count: int, rows: int, dim: int) -> Tensor:
    return draw(count, 1, rows, 2, dim, dtype=torch.float32)


def test_a14_two_empty_partial_results() -> None:
    out, lse = fa.combine(torch.zeros(2, 1, 4, 2, 128), torch.full((2, 1, 2, 4), -math.inf))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_a17_partial_results_far_apart() -> None:
    outs = partials(2, 4, 64)
    lses = torch.tensor([0.0, 300.0])[:, None, None, None].expand(2, 1, 2, 4)
    out, lse = fa.combine(outs, lses)
    assert torch.equal(out, outs[1]) and (lse == 300).all()


def test_a18_one_row_without_keys() -> None:
    """Row 0 of 8 stands one place before the first of 7 keys."""
    q, k, v = (
        draw(1, n, 2, 64, seed=i, dtype=torch.half).requires_grad_()
        for i, n in enumerate((8, 7, 7))
    )
    out = fa.attention(q, k, v, causal=True)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert (out[:, 0] == 0).all() and (grads[0][:, 0] == 0).all()
    assert all(t.isfinite().all() for t in grads)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_c35_unused_slots_of_the_last_page(poison: float) -> None:
    q, k, v = draw(1, 1, 4, 64), draw(1, 13, 4, 64, seed=1), draw(1, 13, 4, 64, seed=2)
    pool_k, pool_v, table = pages(k, v, 4, poison=poison)
    out = fa.attention(q, pool_k, pool_v, page_table=table, seqused_k=ints(13))
    assert torch.equal(out, fa.attention(q, k, v))


def test_c36_large_heads_over_pages_of_e4m3() -> None:
    q = draw(1, 100, 32, 256)
    k, v = (draw(1, 100, 8, 256, seed=i).to(FP8) for i in (1, 2))
    pool_k, pool_v, table = pages(k.float(), v.float(), 32, poison=math.nan)
    stored = (q, pool_k.to(FP8), pool_v.to(FP8))
    out = fa.attention(*stored, page_table=table, seqused_k=ints(100), causal=True)
    close(q, k, v, out, causal=True)


@pytest.mark.parametrize("unused", [-1, 2**31 - 1])
def test_c41_table_entries_outside_the_window(unused: int) -> None:
    q, k, v = draw(1, 1, 2, 128), draw(1, 512, 2, 128, seed=1), draw(1, 512, 2, 128, seed=2)
    pool_k, pool_v, table = pages(k, v, 16)
    table[:, : (512 - 128) // 16] = unused
    out = fa.attention(
        q, pool_k, pool_v, page_table=table, seqused_k=ints(512), window_size=(127, 0)
    )
    assert torch.equal(out, fa.attention(q, k, v, window_size=(127, 0)))


def test_d47_a_negative_right_window() -> None:
    q = draw(1, 64, 1, 64)
    with pytest.raises(ValueError, match="window_right: -3 is below -1"):
        fa.attention(q, q, q, causal=True, window_size=(-1, -3))


def test_d54_several_queries_a_window_and_e4m3_keys() -> None:
    q = draw(1, 8, 4, 256)
    k, v = (draw(1, 3000, 2, 256, seed=i).to(FP8) for i in (1, 2))
    close(q, k, v, fa.attention(q, k, v, window_size=(1023, 0)), window_left=1023, window_right=0)


@pytest.mark.parametrize("causal", [False, True])
def test_d63_positions_of_several_new_queries(causal: bool) -> None:
    """FlashAttention's rule: not causal, every query stands at the old length of the cache."""
    angle = torch.arange(64)[:, None] / 100.0 ** (torch.arange(32) / 32)
    cos, sin = angle.cos(), angle.sin()
    q, k, v = (draw(1, n, 2, 64, seed=i) for i, n in enumerate((4, 32, 32)))
    k_new, v_new = draw(1, 4, 2, 64, seed=3), draw(1, 4, 2, 64, seed=4)
    at = torch.arange(10, 14)[None]
    turned = torch.ops.fa.apply_rotary(k_new, cos, sin, positions=at)
    first = at if causal else torch.full_like(at, 10)
    want_q = torch.ops.fa.apply_rotary(q, cos, sin, positions=first)
    want_k, want_v = k[:, :14].clone(), v[:, :14].clone()
    want_k[:, 10:], want_v[:, 10:] = turned, v_new
    options = {"cache_seqlens": 10, "rotary_cos": cos, "rotary_sin": sin, "causal": causal}
    got = fa.attention_kvcache(q, k, v, k_new, v_new, **options)
    assert torch.equal(got, fa.attention(want_q, want_k, want_v, causal=causal))


def virtual(elements: int) -> Tensor:
    """Memory that nothing has touched; skipped where the system does not lend so much of it."""
    try:
        return torch.empty(elements, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no {elements * 2 / 2**30:.0f} GiB of address space: {str(error)[:80]}")


def test_e65_rows_of_a_cache_far_apart() -> None:
    stride = 2**30  # elements
    cache = virtual(4 * stride + 4 * 64).as_strided((5, 4, 1, 64), (stride, 64, 64, 1))
    rows = ints(1, 2, 3, 4)
    for row in range(1, 5):
        cache[row] = draw(4, 1, 64, seed=row)
    q = draw(4, 1, 1, 64)
    out = fa.attention(q, cache, cache, kv_batch_idx=rows)
    close(q, cache[1:].clone(), cache[1:].clone(), out)


@pytest.mark.parametrize("page", [131_073, 262_145])
def test_e74_pages_beyond_31_and_32_bits(page: int) -> None:
    shape, one = (page + 1, 16, 8, 128), 16 * 8 * 128
    pool = virtual(shape[0] * one).view(shape)
    k = draw(1, 16, 8, 128)
    pool[page] = k[0]
    q, table = draw(1, 3, 16, 128, seed=1), ints(page)[None]
    out = fa.attention(q, pool, pool, page_table=table, seqused_k=ints(16))
    assert torch.equal(out, fa.attention(q, k, k))


def test_e66_cache_lengths_equal_slices() -> None:
    q, k, v = draw(1, 1, 8, 128), draw(1, 8192, 1, 128, seed=1), draw(1, 8192, 1, 128, seed=2)
    out = fa.attention_kvcache(q, k, v, cache_seqlens=ints(100))
    assert torch.equal(out, fa.attention(q, k[:, :100], v[:, :100]))


@pytest.mark.parametrize("splits", [1, 4])
def test_e68_packed_queries_pages_and_splits(splits: int) -> None:
    lengths_q, lengths_k = ints(0, 1, 8, 138), ints(900, 65, 2000)
    q, k, v = draw(138, 8, 64), draw(3, 2048, 2, 64, seed=1), draw(3, 2048, 2, 64, seed=2)
    pool_k, pool_v, table = pages(k, v, 256, used=lengths_k.tolist())
    options = {"cu_seqlens_q": lengths_q, "seqused_k": lengths_k, "causal": True}
    out = fa.attention(q, pool_k, pool_v, page_table=table, num_splits=splits, **options)
    close(q, k, v, out, **options)


def test_e69_hints_that_are_too_small() -> None:
    q, k = draw(400, 2, 64), draw(400, 2, 64, seed=1)
    lengths = ints(0, 100, 400)
    results = [fa.attention_varlen(q, k, k, lengths, lengths, 128, hint) for hint in (128, 300)]
    assert torch.equal(*results)


def test_e71_metadata_of_another_batch_size() -> None:
    q, k = draw(4, 1, 2, 64), draw(4, 32, 2, 64)
    of_eight = get_scheduler_metadata(8, 1, 32, 2, 2, 64, ints(*range(8)))
    with pytest.raises(ValueError, match=r"scheduler_metadata: \[8\].*4 sequences"):
        flash_attn_with_kvcache(
            q, k, k, cache_seqlens=ints(1, 2, 3, 4), scheduler_metadata=of_eight
        )


def test_e72_a_page_table_narrower_than_the_lengths() -> None:
    q, pool = draw(1, 1, 2, 64), draw(8, 16, 2, 64)
    with pytest.raises(ValueError, match="seqused_k: entry 0 is 80.*room for 64"):
        fa.attention(q, pool, pool, page_table=ints(0, 1, 2, 3)[None], seqused_k=ints(80))


@pytest.mark.parametrize("group", [3, 5, 6, 7, 9, 12, 14])
def test_e75_odd_group_sizes_over_pages(group: int) -> None:
    q = draw(1, 2, 2 * group, 64, dtype=torch.half)
    k, v = (draw(1, 70, 2, 64, seed=i, dtype=torch.half) for i in (1, 2))
    pool_k, pool_v, table = pages(k, v, 16)
    out = fa.attention(q, pool_k, pool_v, page_table=table, seqused_k=ints(70), causal=True)
    close(q, k, v, out, causal=True)


def test_e77_the_last_token_from_a_cache() -> None:
    q, k, v = (draw(1, 64, n, 64, seed=i) for i, n in enumerate((4, 2, 2)))
    whole = fa.attention(q, k, v, causal=True)
    cache_k, cache_v = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    cache_k[:, :63], cache_v[:, :63] = k[:, :63], v[:, :63]
    step = fa.attention_kvcache(
        q[:, 63:], cache_k, cache_v, k[:, 63:], v[:, 63:], cache_seqlens=63, causal=True
    )
    assert (step - whole[:, 63:]).abs().max() < 1e-2


@pytest.mark.parametrize("length", [1, 127, 128, 129, 130, 257, 1023])
def test_e78_e4m3_at_every_length(length: int) -> None:
    q, k, v = (
        draw(1, n, h, 128, seed=i) for i, (n, h) in enumerate(((1, 6), (length, 1), (length, 1)))
    )
    stored = [t.to(FP8) for t in (q, k, v)]
    pool_k, pool_v, table = pages(*(t.float() for t in stored[1:]), 128)
    pool = pool_k.to(FP8), pool_v.to(FP8)
    out = fa.attention(stored[0], *pool, page_table=table, seqused_k=ints(length)).float()
    exact = fa.attention(*(t.bfloat16() for t in stored)).float()
    assert torch.cosine_similarity(out.flatten(), exact.flatten(), dim=0) >= 0.998


def test_e80_a_long_sum_of_ones() -> None:
    q, k = (draw(1, n, 1, 64, seed=n).to(FP8) for n in (1, 131_072))
    out = fa.attention(q, k, torch.ones_like(k.float()).to(FP8))
    assert (out.float() - 1).abs().max() < 1e-2


def test_e81_descales_of_every_head_and_sequence() -> None:
    q, k, v = (draw(2, 40, n, 64, seed=i).to(FP8) for i, n in enumerate((8, 2, 2)))
    base = torch.tensor([[1.0, 1.5], [0.5, 2.0]])
    factors = {f"{x}_descale": base * f for x, f in zip("qkv", (0.5, 2.0, 3.0), strict=True)}
    out = fa.attention(q, k, v, **factors, out_dtype=torch.float32)

    def real(t: Tensor, factor: Tensor) -> Tensor:
        per_head = factor.repeat_interleave(t.shape[2] // 2, dim=1)
        return t.float() * per_head[:, None, :, None]

    want, _ = reference.attention(
        *(real(t, factors[f"{x}_descale"]) for x, t in zip("qkv", (q, k, v), strict=True))
    )
    assert (out - want).abs().max() < 5e-2 * want.abs().max()


def test_e83_descales_of_a_padded_batch() -> None:
    q = draw(30, 2, 64).to(FP8)
    lengths = ints(0, 10, 20, 30)
    with pytest.raises(ValueError, match=r"q_descale: shape \[4, 2\] must broadcast"):
        fa.attention_varlen(q, q, q, lengths, lengths, q_descale=torch.ones(4, 2))
    fa.attention_varlen(q, q, q, lengths, lengths, q_descale=torch.ones(1, 1))


def test_e84_e4m3_has_no_backward() -> None:
    q = draw(1, 8, 2, 64).to(FP8)
    with pytest.raises(NotImplementedError, match="q: .*e4m3.* has no backward"):
        fa.attention(q.clone().requires_grad_(), q, q)


@pytest.mark.parametrize("kind", ["expanded", "transposed"])
def test_f86_strides_of_dout(kind: str) -> None:
    q, k, v = (
        draw(2, 32, n, 128, seed=i, dtype=torch.half).requires_grad_()
        for i, n in enumerate((4, 1, 1))
    )
    dout = torch.ones((), dtype=torch.half).expand(2, 32, 4, 128)
    if kind == "transposed":
        dout = draw(2, 4, 32, 128, seed=5, dtype=torch.half).transpose(1, 2)
    out = fa.attention(q, k, v)
    views = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for a, b in zip(views, torch.autograd.grad(out, (q, k, v), dout.contiguous()), strict=True):
        assert torch.equal(a, b)


def test_f93_partial_results_in_fp32() -> None:
    q, k, v = (draw(1, n, 2, 64, seed=i) for i, n in enumerate((64, 2048, 2048)))
    parts = [
        fa.attention(q, a, b, return_lse=True, out_dtype=torch.float32)
        for a, b in zip(k.chunk(8, 1), v.chunk(8, 1), strict=True)
    ]
    out, _ = fa.combine([o for o, _ in parts], [s for _, s in parts], out_dtype=torch.bfloat16)
    want, _ = reference.attention(q, k, v)
    error = (out.double() - want).abs().max()
    assert error <= 1.5 * (fa.attention(q, k, v).double() - want).abs().max()


def test_f98_strides_of_k_and_v() -> None:
    whole = draw(1, 140, 2, 64, dtype=torch.half)
    q, k = draw(1, 30, 2, 64, seed=1, dtype=torch.half), whole[:, ::2]
    v = draw(1, 2, 70, 64, seed=2, dtype=torch.half).transpose(1, 2)
    assert torch.equal(fa.attention(q, k, v), fa.attention(q, k.contiguous(), v.contiguous()))
    packed = draw(1, 70, 3, 2, 64, seed=3, dtype=torch.half)
    parts = packed.unbind(2)
    assert torch.equal(fa.attention(*parts), fa.attention(*(t.contiguous() for t in parts)))


def test_f99_splits_stay_in_their_buffers() -> None:
    q, k, v = (draw(1, n, 8, 64, seed=i, dtype=torch.half) for i, n in enumerate((4, 4096, 4096)))
    room = torch.full((1, 4 + 2, 8, 64), 7.0, dtype=torch.half)
    lses = torch.full((1, 8 + 2, 4), 7.0)
    out, lse = room[:, 1:5], lses[:, 1:9]
    torch.ops.fa.forward_out(q, k, v, num_splits=4, out=out, lse=lse)
    assert torch.equal(out, fa.attention(q, k, v, num_splits=1))
    assert (room[:, 0] == 7).all() and (room[:, 5] == 7).all()
    assert (lses[:, 0] == 7).all() and (lses[:, 9] == 7).all()


def test_f95_a_packed_lse_inside_a_larger_buffer() -> None:
    """300 rows in a buffer of 512, whose LSE is a part of something wider."""
    q, k, v = (draw(512, n, 64, seed=i) for i, n in enumerate((4, 2, 2)))
    ends = {f"cu_seqlens_{side}": ints(0, 100, 300) for side in "qk"}
    out, lse = torch.ops.fa.forward(q, k, v, causal=True, **ends)
    wide = torch.full((4, 2, 600), math.nan)
    parts = [wide[:, n, :512].copy_(t) for n, t in enumerate((lse, torch.ones_like(lse)))]
    want = torch.ops.fa.backward(
        out, q, k, v, out, lse, dlse=torch.ones_like(lse), causal=True, **ends
    )
    got = torch.ops.fa.backward(out, q, k, v, out, parts[0], dlse=parts[1], causal=True, **ends)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert all((t[300:] == 0).all() for t in got[:3])


def test_f101_expanded_slopes_and_sinks_when_compiled() -> None:
    q, k = draw(2, 40, 4, 64).float(), draw(2, 70, 4, 64, seed=1).float()
    slopes, sink = torch.rand(1, 4).expand(2, 4), torch.zeros(1, requires_grad=True)

    def loss(q: Tensor, sink: Tensor) -> Tensor:
        more = {"alibi_slopes": slopes, "sinks": sink.expand(4)}
        return fa.attention(q, k, k, causal=True, **more).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    inputs = (q.requires_grad_(), sink)
    for a, b in zip(
        torch.autograd.grad(compiled(*inputs), inputs),
        torch.autograd.grad(loss(*inputs), inputs),
        strict=True,
    ):
        assert torch.equal(a, b) and (a != 0).any()
