# SPDX-License-Identifier: BSD-3-Clause
# How does a dense cache look as pages in any order, with nothing readable in between?

from __future__ import annotations

import math

import torch
from torch import Tensor


def to_pages(
    tensors: list[Tensor],
    page_size: int,
    generator: torch.Generator,
    *,
    spare: int = 3,
    poison: float = math.nan,
    unused: int = -1,
    used: list[int] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """([num_pages, page_size, H, D] of each tensor, page_table int32 [rows, pages]).

    tensors [rows, S, H, D] are the caches. Pages stand in a drawn order among `spare` ones that no
    row owns; spare pages, and slots beyond S or beyond `used` keys of a row, hold `poison`; entries
    of the table beyond a row's keys hold `unused`.
    """
    rows, length = tensors[0].shape[:2]
    per_row = -(-length // page_size)
    order = torch.randperm(rows * per_row + spare, generator=generator)
    table = order[: rows * per_row].int().view(rows, per_row).clone()
    pools = []
    for t in tensors:
        wide = torch.full((rows, per_row * page_size, *t.shape[2:]), poison).to(t)
        wide[:, :length] = t
        pool = torch.full((len(order), page_size, *t.shape[2:]), poison).to(t)
        for row in range(rows):
            if used is not None:
                wide[row, used[row] :] = torch.full((), poison).to(t)
            pool[table[row].long()] = wide[row].unflatten(0, (per_row, page_size))
        pools.append(pool)
    if used is not None:
        for row, count in enumerate(used):
            table[row, -(-count // page_size) :] = unused
    return pools, table


def from_pages(pool: Tensor, table: Tensor, length: int) -> Tensor:
    """[rows, length, H, D] out of pages; 0 where the table has no page."""
    safe = table.clamp(0, pool.shape[0] - 1).long()
    dense = pool[safe].flatten(1, 2)[:, :length].clone()
    missing = (table < 0) | (table >= pool.shape[0])
    dense[missing.repeat_interleave(pool.shape[1], dim=1)[:, :length]] = 0
    return dense
