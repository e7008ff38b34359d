# SPDX-License-Identifier: BSD-3-Clause
# Do packed, partly used and padded sequences give what each sequence gives alone?

from __future__ import annotations

import math

import harness
import pytest
import torch
from harness import DEVICE, check_case, ints, randn

import fa
from cases import Case
from compare import assert_result, expected

SEQUENCE_CASES = [
    Case(q=(1, 64, 129), k=(1, 64, 129), causal=True, heads_q=4, heads_k=2, dim=128),
    Case(q=(0, 0, 5, 0), k=(3, 0, 5, 200), heads_q=4, dim=128, tag="mostly_empty"),
    Case(q=(0, 0), k=(0, 0), tag="nothing"),
    Case(q=(128, 128, 128), k=(128, 128, 128), causal=True, tag="tile_sized"),
    Case(q=(127, 1, 128, 2), k=(255, 3, 1, 130), causal=True, dtype="fp16", tag="around_tiles"),
    Case(q=(300,) * 5, k=(513,) * 5, heads_q=8, heads_k=1, dim=128, window=(64, 0)),
    Case(q=tuple(range(1, 65)), k=tuple(range(64, 0, -1)), causal=True, tag="many_short"),
    Case(q=(1,) * 130, k=(33,) * 130, heads_q=4, heads_k=1, tag="decode"),
    Case(q=(70, 0, 70), k=(70, 300, 0), slack_q=200, slack_k=300, causal=True, tag="slack"),
    Case(q=(70, 90), k=(70, 90), seqused_q=(0, 90), seqused_k=(70, 0), slack_q=130, tag="unused"),
    Case(batch=4, q=150, k=300, seqused_q=(150, 1, 0, 129), seqused_k=(1, 300, 200, 0), dim=128),
    Case(batch=2, q=64, k=300, leftpad_k=(299, 64), causal=True, heads_q=6, heads_k=3, dim=128),
    Case(batch=2, q=64, k=300, leftpad_k=(10, 0), seqused_k=(10, 300), tag="all_padding"),
    Case(q=(40, 60), k=300, batch=2, leftpad_k=(128, 1), seqused_k=(257, 2), window=(50, 9)),
    Case(q=(40, 60, 8), k=200, batch=3, kv_batch_idx=(3, 3, 0), causal=True, heads_q=4, heads_k=2),
    Case(batch=2, q=130, k=(77, 200), slack_k=60, causal=True, tag="dense_q_packed_k"),
    Case(q=(77, 200), k=130, batch=2, seqused_k=(130, 64), causal=True, tag="packed_q_dense_k"),
    Case(q=(100, 30), k=(90, 260), sinks="fp32", causal=True, heads_q=4, heads_k=2),
    Case(q=(100, 30), k=(90, 260), dim=80, dim_v=40, chunk=64, causal=True),
]


@harness.each_backend()
@pytest.mark.parametrize("case", SEQUENCE_CASES, ids=lambda case: case.id)
def test_sequences(case: Case, backend: str) -> None:
    check_case(case, backend)


@pytest.mark.parametrize("used", [1, 63, 64, 65, 127, 128, 129, 191, 200])
@pytest.mark.parametrize("dim", [64, 128])
def test_over_allocated_with_nan_tails(used: int, dim: int) -> None:
    """More than a tile of rows after the last sequence hold NaN (then inf) in q, k and v."""
    total, lengths = used + 400, (used, 100)
    ends = ints(0, used, used + 100)
    results = []
    for tail in (math.nan, math.inf):
        q, k, v = (randn(total, 4, dim, seed=n) for n in range(3))
        for tensor in (q, k, v):
            tensor[sum(lengths) :] = tail
        results.append(
            harness.check_tensors(
                "auto", q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True
            )
        )
    assert torch.equal(results[0].out, results[1].out)
    assert not results[0].out[sum(lengths) :].any()
    assert torch.isneginf(results[0].lse[:, sum(lengths) :]).all()


