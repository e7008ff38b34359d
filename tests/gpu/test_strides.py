# SPDX-License-Identifier: BSD-3-Clause
# Does a call read and write the right addresses, whatever the strides and the sizes?

from __future__ import annotations

import math

import harness
import pytest
import torch
from harness import DEVICE, check_tensors, inputs_from, need_memory, randn
from torch import Tensor

import fa
from cases import Guarded
from compare import Result, assert_bitwise, assert_result, expected


def contiguous_twin(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: object) -> None:
    """A view must give the bits of its contiguous copy, and both the right answer."""
    view = check_tensors(backend, q, k, v, **options)
    twin = harness.call_guarded(
        inputs_from(q.contiguous(), k.contiguous(), v.contiguous(), **options), backend
    )
    assert_bitwise("out", view.out, twin.out)
    assert_bitwise("lse", view.lse, twin.lse)


@harness.each_backend()
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
class TestViews:
    def test_bhsd_memory(self, backend: str, dim: int, causal: bool) -> None:
        q, k, v = (randn(2, 4, n, dim, seed=n).transpose(1, 2) for n in (130, 200, 200))
        contiguous_twin(backend, q, k, v, causal=causal)

    def test_slices_of_one_qkv(self, backend: str, dim: int, causal: bool) -> None:
        q, k, v = randn(2, 190, 3, 4, dim).unbind(2)
        contiguous_twin(backend, q, k, v, causal=causal)

    def test_k_and_v_laid_out_differently(self, backend: str, dim: int, causal: bool) -> None:
        q = randn(2, 100, 4, dim)
        k = randn(2, 400, 2, dim)[:, ::2]  # every second row
        v = randn(2, 2, 200, dim).transpose(1, 2)
        contiguous_twin(backend, q, k, v, causal=causal)

    def test_expanded_heads_and_batch(self, backend: str, dim: int, causal: bool) -> None:
        q = randn(3, 100, 4, dim)
        k = randn(3, 257, 1, dim).expand(3, 257, 4, dim)
        v = randn(1, 257, 4, dim).expand(3, 257, 4, dim)
        contiguous_twin(backend, q, k, v, causal=causal)

    def test_expanded_query(self, backend: str, dim: int, causal: bool) -> None:
        q = randn(1, 70, 1, dim).expand(2, 70, 4, dim)
        k, v = randn(2, 90, 4, dim), randn(2, 90, 4, dim, seed=1)
        contiguous_twin(backend, q, k, v, causal=causal)

    def test_every_row_the_same(self, backend: str, dim: int, causal: bool) -> None:
        """Row stride 0 in K and V: every key has the same weight."""
        q = randn(1, 70, 2, dim)
        k, v = (randn(1, 1, 2, dim, seed=n).expand(1, 150, 2, dim) for n in (1, 2))
        contiguous_twin(backend, q, k, v, causal=causal)

    def test_heads_outermost(self, backend: str, dim: int, causal: bool) -> None:
        """[H, B, S, D] memory and a head dim cut out of a wider one."""
        q, k, v = (
            randn(4, 2, n, dim + 64, seed=n).permute(1, 2, 0, 3)[..., 32 : 32 + dim]
            for n in (65, 129, 129)
        )
        contiguous_twin(backend, q, k, v, causal=causal)

    def test_head_dims_between(self, backend: str, dim: int, causal: bool) -> None:
        """Columns beyond the head dim belong to the neighbour, which is NaN here."""
        wide = torch.full((2, 150, 3, dim), math.nan, dtype=torch.bfloat16, device=DEVICE)
        wide[..., : dim - 24] = randn(2, 150, 3, dim - 24)
        q, k, v = (wide.clone()[..., : dim - 24] for _ in range(3))
        contiguous_twin(backend, q, k, v, causal=causal)


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_output_follows_the_order_of_q(order: str) -> None:
    q = randn(2, 60, 4, 64) if order == "bshd" else randn(2, 4, 60, 64).transpose(1, 2)
    k, v = randn(2, 70, 4, 64), randn(2, 70, 4, 128)
    out = fa.attention(q, k, v)
    want = (60 * 4 * 128, 4 * 128, 128, 1) if order == "bshd" else (4 * 60 * 128, 128, 60 * 128, 1)
    assert out.stride() == want
    same = fa.attention(q.contiguous(), k, v)
    assert torch.equal(out, same)


