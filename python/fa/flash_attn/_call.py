# SPDX-License-Identifier: BSD-3-Clause
# How does one call of FlashAttention-2 become one call of fa.attention?
"""The forward that the public and the raw functions of this package share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa._compat import contiguous, given, mask_options, maybe_contiguous
from fa._dmask import signed_weights
from fa.flash_attn._alibi import lse_shift
from fa.functional import attention


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_softmax: bool,
    *,
    cu_seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, S_dmask, rng_state); the options are those of `fa::forward`."""
    q, k, v = contiguous(q=q, k=k, v=v)
    if block_table is not None:
        if cu_seqlens_k is not None and seqused_k is None:
            seqused_k = cu_seqlens_k.diff()
        cu_seqlens_k = None
    options = mask_options(causal, window_size) | given(
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic or None,
        cu_seqlens_k=maybe_contiguous(cu_seqlens_k),
        page_table=maybe_contiguous(block_table),
        seqused_k=maybe_contiguous(seqused_k),
        **options,
    )
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if dropout_p:
        rng_state = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
        options |= {"dropout_p": dropout_p, "philox_seed_offset": rng_state}
    out, lse = attention(q, k, v, return_lse=True, **options)
    if return_softmax and dropout_p > 0:
        weights = signed_weights(q, k, lse, options)
    else:
        weights = q.new_empty(0)
    return out, their_lse(lse, q, k, options), weights, rng_state


def their_lse(lse: Tensor, q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    shift = lse_shift(q, k, options)
    return lse if shift is None else lse + shift
