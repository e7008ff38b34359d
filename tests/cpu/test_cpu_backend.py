# SPDX-License-Identifier: BSD-3-Clause
# Does the CPU backend agree with the fp64 reference, whatever the memory around its inputs holds?

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Case, Inputs, hand_picked, sweep
from compare import (
    Result,
    assert_bitwise,
    assert_bitwise_result,
    assert_lse,
    assert_result,
    expected,
    same_up_to_rounding,
)
from fa import _cpu_tiles, cpu, reference
from fa._layout import dimension_order

AFFORDABLE = 80_000_000  # multiplications; larger cases belong to the GPU tier
SWEEP_SEED = 20261129
CASES = [
    case
    for case in hand_picked() + sweep(SWEEP_SEED, 120)
    if case.cost <= AFFORDABLE and case.sequences <= 16
]


def run(inputs: Inputs, backward: bool | None = None) -> Result:
    out, lse = cpu.forward(inputs.q, inputs.k, inputs.v, **inputs.options)
    result = Result(out, lse)
    if inputs.case.backward if backward is None else backward:
        options = inputs.options | {"dlse": inputs.dlse}
        result.dq, result.dk, result.dv, dsinks = cpu.backward(
            inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, **options
        )
        if "sinks" in inputs.options:
            result.dsinks = dsinks
        else:
            assert dsinks.shape == (0,)
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case) -> None:
    inputs = case.make(poison=math.nan)
    result = run(inputs)
    inputs.assert_unchanged()
    assert result.out.dtype == inputs.out_dtype
    assert_result(result, expected(inputs))
    # What lies outside the problem changes no bit.
    assert_bitwise_result(result, run(case.make(poison=math.inf)))


def sample(case: Case, **options: Any) -> tuple[Inputs, Result]:
    inputs = case.make()
    inputs.options.update(options)
    return inputs, run(inputs)


# ---- tiles --------------------------------------------------------------------------------------


def test_tiles_hold_exactly_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu_tiles, "TILE_M", 3)
    monkeypatch.setattr(_cpu_tiles, "TILE_N", 2)
    for q_len, k_len, left, right, chunk in itertools.product(
        (0, 1, 4, 8), (0, 1, 3, 9), (-1, 0, 2, 6), (-1, 0, 1, 2**31 - 1), (0, 1, 3, 4)
    ):
        q, k = torch.zeros(1, q_len, 1, 8), torch.zeros(1, k_len, 1, 8)
        options = _cpu_tiles.Options.of(q, None, None, None, False, left, right, chunk, 0.0)
        lengths = dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx")
        )
        (part,) = _cpu_tiles.Problem(q, k, k, **lengths, options=options).parts()
        seen = reference.visible(q_len, k_len, left, right, chunk)
        rows = [row for tile in part.row_tiles() for row in range(*tile)]
        assert rows == seen.any(1).nonzero().flatten().tolist()
        for begin, end in part.row_tiles():
            tiles = list(part.key_tiles(begin, end))
            keys = [key for tile in tiles for key in range(*tile)]
            assert keys == seen[begin:end].any(0).nonzero().flatten().tolist()
            for first, last in tiles:
                x = torch.ones(1, end - begin, last - first)
                part.hide(x, begin, end, first, last, 0.0)
                assert torch.equal(x[0] > 0, seen[begin:end, first:last])