def test_rows_of_no_sequence_are_written() -> None:
    """cu_seqlens may stop early and seqused may be short: what remains is 0 and -inf, not NaN."""
    q, k, v = (randn(600, 2, 64, seed=n) for n in range(3))
    for ends in ((0, 0), (0, 1), (0, 128), (0, 300, 300, 400)):
        cu = ints(*ends)
        result = harness.check_tensors("auto", q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
        assert not result.out[ends[-1] :].any()
        assert torch.isneginf(result.lse[:, ends[-1] :]).all()


def test_hints_choose_the_row_and_nothing_else() -> None:
    """max_seqlen absent, exact, far too small and far too large: right results, whichever row runs.

    A batch-invariant call has the same bits with every hint.
    """
    q, k, v = (randn(400, 4, 64, seed=n) for n in range(3))
    cu = ints(0, 150, 151, 400)
    inputs = harness.inputs_from(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    right, first = expected(inputs, backward=False), None
    for hint in (None, 249, 1, 100_000):
        hints = {"max_seqlen_q": hint, "max_seqlen_k": hint}
        assert_result(harness.call_guarded(inputs, "auto", **hints), right)
        result = harness.call_guarded(inputs, "auto", **hints, batch_invariant=True)
        first = first or result
        assert torch.equal(first.out, result.out)
        assert torch.equal(first.lse, result.lse)


def test_sequences_decided_on_the_device() -> None:
    """The same tensors with other contents of cu_seqlens and seqused_k: the kernel reads them."""
    q, k, v = (randn(512, 2, 64, seed=n) for n in range(3))
    cu_q, cu_k, used = ints(0, 0, 0, 0), ints(0, 0, 0, 0), ints(0, 0, 0)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": used, "causal": True}
    for lengths in ((100, 200, 212), (0, 512, 0), (511, 1, 0), (1, 1, 1)):
        ends = torch.tensor((0, *lengths), device=DEVICE).cumsum(0).int()
        cu_q.copy_(ends)
        cu_k.copy_(ends)
        used.copy_((ends[1:] - ends[:-1]) // 2)
        inputs = harness.inputs_from(q, k, v, **options)
        assert_result(harness.call_guarded(inputs, "auto"), expected(inputs, backward=False))


def test_many_sequences(cuda_only: None) -> None:
    """More sequences than a grid dimension of y or z can count."""
    count = 70_000
    q, k, v = (randn(count, 1, 64, seed=n) for n in range(3))
    ends = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    inputs = harness.inputs_from(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
    result = harness.call_guarded(inputs, "auto")
    assert torch.equal(result.out, v), "a sequence of one key returns that key's value"
    scores = (q.double() * k.double()).sum(-1) / 8
    assert torch.allclose(result.lse.double(), scores.T, atol=2e-5, rtol=1e-5)


@harness.each_backend()
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_that_blocks_take_as_they_come(dim: int, backend: str) -> None:
    """Far more tiles than multiprocessors: whichever block works on one, the bits are the same."""
    lengths = (40, 0, 7) if harness.ON_CPU else (1900, 1, 0, 700, *(130,) * 20, 1025, 0, 64, 300)
    heads = 2 if harness.ON_CPU else 16
    ends = torch.tensor((0, *lengths), device=DEVICE).cumsum(0).int()
    total = int(ends[-1])
    q, k, v = (randn(total, h, dim, seed=n) for n, h in enumerate((heads, heads // 2, heads // 2)))
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    if backend == "sm90":
        with fa.backend(backend):
            assert "the next tile that is left" in fa.explain(q, k, v, **options)
    first = harness.check_tensors(backend, q, k, v, **options)
    inputs = harness.inputs_from(q, k, v, **options)
    for _ in range(2 if harness.ON_CPU else 30):
        again = harness.call(inputs, backend)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)
