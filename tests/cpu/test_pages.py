# SPDX-License-Identifier: BSD-3-Clause
# Is attention over pages the same as over the cache that they hold?
"""Page tables: any page size and order, dense and packed queries, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fa
from compare import assert_bitwise, same_up_to_rounding
from fa import reference
from paging import from_pages, to_pages

OPS = torch.ops.fa
INT = torch.int32


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 20, "window_right": 3},
    "chunk": {"attention_chunk": 37, "causal": True},
    "leftpad": {"leftpad_k": ints(0, 5, 64), "causal": True},
    "cache rows": {"kv_batch_idx": ints(3, 0, 2)},
    "shared row": {"kv_batch_idx": ints(1, 1, 2), "causal": True},
    "scores": {
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.05, 0.3]),
        "sinks": torch.tensor([0.5, -1.0, 0.0, 1.0]),
    },
    "packed": {"cu_seqlens_q": ints(0, 4, 4, 33), "causal": True},
}


def problem(
    options: dict[str, Any], page_size: int, dtype: torch.dtype = torch.float32, **how: Any
) -> tuple[list[Tensor], list[Tensor], dict[str, Any], Tensor]:
    """(q, k, v) dense, the same paged, options of both, the page table."""
    g = torch.Generator().manual_seed(page_size)
    rows = 4 if "kv_batch_idx" in options else 3
    q = draw(g, *((40,) if "cu_seqlens_q" in options else (3, 11)), 4, 16, dtype=dtype)
    k, v = draw(g, rows, 130, 2, 16, dtype=dtype), draw(g, rows, 130, 2, 8, dtype=dtype)
    used = ints(130, 67, 64)
    owner = options.get("kv_batch_idx", torch.arange(3)).tolist()
    room = [
        max([int(n) for n, o in zip(used, owner, strict=True) if o == r] + [0]) for r in range(rows)
    ]
    pools, table = to_pages([k, v], page_size, g, used=room, **how)
    return [q, k, v], [q, *pools], {**options, "seqused_k": used}, table


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_pages_equal_the_dense_cache(options: dict[str, Any], page_size: int) -> None:
    dense, paged, given, table = problem(options, page_size, torch.bfloat16)
    for call in (OPS.forward, reference.attention):
        want = call(*dense, **given)
        got = call(*paged, **given, page_table=table)
        for name, a, b in zip(("out", "lse"), got, want, strict=True):
            same_up_to_rounding(name, a, b)
    exact, _ = reference.attention(*dense, **given)
    assert (OPS.forward(*paged, **given, page_table=table)[0] - exact).abs().max() < 2e-2


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradients_through_pages(options: dict[str, Any]) -> None:
    dense, paged, given, table = problem(options, 16, torch.float64)
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradients(call: Any, inputs: list[Tensor], **more: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        out, lse = call(*leaves, **given, **more)
        loss = (out.flatten() * weights.repeat(99)[: out.numel()]).sum()
        return list(torch.autograd.grad(loss + lse[lse > -math.inf].sin().sum(), leaves))

    want = gradients(reference.attention, dense)
    for call in (OPS.forward, reference.attention):
        dq, dk, dv = gradients(call, paged, page_table=table)
        assert (dq - want[0]).abs().max() < 1e-10
        for got, right in ((dk, want[1]), (dv, want[2])):
            assert (from_pages(got, table, 130) - right).abs().max() < 1e-10
            # Pages that no row owns, and slots beyond the lengths.
            assert abs(float(got.abs().sum() - from_pages(got, table, 130).abs().sum())) < 1e-8


@pytest.mark.parametrize("splits", [1, 4])
def test_packed_queries_of_many_lengths_and_splits(splits: int) -> None:
    """FA#1217: wrong results with packed queries, pages and several splits."""
    g = torch.Generator().manual_seed(68)
    q, cu = draw(g, 138, 8, 16), ints(0, 1, 8, 138)
    k, v = draw(g, 3, 4000, 2, 16), draw(g, 3, 4000, 2, 16)
    used = ints(900, 65, 4000)
    pools, table = to_pages([k, v], 256, g, used=used.tolist())
    options: dict[str, Any] = {"cu_seqlens_q": cu, "seqused_k": used, "causal": True}
    want, want_lse = reference.attention(q, k, v, **options)
    out, lse = OPS.forward(q, *pools, page_table=table, num_splits=splits, **options)
    assert (out - want).abs().max() < 1e-5 and (lse - want_lse).abs().max() < 2e-5


