# SPDX-License-Identifier: BSD-3-Clause
# What do the operators torch.ops.fa.* do on each device?
"""The operators of namespace `fa`: definition, torch implementation, fakes, composite operators.

Three layers: raw operators without autograd (`fa::_forward`, `fa::backward`, ...), the
autograd.Function around them (autograd.py), and `fa::forward`, which is composite: torch's tracers
and modes see through it. Kernels for CUDA tensors come from libfa_torch.so, or else from _cuda.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa import (
    _backend,
    _buffers,
    _cache_ops,
    _cuda,
    _flops,
    _raw,
    _sharding,
    _shim,
    _validate,
    autograd,
    cpu,
)
from fa._checks import tensor_types
from fa._layout import empty_like_order, lse_dtype, out_dtypes, pad_head_dim
from fa._raw import mapped
from fa._schemas import SCHEMAS
from fa._validate_options import dropout_probability
from fa._validate_types import argument_types

NAMESPACE = "fa"

_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

# Options that choose how a kernel runs and never what it computes: the torch implementation runs in
# one way only, which is deterministic and never splits.
_EXECUTION = ("max_seqlen_q", "max_seqlen_k", "num_splits", "deterministic")


def _meaning(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a validated call that fa.cpu knows."""
    return {name: value for name, value in options.items() if name not in _EXECUTION}


# ---- the torch implementation: CPU tensors, and any device under fa.backend("cpu") -------------


def _forward_torch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    _validate.forward(q, k, v, options, kernels=False)
    _validate.contents(q, k, options)
    with _exactly(q):
        return cpu.forward(q, k, v, **_meaning(options))


def _exactly(t: Tensor) -> torch.autocast:
    """Autocast has chosen the dtypes of the inputs; it must not choose those of every product."""
    return torch.autocast(t.device.type, enabled=False)


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    _refuse_gpu_backend(q)
    return _forward_torch(q, k, v, **options)


def _refuse_gpu_backend(q: Tensor) -> None:
    name = _backend.current()
    if name not in ("auto", "cpu"):
        raise ValueError(
            f'q: is on {q.device}, and the backend "{name}" takes CUDA tensors only. Move the '
            'tensors to a GPU, or choose "auto" or "cpu" (fa.backend, FA_BACKEND).'
        )


def _forward_out_cpu(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, **options: Any
) -> None:
    _refuse_gpu_backend(q)
    _forward_out_torch(q, k, v, out=out, lse=lse, **options)


def _forward_out_torch(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, **options: Any
) -> None:
    _validate.forward(q, k, v, options, kernels=False)
    _buffers.outputs(q, k, v, options, out, lse, kernels=False)
    _validate.contents(q, k, options)
    _buffers.apart({"q": q, "k": k, "v": v}, out=out, lse=lse)
    options["out_dtype"] = out.dtype
    with _exactly(q):
        result, result_lse = cpu.forward(q, k, v, **_meaning(options))
    out.copy_(result)
    lse.copy_(result_lse)


