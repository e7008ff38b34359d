# SPDX-License-Identifier: BSD-3-Clause
# How do the operators reach libfa.so for CUDA tensors, where libfa_torch.so is not used?
"""The ctypes implementation: checks in Python, fa_params as bytes, one C call.

The forward has a faster twin in libfa_torch.so (_shim.py); both fill the same struct. The backward
and everything under fa.backend("cpu") come here in any case.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa import _abi, _backend, _buffers, _lib, _validate
from fa._layout import empty_like_order

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
    out = empty_like_order(q, (*q.shape[:-1], v.shape[-1]), options.get("out_dtype"))
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
    """`fa::backward` for CUDA tensors: the library has no row yet and says so."""
    _buffers.backward(dout, q, k, v, out, lse, options, kernels=True)
    check_padding(q, v)
    library = _lib.load()
    forward_options = {n: x for n, x in options.items() if n not in ("dlse", "grad_dtype")}
    params = forward_params(q, k, v, out, lse, forward_options)
    reason = _lib.why_not(_lib.BACKWARD, params)
    raise NotImplementedError(
        f"fa::backward: {reason or 'the gradients are not passed to kernels yet'} "
        f"(libfa {library.fa_version().decode()}). Run forward and backward under "
        'fa.backend("cpu"), which computes in torch operations on the GPU, or call the forward '
        "under torch.no_grad()."
    )


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
