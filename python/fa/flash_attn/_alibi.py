# SPDX-License-Identifier: BSD-3-Clause
# By how much does FlashAttention-2's LSE differ from ours under ALiBi?
"""With a causal mask FA2 adds slope * j to the scores and not -slope * (i + Sk - Sq - j).

The weights are the same; its LSE is ours plus slope * (i + Sk - Sq).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa._cache import query_positions


def lse_shift(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor | None:
    """fp32 [B, H, Sq], packed [H, total_q]; None where there is no difference.

    `options` are those of the call of `fa::forward`. Nothing is read from the device.
    """
    slopes, left = options.get("alibi_slopes"), options.get("window_left", -1)
    table, cu_q, cu_k = (options.get(n) for n in ("page_table", "cu_seqlens_q", "cu_seqlens_k"))
    room = k.shape[-3] if table is None else table.shape[1] * k.shape[1]
    longest = options.get("max_seqlen_k", room)
    causal = options.get("causal") or options.get("window_right", -1) == 0
    # A left window that reaches over every key is none, and a mask with one is "local".
    if slopes is None or not causal or 0 <= left < longest:
        return None
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    if batch == 0:
        return None
    k_len = options.get("seqused_k")
    if k_len is None:
        k_len = q.new_full((batch,), room, dtype=torch.int32) if cu_k is None else cu_k.diff()
    if options.get("leftpad_k") is not None:
        k_len = k_len - options["leftpad_k"]
    q_len = q.shape[1] if cu_q is None else cu_q.diff()
    position = query_positions(
        q, k_len - q_len, advance=True, cu_seqlens_q=cu_q, seqused_q=None
    )  # [B, Sq] or [total_q]
    slopes = slopes.expand(batch, -1)  # [B, H]
    if cu_q is None:
        return slopes[:, :, None] * position[:, None, :]
    rows = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    sequence = torch.searchsorted(cu_q[1:].contiguous(), rows, right=True).clamp(max=batch - 1)
    return slopes[sequence].T * position
