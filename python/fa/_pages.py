# SPDX-License-Identifier: BSD-3-Clause
# In which page, and in which slot of it, does a key of a paged cache lie?
"""Reads and sums through a page table, for the torch implementation.

Key j of row r of the table lies in page table[r, j // page_size], slot j % page_size of a cache
[num_pages, page_size, heads, dim]. Only entries of keys that are asked for are read: whatever the
others hold (-1, a number beyond the cache) does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Pages:
    """A page table int32 [rows, pages] over a cache of num_pages pages of page_size slots."""

    def __init__(self, table: Tensor, cache: Tensor, name: str = "page_table") -> None:
        self._table, self._name = table, name
        self.num_pages, self.page_size = cache.shape[0], cache.shape[1]

    @property
    def capacity(self) -> int:
        """Keys that one row of the table has room for."""
        return self._table.shape[1] * self.page_size

    def places(self, row: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Page and slot (int64 [last - first] each) of keys [first, last) of a row.

        Raises ValueError for a page that the cache does not have.
        """
        keys = torch.arange(first, last, device=self._table.device)
        if first >= last:
            return keys, keys
        column = first // self.page_size
        entries = self._table[row, column : (last - 1) // self.page_size + 1].long()
        wrong = ((entries < 0) | (entries >= self.num_pages)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"{self._name}: entry [{row}, {column + at}] is {int(entries[at])}, and keys of "
                f"this call lie in it; the cache has {self.num_pages} pages. Pass values in "
                f"[0, {self.num_pages - 1}] for every page in use."
            )
        return entries[keys // self.page_size - column], keys % self.page_size

    def read(self, t: Tensor, row: int, first: int, last: int) -> Tensor:
        """A copy [last - first, heads, D] out of t [num_pages, page_size, heads, D]."""
        return t[self.places(row, first, last)]

    def add(self, t: Tensor, row: int, first: int, values: Tensor) -> None:
        """t += values [keys, heads, D] at keys first, first + 1, ...; a page may stand twice."""
        places = self.places(row, first, first + len(values))
        t.index_put_(places, values.to(t.dtype), accumulate=True)
