# SPDX-License-Identifier: BSD-3-Clause
# Is the CPU backend right on whole problems, drawn over all options at once?
"""FA_TEST_PROBLEMS examples that hypothesis draws from a seed, FA_TEST_SEED, and makes smaller if
they fail; the failing problem is printed as Python.

Every problem goes through the operators, forward and backward, and is compared with the reference;
then again with other bytes outside of it, which must change no bit.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Case, Inputs
from compare import Result, assert_bitwise, assert_result, assert_same_nonfinite, expected
from fa import reference
from problems import MOST, Problem, build, draw

hypothesis = pytest.importorskip(
    "hypothesis", reason="hypothesis is not installed: pip install '.[test]'"
)
strategies = hypothesis.strategies

OPS = torch.ops.fa
COUNT = int(os.environ.get("FA_TEST_PROBLEMS", "2000"))
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


class OptionsOff:
    """Numbers of hypothesis, which tries small ones where a test fails: those leave options out."""

    def __init__(self, source: random.Random) -> None:
        self.choice, self.randint, self.randrange = source.choice, source.randint, source.randrange

    def random(self) -> float:
        # 0 leaves options out; the others are spread, for hypothesis prefers small ones throughout.
        return 1.0 - 617 * self.randint(0, 999) % 1000 / 1000


def drawn(test: Callable[[Problem], None], count: int, number: int, **settings: Any) -> None:
    """Runs the test on `count` problems that hypothesis chooses; the same for the same number."""

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **settings,
    )
    @hypothesis.given(strategies.randoms(use_true_random=False))
    def run_one(source: random.Random) -> None:
        problem = build(OptionsOff(source), "drawn")
        hypothesis.assume(problem.case.cost <= MOST)
        test(problem)

    run_one()


def check_and_name(problem: Problem) -> None:
    try:
        check(problem)
    except Exception as error:
        raise AssertionError(f"{problem}: {error}") from error


@pytest.mark.parametrize("group", range(GROUPS))
def test_problems(group: int) -> None:
    drawn(check_and_name, -(-COUNT // GROUPS), SEED * GROUPS + group)


def test_draws_cover_every_option() -> None:
    features: set[str] = set()
    pairs: set[tuple[str, str]] = set()

    def look(problem: Problem) -> None:
        found = set(problem.case.features) | {problem.case.dtype}
        for name in ("page_size", "dropout_p", "fp8", "descales", "batch_invariant", "num_splits"):
            value = getattr(problem, name)
            if value:
                found.add(f"{name} {value}" if isinstance(value, str) else name)
        features.update(found)
        pairs.update((a, b) for a in found for b in found if a < b)

    drawn(look, 250, SEED * GROUPS)  # group 0 of the default number
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


def test_a_failing_problem_is_printed_as_python() -> None:
    failed: list[Problem] = []

    def fails(problem: Problem) -> None:
        if problem.page_size and problem.dropout_p:
            failed.append(problem)
            raise AssertionError(repr(problem))

    with pytest.raises(AssertionError) as caught:
        drawn(fails, 200, SEED, phases=[hypothesis.Phase.generate])
    (text,) = re.findall(r"Problem\(.*\)", str(caught.value))[:1]
    assert eval(text, {"Problem": Problem, "Case": Case}) in failed


def test_small_numbers_leave_options_out() -> None:
    class Smallest:
        choice = staticmethod(lambda values: values[0])
        randint = randrange = staticmethod(lambda low, *_: low)

    problem = build(OptionsOff(Smallest()), "smallest")
    found = {getattr(problem, name) for name in ("page_size", "dropout_p", "fp8", "descales")}
    assert found == {0, ""} and problem.case.features == {"backward"}


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
