# SPDX-License-Identifier: BSD-3-Clause
# Does the same call give the same bits every time, also while other work disturbs the timing?

from __future__ import annotations

from collections.abc import Callable

import harness
import pytest
import torch
from harness import DEVICE, ON_CPU
from torch import Tensor

from cases import Case
from compare import assert_bitwise

MEDIUM = [
    Case(batch=2, heads_q=8, heads_k=2, dim=128, q=777, k=1100, causal=True),
    Case(batch=2, heads_q=8, dim=64, q=777, k=1100, dtype="fp16"),
    Case(batch=2, heads_q=8, dim=128, q=777, k=1100, dtype="fp16"),
    Case(batch=1, heads_q=16, dim=64, q=1024, k=1024, causal=True),
    Case(heads_q=4, heads_k=2, dim=128, q=(3, 700, 321), k=(3, 700, 321), window=(128, 0)),
    Case(batch=2, heads_q=8, dim=120, dim_v=40, q=300, k=515, sinks="fp32", causal=True),
]
SMALL = [
    Case(heads_q=2, dim=64, q=129, k=257, causal=True),
    Case(heads_q=2, dim=128, q=129, k=257, causal=True),
    Case(heads_q=2, dim=64, q=193, k=130),
    Case(heads_q=2, dim=128, q=193, k=130, dtype="fp16"),
    Case(heads_q=1, dim=128, q=(1, 65, 3), k=(70, 1, 129), causal=True),
    Case(heads_q=8, heads_k=2, dim=128, q=1, k=700),
]


def repeat(run: Callable[[], list[Tensor]], count: int) -> None:
    """Runs `count` times without waiting; compares on the device; reports with coordinates."""
    first = run()
    worst = [t.clone() for t in first]
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(count):
        now = run()
        changed = torch.stack([(a != b).any() for a, b in zip(now, first, strict=True)]).any()
        differing += changed
        for kept, new in zip(worst, now, strict=True):
            kept.copy_(torch.where(changed, new, kept))
    if int(differing):
        for name, kept, base in zip(("out", "lse"), worst, first, strict=True):
            assert_bitwise(f"{int(differing)} of {count} runs differ; {name}", kept, base)
        raise AssertionError(f"{int(differing)} of {count} runs differ, the last one does not.")


def runner(case: Case, backend: str) -> Callable[[], list[Tensor]]:
    if harness.must_refuse(case):
        pytest.skip(f"no row of this build covers {case.id}")
    inputs = case.make(DEVICE)
    if harness.may_refuse(case, backend):
        backend = "auto"

    def run() -> list[Tensor]:
        result = harness.call(inputs, backend)
        return [result.out, result.lse]

    return run


@harness.each_backend()
@pytest.mark.parametrize("case", MEDIUM, ids=lambda case: case.id)
def test_100_runs(case: Case, backend: str) -> None:
    repeat(runner(case, backend), 2 if ON_CPU else 100)


@harness.each_backend()
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_1000_runs_of_a_small_shape(case: Case, backend: str) -> None:
    repeat(runner(case, backend), 3 if ON_CPU else 1000)


@harness.each_backend()
def test_100_runs_beside_a_busy_neighbour(backend: str, cuda_only: None) -> None:
    """Another stream keeps part of the device busy, so that blocks start at other moments."""
    noise = torch.randn(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    run = runner(MEDIUM[0], backend)

    def disturbed() -> list[Tensor]:
        with torch.cuda.stream(side):
            torch.mm(noise, noise)
        return run()

    repeat(disturbed, 100)
    side.synchronize()
