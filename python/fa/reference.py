# SPDX-License-Identifier: BSD-3-Clause
# What is the right answer? Plain attention in fp64, one sequence at a time, for tests and doubters.
"""Attention as its formula says it, without tiles: docs/numerics.md, section "Meaning".

Everything is written with differentiable torch operations, so torch's autograd gives the reference
gradients of q, k, v and sinks, for any loss of out and lse. Memory grows with Sq * Sk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa._philox import dropped, keep_probability
from fa._types import checked


@checked()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    descale_block_q: int = 0,
    descale_block_k: int = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    philox_seed_offset: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention without tiles, one sequence after the other, with every option of `fa::forward`.

    Args:
        q: [B, Sq, Hq, D], or [total_q, Hq, D] with cu_seqlens_q; any floating point dtype.
        k, v: [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv], packed with cu_seqlens_k, or pages [num_pages,
            page_size, Hkv, D] with page_table and seqused_k.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], where packed sequences begin.
        seqused_q, seqused_k, leftpad_k, kv_batch_idx: int32 [B]: rows in use (left padding
            included), rows of padding ahead of the keys, the entry of k and v that is read.
        page_table: int32 [rows, pages].
        q_descale, k_descale, v_descale, descale_block_q, descale_block_k: factors of e4m3 inputs.
        alibi_slopes, sinks: [Hq] or [B, Hq]; [Hq].
        softmax_scale, causal, window_left, window_right, attention_chunk, softcap: the scores and
            which of them are seen; windows of -1 are unlimited, 0 switches chunks and the cap off.
        dropout_p, philox_seed_offset: in [0, 1); int64 [2], needed if it is not 0.
        dtype: the precision of every step: a test passes that of the inputs to learn how far off
            plain PyTorch attention in that dtype is.

    Returns:
        (out, lse), both in `dtype`: out with q's shape and Dv; lse, natural logarithm, [B, Hq, Sq],
        packed [Hq, total_q].

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: index tensors that are none, heads that do not divide, a window without a
            meaning, pages without lengths, dropout without a seed.

    Example:
        >>> q, k, v = torch.randn(3, 1, 64, 2, 32)
        >>> out, lse = fa.reference.attention(q, k, v, causal=True)
        >>> (fa.attention(q, k, v, causal=True) - out).abs().max().item() < 1e-5
        True
    """
    if page_table is not None and (seqused_k is None or cu_seqlens_k is not None):
        raise ValueError("page_table needs seqused_k, and excludes cu_seqlens_k.")
    _whole_numbers(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        kv_batch_idx=kv_batch_idx,
        page_table=page_table,
        philox_seed_offset=philox_seed_offset,
    )
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    if heads_k == 0 or heads_q % heads_k:
        raise ValueError(f"q has {heads_q} heads, not a multiple of k's {heads_k}.")
    if min(window_left, window_right) < -1:
        raise ValueError(f"window ({window_left}, {window_right}): -1 is the only 'unlimited'.")
    if causal:
        if window_right > 0:
            raise ValueError(f"causal=True contradicts window_right={window_right}; use -1 or 0.")
        window_right = 0
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale

    batch = len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else q.shape[0]
    q_parts = _sequences(q.to(dtype), cu_seqlens_q)
    k, v = k.to(dtype), v.to(dtype)
    k_parts, v_parts = (_sequences(x, cu_seqlens_k) for x in (k, v))
    band = (window_left, window_right, attention_chunk)
    if alibi_slopes is not None and alibi_slopes.dim() == 1:
        alibi_slopes = alibi_slopes.expand(batch, heads_q)
    outs, lses = [], []
    for b in range(batch):
        q_b, kv_row = q_parts[b], int(kv_batch_idx[b]) if kv_batch_idx is not None else b
        q_len = int(seqused_q[b]) if seqused_q is not None else len(q_b)
        first = int(leftpad_k[b]) if leftpad_k is not None else 0
        last = int(seqused_k[b]) if seqused_k is not None else len(k_parts[kv_row])
        last = max(first, last)
        if page_table is None:
            k_b, v_b = (parts[kv_row][first:last] for parts in (k_parts, v_parts))
        else:
            seen = visible(q_len, last - first, *band, device=q.device).any(dim=0)
            k_b, v_b = (_pages(x, page_table[kv_row], first, seen) for x in (k, v))
        q_rows = _descaled(q_b[:q_len], q_descale, descale_block_q, b, 0, heads_k)
        out_b, lse_b = _one_sequence(
            q_rows,
            _descaled(k_b, k_descale, descale_block_k, b, first, heads_k),
            _descaled(v_b, v_descale, descale_block_k, b, first, heads_k),
            scale,
            softcap,
            alibi_slopes[b].to(dtype) if alibi_slopes is not None else None,
            sinks.to(dtype) if sinks is not None else None,
            band,
            _kept(dropout_p, philox_seed_offset, b, heads_q, q_len, last - first, dtype),
        )
        # Rows that belong to no sequence: 0 and -inf.
        outs.append(pad(out_b, (0, 0, 0, 0, 0, len(q_b) - q_len)))
        lses.append(pad(lse_b, (0, len(q_b) - q_len), value=-math.inf))
    if cu_seqlens_q is not None:
        slack = len(q) - sum(len(part) for part in q_parts[:batch])
        outs.append(q.new_zeros(slack, heads_q, v.shape[-1], dtype=dtype))
        lses.append(q.new_full((heads_q, slack), -math.inf, dtype=dtype))
        return torch.cat(outs), torch.cat(lses, dim=1)
    if batch == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype), q.new_zeros(
            0, heads_q, q.shape[1], dtype=dtype
        )
    return torch.stack(outs), torch.stack(lses)


