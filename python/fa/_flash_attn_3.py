# SPDX-License-Identifier: BSD-3-Clause
# How do libraries call FlashAttention-3's passes one by one?
"""`_flash_attn_forward` and `_flash_attn_backward` of fa.flash_attn_interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa._checks import batch_size, tensor_types
from fa._compat import (
    INSTEAD,
    WINDOW_SIDES,
    cached,
    contiguous,
    given,
    gradients_into,
    mask_options,
    maybe_contiguous,
    refuse,
    splits,
    values,
)
from fa._layout import lse_dtype
from fa._types import checked
from fa.functional import attention


@checked(
    **WINDOW_SIDES,
    k_cache="k",
    v_cache="v",
    cache_seqlens="seqused_k",
    rotary_seqlens="seqlens_rotary",
    cu_seqlens_new="cu_seqlens_k_new",
)
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, empty, empty): every forward of this module. Differentiable without a cache.

    k_new, v_new are appended to k, v in place, at seqused_k; out_ receives the output where no
    input requires a gradient.
    """
    refuse("flash_attn_interface", INSTEAD, qv=qv, pack_gqa=pack_gqa, sm_margin=sm_margin)
    tensor_types(q=q, k=k, v=v)
    q, cu_seqlens_q = maybe_contiguous(q), maybe_contiguous(cu_seqlens_q)  # type: ignore[assignment]
    options = mask_options(causal, (window_size_left, window_size_right))
    options |= given(
        cu_seqlens_q=cu_seqlens_q,
        seqused_q=maybe_contiguous(seqused_q),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        kv_batch_idx=maybe_contiguous(kv_batch_idx),
        leftpad_k=maybe_contiguous(leftpad_k),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=splits(num_splits),
    )
    _check_metadata(scheduler_metadata, q, cu_seqlens_q)
    page_table, seqused_k = maybe_contiguous(page_table), maybe_contiguous(seqused_k)
    is_cache = any(t is not None for t in (k_new, v_new, page_table, rotary_cos, rotary_sin))
    if is_cache or cu_seqlens_k_new is not None or seqlens_rotary is not None:
        _only_one("cu_seqlens_k", cu_seqlens_k)
        _only_one("out_", out_)
        (out, lse), _ = cached(
            *(q, k, v, k_new, v_new),
            cache_seqlens=seqused_k,
            page_table=page_table,
            cu_seqlens_new=maybe_contiguous(cu_seqlens_k_new),
            rotary={
                "rotary_cos": rotary_cos,
                "rotary_sin": rotary_sin,
                "rotary_interleaved": rotary_interleaved,
                "rotary_seqlens": maybe_contiguous(seqlens_rotary),
            },
            options=options,
        )
        return out, lse, *_no_partials(out)
    k, v = maybe_contiguous(k), values(v)  # type: ignore[assignment]
    options |= given(cu_seqlens_k=maybe_contiguous(cu_seqlens_k), seqused_k=seqused_k)
    if out_ is None:
        out, lse = attention(q, k, v, return_lse=True, **options)
    else:
        out, lse = out_, q.new_empty(_lse_shape(q, cu_seqlens_q), dtype=lse_dtype(q.dtype))
        torch.ops.fa.forward_out(q, k, v, out=out, lse=lse, **options)
    return out, lse, *_no_partials(out)


def _only_one(name: str, value: Any) -> None:
    if value is not None:
        raise ValueError(
            f"{name}: was given together with pages, new keys or rotary tables, and a cache is "
            f"never packed and its output always new. Leave {name} out."
        )


def _lse_shape(q: Tensor, cu_seqlens_q: Tensor | None) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], *q.shape[2:0:-1])


def _no_partials(out: Tensor) -> tuple[Tensor, Tensor]:
    """In the places of the partial results of splits, which fa does not hand out."""
    empty = out.new_empty(0, dtype=torch.float32)
    return empty, empty.clone()


def _check_metadata(metadata: Tensor | None, q: Tensor, cu_seqlens_q: Tensor | None) -> None:
    if metadata is None:
        return
    tensor_types(scheduler_metadata=metadata)
    batch = batch_size(q, cu_seqlens_q)
    if metadata.dtype != torch.int32 or tuple(metadata.shape) != (batch,):
        raise ValueError(
            f"scheduler_metadata: {list(metadata.shape)} {metadata.dtype} does not belong to this "
            f"call of {batch} sequences. Pass what get_scheduler_metadata returned for batch_size "
            f"{batch}, or None."
        )


@checked(
    **WINDOW_SIDES,
    lse="softmax_lse",
    seqused_q="sequed_q",
    seqused_k="sequed_k",
    causal="is_causal",
)
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Overwrites dq, dk and dv; returns sum_d dO_d O_d, fp32 in the shape of softmax_lse.

    That sum has no rows of padding here; there it is rounded up to the kernel's tiles.
    """
    refuse("_flash_attn_backward", INSTEAD, sm_margin=sm_margin)
    tensors = contiguous(q=q, k=k, v=v, out=out, softmax_lse=softmax_lse)
    options = mask_options(is_causal, (window_size_left, window_size_right)) | given(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=sequed_q,
        seqused_k=sequed_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic or None,
    )
    dout = contiguous(dout=dout)[0]
    return gradients_into(dout, tuple(tensors), {"dq": dq, "dk": dk, "dv": dv}, options)  # type: ignore[arg-type]
