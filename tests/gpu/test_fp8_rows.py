# SPDX-License-Identifier: BSD-3-Clause
# Are the e4m3 rows right: every row, drawn problems, descales, poison, long and short sequences?
"""Against fp64 on the dequantised numbers. The bounds follow from docs/numerics.md, "FP8"."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import harness
import pytest
import torch
from fp8_problems import check, check_drawn, e4m3_case, run, store
from harness import DEVICE, ints, randn
from torch import Tensor

import fa
import libfa
from cases import sweep
from compare import assert_bitwise
from fa import reference
from fa.quantize import FP8, relative_rmse

ROWS = [r for r in harness.rows() if r.dtype == "float8_e4m3fn" and r.op == libfa.FORWARD]
pytestmark = pytest.mark.skipif(
    not harness.ON_CPU and "sm90" not in harness.backends(),
    reason="e4m3 rows need a Hopper GPU and a build that holds Hopper rows",
)
BACKEND = "cpu" if harness.ON_CPU else "sm90"


def qkv(
    shape_q: tuple[int, ...], shape_k: tuple[int, ...], dim: int, dim_v: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal values; shapes without the head dim."""
    dims = ((shape_q, dim), (shape_k, dim), (shape_k, dim_v or dim))
    q, k, v = (
        store(randn(*s, d, dtype=torch.float32, seed=seed + n)) for n, (s, d) in enumerate(dims)
    )
    return q, k, v