def visible(
    q_len: int, k_len: int, left: int, right: int, chunk: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Which key may which query row of one sequence see? Formula: docs/numerics.md, step 4.

    Args:
        q_len, k_len: rows and keys of the sequence.
        left, right: keys around the diagonal, -1: unlimited.
        chunk: positions in chunks of this size see each other only; 0: off.
        device: of the result.

    Returns: bool [q_len, k_len]. Raises nothing: the caller has checked the numbers.
    """
    position = torch.arange(q_len, device=device)[:, None] + k_len - q_len
    key = torch.arange(k_len, device=device)[None, :]
    seen = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    if chunk > 0:
        seen &= position.div(chunk, rounding_mode="floor") == key.div(chunk, rounding_mode="floor")
    return seen


def _whole_numbers(**tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is None:
            continue
        short = "philox" in name and t.numel() != 2
        if short or t.is_floating_point() or t.dim() != (2 if "page" in name else 1):
            what = (
                "rows of integers"
                if "page" in name
                else "two integers"
                if short
                else "a vector of integers"
            )
            raise ValueError(f"{name}: {list(t.shape)} {t.dtype} must be {what}.")


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """[rows, H, D] of every batch entry. Taken apart at once: an index per entry would make the
    gradient of each one as large as the whole tensor."""
    if cu_seqlens is None:
        return x.unbind(0)
    ends = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in zip(ends[:-1], ends[1:], strict=True)]
    return x.split([*lengths, len(x) - sum(lengths)])


def _pages(x: Tensor, entries: Tensor, first: int, seen: Tensor) -> Tensor:
    """[keys, H, D] from key `first` on, out of pages [num_pages, page_size, H, D]; 0 if unseen."""
    keys = torch.arange(first, first + len(seen), device=x.device)[seen]
    rows = x[entries[keys // x.shape[1]].long(), keys % x.shape[1]]
    return x.new_zeros(len(seen), *x.shape[2:]).index_copy(0, seen.nonzero().flatten(), rows)


def _descaled(
    x: Tensor, descale: Tensor | None, block: int, b: int, first: int, heads_k: int
) -> Tensor:
    """x [rows, H, D], of which row 0 stands at place `first`, times the factors of sequence b."""
    if descale is None:
        return x
    heads = x.shape[1]
    if block == 0:
        if descale.dim() == 2:
            descale = descale[b % descale.shape[0]]
        per_head = descale.expand(heads_k).repeat_interleave(heads // heads_k)
        return x * per_head.to(x.dtype)[None, :, None]
    table = descale[b % descale.shape[0]].expand(heads, -1)  # [H, blocks]
    places = torch.arange(first, first + len(x), device=x.device)
    return x * table[:, places // block].T.to(x.dtype)[:, :, None]


def _kept(
    dropout_p: float,
    seed_offset: Tensor | None,
    b: int,
    heads: int,
    q_len: int,
    k_len: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """[Hq, q_len, k_len]: 0 where a weight is dropped, else the scale of those that are kept."""
    if dropout_p == 0:
        return None
    if seed_offset is None:
        raise ValueError(f"dropout_p={dropout_p} needs philox_seed_offset, int64 [2].")
    numbers = torch.arange(b * heads, (b + 1) * heads, device=seed_offset.device)
    gone = dropped(dropout_p, seed_offset.tolist(), numbers, (0, q_len), (0, k_len))
    return (~gone).to(dtype) / max(keep_probability(dropout_p), 1 / 256)


def _one_sequence(
    q: Tensor,  # [q_len, Hq, D]
    k: Tensor,  # [k_len, Hkv, D]
    v: Tensor,  # [k_len, Hkv, Dv]
    scale: float,
    softcap: float,
    slopes: Tensor | None,  # [Hq]
    sinks: Tensor | None,  # [Hq]
    band: tuple[int, int, int],
    kept: Tensor | None,  # [Hq, q_len, k_len]
) -> tuple[Tensor, Tensor]:
    """out [q_len, Hq, Dv] and lse [Hq, q_len] of one sequence."""
    (q_len, heads_q, _), (k_len, heads_k, _) = q.shape, k.shape
    seen = visible(q_len, k_len, *band, device=q.device)  # [q_len, k_len]
    row_sees = seen.any(dim=1)  # [q_len]
    key_seen = seen.any(dim=0)[:, None, None]  # [k_len, 1, 1]
    # Selected, never multiplied: neither a key that no row sees nor a row that sees no key may
    # reach a product, for 0 * NaN is NaN, in the backward as well.
    q = torch.where(row_sees[:, None, None], q, 0.0)
    k = torch.where(key_seen, k, 0.0).repeat_interleave(heads_q // heads_k, dim=1)
    v = torch.where(key_seen, v, 0.0).repeat_interleave(heads_q // heads_k, dim=1)

    s = scale * (q.transpose(0, 1) @ k.permute(1, 2, 0))  # [Hq, q_len, k_len]
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        position = torch.arange(q_len, device=q.device)[:, None] + k_len - q_len
        distance = (position - torch.arange(k_len, device=q.device)).abs()
        s = s - slopes[:, None, None] * distance
    s = torch.where(seen, s, -math.inf)
    # Rows without a key take part with finite scores, and their results are replaced below: the
    # softmax of nothing has no finite gradient.
    s = torch.where(row_sees[:, None], s, 0.0)
    if sinks is None:
        sink_logit = torch.full((heads_q, q_len), -math.inf, dtype=q.dtype, device=q.device)
    else:
        sink_logit = sinks[:, None].expand(heads_q, q_len)
        s = torch.cat([s, sink_logit[:, :, None]], dim=2)
    if s.shape[2] == 0:
        return (s @ v.transpose(0, 1)).transpose(0, 1), sink_logit  # sums of nothing: zeros
    lse = torch.where(row_sees, torch.logsumexp(s, dim=2), sink_logit)
    p = torch.softmax(s, dim=2)[:, :, :k_len]
    if kept is not None:
        p = p * kept
    out = (p @ v.transpose(0, 1)).transpose(0, 1)  # [q_len, Hq, Dv]
    return torch.where(row_sees[:, None, None], out, 0.0), lse
