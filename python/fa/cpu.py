# SPDX-License-Identifier: BSD-3-Clause
# How does attention run without a GPU? In tiles, with online softmax and recomputation.
"""The CPU backend: forward, backward and combine in torch operations.

The algorithm is the kernels' own: query tiles against key tiles, a running maximum and sum per row,
and a backward that recomputes P from the LSE. No tensor of Sq x Sk elements exists at any time.
Sums are fp32 for 16- and 32-bit inputs and fp64 for fp64 (docs/numerics.md).

Callers have checked shapes, dtypes and option values; only what stands in tensors is read here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fa._cpu_tiles import Options, Part, Problem, fold_heads, unfold_heads
from fa._descale import Descales
from fa._layout import accumulation_dtype, empty_like_order, out_dtypes

__all__ = ["backward", "combine", "combine_backward", "empty_like_order", "forward"]


def _problem(
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
    batch_invariant: bool = False,
) -> Problem:
    """The options that both passes compute by; names and defaults are those of `fa::forward`."""
    descales = None
    if any(t is not None for t in (q_descale, k_descale, v_descale)):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        descales = Descales.of(
            *(batch, q.shape[-2], k.shape[-2]),
            (q_descale, k_descale, v_descale),
            *(descale_block_q, descale_block_k),
        )
    return Problem(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        kv_batch_idx=kv_batch_idx,
        page_table=page_table,
        descales=descales,
        batch_invariant=batch_invariant,
        options=Options.of(
            q,
            alibi_slopes,
            sinks,
            softmax_scale,
            causal,
            window_left,
            window_right,
            attention_chunk,
            softcap,
            dropout_p,
            philox_seed_offset,
        ),
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse): the meaning of `fa::forward`, computed where the tensors are.

    q [B, Sq, Hq, D] or [total_q, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], or packed, or pages
    [num_pages, page_size, Hkv, D] with page_table [rows, pages], of which sequence b reads row b or
    kv_batch_idx[b]; out as q with Dv, in `out_dtype` (default q's, of e4m3 bf16), dense in q's
    dimension order; lse [B, Hq, Sq] or [Hq, total_q], contiguous, fp32 (fp64 for fp64 inputs).
    Rows that see no key: out 0, lse -inf (with sinks: the sink); rows of no sequence: 0 and -inf.
    `options` are those of `_problem`.
    """
    problem = _problem(q, k, v, **options)
    with torch.no_grad():
        out = empty_like_order(
            q, (*q.shape[:-1], v.shape[-1]), out_dtype or out_dtypes(q.dtype)[0]
        ).zero_()
        lse = torch.full(problem.lse_shape, -math.inf, dtype=problem.acc, device=q.device)
        for part in problem.parts():
            if problem.options.sinks is not None:
                part.lse(lse).copy_(part.sinks()[:, :, None])
            for begin, end in part.row_tiles():
                _forward_tile(part, begin, end, q, k, v, out, lse)
    return out, lse


