# SPDX-License-Identifier: BSD-3-Clause
# What do torch.ops.fa.append_kv and torch.ops.fa.apply_rotary do on each device?
"""The operators around a cache: kernels, fakes and gradients. No kernel row of libfa does them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa import _backend, _cache, _validate_cache, autograd
from fa._layout import empty_like_order
from fa._raw import mapped, wants_gradient

_CURE = 'Run it in torch operations on the GPU, with fa.backend("cpu").'


def _append_kv(
    k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any
) -> None:
    _validate_cache.append(k_new, v_new, k_cache, v_cache, options)
    _cache.append(k_new, v_new, k_cache, v_cache, **options)


def _append_kv_fake(
    k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any
) -> None:
    _validate_cache.append(k_new, v_new, k_cache, v_cache, options)


def _append_kv_cuda(*args: Tensor, **options: Any) -> None:
    if _backend.current() != "cpu":
        raise NotImplementedError(
            f"fa::append_kv: no kernel of this version writes into a cache. {_CURE}"
        )
    _append_kv(*args, **options)


def _append_kv_autograd(*args: Any, **options: Any) -> None:
    """What is written into a buffer has no gradient: refused, so that none is lost."""
    autograd.refuse_forward_mode(*args, *options.values())
    if torch.is_grad_enabled():
        for name, t in (
            *zip(("k_new", "v_new", "k_cache", "v_cache"), args, strict=False),
            *options.items(),
        ):
            if isinstance(t, Tensor) and t.requires_grad:
                raise NotImplementedError(
                    f"fa::append_kv: {name} requires a gradient, and autograd does not see what is "
                    f"written into a cache. Pass {name}.detach(), or call it under torch.no_grad()."
                )
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.fa.append_kv.default(*args, **options)


def _apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    _validate_cache.rotary(x, cos, sin, positions)
    if positions is not None:
        _validate_cache.position_contents("positions", positions, cos)
    return _cache.rotate(x, cos, sin, positions, interleaved)


def _apply_rotary_fake(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    _validate_cache.rotary(x, cos, sin, positions)
    return empty_like_order(x, x.shape)


def _apply_rotary_cuda(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    if _backend.current() != "cpu":
        raise NotImplementedError(f"fa::apply_rotary: no kernel of this version rotates. {_CURE}")
    return _apply_rotary(x, cos, sin, **options)


class _Rotary(torch.autograd.Function):
    """A rotation's transpose is the rotation by the negative angle."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
    ) -> Tensor:
        return torch.ops.fa._apply_rotary.default(
            x, cos, sin, positions=positions, interleaved=interleaved
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, cos, sin, positions, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin, positions)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(autograd.NO_TANGENTS)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        cos, sin, positions = ctx.saved_tensors
        back = rotary(grad, cos, -sin, positions=positions, interleaved=ctx.interleaved)
        return back, None, None, None, None


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """`fa::apply_rotary`: the raw operator, inside the autograd.Function where a gradient is."""
    _validate_cache.rotary(x, cos, sin, positions)
    autograd.refuse_forward_mode(x, cos, sin)
    if torch.is_grad_enabled():
        for name, t in (("cos", cos), ("sin", sin)):
            if wants_gradient(t):
                raise NotImplementedError(
                    f"{name}: requires_grad is True, and the rotary embedding has no gradient for "
                    f"its tables. Pass {name}.detach()."
                )
        if x.requires_grad or mapped():
            return _Rotary.apply(x, cos, sin, positions, interleaved)
    return torch.ops.fa._apply_rotary.default(
        x, cos, sin, positions=positions, interleaved=interleaved
    )


def register(library: torch.library.Library) -> None:
    library.impl("append_kv", _append_kv, "CPU")
    library.impl("append_kv", _append_kv_cuda, "CUDA")
    library.impl("append_kv", _append_kv_autograd, "Autograd")
    library.impl("_apply_rotary", _apply_rotary, "CPU")
    library.impl("_apply_rotary", _apply_rotary_cuda, "CUDA")
    library.impl("apply_rotary", rotary, "CompositeImplicitAutograd")
    torch.library.register_fake("fa::append_kv", _append_kv_fake, lib=library)
    torch.library.register_fake("fa::_apply_rotary", _apply_rotary_fake, lib=library)
