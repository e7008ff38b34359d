# SPDX-License-Identifier: BSD-3-Clause
# How does a GPU test call the backward of one architecture, and what may that architecture refuse?
"""Forced backwards into guarded and poisoned gradients, and the rule of their refusals."""

from __future__ import annotations

import functools
from typing import Any

import harness
import pytest
import torch
from harness import DEVICE, ON_CPU
from torch import Tensor

import fa
from cases import DTYPES, Case, Guarded, Inputs
from compare import Expected, Result, assert_result, expected
from libfa import BACKWARD, Row

GRADIENTS = ("dq", "dk", "dv")


@functools.cache
def rows() -> tuple[Row, ...]:
    """Backward rows that this device can run."""
    held = tuple(row for row in harness.rows() if row.op == BACKWARD)
    if not torch.cuda.is_available():
        return held
    hopper = torch.cuda.get_device_capability()[0] == 9
    return tuple(row for row in held if hopper or row.arch == 80)


def each_backend() -> pytest.MarkDecorator:
    """Over the architectures with a backward row; over "auto", which then fails, without one."""
    names = ("cpu",) if ON_CPU else tuple(dict.fromkeys(row.backend for row in rows()))
    return pytest.mark.parametrize("backend", names or ("auto",))


def covered(case: Case, backend: str = "auto") -> bool:
    """Whether a backward row (of one architecture) has the dtype, head dims, mask and score."""
    dim, dim_v = (-(-d // 8) * 8 for d in (case.dim, case.dim_v or case.dim))
    masked = bool(case.features & {"causal", "window_left", "window_right", "chunk"})
    scored = bool(case.features & {"softcap", "alibi"})
    return any(
        backend in ("auto", row.backend)
        and DTYPES[case.dtype] == getattr(torch, row.dtype)
        and row.dim_qk >= dim
        and row.dim_v >= dim_v
        and (row.mask == "band" or not masked)
        and ("_any" in row.id or not scored)
        for row in rows()
    )


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse, of the kernels where they can, else of the torch implementation."""
    for backend in ("auto", "cpu"):
        try:
            result = harness.call(inputs, backend)
        except NotImplementedError:
            continue
        return result.out, result.lse
    raise AssertionError("the torch implementation refused the forward")


def backward_options(inputs: Inputs, more: dict[str, Any]) -> dict[str, Any]:
    options = {n: x for n, x in (inputs.options | more).items() if n != "out_dtype"}
    return options if inputs.dlse is None else options | {"dlse": inputs.dlse}


def call(inputs: Inputs, backend: str, out: Tensor, lse: Tensor, **more: Any) -> Result:
    """The backward through `fa::backward`, which allocates."""
    with fa.backend(backend), torch.no_grad():
        dq, dk, dv, dsinks = torch.ops.fa.backward(
            *(inputs.dout, inputs.q, inputs.k, inputs.v, out, lse), **backward_options(inputs, more)
        )
    sinks = inputs.options.get("sinks")
    assert dsinks.shape == ((0,) if sinks is None else sinks.shape)
    assert sinks is None or dsinks.dtype == sinks.dtype
    return Result(out, lse, dq, dk, dv, dsinks if sinks is not None else None)


def call_guarded(
    inputs: Inputs,
    backend: str,
    out: Tensor,
    lse: Tensor,
    *,
    dtype: torch.dtype | None = None,
    start: dict[str, Tensor] | None = None,
    **more: Any,
) -> Result:
    """The backward into gradients that hold NaN (or `start`) and lie inside guarded buffers."""
    held = {
        f"d{name}": Guarded(tuple(t.shape), dtype or t.dtype, DEVICE)
        for name, t in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
    for name, value in (start or {}).items():
        held[name].tensor.copy_(value)
    with fa.backend(backend), torch.no_grad():
        dsinks = torch.ops.fa.backward_out(
            *(inputs.dout, inputs.q, inputs.k, inputs.v, out, lse),
            **backward_options(inputs, more),
            **{name: guarded.tensor for name, guarded in held.items()},
        )
    for name, guarded in held.items():
        guarded.check(name)
    result = Result(out, lse, *(held[name].tensor for name in GRADIENTS))
    result.dsinks = dsinks if "sinks" in inputs.options else None
    return result


def through_autograd(inputs: Inputs, backend: str, **more: Any) -> Result:
    """Forward and backward as torch.autograd runs them."""
    leaves = {n: getattr(inputs, n).detach().requires_grad_() for n in ("q", "k", "v")}
    options = inputs.options | more
    if "sinks" in options:
        leaves["sinks"] = options.pop("sinks").detach().requires_grad_()
    with fa.backend(backend):
        out, lse = torch.ops.fa.forward(
            *(leaves[n] for n in "qkv"), **options, **{n: leaves[n] for n in leaves if n == "sinks"}
        )
    outputs, given = [out], [inputs.dout]
    if inputs.dlse is not None:
        outputs, given = [out, lse], [inputs.dout, inputs.dlse]
    grads = torch.autograd.grad(outputs, list(leaves.values()), given)
    return Result(out.detach(), lse.detach(), *grads)


def right_for(inputs: Inputs, result: Result) -> Expected:
    """The right gradients, and how far off they may be with the out and lse that they came from."""
    return expected(inputs, backward=True, handed=(result.out, result.lse))


@functools.lru_cache(maxsize=2)
def forward_of(case: Case) -> tuple[Tensor, Tensor]:
    return forward(harness.inputs_of(case))


@functools.lru_cache(maxsize=2)
def expected_of(case: Case) -> Expected:
    """Those of `harness.inputs_of(case)` and `forward_of(case)`."""
    return expected(harness.inputs_of(case), backward=True, handed=forward_of(case))


def check_inputs(
    inputs: Inputs,
    backend: str,
    handed: tuple[Tensor, Tensor] | None = None,
    right: Expected | None = None,
    **more: Any,
) -> str:
    """Runs a backward and compares; returns "ran" or the sentence of a lawful refusal.

    `right` belongs to `handed`, the out and lse of a forward.
    """
    case = inputs.case
    odd = "odd_dim" in case.features
    out, lse = handed or forward(inputs)
    run = call if "kv_batch_idx" in case.features else call_guarded
    try:
        if odd:
            result = through_autograd(inputs, backend, **more)
        else:
            result = run(inputs, backend, out, lse, **more)
    except NotImplementedError as error:
        text = str(error)
        lawful = odd or not (ON_CPU or covered(case, backend))
        assert lawful, f"{backend} must run the backward of {case.id} but refused: {text}"
        assert len(text) > 40 and "." in text, f"a refusal must be a sentence, not {text!r}"
        inputs.assert_unchanged()
        return text
    if not ON_CPU:
        torch.cuda.synchronize()
        assert covered(case, backend), f"no row covers {case.id}, yet {backend} returned a result"
    inputs.assert_unchanged()
    assert_result(result, right_for(inputs, result) if odd or right is None else right)
    return "ran"


def check_case(case: Case, backend: str, **more: Any) -> str:
    inputs = harness.inputs_of(case)
    return check_inputs(inputs, backend, forward_of(case), expected_of(case), **more)
