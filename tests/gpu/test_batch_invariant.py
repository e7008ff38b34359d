# SPDX-License-Identifier: BSD-3-Clause
# With batch_invariant, does a sequence get the same bits alone, in a batch, and beside longer ones?

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from harness import DEVICE, ON_CPU, ints, randn
from torch import Tensor

import fa
from compare import Result, assert_bitwise

LENGTHS = (70, 100) if ON_CPU else (1, 129, 300, 1024, 2500)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_left": 200, "window_right": 50},
    "chunk": {"attention_chunk": 96, "causal": True},
    "sinks": {"causal": True, "sinks": True},
    "fp32": {"out_dtype": torch.float32},
    "scores": {"causal": True, "softcap": 20.0, "alibi_slopes": True},
}
HEADS_Q, HEADS_K = 4, 2


def options_of(name: str) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    for option in ("sinks", "alibi_slopes"):
        if option in options:
            options[option] = torch.linspace(0.1, 0.5, HEADS_Q, device=DEVICE)
    return options


def call(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    with fa.backend(backend), torch.no_grad():
        return Result(*torch.ops.fa.forward(q, k, v, batch_invariant=True, **options))


def skip_without_row(backend: str, dtype: torch.dtype, dim: int, name: str) -> None:
    rows = [
        row
        for row in harness.rows()
        if row.backend == backend
        and getattr(torch, row.dtype) == dtype
        and min(row.dim_qk, row.dim_v) >= dim
        and (row.score == "any" or name != "scores")
        and (row.mask == "band" or name in ("full", "fp32"))
    ]
    if not rows and not ON_CPU:
        pytest.skip(f"this build has no {backend} row for {dtype}, head dim {dim}, {name}")


@harness.each_backend()
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_alone_in_a_batch_and_beside_longer(dim: int, name: str, backend: str) -> None:
    dtype = torch.float16 if dim == 96 else torch.bfloat16
    skip_without_row(backend, dtype, dim, name)
    options = options_of(name)
    for length in LENGTHS:
        batch, room = (4, length + 60) if ON_CPU else (32, length + 777)
        keys = length + 40
        q = randn(batch, room, HEADS_Q, dim, dtype=dtype)
        k, v = (randn(batch, room + 40, HEADS_K, dim, dtype=dtype, seed=n) for n in (1, 2))
        alone = call(backend, q[:1, :length], k[:1, :keys], v[:1, :keys], **options)
        many = call(backend, q[:, :length], k[:, :keys], v[:, :keys], **options)
        compare(f"{name} {length} in a batch of {batch}", alone, many, length)
        used = ints(length, *[room] * (batch - 1)), ints(keys, *[room + 40] * (batch - 1))
        longer = call(backend, q, k, v, seqused_q=used[0], seqused_k=used[1], **options)
        compare(f"{name} {length} beside longer ones", alone, longer, length)


def compare(what: str, alone: Result, other: Result, length: int) -> None:
    assert_bitwise(f"{what}, out", other.out[:1, :length], alone.out)
    assert_bitwise(f"{what}, lse", other.lse[:1, :, :length], alone.lse)


@harness.each_backend()
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_alone_and_among_others(name: str, backend: str) -> None:
    skip_without_row(backend, torch.bfloat16, 64, name)
    options = options_of(name)
    others = (5, 0, 300) if ON_CPU else (5, 0, 4000, 128, 64)
    for length in LENGTHS:
        ends = ints(0, *torch.tensor((*others, length, *others)).cumsum(0).tolist())
        total, first = int(ends[-1]), sum(others)
        q, k, v = (randn(total, h, 64, seed=n) for n, h in enumerate((HEADS_Q, HEADS_K, HEADS_K)))
        among = call(backend, q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, **options)
        here, one = slice(first, first + length), ints(0, length)
        parts = (x[here].contiguous() for x in (q, k, v))
        alone = call(backend, *parts, cu_seqlens_q=one, cu_seqlens_k=one, **options)
        assert_bitwise(f"{name} {length} packed, out", among.out[here], alone.out)
        assert_bitwise(f"{name} {length} packed, lse", among.lse[:, here], alone.lse)
        dense = call(backend, *(x[here][None] for x in (q, k, v)), **options)
        assert_bitwise(f"{name} {length} dense, out", dense.out[0], alone.out)
        assert_bitwise(f"{name} {length} dense, lse", dense.lse[0], alone.lse)


@harness.each_backend()
@pytest.mark.parametrize(
    "options", [{"softcap": 20.0}, {"softcap": 20.0, "window_left": 90}], ids=str
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_beside_rows_near_the_cap(
    dim: int, options: dict[str, float | int], backend: str
) -> None:
    """A warp whose rows are far from the cap takes a cheaper tanh: its results are no others."""
    skip_without_row(backend, torch.bfloat16, dim, "scores")
    q = randn(2, 300, HEADS_Q, dim, dtype=torch.bfloat16)
    k, v = (randn(2, 340, HEADS_K, dim, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    loud = q.clone()
    loud[:, ::2] *= 20
    quiet, beside = (call(backend, x, k, v, causal=True, **options) for x in (q, loud))
    assert not torch.equal(quiet.out[:, ::2], beside.out[:, ::2]), "the even rows did not change"
    assert_bitwise("out of odd rows", beside.out[:, 1::2], quiet.out[:, 1::2])
    assert_bitwise("lse of odd rows", beside.lse[..., 1::2], quiet.lse[..., 1::2])
