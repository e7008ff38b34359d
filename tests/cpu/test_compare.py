# SPDX-License-Identifier: BSD-3-Clause
# Can the tests fail? Wrong results, touched memory and missing cases must be seen.

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import Case, Guarded, hand_picked, strides_of, sweep
from compare import (
    Expected,
    Result,
    assert_bitwise,
    assert_close,
    assert_lse,
    assert_result,
    expected,
    same_up_to_rounding,
)

CASE = Case(q=200, k=150, heads_q=4, heads_k=2, sinks="fp32", dlse=True, window=(40, 40))


def right_answer() -> tuple[Result, Expected]:
    right = expected(CASE.make())
    exact = dict(right.exact.items())
    rounded = {n: t.to(torch.float32 if n in ("lse", "dsinks") else torch.bfloat16)
               for n, t in exact.items()}  # fmt: skip
    return Result(**rounded), right


def test_the_rounded_right_answer_passes() -> None:
    assert_result(*right_answer())


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_one_wrong_element_is_found(name: str) -> None:
    actual, right = right_answer()
    at = (0, 70, 1, 3)
    limit = 2 * float(right.yardstick[name].max() + right.handed[name].max()) + right.floor[name]
    getattr(actual, name)[at] += 4 * limit + 0.01
    with pytest.raises(
        AssertionError, match=rf"^{name}: error .* rows 64\.\.127 .*\[0, 70, 1, 3\]"
    ):
        assert_result(actual, right)


@pytest.mark.parametrize(
    ("yardstick", "handed", "value", "bound"),
    [(1e-3, 0.0, 0.0, 2e-3), (1e-3, 4e-3, 0.0, 8e-3), (1e-5, 1e-3, 1.0, 1e-3 + 2**-7)],
)
def test_bounds(yardstick: float, handed: float, value: float, bound: float) -> None:
    """Twice either error; and one rounding on top of what a backward was handed."""
    exact = torch.full((70, 1, 1), value, dtype=torch.float64)
    result = exact.bfloat16()
    tensors = (torch.full_like(exact, yardstick), torch.full_like(exact, handed))
    assert_close("dk", result, exact, *tensors, 0.0)
    assert_close("dk", result, exact + 0.98 * bound, *tensors, 0.0)
    with pytest.raises(AssertionError, match="dk: error"):
        assert_close("dk", result, exact + 1.02 * bound, *tensors, 0.0)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dsinks"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_element_is_found(name: str, value: float) -> None:
    actual, right = right_answer()
    getattr(actual, name).flatten()[2] = value
    with pytest.raises(AssertionError, match=f"^{name}: .*at other places"):
        assert_result(actual, right)


def test_wrong_lse_and_sinks_are_found() -> None:
    actual, right = right_answer()
    actual.lse[0, 1, 7] += 1e-3
    with pytest.raises(AssertionError, match=r"lse: 1 rows wrong, the first at \[0, 1, 7\]"):
        assert_result(actual, right)
    actual, right = right_answer()
    actual.dsinks[3] *= 1.5
    with pytest.raises(AssertionError, match="dsinks: error"):
        assert_result(actual, right)
    minus = torch.full((1, 1), -math.inf)
    with pytest.raises(AssertionError, match="-inf at other places"):
        assert_lse(torch.zeros(1, 1), minus.double())


def test_an_unwritten_gradient_is_found() -> None:
    actual, right = right_answer()
    actual.dk = torch.zeros_like(actual.dk)
    with pytest.raises(AssertionError, match="dk: error"):
        assert_result(actual, right)


def test_bitwise_and_rounding() -> None:
    a = torch.randn(3, 5)
    b = a.clone()
    assert_bitwise("x", a, b)
    b[1, 2] = torch.nextafter(b[1, 2], torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"x: 1 of 15 elements differ, the first at \[1, 2\]"):
        assert_bitwise("x", a, b)
    same_up_to_rounding("x", a, b)
    b[1, 2] += 1e-3
    with pytest.raises(AssertionError, match="x: differs by"):
        same_up_to_rounding("x", a, b)


def test_guards_see_writes_around_an_output() -> None:
    strides = strides_of("padded", (2, 3, 2, 8))
    guarded = Guarded((2, 3, 2, 8), torch.bfloat16, strides=strides)
    assert torch.isnan(guarded.tensor).all()
    guarded.tensor.zero_()
    guarded.check()
    gap = guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() + 16)
    gap.zero_()  # between two rows
    with pytest.raises(AssertionError, match="output: 1 elements around it .* element 16"):
        guarded.check()


def test_inputs_see_writes_and_hold_poison() -> None:
    case = replace(CASE, layout=("padded", "alternate", "bhsd", "sbhd"), seqused_k=(100,))
    inputs = case.make(poison=math.inf)
    inputs.assert_unchanged()
    for t in (inputs.q, inputs.k, inputs.v, inputs.dout):
        flat = t.as_strided((t.storage_offset(),), (1,), 0)
        assert torch.isinf(flat).all()
    assert torch.isinf(inputs.k[:, 100:]).all() and torch.isinf(inputs.v[:, 100:]).all()
    inputs.k[0, 120, 0, 0] = 1.0
    with pytest.raises(AssertionError, match="k: the call wrote to its input"):
        inputs.assert_unchanged()


@pytest.mark.parametrize("layout", ["bhsd", "sbhd", "alternate", "padded"])
def test_layouts_hold_the_same_values(layout: str) -> None:
    plain = Case(batch=2, q=9, k=11, heads_q=2, tag="x")
    case = replace(plain, layout=(layout,) * 4)
    inputs = case.make()
    assert inputs.q.stride() == strides_of(layout, inputs.q.shape)
    assert not any(torch.isnan(t).any() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    assert_bitwise("q", inputs.q, case.make(poison=math.inf).q)


def test_the_list_covers_every_feature() -> None:
    small = Counter(f for c in hand_picked() for f in c.features if c.cost < 80_000_000)
    drawn = Counter(f for c in sweep(1, 100) for f in c.features)
    everything = {
        "causal", "window_left", "window_right", "chunk", "softcap", "alibi", "sinks", "gqa",
        "dim_v", "odd_dim", "packed_q", "packed_k", "seqused_q", "seqused_k", "leftpad_k",
        "kv_batch_idx", "strided", "dout_scalar", "out_fp32", "backward", "dlse", "empty_batch",
    }  # fmt: skip
    assert set(small) == everything
    assert everything - set(drawn) == {"odd_dim", "dout_scalar", "empty_batch"}


def test_ids_and_draws_are_reproducible() -> None:
    assert sweep(5, 40) == sweep(5, 40) and sweep(5, 40) != sweep(6, 40)
    ids = [case.id for case in hand_picked() + sweep(5, 40) + sweep(6, 40)]
    assert len(set(ids)) == len(ids)
    named = Case(dim=128, causal=True, heads_q=8, heads_k=2, q=1023, k=2047)
    assert named.id == "bf16-d128-causal-h8-gqa4-q1023-k2047"
    assert_bitwise("q", named.make().q, named.make().q)


def test_the_watchdog_of_gpu_tests_leaves_others_alone() -> None:
    """pytest asks the hook of tests/gpu about every test; one of the CPU may take its time."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "order_of_layouts"]
        + ["tests/gpu/test_ptx.py", "tests/cpu/test_layout.py"],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"FA_TEST_HANG_SECONDS": "1e-9"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
