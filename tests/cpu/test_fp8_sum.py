# SPDX-License-Identifier: BSD-3-Clause
# Does the emulated sum of the tensor cores cut where it should, and say what an interval costs?

from __future__ import annotations

import pytest
import torch

import fp8_sum
from fp8_sum import BITS, STEP, Problem, errors, multiply_add


def test_terms_are_cut_at_the_bits_of_the_largest() -> None:
    large = torch.tensor([2.0**BITS, -(2.0**BITS)], dtype=torch.float64)
    terms = torch.zeros(2, STEP, dtype=torch.float64)
    terms[:, 0], terms[:, 1], terms[:, 2] = 0.75, -0.75, 1.75
    assert multiply_add(large, terms).tolist() == [2.0**BITS + 1, 1 - 2.0**BITS]
    assert multiply_add(torch.zeros(2, dtype=torch.float64), terms).tolist() == [1.75, 1.75]


def test_short_sums_keep_the_error_from_growing_with_the_length() -> None:
    for values in ("one", "around 1"):
        short, long = (abs(errors(Problem(n, values, rows=8), 512)[0]) for n in (1024, 4096))
        assert long < 1.5 * short < 1e-2
        assert abs(errors(Problem(4096, values, rows=8), 4096)[0]) > 5 * long
        assert abs(errors(Problem(1024, values, rows=8), 128)[0]) < short / 5


def test_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    fp8_sum.main(["--keys", "256", "--intervals", "128", "256"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| V | keys | 128 | 256 |" and len(lines) == 5
    assert all(line.count("|") == 5 for line in lines)
    with pytest.raises(SystemExit):
        fp8_sum.main(["--keys", "100"])
    assert "multiples of 128, not 100" in capsys.readouterr().err
