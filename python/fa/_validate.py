# SPDX-License-Identifier: BSD-3-Clause
# Is this call one that the operators allow, and if not, which sentence says what to do?
"""Checks of arguments, in full sentences, before anything runs or is written.

Every function returns nothing or raises: TypeError for a wrong Python type, ValueError for a wrong
dtype, shape, device or value, NotImplementedError for what no backend of this version does.
libfa.so checks again what only it can know (strides, alignment, rows of the table).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa._checks import agree, describe, dims, index, tensor_types
from fa._layout import out_dtypes
from fa._validate_options import (
    FP8,
    Options,
    descales,
    dropout,
    dropout_probability,
    page_table,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNEL_FLOATS = (torch.float16, torch.bfloat16)
KERNEL_MAX_DIM = 256
KERNEL_MAX_ROWS = 1 << 30

# Option that no kernel row implements -> what to do instead.
_NO_ROW = {
    "page_table": "Gather the pages into k and v of [batch, seqlen, heads, dim]",
}


def refuse_without_row(options: Options) -> None:
    """Options that are in the schema and that no kernel row does: refused by name."""
    for name, cure in _NO_ROW.items():
        value = options.get(name)
        if value is not None:
            raise NotImplementedError(
                f"{name}: {describe(value)} was given, and no kernel row of this version "
                f"implements {name}. {cure}, or run the torch implementation with "
                'fa.backend("cpu").'
            )


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, *, kernels: bool) -> None:
    """Everything that can be checked without reading device data. `kernels`: for libfa's rows."""
    tensor_types(q=q, k=k, v=v)  # torch lets None pass as a tensor
    dropout_probability(options)
    if kernels:
        refuse_without_row(options)
    _numbers(options)
    allowed = KERNEL_FLOATS if kernels else FLOATS
    _dtypes(q, k, v, allowed, kernels)
    batch = _shapes(q, k, v, options, kernels)
    _sequence_tensors(q, batch, k, options)
    _head_tensors(q, batch, options)
    dropout(q, options, kernels)
    descales(q, k, v, batch, options)
    out_dtype = options.get("out_dtype")
    if out_dtype is not None and out_dtype not in out_dtypes(q.dtype):
        names = ", ".join(str(d) for d in dict.fromkeys(out_dtypes(q.dtype)))
        raise ValueError(
            f"out_dtype: {out_dtype} cannot be stored for {q.dtype} inputs. Allowed are {names}."
        )


def _numbers(options: Options) -> None:
    scale = options.get("softmax_scale")
    if scale is not None and not (math.isfinite(scale) and scale >= 0):
        raise ValueError(
            f"softmax_scale: {scale} is not a finite number >= 0. Pass None for 1/sqrt(D_qk)."
        )
    softcap = options.get("softcap", 0.0)
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(
            f"softcap: {softcap} is not a finite number >= 0. Pass 0 to switch it off."
        )
    for name in ("window_left", "window_right"):
        if options.get(name, -1) < -1:
            raise ValueError(
                f"{name}: {options[name]} is below -1. -1 means unlimited; "
                "otherwise pass a number of keys >= 0."
            )
    right = options.get("window_right", -1)
    if options.get("causal", False) and right > 0:
        raise ValueError(
            f"window_right: {right} contradicts causal=True, which means a right window of 0. "
            "Pass causal=False for this window, or window_right=-1 or 0."
        )
    for name, cure in (
        ("attention_chunk", "Pass 0 for no chunks."),
        ("num_splits", "Pass 0 to let the library choose, 1 for no splits."),
    ):
        if options.get(name, 0) < 0:
            raise ValueError(f"{name}: {options[name]} is negative. {cure}")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        hint = options.get(name)
        if hint is not None and hint < 0:
            raise ValueError(f"{name}: {hint} is negative. Pass the longest length, or None.")


