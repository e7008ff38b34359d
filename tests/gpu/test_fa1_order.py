# SPDX-License-Identifier: BSD-3-Clause
# Is the lab kernel in FlashAttention 1's order right? What tools/evolution.py times must be exact.

from __future__ import annotations

import functools

import pytest
import torch
from harness import DEVICE, ON_CPU, inputs_from, randn

import evolution_fa1 as fa1
import toolchain
from compare import Result, assert_result, expected

ONE_PROCESS = True  # each one would compile the kernel
LENGTHS = (1, 64, 65, 128, 129, 500, 1024, 1333)


@functools.cache
def kernel() -> fa1.Kernel:
    try:
        return fa1.Kernel()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error).splitlines()[0])


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Result:
    """out [B, S, H, D] and lse [B, H, S] of tensors [B, H, S, D]."""
    if ON_CPU:  # the schedule, rehearsed
        parts = [
            [fa1.model(q[b, h], k[b, h], v[b, h], causal)[:2] for h in range(q.shape[1])]
            for b in range(q.shape[0])
        ]
        out = torch.stack([torch.stack([o for o, _ in heads]) for heads in parts])
        lse = torch.stack([torch.stack([x for _, x in heads]) for heads in parts])
    else:
        out, lse = kernel().forward(q, k, v, causal)
    return Result(out.transpose(1, 2), lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dim", fa1.DIMS)
@pytest.mark.parametrize("dtype", fa1.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_the_order_of_the_loops_changes_no_result(
    dtype: torch.dtype, dim: int, length: int, causal: bool
) -> None:
    q, k, v = (randn(2, 3, length, dim, dtype=dtype, seed=i) for i in range(3))
    result = run(q, k, v, causal)
    views = (t.transpose(1, 2) for t in (q, k, v))
    assert_result(result, expected(inputs_from(*views, causal=causal), backward=False))


def test_scores_that_grow_from_block_to_block() -> None:
    """Every block of keys raises the maximum, so that every pass rescales what was stored."""
    length, dim = 1024, 64
    q = torch.ones(1, 1, length, dim, device=DEVICE, dtype=torch.bfloat16)
    ramp = torch.arange(length, device=DEVICE).div(64).to(torch.bfloat16)
    k = (ramp[:, None] * torch.ones(dim, device=DEVICE, dtype=torch.bfloat16))[None, None]
    v = randn(1, 1, length, dim, seed=1)
    result = run(q, k.contiguous(), v, False)
    views = (t.transpose(1, 2) for t in (q, k, v))
    assert_result(result, expected(inputs_from(*views, causal=False), backward=False))


def test_other_inputs_are_refused() -> None:
    if ON_CPU:
        pytest.skip("the refusals are the kernel's; FA_TEST_DEVICE is cpu")
    wide = randn(1, 1, 64, 96)
    with pytest.raises(ValueError, match="head dim 96"):
        kernel().forward(wide, wide, wide, False)
    one = randn(1, 2, 64, 64)
    with pytest.raises(ValueError, match="k: must be contiguous"):
        kernel().forward(one, one.transpose(0, 1), one, False)
