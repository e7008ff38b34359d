# SPDX-License-Identifier: BSD-3-Clause
# How do users attend to a cache of keys and values, and add to it?
"""`fa.attention_kvcache` and `fa.append_kv`; conventions as in functional.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fa import _validate, _validate_cache
from fa._cache import query_positions
from fa._checks import batch_size, dims, index, tensor_types
from fa._ranges import ranged
from fa._types import checked, require
from fa._validate_types import argument_types
from fa.functional import attention, window_options


@checked(k="k_cache", v="v_cache", seqused_k="cache_seqlens")
@ranged("attention_kvcache", q=0, k_cache=1)
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int,
    page_table: Tensor | None = None,
    cu_seqlens_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache of keys and values, after new ones were appended to it.

    Args:
        q: [B, Sq, Hq, D], or packed [total_q, Hq, D] with cu_seqlens_q.
        k_cache, v_cache: [Bc, S, Hkv, D] and [Bc, S, Hkv, Dv]; Bc = B, or cache rows are chosen by
            kv_batch_idx (int32 [B]). With page_table: [num_pages, page_size, Hkv, D] and Dv.
        k_new, v_new: [B, S_new, Hkv, D] and Dv, or packed [total, Hkv, D] with cu_seqlens_new
            (int32 [B + 1]): written into the cache first, in place, as `append_kv` does.
        cache_seqlens: int32 [B], the filled length of each cache row before the call, left padding
            included; or one number for all.
        page_table: int32 [Bc, pages]: key j of a cache row lies in page page_table[row, j //
            page_size], slot j % page_size. Entries without a visible key are never read.
        rotary_cos, rotary_sin: [positions, d / 2], d <= D: new key t is rotated for position
            cache_seqlens + t, query i for cache_seqlens + i if causal, a window or chunks are
            given, else every query for cache_seqlens (FlashAttention's rule).
        rotary_interleaved: pairs (0, 1), (2, 3), ... instead of (0, d / 2), (1, d / 2 + 1), ...
        rotary_seqlens: int32 [B], positions to start from in the place of cache_seqlens.
        **options: as `attention`.

    Returns:
        out [B, Sq, Hq, Dv] (packed [total_q, Hq, Dv]), or (out, lse) with return_lse, as
        `attention`.

    Raises: as `attention` and `append_kv`, before anything is written.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 1, 64, 2, 32)
        >>> q, k_new, v_new = torch.randn(1, 1, 4, 32), *torch.randn(2, 1, 1, 2, 32)
        >>> out = fa.attention_kvcache(q, k_cache, v_cache, k_new, v_new, cache_seqlens=10)
        >>> out.shape, torch.equal(k_cache[0, 10], k_new[0, 0])
        (torch.Size([1, 1, 4, 32]), True)
    """
    tensor_types(q=q, k_cache=k_cache, v_cache=v_cache)
    rotary = {
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_interleaved": rotary_interleaved,
        "rotary_seqlens": rotary_seqlens,
    }
    if page_table is not None:
        options["page_table"] = page_table
    _types(k_new, v_new, options, {"cu_seqlens_new": cu_seqlens_new, **rotary})
    cu_seqlens_q = options.get("cu_seqlens_q")
    batch = batch_size(q, cu_seqlens_q)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    argument_types("append_kv", {"cache_seqlens": cache_seqlens})
    index("cache_seqlens", cache_seqlens, batch, q.device)
    index("cu_seqlens_new", cu_seqlens_new, batch + 1, q.device)
    used = cache_seqlens
    if (k_new is None) != (v_new is None):
        missing, given = ("k_new", "v_new") if k_new is None else ("v_new", "k_new")
        raise ValueError(f"{missing}: is None, and {given} was given. Pass both, or none.")
    if k_new is not None:
        dims("k_new", k_new, cu_seqlens_new, "cu_seqlens_new", "rows")
        tail = k_new.shape[1] if cu_seqlens_new is None else cu_seqlens_new.diff()
        used = cache_seqlens + tail
    elif cu_seqlens_new is not None:
        raise ValueError("cu_seqlens_new: given without k_new. Pass k_new and v_new, or leave it.")
    _validate_cache.tables(q, rotary, "q")
    windowed = False
    if k_new is not None or rotary_cos is not None:
        # Everything is checked before anything is written.
        windowed = _check(q, k_cache, v_cache, {**options, "seqused_k": used})
    if k_new is not None and v_new is not None:
        append_kv(
            *(k_new, v_new, k_cache, v_cache),
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            cu_seqlens_new=cu_seqlens_new,
            kv_batch_idx=options.get("kv_batch_idx"),
            leftpad_k=options.get("leftpad_k"),
            **rotary,
        )
    if rotary_cos is not None and rotary_sin is not None:
        positions = query_positions(
            q,
            cache_seqlens if rotary_seqlens is None else rotary_seqlens,
            advance=windowed,
            cu_seqlens_q=cu_seqlens_q,
            seqused_q=options.get("seqused_q"),
        )
        q = torch.ops.fa.apply_rotary(
            q, rotary_cos, rotary_sin, positions=positions, interleaved=rotary_interleaved
        )
    return attention(q, k_cache, v_cache, seqused_k=used, **options)


