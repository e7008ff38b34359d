# SPDX-License-Identifier: BSD-3-Clause
# How many floating point operations does torch's FLOP counter book for a call?
"""Formulas for torch.utils.flop_counter: 2 per multiply-add, masks not subtracted (as for SDPA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula


def _pairs(q: Tensor, k: Tensor, options: dict[str, Any]) -> int:
    """Sum over sequences of q_len * k_len, times query heads.

    Packed and paged lengths are read from the device where that is possible; of fake tensors all
    sequences count as equally long, and pages as full.
    """
    cu_q, cu_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    heads, table = q.shape[-2], options.get("page_table")
    if table is not None:
        used, batch = options["seqused_k"], options["seqused_k"].shape[0]
        room = table.shape[1] * k.shape[1]
        k_lens = used.tolist() if _readable(used) else [room] * batch
        if cu_q is None:
            return q.shape[1] * sum(k_lens) * heads
        if not _readable(cu_q):
            return q.shape[0] * sum(k_lens) // max(batch, 1) * heads
        return sum(a * b for a, b in zip(cu_q.diff().tolist(), k_lens, strict=True)) * heads
    if cu_q is None and cu_k is None:
        return q.shape[0] * q.shape[1] * k.shape[1] * heads
    batch = next(t.shape[0] - 1 for t in (cu_q, cu_k) if t is not None)
    if not all(t is None or _readable(t) for t in (cu_q, cu_k)):
        rows_q = q.shape[0] if cu_q is not None else q.shape[0] * q.shape[1]
        rows_k = k.shape[0] if cu_k is not None else k.shape[0] * k.shape[1]
        return rows_q * rows_k // max(batch, 1) * heads
    q_lens = cu_q.diff().tolist() if cu_q is not None else [q.shape[1]] * batch
    k_lens = cu_k.diff().tolist() if cu_k is not None else [k.shape[1]] * batch
    return sum(a * b for a, b in zip(q_lens, k_lens, strict=True)) * heads


def _readable(t: Tensor) -> bool:
    return t.device.type != "meta" and not isinstance(t, FakeTensor)


def forward_flops(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> int:
    """S = Q K^T and O = P V."""
    return 2 * _pairs(q, k, options) * (q.shape[-1] + v.shape[-1])


def backward_flops(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any
) -> int:
    """S again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q."""
    return 2 * _pairs(q, k, options) * (3 * q.shape[-1] + 2 * v.shape[-1])


def register() -> None:
    ops = torch.ops.fa
    register_flop_formula([ops._forward, ops.forward_out], get_raw=True)(forward_flops)
    register_flop_formula([ops.backward, ops.backward_out], get_raw=True)(backward_flops)
