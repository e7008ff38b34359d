# SPDX-License-Identifier: BSD-3-Clause
# Which kernel rows does this build hold, and which would run for a call?
"""Introspection for people and for integrations: `kernels`, `explain`, `supports`. No GPU work."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fa import _abi, _backend, _cuda, _lib, _validate, autograd
from fa._cpu_tiles import TILE_M, TILE_N
from fa._layout import empty_like_order, lse_dtype, pad_head_dim
from fa._types import checked, require
from fa._validate_options import FP8
from fa._validate_types import KINDS, argument_types
from fa.functional import window_options

# Multiprocessors, and bytes of shared memory that one block can have: the library knows a Hopper
# GPU by the latter.
NOMINAL = {
    "h200": (132, 232448),
    "h100": (132, 232448),
    "a100": (108, 166912),
    "rtx3090": (82, 101376),
    "rtx4090": (128, 101376),
}

Spec: TypeAlias = "Tensor | Sequence[Any]"  # a tensor, or (shape, dtype, device)


def kernels() -> list[dict[str, Any]]:
    """Every kernel row of this build, in the order of the table.

    Returns:
        A dict for each: id, op ("forward", "backward"), arch (80, 90), dtype ("bf16", ...), dim_qk,
        dim_v, mask ("none", "band"), kv (what loads keys), tile_m (query rows), tile_n (keys),
        stages, threads, smem_bytes; registers and local_bytes per thread (-1 without a GPU).

    Raises:
        ImportError: libfa.so is missing; with the command that builds it.

    Example:
        >>> [row["id"] for row in fa.kernels() if row["arch"] == 90]  # doctest: +SKIP
        ['sm90_fwd_bf16_d128_band', 'sm90_fwd_bf16_d128_none', ...]
    """
    return _lib.kernels_list()


class _Call:
    """The arguments of `fa.attention` as a plan needs them: operator options, meta tensors."""

    def __init__(self, q: Spec, k: Spec, v: Spec, options: dict[str, Any]) -> None:
        options = dict(options)
        window_options(options.pop("window_size", (-1, -1)), options)
        require("bool", return_lse=options.pop("return_lse", False))
        argument_types("forward", options)
        self.options = {name: value for name, value in options.items() if value is not None}
        tensors = dict(zip("qkv", (q, k, v), strict=True))
        self.needs_grad = torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad
            for t in (*tensors.values(), *self.options.values())
        )
        if torch.is_grad_enabled():
            autograd.refuse_constants(self.options)
        devices = {name: _device(name, t) for name, t in tensors.items()}
        self.device = devices["q"]
        for name, device in devices.items():
            if device != self.device:
                raise ValueError(
                    f"{name}: is on {device} and q on {self.device}. Move it to {self.device}."
                )
        self.q, self.k, self.v = (_meta(t) for t in tensors.values())
        if self.options.get("dropout_p") and "philox_seed_offset" not in self.options:
            # fa.attention would draw it.
            self.options["philox_seed_offset"] = torch.empty(2, dtype=torch.int64, device="meta")
        for name, value in self.options.items():
            if isinstance(value, Tensor) and KINDS["forward"][name].startswith("Tensor"):
                self.options[name] = _meta(value)

    def on_torch(self) -> bool:
        """Whether the torch implementation would run."""
        name = _backend.current()
        return name == "cpu" or (name == "auto" and self.device.type != "cuda")

    def validate(self, kernels: bool) -> None:
        if kernels and self.device.type != "cuda":
            raise ValueError(
                f'q: is on {self.device}, and the backend "{_backend.current()}" takes CUDA '
                "tensors only."
            )
        _validate.forward(self.q, self.k, self.v, self.options, kernels=kernels)

    def params(self, nominal: tuple[int, int] = (0, 0), *, backward: bool = False) -> bytes:
        """fa_params without addresses; head dims padded as fa::forward pads them."""
        options = dict(self.options)
        if options.get("softmax_scale") is None:
            options["softmax_scale"] = self.q.shape[-1] ** -0.5
        q, k, v = (pad_head_dim(t) for t in (self.q, self.k, self.v))
        grad = None
        if backward:
            dout = empty_like_order(q, (*q.shape[:-1], v.shape[-1]))
            dq, dk, dv = (empty_like_order(t, t.shape) for t in (q, k, v))
            sinks = options.get("sinks")
            dsinks = None if sinks is None else torch.empty(sinks.shape, device="meta")
            grad = _abi.Gradients(dout, dq, dk, dv, dsinks=dsinks)
            options.setdefault("deterministic", torch.are_deterministic_algorithms_enabled())
        return _abi.params_from_tensors(
            *(q, k, v),
            grad=grad,
            force_arch=_cuda.force_arch(),
            sm_count=nominal[0],
            smem_limit=nominal[1],
            addresses=False,
            **options,
        )

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """The library plans for the current device."""
        if self.device.type == "cuda" and self.device.index is not None:
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()


def _device(name: str, t: Spec) -> torch.device:
    if isinstance(t, Tensor):
        return t.device
    if isinstance(t, (tuple, list)) and len(t) == 3:
        return torch.device(t[2])
    raise TypeError(
        f"{name} must be a torch.Tensor or (shape, dtype, device), not {type(t).__name__}."
    )


def _meta(t: Spec) -> Tensor:
    if isinstance(t, Tensor):
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return torch.empty(tuple(t[0]), dtype=t[1], device="meta")


@checked()
def explain(q: Spec, k: Spec, v: Spec, *, device: str | None = None, **options: Any) -> str:
    """What would run for this call, in a few lines: the row, its grid, splits and workspace.

    If an input requires a gradient (and gradients are on), the plan of the backward follows.

    Args:
        q, k, v: tensors, or (shape, dtype, device) each.
        device: plan for a GPU that is not here: "h200", "h100", "a100", "rtx3090" or "rtx4090".
        **options: as `fa.attention`.

    Returns:
        The plan; where no row covers the call, every row with the reasons why not.

    Raises:
        TypeError, ValueError: a call that is wrong on every device, or an unknown `device`.
        ImportError: libfa.so is missing.
        RuntimeError: CUDA tensors are asked about and there is no GPU.

    Example:
        >>> q = k = v = torch.randn(1, 128, 8, 64)
        >>> fa.explain(q, k, v, causal=True)
        'backend cpu: torch operations on cpu, ...'
        >>> spec = (1, 4096, 16, 128), torch.bfloat16, "cuda"
        >>> print(fa.explain(spec, spec, spec, device="h200"))  # doctest: +SKIP
        call       forward bf16, head dims 128 and 128; batch 1, seqlen 4096 x 4096, ...
        row        sm90_fwd_bf16_d128_none ...
    """
    call = _Call(q, k, v, options)
    if device is not None:
        if device not in NOMINAL:
            names = ", ".join(f'"{name}"' for name in NOMINAL)
            raise ValueError(f'device: "{device}" is not one of {names}.')
        call.device = torch.device("cuda")
        call.validate(kernels=True)
        return _plans(call, NOMINAL[device])
    if call.on_torch():
        call.validate(kernels=False)
        ways = "forward" if call.q.dtype == FP8 else "forward and backward"
        return (
            f"backend cpu: torch operations on {call.device}, tiles of at most {TILE_M} query rows "
            f"x {TILE_N} keys, sums in {lse_dtype(call.q.dtype)}; {ways}, no splits, "
            "memory linear in the sequence length."
        )
    call.validate(kernels=True)
    with call.guard():
        return _plans(call, (0, 0))


def _plans(call: _Call, nominal: tuple[int, int]) -> str:
    text = _lib.explain(_lib.FORWARD, call.params(nominal))
    if call.needs_grad:
        text += _lib.explain(_lib.BACKWARD, call.params(nominal, backward=True))
    return text


def supports(q: Spec, k: Spec, v: Spec, **options: Any) -> bool | str:
    """Whether `fa.attention(q, k, v, **options)` would run: True, or a sentence that says why not.

    Cheap, launches nothing: the gate for integrations. If an input requires a gradient (and
    gradients are on), the backward counts as well.

    Args:
        q, k, v: tensors, or (shape, dtype, device) each.
        **options: as `fa.attention`.

    Returns:
        True, or the sentence as a string; so compare with `is True`.

    Raises:
        TypeError: an option that does not exist, or one of a wrong type.

    Example:
        >>> q, k, v = ((1, 128, 8, 64), torch.float32, "cpu"), *[torch.randn(1, 128, 3, 64)] * 2
        >>> fa.supports(q, k, v)
        "q: 8 heads are not a positive multiple of k's 3. ..."
    """
    try:
        call = _Call(q, k, v, options)
        on_torch = call.on_torch()
        call.validate(kernels=not on_torch)
        if call.needs_grad:
            autograd.refuse_fp8(q=call.q, k=call.k, v=call.v)
        if on_torch:
            return True
        with call.guard():
            reason = _lib.why_not(_lib.FORWARD, call.params())
            if reason is None and call.needs_grad:
                reason = _lib.why_not(_lib.BACKWARD, call.params(backward=True))
    except (ValueError, NotImplementedError, ImportError) as error:
        return str(error)
    return True if reason is None else reason.removeprefix("fa: not supported: ")
