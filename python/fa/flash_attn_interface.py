# SPDX-License-Identifier: BSD-3-Clause
# How does code that was written for FlashAttention-3's flash_attn_interface call fa?
"""The functions of FlashAttention-3's module `flash_attn_interface`: names, order and defaults.

    from fa.flash_attn_interface import flash_attn_func

Conventions of all of them: tensors are [B, S, H, D], packed [total, H, D]; `softmax_scale` None is
1 / sqrt(D); `window_size` is (left, right), -1 without a limit, and `causal` sets right to 0
whatever is given; LSE is the natural logarithm, fp32 [B, Hq, Sq], packed [Hq, total_q].
`q_descale`, `k_descale`, `v_descale` are fp32 [B, Hkv], for float8_e4m3fn only. `num_splits` below
1 lets the library choose and changes only the rounding; `max_seqlen_*` are hints that change no
more than that.
`attention_chunk` c lets positions see each other only inside chunks of c, 0 is off; `softcap` caps
scores by softcap * tanh(s / softcap), 0 is off.

What differs from there: `qv`, `sm_margin` and `pack_gqa=True` raise NotImplementedError;
`deterministic=False` yields to torch.use_deterministic_algorithms; the LSE has a gradient; partial
results of splits are never returned (empty tensors stand in their places). Formulas:
docs/numerics.md. Errors are those of fa.attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa._checks import index, tensor_types
from fa._compat import (
    CACHE,
    DENSE,
    INSTEAD,
    PACKED_QKV,
    WINDOW,
    as_lengths,
    contiguous,
    given,
    in_place,
    mask_options,
    maybe_contiguous,
    packed_parts,
    refuse,
    splits,
    values,
    window_pair,
)
from fa._flash_attn_3 import _flash_attn_backward as _flash_attn_backward
from fa._flash_attn_3 import _flash_attn_forward as _flash_attn_forward
from fa._types import checked
from fa.functional import attention, combine

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


@checked(**DENSE, **PACKED_QKV)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of one tensor qkv: [B, S, 3, H, D], or [B, S, Hq + 2 Hkv, D].

    The second form needs num_heads_q. Returns out [B, S, Hq, D], or (out, lse) with
    return_attn_probs.
    """
    tensor_types(qkv=qkv)
    if qkv.dim() == 5:
        q, k, v = packed_parts("qkv", qkv, 3, -3)
    else:
        heads = qkv.shape[2] if qkv.dim() == 4 else 0
        if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
            raise ValueError(
                f"num_heads_q: {num_heads_q}, and qkv has shape {list(qkv.shape)}. Pass qkv as "
                "[batch, seqlen, 3, heads, dim], or as [batch, seqlen, num_heads_q + 2 * heads_k, "
                "dim] with num_heads_q."
            )
        heads_k = (heads - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], dim=-2)
    return flash_attn_func(
        *(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale),
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


@checked(**DENSE, **WINDOW)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention, differentiable: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    Returns out [B, Sq, Hq, Dv], or (out, lse) with return_attn_probs.
    """
    return _differentiable(
        *(q, k, v, deterministic, return_attn_probs),
        attention_chunk=attention_chunk,
        window_size=window_size,
        causal=causal,
        refused={"qv": qv, "pack_gqa": pack_gqa, "sm_margin": sm_margin},
        options=given(
            softmax_scale=softmax_scale,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            softcap=softcap,
            num_splits=splits(num_splits),
        ),
    )


def _differentiable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    deterministic: bool,
    return_attn_probs: bool,
    *,
    attention_chunk: int,
    window_size: Any,
    causal: bool,
    refused: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    refuse("flash_attn_interface", INSTEAD, **refused)
    tensor_types(v=v)
    q, k = contiguous(q=q, k=k)
    return attention(
        q,
        k,
        values(v),
        return_lse=return_attn_probs,
        deterministic=deterministic or None,
        attention_chunk=attention_chunk,
        **mask_options(causal, window_size),
        **options,
    )


@checked(**WINDOW)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over packed sequences, differentiable: q [total_q, Hq, D], k, v [total_k, Hkv, D].

    cu_seqlens_q, cu_seqlens_k: int32 [B + 1]; seqused_q, seqused_k: int32 [B], the rows in use.
    Returns out [total_q, Hq, Dv], or (out, lse [Hq, total_q]) with return_attn_probs.
    """
    return _differentiable(
        *(q, k, v, deterministic, return_attn_probs),
        attention_chunk=attention_chunk,
        window_size=window_size,
        causal=causal,
        refused={"qv": qv, "pack_gqa": pack_gqa, "sm_margin": sm_margin},
        options=given(
            cu_seqlens_q=maybe_contiguous(cu_seqlens_q),
            cu_seqlens_k=maybe_contiguous(cu_seqlens_k),
            seqused_q=maybe_contiguous(seqused_q),
            seqused_k=maybe_contiguous(seqused_k),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=softmax_scale,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            softcap=softcap,
            num_splits=splits(num_splits),
        ),
    )


@checked()
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of keys, as `fa.combine`, with LSE in another layout.

    Args:
        out_partial: [n, B, S, H, D], fp32.
        lse_partial: [n, B, S, H], fp32.
        out: receives the result, [B, S, H, D].
        out_dtype: of the result; None: that of `out`, else fp32.

    Returns: (out, lse [B, S, H]).
    """
    tensor_types(out_partial=out_partial, lse_partial=lse_partial)
    for name, t in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if t.dtype != torch.float32:
            raise ValueError(f"{name}: dtype {t.dtype} must be torch.float32. Convert it.")
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial: shape {list(lse_partial.shape)} must be [n, batch, seqlen, heads] = "
            f"{list(out_partial.shape[:-1])}, that of out_partial without its last dimension."
        )
    if out is not None:
        out_dtype = out.dtype if out_dtype is None else out_dtype
        if out.shape != out_partial.shape[1:] or out.dtype != out_dtype:
            raise ValueError(
                f"out: {list(out.shape)} {out.dtype} must be {list(out_partial.shape[1:])} "
                f"{out_dtype}."
            )
    result, lse = combine(out_partial, lse_partial.transpose(-1, -2), out_dtype=out_dtype)
    if out is not None:
        result = out.copy_(result)
    return result, lse.transpose(-1, -2)


@checked(
    **CACHE,
    seqlens_rotary="rotary_seqlens",
    window_size_left="window_size[0]",
    window_size_right="window_size[1]",
)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, to which k and v are appended first, in place. No backward.

    Args:
        q: [B, Sq, Hq, D], packed with cu_seqlens_q (int32 [B + 1]).
        k_cache, v_cache: [Bc, S, Hkv, D], with page_table [num_pages, page_size, Hkv, D].
        k, v: new keys and values, [B, S_new, Hkv, D], packed with cu_seqlens_k_new, or None.
        rotary_cos, rotary_sin: [positions, d / 2], turn k and q as `fa.attention_kvcache` says.
        cache_seqlens: int32 [B] or one number, before the call, left padding included; None: full.
        cache_batch_idx: int32 [B], which row of the cache (or of page_table) a sequence has.
        cache_leftpad: int32 [B], rows of padding ahead of the keys.
        page_table: int32 [Bc, pages].
        rotary_seqlens: int32 [B], positions to start from in the place of cache_seqlens.
        rotary_interleaved: neighbouring pairs are turned, as there; else halves.
        scheduler_metadata: what `get_scheduler_metadata` gave for this batch size, or None.

    Returns: out, or (out, lse, empty, empty) with return_softmax_lse.
    """
    pair = window_pair(window_size)
    tensor_types(q=q, k_cache=k_cache, v_cache=v_cache)
    in_place(k_cache=k_cache, v_cache=v_cache)
    out, lse, *rest = _flash_attn_forward(
        *(q, k_cache, v_cache, k, v, qv),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        seqused_k=as_lengths(cache_seqlens, q, cu_seqlens_q),
        max_seqlen_q=max_seqlen_q,
        page_table=page_table,
        kv_batch_idx=cache_batch_idx,
        leftpad_k=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        seqlens_rotary=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size_left=pair[0],
        window_size_right=pair[1],
        attention_chunk=attention_chunk,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        scheduler_metadata=scheduler_metadata,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    return (out, lse, *rest) if return_softmax_lse else out


@checked()
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """The scheduler_metadata of `flash_attn_with_kvcache`.

    fa plans inside the call, from lengths that stay on the device, so there is nothing to compute
    ahead: the tensor ties calls to a batch size, and one of another size is refused.

    Args:
        batch_size: sequences of the call.
        cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad: int32, checked for their
            sizes alone.
        num_heads_q, num_heads_kv: the first must be a multiple of the second.
        max_seqlen_k_new, headdim, headdim_v, qkv_dtype, page_size, attention_chunk, has_softcap:
            describe the call and change nothing.

    Returns: int32 [batch_size] on the device of cache_seqlens, num_splits each.
    """
    refuse("get_scheduler_metadata", INSTEAD, pack_gqa=pack_gqa, sm_margin=sm_margin)
    tensor_types(cache_seqlens=cache_seqlens)
    for name, t, count in (
        ("cache_seqlens", cache_seqlens, batch_size),
        ("cu_seqlens_q", cu_seqlens_q, batch_size + 1),
        ("cu_seqlens_k_new", cu_seqlens_k_new, batch_size + 1),
        ("cache_leftpad", cache_leftpad, batch_size),
    ):
        index(name, maybe_contiguous(t), count, cache_seqlens.device)
    if num_heads_kv <= 0 or num_heads_q % num_heads_kv:
        raise ValueError(
            f"num_heads_q: {num_heads_q} is not a multiple of num_heads_kv, {num_heads_kv}."
        )
    mask_options(causal, window_size)
    return cache_seqlens.new_full((batch_size,), splits(num_splits))
