# SPDX-License-Identifier: BSD-3-Clause
# Does anything outside of the problem reach the result, or does the result reach anything outside?

from __future__ import annotations

import math

import harness
import pytest
import torch
from harness import DEVICE, can_be_case, may_refuse, randn
from torch import Tensor

import fa
from cases import Case, hand_picked
from compare import assert_bitwise_result

CHOSEN = [
    case
    for case in hand_picked()
    if can_be_case(case)
    and case.cost < 2e8
    and case.features & {"seqused_k", "leftpad_k", "packed_k", "strided", "kv_batch_idx", "causal"}
    and "odd_dim" not in case.features
    and (harness.ON_CPU or harness.covered(case))
]


@harness.each_backend()
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.id)
def test_poison_changes_no_bit(case: Case, backend: str) -> None:
    if may_refuse(case, backend):
        backend = "auto"
    results = [
        harness.call_guarded(case.make(DEVICE, poison=poison), backend)
        for poison in (math.nan, math.inf, 0.0)
    ]
    assert_bitwise_result(results[0], results[1])
    assert_bitwise_result(results[0], results[2])


def surrounded(tensor: Tensor, rows: int, poison: float) -> Tensor:
    """The values of [B, S, H, D] amid `rows` poisoned rows before and after each batch entry."""
    batch, length, heads, dim = tensor.shape
    buffer = torch.full(
        (batch, length + 2 * rows, heads, dim), poison, dtype=tensor.dtype, device=tensor.device
    )
    view = buffer[:, rows : rows + length]
    view.copy_(tensor)
    return view


@harness.each_backend()
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [1, 65, 129, 200])
@pytest.mark.parametrize("dim", [64, 128])
def test_tile_tails(backend: str, dim: int, length: int, causal: bool) -> None:
    """The rows behind the last one of each tensor: a whole tile of NaN, then of inf."""
    tensors = [randn(2, n, 2, dim, seed=n) for n in (length, length + 7, length + 7)]
    results = []
    for poison in (math.nan, math.inf, -math.inf):
        q, k, v = (surrounded(t, 192, poison) for t in tensors)
        results.append(harness.check_tensors(backend, q, k, v, causal=causal))
    assert_bitwise_result(results[0], results[1])
    assert_bitwise_result(results[0], results[2])


@harness.each_backend()
def test_keys_that_no_row_sees(backend: str) -> None:
    """A window hides the first keys from every row; NaN there must not appear (weight 0 x NaN)."""
    q, k, v = (randn(1, n, 2, 64, seed=n) for n in (64, 400, 400))
    clean = harness.check_tensors(backend, q, k, v, causal=True, window_left=30)
    k[:, : 400 - 64 - 30], v[:, : 400 - 64 - 30] = math.nan, math.inf
    dirty = harness.check_tensors(backend, q, k, v, causal=True, window_left=30)
    assert_bitwise_result(clean, dirty)


@harness.each_backend()
def test_nan_inside_the_problem_is_not_hidden(backend: str) -> None:
    """A NaN in q spoils its own row and no other; silence would hide a user's fault."""
    q, k, v = (randn(1, 200, 2, 64, seed=n) for n in range(3))
    clean = harness.call(harness.inputs_from(q, k, v, causal=True), backend)
    q[0, 77, 1, 5] = math.nan
    dirty = harness.call(harness.inputs_from(q, k, v, causal=True), backend)
    assert torch.isnan(dirty.out[0, 77, 1]).all()
    assert torch.isnan(dirty.lse[0, 1, 77])
    keep = torch.ones(1, 200, 2, dtype=torch.bool, device=DEVICE)
    keep[0, 77, 1] = False
    assert torch.equal(dirty.out[keep], clean.out[keep])


@harness.each_backend()
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_a_key_beside_an_infinite_value(backend: str, sinks: bool) -> None:
    """Rows 0 to 91 see nothing and share tiles with rows that see inf: 0 x inf must not show."""
    q, k, v = (randn(1, n, 2, 64, seed=n) for n in (192, 100, 100))
    v[:, 0] = math.inf
    options = {"sinks": randn(2, dtype=torch.float32)} if sinks else {}
    result = harness.call(harness.inputs_from(q, k, v, causal=True, **options), backend)
    assert (result.out[:, :92] == 0).all()
    expected_lse = options["sinks"][None, :, None] if sinks else torch.tensor(-math.inf)
    assert torch.allclose(result.lse[:, :, :92], expected_lse.to(result.lse).expand(1, 2, 92))
    assert not torch.isfinite(result.out[:, 92:]).any()


def test_allocated_outputs_hold_no_old_bytes() -> None:
    """Outputs allocated over freed NaN: rows without a sequence or a key are written too."""
    for options in (
        {"causal": True},
        {"seqused_q": harness.ints(3, 0)},
        {"seqused_k": harness.ints(0, 5)},
    ):
        harness.fill_free_memory(0.1)
        q, k, v = randn(2, 300, 2, 64), randn(2, 40, 2, 64), randn(2, 40, 2, 64)
        out, lse = torch.ops.fa.forward(q, k, v, **options)
        assert torch.isfinite(out).all()
        assert not torch.isnan(lse).any()
        assert not torch.isposinf(lse).any()


def test_refused_calls_touch_no_output() -> None:
    """After an error the outputs hold what they held, and the next call works."""
    q, k, v = (randn(1, 64, 2, 64, seed=n) for n in range(3))
    out = torch.full_like(q, 3.0)
    lse = torch.full((1, 2, 64), 3.0, device=DEVICE)
    for bad, error in (
        ({"window_left": -5}, ValueError),
        ({"softmax_scale": math.nan}, ValueError),
        ({"causal": True, "window_right": 3}, ValueError),
        ({"dropout_p": 0.5}, ValueError),  # no seed
    ):
        with pytest.raises(error):
            torch.ops.fa.forward_out(q, k, v, **bad, out=out, lse=lse)
        assert (out == 3).all()
        assert (lse == 3).all()
    torch.ops.fa.forward_out(q, k, v, out=out, lse=lse)
    assert torch.equal(out, fa.attention(q, k, v))
