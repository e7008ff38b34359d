# SPDX-License-Identifier: BSD-3-Clause
# What does autograd save, and which call gives the gradients?
"""The differentiable form of the raw operators: one autograd.Function per operator, used by all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from fa import _backend, _sharding, cpu
from fa._ranges import ranged
from fa._raw import raw, raw_backward, seen, transformed, wants_gradient

# Options that are tensors and have no gradient.
INDEX_OPTIONS = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "leftpad_k",
    "kv_batch_idx",
    "page_table",
)
CONSTANT_OPTIONS = (
    "alibi_slopes",
    "q_descale",
    "k_descale",
    "v_descale",
    "philox_seed_offset",
)
TENSOR_OPTIONS = (*INDEX_OPTIONS, *CONSTANT_OPTIONS)
NO_TANGENTS = (
    "fa: forward-mode differentiation is not supported: an input carries a tangent. "
    "Use reverse mode (backward, torch.func.vjp), or fa.reference.attention."
)


def refuse_constants(options: dict[str, Any]) -> None:
    """NotImplementedError if an option without a gradient requires one."""
    for name in CONSTANT_OPTIONS:
        t = options.get(name)
        if t is not None and wants_gradient(t):
            raise NotImplementedError(
                f"{name}: requires_grad is True, and attention has no gradient for {name}. "
                f"Pass {name}.detach()."
            )


def refuse_fp8(**tensors: Tensor) -> None:
    """NotImplementedError if a tensor is stored in fp8: then no input has a gradient."""
    for name, t in tensors.items():
        if t.dtype.itemsize == 1:
            raise NotImplementedError(
                f"{name}: {t.dtype} has no backward, and an input requires a gradient. Convert q, "
                "k and v to torch.bfloat16 for training, or call this under torch.no_grad()."
            )


def refuse_forward_mode(*values: object) -> None:
    """NotImplementedError if a tensor among the values carries a tangent (torch.func.jvp).

    Without this the tangent of the result would silently be zero.
    """
    if forward_ad._current_level < 0:
        return
    for t in values:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(seen(t)).tangent is not None:
            raise NotImplementedError(NO_TANGENTS)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients that raise when differentiated, whatever they were computed from.

    torch's decorator of this name lets a gradient whose incoming gradient is a constant pass as a
    constant: in a penalty on the gradient its term would silently be zero.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():  # no create_graph: nobody can differentiate these
            return backward(ctx, *grads)
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        found = [t for t in outputs if t is not None]
        sources = [t for t in (*ctx.saved_tensors, *grads) if t is not None]
        final = iter(_Final.apply(len(found), *found, *sources))
        return tuple(t if t is None else next(final) for t in outputs)

    return wrapper


class _Final(torch.autograd.Function):
    """The first `count` tensors; all are sources of them, so whoever asks for a gradient hears."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "fa: double backward is not supported: the gradients of attention are not "
            "differentiable. Use fa.reference.attention where second derivatives are needed."
        )


def _traced(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return torch.ops.fa._forward.default(q, k, v, **options)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: dict[str, Any],
    deterministic: bool,
    direct: bool,
) -> tuple[Tensor, Tensor]:
    given = options if sinks is None else {**options, "sinks": sinks}
    call = raw if direct else _traced
    return call(q, k, v, given)


def _keep(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    """What the backward needs of a call of `_attend`."""
    q, k, v, sinks, options, deterministic, _ = inputs
    ctx.set_materialize_grads(False)
    names = [n for n in TENSOR_OPTIONS if options.get(n) is not None] if options else ()
    ctx.save_for_backward(q, k, v, *results, sinks, *(options[n] for n in names))
    ctx.tensor_options = names
    # A copy: the caller's dict may change before the backward runs.
    kept = {n: x for n, x in options.items() if not isinstance(x, Tensor)}
    kept.pop("out_dtype", None)
    kept["deterministic"] = deterministic
    ctx.options = kept
    ctx.backend = _backend.current()


class Attention(torch.autograd.Function):
    """(q, k, v, sinks) -> (out, lse); both outputs have a gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        results = _attend(*inputs)
        _keep(ctx, inputs, results)
        return results

    @staticmethod
    @once_differentiable
    @ranged("backward", dout=1)
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * 7
        q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        options = {**ctx.options, **dict(zip(ctx.tensor_options, tensors, strict=True))}
        options |= {name: t for name, t in (("sinks", sinks), ("dlse", dlse)) if t is not None}
        # Below the kernel of fa::backward at key Autograd, which only refuses.
        with _backend.during(ctx.backend), torch._C._AutoDispatchBelowAutograd():
            found = raw_backward(dout, q, k, v, out, lse, options)
            if found is None:
                _sharding.refuse({"dlse": dlse})
                found = torch.ops.fa.backward.default(dout, q, k, v, out, lse, **options)
        dq, dk, dv, dsinks = found
        return dq, dk, dv, dsinks if sinks is not None else None, None, None, None


class TransformedAttention(Attention):
    """`Attention` in the form that torch.func's transforms ask for, which costs the host more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return _attend(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(NO_TANGENTS)


def apply(*inputs: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) with a gradient; the arguments are those of `_attend`."""
    return (TransformedAttention if transformed() else Attention).apply(*inputs)


_apply = super(torch.autograd.Function, Attention).apply  # type: ignore[misc]


def apply_plain(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """`apply` for a call that nothing traces, without its look at every argument."""
    if transformed():
        return apply(q, k, v, sinks, *rest)
    q, k, v = unwrap_if_dead(q), unwrap_if_dead(k), unwrap_if_dead(v)
    return _apply(q, k, v, None if sinks is None else unwrap_if_dead(sinks), *rest)


class Combine(torch.autograd.Function):
    """(out_partial, lse_partial) -> (out, lse); both outputs have a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.fa._combine.default(out_partial, lse_partial, out_dtype=out_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:2], *output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(NO_TANGENTS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return None, None, None
        out_partial, lse_partial, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        return *cpu.combine_backward(dout, out_partial, lse_partial, out, lse, dlse=dlse), None
