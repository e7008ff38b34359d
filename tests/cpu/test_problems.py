# SPDX-License-Identifier: BSD-3-Clause
# Is the CPU backend right on whole problems, drawn over all options at once?
"""FA_TEST_PROBLEMS draws of a seed, FA_TEST_SEED; a failure prints the problem as Python.

Every problem goes through the operators, forward and backward, and is compared with the reference;
then again with other bytes outside of it, which must change no bit.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from cases import Inputs
from compare import Result, assert_bitwise, assert_result, assert_same_nonfinite, expected
from fa import reference
from problems import Problem, draw

OPS = torch.ops.fa
COUNT = int(os.environ.get("FA_TEST_PROBLEMS", "1200"))
SEED = int(os.environ.get("FA_TEST_SEED", "8"))
GROUPS = 8


def run(problem: Problem, poison: float) -> tuple[Result, Inputs]:
    inputs = problem.make(poison)
    options = inputs.options | problem.how()
    out, lse = OPS.forward(inputs.q, inputs.k, inputs.v, **options)
    result = Result(out, lse)
    if problem.case.backward:
        options.pop("out_dtype", None)
        grads = OPS.backward(
            *(inputs.dout, inputs.q, inputs.k, inputs.v, out, lse), dlse=inputs.dlse, **options
        )
        result.dq, result.dk, result.dv = grads[:3]
        if "sinks" in options:
            result.dsinks = grads[3]
    return result, inputs


def check(problem: Problem) -> None:
    result, inputs = run(problem, math.nan)
    if problem.fp8:
        options = {n: x for n, x in inputs.options.items() if n != "out_dtype"}
        want = reference.attention(inputs.q, inputs.k, inputs.v, **options)
        for name, got, right in zip(("out", "lse"), (result.out, result.lse), want, strict=True):
            assert torch.equal(got.isfinite(), right.isfinite()), name
            error = (got - right).nan_to_num(0.0).abs()
            bound = 1e-4 + 1e-5 * right.nan_to_num(0.0, 0.0, 0.0).abs()
            assert (error <= bound).all(), (name, float(error.max()))
    elif problem.case.dtype == "fp64":
        assert_exact(result, expected(inputs).exact)
    else:
        assert_result(result, expected(inputs))
    other, _ = run(problem, math.inf)
    for (name, a), (_, b) in zip(result.items(), other.items(), strict=True):
        assert_bitwise(name, a, b)


def assert_exact(result: Result, exact: Result) -> None:
    """fp64 against fp64: far below what a single step in fp32 would leave."""
    right = dict(exact.items())
    for name, value in result.items():
        assert_same_nonfinite(name, value, right[name])
        want = right[name].nan_to_num(0.0, 0.0, 0.0)
        error = (value.nan_to_num(0.0, 0.0, 0.0) - want).abs()
        unit = max(1e-10, torch.finfo(value.dtype).eps)  # dsinks has the dtype of the sinks
        bound = unit * max(1.0, float(want.abs().max())) if want.numel() else 0.0
        assert (error <= bound).all(), f"{name}: error {float(error.max()):.3e} above {bound:.3e}"


@pytest.mark.parametrize("group", range(GROUPS))
def test_problems(group: int) -> None:
    for number in range(group, COUNT, GROUPS):
        problem = draw(SEED, number)
        try:
            check(problem)
        except Exception as error:
            raise AssertionError(f"draw({SEED}, {number}) = {problem}: {error}") from error


def test_draws_cover_every_option() -> None:
    features: set[str] = set()
    pairs: set[tuple[str, str]] = set()
    for number in range(min(COUNT, 320)):
        problem = draw(SEED, number)
        found = set(problem.case.features)
        for name in ("page_size", "dropout_p", "fp8", "descales", "batch_invariant", "num_splits"):
            value = getattr(problem, name)
            if value:
                found.add(f"{name} {value}" if isinstance(value, str) else name)
        found.add(problem.case.dtype)
        features |= found
        pairs |= {(a, b) for a in found for b in found if a < b}
    assert features >= {
        *("causal", "window_left", "window_right", "chunk", "softcap", "alibi", "sinks", "gqa"),
        *("packed_q", "packed_k", "seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx"),
        *("strided", "out_fp32", "dlse", "backward", "page_size", "dropout_p", "fp8 all"),
        *("fp8 cache", "descales head", "descales block", "batch_invariant", "num_splits"),
        *("bf16", "fp16", "fp32", "fp64", "dim_v"),
    }
    for a in ("page_size", "dropout_p"):
        for b in ("causal", "packed_q", "leftpad_k", "kv_batch_idx", "sinks", "alibi", "fp8 all"):
            assert (min(a, b), max(a, b)) in pairs, (a, b)


def test_draws_depend_on_seed_and_number_only() -> None:
    assert draw(3, 7) == draw(3, 7)
    assert draw(3, 7) != draw(3, 8) and draw(4, 7) != draw(3, 7)
    a, b = (draw(3, 7).make(math.nan) for _ in range(2))
    assert torch.equal(a.q.contiguous().view(torch.uint8), b.q.contiguous().view(torch.uint8))


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from fa import cpu

    right = cpu.forward

    def wrong(*args: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        out, lse = right(*args, **options)  # type: ignore[arg-type]
        return out * 1.05, lse

    monkeypatch.setattr(cpu, "forward", wrong)
    found = 0
    for number in range(12):
        try:
            check(draw(SEED, number))
        except AssertionError:
            found += 1
    assert found >= 10
