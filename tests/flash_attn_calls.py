# SPDX-License-Identifier: BSD-3-Clause
# What do the tests of the two flash-attn modules share?

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_(grad)


def close(got: Tensor, want: Tensor, limit: float = 1e-10) -> None:
    assert got.shape == want.shape
    got, want = got.detach(), want.detach()
    finite = torch.isfinite(want)
    assert torch.equal(torch.isfinite(got), finite)
    assert float((got - want)[finite].abs().max()) < limit


def tables(d: int, positions: int = 64) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions)[:, None] / 100.0 ** (torch.arange(d // 2) * 2 / d)
    return angle.cos(), angle.sin()


def written(function: Any) -> str:
    """A signature without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    return str(shown)[1:-1]
