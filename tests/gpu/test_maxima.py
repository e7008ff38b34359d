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

import libfa
from compare import assert_bitwise, assert_result, expected

QUERIES, KEYS = 300, 700
DTYPES = (torch.bfloat16, torch.float16)


def tensors(dim: int, dtype: torch.dtype, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, S, heads, D], k and v [1, S, 2, D], normal; two columns of q and k are 0, to fill."""
    q = randn(1, QUERIES, heads, dim, dtype=dtype, seed=1)
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
@pytest.mark.parametrize("dim", (64, 96, 128, 256))
def test_maxima_that_grow(
    dim: int, dtype: torch.dtype, shape: str, causal: bool, backend: str
) -> None:
    """Every row meets the ramp."""
    q, k, v = tensors(dim, dtype)
    q[..., 0] = 4
    k[..., 0] = (ramp(shape) * dim**0.5 / 4)[:, None]
    harness.check_tensors(backend, q, k, v, window_right=0 if causal else -1)


@harness.each_backend()
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("shape", ("rising", "falling", "first", "last", "negative", "turning"))
@pytest.mark.parametrize("parts", (2, 3, 7))
@pytest.mark.parametrize("dim", (64, 96, 128, 256))
def test_maxima_in_parts(dim: int, parts: int, shape: str, causal: bool, backend: str) -> None:
    """Split keys; on Hopper by rows that pack query heads."""
    need_parts(backend)
    q, k, v = tensors(dim, DTYPES[parts % 2], heads=8)
    q[..., 0] = 4
    k[..., 0] = (ramp(shape) * dim**0.5 / 4)[:, None]
    inputs = harness.inputs_from(q, k, v, window_right=0 if causal else -1)
    result = harness.call_guarded(inputs, backend, num_splits=parts)
    assert_result(result, expected(inputs, backward=False))


def need_parts(backend: str) -> None:
    """Skips where no Hopper row splits keys."""
    packing = (libfa.packs_heads(row) and row.backend == backend for row in harness.rows())
    if backend == "sm90" and not any(packing):
        pytest.skip("this build holds no Hopper row that splits the keys")


@harness.each_backend()
@pytest.mark.parametrize("shape", ("rising", "falling", "first", "negative", "turning"))
@pytest.mark.parametrize("dim", (64, 96, 128))
def test_one_row_of_sixteen(dim: int, shape: str, backend: str) -> None:
    """The rows between must not be touched by what their neighbours take over."""
    q, k, v = tensors(dim, torch.bfloat16)
    q[:, ::16, :, 0] = 4
    k[..., 0] = (ramp(shape) * dim**0.5 / 4)[:, None]
    harness.check_tensors(backend, q, k, v)


@pytest.mark.parametrize("shape", ("falling", "negative", "turning"))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", (1, 2))
@pytest.mark.parametrize("dim", (64, 96, 128))
def test_a_row_alone(dim: int, parts: int, dtype: torch.dtype, causal: bool, shape: str) -> None:
    """Bits of a row do not depend on the maxima of the rows beside it, nor on their signs."""
    backend = "sm90" if "sm90" in harness.backends() else harness.backends()[0]
    if parts > 1:
        need_parts(backend)
    q, k, v = tensors(dim, dtype, heads=8 if parts > 1 else 2)
    k[..., 0] = (ramp(shape) * dim**0.5 / 4)[:, None]
    wild = q.clone()
    wild[..., 0] = 4
    kept = [0, 5, 64, 77, 130, 191, 255, QUERIES - 1]
    wild[:, kept] = q[:, kept]
    calm, other = (
        harness.call(
            harness.inputs_from(x, k, v, window_right=0 if causal else -1),
            backend,
            num_splits=parts,
        )
        for x in (q, wild)
    )
    assert_bitwise("out", calm.out[:, kept], other.out[:, kept])
    assert_bitwise("lse", calm.lse[..., kept], other.lse[..., kept])
