# SPDX-License-Identifier: BSD-3-Clause
# How do the operators reach libfa.so for CUDA tensors, where libfa_torch.so is not used?
"""The ctypes implementation: checks in Python, fa_params as bytes, one C call.

Both passes have faster twins in libfa_torch.so (_shim.py), which fill the same struct; that of the
backward leaves here what is wrong or unusual.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa import _abi, _backend, _buffers, _lib, _validate
from fa._layout import empty_like_order, out_dtypes, pad_head_dim

_WORKSPACE = 3  # FA_ERROR_WORKSPACE


def force_arch() -> int:
    """fa_options.force_arch of this thread's backend."""
    code = _backend.BACKENDS[_backend.current()]
    return code if code > 1 else 0


def check_padding(q: Tensor, v: Tensor) -> None:
    """The raw operators take what a kernel takes; the composite pads."""
    if q.shape[-1] % 8 or v.shape[-1] % 8:
        raise RuntimeError(
            f"fa: pad: head dims {q.shape[-1]} and {v.shape[-1]} must be multiples of 8 for a "
            "kernel. torch.ops.fa.forward and fa.attention pad them; this operator does not."
        )


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`fa::_forward` for CUDA tensors."""
    _validate.forward(q, k, v, options, kernels=True)
    check_padding(q, v)
    dtype = options.get("out_dtype") or out_dtypes(q.dtype)[0]
    out = empty_like_order(q, (*q.shape[:-1], v.shape[-1]), dtype)
    lse = torch.empty(_buffers.lse_shape(q, options), dtype=torch.float32, device=q.device)
    _launch(_lib.load().fa_forward, q, forward_params(q, k, v, out, lse, options))
    return out, lse


def forward_out(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, **options: Any
) -> None:
    """`fa::forward_out` for CUDA tensors."""
    _validate.forward(q, k, v, options, kernels=True)
    check_padding(q, v)
    _buffers.outputs(q, k, v, options, out, lse, kernels=True)
    _launch(_lib.load().fa_forward, q, forward_params(q, k, v, out, lse, options))


def forward_params(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: dict[str, Any]
) -> bytes:
    return _abi.params_from_tensors(q, k, v, out, lse, force_arch=force_arch(), **options)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fa::backward` for CUDA tensors."""
    if options.get("deterministic") is None:
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if kernel is not None:
        found = by_kernel(dout, q, k, v, out, lse, options)
        if found is not None:
            return found
    return _backward_checked(dout, q, k, v, out, lse, options)


