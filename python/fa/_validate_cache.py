# SPDX-License-Identifier: BSD-3-Clause
# Is this append or rotation one that the operators allow, and if not, which sentence says so?
"""Checks of `fa::append_kv` and `fa::apply_rotary`; see _validate.py for the rules.

Functions that end in `_contents` read what stands in tensors: for the torch implementation only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa._checks import describe, dims, index, page_rows, tensor_types
from fa._validate import FLOATS
from fa._validate_options import FP8, Options

CACHE_FLOATS = (*FLOATS, FP8)


def append(
    k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, options: Options
) -> None:
    """Everything about an append that can be checked without reading device data."""
    lengths = options["cache_seqlens"]
    tensor_types(k_new=k_new, v_new=v_new, k_cache=k_cache, v_cache=v_cache, cache_seqlens=lengths)
    cu, table = options.get("cu_seqlens_new"), options.get("page_table")
    if lengths.dim() != 1:
        raise ValueError(f"cache_seqlens: shape {list(lengths.shape)} must be [batch].")
    batch = lengths.shape[0]
    for name, new, cache in (("k", k_new, k_cache), ("v", v_new, v_cache)):
        _pair(name, new, cache, k_cache, cu, table)
    _same(v_new, k_new, slice(None, -1), "v_new", "k_new", "batch, rows and heads")
    _same(v_cache, k_cache, slice(None, -1), "v_cache", "k_cache", "rows and heads")
    if cu is None and k_new.shape[0] != batch:
        raise ValueError(
            f"k_new: batch size {k_new.shape[0]} differs from the {batch} entries of "
            "cache_seqlens. Pass one length for each batch entry."
        )
    index("cache_seqlens", lengths, batch, k_cache.device)
    index("cu_seqlens_new", cu, batch + 1, k_cache.device)
    rows = options.get("kv_batch_idx")
    for name in ("kv_batch_idx", "leftpad_k", "rotary_seqlens"):
        index(name, options.get(name), batch, k_cache.device)
    if table is not None:
        page_rows("page_table", table, batch, k_cache.device, rows)
    elif rows is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache: {k_cache.shape[0]} rows, and cache_seqlens has {batch} entries. Choose "
            "rows of the cache with kv_batch_idx."
        )
    tables(k_new, options, "k_new")


def _pair(
    name: str, new: Tensor, cache: Tensor, k_cache: Tensor, cu: Tensor | None, table: Tensor | None
) -> None:
    """New rows and the cache that they go to."""
    new_name, cache_name = f"{name}_new", f"{name}_cache"
    layout = "[num_pages, page_size, heads, dim]" if table is not None else "[rows, S, heads, dim]"
    if cache.dim() != 4:
        raise ValueError(f"{cache_name}: shape {list(cache.shape)} must be {layout}.")
    if table is not None and cache.shape[1] == 0:
        raise ValueError(f"{cache_name}: shape {list(cache.shape)} has pages of 0 keys.")
    dims(new_name, new, cu, "cu_seqlens_new", "rows")
    if cache.dtype not in CACHE_FLOATS:
        names = ", ".join(str(d) for d in CACHE_FLOATS)
        raise ValueError(f"{cache_name}: dtype {cache.dtype} is not one of {names}.")
    if new.dtype != cache.dtype:
        raise ValueError(
            f"{new_name}: dtype {new.dtype} differs from the {cache.dtype} of {cache_name}. "
            f"Convert it with .to({cache.dtype}); for fp8, divide by the descale first."
        )
    for other_name, other in ((new_name, new), (cache_name, cache)):
        if other.device != k_cache.device:
            raise ValueError(
                f"{other_name}: is on {other.device} and k_cache on {k_cache.device}. Move it."
            )
    _same(new, cache, slice(-2, None), new_name, cache_name, "heads and head dim")
    for dim, (size, stride) in enumerate(zip(cache.shape, cache.stride(), strict=True)):
        if size > 1 and stride == 0:
            raise ValueError(
                f"{cache_name}: dimension {dim} is expanded (stride 0), so that its rows cannot be "
                "written apart. Pass a tensor that owns its memory."
            )


def _same(a: Tensor, b: Tensor, dims: slice, name: str, like: str, what: str) -> None:
    if tuple(a.shape[dims]) != tuple(b.shape[dims]):
        raise ValueError(
            f"{name}: shape {list(a.shape)}, and {like} has {list(b.shape)}. Their {what} must be "
            "equal."
        )


def tables(x: Tensor, options: Options, x_name: str) -> None:
    """rotary_cos and rotary_sin, both or none, and what belongs to them."""
    cos, sin = options.get("rotary_cos"), options.get("rotary_sin")
    if cos is None and sin is None:
        for name, off in (("rotary_interleaved", False), ("rotary_seqlens", None)):
            value = options.get(name, off)
            if value is not off:
                shown = describe(value) if isinstance(value, Tensor) else value
                raise ValueError(
                    f"{name}: {shown} was given without rotary_cos and rotary_sin, so nothing is "
                    f"rotated. Pass the tables, or leave {name} away."
                )
        return
    if cos is None or sin is None:
        missing, given = (
            ("rotary_cos", "rotary_sin") if cos is None else ("rotary_sin", "rotary_cos")
        )
        raise ValueError(f"{missing}: is None, and {given} was given. Pass both, or none.")
    _table("rotary_cos", cos, x, x_name)
    _table("rotary_sin", sin, x, x_name)
    _same(sin, cos, slice(None), "rotary_sin", "rotary_cos", "shapes")


def _table(name: str, t: Tensor, x: Tensor, x_name: str) -> None:
    if t.dim() != 2 or not 0 < 2 * t.shape[1] <= x.shape[-1]:
        raise ValueError(
            f"{name}: shape {list(t.shape)} must be [positions, d / 2] with 0 < d <= "
            f"{x.shape[-1]}, the head dim of {x_name}."
        )
    if t.dtype not in FLOATS:
        names = ", ".join(str(d) for d in FLOATS)
        raise ValueError(f"{name}: dtype {t.dtype} is not one of {names}.")
    if t.device != x.device:
        raise ValueError(f"{name}: is on {t.device} and {x_name} on {x.device}. Move it.")


def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    """The arguments of `fa::apply_rotary`."""
    tensor_types(x=x, cos=cos, sin=sin)
    if x.dim() < 3:
        raise ValueError(
            f"x: shape {list(x.shape)} must be [batch, seqlen, heads, dim] or [total, heads, dim]."
        )
    if x.dtype not in CACHE_FLOATS:
        names = ", ".join(str(d) for d in CACHE_FLOATS)
        raise ValueError(f"x: dtype {x.dtype} is not one of {names}.")
    _table("cos", cos, x, "x")
    _table("sin", sin, x, "x")
    _same(sin, cos, slice(None), "sin", "cos", "shapes")
    if positions is None:
        if x.shape[-3] > cos.shape[0]:
            raise ValueError(
                f"cos: {cos.shape[0]} positions, and x has {x.shape[-3]} rows. Pass longer tables, "
                "or positions."
            )
        return
    rows = list(x.shape[:-2])
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions: dtype {positions.dtype} must be torch.int32 or torch.int64.")
    if positions.device != x.device:
        raise ValueError(f"positions: is on {positions.device} and x on {x.device}. Move it.")
    short = positions.dim() > len(rows) or any(
        n not in (1, m) for n, m in zip(reversed(positions.shape), reversed(rows), strict=False)
    )
    if short:
        raise ValueError(f"positions: shape {list(positions.shape)} must broadcast to {rows}.")


def position_contents(name: str, positions: Tensor, table: Tensor) -> None:
    """Every position has a row in the tables."""
    if positions.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(positions))
    if low < 0 or high >= table.shape[0]:
        raise ValueError(
            f"{name}: rows at positions {low} to {high} are rotated, and the tables have "
            f"{table.shape[0]} positions. Pass longer tables, or positions in "
            f"[0, {table.shape[0] - 1}]."
        )


def append_contents(
    used: Sequence[int],
    counts: Sequence[int],
    rows: Sequence[int],
    ends: Sequence[int] | None,
    leftpad_k: Tensor | None,
    total_new: int,
    *,
    cache_rows: int,
    capacity: int,
) -> None:
    """Lengths, rows of the cache and the room in them."""
    if ends is not None and (ends[0] < 0 or ends[-1] > total_new or min(counts, default=0) < 0):
        raise ValueError(
            f"cu_seqlens_new: {list(ends)} must not fall, start below 0 or end above the "
            f"{total_new} rows of k_new. Pass the running sum of the lengths."
        )
    pads = [0] * len(used) if leftpad_k is None else leftpad_k.tolist()
    for b, (length, count, row, pad) in enumerate(zip(used, counts, rows, pads, strict=True)):
        if not 0 <= row < cache_rows:
            raise ValueError(
                f"kv_batch_idx: entry {b} is {row}, and the cache has {cache_rows} rows. Pass "
                f"values in [0, {cache_rows - 1}]."
            )
        if length < 0 or length + count > capacity:
            raise ValueError(
                f"cache_seqlens: entry {b} is {length}, and {count} new keys do not fit: a row of "
                f"the cache has room for {capacity}. Pass values in [0, {capacity - count}]."
            )
        if not 0 <= pad <= length:
            raise ValueError(
                f"leftpad_k: entry {b} is {pad}, and the cache row holds {length} keys, padding "
                f"included. Pass values in [0, {length}]."
            )
