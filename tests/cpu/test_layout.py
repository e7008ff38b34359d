# SPDX-License-Identifier: BSD-3-Clause
# Do outputs follow the dimension order of the tensor they belong to?

from __future__ import annotations

import itertools

import pytest
import torch

from cases import strides_of
from fa._layout import dimension_order, empty_like_order, lse_dtype, strides_like_order


def view(layout: str, *shape: int) -> torch.Tensor:
    strides = strides_of(layout, shape)
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    return torch.zeros(span).as_strided(shape, strides)


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ("bshd", [0, 1, 2, 3]),
        ("bhsd", [0, 2, 1, 3]),
        ("sbhd", [1, 0, 2, 3]),
        ("alternate", [0, 1, 2, 3]),
        ("padded", [0, 1, 2, 3]),
        ("one_head", [0, 1, 2, 3]),
        ("one_batch", [0, 1, 2, 3]),
        ("scalar", [0, 1, 2, 3]),
    ],
)
def test_order_of_layouts(layout: str, order: list[int]) -> None:
    t = view(layout, 2, 5, 3, 8)
    assert dimension_order(t.shape, t.stride()) == order
    out = empty_like_order(t, (2, 5, 3, 16), torch.float32)
    assert out.permute(order).is_contiguous()
    assert out.stride(-1) == 1


def test_contiguous_stays_contiguous_at_any_size() -> None:
    for shape in itertools.product((0, 1, 2), (0, 1, 3), (1, 2), (1, 8)):
        t = torch.empty(shape)
        assert strides_like_order(t, shape) == t.stride(), shape
    for shape in itertools.product((0, 1, 5), (1, 2), (1, 8)):
        t = torch.empty(shape)
        assert strides_like_order(t, shape) == t.stride(), shape


def test_sizes_of_one_have_no_say() -> None:
    for stride in (0, 1, 7, 10**9):
        t = torch.zeros(8 * 3).as_strided((1, 1, 3, 8), (stride, stride, 8, 1))
        assert strides_like_order(t, (1, 1, 3, 8)) == (24, 24, 8, 1)
    heads_first = torch.empty(1, 3, 5, 8).transpose(1, 2)  # [1, 5, 3, 8]
    assert strides_like_order(heads_first, (1, 5, 3, 4))[1:] == (4, 20, 1)


def test_packed_and_meta() -> None:
    t = torch.empty(4, 10, 8, device="meta").transpose(0, 1)  # [total, heads, D]
    out = empty_like_order(t, (10, 4, 16), torch.bfloat16)
    assert out.stride() == (16, 160, 1) and out.is_meta and out.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="4 dimensions, the tensor it follows has 3"):
        empty_like_order(t, (1, 10, 4, 16))


def test_lse_dtype() -> None:
    assert lse_dtype(torch.bfloat16) == lse_dtype(torch.float16) == torch.float32
    assert lse_dtype(torch.float32) == torch.float32 and lse_dtype(torch.float64) == torch.float64
