# SPDX-License-Identifier: BSD-3-Clause
# Does the CPU backend agree with the fp64 reference, whatever the memory around its inputs holds?

from __future__ import annotations

import math

import pytest
from cases import Case, Inputs, hand_picked, sweep
from compare import (
    Result,
    assert_bitwise_result,
    assert_result,
    expected,
)
from fa import cpu

AFFORDABLE = 80_000_000  # multiplications; larger cases belong to the GPU tier
SWEEP_SEED = 20261129
CASES = [c for c in hand_picked() + sweep(SWEEP_SEED, 120) if c.cost <= AFFORDABLE]


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