def _dtypes(
    q: Tensor, k: Tensor, v: Tensor, allowed: tuple[torch.dtype, ...], kernels: bool
) -> None:
    if kernels and q.dtype in allowed:
        for name, t in (("k", k), ("v", v)):
            if t.dtype == FP8:
                raise NotImplementedError(
                    f"{name}: no kernel row of this version reads {FP8} {name} with q of "
                    f"{q.dtype}. Pass q in {FP8} too, or run the torch implementation with "
                    'fa.backend("cpu").'
                )
    allowed = (*allowed, FP8)
    names = ", ".join(str(d) for d in allowed)
    if q.dtype not in allowed:
        cure = (
            "Convert q, k and v (for example with .to(torch.bfloat16)), or run the torch "
            'implementation with fa.backend("cpu").'
            if kernels
            else "Convert q, k and v, for example with .to(torch.float32)."
        )
        raise ValueError(f"q: dtype {q.dtype} is not one of {names}. {cure}")
    # 16-bit queries may read a cache that is stored in e4m3, keys and values alike.
    stored, whose = (FP8, "k") if k.dtype == FP8 and q.dtype in KERNEL_FLOATS else (q.dtype, "q")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != stored:
            raise ValueError(
                f"{name}: dtype {t.dtype} differs from {whose}'s {stored}. Pass q, k and v in one "
                f"dtype, or a 16-bit q with k and v in {FP8}."
            )
        if t.device != q.device:
            raise ValueError(
                f'{name}: is on {t.device} and q on {q.device}. Move {name} with .to("{q.device}").'
            )


def _shapes(q: Tensor, k: Tensor, v: Tensor, options: Options, kernels: bool) -> int:
    """The batch size, after all sizes of q, k and v have been found to agree."""
    cu_q, cu_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    for name, t, cu, cu_name in (
        ("q", q, cu_q, "cu_seqlens_q"),
        ("k", k, cu_k, "cu_seqlens_k"),
        ("v", v, cu_k, "cu_seqlens_k"),
    ):
        dims(name, t, cu, cu_name)
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is not None and (cu.dim() != 1 or cu.shape[0] < 1):
            raise ValueError(
                f"{name}: shape {list(cu.shape)} is not [batch + 1]. Pass the running sum of the "
                "lengths with a leading 0."
            )
    agree("v", v, k, -3, "{} rows")
    agree("v", v, k, -2, "{} heads")
    agree("k", k, q, -1, "head dim {}")
    for name, t in (("q", q), ("v", v)):
        if t.shape[-1] == 0:
            raise ValueError(f"{name}: head dim 0. Pass at least one element per head.")
        if kernels and t.shape[-1] > KERNEL_MAX_DIM:
            raise NotImplementedError(
                f"{name}: head dim {t.shape[-1]}, and kernel rows of this version reach "
                f'{KERNEL_MAX_DIM}. Run the torch implementation with fa.backend("cpu").'
            )
    for name, t in (("q", q), ("k", k)):
        if kernels and max(t.shape) >= KERNEL_MAX_ROWS:
            raise ValueError(
                f"{name}: shape {list(t.shape)} has a size of 2^30 or more, which kernels do not "
                "count to. Split the call."
            )
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    if heads_k == 0 or heads_q == 0 or heads_q % heads_k:
        raise ValueError(
            f"q: {heads_q} heads are not a positive multiple of k's {heads_k}. Query head h reads "
            "key head h // (heads_q / heads_k); repeat or drop heads. Tensors are [B, S, H, D]: "
            "pass the [B, H, S, D] of SDPA as .transpose(1, 2)."
        )
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    kv_index, table = options.get("kv_batch_idx"), options.get("page_table")
    if table is not None:
        page_table(table, batch, q, k, v, options)
    elif cu_k is not None:
        if kv_index is not None:
            raise ValueError(
                f"kv_batch_idx: {describe(kv_index)} chooses rows of a dense cache, and k is "
                "packed (cu_seqlens_k). Leave one of them out."
            )
        if cu_k.shape[0] - 1 != batch:
            raise ValueError(
                f"cu_seqlens_k: {cu_k.shape[0] - 1} sequences (shape {list(cu_k.shape)}), and q "
                f"has {batch}. Pass [batch + 1] = [{batch + 1}] entries."
            )
    else:
        if kv_index is None and k.shape[0] != batch:
            raise ValueError(
                f"k: batch size {k.shape[0]} differs from q's {batch}. Expand k and v, or choose "
                "cache rows with kv_batch_idx."
            )
        agree("v", v, k, 0, "{} batch entries")
    return batch