@pytest.mark.parametrize("case", sweep(7, 30, max_length=150), ids=lambda case: case.id)
def test_many_small_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loop runs more than once: rows, keys, heads and batch entries."""
    monkeypatch.setattr(_cpu_tiles, "TILE_M", 16)
    monkeypatch.setattr(_cpu_tiles, "TILE_N", 8)
    monkeypatch.setattr(_cpu_tiles, "TILE_SCORES", 900)
    inputs = case.make()
    assert_result(run(inputs), expected(inputs))


def test_causal_costs_half(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    scores = _cpu_tiles.Part.scores

    def count(part: Any, q_t: Tensor, k_t: Tensor, *at: int) -> tuple[Tensor, Tensor | None]:
        done.append(q_t.shape[1] * k_t.shape[1])
        return scores(part, q_t, k_t, *at)

    monkeypatch.setattr(_cpu_tiles.Part, "scores", count)
    q = torch.randn(1, 4096, 1, 8)
    work = []
    for options in ({}, {"causal": True}, {"window_left": 256, "window_right": 0}):
        done.clear()
        cpu.forward(q, q, q, **options)
        work.append(sum(done) / 4096**2)
    assert work[0] == 1 and work[1] < 0.54 and work[2] < 0.14, work


_MEMORY = """
import resource, sys, torch
from fa import cpu
torch.set_num_threads(1)
def peak(n):
    q, k, v = (torch.randn(1, n, 1, 64) for _ in range(3))
    options = {"softcap": 20.0}
    if sys.argv[1] == "paged":
        options["page_table"] = torch.arange(n // 64, dtype=torch.int32)[None]
        options["seqused_k"] = torch.tensor([n], dtype=torch.int32)
        options |= {"dropout_p": 0.1, "philox_seed_offset": torch.tensor([1, 2])}
        k, v = k.view(-1, 64, 1, 64), v.view(-1, 64, 1, 64)
    out, lse = cpu.forward(q, k, v, **options)
    cpu.backward(out, q, k, v, out, lse, **options)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(*(peak(n) for n in (1024, 4096, 8192)))
"""


@pytest.mark.parametrize("form", ["dense", "paged"])
def test_memory_grows_linearly(form: str) -> None:
    """Peak of the process in MiB. One score matrix of 8192 x 8192 alone would be 256 MiB."""
    run_it = subprocess.run(
        [sys.executable, "-c", _MEMORY, form],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    first, half, full = map(float, run_it.stdout.split())
    # Tensors of the problem: q, k, v, out and five of gradients and sums, 2 MiB each at 8192.
    assert full - half < 32 and full - first < 64, (first, half, full)


@pytest.mark.parametrize("causal", [False, True])
def test_not_much_slower_than_torch(causal: bool) -> None:
    """At most three times the time of torch's own fused attention, on one thread each.

    Time is that of the processor, and calls alternate: other work on the machine counts little.
    """
    q, k, v = (torch.randn(1, 2048, 8, 64) for _ in range(3))
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = (
        lambda: sdpa(*heads_first, is_causal=causal),
        lambda: cpu.forward(q, k, v, causal=causal),
    )
    times: tuple[list[float], list[float]] = ([], [])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(8):
            for call, seen in zip(calls, times, strict=True):
                start = time.process_time()
                call()
                seen.append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    theirs, ours = map(min, times)
    assert ours < 3 * theirs, (ours, theirs)


# ---- the same call in two ways ------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "sbhd", "alternate", "padded"])
def test_views_equal_contiguous(layout: str) -> None:
    case = Case(batch=2, heads_q=4, heads_k=2, q=100, k=300, causal=True, dlse=True)
    inputs, result = sample(replace(case, layout=(layout,) * 4))
    dense = replace_tensors(inputs, lambda t: t.contiguous())
    assert_bitwise_result(result, run(dense))
    order = dimension_order(inputs.q.shape, inputs.q.stride())
    assert result.out.permute(order).is_contiguous() and result.dq.permute(order).is_contiguous()
    assert result.lse.is_contiguous()


def replace_tensors(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    tensors = {name: change(getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
    return Inputs(inputs.case, **tensors, dlse=inputs.dlse, options=dict(inputs.options))


@pytest.mark.parametrize("sides", ["q", "k", "qk"])
def test_packed_equals_dense(sides: str) -> None:
    case = Case(batch=3, heads_q=4, heads_k=2, q=70, k=130, causal=True, softcap=9.0, dlse=True)
    inputs, dense = sample(replace(case, dtype="fp32", sinks="fp32", alibi="bh"))
    packed = Inputs(
        inputs.case, inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, dict(inputs.options)
    )
    if "q" in sides:
        packed.q, packed.dout = packed.q.flatten(0, 1), packed.dout.flatten(0, 1)
        packed.dlse = packed.dlse.transpose(0, 1).flatten(1)
        packed.options["cu_seqlens_q"] = torch.arange(4, dtype=torch.int32) * 70
    if "k" in sides:
        packed.k, packed.v = packed.k.flatten(0, 1), packed.v.flatten(0, 1)
        packed.options["cu_seqlens_k"] = torch.arange(4, dtype=torch.int32) * 130
    result = run(packed)
    if "q" in sides:
        result.lse = result.lse.unflatten(1, (3, 70)).transpose(0, 1)
    for name, value in result.items():
        same_up_to_rounding(name, value.reshape(getattr(dense, name).shape), getattr(dense, name))


def test_lengths_and_cache_rows_equal_slices() -> None:
    case = Case(batch=2, dtype="fp32", heads_q=4, heads_k=2, q=30, k=200, causal=True, dlse=True)
    inputs = replace(case, kv_batch_idx=(3, 0), seqused_k=(150, 180), leftpad_k=(10, 0)).make()
    whole = run(inputs)
    assert torch.equal(whole.dk[1:3], torch.zeros_like(whole.dk[1:3]))
    for b, row, keys in ((0, 3, slice(10, 150)), (1, 0, slice(0, 180))):
        one = Inputs(
            case,
            inputs.q[b : b + 1],
            inputs.k[row : row + 1, keys],
            inputs.v[row : row + 1, keys],
            inputs.dout[b : b + 1],
            inputs.dlse[b : b + 1],
            {"causal": True},
        )
        result = run(one)
        for name in ("out", "lse", "dq"):
            assert_bitwise(name, getattr(whole, name)[b : b + 1], getattr(result, name))
        for name in ("dk", "dv"):
            assert_bitwise(name, getattr(whole, name)[row : row + 1, keys], getattr(result, name))


def test_two_sequences_of_one_cache_row_add_their_gradients() -> None:
    case = Case(batch=2, heads_q=2, q=20, k=50, kv_batch_idx=(1, 1), causal=True)
    inputs, both = sample(case)
    wide = torch.zeros_like(both.dk, dtype=torch.float32)
    for b in range(2):
        one = replace_tensors(inputs, lambda t: t)
        one.q, one.dout = inputs.q[b : b + 1], inputs.dout[b : b + 1]
        one.options = inputs.options | {"kv_batch_idx": inputs.options["kv_batch_idx"][b : b + 1]}
        out, lse = cpu.forward(one.q, one.k, one.v, **one.options)
        wide += cpu.backward(
            one.dout, one.q, one.k, one.v, out, lse, **one.options, grad_dtype=torch.float32
        )[1]
    assert_bitwise("dk", both.dk, wide.bfloat16())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"causal": True}, {"window_right": 0}),
        ({}, {"window_left": 2**31 - 1, "window_right": 2**31 - 1}),
        ({}, {"attention_chunk": 2**31 - 1, "seqused_k": torch.tensor([257], dtype=torch.int32)}),
        ({"causal": True}, {"causal": True, "window_right": 0}),
    ],
    ids=["causal", "window", "chunk", "both"],
)
def test_two_words_for_one_mask(one: dict[str, Any], other: dict[str, Any]) -> None:
    case = Case(q=200, k=257, heads_q=4, heads_k=2)
    assert_bitwise_result(sample(case, **one)[1], sample(case, **other)[1])


def test_runs_are_bitwise_equal() -> None:
    case = Case(batch=2, q=600, k=700, heads_q=4, heads_k=2, causal=True, dim=32, sinks="fp32")
    first = sample(case)[1]
    for _ in range(3):
        assert_bitwise_result(first, sample(case)[1])


def test_dout_expanded_from_a_sum() -> None:
    """Strides of zero everywhere, as autograd gives for out.sum()."""
    inputs, _ = sample(Case(batch=2, q=32, k=32, heads_q=4, heads_k=1, dim=128, dtype="fp16"))
    inputs.dout = torch.ones((), dtype=torch.float16).expand(inputs.out_shape)
    expanded = run(inputs)
    inputs.dout = inputs.dout.contiguous()
    assert_bitwise_result(expanded, run(inputs))


def test_dtypes_of_results() -> None:
    inputs = Case(q=20, k=30, heads_q=4, heads_k=2, sinks="fp32").make()
    out, lse = cpu.forward(inputs.q, inputs.k, inputs.v, **inputs.options, out_dtype=torch.float32)
    rounded, _ = cpu.forward(inputs.q, inputs.k, inputs.v, **inputs.options)
    assert_bitwise("out", out.bfloat16(), rounded)
    call = (inputs.q, inputs.k, inputs.v, out, lse)
    wide = cpu.backward(inputs.dout.float(), *call, **inputs.options, grad_dtype=torch.float32)
    narrow = cpu.backward(inputs.dout, *call, **inputs.options)
    for name, a, b in zip(("dq", "dk", "dv"), wide, narrow, strict=False):
        assert a.dtype == torch.float32
        assert_bitwise(name, a.bfloat16(), b)
    assert narrow[3].dtype == torch.float32 and narrow[3].shape == (4,)


def test_gradient_by_finite_differences() -> None:
    """The whole chain without the reference: forward against backward along a random direction."""
    case = Case(
        dtype="fp64", q=40, k=600, heads_q=4, heads_k=2, causal=True, softcap=3.0, dlse=True
    )
    inputs, result = sample(replace(case, sinks="same", alibi="h", window=(300, -1)))
    generator = torch.Generator().manual_seed(1)
    leaves = {n: getattr(inputs, n) for n in ("q", "k", "v")} | {"sinks": inputs.options["sinks"]}
    steps = {n: torch.randn(t.shape, generator=generator).double() for n, t in leaves.items()}
    used = {n: t.isfinite() for n, t in leaves.items()}  # the others are poison

    def loss(epsilon: float) -> float:
        at = {n: torch.where(used[n], t + epsilon * steps[n], t) for n, t in leaves.items()}
        out, lse = cpu.forward(**(inputs.options | at))
        return float((out * inputs.dout).sum() + (lse * inputs.dlse).sum())

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    sums = {n: getattr(result, f"d{n}") * steps[n] for n in leaves}
    expected_slope = sum(float(torch.where(used[n], x, 0).sum()) for n, x in sums.items())
    assert abs(slope - expected_slope) < 1e-7 * max(1.0, abs(slope)), (slope, expected_slope)


# ---- combine ------------------------------------------------------------------------------------


def test_combine_equals_one_call() -> None:
    """Keys cut in eight; fp32 partial results lose nothing against one call."""
    case = Case(q=100, k=800, heads_q=4, heads_k=2)
    inputs, whole = sample(case)
    parts = [
        cpu.forward(inputs.q, k, v, out_dtype=torch.float32)
        for k, v in zip(inputs.k.split(100, 1), inputs.v.split(100, 1), strict=True)
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = cpu.combine(outs, lses, out_dtype=torch.bfloat16)
    exact, exact_lse = reference.attention(inputs.q, inputs.k, inputs.v)
    one_call = (whole.out.double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 1.5 * one_call
    assert_lse(lse, exact_lse)
    # Any strides, and packed.
    strided = outs.transpose(2, 3).contiguous().transpose(2, 3)
    again, _ = cpu.combine(strided, lses.transpose(-1, -2).contiguous().transpose(-1, -2))
    assert_bitwise("out", again.bfloat16().contiguous(), out.contiguous())
    packed, packed_lse = cpu.combine(outs[:, 0], lses[:, 0])
    assert_bitwise("out", packed, again[0])
    assert_bitwise("lse", packed_lse, lse[0])


def test_combine_of_unequal_and_empty_parts() -> None:
    out = torch.randn(2, 1, 4, 3, 64)
    lse = torch.tensor([0.0, 300.0]).view(2, 1, 1, 1).expand(2, 1, 3, 4).clone()
    merged, total = cpu.combine(out, lse)
    assert torch.equal(merged, out[1]) and (total == 300).all()
    lse[:, 0, 1] = -math.inf
    out[:, :, :, 1] = math.nan  # what an absent part holds does not count
    lse[0, 0, 2], out[0, :, :, 2] = -math.inf, math.inf
    merged, total = cpu.combine(out, lse)
    assert (merged[:, :, 1] == 0).all() and (total[0, 1] == -math.inf).all()
    assert torch.equal(merged[:, :, 2], out[1][:, :, 2]) and (total[0, 2] == 300).all()
    grads = cpu.combine_backward(torch.ones_like(merged), out, lse, merged, total)
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][:, :, :, 1] == 0).all() and (grads[1][:, :, 1] == 0).all()


def test_combine_of_one_and_of_none() -> None:
    out, lse = torch.randn(1, 2, 5, 3, 8), torch.randn(1, 2, 3, 5)
    merged, total = cpu.combine(out, lse)
    assert torch.equal(merged, out[0])
    torch.testing.assert_close(total, lse[0])
    with pytest.raises(ValueError, match="n = 0"):
        cpu.combine(out[:0], lse[:0])


def test_combine_gradient() -> None:
    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            merged, total = cpu.combine(out, lse)
            ctx.save_for_backward(out, lse, merged, total)
            return merged, total

        @staticmethod
        def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return cpu.combine_backward(dout, *ctx.saved_tensors, dlse=dlse)

    generator = torch.Generator().manual_seed(5)
    out = torch.randn(3, 1, 2, 2, 4, generator=generator).double().requires_grad_()
    lse = torch.randn(3, 1, 2, 2, generator=generator).double().requires_grad_()
    assert torch.autograd.gradcheck(Combine.apply, (out, lse))


def test_a_hidden_gradient_is_selected_away() -> None:
    """dS of keys that a row does not see is 0 even where dP is NaN."""
    case = Case(dtype="fp32", q=64, k=64, causal=True)
    inputs, clean = sample(case)
    row, inputs.dout[:, 0] = inputs.dout[:, 0].clone(), 0.0
    without = run(inputs)
    inputs.dout[:, 0] = math.nan
    dirty = run(inputs)
    assert_bitwise("dk", dirty.dk[:, 1:], without.dk[:, 1:])
    assert torch.isnan(dirty.dq[:, 0]).all() and torch.isfinite(dirty.dq[:, 1:]).all()
    inputs.dout[:, 0] = row
    assert_bitwise_result(run(inputs), clean)
