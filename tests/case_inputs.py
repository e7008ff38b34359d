# SPDX-License-Identifier: BSD-3-Clause
# What do the inputs of a case look like in memory, and what do they hold?
"""Inputs: tensors in poisoned buffers. Guarded: an output in a guarded one."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa import reference

if TYPE_CHECKING:
    from cases import Case

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
GUARD = 128  # elements of poison before and after every tensor; keeps 16-byte alignment

Lengths = tuple[int, ...]


@dataclass
class Inputs:
    """Tensors of a case on one device. `options` are keyword arguments of fa::forward."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    options: dict[str, Any]
    _buffers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # name: (now, before)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.case.out_fp32 else self.q.dtype

    def assert_unchanged(self) -> None:
        """The call must not have written to its inputs, nor around them."""
        for name, (now, before) in self._buffers.items():
            same = torch.equal(now.view(torch.uint8), before.view(torch.uint8))
            assert same, f"{name}: the call wrote to its input or around it"


def make_inputs(case: Case, device: torch.device, poison: float, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()) + seed)
    dtype = DTYPES[case.dtype]
    heads_k, dim_v = case.heads_k or case.heads_q, case.dim_v or case.dim
    rows_q = _rows(case.q, case.slack_q, case.sequences)
    cache_rows = case.sequences + 2 if case.kv_batch_idx is not None else case.sequences
    rows_k = _rows(case.k, case.slack_k, cache_rows)
    shapes = {
        "q": (*rows_q, case.heads_q, case.dim),
        "k": (*rows_k, heads_k, case.dim),
        "v": (*rows_k, heads_k, dim_v),
        "dout": (*rows_q, case.heads_q, dim_v),
    }
    content = _VALUES[case.values](shapes, generator)
    used_q, used_k = _used_rows(case, rows_q), _used_keys(case, rows_k)
    buffers, views = {}, {}
    for (name, x), layout in zip(content.items(), case.layout, strict=True):
        used = used_q if name in ("q", "dout") else used_k
        buffer, view = _place(x.to(dtype), layout, used, poison, device)
        buffers[name], views[name] = (buffer, buffer.clone()), view
    dlse = None
    if case.dlse:
        dlse = torch.randn(*rows_q, case.heads_q, generator=generator)
        dlse = dlse.masked_fill_(~used_q[..., None], poison).transpose(-1, -2).contiguous()
        dlse = dlse.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    return Inputs(
        case, **views, dlse=dlse, options=_options(case, device, generator), _buffers=buffers
    )


