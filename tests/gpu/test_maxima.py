# SPDX-License-Identifier: BSD-3-Clause
# Do rows survive maxima that grow late, in few of their neighbours, or against the order of keys?
"""Kernels may keep an old maximum while a row's scores exceed it by little (docs/numerics.md).

These inputs make them take over new ones: in every block, in one row of sixteen, in the last block.
"""

from __future__ import annotations

import harness
import pytest
import torch
from harness import DEVICE, randn
from torch import Tensor

from compare import assert_bitwise

QUERIES, KEYS = 300, 700
DTYPES = (torch.bfloat16, torch.float16)


def tensors(dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, S, 2, D], normal, with two columns of q and k at 0 for the test to fill."""
    q = randn(1, QUERIES, 2, dim, dtype=dtype, seed=1)
    k, v = (randn(1, KEYS, 2, dim, dtype=dtype, seed=s) for s in (2, 3))
    q[..., :2] = 0
    k[..., :2] = 0
    return q, k, v


def ramp(shape: str) -> Tensor:
    """What each key adds to its scores, in units of log2 e; blocks have 64 to 256 keys."""
    position = torch.arange(KEYS, device=DEVICE, dtype=torch.float32)
    if shape == "rising":
        return position * 0.1
    if shape == "falling":
        return (KEYS - 1 - position) * 0.1
    if shape == "negative":
        return position * 0.1 - 200
    if shape == "turning":  # negative in the blocks that a tile begins with
        return (KEYS - 1 - position) * 0.3 - 50
    return 40.0 * (position == {"first": 3, "last": KEYS - 2}[shape])


@harness.each_backend()
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("shape", ("rising", "falling", "first", "last", "negative", "turning"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_maxima_that_grow(
    dim: int, dtype: torch.dtype, shape: str, causal: bool, backend: str
) -> None:
    """Every row meets the ramp."""
    q, k, v = tensors(dim, dtype)
    q[..., 0] = 4
    k[..., 0] = (ramp(shape) * dim**0.5 / 4)[:, None]
    harness.check_tensors(backend, q, k, v, window_right=0 if causal else -1)


@harness.each_backend()
@pytest.mark.parametrize("shape", ("rising", "falling", "first", "negative", "turning"))
@pytest.mark.parametrize("dim", (64, 128))
def test_one_row_of_sixteen(dim: int, shape: str, backend: str) -> None:
    """The rows between must not be touched by what their neighbours take over."""
    q, k, v = tensors(dim, torch.bfloat16)
    q[:, ::16, :, 0] = 4
    k[..., 0] = (ramp(shape) * dim**0.5 / 4)[:, None]
    harness.check_tensors(backend, q, k, v)


@pytest.mark.parametrize("shape", ("falling", "negative", "turning"))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (64, 128))
def test_a_row_alone(dim: int, dtype: torch.dtype, causal: bool, shape: str) -> None:
    """Bits of a row do not depend on the maxima of the rows beside it, nor on their signs."""
    backend = "sm90" if "sm90" in harness.backends() else harness.backends()[0]
    q, k, v = tensors(dim, dtype)
    k[..., 0] = (ramp(shape) * dim**0.5 / 4)[:, None]
    wild = q.clone()
    wild[..., 0] = 4
    kept = [0, 5, 64, 77, 130, 191, 255, QUERIES - 1]
    wild[:, kept] = q[:, kept]
    calm, other = (
        harness.call(harness.inputs_from(x, k, v, window_right=0 if causal else -1), backend)
        for x in (q, wild)
    )
    assert_bitwise("out", calm.out[:, kept], other.out[:, kept])
    assert_bitwise("lse", calm.lse[..., kept], other.lse[..., kept])
