# SPDX-License-Identifier: BSD-3-Clause
# Does the emulation of the Hopper rows' softmax do what its rules say?

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import softmax_error


def inputs(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        softmax_error.draw(kind, n, 32, i, torch.bfloat16) for i, n in enumerate((64, 512, 512))
    )
    return q, k, v


@pytest.mark.parametrize("kind", softmax_error.KINDS)
@pytest.mark.parametrize("name", ["every", "sum256", "sum16", "average4"])
def test_every_rule_is_attention(kind: str, name: str) -> None:
    q, k, v = inputs(kind)
    right = softmax_error.exact(q, k, v)
    out = softmax_error.attend(q, k, v, 128, softmax_error.rule(name)).out
    # P and O are rounded to 2^-9 each, and a weighted mean stays below the largest value.
    assert float((out.double() - right).abs().max()) <= 2**-7 * float(v.abs().max())


def test_a_limit_below_every_sum_follows_every_maximum() -> None:
    q, k, v = inputs("x3")
    every = softmax_error.attend(q, k, v, 128, None)
    always = softmax_error.attend(q, k, v, 128, softmax_error.rule("sum0"))
    assert torch.equal(every.out, always.out)
    assert always.redone == 1.0 and 0.0 < every.redone <= 1.0


def test_equal_scores_are_never_done_again() -> None:
    q, k, v = (torch.ones(n, 32, dtype=torch.bfloat16) for n in (16, 512, 512))
    for name in ("every", "sum256", "average4"):
        outcome = softmax_error.attend(q, k, v, 128, softmax_error.rule(name))
        assert outcome.redone == 0.0
        assert torch.equal(outcome.out, torch.ones(16, 32, dtype=torch.bfloat16))


def test_the_average_rule_finds_a_late_maximum_that_the_sum_rule_keeps() -> None:
    q = torch.zeros(16, 32, dtype=torch.bfloat16)
    q[:, 0] = 5.65625  # times the factor 1/sqrt(32): close to 1
    k = torch.zeros(512, 32, dtype=torch.bfloat16)
    k[0, 0] = 4.0  # in the block visited last: e^4 times the weight of the others, below 256
    v = torch.ones(512, 32, dtype=torch.bfloat16)
    assert softmax_error.attend(q, k, v, 128, softmax_error.rule("sum256")).redone == 0.0
    # 31 + 55 against an average of 32
    redone = [
        softmax_error.attend(q, k, v, 128, softmax_error.rule(f"average{n}")).redone for n in (2, 4)
    ]
    assert redone == [pytest.approx(1 / 3), 0.0]


@pytest.mark.parametrize("name", ["", "sum", "sumx", "mean4"])
def test_an_unknown_rule_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="allowed are every, sumN and averageN"):
        softmax_error.rule(name)


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["softmax_error", "--lengths", "256", "--rows", "16", "--rules", "every", "sum256"]
    monkeypatch.setattr(sys, "argv", command)
    softmax_error.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(softmax_error.KINDS)
    assert all(line.split("|")[3].startswith(" 1.000, 1.00, ") for line in lines[2:])
    monkeypatch.setattr(sys, "argv", [*command, "--block", "100"])
    with pytest.raises(SystemExit):
        softmax_error.main()
    assert "--block is 100; allowed are multiples of 8." in capsys.readouterr().err