@harness.each_backend()
def test_output_with_gaps(backend: str) -> None:
    """forward_out into a strided view: only the view's elements are written."""
    q, k, v = (randn(2, 140, 4, 64, seed=n) for n in range(3))
    out = Guarded((2, 140, 4, 64), torch.bfloat16, DEVICE, strides=(140 * 1000, 1000, 96, 1))
    lse = Guarded((2, 4, 140), torch.float32, DEVICE)
    with fa.backend(backend):
        torch.ops.fa.forward_out(q, k, v, causal=True, out=out.tensor, lse=lse.tensor)
    out.check("out")
    lse.check("lse")
    inputs = inputs_from(q, k, v, causal=True)
    twin = harness.call_guarded(inputs, backend)
    assert_bitwise("out", out.tensor.contiguous(), twin.out)
    assert_bitwise("lse", lse.tensor, twin.lse)


# --- sizes beyond 32 bits -----------------------------------------------------------------------


@pytest.mark.alone
@harness.each_backend()
def test_batch_stride_beyond_32_bits(backend: str) -> None:
    need_memory(22)
    stride = 2**31 + 512  # elements
    buffer = torch.full((stride + 300 * 4 * 64,), math.nan, dtype=torch.bfloat16, device=DEVICE)
    views = []
    for n, length in enumerate((300, 200, 200)):
        view = buffer.clone() if n == 0 else torch.empty_like(buffer)
        view = view.as_strided((2, length, 4, 64), (stride, 4 * 64, 64, 1))
        view.copy_(randn(2, length, 4, 64, seed=n))
        views.append(view)
    contiguous_twin(backend, *views, causal=True)


@pytest.mark.alone
@harness.each_backend()
def test_row_stride_beyond_32_bits_in_sum(backend: str) -> None:
    """300 rows, each 2^23 elements after the last: the last one starts beyond 2^31."""
    need_memory(12)
    step = 2**23
    buffer = torch.empty(300 * step, dtype=torch.bfloat16, device=DEVICE)
    k = buffer.as_strided((1, 300, 2, 64), (0, step, 64, 1))
    k.copy_(randn(1, 300, 2, 64, seed=1))
    v = buffer[4096:].as_strided((1, 300, 2, 64), (0, step, 64, 1))
    v.copy_(randn(1, 300, 2, 64, seed=2))
    contiguous_twin(backend, randn(1, 200, 2, 64), k, v)


@pytest.mark.alone
@harness.each_backend()
def test_more_than_2_31_elements(backend: str) -> None:
    need_memory(24)
    batch, rows, heads, dim = 1026, 1024, 16, 128  # 2.15e9 elements each
    q, k, v = (randn(batch, rows, heads, dim, seed=n) for n in range(3))
    with fa.backend(backend):
        out = fa.attention(q, k, v, causal=True)
    last = [t[-2:].clone() for t in (q, k, v)]
    inputs = inputs_from(*last, causal=True)
    result = harness.call(inputs, backend)
    assert_result(result, expected(inputs, backward=False))
    assert_bitwise("out of the last batch entries", out[-2:], result.out)


@pytest.mark.alone
def test_packed_beyond_2_31_elements() -> None:
    need_memory(26)
    count, length, heads, dim = 600, 1000, 32, 128  # 2.46e9 elements each
    q, k, v = (randn(count * length, heads, dim, seed=n) for n in range(3))
    cu = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * length
    out, lse = torch.ops.fa.forward(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    last = [t[-length:].clone().unsqueeze(0) for t in (q, k, v)]
    inputs = inputs_from(*last, causal=True)
    part = Result(out[-length:].unsqueeze(0), lse[:, -length:].unsqueeze(0))
    assert_result(part, expected(inputs, backward=False))


@pytest.mark.alone
def test_quarter_million_rows() -> None:
    """262 145 rows of one head: the last ones against the reference."""
    need_memory(8)
    n, tail = 2**18 + 1, 64
    q, k, v = (randn(1, n, 1, 128, seed=s) for s in range(3))
    out, lse = torch.ops.fa.forward(q, k, v, causal=True)
    inputs = inputs_from(q[:, -tail:], k, v, causal=True)
    assert_result(Result(out[:, -tail:], lse[:, :, -tail:]), expected(inputs, backward=False))


@pytest.mark.alone
def test_large_batch_of_short_sequences() -> None:
    """More batch entries times heads than grid dimensions y and z can count."""
    need_memory(4)
    q, k, v = (randn(35_000, 2, 2, 64, seed=n) for n in range(3))
    harness.check_tensors("auto", q[:1], k[:1], v[:1], causal=True)
    out, lse = torch.ops.fa.forward(q, k, v, causal=True)
    assert torch.equal(out[:, 0], v[:, 0]), "the first row sees one key"
    last = harness.call(inputs_from(q[-3:], k[-3:], v[-3:], causal=True), "auto")
    assert_bitwise("out", out[-3:], last.out)
    assert_bitwise("lse", lse[-3:], last.lse)
