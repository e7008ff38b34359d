# SPDX-License-Identifier: BSD-3-Clause
# How do libraries call FlashAttention-2's passes one by one, for their own autograd functions?
"""The four raw functions of `flash_attn_interface`, without gradients of their own.

`rng_state` is our philox_seed_offset, int64 [2]: what a forward returned, its backward needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa import _validate
from fa._compat import (
    DENSE,
    WINDOW_SIDES,
    contiguous,
    given,
    gradients_into,
    mask_options,
    maybe_contiguous,
)
from fa._types import checked
from fa.flash_attn._alibi import lse_shift
from fa.flash_attn._call import attend


@checked(**DENSE, **WINDOW_SIDES)
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, S_dmask, rng_state) of dense q, k, v; S_dmask only with dropout."""
    _check_return_softmax(return_softmax, dropout_p)
    with torch.no_grad():
        return attend(
            *(q, k, v, dropout_p, softmax_scale, causal, (window_size_left, window_size_right)),
            *(softcap, alibi_slopes, False, return_softmax),
        )


@checked(**WINDOW_SIDES, page_table="block_table")
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_flash_attn_forward`, packed. zero_tensors: rows of no sequence always are 0."""
    _check_return_softmax(return_softmax, dropout_p)
    with torch.no_grad():
        return attend(
            *(q, k, v, dropout_p, softmax_scale, causal, (window_size_left, window_size_right)),
            *(softcap, alibi_slopes, False, return_softmax),
            cu_seqlens_q=maybe_contiguous(cu_seqlens_q),
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            block_table=block_table,
            leftpad_k=maybe_contiguous(leftpad_k),
            seqused_k=seqused_k,
        )


def _check_return_softmax(return_softmax: bool, dropout_p: float) -> None:
    if return_softmax and not dropout_p > 0:
        raise ValueError(
            f"return_softmax: True, and dropout_p is {dropout_p}: the matrix of weights is made to "
            "show what dropout dropped. Pass False."
        )


@checked(**DENSE, **WINDOW_SIDES, lse="softmax_lse", philox_seed_offset="rng_state")
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Overwrites dq, dk and dv; returns sum_d dO_d O_d, fp32 in the shape of softmax_lse.

    That sum has no rows of padding here; there its lengths are rounded up to 128.
    """
    return _backward(
        dout,
        (q, k, v, out, softmax_lse),
        {"dq": dq, "dk": dk, "dv": dv},
        dropout_p,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
    )


@checked(**WINDOW_SIDES, lse="softmax_lse", philox_seed_offset="rng_state")
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """As `_flash_attn_backward`, packed. zero_tensors: rows of no sequence always are 0."""
    return _backward(
        dout,
        (q, k, v, out, softmax_lse),
        {"dq": dq, "dk": dk, "dv": dv},
        dropout_p,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
        cu_seqlens_q=maybe_contiguous(cu_seqlens_q),
        cu_seqlens_k=maybe_contiguous(cu_seqlens_k),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def _backward(
    dout: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    buffers: dict[str, Tensor | None],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None,
    **options: Any,
) -> Tensor:
    dout, q, k, v, out, lse = contiguous(
        **dict(zip(("dout", "q", "k", "v", "out", "softmax_lse"), (dout, *tensors), strict=True))
    )
    options = mask_options(causal, window) | given(
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic or None,
        **options,
    )
    if dropout_p:
        if rng_state is None:
            raise ValueError(
                f"rng_state: is None, and dropout_p is {dropout_p}. Pass what the forward returned."
            )
        options |= {"dropout_p": dropout_p, "philox_seed_offset": rng_state}
    if alibi_slopes is not None:
        _validate.forward(q, k, v, options, kernels=False)  # before their shapes are used
    shift = lse_shift(q, k, options)
    lse = lse if shift is None else lse - shift
    return gradients_into(dout, (q, k, v, out, lse), buffers, options)