def with_contiguous_keys(v: Tensor) -> Tensor:
    """The same [B, S, H, D] with keys next to each other; NaN behind them."""
    batch, keys, heads, dim = v.shape
    columns = torch.full((batch, heads, dim, -(-keys // 16) * 16), math.nan, device=DEVICE).to(FP8)
    columns[..., :keys] = v.permute(0, 2, 3, 1)
    return columns[..., :keys].permute(0, 3, 1, 2)


def transposes(row: libfa.Row) -> bool:
    """Whether the row transposes V itself. Only its sibling takes a V that comes so."""
    return "vrows" in row.id.split("_")


def row_calls(row: libfa.Row) -> list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
    """Calls for which this row must be the one that runs."""
    d, dv = row.dim_qk, row.dim_v
    band = {"causal": True} if row.mask == "band" else {}
    calls: list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = [
        (qkv((2, 257, 4), (2, 321, 2), d, dv), dict(band)),
        (qkv((1, row.tile_m, 3), (1, row.tile_n, 3), d, dv), dict(band)),
        (qkv((1, 1023, 4), (1, 2047, 1), d, dv), {**band, "out_dtype": torch.bfloat16}),
        (qkv((3, 2, 2), (3, 7, 2), d, dv), dict(band)),
        (qkv((2, 300, 1), (2, 193, 1), d - 8, dv - 24), {**band, "out_dtype": torch.float16}),
    ]
    if row.mask == "band":
        calls += [
            (qkv((1, 513, 4), (1, 700, 2), d, dv), {"window_left": 100, "window_right": 20}),
            (qkv((1, 700, 2), (1, 300, 2), d, dv), {"causal": True, "sinks": randn(2).float()}),
            (qkv((1, 400, 1), (1, 470, 1), d, dv), {"causal": True, "attention_chunk": 150}),
        ]
    if row.score == "any":  # a row for plain scores takes the others
        slopes = randn(4, dtype=torch.float32).abs() / 8
        factors = {
            f"{x}_descale": torch.full((1,), f, device=DEVICE) for x, f in (("q", 3.0), ("k", 2.0))
        }
        large, small = qkv((2, 257, 4), (2, 321, 2), d, dv), qkv((1, 129, 4), (1, 700, 1), d, dv)
        return [
            (large, {"causal": True, "softcap": 3.0}),
            (large, {"softcap": 3.0, **factors}),
            (small, {"causal": True, "alibi_slopes": slopes}),
            (small, {"window_left": 200, "alibi_slopes": slopes, "softcap": 9.0, **factors}),
        ]
    if any(transposes(r) and r.dim_v == row.dim_v for r in ROWS) and not transposes(row):
        return [((q, k, with_contiguous_keys(v)), options) for (q, k, v), options in calls]
    return calls


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.id)
def test_row(row: libfa.Row, cuda_only: None) -> None:
    for (q, k, v), options in row_calls(row):
        with fa.backend("sm90"):
            window = (options.get("window_left", -1), options.get("window_right", -1))
            plan = fa.explain(
                *(q, k, v),
                window_size=window,
                **{n: x for n, x in options.items() if not n.startswith("window")},
            )
        chosen = re.search(r"^row\s+(\S+)", plan, re.MULTILINE)
        assert chosen is not None and chosen[1] == row.id, f"another row runs than {row.id}: {plan}"
        check(q, k, v, **options)


def test_build_holds_rows(cuda_only: None) -> None:
    assert ROWS, "the library holds no e4m3 row"


@pytest.mark.parametrize("number", range(60))
def test_drawn(number: int) -> None:
    """Lengths of every kind, masks, softcap, ALiBi, sinks, groups; NaN outside the problem."""
    (case,) = sweep(611_000 + number, 1, 400)
    case = e4m3_case(case)
    inputs = case.make(DEVICE, poison=math.nan)
    assert check_drawn(case, inputs, random.Random(number), BACKEND)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_nan_that_no_row_sees(dim: int, packed: bool) -> None:
    """The tail of V under the transpose; NaN before, behind and between."""
    used, pad = ints(333, 140), ints(5, 17)
    q, k, v = qkv((2, 200, 2), (2, 600, 1), dim, seed=dim)
    options: dict[str, Any] = {"seqused_k": used, "leftpad_k": pad}
    if packed:
        q, k, v = q[0], k.flatten(0, 1), v.flatten(0, 1)
        options |= {"cu_seqlens_q": ints(0, 90, 200), "cu_seqlens_k": ints(0, 600, 1100)}
    clean = {}
    for window in ({}, {"causal": True}, {"window_left": 40, "window_right": 0}):
        clean[str(window)] = run(q, k, v, **options, **window)
    starts = (0, 600)
    for t in (k, v):
        keys = t if packed else t.flatten(0, 1)
        for start, last, first in zip(starts, used.tolist(), pad.tolist(), strict=True):
            keys[start : start + first] = math.nan
            keys[start + last : start + (500 if packed and start else 600)] = math.nan
        keys[1100:] = math.nan if packed else keys[1100:]
    for window in ({}, {"causal": True}, {"window_left": 40, "window_right": 0}):
        for name, a, b in zip(
            ("out", "lse"), clean[str(window)], run(q, k, v, **options, **window), strict=True
        ):
            assert_bitwise(name, a, b)
        check(q, k, v, **options, **window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan_in_q_spoils_its_own_row(dim: int, causal: bool) -> None:
    q, k, v = qkv((1, 200, 2), (1, 500, 2), dim)
    clean = run(q, k, v, causal=causal)
    q[0, 77, 1, 5] = math.nan
    out, lse = run(q, k, v, causal=causal)
    assert torch.isnan(out[0, 77, 1]).all()
    assert torch.isnan(lse[0, 1, 77])
    out[0, 77, 1], lse[0, 1, 77] = clean[0][0, 77, 1], clean[1][0, 1, 77]
    assert_bitwise("out", out, clean[0])
    assert_bitwise("lse", lse, clean[1])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_calls_that_fill_the_gpu(dim: int, packed: bool, cuda_only: None) -> None:
    """Here V may be transposed while blocks that need it already run; both ways give equal bits."""
    used, pad = ints(900, 640, 900, 3), ints(5, 0, 17, 0)
    q, k, v = qkv((4, 700, 16), (4, 900, 4), dim, seed=dim)
    transposed = with_contiguous_keys(v)
    options: dict[str, Any] = {"seqused_k": used, "leftpad_k": pad}
    if packed:
        q, k, v, transposed = (t.flatten(0, 1) for t in (q, k, v, transposed.contiguous()))
        starts = {"q": ints(0, 700, 1400, 2100, 2800), "k": ints(0, 900, 1800, 2700, 3600)}
        options |= {f"cu_seqlens_{side}": cu for side, cu in starts.items()}
    for window in ({}, {"causal": True}, {"window_left": 200, "window_right": 30}):
        check(q, k, v, **options, **window)
        first = run(q, k, v, **options, **window)
        check(q, k, transposed, **options, **window)
        # Unmasked calls of head dim 128 have a row with other blocks of keys, for one of the ways.
        for other in (v, transposed) if dim != 128 or window else (v,):
            for a, b in zip(first, run(q, k, other, **options, **window), strict=True):
                assert_bitwise("again", a, b)


def test_layouts_give_the_same_bits() -> None:
    q, k, v = qkv((2, 190, 4), (2, 333, 2), 128)
    want = run(q, k, v, causal=True)
    transposed = with_contiguous_keys(v)
    assert transposed.stride(1) == 1
    swapped = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for other in ((q, k, transposed), swapped, (q, k[:, :, :1].expand_as(k), v)):
        got = run(*other, causal=True)
        if other[1].stride(2) != 0:
            assert_bitwise("out", got[0], want[0])
            assert_bitwise("lse", got[1], want[1])
        else:
            check(*other, causal=True)
    index = ints(1, 0)
    got = run(q, k, transposed, causal=True, kv_batch_idx=index)
    assert_bitwise("out", got[0], run(q, k.flip(0), v.flip(0), causal=True)[0])


def test_descales_are_those_of_the_batch_entry_and_key_head() -> None:
    q, k, v = qkv((3, 70, 6), (3, 90, 2), 128)
    factors = {
        f"{x}_descale": randn(3, 2, dtype=torch.float32, seed=n).abs() + 0.3
        for n, x in enumerate("qkv")
    }
    check(q, k, v, **factors)
    for name in factors:  # strided and expanded views of the same numbers
        given = factors | {name: factors[name].T.contiguous().T}
        for a, b in zip(run(q, k, v, **given), run(q, k, v, **factors), strict=True):
            assert torch.equal(a, b)
        check(q, k, v, **(factors | {name: factors[name][:1]}))
        check(q, k, v, **(factors | {name: factors[name][:, :1]}))
        check(q, k, v, **(factors | {name: factors[name][0, 0]}))
    # A power of two only moves exponents.
    out, _ = run(q, k, v)
    twice, _ = run(q, k, v, v_descale=torch.full((1,), 2.0, device=DEVICE))
    assert torch.equal(2 * out, twice)


def block_factors(side: str, t: Tensor, heads: int, block: int, seed: int) -> dict[str, Any]:
    """Descales of half to twice the size, no two blocks the same."""
    names = "q" if side == "q" else "kv"
    shape = (t.shape[0], heads, -(-t.shape[1] // block))
    factors = {
        f"{x}_descale": torch.exp2(randn(*shape, dtype=torch.float32, seed=seed + n).clamp(-1, 1))
        for n, x in enumerate(names)
    }
    return factors | {f"descale_block_{side}": block}


@pytest.mark.parametrize("dim", [64, 128])
def test_descales_of_blocks(dim: int) -> None:
    """Any number of query rows; keys in multiples of the row's tile; with every other option."""
    q, k, v = qkv((2, 333, 4), (2, 700, 2), dim, seed=dim)
    slopes = randn(4, dtype=torch.float32).abs() / 8
    more: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"window_left": 200, "window_right": 30, "seqused_k": ints(700, 140)},
        {"causal": True, "softcap": 3.0, "sinks": randn(4).float()},
        {"alibi_slopes": slopes, "v_descale": torch.full((2, 2, 6), 0.7, device=DEVICE)},
    ]
    for n, options in enumerate(more):
        of_q = block_factors("q", q, 4, (7, 64, 128, 333, 100)[n], n)
        of_k = block_factors("k", k, 2, (128, 256, 128, 384, 128)[n], n)
        check(q, k, v, **(of_k | options))
        check(q, k, v, **(of_q | of_k | options))
        if "v_descale" not in options:
            check(q, k, v, **of_q, **options)
    one_head = {n: x[:1, :1] if isinstance(x, Tensor) else x for n, x in of_q.items()}
    check(q, k, v, **one_head, causal=True)


def test_descales_of_blocks_of_packed_sequences() -> None:
    """Blocks count from the first row of each sequence; the factors have room for the longest."""
    q, k, v = (t[0] for t in qkv((1, 500, 4), (1, 900, 2), 128))
    of_q = block_factors("q", q[None, :300].expand(3, -1, -1, -1), 4, 64, 1)
    of_k = block_factors("k", k[None, :460].expand(3, -1, -1, -1), 2, 128, 2)
    starts = {"cu_seqlens_q": ints(0, 150, 200, 500), "cu_seqlens_k": ints(0, 440, 440, 900)}
    for window in ({}, {"causal": True}):
        check(q, k, v, **of_q, **of_k, **starts, **window)


def test_equal_factors_of_blocks_are_one_factor() -> None:
    q, k, v = qkv((2, 190, 4), (2, 333, 2), 128)
    one = {
        f"{x}_descale": torch.full((1,), f, device=DEVICE)
        for x, f in (("q", 2.0), ("k", 0.5), ("v", 4.0))
    }
    blocks = {n: x.expand(2, 4 if n == "q_descale" else 2, 3) for n, x in one.items()}
    check(q, k, v, **one)
    check(q, k, v, **blocks, descale_block_q=64, descale_block_k=128)
    # Powers of two only move exponents.
    options = {"softcap": 5.0}
    for a, b in zip(
        run(q, k, v, **one, **options),
        run(q, k, v, **blocks, descale_block_q=64, descale_block_k=128, **options),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("step", [-1, 0, 1])
def test_maxima_that_move_in_every_block_or_never(dim: int, step: int) -> None:
    """Old maxima must be noticed: weights would saturate. Equal scores are right as they are."""
    q = torch.full((1, 9, 2, dim), 0.5, device=DEVICE)
    height = torch.linspace(-6, 6, 700, device=DEVICE) * step
    k = height[None, :, None, None].expand(1, 700, 1, dim) * (64 / dim) ** 0.5
    v = randn(1, 700, 1, dim, dtype=torch.float32)
    for more in ({}, {"causal": True}, {"window_left": 300, "window_right": 0}):
        check(store(q), store(k), store(v), **more)


@pytest.mark.parametrize("length", [1024, 8192, 131072])
def test_a_long_sum_does_not_drift(length: int) -> None:
    """vllm#23813: V = 1 gives 1 at every length."""
    if harness.ON_CPU and length > 1024:
        pytest.skip("takes minutes on a CPU; FA_TEST_DEVICE is cpu")
    q, k, _ = qkv((1, 1, 8), (1, length, 1), 128)
    v = torch.ones(1, length, 1, 128, device=DEVICE).to(FP8)
    out, _ = run(q, k, v)
    assert (out - 1).abs().max() < 5e-3


def test_every_length_is_near_the_16_bit_run() -> None:
    """FA#2577: saturated weights just beyond a tile."""
    step = 61 if harness.ON_CPU else 1
    worst = {}
    for length in range(1, 1024, step):
        q, k, v = (
            randn(1, n, h, 128, dtype=torch.float32, seed=length + i)
            for i, (n, h) in enumerate(((1, 6), (length, 1), (length, 1)))
        )
        stored = [t.to(FP8) for t in (q, k, v)]
        out, _ = run(*stored)
        want = fa.attention(*(t.bfloat16() for t in stored)).float()
        worst[length] = torch.nn.functional.cosine_similarity(out.flatten(), want.flatten(), dim=0)
    length = min(worst, key=lambda n: float(worst[n]))
    assert worst[length] >= 0.998, f"length {length}: cosine {float(worst[length]):.5f}"


@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 64},
        {"window_left": 63, "window_right": 20},
        {"window_left": 200, "window_right": 0},
        {"attention_chunk": 150},
        {"window_left": 64, "softcap": 20.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_windows_in_many_tiles(dim: int, options: dict[str, Any], cuda_only: None) -> None:
    """A thread block goes on to another tile, where warpgroups saw other keys of the one before."""
    q, k, v = qkv((1, 700, 1), (1, 700, 1), dim)
    one, lse = run(q, k, v, **options)
    heads = 3 * torch.cuda.get_device_properties(0).multi_processor_count // 4  # 4 to 6 tiles each
    out, all_lse = run(*(t.expand(1, 700, heads, dim).contiguous() for t in (q, k, v)), **options)
    assert torch.allclose(all_lse, lse.expand_as(all_lse), atol=2e-3, rtol=1e-4)
    near = torch.nn.functional.cosine_similarity(out.float(), one.float().expand_as(out), dim=-1)
    assert near.min() > 0.99, f"cosine {float(near.min()):.4f}"


def test_the_same_bits_every_time(cuda_only: None) -> None:
    q, k, v = qkv((1, 777, 4), (1, 999, 2), 128)
    first = run(q, k, v, causal=True)
    for _ in range(100):
        again = run(q, k, v, causal=True)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_odd_head_dims() -> None:
    """Filled up to rows of a multiple of 16 bytes by the Python layer."""
    q, k, v = (
        randn(2, n, 2, d, dtype=torch.float32, seed=d).to(FP8)
        for n, d in ((90, 70), (130, 70), (130, 37))
    )
    out = fa.attention(q, k, v, causal=True, out_dtype=torch.float32)
    want, _ = reference.attention(q, k, v, causal=True)
    assert out.shape == want.shape
    assert relative_rmse(out, want) < 0.037


def test_refusals(cuda_only: None) -> None:
    q, k, v = qkv((1, 64, 2), (1, 64, 2), 128)
    with pytest.raises(NotImplementedError, match="no kernel row .* reads .* with q of"):
        fa.attention(q.float().bfloat16(), k, v)
    with pytest.raises(NotImplementedError, match="has no backward"):
        fa.attention(q.float().to(FP8).requires_grad_(), k, v)
    with pytest.raises(ValueError, match="out_dtype"):
        fa.attention(q, k, v, out_dtype=FP8)


@pytest.mark.parametrize("outliers", [0.0, 1e-3])
def test_quantised_attention_is_as_near_as_the_format_allows(outliers: float) -> None:
    """Against fp64 of what was quantised; docs/numerics.md has the figures."""
    tensors = []
    for n in range(3):
        t = randn(1, 1024, 4, 128, dtype=torch.float32, seed=n)
        t[torch.rand(t.shape, device=DEVICE) < outliers] *= 10
        tensors.append(t)
    right, _ = reference.attention(*tensors)
    for granularity in ("tensor", "head"):
        for hadamard in (False, True):
            x = fa.quantize_qkv(*tensors, granularity, hadamard)
            out, _ = run(x.q, x.k, x.v, **x.options)
            limit = 0.058 if hadamard or not outliers else 0.12
            assert relative_rmse(out, right) < limit, (granularity, hadamard)
