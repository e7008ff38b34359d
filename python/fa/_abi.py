# SPDX-License-Identifier: BSD-3-Clause
# How does a Python call become the bytes of fa_params?
"""A mirror of the struct of fa.h, checked against the library when it is loaded.

The struct is written by `struct.Struct.pack`, which is fast and thread-safe: no object is shared
between calls. Everything here works without the library and without torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ABI_VERSION = 1
FORWARD, BACKWARD, COMBINE, APPEND_KV = 1, 2, 3, 4  # fa_op
DTYPES = {"float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float32": 4}  # fa_dtype
DTYPE_NAMES = {1: "fp16", 2: "bf16", 3: "e4m3", 4: "fp32"}

UNLIMITED = 1 << 30  # a window or chunk of at least this many keys hides none
# Says "given" of an array where only its presence matters: planning reads no addresses.
PLACEHOLDER = 16

_TENSOR = (
    *(("data", "Q"), ("stride_batch", "q"), ("stride_row", "q"), ("stride_head", "q")),
    *(("stride_dim", "q"), ("dtype", "i"), ("reserved", "i")),
)
_FACTORS = (
    *(("data", "Q"), ("stride_batch", "q"), ("stride_head", "q"), ("stride_block", "q")),
    *(("dtype", "i"), ("block", "i")),
)


def _named(code: str, names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, code) for name in names.split())


# fa.h, in its order: a struct code of a scalar, or the members of a group.
_LAYOUT: tuple[tuple[str, Any], ...] = (
    ("struct_size", "I"),
    ("abi_version", "I"),
    *((name, _TENSOR) for name in ("q", "k", "v", "out")),
    ("lse", (("data", "Q"), ("stride_batch", "q"), ("stride_head", "q"))),
    (
        "shape",
        _named(
            "i", "batch seqlen_q seqlen_k heads_q heads_k dim_qk dim_v total_q total_k reserved"
        ),
    ),
    (
        "score",
        (("scale", "f"), ("softcap", "f"), ("alibi_slopes", _FACTORS), ("sinks", _FACTORS)),
    ),
    ("mask", _named("i", "window_left window_right chunk align")),
    ("seq", _named("Q", "cu_q cu_k used_q used_k leftpad_k batch_index_k")),
    ("pages", (("table", "Q"), ("table_stride", "q"), ("page_size", "i"), ("num_pages", "i"))),
    ("descale", (("q", _FACTORS), ("k", _FACTORS), ("v", _FACTORS))),
    ("dropout", (("p", "f"), ("seed_offset", "Q"))),
    (
        "grad",
        (
            *((name, _TENSOR) for name in ("dout", "dq", "dk", "dv")),
            *(("dlse", "Q"), ("dsinks", "Q"), ("accumulate", "i")),
        ),
    ),
    (
        "options",
        _named(
            "i",
            "num_splits force_arch reserve_sms deterministic batch_invariant sm_count smem_limit",
        ),
    ),
    ("state", (("data", "Q"), ("bytes", "Q"))),
)


def _alignment(member: Any) -> int:
    if isinstance(member, str):
        return struct.calcsize("=" + member)
    return max(_alignment(inner) for _, inner in member)


class _Mirror:
    """Names, offsets and the struct format of a C struct, by the rules of the C ABI."""

    def __init__(self, layout: Iterable[tuple[str, Any]]) -> None:
        self.names: list[str] = []
        self.codes: list[str] = []
        self.offsets: list[int] = []
        self.format = "="
        self.size = 0
        members = tuple(layout)
        self._members("", members)
        self._align(_alignment(members))

    def _align(self, alignment: int) -> None:
        gap = -self.size % alignment
        if gap:
            self.format += f"{gap}x"
            self.size += gap

    def _members(self, prefix: str, members: Iterable[tuple[str, Any]]) -> None:
        for name, member in members:
            self._align(_alignment(member))
            if isinstance(member, str):
                self.names.append(prefix + name)
                self.codes.append(member)
                self.offsets.append(self.size)
                self.format += member
                self.size += struct.calcsize("=" + member)
            else:
                self._members(f"{prefix}{name}.", member)
                self._align(_alignment(member))


_mirror = _Mirror(_LAYOUT)
SIZE = _mirror.size  # sizeof(fa_params)
FIELDS: tuple[str, ...] = tuple(_mirror.names)
INDEX: dict[str, int] = {name: i for i, name in enumerate(FIELDS)}
_struct = struct.Struct(_mirror.format)
pack = _struct.pack  # every field, in the order of FIELDS
unpack = _struct.unpack

# What fa_params_init() writes.
DEFAULTS: tuple[Any, ...] = tuple(
    {
        "struct_size": SIZE,
        "abi_version": ABI_VERSION,
        "score.scale": math.nan,
        "mask.window_left": -1,
        "mask.window_right": -1,
    }.get(name, 0)
    for name in FIELDS
)

_Q, _K, _V, _OUT, _LSE, _SHAPE, _SCORE, _MASK, _SEQ, _PAGES, _DESCALE, _DROPOUT, _GRAD, _OPTIONS = (
    INDEX[name]
    for name in (
        *("q.data", "k.data", "v.data", "out.data", "lse.data", "shape.batch", "score.scale"),
        *("mask.window_left", "seq.cu_q", "pages.table", "descale.q.data", "dropout.p"),
        *("grad.dout.data", "options.num_splits"),
    )
)


def check_layout(fields: Sequence[tuple[str, int, int]]) -> None:
    """Compares this mirror with `fa_abi_layout()`: (name, offset, size) of every field.

    Raises ImportError that names the first field on which the two disagree.
    """
    cure = "The library and this package are of different versions: install both from one build."
    for i, name in enumerate(FIELDS):
        mine = (name, _mirror.offsets[i], struct.calcsize("=" + _mirror.codes[i]))
        if i >= len(fields):
            raise ImportError(f"libfa has no field {name} of fa_params. {cure}")
        if tuple(fields[i]) != mine:
            theirs, offset, size = fields[i]
            raise ImportError(
                f"field {i} of fa_params is {theirs} (offset {offset}, {size} bytes) in libfa and "
                f"{name} (offset {mine[1]}, {mine[2]} bytes) in this package. {cure}"
            )


def pack_params(fields: Mapping[str, Any] | None = None, /, **named: Any) -> bytes:
    """`fa_params` from fields by their paths in fa.h; the others have fa_params_init's values.

    `pack_params({"q.stride_row": 64})`; as a keyword, two underscores stand for the dot:
    `pack_params(q__stride_row=64)`. Raises ValueError for a field that fa.h does not have.
    """
    values = list(DEFAULTS)
    given = dict(fields or {})
    given.update((name.replace("__", "."), value) for name, value in named.items())
    for name, value in given.items():
        index = INDEX.get(name)
        if index is None:
            raise ValueError(f"{name}: fa_params has no such field. See fa.h, or fa._abi.FIELDS.")
        values[index] = value
    return pack(*values)


_codes: dict[object, int] = {}  # a dtype's name costs more than all the rest of a tensor


def dtype_code(dtype: object) -> int:
    """The fa_dtype of a torch or numpy-like dtype; 0 for one that libfa does not know."""
    code = _codes.get(dtype)
    if code is None:
        code = _codes[dtype] = DTYPES.get(str(dtype).rpartition(".")[2], 0)
    return code


def _strides(t: Any) -> tuple[int, ...]:
    strides = t.stride()
    return tuple(strides) if len(strides) == 4 else (0, *strides)


def _fill_tensor(values: list[Any], at: int, t: Any, addresses: bool) -> None:
    data = t.data_ptr() if addresses else 0
    values[at : at + 6] = (data, *_strides(t), dtype_code(t.dtype))


def _fill_factors(values: list[Any], at: int, t: Any, head_dim: int, address: int) -> None:
    """Slopes and sinks: [H] or [B, H]."""
    stride = t.stride()
    batch = stride[0] if len(stride) == 2 and t.shape[0] > 1 else 0
    head = stride[-1] if t.shape[-1] > 1 else 0
    values[at : at + 6] = (address, batch, head, 0, dtype_code(t.dtype), 0)


def _fill_descale(values: list[Any], at: int, t: Any, block: int, address: int) -> None:
    """Broadcastable to [B, H]; with blocks [B, H, S / block]."""
    shape, stride = tuple(t.shape), tuple(t.stride())
    while len(shape) < (3 if block else 2):
        shape, stride = (1, *shape), (0, *stride)
    steps = [0 if n <= 1 else s for n, s in zip(shape, stride, strict=True)]
    steps += [0] * (3 - len(steps))
    values[at : at + 6] = (address, *steps, dtype_code(t.dtype), block)


# fa_combine_params: header, sizes, out_partial, out, out_stride_part, lse_partial, lse,
# lse_stride_part.
_combine = struct.Struct("=II6i" + 2 * "Q4q2i" + "q" + 2 * "Qqq" + "q")


def combine_params(out_partial: Any, lse_partial: Any, out: Any, lse: Any) -> bytes:
    """`fa_combine_params` of [n, B, S, H, D] and [n, B, H, S], or packed [n, total, H, D]."""
    n, *batch, rows, heads, dim = out_partial.shape
    values: list[Any] = [_combine.size, ABI_VERSION, n, *(batch or [1]), rows, heads, dim, 0]
    for t, strides in ((out_partial, out_partial.stride()[1:]), (out, out.stride())):
        strides = strides if batch else (0, *strides)
        values += [t.data_ptr(), *strides, dtype_code(t.dtype), 0]
    values.append(out_partial.stride(0))
    for t, strides in ((lse_partial, lse_partial.stride()[1:-1]), (lse, lse.stride()[:-1])):
        values += [t.data_ptr(), *(strides if batch else (0, *strides))]
    values.append(lse_partial.stride(0))
    return _combine.pack(*values)


def _int32(name: str, t: Any) -> None:
    if not str(t.dtype).endswith("int32"):
        raise ValueError(f"{name}: dtype {t.dtype} is not int32. Convert it with .to(torch.int32).")
    if t.shape[-1] > 1 and t.stride()[-1] != 1:
        raise ValueError(f"{name}: stride {t.stride()[-1]} is not 1. Pass {name}.contiguous().")


class Gradients(NamedTuple):
    """What a backward has beside the forward's tensors; dlse has the strides of lse."""

    dout: Any
    dq: Any
    dk: Any
    dv: Any
    dlse: Any = None
    dsinks: Any = None  # fp32 [Hq]
    accumulate: bool = False