def _backward_torch(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _buffers.backward(dout, q, k, v, out, lse, options, kernels=False)
    _validate.contents(q, k, options)
    with _exactly(q):
        return cpu.backward(dout, q, k, v, out, lse, **_meaning(options))


def _backward_cpu(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _refuse_gpu_backend(q)
    return _backward_torch(dout, q, k, v, out, lse, **options)


def _backward_out(
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
    _buffers.backward(dout, q, k, v, out, lse, options, kernels=False)
    _buffers.gradient_buffers(q, k, v, options, dq, dk, dv)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    _buffers.apart(inputs, dq=dq, dk=dk, dv=dv)
    buffers = (dq, dk, dv)
    # Sums are added before they are rounded.
    options["grad_dtype"] = lse_dtype(q.dtype) if accumulate else dq.dtype
    *gradients, dsinks = torch.ops.fa.backward.default(dout, q, k, v, out, lse, **options)
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if accumulate:
            buffer.add_(gradient)
        else:
            buffer.copy_(gradient)
    return dsinks


# ---- CUDA tensors: the torch implementation under fa.backend("cpu"), else libfa ----------------


def _on_torch() -> bool:
    return _backend.current() == "cpu"


def _forward_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor]:
    """Where libfa_torch.so is not used, this is one more call."""
    return torch.ops.fa._forward.default(
        *(q, k, v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
    )


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return (_forward_torch if _on_torch() else _cuda.forward)(q, k, v, **options)


def _forward_out_cuda(*args: Tensor, **options: Any) -> None:
    (_forward_out_torch if _on_torch() else _cuda.forward_out)(*args, **options)


def _backward_cuda(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (_backward_torch if _on_torch() else _cuda.backward)(*args, **options)


def _backward_out_cuda(*args: Tensor, **options: Any) -> Tensor:
    odd = args[1].shape[-1] % 8 or args[3].shape[-1] % 8
    torch_sums = _on_torch() or odd or options.get("kv_batch_idx") is not None
    return (_backward_out if torch_sums else _cuda.backward_out)(*args, **options)


def _refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Why the call is refused: nothing, or V (ValueError) or N and the sentence, as bytes."""
    text = ""
    kernels = not _on_torch()
    try:
        _validate.forward(q, k, v, options, kernels=kernels)
        if out is not None and lse is not None:
            _buffers.outputs(q, k, v, options, out, lse, kernels=kernels)
        if not kernels:
            _validate.contents(q, k, options)
    except (ValueError, TypeError) as error:
        text = f"V{error}"
    except NotImplementedError as error:
        text = f"N{error}"
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


# ---- fakes: shapes, dtypes and strides; a wrong call fails when it is traced --------------------


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    _validate.forward(q, k, v, options, kernels=False)
    out = empty_like_order(q, (*q.shape[:-1], v.shape[-1]), _out_dtype(q, options))
    return out, q.new_empty(_buffers.lse_shape(q, options), dtype=lse_dtype(q.dtype))


def _out_dtype(q: Tensor, options: dict[str, Any]) -> torch.dtype:
    return options.get("out_dtype") or out_dtypes(q.dtype)[0]


def _forward_out_fake(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, **options: Any
) -> None:
    _validate.forward(q, k, v, options, kernels=False)
    _buffers.outputs(q, k, v, options, out, lse, kernels=False)


def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _buffers.backward(dout, q, k, v, out, lse, options, kernels=False)
    dtype = options.get("grad_dtype")
    return (
        empty_like_order(q, q.shape, dtype or q.dtype),
        empty_like_order(k, k.shape, dtype or k.dtype),
        empty_like_order(v, v.shape, dtype or v.dtype),
        _dsinks_fake(q, options.get("sinks")),
    )


def _backward_kernel_fake(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, dout: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backward_fake(dout, q, k, v, out, lse, **options)


def _backward_out_fake(
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
    _buffers.backward(dout, q, k, v, out, lse, options, kernels=False)
    _buffers.gradient_buffers(q, k, v, options, dq, dk, dv)
    return _dsinks_fake(q, options.get("sinks"))


def _dsinks_fake(q: Tensor, sinks: Tensor | None) -> Tensor:
    return q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


# ---- composite operators -----------------------------------------------------------------------


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`fa::forward`: casts under autocast, draws a seed, pads odd head dims on a GPU, records."""
    tensor_types(q=q, k=k, v=v)
    if type(q) is not Tensor:
        _sharding.notice(q)
        _sharding.refuse(options)
    autograd.refuse_forward_mode(q, k, v, *options.values())
    dropout_p = options.get("dropout_p", 0.0)
    if type(dropout_p) is not float:
        argument_types("forward", {"dropout_p": dropout_p})
    if dropout_p > 0 and options.get("philox_seed_offset") is None:
        dropout_probability(options)
        options["philox_seed_offset"] = torch.randint(
            -(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device
        )
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (_autocast(t, dtype) for t in (q, k, v))
        sinks = options.get("sinks")
        if isinstance(sinks, Tensor) and sinks.dtype != torch.float32:
            options["sinks"] = _autocast(sinks, dtype)
    odd = q.dim() and v.dim() and (q.shape[-1] % 8 or v.shape[-1] % 8)
    if device == "cuda" and odd and q.dtype == k.dtype == v.dtype:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            autograd.refuse_fp8(q=q, k=k, v=v)
        return _padded(q, k, v, options)
    return record(q, k, v, options)


def _autocast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """As torch casts under autocast: every floating point tensor but fp64 (and fp8)."""
    return t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t


def record(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], *, direct: bool = False
) -> tuple[Tensor, Tensor]:
    """The raw operator, inside the autograd.Function if an input requires a gradient.

    `direct`: nothing traces this call.
    """
    if torch.is_grad_enabled():
        if options:
            autograd.refuse_constants(options)
        sinks = options.get("sinks")
        needed = (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sinks is not None and sinks.requires_grad)
        )
        if needed:
            autograd.refuse_fp8(q=q, k=k, v=v)
        if not needed and mapped():
            # Before torch's fallback for vmap, in which an error can be lost under a warning.
            argument_types("forward", options)
            _validate.forward(q, k, v, options, kernels=False)
            needed = True
        if needed:
            rest = dict(options)
            rest.pop("sinks", None)
            deterministic = rest.pop("deterministic", None)
            if deterministic is None:
                deterministic = torch.are_deterministic_algorithms_enabled()
            apply = autograd.apply_plain if direct else autograd.apply
            return apply(q, k, v, sinks, rest, deterministic, direct)
    return torch.ops.fa._forward.default(q, k, v, **options)


def _padded(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Head dims filled up with zeros, which change neither S nor the real O."""
    dim_qk, dim_v = q.shape[-1], v.shape[-1]
    if options.get("softmax_scale") is None:
        options = {**options, "softmax_scale": dim_qk**-0.5}
    q, k, v = (pad_head_dim(t) for t in (q, k, v))
    out, lse = record(q, k, v, options)
    if out.shape[-1] != dim_v:
        out = out.narrow(-1, 0, dim_v).clone()  # out is dense, in the same dimension order
    return out, lse


def combine(
    out_partial: Tensor, lse_partial: Tensor, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`fa::combine`: the raw operator, inside the autograd.Function where a gradient is needed."""
    _buffers.combine(out_partial, lse_partial, out_dtype)
    autograd.refuse_forward_mode(out_partial, lse_partial)
    with _exactly(out_partial):
        needed = out_partial.requires_grad or lse_partial.requires_grad or mapped()
        if torch.is_grad_enabled() and needed:
            return autograd.Combine.apply(out_partial, lse_partial, out_dtype)
        return torch.ops.fa._combine.default(out_partial, lse_partial, out_dtype=out_dtype)


def _combine_torch(
    out_partial: Tensor, lse_partial: Tensor, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    _buffers.combine(out_partial, lse_partial, out_dtype)
    with _exactly(out_partial):
        return cpu.combine(out_partial, lse_partial, out_dtype=out_dtype)


def _combine_cuda(
    out_partial: Tensor, lse_partial: Tensor, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The library's kernel; torch operations for what it does not take (fp64, head dims > 256)."""
    if _on_torch() or not _cuda.combines(out_partial, out_dtype):
        return _combine_torch(out_partial, lse_partial, out_dtype=out_dtype)
    _buffers.combine(out_partial, lse_partial, out_dtype)
    return _cuda.combine(out_partial, lse_partial, out_dtype)


def _combine_fake(
    out_partial: Tensor, lse_partial: Tensor, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    _buffers.combine(out_partial, lse_partial, out_dtype)
    dtype = out_dtype or out_partial.dtype
    out = empty_like_order(out_partial[0], out_partial.shape[1:], dtype)
    return out, lse_partial.new_empty(lse_partial.shape[1:])


# ---- registration ------------------------------------------------------------------------------


def _below_autograd(name: str) -> Any:
    """A kernel at key Autograd that refuses to be differentiated a second time."""
    overload = getattr(torch.ops.fa, name).default

    def refuse(*args: Any, **options: Any) -> Any:
        autograd.refuse_forward_mode(*args, *options.values())
        if torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (*args, *options.values())
        ):
            raise NotImplementedError(
                f"fa::{name}: double backward is not supported: an input requires a gradient. "
                "Call it under torch.no_grad(), or differentiate fa.reference.attention."
            )
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **options)

    return refuse


def _register() -> None:
    impl = _library.impl
    impl("_forward", _forward_cpu, "CPU")
    impl("forward_out", _forward_out_cpu, "CPU")
    impl("_forward_dense", _forward_dense, "CPU")
    impl("backward", _backward_cpu, "CPU")
    impl("_combine", _combine_torch, "CPU")
    impl("_combine", _combine_cuda, "CUDA")
    impl("backward_out", _backward_out, "CPU")
    impl("backward_out", _backward_out_cuda, "CUDA")
    impl("_forward_torch", _forward_torch, "CompositeExplicitAutograd")
    impl("_forward_out_torch", _forward_out_torch, "CompositeExplicitAutograd")
    impl("_refusal", _refusal, "CompositeExplicitAutograd")
    for name in ("_combine", "backward", "backward_out"):
        impl(name, _below_autograd(name), "Autograd")
    _raw.bind()
    impl("forward", forward, "CompositeImplicitAutograd")
    impl("combine", combine, "CompositeImplicitAutograd")
    _cache_ops.register(_library)
    for name, fake in (
        ("_forward_dense", _forward_dense),
        ("_forward", _forward_fake),
        ("_forward_torch", _forward_fake),
        ("forward_out", _forward_out_fake),
        ("_forward_out_torch", _forward_out_fake),
        ("_combine", _combine_fake),
        ("backward", _backward_fake),
        ("backward_out", _backward_out_fake),
        ("_backward_kernel", _backward_kernel_fake),
    ):
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if _shim.register(NAMESPACE):
        _cuda.kernel = torch.ops.fa._backward_kernel.default._op
        _raw.bind_backward(_cuda.by_kernel)
    else:
        impl("_forward", _forward_cuda, "CUDA")
        impl("forward_out", _forward_out_cuda, "CUDA")
        impl("_forward_dense", _forward_dense, "CUDA")
    impl("backward", _backward_cuda, "CUDA")
    _flops.register()
    _sharding.if_loaded()


_register()
