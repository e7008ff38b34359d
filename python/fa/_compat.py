# SPDX-License-Identifier: BSD-3-Clause
# What do the two flash-attn modules share when they turn their arguments into options of ours?
"""Refusals by name, windows, caches and gradients of fa.flash_attn and fa.flash_attn_interface.

Both follow another library's signatures, so an argument that means nothing here is either one that
never changes a result (and then says so in its docstring) or is refused by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa._checks import batch_size, describe, tensor_types
from fa.functional import attention, window_options
from fa.kvcache import attention_kvcache

INSTEAD = "Leave it at its default."

# Names of fa's options -> of the wrappers' arguments, for `checked`.
WINDOW = {"window_left": "window_size[0]", "window_right": "window_size[1]"}
WINDOW_SIDES = {"window_left": "window_size_left", "window_right": "window_size_right"}
# Where nothing can be packed.
DENSE = {f"Without cu_seqlens_{side} it": "It" for side in ("q", "k", "new")}
PACKED_QKV = {name: f"qkv's {name}" for name in ("q", "k", "v")}
PACKED_KV = {name: f"kv's {name}" for name in ("k", "v")}
# `cached` speaks of k_cache, k_new and cache_seqlens.
CACHE = {
    "k": "k_cache",
    "v": "v_cache",
    "k_new": "k",
    "v_new": "v",
    "seqused_k": "cache_seqlens",
    "kv_batch_idx": "cache_batch_idx",
    "leftpad_k": "cache_leftpad",
}


def refuse(function: str, instead: str, **given: Any) -> None:
    """NotImplementedError for the first argument that is neither None, False nor 0."""
    for name, value in given.items():
        if isinstance(value, Tensor) or value:
            shown = describe(value) if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{name}: {shown} was given to {function}, and fa does not implement {name}. "
                f"{instead}"
            )


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x with stride 1 in its last dimension: itself, or a copy."""
    return x.contiguous() if isinstance(x, Tensor) and x.dim() and x.stride(-1) != 1 else x


def values(v: Tensor) -> Tensor:
    """e4m3 values may lie transposed, with stride 1 in their rows."""
    return v.contiguous() if v.dim() > 2 and v.stride(-1) != 1 and v.stride(-3) != 1 else v


def contiguous(**tensors: Tensor) -> list[Any]:
    """As `maybe_contiguous`, after a check that these are tensors."""
    tensor_types(**tensors)
    return [maybe_contiguous(t) for t in tensors.values()]


def in_place(**caches: Tensor) -> None:
    """ValueError unless a cache can be used where it lies."""
    for name, t in caches.items():
        if t.dim() and t.stride(-1) != 1:
            raise ValueError(
                f"{name}: stride {t.stride(-1)} of the last dimension must be 1: a cache is read "
                "and written where it lies."
            )


def window_pair(window_size: Any) -> tuple[Any, Any]:
    """(left, right); TypeError for anything else."""
    window_options(window_size, {})
    return tuple(window_size)


def mask_options(causal: bool, window_size: Any) -> dict[str, Any]:
    """causal and (left, right) as flash-attn means them: causal sets the right side to 0."""
    options: dict[str, Any] = {}
    window_options(window_size, options)
    if causal:
        options["causal"] = True
        options.pop("window_right", None)
    return options


def given(**options: Any) -> dict[str, Any]:
    """The options without those that are None."""
    return {name: value for name, value in options.items() if value is not None}


def splits(num_splits: int) -> int:
    """flash-attn chooses for every number below 1, fa for 0."""
    return max(num_splits, 0)


def packed_parts(name: str, x: Tensor, parts: int, dim: int) -> tuple[Any, ...]:
    """The tensors that are stacked in dimension `dim` (counted from the end) of x."""
    tensor_types(**{name: x})
    if x.dim() < -dim or x.shape[dim] != parts:
        raise ValueError(
            f"{name}: shape {list(x.shape)} must have {parts} tensors, one for each of "
            f"{'q, k and v' if parts == 3 else 'k and v'}, in dimension {dim}."
        )
    return x.unbind(dim)


def as_lengths(
    cache_seqlens: Tensor | int | None, q: Tensor, cu_seqlens_q: Tensor | None
) -> Tensor | None:
    """int32 [B] on q's device; one number stands for all sequences."""
    if not isinstance(cache_seqlens, int):
        if cache_seqlens is not None:
            tensor_types(cache_seqlens=cache_seqlens)
        return maybe_contiguous(cache_seqlens)
    batch = batch_size(q, cu_seqlens_q)
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)


def cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    cache_seqlens: Tensor | int | None,
    page_table: Tensor | None,
    rotary: dict[str, Any],
    cu_seqlens_new: Tensor | None,
    options: dict[str, Any],
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """((out, lse), key lengths int32 [B]) of attention over a cache; None: every row is full."""
    cu_seqlens_q = options.get("cu_seqlens_q")
    if cache_seqlens is None:
        needs = (
            "k_new" if k is not None else "rotary_cos" if rotary["rotary_cos"] is not None else None
        )
        if needs is not None:
            raise ValueError(
                f"cache_seqlens: is None, and {needs} was given: new keys and positions start at "
                "the filled length of the cache. Pass int32 [batch], or one number."
            )
        if page_table is not None:
            cache_seqlens = page_table.shape[1] * k_cache.shape[1]
    cache_seqlens = as_lengths(cache_seqlens, q, cu_seqlens_q)
    if cache_seqlens is None:
        return attention(q, k_cache, v_cache, return_lse=True, **options), None  # type: ignore[return-value]
    if rotary["rotary_cos"] is None and rotary["rotary_sin"] is None:
        rotary = given(rotary_seqlens=rotary["rotary_seqlens"])  # the pairing is then no argument
    new = given(page_table=page_table, cu_seqlens_new=cu_seqlens_new)
    result = attention_kvcache(
        q,
        k_cache,
        v_cache,
        maybe_contiguous(k),
        maybe_contiguous(v),
        cache_seqlens=cache_seqlens,
        return_lse=True,
        **new,
        **rotary,
        **options,
    )
    lengths = cache_seqlens
    if k is not None:
        lengths = lengths + (k.shape[1] if cu_seqlens_new is None else cu_seqlens_new.diff())
    return result, lengths  # type: ignore[return-value]


def gradients_into(
    dout: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    buffers: dict[str, Tensor | None],
    options: dict[str, Any],
) -> Tensor:
    """Writes dq, dk and dv; returns sum_d dO_d O_d, fp32 [B, Hq, Sq] or [Hq, total_q]."""
    for name, buffer in buffers.items():
        if buffer is None:
            raise ValueError(
                f"{name}: is None, so the gradient has no place. Pass a tensor like {name[1:]}; "
                "it is overwritten."
            )
    out = tensors[3]
    torch.ops.fa.backward_out(dout, *tensors, **options, **buffers)
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()
