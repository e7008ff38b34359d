# SPDX-License-Identifier: BSD-3-Clause
# How are the raw operators called with the least work on the host?
"""`raw` and `raw_backward`: the kernels behind the operators. Only where nothing watches a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor

# The C++ functions behind the operators, without the two Python frames around them. Set by `bind`,
# for this module is imported before the operators are defined.
_full: Any = None
_dense: Any = None
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, dsinks
_backward: Callable[..., Gradients | None] | None = None
_backward_device = "cuda"
_DENSE_OPTIONS = frozenset(("softmax_scale", "causal", "window_left", "window_right"))


_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
transformed = torch._C._are_functorch_transforms_active


def mapped() -> bool:
    """Is one of torch.func's transforms around this call a vmap?

    What vmap hands out never requires a gradient, even where what it was made of does.
    """
    if not transformed():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def seen(t: Tensor) -> Tensor:
    """What a tensor of vmap is made of: the tensor itself tells of no gradient and no tangent."""
    while is_batchedtensor(t):
        t = get_unwrapped(t)
    return t


def wants_gradient(t: Tensor) -> bool:
    """Whether a gradient for t is asked for, also where vmap hides it."""
    return t.requires_grad or (transformed() and seen(t).requires_grad)


def bind() -> None:
    """Once the operators are defined."""
    global _full, _dense
    _full = torch.ops.fa._forward.default._op
    _dense = torch.ops.fa._forward_dense.default._op


def bind_backward(backward: Callable[..., Gradients | None]) -> None:
    """`_cuda.by_kernel`, where libfa_torch.so is in use."""
    global _backward
    _backward = backward


def unwatched(q: Any, k: Any, v: Any) -> bool:
    """May a call skip the dispatcher's operators? True for plain tensors that nothing watches.

    No tangents, and no mode that wants to see the operators.
    """
    return (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and forward_ad._current_level < 0
        and not _dispatch_modes()
        and not _function_modes()
    )


def raw(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) of `fa::_forward`; torch spends about 0.2 microseconds on each argument."""
    if _DENSE_OPTIONS.issuperset(options):
        get = options.get
        return _dense(
            q,
            k,
            v,
            get("softmax_scale"),
            get("causal", False),
            get("window_left", -1),
            get("window_right", -1),
        )
    return _full(q, k, v, **options)


def raw_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: dict[str, Any]
) -> Gradients | None:
    """What `fa::backward` returns, without its way through the dispatcher and back into Python.

    None where that way must be taken: no libfa_torch.so, somebody watches, or a call that the
    kernel leaves to Python. Below autograd only.
    """
    if (
        _backward is None
        or q.device.type != _backward_device
        or type(dout) is not Tensor
        or not unwatched(q, k, v)
        or transformed()
    ):
        return None
    return _backward(dout, q, k, v, out, lse, options)
