# SPDX-License-Identifier: BSD-3-Clause
# Are the faults that attention libraries have had absent here? Right answers stated by hand.
"""Each test is one kind of fault, named by the letter and number that tests/cases.py uses as tags.

The same inputs run against the fp64 reference in test_forward.py; here the right answer follows
from the input alone, so that a fault of the reference cannot hide one of a kernel.
"""

from __future__ import annotations

import math

import harness
import pytest
import torch
from harness import DEVICE, inputs_from, ints, need_memory, randn
from torch import Tensor

import fa
from compare import Result, assert_bitwise

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(params=harness.backends() or ("auto",))
def backend(request: pytest.FixtureRequest) -> str:
    """Every architecture of this build."""
    return request.param


def run(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Result:
    return harness.call_somewhere(inputs_from(q, k, v, **options), backend, lawful=False)


def full(shape: tuple[int, ...], value: float, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a.double() - b.double()).abs().max() <= tolerance)


class TestNoVisibleKey:
    def test_a2_one_token_in_the_last_of_four_sequences(self, backend: str) -> None:
        q, k, v = randn(1, 21, 120), randn(1, 7, 120, seed=1), randn(1, 7, 120, seed=2)
        cu = ints(0, 0, 0, 0, 1)
        got = run(backend, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
        assert torch.equal(got.out, v.repeat_interleave(3, dim=1))
        score = (q.double() * k.repeat_interleave(3, dim=1).double()).sum(-1) / math.sqrt(120)
        assert close(got.lse, score.T, 1e-4)

    @pytest.mark.parametrize("causal", [False, True])
    def test_a5_no_keys_at_all(self, backend: str, causal: bool) -> None:
        empty = randn(2, 0, 4, 64, dtype=FP16)
        got = run(backend, randn(2, 16, 4, 64, dtype=FP16), empty, empty, causal=causal)
        assert not got.out.any()
        assert torch.isneginf(got.lse).all()

    def test_a6_zero_length_keys_in_a_packed_call(self, backend: str) -> None:
        q, k, v = randn(128, 8, 128), randn(64, 8, 128, seed=1), randn(64, 8, 128, seed=2)
        got = run(backend, q, k, v, cu_seqlens_q=ints(0, 64, 128), cu_seqlens_k=ints(0, 0, 64))
        assert not got.out[:64].any()
        assert torch.isneginf(got.lse[:, :64]).all()
        alone = run(backend, q[None, 64:], k[None], v[None])
        assert close(got.out[64:], alone.out[0], 1e-2)

    def test_a9_all_cache_lengths_zero(self, backend: str) -> None:
        cache = randn(16, 64, 1, 128)
        got = run(backend, randn(16, 1, 16, 128), cache, cache, seqused_k=ints(*[0] * 16))
        assert not got.out.any()
        assert torch.isneginf(got.lse).all()

    def test_a11_tails_of_over_allocated_packed_tensors(self, backend: str) -> None:
        q, k, v = (randn(512, 4, 64, seed=n) for n in range(3))
        cu = ints(0, 100, 300)
        clean = run(backend, q[:300], k[:300], v[:300], cu_seqlens_q=cu, cu_seqlens_k=cu)
        for tensor in (q, k, v):
            tensor[300:] = math.nan
        got = run(backend, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
        assert_bitwise("out", got.out[:300].contiguous(), clean.out)
        assert not got.out[300:].any()

    def test_a12_rows_above_the_diagonal(self, backend: str) -> None:
        q, k, v = (randn(1, n, 1, 64, dtype=FP16, seed=n) for n in (4, 2, 2))
        got = run(backend, q, k, v, causal=True)
        assert not got.out[0, :2].any()
        assert torch.isneginf(got.lse[0, 0, :2]).all()
        assert torch.equal(got.out[0, 2], v[0, 0]), "row 2 sees the first key alone"
        assert torch.isfinite(got.lse[0, 0, 2:]).all()

    def test_a14_merging_two_empty_states(self) -> None:
        out, lse = fa.combine(
            full((2, 1, 4, 1, 128), 0.0, torch.float32), full((2, 1, 1, 4), -math.inf).float()
        )
        assert not out.any()
        assert torch.isneginf(lse).all()

    def test_a17_merging_far_apart(self) -> None:
        parts = randn(2, 1, 4, 1, 64, dtype=torch.float32)
        lses = torch.tensor([0.0, 300.0], device=DEVICE).view(2, 1, 1, 1).expand(2, 1, 1, 4)
        out, lse = fa.combine(parts, lses)
        assert torch.equal(out, parts[1])
        assert (lse == 300).all()

    def test_a15_empty_sequences_among_many(self, backend: str) -> None:
        lengths = [500] * 64
        lengths[1] = lengths[10] = 0
        used = ints(*lengths)
        q, k, v = (
            randn(64, 1, 8, 128),
            randn(64, 500, 2, 128, seed=1),
            randn(64, 500, 2, 128, seed=2),
        )
        got = run(backend, q, k, v, seqused_k=used)
        empty = used == 0
        assert torch.isneginf(got.lse[empty]).all()
        assert torch.isfinite(got.lse[~empty]).all()
        plain = run(backend, q, k, v)
        assert close(got.out[~empty], plain.out[~empty], 1e-2)


class TestValues:
    def test_b20_very_unequal_lengths(self, backend: str) -> None:
        q, k, v = (
            randn(256, 1, 32, dtype=FP16),
            randn(3, 1, 32, dtype=FP16),
            randn(3, 1, 32, dtype=FP16, seed=1),
        )
        got = run(
            backend,
            q,
            k,
            v,
            causal=True,
            cu_seqlens_q=ints(0, 76, 110, 256),
            cu_seqlens_k=ints(0, 1, 2, 3),
        )
        want = torch.zeros_like(got.out)
        for row, key in ((75, 0), (109, 1), (255, 2)):
            want[row] = v[key]
        assert torch.equal(got.out, want)

    def test_b23_a_maximum_that_starts_at_zero(self, backend: str) -> None:
        q, k = full((1, 88, 14, 64), 1.0), full((1, 448, 2, 64), -20.0)
        v = randn(1, 448, 2, 64)
        got = run(backend, q, k, v, causal=True)
        means = v.double().cumsum(1) / torch.arange(1, 449, device=DEVICE).view(1, -1, 1, 1)
        assert close(got.out, means[:, 360:].repeat_interleave(7, dim=2), 4e-3)

    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_b24_scores_below_a_finite_minus_infinity(
        self, backend: str, dtype: torch.dtype
    ) -> None:
        q, k = full((1, 1, 1, 128), 64.0, dtype), full((1, 1, 1, 128), -64.0, dtype)
        v = randn(1, 1, 1, 128, dtype=dtype)
        got = run(backend, q, k, v, softmax_scale=1.0)
        assert torch.equal(got.out, v)
        assert close(got.lse, torch.tensor(-524288.0, device=DEVICE), 0.5)

    def test_b26_strongly_negative_lse(self, backend: str) -> None:
        v = randn(1, 128, 2, 64)
        got = run(backend, full((1, 1, 2, 64), 10.0), full((1, 128, 2, 64), -10.0), v)
        assert close(got.out[:, 0], v.double().mean(1), 2e-3)
        assert close(got.lse, torch.tensor(-800 + math.log(128), device=DEVICE), 1e-3)

    def test_b27_large_logits(self, backend: str) -> None:
        q, k, v = (randn(2, 512, 8, 128, seed=n) * 20 for n in range(3))
        got = run(backend, q, k, v, causal=True)
        assert torch.isfinite(got.out).all()
        assert torch.equal(got.out[:, 0], v[:, 0])

    @pytest.mark.parametrize("hide", ["window", "seqused"])
    def test_b29_nan_in_a_hidden_key(self, backend: str, hide: str) -> None:
        q, k, v = (randn(1, n, 1, 64, seed=n) for n in (32, 64, 64))
        if hide == "window":  # row 0 stands at 32 and sees keys 27 to 32
            clean = run(backend, q, k, v, causal=True, window_left=5)
            k[:, :27] = v[:, :27] = math.nan
            got = run(backend, q, k, v, causal=True, window_left=5)
        else:
            clean = run(backend, q, k[:, :63].contiguous(), v[:, :63].contiguous())
            k[:, 63] = v[:, 63] = math.nan
            got = run(backend, q, k, v, seqused_k=ints(63))
        assert torch.isfinite(got.out).all()
        assert close(got.out, clean.out, 1e-2)

    @pytest.mark.parametrize(("dtype", "value"), [(FP16, 100.0), (BF16, 1000.0)])
    def test_b30_constant_very_large_inputs(
        self, backend: str, dtype: torch.dtype, value: float
    ) -> None:
        q = full((1, 50, 1, 64), value, dtype)
        v = randn(1, 50, 1, 64, dtype=dtype)
        got = run(backend, q, q.clone(), v)
        assert close(got.out, v.double().mean(1, keepdim=True).expand(-1, 50, -1, -1), 4e-3)


class TestBytesPastTheEnd:
    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_c32_tail_of_the_last_key_tile(self, backend: str, poison: float) -> None:
        q, k, v = (randn(1, n, 2, 128, seed=n) for n in (64, 128, 128))
        alone = run(backend, q, k[:, :65].contiguous(), v[:, :65].contiguous())
        k[:, 65:] = v[:, 65:] = poison
        got = run(backend, q, k, v, seqused_k=ints(65))
        assert close(got.out, alone.out, 1e-2)

    def test_c33_nan_in_cache_padding(self, backend: str) -> None:
        q, k, v = (
            full((2, 1, 1, 64), 0.5, FP16),
            randn(2, 3, 1, 64, dtype=FP16),
            randn(2, 3, 1, 64, dtype=FP16),
        )
        k[0, 1:] = v[0, 1:] = math.nan
        got = run(backend, q, k, v, seqused_k=ints(1, 3))
        assert torch.equal(got.out[0, 0], v[0, 0])
        assert torch.isfinite(got.out).all()

    def test_c38_packed_tiles_over_nan_memory(self, backend: str) -> None:
        harness.fill_free_memory(0.1)
        q, k, v = (randn(385, 4, 128, seed=n) for n in range(3))
        cu = ints(0, 129, 384, 385)
        got = run(backend, q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
        for begin, end in ((0, 129), (129, 384), (384, 385)):
            part = [t[None, begin:end].contiguous() for t in (q, k, v)]
            assert close(got.out[begin:end], run(backend, *part, causal=True).out[0], 1e-2)

    def test_c42_one_key_past_a_tile(self, backend: str) -> None:
        q, k, v = randn(1, 1, 1, 32), randn(1, 257, 1, 32, seed=1), randn(1, 257, 1, 32, seed=2)
        first = run(backend, q, k, v)
        k[:, 256], v[:, 256] = 40 * q[:, 0], 7.0  # now the last key outweighs all others
        last = run(backend, q, k, v)
        assert close(last.out, full((1, 1, 1, 32), 7.0), 1e-2)
        assert not close(first.out, last.out, 1.0)


class TestMasks:
    def test_d44_window_beyond_the_keys(self, backend: str) -> None:
        q, k, v = randn(1, 129, 2, 64), randn(1, 64, 2, 64, seed=1), randn(1, 64, 2, 64, seed=2)
        got = run(backend, q, k, v, window_left=32, window_right=64)
        # Row i stands at i - 65 and sees keys up to i - 1, from i - 97 on.
        assert not got.out[:, 0].any()
        assert torch.equal(got.out[:, 1], v[:, 0])
        assert torch.isneginf(got.lse[:, :, 0]).all()
        assert torch.isfinite(got.lse[:, :, 1:]).all()

    def test_d45_limits_are_not_lengths(self, backend: str) -> None:
        q, k = full((1, 256, 1, 64), 0.5, FP16), full((1, 64, 1, 64), 0.5, FP16)
        v = torch.arange(64, device=DEVICE, dtype=FP16).view(1, 64, 1, 1).expand(1, 64, 1, 64)
        v = v.contiguous()
        position = torch.arange(256, device=DEVICE) - 192
        for left, right in ((60, -1), (60, 2**31 - 1), (-1, 100)):
            got = run(backend, q, k, v, window_left=left, window_right=right)
            low = (position - left).clamp(0, 64) if left >= 0 else torch.zeros_like(position)
            high = (
                (position + right).clamp(-1, 63)
                if 0 <= right < 1000
                else torch.full_like(position, 63)
            )
            mean = torch.where(high >= low, (low + high) / 2, 0)
            assert close(got.out[0, :, 0, 0], mean, 0.05), (left, right)

    def test_d47_only_minus_one_is_unlimited(self) -> None:
        q = randn(1, 64, 1, 64, dtype=FP16)
        for options in (
            {"causal": True, "window_right": -3},
            {"window_left": 2, "window_right": -5},
        ):
            with pytest.raises(ValueError, match=r"-3|-5"):
                torch.ops.fa.forward(q, q, q, **options)

    def test_d48_minus_one_in_one_direction(self, backend: str) -> None:
        q, k, v = (randn(1, 128, 2, 64, seed=n) for n in range(3))
        causal = run(backend, q, k, v, causal=True)
        assert_bitwise("out", run(backend, q, k, v, window_right=0).out, causal.out)
        right = run(backend, q, k, v, window_left=5)
        last = run(backend, q[:, -1:], k[:, -6:].contiguous(), v[:, -6:].contiguous())
        assert close(right.out[:, -1], last.out[:, 0], 1e-2)
        whole = run(backend, q[:, :1], k, v)
        assert close(right.out[:, 0], whole.out[:, 0], 1e-2)

    @pytest.mark.parametrize("rows", [1, 5])
    def test_d51_window_with_groups_and_few_queries(self, backend: str, rows: int) -> None:
        q, k, v = (
            randn(1, rows, 32, 128),
            randn(1, 5000, 8, 128, seed=1),
            randn(1, 5000, 8, 128, seed=2),
        )
        got = run(backend, q, k, v, window_left=1023, window_right=0)
        begin = 5000 - 1 - 1023
        last = run(backend, q[:, -1:], k[:, begin:].contiguous(), v[:, begin:].contiguous())
        assert close(got.out[:, -1], last.out[:, 0], 1e-2)

    def test_d53_first_rows_of_a_left_window(self, backend: str) -> None:
        q, k = full((1, 300, 8, 128), 0.25), full((1, 4096, 2, 128), 0.25)
        v = (torch.arange(4096, device=DEVICE) >= 3796 - 333).to(BF16)
        v = v.view(1, 4096, 1, 1).expand(1, 4096, 2, 128).contiguous()
        got = run(backend, q, k, v, window_left=333)
        assert close(got.out, full((1, 300, 8, 128), 1.0), 1e-2), (
            "keys left of the window were seen"
        )

    def test_d56_long_causal_is_not_zero(self, backend: str) -> None:
        q, k, v = (randn(2, 1024, 8, 128, seed=n) for n in range(3))
        got = run(backend, q, k, v, causal=True)
        assert (got.out != 0).float().mean() > 0.99
        assert torch.equal(got.out[:, 0], v[:, 0])

    def test_d62_bottom_right(self, backend: str) -> None:
        q, k = full((1, 4, 1, 64), 1.0, FP16), full((1, 8, 1, 64), 1.0, FP16)
        v = torch.eye(8, 64, device=DEVICE, dtype=FP16).view(1, 8, 1, 64)
        got = run(backend, q, k, v, causal=True).out[0, :, 0, :8]
        for row in range(4):
            seen = 5 + row
            want = torch.where(torch.arange(8, device=DEVICE) < seen, 1 / seen, 0.0)
            assert close(got[row], want, 1e-3)


class TestSizes:
    @pytest.mark.alone
    def test_g102_large_flattened_batch(self, backend: str) -> None:
        need_memory(14)
        q, k, v = (randn(1600, 729, 16, 72, seed=n) for n in range(3))
        got = harness.call(inputs_from(q, k, v), backend)
        last = [t[-10:].contiguous() for t in (q, k, v)]
        harness.check_tensors(backend, *last)
        assert_bitwise("out", got.out[-10:], harness.call(inputs_from(*last), backend).out)

    @pytest.mark.alone
    def test_g107_lengths_that_overflow_16_bits(self, backend: str) -> None:
        need_memory(6)
        q, k, v = (randn(1, 33_728, 1, 128, dtype=FP16, seed=n) for n in range(3))
        got = harness.call(inputs_from(q, k, v, causal=True), backend)
        assert torch.isfinite(got.out).all()
        tail = harness.check_tensors(backend, q[:, -200:].contiguous(), k, v, causal=True)
        assert close(got.out[:, -200:], tail.out, 1e-3)

    def test_h116_heads_that_do_not_divide(self) -> None:
        q, k = randn(1, 8, 10, 64), randn(1, 8, 4, 64)
        with pytest.raises(ValueError, match=r"(?s)10.*4|4.*10"):
            torch.ops.fa.forward(q, k, k)
