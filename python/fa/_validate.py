# SPDX-License-Identifier: BSD-3-Clause
# Is this call one that api.md allows, and if not, which sentence says what to do?
"""Checks of arguments, in full sentences, before anything runs or is written.

Every function returns nothing or raises: TypeError for a wrong Python type, ValueError for a wrong
dtype, shape, device or value, NotImplementedError for what no backend of this version does.
libfa.so checks again what only it can know (strides, alignment, rows of the table).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fa._layout import lse_dtype

Options = Mapping[str, Any]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNEL_FLOATS = (torch.float16, torch.bfloat16)
KERNEL_MAX_DIM = 256
KERNEL_MAX_ROWS = 1 << 30

# Option -> its value when it is off: what kernel rows do not do.
_NO_ROW: dict[str, Any] = {
    "page_table": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "descale_block_q": 0,
    "descale_block_k": 0,
    "dropout_p": 0.0,
    "philox_seed_offset": None,
}
# The same, in every backend.
_NOT_BUILT: dict[str, Any] = {
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "descale_block_q": 0,
    "descale_block_k": 0,
}


def refuse_unbuilt(options: Options, kernels: bool) -> None:
    """Options that are in the schema and that a backend cannot do: refused by name."""
    dropout_probability(options)
    for name, off in (_NO_ROW if kernels else _NOT_BUILT).items():
        value = options.get(name, off)
        if value is not None and (isinstance(value, Tensor) or value != off):
            shown = describe(value) if isinstance(value, Tensor) else value
            who, cure = "backend", "."
            if name not in _NOT_BUILT:
                who = "kernel row"
                cure = ', or run the torch implementation with fa.backend("cpu").'
            raise NotImplementedError(
                f"{name}: {shown} was given, and no {who} of this version implements {name}. "
                f"Leave it out, pass {off}{cure}"
            )


def dropout_probability(options: Options) -> None:
    dropout_p = options.get("dropout_p", 0.0)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: {dropout_p} is outside of [0, 1). Pass 0 for no dropout.")


def describe(t: Tensor) -> str:
    """A tensor in a message: shape, dtype, device."""
    return f"{list(t.shape)} {t.dtype} on {t.device}"


def tensor_types(**tensors: object) -> None:
    """TypeError unless every argument is a tensor."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            shown = "None" if value is None else type(value).__name__
            raise TypeError(f"{name} must be a torch.Tensor, not {shown}.")


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, *, kernels: bool) -> None:
    """Everything that can be checked without reading device data. `kernels`: for libfa's rows."""
    tensor_types(q=q, k=k, v=v)  # torch lets None pass as a tensor
    refuse_unbuilt(options, kernels)
    _numbers(options)
    allowed = KERNEL_FLOATS if kernels else FLOATS
    _dtypes(q, k, v, allowed, kernels)
    batch = _shapes(q, k, v, options, kernels)
    _sequence_tensors(q, batch, k, options)
    _head_tensors(q, batch, options)
    _dropout(q, options)
    out_dtype = options.get("out_dtype")
    if out_dtype is not None and out_dtype not in (q.dtype, lse_dtype(q.dtype)):
        raise ValueError(
            f"out_dtype: {out_dtype} cannot be stored for {q.dtype} inputs. "
            f"Allowed are {q.dtype} and {lse_dtype(q.dtype)}."
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
    names = ", ".join(str(d) for d in allowed)
    if q.dtype not in allowed:
        if kernels and q.dtype.itemsize == 1 and q.dtype.is_floating_point:
            raise NotImplementedError(
                f"q: no kernel row of this version takes {q.dtype}. Rows take {names}."
            )
        cure = (
            "Convert q, k and v (for example with .to(torch.bfloat16)), or run the torch "
            'implementation with fa.backend("cpu").'
            if kernels
            else "Convert q, k and v, for example with .to(torch.float32)."
        )
        raise ValueError(f"q: dtype {q.dtype} is not one of {names}. {cure}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise ValueError(
                f"{name}: dtype {t.dtype} differs from q's {q.dtype}. Pass q, k and v in one dtype."
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
        want = "[total, heads, dim]" if cu is not None else "[batch, seqlen, heads, dim]"
        if t.dim() != (4 if cu is None else 3):
            state = "with" if cu is not None else "without"
            raise ValueError(
                f"{name}: shape {list(t.shape)} has {t.dim()} dimensions. {state.capitalize()} "
                f"{cu_name} it must be {want}."
            )
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is not None and (cu.dim() != 1 or cu.shape[0] < 1):
            raise ValueError(
                f"{name}: shape {list(cu.shape)} is not [batch + 1]. Pass the running sum of the "
                "lengths with a leading 0."
            )
    _agree("v", v, k, -3, "rows")
    _agree("v", v, k, -2, "heads")
    _agree("k", k, q, -1, "head dim")
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
            "key head h // (heads_q / heads_k); repeat or drop heads."
        )
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    kv_index, table = options.get("kv_batch_idx"), options.get("page_table")
    if table is not None:
        _page_table(table, batch, q, k, v, options)
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
        _agree("v", v, k, 0, "batch entries")
    return batch


def _page_table(
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
    _agree("v", v, k, 0, "pages")
    if k.shape[1] == 0:
        raise ValueError(f"k: shape {list(k.shape)} has pages of 0 keys. Pass at least one slot.")


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


def _agree(name: str, t: Tensor, like: Tensor, dim: int, what: str) -> None:
    if t.shape[dim] != like.shape[dim]:
        other = "k" if name == "v" else "q"
        raise ValueError(
            f"{name}: {t.shape[dim]} {what} (shape {list(t.shape)}), and {other} has "
            f"{like.shape[dim]} (shape {list(like.shape)}). They must be equal."
        )


def _dropout(q: Tensor, options: Options) -> None:
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


def _sequence_tensors(q: Tensor, batch: int, k: Tensor, options: Options) -> None:
    """int32 vectors of batch (+ 1) entries on q's device."""
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        index(name, options.get(name), batch + 1, q.device)
    for name in ("seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx"):
        index(name, options.get(name), batch, q.device)


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


def _head_tensors(q: Tensor, batch: int, options: Options) -> None:
    heads = q.shape[-2]
    for name, shapes, dtypes in (
        ("alibi_slopes", ((heads,), (batch, heads)), (torch.float32,)),
        ("sinks", ((heads,),), (torch.float32, q.dtype)),
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
