# SPDX-License-Identifier: BSD-3-Clause
# Do the tensors beside q, k and v fit: buffers to write, what the backward gets, partial results?
"""Checks of output buffers and of the operators around the forward; raises as _validate.py does."""

from __future__ import annotations

import torch
from torch import Tensor

from fa import _validate
from fa._checks import tensor_types
from fa._layout import lse_dtype, out_dtypes
from fa._validate_options import Options
from fa.autograd import refuse_fp8


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    out: Tensor,
    lse: Tensor,
    *,
    kernels: bool,
) -> None:
    """The buffers of forward_out."""
    tensor_types(out=out, lse=lse)
    acc = lse_dtype(q.dtype)
    _buffer("out", out, (*q.shape[:-1], v.shape[-1]), out_dtypes(q.dtype), q)
    wanted = options.get("out_dtype")
    if wanted is not None and wanted != out.dtype:
        raise ValueError(
            f"out_dtype: {wanted} differs from the dtype of out, {out.dtype}. Leave out_dtype away."
        )
    _buffer("lse", lse, lse_shape(q, options), (acc,), q)
    for name, t in (("out", out), ("lse", lse)):
        _written(name, t)
    if kernels and lse.shape[-1] > 1 and lse.stride(-1) != 1:
        raise ValueError(
            f"lse: the stride of its last dimension is {lse.stride(-1)}, and kernels write rows "
            "of stride 1. Pass a contiguous tensor."
        )


def lse_shape(q: Tensor, options: Options) -> tuple[int, ...]:
    """[B, Hq, Sq], packed [Hq, total_q]."""
    if options.get("cu_seqlens_q") is not None:
        return (q.shape[1], q.shape[0])
    return (q.shape[0], q.shape[2], q.shape[1])


def _buffer(
    name: str, t: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], q: Tensor
) -> None:
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: shape {list(t.shape)} must be {list(shape)}.")
    if t.dtype not in dtypes:
        names = " or ".join(dict.fromkeys(str(d) for d in dtypes))
        raise ValueError(f"{name}: dtype {t.dtype} must be {names}.")
    if t.device != q.device:
        raise ValueError(f"{name}: is on {t.device} and q on {q.device}. Move it.")


def _written(name: str, t: Tensor) -> None:
    for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if size > 1 and stride == 0:
            raise ValueError(
                f"{name}: dimension {dim} is expanded (stride 0), so that its elements cannot be "
                "written apart. Pass a tensor that owns its memory."
            )


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    *,
    kernels: bool,
) -> None:
    """The forward's checks, and those of what the backward adds."""
    tensor_types(dout=dout, out=out, lse=lse)
    _validate.forward(q, k, v, options, kernels=kernels)
    refuse_fp8(q=q, k=k, v=v)
    acc = lse_dtype(q.dtype)
    out_shape = (*q.shape[:-1], v.shape[-1])
    _buffer("dout", dout, out_shape, (q.dtype, acc), q)
    _buffer("out", out, out_shape, (q.dtype, acc), q)
    _buffer("lse", lse, lse_shape(q, options), (acc,), q)
    dlse = options.get("dlse")
    if dlse is not None:
        _buffer("dlse", dlse, lse_shape(q, options), (acc,), q)
    grad_dtype = options.get("grad_dtype")
    if grad_dtype is not None and grad_dtype not in (q.dtype, acc):
        raise ValueError(
            f"grad_dtype: {grad_dtype} cannot be stored for {q.dtype} inputs. "
            f"Allowed are {q.dtype} and {acc}."
        )


def gradient_buffers(
    q: Tensor, k: Tensor, v: Tensor, options: Options, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """The buffers of backward_out."""
    acc = lse_dtype(q.dtype)
    for name, t, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        _buffer(name, t, tuple(like.shape), (q.dtype, acc), q)
        _written(name, t)
        wanted = options.get("grad_dtype")
        if wanted is not None and t.dtype != wanted:
            raise ValueError(
                f"grad_dtype: {wanted} differs from the dtype of {name}, {t.dtype}. "
                "Leave grad_dtype away."
            )


def apart(inputs: dict[str, Tensor], **written: Tensor) -> None:
    """No two buffers begin at one address, nor at that of an input. Of real tensors only.

    Slices of one larger tensor begin apart.
    """
    places: dict[int, str] = {}
    for name, t in (*inputs.items(), *written.items()):
        if t.numel() == 0:
            continue
        other = places.setdefault(t.data_ptr(), name)
        if other != name and name in written:
            raise ValueError(
                f"{name}: begins at the address of {other}, and would be written while that is in "
                "use. Pass memory of its own."
            )


def combine(out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None) -> None:
    """Partial results: [n, B, Sq, Hq, D] with [n, B, Hq, Sq], or packed [n, total, Hq, D]."""
    tensor_types(out_partial=out_partial, lse_partial=lse_partial)
    dims = out_partial.dim()
    if dims not in (4, 5):
        raise ValueError(
            f"out_partial: shape {list(out_partial.shape)} must be [n, B, Sq, Hq, D], or packed "
            "[n, total_q, Hq, D]."
        )
    if out_partial.shape[0] == 0:
        raise ValueError("out_partial: n = 0 partial results. Pass at least one.")
    n, *batch, rows, heads, _ = out_partial.shape
    want = (n, *batch, heads, rows)
    if tuple(lse_partial.shape) != want:
        raise ValueError(
            f"lse_partial: shape {list(lse_partial.shape)} must be {list(want)} for out_partial "
            f"{list(out_partial.shape)}."
        )
    acc = lse_dtype(out_partial.dtype)
    if out_partial.dtype not in _validate.FLOATS:
        raise ValueError(f"out_partial: dtype {out_partial.dtype} must be a floating point type.")
    if lse_partial.dtype != acc:
        raise ValueError(f"lse_partial: dtype {lse_partial.dtype} must be {acc}.")
    if lse_partial.device != out_partial.device:
        raise ValueError(
            f"lse_partial: is on {lse_partial.device} and out_partial on {out_partial.device}. "
            "Move one of them."
        )
    if out_dtype is not None and out_dtype not in _validate.FLOATS:
        names = ", ".join(str(d) for d in _validate.FLOATS)
        raise ValueError(f"out_dtype: {out_dtype} is not one of {names}.")
