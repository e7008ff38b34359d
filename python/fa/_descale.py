# SPDX-License-Identifier: BSD-3-Clause
# With which factor does a stored e4m3 number become a real one?
"""Descales of q, k and v: per tensor, per batch entry and key head, or per block of rows.

Block n of a sequence holds rows n * block and on. Rows of q count from the first of the sequence,
keys from the start of its place in k, left padding included (docs/numerics.md, "FP8").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Descales:
    """Every factor as [B, heads, blocks]; without blocks heads are key heads, and one block."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    block_q: int
    block_k: int

    @staticmethod
    def of(
        batch: int,
        heads_q: int,
        heads_k: int,
        tensors: tuple[Tensor | None, Tensor | None, Tensor | None],
        block_q: int,
        block_k: int,
    ) -> Descales:
        def expand(t: Tensor | None, heads: int, block: int) -> Tensor | None:
            if t is None:
                return None
            return t.expand(batch, heads, -1) if block else t.expand(batch, heads_k)[:, :, None]

        q, k, v = tensors
        return Descales(
            expand(q, heads_q, block_q),
            expand(k, heads_k, block_k),
            expand(v, heads_k, block_k),
            block_q,
            block_k,
        )


def factors(t: Tensor, block: int, first: int, last: int) -> Tensor:
    """[B, heads, blocks] at rows [first, last): [B, heads, last - first], without blocks 1."""
    if block == 0:
        return t
    return t[..., torch.arange(first, last, device=t.device) // block]
