# SPDX-License-Identifier: BSD-3-Clause
# Which sentence does a single wrong tensor get?
"""Checks that several operators share; they raise as _validate.py says."""

from __future__ import annotations

import torch
from torch import Tensor


def describe(t: Tensor) -> str:
    """A tensor in a message: shape, dtype, device."""
    return f"{list(t.shape)} {t.dtype} on {t.device}"


def tensor_types(**tensors: object) -> None:
    """TypeError unless every argument is a tensor."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            shown = "None" if value is None else type(value).__name__
            raise TypeError(f"{name} must be a torch.Tensor, not {shown}.")


def layouts(**tensors: object) -> None:
    """ValueError for a sparse or nested tensor: torch's own refusal is a list of dispatch keys."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            continue
        if t.is_nested:
            raise ValueError(
                f"{name}: is a nested tensor, and attention takes plain ones. Pass {name}.values() "
                f"and {name}.offsets() of a jagged one to fa.attention_varlen, int32 offsets as "
                "cu_seqlens."
            )
        if t.layout != torch.strided:
            raise ValueError(
                f"{name}: layout {t.layout} is not torch.strided. Pass {name}.to_dense()."
            )


def dims(name: str, t: Tensor, cu: Tensor | None, cu_name: str, rows: str = "seqlen") -> None:
    """4 dimensions, packed 3."""
    if t.dim() != (4 if cu is None else 3):
        want = f"[batch, {rows}, heads, dim]" if cu is None else "[total, heads, dim]"
        state = "Without" if cu is None else "With"
        raise ValueError(
            f"{name}: shape {list(t.shape)} has {t.dim()} dimensions. {state} {cu_name} it must be "
            f"{want}."
        )


def batch_size(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """Of queries, whose dimensions are checked first."""
    dims("q", q, cu_seqlens_q, "cu_seqlens_q")
    if cu_seqlens_q is None:
        return q.shape[0]
    index("cu_seqlens_q", cu_seqlens_q, max(1, cu_seqlens_q.numel()), q.device)
    return cu_seqlens_q.shape[0] - 1


def agree(name: str, t: Tensor, like: Tensor, dim: int, what: str) -> None:
    """Sizes that must be equal; `what` holds {} for the number, as "{} rows"."""
    if t.shape[dim] != like.shape[dim]:
        other = "k" if name == "v" else "q"
        raise ValueError(
            f"{name}: {what.format(t.shape[dim])} (shape {list(t.shape)}), and {other} has "
            f"{like.shape[dim]} (shape {list(like.shape)}). They must be equal."
        )


def index(name: str, t: Tensor | None, count: int, device: torch.device) -> None:
    """An optional int32 vector of `count` entries."""
    if t is None:
        return
    if t.dtype != torch.int32:
        raise ValueError(f"{name}: dtype {t.dtype} is not torch.int32. Pass {name}.int().")
    if t.device != device:
        raise ValueError(
            f'{name}: is on {t.device} and q on {device}. Move it with {name}.to("{device}").'
        )
    if tuple(t.shape) != (count,):
        raise ValueError(f"{name}: shape {list(t.shape)} must be [{count}] for this batch.")
    if t.shape[0] > 1 and t.stride(0) != 1:
        raise ValueError(f"{name}: stride {t.stride(0)} must be 1. Pass {name}.contiguous().")


def page_rows(
    name: str, table: Tensor, batch: int, device: torch.device, kv_index: Tensor | None
) -> None:
    """A page table by itself: dtype, device, shape, stride."""
    if table.dtype != torch.int32:
        raise ValueError(f"{name}: dtype {table.dtype} is not torch.int32. Pass {name}.int().")
    if table.device != device:
        raise ValueError(
            f'{name}: is on {table.device} and q on {device}. Move it with {name}.to("{device}").'
        )
    if table.dim() != 2 or (kv_index is None and table.shape[0] != batch):
        raise ValueError(
            f"{name}: shape {list(table.shape)} must be [batch, pages] = [{batch}, pages]; with "
            "kv_batch_idx, which chooses its rows, any number of rows."
        )
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"{name}: stride {table.stride(1)} must be 1. Pass {name}.contiguous().")