def _sequence_tensors(q: Tensor, batch: int, k: Tensor, options: Options) -> None:
    """int32 vectors of batch (+ 1) entries on q's device."""
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        index(name, options.get(name), batch + 1, q.device)
    for name in ("seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx"):
        index(name, options.get(name), batch, q.device)


def _head_tensors(q: Tensor, batch: int, options: Options) -> None:
    heads = q.shape[-2]
    for name, shapes, dtypes in (
        ("alibi_slopes", ((heads,), (batch, heads)), (torch.float32,)),
        ("sinks", ((heads,),), (torch.float32, out_dtypes(q.dtype)[0])),
    ):
        t = options.get(name)
        if t is None:
            continue
        if t.dtype not in dtypes:
            names = " or ".join(dict.fromkeys(str(d) for d in dtypes))
            raise ValueError(f"{name}: dtype {t.dtype} must be {names}. Convert it with .to().")
        if t.device != q.device:
            raise ValueError(
                f'{name}: is on {t.device} and q on {q.device}. Move it with .to("{q.device}").'
            )
        if tuple(t.shape) not in shapes:
            allowed = " or ".join(str(list(s)) for s in shapes)
            raise ValueError(
                f"{name}: shape {list(t.shape)} must be {allowed}: one value per query head."
            )


def contents(q: Tensor, k: Tensor, options: Options) -> None:
    """What stands in the index tensors: for the torch implementation, which reads them anyway."""
    q_room = _cumulative("cu_seqlens_q", options.get("cu_seqlens_q"), q)
    table = options.get("page_table")
    k_rows, k_name = k.shape[0], "k"
    k_room = _cumulative("cu_seqlens_k", options.get("cu_seqlens_k"), k)
    if table is not None:
        k_room = table.shape[1] * k.shape[1]
        k_rows, k_name = table.shape[0], "page_table"
    for name, room, side in (
        ("seqused_q", q_room, "q"),
        ("seqused_k", k_room, "k"),
        ("leftpad_k", k_room, "k"),
    ):
        t = options.get(name)
        if t is None:
            continue
        for b, used in enumerate(t.tolist()):
            limit = room[b] if isinstance(room, list) else room
            if not 0 <= used <= limit:
                raise ValueError(
                    f"{name}: entry {b} is {used}, and sequence {b} of {side} has room for "
                    f"{limit} rows. Pass values in [0, {limit}]."
                )
    for name, room, block_name in (
        ("q_descale", q_room, "descale_block_q"),
        ("k_descale", k_room, "descale_block_k"),
        ("v_descale", k_room, "descale_block_k"),
    ):
        t, block = options.get(name), options.get(block_name, 0)
        longest = max(room, default=0) if isinstance(room, list) else room
        if t is not None and block and t.shape[2] * block < longest:
            raise ValueError(
                f"{name}: {t.shape[2]} blocks of {block} rows, and the longest sequence has "
                f"{longest} rows. Pass {-(-longest // block)} blocks."
            )
    index = options.get("kv_batch_idx")
    if index is not None:
        for b, row in enumerate(index.tolist()):
            if not 0 <= row < k_rows:
                raise ValueError(
                    f"kv_batch_idx: entry {b} is {row}, and {k_name} has {k_rows} batch entries. "
                    f"Pass values in [0, {k_rows - 1}]."
                )


def _cumulative(name: str, cu: Tensor | None, t: Tensor) -> int | list[int]:
    """Rows that each sequence has in its tensor."""
    if cu is None:
        return t.shape[-3]
    ends = cu.tolist()
    lengths = [b - a for a, b in zip(ends[:-1], ends[1:], strict=True)]
    if ends[0] < 0 or ends[-1] > t.shape[0] or any(n < 0 for n in lengths):
        raise ValueError(
            f"{name}: {ends if len(ends) <= 12 else [*ends[:6], '...', *ends[-6:]]} must not fall, "
            f"start below 0 or end above the {t.shape[0]} rows of its tensor. Pass the running sum "
            "of the lengths."
        )
    return lengths
