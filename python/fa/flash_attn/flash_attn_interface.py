# SPDX-License-Identifier: BSD-3-Clause
# How does code that was written for FlashAttention-2's flash_attn_interface call fa?
"""The functions of FlashAttention-2's `flash_attn.flash_attn_interface`: names, order and defaults.

Conventions of all of them: tensors are [B, S, H, D], packed [total, H, D]; `dropout_p` in [0, 1),
the seed drawn from torch's generator; `softmax_scale` None is 1 / sqrt(D); `window_size` is
(left, right), -1 without a limit, and `causal` sets right to 0 whatever is given; `alibi_slopes`
fp32 [H] or [B, H]; `softcap` 0 is off; LSE is the natural logarithm, fp32 [B, H, Sq], packed
[H, total_q]. `max_seqlen_*` never changes a result, `num_splits` (0: chosen) only its rounding.

`return_attn_probs` gives (out, lse, S_dmask): S_dmask is empty without dropout, else the weights
before dropout, negative where dropped, [B, H, Sq, Sk] with both lengths rounded up to 128, from the
reference path; refused beyond Sq * Sk = 2^26.

What differs from there: the LSE of a row without a key is -inf (there +inf), it has a gradient, and
dropout has other random bits (docs/numerics.md); `deterministic=False` yields to
torch.use_deterministic_algorithms. With alibi_slopes and causal the LSE is the one from there: ours
plus slope * (i + Sk - Sq). Errors are those of fa.attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa._checks import tensor_types
from fa._compat import (
    CACHE,
    DENSE,
    PACKED_KV,
    PACKED_QKV,
    WINDOW,
    as_lengths,
    cached,
    contiguous,
    given,
    in_place,
    mask_options,
    maybe_contiguous,
    packed_parts,
    splits,
)
from fa._types import checked
from fa.flash_attn._call import attend, their_lse
from fa.flash_attn._raw import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# The names that libraries with autograd functions of their own import.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _result(
    result: tuple[Tensor, Tensor, Tensor, Tensor], return_attn_probs: bool
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    return result[:3] if return_attn_probs else result[0]


@checked(**DENSE, **WINDOW)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention, differentiable: q [B, Sq, H, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv].

    Returns out [B, Sq, H, Dv], or (out, lse, S_dmask) with return_attn_probs.
    """
    return _result(
        attend(
            *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap),
            *(alibi_slopes, deterministic, return_attn_probs),
        ),
        return_attn_probs,
    )


@checked(**DENSE, **PACKED_QKV)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv [B, S, 3, H, D]."""
    q, k, v = packed_parts("qkv", qkv, 3, -3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@checked(**DENSE, **PACKED_KV)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q [B, Sq, H, D] and kv [B, Sk, 2, Hk, D]."""
    k, v = packed_parts("kv", kv, 2, -3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@checked(**WINDOW, page_table="block_table", seqused_k="cu_seqlens_k")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention over packed sequences, differentiable: q [total_q, H, D], k and v [total_k, Hk, D].

    cu_seqlens_q, cu_seqlens_k: int32 [B + 1]. With block_table, int32 [B, pages], k and v are
    [num_pages, page_size, Hk, D], and cu_seqlens_k gives only the lengths. Returns out
    [total_q, H, Dv], or (out, lse [H, total_q], S_dmask) with return_attn_probs.
    """
    return _result(
        attend(
            *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap),
            *(alibi_slopes, deterministic, return_attn_probs),
            cu_seqlens_q=maybe_contiguous(cu_seqlens_q),
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            block_table=block_table,
        ),
        return_attn_probs,
    )


@checked(
    **PACKED_QKV,
    cu_seqlens_q="cu_seqlens",
    cu_seqlens_k="cu_seqlens",
    max_seqlen_q="max_seqlen",
    max_seqlen_k="max_seqlen",
)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv [total, 3, H, D].

    cu_seqlens: int32 [B + 1], and max_seqlen: for queries and keys.
    """
    q, k, v = packed_parts("qkv", qkv, 3, -3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@checked(**PACKED_KV)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q [total_q, H, D] and kv [total_k, 2, Hk, D].

    cu_seqlens_q, cu_seqlens_k: int32 [B + 1].
    """
    k, v = packed_parts("kv", kv, 2, -3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@checked(**DENSE, **WINDOW, **CACHE, page_table="block_table")
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, to which k and v are appended first, in place. No backward.

    Args:
        q: [B, Sq, H, D].
        k_cache, v_cache: [Bc, S, Hk, D], with block_table [num_pages, page_size, Hk, D] (any page
            size).
        k, v: new keys and values, [B, S_new, Hk, D], or None.
        rotary_cos, rotary_sin: [positions, d / 2], turn k and q as `fa.attention_kvcache` says.
        cache_seqlens: int32 [B] or one number, before the call, left padding included; None: full.
        cache_batch_idx: int32 [B], which row of the cache (or of block_table) a sequence has.
        cache_leftpad: int32 [B], rows of padding ahead of the keys.
        block_table: int32 [Bc, pages].
        rotary_interleaved: neighbouring pairs are turned, as there; else halves.

    Returns: out [B, Sq, H, Dv], or (out, lse) with return_softmax_lse.
    """
    tensor_types(q=q, k_cache=k_cache, v_cache=v_cache)
    in_place(k_cache=k_cache, v_cache=v_cache)
    q = contiguous(q=q)[0]
    options = mask_options(causal, window_size) | given(
        kv_batch_idx=maybe_contiguous(cache_batch_idx),
        leftpad_k=maybe_contiguous(cache_leftpad),
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=splits(num_splits),
    )
    (out, lse), lengths = cached(
        *(q, k_cache, v_cache, k, v),
        cache_seqlens=as_lengths(cache_seqlens, q, None),
        page_table=maybe_contiguous(block_table),
        rotary={
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "rotary_interleaved": rotary_interleaved,
            "rotary_seqlens": None,
        },
        cu_seqlens_new=None,
        options=options,
    )
    if not return_softmax_lse:
        return out
    options |= given(seqused_k=lengths, page_table=block_table)
    return out, their_lse(lse, q, k_cache, options)