def by_kernel(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The gradients by fa::_backward_kernel; None for a call that it leaves to Python."""
    assert kernel is not None
    if _backend.current() == "cpu":
        return None
    try:
        dq, dk, dv, dsinks = kernel(q, k, v, **options, out=out, lse=lse, dout=dout)
    except RuntimeError as error:
        if not str(error).startswith(("fa: left to Python", "fa: not supported", "fa: pad")):
            raise
        return None
    return dq, dk, dv, _in_dtype_of(options.get("sinks"), dsinks)


# fa::_backward_kernel of libfa_torch.so, if that is in use: ops.py sets it.
kernel: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None


def _backward_checked(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every check, with its sentence, and the calls that need a copy of something."""
    _buffers.backward(dout, q, k, v, out, lse, options, kernels=True)
    if q.shape[-1] % 8 or v.shape[-1] % 8:
        return _backward_padded(dout, q, k, v, out, lse, options)
    index = options.pop("kv_batch_idx", None)
    if index is not None:
        return _backward_indexed(dout, q, k, v, out, lse, index, options)
    dtype = options.pop("grad_dtype", None)
    dq, dk, dv = (empty_like_order(t, t.shape, dtype) for t in (q, k, v))
    dsinks = _backward(dout, q, k, v, out, lse, dq, dk, dv, False, options)
    return dq, dk, dv, dsinks


def _backward_padded(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Head dims filled up with zeros, as fa::forward does it; their gradients are cut off again."""
    dtype = options.get("grad_dtype")
    if options.get("softmax_scale") is None:
        options["softmax_scale"] = q.shape[-1] ** -0.5
    wide = [pad_head_dim(t) for t in (dout, q, k, v, out)]
    *found, dsinks = _backward_checked(wide[0], wide[1], wide[2], wide[3], wide[4], lse, options)
    dq, dk, dv = (
        empty_like_order(t, t.shape, dtype).copy_(grad[..., : t.shape[-1]])
        for t, grad in zip((q, k, v), found, strict=True)
    )
    return dq, dk, dv, dsinks


def _backward_indexed(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    index: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With kv_batch_idx: on the entries it picks, then summed per entry of k and v in fp32.

    `index_put_` adds in a fixed order.
    """
    dtype = options.pop("grad_dtype", None)
    entry = index.long()
    picked_k, picked_v = (t.index_select(0, entry) for t in (k, v))
    options["grad_dtype"] = torch.float32
    dq, dk, dv, dsinks = backward(dout, q, picked_k, picked_v, out, lse, **options)
    sums = []
    for t, grad in ((k, dk), (v, dv)):
        total = torch.zeros(t.shape, dtype=torch.float32, device=t.device)
        total.index_put_((entry,), grad, accumulate=True)
        sums.append(empty_like_order(t, t.shape, dtype).copy_(total))
    return dq.to(dtype or q.dtype), *sums, dsinks


def backward_out(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool = False,
    **options: Any,
) -> Tensor:
    """`fa::backward_out` for CUDA tensors: kernels write, or add to, the buffers themselves."""
    _buffers.backward(dout, q, k, v, out, lse, options, kernels=True)
    _buffers.gradient_buffers(q, k, v, options, dq, dk, dv)
    options.pop("grad_dtype", None)
    return _backward(dout, q, k, v, out, lse, dq, dk, dv, accumulate, options)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
    options: dict[str, Any],
) -> Tensor:
    """Launches the kernels; returns dsinks in the dtype of the sinks, [0] without them."""
    sinks, dlse = options.get("sinks"), options.pop("dlse", None)
    if options.get("deterministic") is None:
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    dsinks = None if sinks is None else q.new_empty(sinks.shape, dtype=torch.float32)
    if dlse is not None and (dlse.stride() != lse.stride() or lse.stride(-1) != 1):
        lse, dlse = lse.contiguous(), dlse.contiguous()  # they share their strides
    elif lse.stride(-1) != 1:
        lse = lse.contiguous()
    grad = _abi.Gradients(_with_rows(dout), dq, dk, dv, dlse, dsinks, accumulate)
    params = forward_params(q, k, v, out, lse, {**options, "grad": grad})
    try:
        _launch(_lib.load().fa_backward, q, params)
    except NotImplementedError as error:
        raise NotImplementedError(
            f'fa::backward: {error} Under fa.backend("cpu") forward and backward run in torch '
            "operations on the GPU."
        ) from None
    return q.new_empty(0) if dsinks is None else _in_dtype_of(sinks, dsinks)


def _in_dtype_of(sinks: Tensor | None, dsinks: Tensor) -> Tensor:
    """dsinks is summed in fp32."""
    return dsinks if sinks is None or sinks.dtype == dsinks.dtype else dsinks.to(sinks.dtype)


def _with_rows(dout: Tensor) -> Tensor:
    """As kernels read it: autograd hands over what it has, such as one number seen everywhere."""
    unit = 16 // dout.element_size()
    sizes, strides = dout.shape[:-1], dout.stride()
    readable = strides[-1] == 1 and all(
        step % unit == 0 for size, step in zip(sizes, strides, strict=False) if size > 1
    )
    return dout if readable and dout.data_ptr() % 16 == 0 else dout.contiguous()


_COMBINE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMBINE_DIM = 256


def combines(out_partial: Tensor, out_dtype: torch.dtype | None) -> bool:
    """Whether the library's kernel merges these; torch operations take the others."""
    return (
        out_partial.dtype in _COMBINE_DTYPES
        and (out_dtype or out_partial.dtype) in _COMBINE_DTYPES
        and 1 <= out_partial.shape[-1] <= _COMBINE_DIM
        and _lib.available()
        and _lib.load().fa_kernel_count() > 0
    )


def combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """`fa::_combine` for CUDA tensors where `combines` holds."""
    if out_partial.stride(-1) != 1:
        out_partial = out_partial.contiguous()
    if lse_partial.stride(-1) != 1:
        lse_partial = lse_partial.contiguous()
    out = empty_like_order(out_partial[0], out_partial.shape[1:], out_dtype or out_partial.dtype)
    lse = lse_partial.new_empty(lse_partial.shape[1:])
    with torch.cuda.device(out.device):
        stream = torch.cuda.current_stream().cuda_stream
        params = _abi.combine_params(out_partial, lse_partial, out, lse)
        _lib.check(_lib.load().fa_combine(params, stream))
    return out, lse


def _launch(function: Callable[..., int], q: Tensor, params: bytes) -> None:
    """One call on the current stream of q's device, with a workspace of torch's where needed."""
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream().cuda_stream
        needed = ctypes.c_size_t()
        status = function(params, None, 0, ctypes.byref(needed), stream)
        if status == _WORKSPACE:
            workspace = torch.empty(needed.value, dtype=torch.uint8, device=q.device)
            status = function(params, workspace.data_ptr(), needed.value, None, stream)
        try:
            _lib.check(status)
        except NotImplementedError as error:
            raise NotImplementedError(str(error).removeprefix("fa: not supported: ")) from None
