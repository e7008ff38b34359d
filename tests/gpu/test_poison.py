# SPDX-License-Identifier: BSD-3-Clause
# Does anything outside of the problem reach the result, or does the result reach anything outside?

from __future__ import annotations

import math
from typing import Any

import harness
import pytest
import torch
from harness import DEVICE, can_be_case, may_refuse, randn
from torch import Tensor

import fa
import libfa
from cases import Case, Inputs, hand_picked
from compare import Result, assert_bitwise_result, assert_result, expected

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


# Batch, query rows, query and key heads, parts of the keys. On Hopper batch-invariant calls run the
# rows of long ones; many short calls of grouped heads, and split keys, those that pack query heads.
KINDS = {
    "single": (1, 200, 2, 2, 1),
    "invariant": (1, 200, 2, 2, 1),
    "packed": (20, 30, 8, 2, 1),
    "parts": (1, 200, 8, 2, 3),
}
KEYS = 500

each_kind = pytest.mark.parametrize("kind", KINDS)
each_dim = pytest.mark.parametrize("dim", [64, 96, 128, 256])
each_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def problem(kind: str, dim: int, keys: int, backend: str, rows: int = 0, **options: Any) -> Inputs:
    """Normal q, k and v of a kind, with `rows` query rows if given; skips what no row covers."""
    batch, queries, heads_q, heads_k, parts = KINDS[kind]
    case = Case(dim=dim, causal=bool(options.get("causal")), window=(1, 1))
    if not harness.ON_CPU and not harness.covered(case, backend):
        pytest.skip(f"this build holds no masked {backend} row for head dim {dim}")
    packing = (libfa.packs_heads(r) and r.backend == backend for r in harness.rows())
    if backend == "sm90" and parts > 1 and not any(packing):
        pytest.skip("this build holds no Hopper row that splits the keys")
    q = randn(batch, rows or queries, heads_q, dim)
    k, v = (randn(batch, keys, heads_k, dim, seed=n) for n in (1, 2))
    return harness.inputs_from(q, k, v, **options)


def run(inputs: Inputs, kind: str, backend: str) -> Result:
    invariant = kind == "invariant"
    parts = KINDS[kind][4]
    return harness.call_guarded(inputs, backend, num_splits=parts, batch_invariant=invariant)


@harness.each_backend()
@each_kind
@each_dim
def test_keys_that_no_row_sees(dim: int, kind: str, backend: str) -> None:
    """A window hides the first keys from every row; NaN there must not appear (weight 0 x NaN)."""
    inputs = problem(kind, dim, 400, backend, rows=30, causal=True, window_left=30)
    clean = run(inputs, kind, backend)
    assert_result(clean, expected(inputs, backward=False))
    hidden = 400 - 30 - 30
    inputs.k[:, :hidden], inputs.v[:, :hidden] = math.nan, math.inf
    assert_bitwise_result(clean, run(inputs, kind, backend))


@harness.each_backend()
@pytest.mark.parametrize("negative", [False, True], ids=["scores", "negative"])
@each_mask
@each_kind
@each_dim
def test_nan_inside_the_problem_is_not_hidden(
    dim: int, kind: str, causal: bool, negative: bool, backend: str
) -> None:
    """A NaN in q spoils its own row and no other; silence would hide a user's fault."""
    inputs = problem(kind, dim, KEYS, backend, causal=causal)
    if negative:  # every maximum is below 0
        inputs.q[..., 0], inputs.k[..., 0] = 4, -10 * dim**0.5
    clean = run(inputs, kind, backend)
    row = inputs.q.shape[1] // 3
    inputs.q[0, row, 1, 5] = math.nan
    dirty = run(inputs, kind, backend)
    keep = torch.ones(inputs.q.shape[:3], dtype=torch.bool, device=DEVICE)
    keep[0, row, 1] = False
    assert_nan_elsewhere(dirty, clean, keep)


@harness.each_backend()
@pytest.mark.parametrize("key", [3, KEYS - 12])
@each_mask
@each_kind
@each_dim
def test_nan_in_a_key_reaches_the_rows_that_see_it(
    dim: int, kind: str, causal: bool, key: int, backend: str
) -> None:
    """In the first or the last block of keys that a tile works on."""
    inputs = problem(kind, dim, KEYS, backend, causal=causal)
    clean = run(inputs, kind, backend)
    inputs.k[0, key, 1, 5] = math.nan
    dirty = run(inputs, kind, backend)
    rows, heads = inputs.q.shape[1:3]
    keep = torch.ones(inputs.q.shape[:3], dtype=torch.bool, device=DEVICE)
    first = max(0, key - (KEYS - rows)) if causal else 0
    keep[0, first:, heads // 2 :] = False
    assert_nan_elsewhere(dirty, clean, keep)


def assert_nan_elsewhere(dirty: Result, clean: Result, keep: Tensor) -> None:
    """Rows [B, S, H] to keep have the bits of the clean call, all others are NaN, LSE too."""
    lse = dirty.lse.transpose(1, 2)
    assert torch.isnan(dirty.out[~keep]).all()
    assert torch.isnan(lse[~keep]).all()
    assert torch.equal(dirty.out[keep], clean.out[keep])
    assert torch.equal(lse[keep], clean.lse.transpose(1, 2)[keep])


@harness.each_backend()
@pytest.mark.parametrize("sinks", [False, True])
@each_kind
@each_dim
def test_rows_without_a_key_beside_an_infinite_value(
    dim: int, kind: str, sinks: bool, backend: str
) -> None:
    """The first rows see nothing and share tiles with rows that see inf: 0 x inf must not show."""
    batch, rows, heads, *_ = KINDS[kind]
    keys = rows // 2
    options = {"sinks": randn(heads, dtype=torch.float32)} if sinks else {}
    inputs = problem(kind, dim, keys, backend, causal=True, **options)
    inputs.v[:, 0] = math.inf
    result = run(inputs, kind, backend)
    empty = rows - keys
    assert (result.out[:, :empty] == 0).all()
    lse = options["sinks"][None, :, None] if sinks else torch.tensor(-math.inf)
    assert torch.allclose(result.lse[:, :, :empty], lse.to(result.lse).expand(batch, heads, empty))
    assert not torch.isfinite(result.out[:, empty:]).any()


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