def _forward_tile(
    part: Part, begin: int, end: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Rows [begin, end) of one part: every one of them sees at least one key."""
    q_t = part.q_tile(q, begin, end)
    n, rows = q_t.shape[:2]  # (batch x heads_k, group x tile_m, dim_qk)
    o = q_t.new_zeros(n, rows, v.shape[-1])
    if part.options.sinks is None:
        row_max = q_t.new_full((n, rows, 1), -math.inf)
        row_sum = q_t.new_zeros(n, rows, 1)
    else:
        # The sink is a key with value 0: it starts the maximum and the sum, once.
        row_max = part.per_row(part.sinks(), end - begin)
        row_sum = (row_max > -math.inf).to(part.acc)
    for first, last in part.key_tiles(begin, end):
        k_t = part.k_tile(k, first, last)
        v_t = part.v_tile(v, first, last)
        s, _ = part.scores(q_t, k_t, begin, end, first, last)
        new_max = torch.maximum(row_max, s.amax(dim=2, keepdim=True))
        # A row that has seen nothing yet has maximum -inf, and -inf - (-inf) is NaN: subtract 0.
        shift = new_max.masked_fill(new_max == -math.inf, 0.0)
        p = s.sub_(shift).exp_()
        rescale = torch.exp(row_max - shift)
        row_sum = row_sum.mul_(rescale).add_(p.sum(dim=2, keepdim=True))
        o = o.mul_(rescale).baddbmm_(part.drop(p, begin, end, first, last), v_t)
        row_max = new_max
    empty = row_sum == 0  # every visible score is -inf
    if part.options.dropout_p > 0:  # the sum of a row, and its LSE, are without dropout
        o.mul_(part.options.kept_scale)
    o.div_(row_sum.masked_fill(empty, 1.0)).masked_fill_(empty, 0.0)
    row_lse = (row_max + row_sum.log()).masked_fill_(empty, -math.inf)
    unfold_heads(o, part.rows(out, begin, end), part.group)
    part.store_row_values(row_lse, part.lse(lse), begin, end)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    dlse: Tensor | None = None,
    grad_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv, dsinks) for the loss whose gradients of out and lse are dout and dlse.

    out and lse are the forward's; dlse has lse's shape. Gradients are dense in the dimension order
    of q, k and v, in `grad_dtype` (default: the inputs' dtypes); those of one GQA group are summed
    before rounding. dsinks has the sinks' dtype, and shape [0] without sinks. Always deterministic.
    `out_dtype` only describes `out` and changes nothing here; `options` are those of `_problem`.
    """
    del out_dtype
    problem = _problem(q, k, v, **options)
    sinks = problem.options.sinks
    with torch.no_grad():
        # Two sequences may read one cache row or page: their gradients meet in a buffer of sums.
        shared = options.get("kv_batch_idx") is not None or problem.pages is not None
        kv_sum = problem.acc if shared else None
        dq = empty_like_order(q, q.shape, grad_dtype or q.dtype).zero_()
        dk = empty_like_order(k, k.shape, kv_sum or grad_dtype or k.dtype).zero_()
        dv = empty_like_order(v, v.shape, kv_sum or grad_dtype or v.dtype).zero_()
        dsinks = torch.zeros(
            q.shape[-2] if sinks is not None else 0, dtype=problem.acc, device=q.device
        )
        for part in problem.parts():
            dk_sum, dv_sum = part.key_sums(k), part.key_sums(v)
            row_gradients = torch.zeros_like(part.lse(lse), dtype=problem.acc)
            if dlse is not None:
                row_gradients.copy_(part.lse(dlse))
            for begin, end in part.row_tiles():
                _backward_tile(
                    part, begin, end, (dout, q, k, v, out), lse, row_gradients, dq, dk_sum, dv_sum
                )
            part.add_keys(dk_sum, dk)
            part.add_keys(dv_sum, dv)
            if sinks is not None:
                part.add_sinks(dsinks, part.lse(lse), row_gradients)
        dk = dk.to(grad_dtype or k.dtype)
        dv = dv.to(grad_dtype or v.dtype)
    return dq, dk, dv, dsinks.to(sinks.dtype if sinks is not None else q.dtype)


def _backward_tile(
    part: Part,
    begin: int,
    end: int,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    row_gradients: Tensor,  # [batch, heads_q, q_len]: dlse on entry, dlse - dO.O on exit
    dq: Tensor,
    dk_sum: Tensor,  # (batch x heads_k, k_len, dim_qk)
    dv_sum: Tensor,
) -> None:
    dout, q, k, v, out = tensors
    q_t = part.q_tile(q, begin, end)
    do_t = fold_heads(part.rows(dout, begin, end), part.group, part.acc)
    o_t = fold_heads(part.rows(out, begin, end), part.group, part.acc)
    # d loss / d S = P * (dP + dlse - dO.O)
    row_grad = part.load_row_values(row_gradients, begin, end) - (do_t * o_t).sum(2, keepdim=True)
    part.store_row_values(row_grad, row_gradients, begin, end)
    row_lse = part.load_row_values(part.lse(lse), begin, end)
    row_lse = row_lse.masked_fill(row_lse == -math.inf, math.inf)  # P = exp(S - inf) = 0
    dq_t = torch.zeros_like(q_t)
    for first, last in part.key_tiles(begin, end):
        k_t = part.k_tile(k, first, last)
        v_t = part.v_tile(v, first, last)
        s, tanh = part.scores(q_t, k_t, begin, end, first, last)
        p = s.sub_(row_lse).exp_()
        dp = torch.bmm(do_t, v_t.transpose(1, 2))
        kept = p
        if part.options.dropout_p > 0:
            at, kept_scale = (begin, end, first, last), part.options.kept_scale
            kept = part.drop(p.clone(), *at).mul_(kept_scale)
            dp = part.drop(dp, *at).mul_(kept_scale)
        dv_sum[:, first:last].baddbmm_(kept.transpose(1, 2), do_t)
        ds = dp.add_(row_grad).mul_(p)
        if tanh is not None:
            ds.addcmul_(ds, tanh.square_(), value=-1)  # d(c tanh(s/c))/ds = 1 - tanh^2
        # Selected, not multiplied: a hidden dP may be anything, NaN included.
        part.hide(ds, begin, end, first, last, 0.0)
        dq_t.baddbmm_(ds, k_t)
        dk_sum[:, first:last].baddbmm_(ds.transpose(1, 2), q_t)
    unfold_heads(dq_t.mul_(part.options.scale), part.rows(dq, begin, end), part.group)


def combine(
    out_partial: Tensor, lse_partial: Tensor, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of keys into attention over all of them.

    out_partial [n, B, Sq, Hq, Dv] and lse_partial [n, B, Hq, Sq] (packed [n, total_q, Hq, Dv] and
    [n, Hq, total_q]), any strides. Returns out in `out_dtype` (default out_partial's) and lse.
    A partial result with LSE -inf counts as absent, whatever its out holds; if all are, out = 0 and
    lse = -inf. A sink belongs to exactly one of the partial results.
    Raises ValueError for n = 0.
    """
    if out_partial.shape[0] == 0:
        raise ValueError("out_partial: n = 0 partial results; pass at least one.")
    with torch.no_grad():
        acc = accumulation_dtype(out_partial.dtype)
        lse, weights = _combine_weights(lse_partial.to(acc).contiguous())
        total = torch.zeros(out_partial.shape[1:], dtype=acc, device=out_partial.device)
        for weight, part in zip(weights, out_partial, strict=True):
            w = weight.transpose(-1, -2).unsqueeze(-1)  # [B, Sq, Hq, 1]
            total += (part.to(acc) * w).masked_fill_(w == 0, 0.0)
        out = empty_like_order(out_partial[0], total.shape, out_dtype or out_partial.dtype)
        out.copy_(total)
    return out, lse


def combine_backward(
    dout: Tensor,
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (dout_partial, dlse_partial); out and lse are what `combine` returned.

    With w_i = exp(lse_i - lse): dout_i = w_i dout and dlse_i = w_i (dlse + dout . (out_i - out)).
    """
    with torch.no_grad():
        acc = accumulation_dtype(out_partial.dtype)
        _, weights = _combine_weights(lse_partial.to(acc).contiguous())
        dout, out = dout.to(acc), out.to(acc)
        dout_partial = torch.zeros_like(out_partial)
        dlse_partial = torch.zeros_like(lse_partial)
        for i, weight in enumerate(weights):
            w = weight.transpose(-1, -2).unsqueeze(-1)
            dout_partial[i] = (dout * w).masked_fill_(w == 0, 0.0)
            row = ((out_partial[i].to(acc) - out) * dout).sum(-1).transpose(-1, -2)
            if dlse is not None:
                row = row + dlse
            dlse_partial[i] = (row * weight).masked_fill_(weight == 0, 0.0)
    return dout_partial, dlse_partial


def _combine_weights(lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """LSE of all and the weight of each partial result, without overflow: max first."""
    top = lse_partial.amax(dim=0)
    shift = top.masked_fill(top == -math.inf, 0.0)
    terms = torch.exp(lse_partial - shift)  # (n, B, Hq, Sq), <= 1
    total = terms.sum(dim=0)
    absent = total == 0
    lse = (shift + total.log()).masked_fill_(absent, -math.inf)
    return lse, terms / total.masked_fill(absent, 1.0)
