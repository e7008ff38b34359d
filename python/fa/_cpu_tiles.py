# SPDX-License-Identifier: BSD-3-Clause
# Which rows and keys does one tile of the CPU backend take, and how are heads folded for matmul?
"""Problem -> Part (sequences and heads that share one shape) -> tiles of rows and keys.

A key is visible to a row iff first_key(row) <= key <= last_key(row). Both bounds grow with the row,
so the keys that a tile of rows sees are one interval, and so are the rows that see any key. Tiles
are cut to these intervals exactly: what lies outside is never read.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fa._descale import Descales, factors
from fa._layout import accumulation_dtype
from fa._pages import Pages
from fa._philox import dropped, keep_probability

TILE_M = 256
TILE_N = 512
# Scores of one tile over all its batch entries and heads: 4 MB in fp32, which stays in cache.
TILE_SCORES = 1 << 20


@dataclass(frozen=True)
class Options:
    """What happens to a score; windows with causal folded in."""

    scale: float
    softcap: float
    left: int
    right: int
    chunk: int
    slopes: Tensor | None  # [Hq] or [B, Hq]
    sinks: Tensor | None  # [Hq]
    dropout_p: float = 0.0
    seed_offset: tuple[int, ...] = ()

    @property
    def kept_scale(self) -> float:
        """What a weight that dropout keeps is multiplied by."""
        keep = keep_probability(self.dropout_p)
        return 1.0 / keep if keep > 0 else 0.0

    @staticmethod
    def of(
        q: Tensor,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        softmax_scale: float | None,
        causal: bool,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        softcap: float,
        dropout_p: float = 0.0,
        philox_seed_offset: Tensor | None = None,
    ) -> Options:
        return Options(
            scale=1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale,
            softcap=softcap,
            left=window_left,
            right=0 if causal else window_right,
            chunk=attention_chunk,
            slopes=alibi_slopes,
            sinks=sinks,
            dropout_p=dropout_p,
            seed_offset=() if philox_seed_offset is None else tuple(philox_seed_offset.tolist()),
        )


class Problem:
    """One call: where each sequence lies, and how the work is cut."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        leftpad_k: Tensor | None,
        kv_batch_idx: Tensor | None,
        options: Options,
        page_table: Tensor | None = None,
        descales: Descales | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.options, self.descales = options, descales
        self._alone = batch_invariant  # no product takes more than one batch entry
        self.pages = None if page_table is None else Pages(page_table, k)
        self.acc, self.device = accumulation_dtype(q.dtype), q.device
        self.packed_q, self.packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
        self.heads_q, self.heads_k = q.shape[-2], k.shape[-2]
        batch = cu_seqlens_q.numel() - 1 if cu_seqlens_q is not None else q.shape[0]
        self.lse_shape = (
            (self.heads_q, q.shape[0]) if self.packed_q else (batch, self.heads_q, q.shape[1])
        )
        q_begin, q_len = _extents(cu_seqlens_q, seqused_q, batch, q.shape[-3])
        room_k = k.shape[-3] if self.pages is None else self.pages.capacity
        k_begin, k_used = _extents(cu_seqlens_k, seqused_k, batch, room_k)
        self.pads = pads = leftpad_k.tolist() if leftpad_k is not None else [0] * batch
        kv_rows = kv_batch_idx.tolist() if kv_batch_idx is not None else list(range(batch))
        # [q row, q_begin, q_len, k row, k_begin, k_len] of every sequence
        self.sequences = [
            (b, q_begin[b], q_len[b], kv_rows[b], k_begin[b] + pads[b], max(0, k_used[b] - pads[b]))
            for b in range(batch)
        ]

    def parts(self) -> Iterator[Part]:
        """Runs of batch entries of one shape, cut so that a tile's scores fit TILE_SCORES."""
        group = self.heads_q // self.heads_k
        first = 0
        while first < len(self.sequences):
            count = self._equal_run(first)
            _, _, q_len, _, _, k_len = self.sequences[first]
            scores = max(1, group * min(TILE_M, q_len) * min(TILE_N, k_len))
            heads = min(self.heads_k, max(1, TILE_SCORES // scores))
            step = max(1, TILE_SCORES // (scores * heads)) if heads == self.heads_k else 1
            for b in range(first, first + count, step):
                size = min(step, first + count - b)
                for head in range(0, self.heads_k, heads):
                    yield Part(self, b, size, head, min(heads, self.heads_k - head))
            first += count

    def _equal_run(self, first: int) -> int:
        """How many batch entries from `first` on can be one slice of dense q and dense k."""
        if self._alone or self.packed_q or self.packed_k or self.pages is not None:
            return 1
        count, head = 1, self.sequences[first]
        while first + count < len(self.sequences):
            row = self.sequences[first + count]
            if row[1:3] != head[1:3] or row[4:] != head[4:] or row[3] != head[3] + count:
                break
            count += 1
        return count


class Part:
    """`size` batch entries of equal lengths and `heads` key/value heads with their query heads."""

    def __init__(self, problem: Problem, batch: int, size: int, head: int, heads: int) -> None:
        self.options, self.acc, self._device = problem.options, problem.acc, problem.device
        self._packed_q, self._packed_k = problem.packed_q, problem.packed_k
        self._pages, self._descales = problem.pages, problem.descales
        self._pad = problem.pads[batch]
        self._b, self._q0, self.q_len, self._kb, self._k0, self.k_len = problem.sequences[batch]
        self._size, self.heads = size, heads
        self.group, self._all_heads = problem.heads_q // problem.heads_k, problem.heads_q
        self._heads_k = slice(head, head + heads)
        self._heads_q = slice(head * self.group, (head + heads) * self.group)
        self._offset = self.k_len - self.q_len  # row i stands at position i + offset of the keys
        self._hidden: tuple[tuple[int, ...], Tensor | None] | None = None

    # ---- the band ----

    def first_key(self, row: int) -> int:
        """May lie beyond the last key of the sequence; never below 0."""
        position, key = row + self._offset, 0
        if self.options.left >= 0:
            key = max(key, position - self.options.left)
        if self.options.chunk > 0:
            key = max(key, position // self.options.chunk * self.options.chunk)
        return key

    def last_key(self, row: int) -> int:
        """May lie below 0; never beyond the last key of the sequence."""
        position, key = row + self._offset, self.k_len - 1
        if self.options.right >= 0:
            key = min(key, position + self.options.right)
        if self.options.chunk > 0:
            key = min(key, (position // self.options.chunk + 1) * self.options.chunk - 1)
        return key

    def row_tiles(self) -> Iterator[tuple[int, int]]:
        """Tiles of the rows that see at least one key."""
        rows = range(self.q_len)
        begin = bisect_left(rows, 0, key=self.last_key)
        end = bisect_left(rows, self.k_len, key=self.first_key)
        for first in range(begin, end, TILE_M):
            yield first, min(first + TILE_M, end)

    def key_tiles(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Tiles of the keys that some row of [begin, end) sees, and no others."""
        last = self.last_key(end - 1) + 1
        # Few query rows (decoding) leave room for more keys in a tile of the same size.
        step = max(TILE_N, min(8 * TILE_N, TILE_M * TILE_N // (self.group * (end - begin))))
        for first in range(self.first_key(begin), last, step):
            yield first, min(first + step, last)

    def _seen(self) -> tuple[int, int]:
        """The first and one past the last key that some row of the part sees."""
        tiles = [tile for rows in self.row_tiles() for tile in self.key_tiles(*rows)]
        return (tiles[0][0], max(last for _, last in tiles)) if tiles else (0, 0)

    def _hidden_keys(self, begin: int, end: int, first: int, last: int) -> Tensor | None:
        """bool (tile_m, tile_n), or None where every row of the tile sees every key of it."""
        if self.first_key(end - 1) <= first and self.last_key(begin) >= last - 1:
            return None
        key = (begin, end, first, last)
        if self._hidden is None or self._hidden[0] != key:
            position = torch.arange(begin, end, device=self._device)[:, None] + self._offset
            keys = torch.arange(first, last, device=self._device)
            hidden = torch.zeros(end - begin, last - first, dtype=torch.bool, device=self._device)
            if self.options.left >= 0:
                hidden |= keys < position - self.options.left
            if self.options.right >= 0:
                hidden |= keys > position + self.options.right
            if self.options.chunk > 0:
                begins = (
                    position.div(self.options.chunk, rounding_mode="floor") * self.options.chunk
                )
                hidden |= (keys < begins) | (keys >= begins + self.options.chunk)
            self._hidden = (key, hidden)
        return self._hidden[1]

    def hide(self, x: Tensor, begin: int, end: int, first: int, last: int, value: float) -> None:
        """Overwrites the hidden elements of x (batch x heads_k, group x tile_m, tile_n)."""
        hidden = self._hidden_keys(begin, end, first, last)
        if hidden is not None:
            x.unflatten(1, (self.group, end - begin)).masked_fill_(hidden, value)

    # ---- scores ----

    def scores(
        self, q_t: Tensor, k_t: Tensor, begin: int, end: int, first: int, last: int
    ) -> tuple[Tensor, Tensor | None]:
        """S of one tile, -inf where hidden, and tanh(S / softcap) if there is a softcap.

        q_t already carries the scale; S is (batch x heads_k, group x tile_m, tile_n).
        """
        s = torch.bmm(q_t, k_t.transpose(1, 2))
        tanh = None
        if self.options.softcap > 0:
            tanh = s.div_(self.options.softcap).tanh_()
            s = tanh * self.options.softcap
        if self.options.slopes is not None:
            slopes = self.options.slopes
            slopes = slopes if slopes.dim() == 1 else slopes[self._b : self._b + self._size]
            slopes = slopes.expand(self._size, -1)[:, self._heads_q].to(self.acc)
            rows = torch.arange(begin, end, device=self._device) + self._offset
            distance = (
                (rows[:, None] - torch.arange(first, last, device=self._device)).abs_().to(self.acc)
            )
            heads = s.view(self._size, self.heads * self.group, end - begin, last - first)
            heads.addcmul_(slopes[:, :, None, None], distance, value=-1)
        self.hide(s, begin, end, first, last, -math.inf)
        return s, tanh

    def drop(self, x: Tensor, begin: int, end: int, first: int, last: int) -> Tensor:
        """Dropout, but for its scale, of x (batch x heads_k, group x tile_m, tile_n), in place."""
        if self.options.dropout_p > 0:
            entries = torch.arange(self._b, self._b + self._size, device=self._device)
            heads = torch.arange(self._heads_q.start, self._heads_q.stop, device=self._device)
            numbers = (entries[:, None] * self._all_heads + heads).flatten()
            gone = dropped(
                self.options.dropout_p,
                self.options.seed_offset,
                numbers,
                (begin, end),
                (first, last),
            )
            x.view(gone.shape).masked_fill_(gone, 0.0)
        return x

    # ---- tiles in the accumulation dtype, with their descales ----

    def q_tile(self, q: Tensor, begin: int, end: int) -> Tensor:
        """(batch x heads_k, group x tile_m, dim_qk), times scale and q_descale."""
        tile = fold_heads(self.rows(q, begin, end), self.group, self.acc) * self.options.scale
        d = self._descales
        if d is None or d.q is None:
            return tile
        if d.block_q == 0:
            return tile * self._entries(d.q, self._heads_k).reshape(-1, 1, 1)
        rows = factors(self._entries(d.q, self._heads_q), d.block_q, begin, end)
        return tile * rows.reshape(self._size * self.heads, -1, 1)

    def k_tile(self, k: Tensor, first: int, last: int) -> Tensor:
        """(batch x heads_k, tile_n, dim_qk), times k_descale."""
        d = self._descales
        return self._key_tile(k, d.k if d is not None else None, first, last)

    def v_tile(self, v: Tensor, first: int, last: int) -> Tensor:
        """(batch x heads_k, tile_n, dim_v), times v_descale."""
        d = self._descales
        return self._key_tile(v, d.v if d is not None else None, first, last)

    def _key_tile(self, t: Tensor, descale: Tensor | None, first: int, last: int) -> Tensor:
        tile = fold_heads(self.keys(t, first, last), 1, self.acc)
        if descale is None or self._descales is None:
            return tile
        entries = self._entries(descale, self._heads_k)
        keys = factors(entries, self._descales.block_k, self._pad + first, self._pad + last)
        return tile * keys.reshape(self._size * self.heads, -1, 1)

    def _entries(self, descale: Tensor, heads: slice) -> Tensor:
        return descale[self._b : self._b + self._size, heads].to(self.acc)

    # ---- slices of the call's tensors ----

    def rows(self, t: Tensor, begin: int, end: int) -> Tensor:
        """View [size, end - begin, heads_q, D] of q, out and their gradients."""
        if self._packed_q:
            return t[self._q0 + begin : self._q0 + end, self._heads_q].unsqueeze(0)
        return t[self._b : self._b + self._size, begin:end, self._heads_q]

    def keys(self, t: Tensor, first: int, last: int) -> Tensor:
        """[size, last - first, heads_k, D] of k or v: a view, of a paged cache a copy."""
        if self._pages is not None:
            part = t[:, :, self._heads_k]
            return self._pages.read(part, self._kb, self._k0 + first, self._k0 + last)[None]
        span = slice(self._k0 + first, self._k0 + last)
        if self._packed_k:
            return t[span, self._heads_k].unsqueeze(0)
        return t[self._kb : self._kb + self._size, span, self._heads_k]

    def lse(self, t: Tensor) -> Tensor:
        """View [size, heads_q, q_len] of lse and dlse."""
        if self._packed_q:
            return t[self._heads_q, self._q0 : self._q0 + self.q_len].unsqueeze(0)
        return t[self._b : self._b + self._size, self._heads_q, : self.q_len]

    def sinks(self) -> Tensor:
        """[size, heads_q] in the accumulation dtype."""
        assert self.options.sinks is not None
        return self.options.sinks[self._heads_q].to(self.acc).expand(self._size, -1)

    # ---- values per row: [size, heads_q, rows] outside, (batch x heads_k, group x rows, 1) inside

    def per_row(self, values: Tensor, rows: int) -> Tensor:
        """[size, heads_q] repeated for every row of a tile; a fresh tensor."""
        return values[:, :, None].repeat(1, 1, rows).view(self._size * self.heads, -1, 1)

    def load_row_values(self, values: Tensor, begin: int, end: int) -> Tensor:
        tile = values[:, :, begin:end].to(self.acc)
        return tile.reshape(self._size * self.heads, self.group * (end - begin), 1)

    def store_row_values(self, tile: Tensor, values: Tensor, begin: int, end: int) -> None:
        values[:, :, begin:end].copy_(tile.view(self._size, self.heads * self.group, end - begin))

    # ---- sums of the backward ----

    def key_sums(self, t: Tensor) -> Tensor:
        shape = (self._size * self.heads, self.k_len, t.shape[-1])
        return torch.zeros(shape, dtype=self.acc, device=t.device)

    def add_keys(self, sums: Tensor, gradient: Tensor) -> None:
        """The gradient starts at zero, so adding rounds once unless a cache row is shared."""
        if self._pages is not None:
            begin, end = self._seen()
            values = sums[:, begin:end].transpose(0, 1)  # (keys, heads_k, D)
            part = gradient[:, :, self._heads_k]
            self._pages.add(part, self._kb, self._k0 + begin, values)
            return
        view = self.keys(gradient, 0, self.k_len).transpose(1, 2)
        view.add_(sums.unflatten(0, (self._size, self.heads)))

    def add_sinks(self, dsinks: Tensor, lse: Tensor, row_gradients: Tensor) -> None:
        """dsinks += sum over rows of p_sink * (dlse - dO.O); rows that see no key have O = 0."""
        lse = lse.to(self.acc).masked_fill(lse == -math.inf, math.inf)
        p = torch.exp(self.sinks()[:, :, None] - lse)
        # P = 0 is selected: dlse of a row whose LSE is -inf may be anything.
        dsinks[self._heads_q] += (p * row_gradients).masked_fill_(p == 0, 0.0).sum(dim=(0, 2))


def fold_heads(x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """[b, rows, heads, D] -> (b x heads / group, group x rows, D), copied only if it must be."""
    x = x.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)  # [b, heads_k, group, rows, D]
    if x.dtype != dtype:
        x = torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)
    return x.flatten(2, 3).flatten(0, 1)


def unfold_heads(tile: Tensor, target: Tensor, group: int) -> None:
    """Writes (b x heads / group, group x rows, D) to the view [b, rows, heads, D]."""
    view = target.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)
    view.copy_(tile.view(view.shape))


def _extents(
    cu_seqlens: Tensor | None, seqused: Tensor | None, batch: int, rows: int
) -> tuple[list[int], list[int]]:
    """First row and number of rows of every sequence in its tensor."""
    if cu_seqlens is None:
        begins, lengths = [0] * batch, [rows] * batch
    else:
        ends = cu_seqlens.tolist()
        begins = ends[:-1]
        lengths = [end - begin for begin, end in zip(begins, ends[1:], strict=True)]
    return begins, lengths if seqused is None else seqused.tolist()
