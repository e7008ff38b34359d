# SPDX-License-Identifier: BSD-3-Clause
# How do new keys and values enter a cache, and how are they rotated? In torch operations.
"""The torch implementation of `fa::append_kv` and `fa::apply_rotary` (docs/numerics.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from fa import _validate_cache
from fa._layout import accumulation_dtype, empty_like_order
from fa._pages import Pages


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """x [..., S, H, D] with every row turned by the angles of its position; see docs/numerics.md.

    cos, sin [R, d / 2]: the first d dims of a head turn, the others stay. positions: integers that
    broadcast to [..., S]; None: 0, 1, ... Sums in fp32 (fp64 for fp64), one rounding to x's dtype.
    """
    half = cos.shape[1]
    if positions is None:
        positions = torch.arange(x.shape[-3], device=x.device)
    acc = accumulation_dtype(x.dtype)
    c, s = (t[positions.long()].to(acc).unsqueeze(-2) for t in (cos, sin))  # [..., S, 1, d / 2]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].to(acc), x[..., second].to(acc)
    out = empty_like_order(x, x.shape)
    out[..., 2 * half :] = x[..., 2 * half :]
    out[..., first] = a * c - b * s
    out[..., second] = a * s + b * c
    return out


def append(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    cu_seqlens_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
) -> None:
    """Writes the new keys (rotated) and values of a validated call; nothing if a value is wrong."""
    if k_cache.numel() and k_cache.data_ptr() == v_cache.data_ptr():
        raise ValueError(
            "v_cache: begins at the address of k_cache, so that new values would overwrite new "
            "keys. Pass two caches that share no memory."
        )
    pages = None if page_table is None else Pages(page_table, k_cache)
    used, rows = cache_seqlens.tolist(), _rows(kv_batch_idx, cache_seqlens)
    ends = None if cu_seqlens_new is None else cu_seqlens_new.tolist()
    counts = [k_new.shape[1]] * len(used)
    if ends is not None:
        counts = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
    _validate_cache.append_contents(
        *(used, counts, rows, ends, leftpad_k, k_new.shape[0]),
        cache_rows=k_cache.shape[0] if page_table is None else page_table.shape[0],
        capacity=k_cache.shape[1] if pages is None else pages.capacity,
    )
    # Pages are looked up before anything is written.
    places = [
        (row, slice(begin, begin + n)) if pages is None else pages.places(row, begin, begin + n)
        for row, begin, n in zip(rows, used, counts, strict=True)
    ]
    if rotary_cos is not None and rotary_sin is not None:
        starts = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        at = _positions(k_new, starts, ends)
        _validate_cache.position_contents("rotary_cos", at, rotary_cos)
        k_new = rotate(k_new, rotary_cos, rotary_sin, at, rotary_interleaved)
    for new, cache in ((k_new, k_cache), (v_new, v_cache)):
        if new.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr():
            new = new.clone()  # a part of the cache is appended to it
        for b, place in enumerate(places):
            cache[place] = new[b] if ends is None else new[ends[b] : ends[b + 1]]


def _rows(kv_batch_idx: Tensor | None, cache_seqlens: Tensor) -> list[int]:
    return list(range(len(cache_seqlens))) if kv_batch_idx is None else kv_batch_idx.tolist()


def _positions(k_new: Tensor, starts: Tensor, ends: list[int] | None) -> Tensor:
    """int64 [B, S], packed [total]: rows of no sequence at 0."""
    if ends is None:
        return starts.long()[:, None] + torch.arange(k_new.shape[1], device=k_new.device)
    at = torch.zeros(k_new.shape[0], dtype=torch.int64, device=k_new.device)
    for begin, end, start in zip(ends, ends[1:], starts.tolist(), strict=False):
        at[begin:end] = torch.arange(start, start + end - begin, device=k_new.device)
    return at


def query_positions(
    q: Tensor,
    starts: Tensor,
    *,
    advance: bool,
    cu_seqlens_q: Tensor | None,
    seqused_q: Tensor | None,
) -> Tensor:
    """The position of every query row: [B, Sq], packed [total_q]; rows of no sequence at 0.

    starts int32 [B]; row i of a sequence stands at start + i if `advance`, else at start. Nothing
    is read from the device.
    """
    if cu_seqlens_q is None:
        row = torch.arange(q.shape[1], device=q.device)[None, :]
        at = starts[:, None] + (row if advance else torch.zeros_like(row))
        return at if seqused_q is None else torch.where(row < seqused_q[:, None], at, 0)
    if len(starts) == 0:
        return torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    rows = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True)
    sequence = sequence.clamp(max=len(starts) - 1)
    row = rows - cu_seqlens_q[sequence]
    length = cu_seqlens_q.diff() if seqused_q is None else seqused_q
    at = starts[sequence] + (row if advance else torch.zeros_like(row))
    return torch.where((row >= 0) & (row < length[sequence]), at, 0)
