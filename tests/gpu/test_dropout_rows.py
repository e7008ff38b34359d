# SPDX-License-Identifier: BSD-3-Clause
# Does the dropout of a kernel drop the weights that docs/numerics.md says, and nothing else?

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from harness import DEVICE, call, call_guarded, inputs_from, randn
from torch import Tensor

import fa
import libfa
from compare import assert_bitwise, assert_bitwise_result, assert_result, expected
from fa import _philox

SEED, OFFSET = 20261129, 5


def seed_offset(seed: int = SEED, offset: int = OFFSET) -> Tensor:
    return torch.tensor([seed, offset], dtype=torch.int64, device=DEVICE)


def dropping(rows: tuple[libfa.Row, ...]) -> tuple[str, ...]:
    """Backends with rows that drop: those whose score is `any`, on Ampere."""
    if harness.ON_CPU:
        return ("cpu",)
    return ("sm80",) if any(r.backend == "sm80" and "_any" in r.id for r in rows) else ()


BACKENDS = dropping(harness.rows())
pytestmark = pytest.mark.skipif(not BACKENDS, reason="this build holds no row that drops weights")
each_backend = pytest.mark.parametrize("backend", BACKENDS or ("auto",))
DIMS = (64, 96, 128, 192, 256)


def held(dim: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    return harness.ON_CPU or any(
        "_any" in r.id and r.backend == "sm80" and r.dim_qk >= dim and r.dim_v >= dim
        and getattr(torch, r.dtype) == dtype
        for r in harness.rows()
    )  # fmt: skip


def kept(backend: str, q: Tensor, keys: int, dim: int, p: float, **options: Any) -> Tensor:
    """bool [B, Sq, Hq, keys]: q = 0 gives equal weights, and V shows `dim` of them at a time."""
    batch, _, heads, _ = q.shape
    found = []
    for first in range(0, keys, dim):
        v = torch.zeros(batch, keys, heads, dim, dtype=q.dtype, device=DEVICE)
        for j in range(first, min(first + dim, keys)):
            v[:, j, :, j - first] = 1
        k = torch.zeros_like(v)
        inputs = inputs_from(
            torch.zeros_like(q), k, v, dropout_p=p, philox_seed_offset=seed_offset(), **options
        )
        found.append(call(inputs, backend).out != 0)
    return torch.cat(found, dim=-1)[..., :keys]


def wanted(p: float, batch: int, heads: int, rows: int, keys: int) -> Tensor:
    """bool [B, Sq, Hq, keys] of the formula."""
    at = torch.arange(batch * heads, device=DEVICE)
    dropped = _philox.dropped(p, (SEED, OFFSET), at, (0, rows), (0, keys))
    return ~dropped.view(batch, heads, rows, keys).transpose(1, 2)


@each_backend
@pytest.mark.parametrize("dim", DIMS)
def test_every_bit(backend: str, dim: int) -> None:
    if not held(dim):
        pytest.skip(f"this build holds no row for head dim {dim}")
    q = randn(2, 150, 3, dim)
    for p in (0.1, 0.5):
        got = kept(backend, q, 300, dim, p)
        assert torch.equal(got, wanted(p, 2, 3, 150, 300))


@each_backend
def test_every_bit_of_split_keys(backend: str) -> None:
    got = kept(backend, randn(1, 20, 2, 64), 700, 64, 0.3, num_splits=4)
    assert torch.equal(got, wanted(0.3, 1, 2, 20, 700))


@each_backend
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softcap": 15.0},
        {"window_left": 100, "window_right": 30, "alibi": True},
        {"causal": True, "sinks": True, "out_dtype": torch.float32},
        {"softcap": 15.0, "alibi": True, "causal": True, "num_splits": 3},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_results(backend: str, dim: int, options: dict[str, Any]) -> None:
    if not held(dim):
        pytest.skip(f"this build holds no row for head dim {dim}")
    given = dict(options)
    if given.pop("alibi", False):
        given["alibi_slopes"] = torch.linspace(0.01, 0.3, 4, device=DEVICE)
    if given.pop("sinks", False):
        given["sinks"] = randn(4, dtype=torch.float32)
    parts = {n: given.pop(n) for n in ("num_splits",) if n in given}
    q, k, v = randn(2, 200, 4, dim), randn(2, 333, 2, dim, seed=1), randn(2, 333, 2, dim, seed=2)
    inputs = inputs_from(q, k, v, dropout_p=0.2, philox_seed_offset=seed_offset(), **given)
    result = call(inputs, backend, **parts)
    assert_result(result, expected(inputs, backward=False))


@each_backend
def test_packed_sequences_and_padding(backend: str) -> None:
    """Rows and keys count from the sequence's own first ones, sequences from the call's first."""
    q, k, v = randn(300, 2, 64), randn(2, 300, 2, 64, seed=1), randn(2, 300, 2, 64, seed=2)
    more = {"dropout_p": 0.3, "philox_seed_offset": seed_offset(), "causal": True}
    lengths = {"cu_seqlens_q": harness.ints(0, 170, 300), "leftpad_k": harness.ints(0, 37)}
    inputs = inputs_from(q, k, v, **lengths, **more)
    assert_result(call_guarded(inputs, backend), expected(inputs, backward=False))


@each_backend
def test_lse_does_not_know_of_dropout(backend: str) -> None:
    q, k, v = (randn(1, 200, 2, 64, seed=n) for n in range(3))
    lse = [
        call(inputs_from(q, k, v, dropout_p=p, philox_seed_offset=seed_offset()), backend).lse
        for p in (0.1, 0.9)
    ]
    assert_bitwise("lse", *lse)


@each_backend
def test_all_and_nothing(backend: str) -> None:
    q, k, v = (randn(1, 100, 2, 64, seed=n) for n in range(3))
    nothing = call(inputs_from(q, k, v, dropout_p=0.999, philox_seed_offset=seed_offset()), backend)
    assert not nothing.out.any()
    assert torch.isfinite(nothing.lse).all()
    everything = inputs_from(q, k, v, dropout_p=0.001, philox_seed_offset=seed_offset())
    assert_bitwise_result(call(everything, backend), call(inputs_from(q, k, v), backend))


@each_backend
def test_share_of_kept_weights(backend: str) -> None:
    for p in (0.1, 0.25, 0.5):
        got = kept(backend, randn(1, 512, 4, 64), 128, 64, p)
        expected_share = _philox.keep_probability(p)
        deviation = (expected_share * (1 - expected_share) / got.numel()) ** 0.5
        assert abs(float(got.float().mean()) - expected_share) < 5 * deviation


@each_backend
def test_a_captured_call_takes_new_seeds(backend: str, cuda_only: None) -> None:
    q, k, v = (randn(1, 200, 2, 64, seed=n) for n in range(3))
    seed = seed_offset()
    inputs = inputs_from(q, k, v, dropout_p=0.5, philox_seed_offset=seed)
    call(inputs, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(inputs, backend)
    outs = []
    for number in (1, 2):
        seed.copy_(seed_offset(number, 7))
        graph.replay()
        torch.cuda.synchronize()
        outs.append(captured.out.clone())
        assert_bitwise("out", captured.out, call(inputs, backend).out)
    assert not torch.equal(*outs)


@each_backend
def test_drawn_seeds_follow_the_generator(backend: str) -> None:
    q, k, v = (randn(1, 64, 2, 64, seed=n) for n in range(3))
    with fa.backend(backend), torch.no_grad():
        torch.manual_seed(3)
        first = fa.attention(q, k, v, dropout_p=0.5)
        second = fa.attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(3)
        again = fa.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