def _types(k_new: Any, v_new: Any, options: dict[str, Any], appended: dict[str, Any]) -> None:
    """TypeError for an option that does not exist, or of a wrong type."""
    new = {name: t for name, t in (("k_new", k_new), ("v_new", v_new)) if t is not None}
    argument_types("append_kv", new | appended)
    require("bool", return_lse=options.get("return_lse", False))
    own = ("window_size", "return_lse", "deterministic")
    argument_types("forward", {name: x for name, x in options.items() if name not in own})


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: dict[str, Any]) -> bool:
    """Raises as `attention` would, where that can be known; True if causal, windowed or chunked."""
    options = dict(options)
    window_options(options.pop("window_size", (-1, -1)), options)
    options.pop("return_lse", None)
    _validate.forward(q, k_cache, v_cache, options, kernels=False)
    sides = options.get("window_left", -1), options.get("window_right", -1)
    return bool(options.get("causal") or sides != (-1, -1) or options.get("attention_chunk"))


@checked()
@ranged("append_kv", k_new=0, k_cache=2)
def append_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    **options: Any,
) -> None:
    """Writes new keys and values into a cache, in place: new key t goes to cache_seqlens + t.

    Args:
        k_new, v_new: [B, S_new, Hkv, D] and [B, S_new, Hkv, Dv], or packed [total, Hkv, D] and Dv
            with cu_seqlens_new; dtypes of the caches.
        k_cache, v_cache: [Bc, S, Hkv, D] and Dv, any strides but 0; with page_table [num_pages,
            page_size, Hkv, D] and Dv.
        cache_seqlens: int32 [B], the filled length of each row, left padding included; not changed.
        **options: page_table int32 [Bc, pages]; cu_seqlens_new int32 [B + 1]; kv_batch_idx int32
            [B], the row of the cache or of page_table; leftpad_k int32 [B], part of cache_seqlens;
            rotary_cos, rotary_sin [positions, d / 2], rotary_interleaved: keys are rotated for
            position cache_seqlens + t, or rotary_seqlens + t (int32 [B]). No two sequences may
            write one slot.

    Raises:
        TypeError, ValueError: as `attention`, before anything is written.
        NotImplementedError: an input requires a gradient; CUDA tensors outside of
            fa.backend("cpu").

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 2, 64, 2, 32)
        >>> k_new, v_new = torch.randn(2, 2, 3, 2, 32)
        >>> filled = torch.tensor([0, 10], dtype=torch.int32)
        >>> fa.append_kv(k_new, v_new, k_cache, v_cache, cache_seqlens=filled)
        >>> torch.equal(v_cache[1, 10:13], v_new[1])
        True
    """
    if not is_compiling():
        argument_types("append_kv", options)
    torch.ops.fa.append_kv(k_new, v_new, k_cache, v_cache, cache_seqlens=cache_seqlens, **options)