def test_a_page_may_stand_twice() -> None:
    """A shared prefix: two sequences read one page, and its gradient is the sum."""
    g = torch.Generator().manual_seed(0)
    q = draw(g, 2, 5, 2, 8).double().requires_grad_()
    k, v = (draw(g, 3, 4, 2, 8).double().requires_grad_() for _ in range(2))
    table, used = torch.tensor([[2, 0], [2, 1]], dtype=INT), ints(7, 8)
    grads = []
    for call in (OPS.forward, reference.attention):
        out, _ = call(q, k, v, page_table=table, seqused_k=used, causal=True)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for got, want in zip(*grads, strict=True):
        assert (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("unused", [-1, 2**31 - 1])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nothing_else_is_read(unused: int, poison: float) -> None:
    """Unused entries, spare pages, unused slots of a last page; entries left of a window (E41)."""
    options = {"window_left": 12, "window_right": 0}
    dense, paged, given, table = problem(options, 16, unused=unused, poison=poison)
    first_seen = [(int(n) - 11 - 12) // 16 for n in given["seqused_k"]]  # 11 query rows
    for row, column in enumerate(first_seen):
        for t in paged[1:]:
            t[table[row, :column].long()] = poison
        table[row, :column] = unused
    want, want_lse = OPS.forward(*dense, **given)
    for call in (OPS.forward, reference.attention):
        out, lse = call(*paged, **given, page_table=table)
        assert (out - want).abs().max() < 1e-5 and (lse - want_lse).abs().max() < 1e-5


def test_order_of_pages_changes_no_bit() -> None:
    _, paged, given, table = problem({"causal": True}, 16, unused=0)
    out, lse = OPS.forward(*paged, **given, page_table=table)
    order = torch.randperm(paged[1].shape[0], generator=torch.Generator().manual_seed(5))
    moved = [paged[0], *(t[order] for t in paged[1:])]
    back = torch.argsort(order)[table.long()].int()
    again, again_lse = OPS.forward(*moved, **given, page_table=back)
    assert_bitwise("out", again, out)
    assert_bitwise("lse", again_lse, lse)


def test_kvcache_with_pages_and_strided_pool() -> None:
    dense, paged, given, table = problem({}, 16)
    want = fa.attention_kvcache(*dense, cache_seqlens=given["seqused_k"], causal=True)
    got = fa.attention_kvcache(
        *paged, cache_seqlens=given["seqused_k"], page_table=table, causal=True
    )
    assert (got - want).abs().max() < 1e-6
    # k and v of a layer inside one pool of all layers, heads before slots.
    pool = torch.full((2, paged[1].shape[0], 2, 16, 16), math.nan)
    pool[0], pool[1, ..., :8] = paged[1].transpose(1, 2), paged[2].transpose(1, 2)
    views = pool[0].transpose(1, 2), pool[1, ..., :8].transpose(1, 2)
    again = OPS.forward(
        dense[0], *views, seqused_k=given["seqused_k"], page_table=table, causal=True
    )[0]
    assert_bitwise("out", again, got)


def test_opcheck_and_compile() -> None:
    _, paged, given, table = problem({"causal": True}, 16)
    options = {**given, "page_table": table}
    for grad in (False, True):
        inputs = [t.clone().requires_grad_(grad) for t in paged]
        torch.library.opcheck(OPS.forward.default, inputs, options)
    out, lse = OPS.forward(*paged, **options)
    torch.library.opcheck(OPS.backward.default, (out, *paged, out, lse), options)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *t: fa.attention(*t, **given, page_table=table), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*paged), fa.attention(*paged, **given, page_table=table))


def test_flops_count_used_keys() -> None:
    _, paged, given, table = problem({}, 16)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        OPS.forward(*paged, **given, page_table=table)
    assert counter.get_total_flops() == 2 * 11 * (130 + 67 + 64) * 4 * (16 + 8)


def test_memory_is_that_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is never gathered as a whole."""
    from fa import _pages

    largest = 0
    read = _pages.Pages.read

    def watch(self: Any, t: Tensor, row: int, first: int, last: int) -> Tensor:
        nonlocal largest
        largest = max(largest, last - first)
        return read(self, t, row, first, last)

    monkeypatch.setattr(_pages.Pages, "read", watch)
    k = torch.randn(1024, 16, 1, 8)
    table = torch.randperm(1024).int().view(1, -1)
    q = torch.randn(1, 300, 1, 8)
    OPS.forward(q, k, k, page_table=table, seqused_k=ints(16384), causal=True)
    assert 0 < largest <= 4096
