# SPDX-License-Identifier: BSD-3-Clause
# In which memory order and which dtype are the results of a call allocated?
"""One rule for strides of outputs and gradients: for fakes, ctypes and the CPU backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of the LSE: fp64 for fp64 inputs, fp32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


lse_dtype = accumulation_dtype


def out_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """In which dtypes `out` can be stored for a q of `dtype`; the first is the default."""
    if dtype == torch.float8_e4m3fn:
        return torch.bfloat16, torch.float16, torch.float32
    return dtype, accumulation_dtype(dtype)


def dimension_order(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions of a tensor from the outermost to the innermost in memory.

    The last dimension (D) is always innermost; the others are sorted by stride, the largest first,
    ties in the given (BSHD) order. A dimension of size <= 1 or of stride 0 (expanded) has no place
    of its own in memory: it stays directly outside of the dimension that follows it in BSHD order.
    So a contiguous tensor of any sizes gives 0, 1, 2, ...
    """
    last = len(sizes) - 1
    keys = list(strides)
    for dim in range(last - 1, -1, -1):
        if sizes[dim] <= 1 or strides[dim] == 0:
            # What follows may be D itself, which every other dimension stays outside of.
            keys[dim] = keys[dim + 1] if dim + 1 < last else 0
    return sorted(range(last), key=lambda dim: -keys[dim]) + [last]


def strides_like_order(t: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dimension order is that of `t`."""
    if len(shape) != t.dim():
        raise ValueError(f"shape has {len(shape)} dimensions, the tensor it follows has {t.dim()}.")
    strides = [0] * t.dim()
    step = 1
    for dim in reversed(dimension_order(t.shape, t.stride())):
        strides[dim] = step
        # An empty dimension counts as one row, as torch does for contiguous tensors.
        step = step * (shape[dim] if shape[dim] != 0 else 1)
    return tuple(strides)


def pad_head_dim(t: torch.Tensor) -> torch.Tensor:
    """A last dim that is no multiple of 8 filled up with zeros: to one of 8, e4m3 to one of 16.

    Kernels need rows of a multiple of 16 bytes.
    """
    if t.shape[-1] % 8 == 0:
        return t
    if t.dtype.itemsize > 1:
        return torch.nn.functional.pad(t, (0, -t.shape[-1] % 8))
    bytes_of = torch.nn.functional.pad(t.view(torch.uint8), (0, -t.shape[-1] % 16))
    return bytes_of.view(t.dtype)


def empty_like_order(
    t: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """An uninitialised dense tensor of `shape`, on t's device, in t's dimension order."""
    return torch.empty_strided(
        tuple(shape), strides_like_order(t, shape), dtype=dtype or t.dtype, device=t.device
    )