def _fill_gradients(values: list[Any], grad: Gradients, addresses: bool) -> None:
    for i, t in enumerate(grad[:4]):
        _fill_tensor(values, _GRAD + 7 * i, t, addresses)
    for i, t in enumerate((grad.dlse, grad.dsinks)):
        if t is not None:
            values[_GRAD + 28 + i] = t.data_ptr() if addresses else PLACEHOLDER
    values[_GRAD + 30] = int(grad.accumulate)


def params_from_tensors(
    q: Any,
    k: Any,
    v: Any,
    out: Any = None,
    lse: Any = None,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    leftpad_k: Any = None,
    kv_batch_idx: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    descale_block_q: int = 0,
    descale_block_k: int = 0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    philox_seed_offset: Any = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    deterministic: bool | None = None,
    out_dtype: Any = None,
    force_arch: int = 0,
    sm_count: int = 0,
    smem_limit: int = 0,
    addresses: bool = True,
    grad: Gradients | None = None,
) -> bytes:
    """`fa_params` of a call, with the keywords of `fa::forward`.

    The tensors are [B, S, H, D], packed [total, H, D] (with cu_seqlens); any objects with
    `data_ptr()`, `stride()`, `shape` and `dtype` will do. `out` None: dense, in q's dtype or
    `out_dtype`; `lse` None: not wanted. `grad`: of a backward.
    `force_arch`, `sm_count`, `smem_limit`: fa_options.

    `addresses=False` writes no address at all, for planning (`fa_workspace_size`, `fa_explain`),
    which reads none: meta and fake tensors have none. Arrays whose presence matters are then
    written as the address `PLACEHOLDER`. Sizes are translated, not checked: that they agree is
    checked by the operator, what the library can see is checked by the library.

    Raises ValueError for an index array that is not int32 or not contiguous, and for causal=True
    with a right window other than -1 or 0.
    """

    def array(name: str, t: Any) -> int:
        if t is None:
            return 0
        _int32(name, t)
        return t.data_ptr() if addresses else PLACEHOLDER

    def presence(t: Any) -> int:
        return t.data_ptr() if addresses else PLACEHOLDER

    if causal:
        if window_right > 0:
            raise ValueError(
                f"window_right: {window_right} contradicts causal=True, which is a right window of "
                "0. Pass -1 or 0, or causal=False."
            )
        window_right = 0
    values = list(DEFAULTS)
    _fill_tensor(values, _Q, q, addresses)
    _fill_tensor(values, _K, k, addresses)
    _fill_tensor(values, _V, v, addresses)

    q_shape, k_shape, dim_v = q.shape, k.shape, v.shape[-1]
    packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    heads_q, dim_qk = q_shape[-2], q_shape[-1]
    batch = cu_seqlens_q.shape[0] - 1 if packed_q else q_shape[0]
    if out is not None:
        _fill_tensor(values, _OUT, out, addresses)
    else:
        row = heads_q * dim_v
        plane = 0 if packed_q else q_shape[1] * row
        code = dtype_code(out_dtype if out_dtype is not None else q.dtype)
        if code == DTYPES["float8_e4m3fn"]:
            code = DTYPES["bfloat16"]
        values[_OUT : _OUT + 6] = (0, plane, row, dim_v, 1, code)
    if lse is not None:
        stride = lse.stride()
        head = stride[0] if packed_q else stride[1]
        data = lse.data_ptr() if addresses else 0
        values[_LSE : _LSE + 3] = (data, 0 if packed_q else stride[0], head)

    if page_table is not None:
        seqlen_k, total_k = page_table.shape[1] * k_shape[1], 0
    elif packed_k:
        seqlen_k, total_k = max_seqlen_k or 0, k_shape[0]
    else:
        seqlen_k, total_k = k_shape[1], 0
    seqlen_q, total_q = (max_seqlen_q or 0, q_shape[0]) if packed_q else (q_shape[1], 0)
    values[_SHAPE : _SHAPE + 9] = (
        *(batch, seqlen_q, seqlen_k, heads_q, k_shape[-2], dim_qk, dim_v, total_q, total_k),
    )

    if softmax_scale is not None:
        values[_SCORE] = softmax_scale
    values[_SCORE + 1] = softcap
    if alibi_slopes is not None:
        _fill_factors(values, _SCORE + 2, alibi_slopes, heads_q, presence(alibi_slopes))
    if sinks is not None:
        _fill_factors(values, _SCORE + 8, sinks, heads_q, presence(sinks))
    values[_MASK] = min(window_left, UNLIMITED)
    values[_MASK + 1] = min(window_right, UNLIMITED)
    values[_MASK + 2] = min(attention_chunk, UNLIMITED)
    values[_SEQ : _SEQ + 6] = (
        array("cu_seqlens_q", cu_seqlens_q),
        array("cu_seqlens_k", cu_seqlens_k),
        array("seqused_q", seqused_q),
        array("seqused_k", seqused_k),
        array("leftpad_k", leftpad_k),
        array("kv_batch_idx", kv_batch_idx),
    )
    if page_table is not None:
        table = array("page_table", page_table)
        values[_PAGES : _PAGES + 4] = (table, page_table.stride()[0], k_shape[1], k_shape[0])
    for i, (descale, block) in enumerate(
        ((q_descale, descale_block_q), (k_descale, descale_block_k), (v_descale, descale_block_k))
    ):
        if descale is not None:
            _fill_descale(values, _DESCALE + 6 * i, descale, block, presence(descale))
    if dropout_p:
        # In 256ths, which fp32 holds exactly: rounded to fp32, dropout_p might pass a threshold.
        values[_DROPOUT] = min(math.floor(256 * dropout_p + 0.5) / 256, 1 - 2**-24)
        if philox_seed_offset is not None:
            values[_DROPOUT + 1] = presence(philox_seed_offset)
    if grad is not None:
        _fill_gradients(values, grad, addresses)
    values[_OPTIONS : _OPTIONS + 7] = (
        *(num_splits, force_arch, 0, int(bool(deterministic)), int(batch_invariant)),
        *(sm_count, smem_limit),
    )
    return pack(*values)
