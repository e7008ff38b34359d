# SPDX-License-Identifier: BSD-3-Clause
# Do pages, dropout and descales fit the call?
"""Checks of the options that bring tensors of their own shapes; raises as _validate.py does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fa._checks import agree, describe, page_rows

Options = Mapping[str, Any]
FP8 = torch.float8_e4m3fn


def page_table(
    table: Tensor, batch: int, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> None:
    """int32 [rows, pages]; k and v are then [num_pages, page_size, heads, dim]."""
    if options.get("cu_seqlens_k") is not None:
        raise ValueError(
            f"page_table: {describe(table)} was given, and k is packed (cu_seqlens_k). k is either "
            "paged or packed: leave one of them out."
        )
    if options.get("seqused_k") is None:
        raise ValueError(
            "page_table: given without seqused_k, so the lengths of the sequences in the cache are "
            "unknown. Pass seqused_k, int32 [batch]."
        )
    page_rows("page_table", table, batch, q.device, options.get("kv_batch_idx"))
    agree("v", v, k, 0, "{} pages")
    if k.shape[1] == 0:
        raise ValueError(f"k: shape {list(k.shape)} has pages of 0 keys. Pass at least one slot.")


def dropout_probability(options: Options) -> None:
    """In [0, 1)."""
    dropout_p = options.get("dropout_p", 0.0)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: {dropout_p} is outside of [0, 1). Pass 0 for no dropout.")


def dropout(q: Tensor, options: Options, kernels: bool) -> None:
    """dropout_p itself was checked with the options that a backend lacks."""
    dropout_p, t = options.get("dropout_p", 0.0), options.get("philox_seed_offset")
    if t is None:
        if dropout_p > 0:
            raise ValueError(
                f"philox_seed_offset: None, and dropout_p is {dropout_p}. Pass int64 [2] on q's "
                "device, a seed and an offset; fa::forward and fa.attention draw them."
            )
        return
    if t.dtype != torch.int64 or tuple(t.shape) != (2,):
        raise ValueError(
            f"philox_seed_offset: {describe(t)} must be int64 of shape [2], a seed and an offset."
        )
    if t.device != q.device:
        raise ValueError(
            f"philox_seed_offset: is on {t.device} and q on {q.device}. Move it with "
            f'.to("{q.device}").'
        )
    if kernels and t.stride(0) != 1:
        raise ValueError(
            f"philox_seed_offset: stride {t.stride(0)} is not 1, and kernels read two neighbouring "
            "int64. Pass philox_seed_offset.contiguous()."
        )


def descales(q: Tensor, k: Tensor, v: Tensor, batch: int, options: Options) -> None:
    """fp32 factors of e4m3 tensors, broadcastable to [B, Hkv]; with blocks [B, H, blocks]."""
    table = options.get("page_table")
    keys = k.shape[-3] if table is None else table.shape[1] * k.shape[1]
    packed_k = options.get("cu_seqlens_k") is not None
    rows = {
        "q": (q, q.shape[-3], options.get("cu_seqlens_q") is not None, "descale_block_q"),
        "k": (k, keys, packed_k, "descale_block_k"),
        "v": (v, keys, packed_k, "descale_block_k"),
    }
    for name, (t, length, packed, block_name) in rows.items():
        descale, block = options.get(f"{name}_descale"), options.get(block_name, 0)
        if block < 0:
            raise ValueError(f"{block_name}: {block} is negative. Pass 0 for no blocks.")
        if descale is not None:
            blocks = None if packed or block == 0 else -(-length // block)
            _descale(f"{name}_descale", descale, t, batch, k.shape[-2], block, blocks)
    for block_name, names in (("descale_block_q", "q"), ("descale_block_k", "kv")):
        block = options.get(block_name, 0)
        if block and all(options.get(f"{x}_descale") is None for x in names):
            wanted = " or ".join(f"{letter}_descale" for letter in names)
            raise ValueError(f"{block_name}: {block} without {wanted}. Pass the factors, or 0.")


def _descale(
    name: str, descale: Tensor, t: Tensor, batch: int, heads_k: int, block: int, blocks: int | None
) -> None:
    if t.dtype != FP8:
        raise ValueError(
            f"{name}: {describe(descale)} was given for a {name[0]} of {t.dtype}. Descales belong "
            f"to {FP8}: multiply {name[0]} by the factor, and leave {name} away."
        )
    if descale.dtype != torch.float32:
        raise ValueError(f"{name}: dtype {descale.dtype} must be torch.float32. Convert it.")
    if descale.device != t.device:
        raise ValueError(f"{name}: is on {descale.device} and q on {t.device}. Move it.")
    heads = t.shape[-2] if block else heads_k
    want: tuple[int | None, ...] = (batch, heads, blocks) if block else (batch, heads)
    shape = tuple(descale.shape)
    fits = len(shape) == 3 if block else len(shape) <= 2
    for n, (got, size) in enumerate(zip(reversed(shape), reversed(want), strict=False)):
        # The number of blocks is exact: one factor for all of them needs no blocks.
        fits = fits and (size is None or got == size or (got == 1 and (n > 0 or not block)))
    if not fits:
        words = "[batch, heads, blocks]" if block else "[batch, key heads]"
        shown = [n if n is not None else "blocks of the longest sequence" for n in want]
        raise ValueError(
            f"{name}: shape {list(shape)} must broadcast to {words} = {shown}; "
            + ("the number of blocks is exact." if block else "[1] is one factor for all.")
        )
