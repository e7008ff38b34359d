# SPDX-License-Identifier: BSD-3-Clause
# Which weights did dropout keep? The matrix that FlashAttention-2 returns for tests.
"""S_dmask: the weights of a call with their sign negative where dropout dropped them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fa import reference
from fa._philox import dropped

LIMIT = 1 << 26
_ROUND = 128


def signed_weights(q: Tensor, k: Tensor, lse: Tensor, options: dict[str, Any]) -> Tensor:
    """[B, Hq, Sq, Sk] in q's dtype, both lengths rounded up to 128 and 0 where nothing is.

    P = exp(S - lse) by the formula of docs/numerics.md, before dropout, in fp32, one sequence and
    head at a time. q, k, lse and `options` are those of the call of `fa::forward`.
    Raises NotImplementedError where the longest lengths multiply to more than LIMIT.
    """
    cu_q, cu_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    table, used = options.get("page_table"), options.get("seqused_k")
    q_rows = _rows(q, cu_q, None)
    k_rows = _rows(k, cu_k, used) if table is None else _paged(k, table, used)
    longest_q = options.get("max_seqlen_q", max((len(x) for x in q_rows), default=0))
    longest_k = options.get("max_seqlen_k", max((len(x) for x in k_rows), default=0))
    if longest_q * longest_k > LIMIT:
        raise NotImplementedError(
            f"return_attn_probs: {longest_q} query rows x {longest_k} keys, and the matrix of all "
            f"weights is made up to 2^26 of them. Leave it out, or ask for shorter sequences."
        )
    shape = (len(q_rows), q.shape[-2], *(-(-n // _ROUND) * _ROUND for n in (longest_q, longest_k)))
    result = q.new_zeros(shape)
    ends = [0] * (len(q_rows) + 1) if cu_q is None else cu_q.tolist()
    for b, (q_b, k_b) in enumerate(zip(q_rows, k_rows, strict=True)):
        lse_b = lse[b] if cu_q is None else lse[:, ends[b] : ends[b + 1]]
        _one(result[b, :, : len(q_b), : len(k_b)], q_b, k_b, lse_b, b, options)
    return result


def _rows(x: Tensor, cu_seqlens: Tensor | None, used: Tensor | None) -> list[Tensor]:
    if cu_seqlens is None:
        rows = list(x.unbind(0))
    else:
        ends = cu_seqlens.tolist()
        rows = [x[begin:end] for begin, end in zip(ends[:-1], ends[1:], strict=True)]
    if used is None:
        return rows
    return [row[:n] for row, n in zip(rows, used.tolist(), strict=True)]


def _paged(x: Tensor, table: Tensor, used: Tensor) -> list[Tensor]:
    """Every page that holds a key of the sequence, put together."""
    size, rows = x.shape[1], zip(table, used.tolist(), strict=True)
    return [x[row[: -(-n // size)].long()].flatten(0, 1)[:n] for row, n in rows]


def _one(
    result: Tensor, q: Tensor, k: Tensor, lse: Tensor, b: int, options: dict[str, Any]
) -> None:
    """One sequence: result [Hq, q_len, k_len], q [q_len, Hq, D], k [k_len, Hkv, D], lse."""
    (heads, q_len, k_len), group = result.shape, q.shape[1] // k.shape[1]
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    softcap, slopes = options.get("softcap", 0.0), options.get("alibi_slopes")
    left, right = options.get("window_left", -1), options.get("window_right", -1)
    right = 0 if options.get("causal") else right
    seen = reference.visible(q_len, k_len, left, right, 0, device=q.device)
    position = torch.arange(q_len, device=q.device)[:, None] + k_len - q_len
    distance = (position - torch.arange(k_len, device=q.device)).abs()
    seed_offset = options["philox_seed_offset"].tolist()
    for h in range(heads):
        s = scale * (q[:, h].float() @ k[:, h // group].float().T)
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            s = s - (slopes if slopes.dim() == 1 else slopes[b])[h] * distance
        shift = lse[h, :, None].masked_fill(lse[h, :, None] == -math.inf, math.inf)
        p = torch.exp(s.masked_fill(~seen, -math.inf) - shift)
        number = torch.tensor([b * heads + h], device=q.device)
        gone = dropped(options["dropout_p"], seed_offset, number, (0, q_len), (0, k_len))[0]
        result[h] = torch.where(gone, -p, p)
