# SPDX-License-Identifier: BSD-3-Clause
# Do two ways to the same result agree: architectures, dense and packed, alone and in a batch?

from __future__ import annotations

import harness
import pytest
import torch
from harness import inputs_from, ints, randn

import fa
from cases import Case, sweep
from compare import Result, assert_bitwise, assert_result, expected, same_up_to_rounding

CASES = [
    case
    for case in sweep(77, 60)
    if not case.features & {"odd_dim", "empty_batch"} and (harness.ON_CPU or harness.covered(case))
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_architectures_and_cpu_backend(case: Case) -> None:
    """sm90, sm80 and the torch implementation on the same tensors, against each other."""
    inputs = harness.inputs_of(case)
    results = {}
    for backend in dict.fromkeys((*harness.backends(), "cpu")):
        try:
            results[backend] = harness.call(inputs, backend)
        except NotImplementedError as error:
            assert harness.may_refuse(case, backend), f"{backend} must run: {error}"
    base = results.pop("cpu")
    for backend, result in results.items():
        gap = (result.lse - base.lse).abs().nan_to_num(0.0, posinf=0.0)
        bound = harness.expected_of(case).floor["lse"] + 1e-6 * base.lse.abs().nan_to_num(0, 0, 0)
        assert (gap <= 2 * bound).all(), f"{backend}: lse differs by {float(gap.max())}"
        # Two right results may each be off by the yardstick's error.
        right = harness.expected_of(case)
        assert_result(result, right)
        assert_result(base, right)


@harness.each_backend()
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_dense_equals_packed(backend: str, dim: int, causal: bool) -> None:
    batch, length = 3, 190
    q, k, v = (randn(batch, length, h, dim, seed=n) for n, h in enumerate((4, 2, 2)))
    dense = harness.call_guarded(inputs_from(q, k, v, causal=causal), backend)
    cu = ints(*(n * length for n in range(batch + 1)))
    packed_inputs = inputs_from(
        *(t.flatten(0, 1) for t in (q, k, v)), causal=causal, cu_seqlens_q=cu, cu_seqlens_k=cu
    )
    packed = harness.call_somewhere(packed_inputs, backend, backend == "sm90")
    assert_result(packed, expected(packed_inputs, backward=False))
    same_up_to_rounding("out", packed.out.view_as(dense.out), dense.out)
    lse = packed.lse.view(4, batch, length).transpose(0, 1)
    assert torch.allclose(lse, dense.lse, atol=1e-5, rtol=1e-5)


@harness.each_backend()
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 200])
def test_alone_equals_in_a_batch(backend: str, rows: int, dim: int, causal: bool) -> None:
    """Bitwise with batch_invariant; and up to rounding without it."""
    q, k, v = (
        randn(32, rows, 8, dim),
        randn(32, 500, 2, dim, seed=1),
        randn(32, 500, 2, dim, seed=2),
    )
    for invariant in (True, False):
        many = harness.call(inputs_from(q, k, v, causal=causal), backend, batch_invariant=invariant)
        for n in (0, 17, 31):
            one = inputs_from(*(t[n : n + 1] for t in (q, k, v)), causal=causal)
            alone = harness.call(one, backend, batch_invariant=invariant)
            if invariant:
                assert_bitwise("out", alone.out, many.out[n : n + 1])
                assert_bitwise("lse", alone.lse, many.lse[n : n + 1])
            else:
                same_up_to_rounding("out", alone.out, many.out[n : n + 1])


@harness.each_backend()
def test_causal_is_a_right_window_of_zero(backend: str) -> None:
    q, k, v = (randn(2, n, 4, 128, seed=n) for n in (300, 333, 333))
    first = harness.call(inputs_from(q, k, v, causal=True), backend)
    second = harness.call(inputs_from(q, k, v, window_right=0), backend)
    assert_bitwise("out", first.out, second.out)
    assert_bitwise("lse", first.lse, second.lse)


@harness.each_backend()
@pytest.mark.parametrize("dim", [64, 128])
def test_masked_row_equals_unmasked_row(backend: str, dim: int) -> None:
    """A band that hides nothing runs on another row of the table and must agree with `none`."""
    q, k, v = (randn(2, 257, 4, dim, seed=n) for n in range(3))
    plain = harness.call(inputs_from(q, k, v), backend)
    band = harness.call(inputs_from(q, k, v, window_left=10_000, window_right=10_000), backend)
    same_up_to_rounding("out", band.out, plain.out)
    assert torch.allclose(band.lse, plain.lse, atol=1e-5, rtol=1e-5)


@harness.each_backend()
def test_head_dim_padded_in_the_kernel_equals_zeros(backend: str) -> None:
    q, k, v = (randn(1, 150, 2, 96, seed=n) for n in range(3))
    pad = [torch.nn.functional.pad(t, (0, 32)) for t in (q, k, v)]
    inside = harness.call(inputs_from(q, k, v, softmax_scale=0.1, causal=True), backend)
    outside = harness.call(inputs_from(*pad, softmax_scale=0.1, causal=True), backend)
    assert_bitwise("out", inside.out, outside.out[..., :96].contiguous())


@harness.each_backend()
def test_keys_in_parts_combine_to_the_whole(backend: str) -> None:
    """Partial results in fp32 over disjoint keys, merged by fa.combine."""
    q, k, v = randn(2, 60, 4, 128), randn(2, 900, 2, 128, seed=1), randn(2, 900, 2, 128, seed=2)
    whole = inputs_from(q, k, v)
    parts = []
    for begin, end in ((0, 300), (300, 301), (301, 900)):
        part = inputs_from(q, k[:, begin:end], v[:, begin:end], out_dtype=torch.float32)
        parts.append(harness.call(part, backend))
    out, lse = fa.combine([p.out for p in parts], [p.lse for p in parts], out_dtype=q.dtype)
    assert_result(Result(out, lse), expected(whole, backward=False))


@harness.each_backend()
def test_group_equals_repeated_heads(backend: str) -> None:
    q, k, v = randn(2, 140, 8, 64), randn(2, 200, 2, 64, seed=1), randn(2, 200, 2, 64, seed=2)
    grouped = harness.call(inputs_from(q, k, v, causal=True), backend)
    repeated = [t.repeat_interleave(4, dim=2) for t in (k, v)]
    plain = harness.call(inputs_from(q, *repeated, causal=True), backend)
    same_up_to_rounding("out", grouped.out, plain.out)
    assert torch.allclose(grouped.lse, plain.lse, atol=1e-5, rtol=1e-5)