def _options(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Keyword arguments of fa::forward that differ from their defaults."""

    def ints(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    options: dict[str, Any] = {
        "causal": case.causal,
        "window_left": case.window[0],
        "window_right": case.window[1],
        "attention_chunk": case.chunk,
        "softcap": case.softcap,
        "softmax_scale": case.scale,
        "out_dtype": torch.float32 if case.out_fp32 else None,
    }
    defaults = {"window_left": -1, "window_right": -1}
    options = {n: v for n, v in options.items() if v is not None and v != defaults.get(n, 0)}
    if case.scale == 0:
        options["softmax_scale"] = 0.0
    for name, side in (("cu_seqlens_q", case.q), ("cu_seqlens_k", case.k)):
        if isinstance(side, tuple):
            options[name] = ints(sum(side[:n]) for n in range(len(side) + 1))
    for name in ("seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx"):
        if getattr(case, name) is not None:
            options[name] = ints(getattr(case, name))
    if case.alibi:
        shape = (case.heads_q,) if case.alibi == "h" else (case.sequences, case.heads_q)
        options["alibi_slopes"] = torch.rand(shape, generator=generator).to(device) * 0.3 + 0.01
    if case.sinks:
        dtype = torch.float32 if case.sinks == "fp32" else DTYPES[case.dtype]
        options["sinks"] = (torch.randn(case.heads_q, generator=generator) * 2).to(device, dtype)
    return options


def _rows(side: int | Lengths, slack: int, batch: int) -> tuple[int, ...]:
    return (sum(side) + slack,) if isinstance(side, tuple) else (batch, side)


def _used_rows(case: Case, rows: tuple[int, ...]) -> Tensor:
    """bool [B, Sq] or [total_q]: rows that belong to a sequence."""
    used = torch.zeros(rows, dtype=torch.bool)
    begin = 0
    for b, length in enumerate(case.lengths_q()):
        if isinstance(case.q, tuple):
            used[begin : begin + length] = True
            begin += case.q[b]
        else:
            used[b, :length] = True
    return used


def _used_keys(case: Case, rows: tuple[int, ...]) -> Tensor:
    """bool [B, Sk] or [total_k]: keys that some query row sees."""
    used = torch.zeros(rows, dtype=torch.bool)
    right = 0 if case.causal else case.window[1]
    begin = 0
    for b, (q_len, k_len) in enumerate(zip(case.lengths_q(), case.lengths_k(), strict=True)):
        seen = reference.visible(q_len, max(0, k_len), case.window[0], right, case.chunk).any(dim=0)
        first = begin + (case.leftpad_k[b] if case.leftpad_k is not None else 0)
        if isinstance(case.k, tuple):
            used[first : first + len(seen)] |= seen
            begin += case.k[b]
        else:
            row = case.kv_batch_idx[b] if case.kv_batch_idx is not None else b
            used[row, first : first + len(seen)] |= seen
    return used


# ---- memory -----------------------------------------------------------------------------------


def strides_of(layout: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of [B, S, H, D] under a layout's name."""
    batch, rows, heads, dim = (max(1, n) for n in shape)
    wide = heads * dim
    return {
        "bshd": (rows * wide, wide, dim, 1),
        "bhsd": (rows * wide, dim, rows * dim, 1),
        "sbhd": (wide, batch * wide, dim, 1),
        "alternate": (2 * rows * wide, 2 * wide, dim, 1),  # every second row of a longer buffer
        "padded": (rows * (wide + 64), wide + 64, dim, 1),  # a slice of wider rows, as packed qkv
        "one_head": (rows * dim, dim, 0, 1),  # heads expanded
        "one_batch": (0, wide, dim, 1),  # batch expanded
        "scalar": (0, 0, 0, 0),  # the gradient of a sum
    }[layout]


def _place(
    x: Tensor, layout: str, used: Tensor, poison: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A poisoned buffer and a view of it, in the given layout, that holds x where `used`."""
    dense = x if x.dim() == 4 else x.unsqueeze(0)
    strides = strides_of(layout, dense.shape)
    span = sum((n - 1) * s for n, s in zip(dense.shape, strides, strict=True)) + 1
    span = span if dense.numel() else 0
    buffer = torch.full((span + 2 * GUARD,), poison, dtype=x.dtype)
    view = buffer.as_strided(dense.shape, strides, GUARD)
    view = view if x.dim() == 4 else view.squeeze(0)
    # Of an expanded dimension the first entry counts.
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x, used = x.narrow(dim, 0, 1), used.narrow(dim, 0, 1) if dim < used.dim() else used
    narrow = buffer.as_strided(x.shape, view.stride(), GUARD)
    narrow.copy_(torch.where(used.view(*used.shape, 1, 1), x, poison))
    buffer = buffer.to(device)
    return buffer, buffer.as_strided(view.shape, view.stride(), GUARD)


class Guarded:
    """A tensor inside a larger buffer: NaN inside before the call, guard bytes around it."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        strides: Sequence[int] | None = None,
    ) -> None:
        if strides is None:
            strides = torch.empty(tuple(shape), device="meta").stride()
        span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        span = span if math.prod(shape) else 0
        self._buffer = torch.full((span + 2 * GUARD,), -7.0, dtype=dtype, device=device)
        self.tensor = self._buffer.as_strided(tuple(shape), tuple(strides), GUARD)
        self.tensor.fill_(math.nan)
        inside = torch.zeros(self._buffer.shape, dtype=torch.bool, device=device)
        inside.as_strided(tuple(shape), tuple(strides), GUARD).fill_(True)
        self._outside = ~inside

    def check(self, name: str = "output") -> None:
        where = (self._outside & (self._buffer != -7.0)).nonzero().flatten()
        assert not len(where), (
            f"{name}: {len(where)} elements around it were overwritten, "
            f"the first at element {int(where[0]) - GUARD}"
        )


# ---- values -----------------------------------------------------------------------------------

Shapes = dict[str, tuple[int, ...]]


def _normal(scale: float) -> Callable[[Shapes, torch.Generator], dict[str, Tensor]]:
    def fill(shapes: Shapes, generator: torch.Generator) -> dict[str, Tensor]:
        x = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return {name: t if name == "dout" else t * scale for name, t in x.items()}

    return fill


def _constant(q: float, k: float) -> Callable[[Shapes, torch.Generator], dict[str, Tensor]]:
    """All scores equal, so that every visible key has the same weight."""

    def fill(shapes: Shapes, generator: torch.Generator) -> dict[str, Tensor]:
        x = _normal(1.0)(shapes, generator)
        return x | {"q": torch.full(shapes["q"], q), "k": torch.full(shapes["k"], k)}

    return fill


def _one_hot_v(shapes: Shapes, generator: torch.Generator) -> dict[str, Tensor]:
    """Column d of O is the weight of keys d, d + Dv, ...: shows which keys were taken."""
    x = _normal(1.0)(shapes, generator)
    rows, dim = shapes["v"][-3], shapes["v"][-1]
    hot = torch.arange(rows)[:, None, None] % dim == torch.arange(dim)
    return x | {"v": hot.float().expand(shapes["v"]).clone()}


_VALUES: dict[str, Callable[[Shapes, torch.Generator], dict[str, Tensor]]] = {
    "normal": _normal(1.0),
    "x3": _normal(3.0),
    "x20": _normal(20.0),
    "onehot": _one_hot_v,
    "const100": _constant(100.0, 100.0),
    "const1000": _constant(1000.0, 1000.0),
    "negative": _constant(1.0, -20.0),  # a maximum that starts at 0 is never replaced
    "negative10": _constant(10.0, -10.0),
    "below_sentinel": _constant(64.0, -64.0),  # scores of -524288 at D 128 and scale 1
}
