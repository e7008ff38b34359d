# SPDX-License-Identifier: BSD-3-Clause
# How does a model of transformers keep its keys and values in pages?
"""A cache of transformers whose layers are pools of pages, for models that run fa's attention.

    from fa.integrations.paged_cache import PagedCache
    model.generate(ids, past_key_values=PagedCache(page_size=64))

New keys and values are appended in place by `fa.append_kv`; nothing is concatenated, and a sequence
takes pages only as it grows. What a layer hands to the attention is its pool, [pages, H, page_size,
D], with a note that says which pages are whose (`Pages`); `attention_forward` of
fa.integrations.transformers reads it. An attention that does not know the note cannot take the pool
for keys: there is always a page more than there are sequences.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

import fa
from fa._types import checked
from fa.integrations.transformers import _PAGES

__all__ = ["PagedCache", "PagedLayer", "Pages"]


@dataclasses.dataclass(frozen=True)
class Pages:
    """Where the keys of each sequence lie."""

    table: Tensor  # int32 [B, pages of the longest sequence]
    length: int  # key rows of every sequence, padding included


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer: pools [pages, page_size, H, D], every sequence equally long."""

    is_sliding = False
    is_croppable = True

    @checked()
    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size: {page_size} must be at least 1.")
        super().__init__()
        self.page_size, self.length = page_size, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Pools with the one page that no sequence owns."""
        self.device = key_states.device
        self.keys, self.values = (
            t.new_empty(1, self.page_size, t.shape[1], t.shape[3])
            for t in (key_states, value_states)
        )
        self.table = torch.empty(key_states.shape[0], 0, dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends [B, H, n, D]; returns the pools as [pages, H, page_size, D], with their note.

        Raises NotImplementedError where an input requires a gradient, and on a GPU outside of
        fa.backend("cpu").
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, new, _ = key_states.shape
        self._reserve(self.length + new)
        fa.append_kv(
            *(key_states.transpose(1, 2), value_states.transpose(1, 2), self.keys, self.values),
            cache_seqlens=self.table.new_full((batch,), self.length),
            page_table=self.table,
        )
        self.length += new
        pages = Pages(self.table, self.length)
        pools = self.keys.transpose(1, 2), self.values.transpose(1, 2)
        for pool in pools:
            setattr(pool, _PAGES, pages)
        return pools

    def _reserve(self, length: int) -> None:
        """Pages for every sequence up to `length`; pools at least double when they grow."""
        batch, columns = self.table.shape
        wanted = -(-length // self.page_size)
        if wanted <= columns:
            return
        fresh = torch.arange(columns * batch, wanted * batch, dtype=torch.int32)
        columns_new = fresh.view(wanted - columns, batch).T.to(self.device)
        self.table = torch.cat([self.table, columns_new], dim=1).contiguous()
        if wanted * batch >= len(self.keys):
            self._resize(max(wanted * batch + 1, 2 * len(self.keys)))

    def _resize(self, pages: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            pool = old.new_empty(pages, *old.shape[1:])
            pool[: len(old)] = old
            setattr(self, name, pool)

    def _keep(self, rows: Tensor) -> None:
        """Sequence i becomes a copy of the former sequence rows[i]."""
        if not self.is_initialized:
            return
        table = self.table[rows.to(self.device).long()].long()  # [B, pages]
        order = torch.cat([table.T.flatten(), table.new_zeros(1)])
        self.keys, self.values = self.keys[order], self.values[order]
        ids = torch.arange(table.numel(), dtype=torch.int32, device=self.device)
        self.table = ids.view(table.shape[1], table.shape[0]).T.contiguous()

    @checked()
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search."""
        self._keep(beam_idx)

    @checked()
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices`."""
        self._keep(indices)

    @checked()
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        if self.is_initialized:
            rows = torch.arange(self.table.shape[0])
            self._keep(rows.repeat_interleave(repeats))

    @checked()
    def crop(self, tokens: int) -> None:
        """Forgets the newest -tokens tokens; a positive number is the length to keep."""
        self.length = max(0, self.length + tokens) if tokens < 0 else min(self.length, tokens)

    def reset(self) -> None:
        """Forgets every token; the pages stay."""
        self.length = 0

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(key rows after the next update, 0); older versions pass the positions."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.length + new, 0

    def get_seq_length(self) -> int:
        """Key rows of every sequence so far, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: no limit."""
        return -1


class PagedCache(Cache):
    """Layers come into being as the model asks for them; page_size >= 1 keys a page."""

    @checked()
    def __init__(self, page_size: int = 64) -> None:
        if page_size < 1:
            raise ValueError(f"page_size: {page_size} must be at least 1.")
        super().__init__(layer_class_to_replicate=functools.partial(PagedLayer, page_size))
