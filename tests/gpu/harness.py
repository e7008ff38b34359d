# SPDX-License-Identifier: BSD-3-Clause
# How does a GPU test call the kernels of one architecture, and what may that architecture refuse?
"""Backends of this build, forced calls into guarded and poisoned outputs, and the rule of refusals.

FA_TEST_DEVICE=cpu runs whatever does not need CUDA itself through the CPU backend: a check of the
tests, not of the kernels.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa
import libfa
from cases import DTYPES, Case, Guarded, Inputs
from compare import Expected, Result, assert_result, expected

DEVICE = os.environ.get("FA_TEST_DEVICE", "cuda")
ON_CPU = DEVICE == "cpu"

LARGEST_DIM = 128
# Rows that the plan prefers on other GPUs of their architecture.
ELSEWHERE = frozenset(
    f"sm80_fwd_{dtype}_{rest}"
    for dtype in ("bf16", "fp16")
    for rest in ("d128_band_n32", "d128_band_any_n32", "d256_band_m128")
)
SCORES = frozenset({"softcap", "alibi"})  # what needs a row whose score is "any"


@functools.cache
def rows() -> tuple[libfa.Row, ...]:
    """Every kernel row of the library; empty where there is no library."""
    if libfa.library_path() is None:
        return ()
    return tuple(libfa.Library().rows())


@functools.cache
def backends() -> tuple[str, ...]:
    """The backends to force: each architecture of the build that this device can run."""
    if ON_CPU:
        return ("cpu",)
    names = tuple(dict.fromkeys(row.backend for row in rows() if row.op == libfa.FORWARD))
    if not torch.cuda.is_available():
        return names
    major = torch.cuda.get_device_capability()[0]
    return tuple(name for name in names if name == "sm80" or major == 9)


def each_backend() -> pytest.MarkDecorator:
    """Parametrises a test over the backends; where there is none, over "auto", which then fails."""
    return pytest.mark.parametrize("backend", backends() or ("auto",))


def can_be_case(case: Case) -> bool:
    """Whether the forward of a case means something to a kernel row: 16-bit inputs."""
    return case.dtype in ("bf16", "fp16")


def covered(case: Case, backend: str | None = None) -> bool:
    """Whether a row of the build (of one architecture) has the dtype, head dims, mask, score."""
    dim, dim_v = (-(-d // 8) * 8 for d in (case.dim, case.dim_v or case.dim))
    if not rows():
        return max(dim, dim_v) <= LARGEST_DIM
    masked = bool(case.features & {"causal", "window_left", "window_right", "chunk"})
    return any(
        row.op == libfa.FORWARD
        and (backend or row.backend) == row.backend
        and row.backend in backends()
        and DTYPES[case.dtype] == getattr(torch, row.dtype)
        and row.dim_qk >= dim
        and row.dim_v >= dim_v
        and (row.mask == "band" or not masked)
        and (row.score == "any" or not case.features & SCORES)
        for row in rows()
    )


def must_refuse(case: Case) -> bool:
    """Whether no row of this build covers the case."""
    return not ON_CPU and not covered(case)


def may_refuse(case: Case, backend: str) -> bool:
    """Whether a forced backend may leave the case to another one."""
    if must_refuse(case):
        return True
    if ON_CPU or backend in ("auto", "cpu"):
        return False
    return not covered(case, backend)


def lse_shape(inputs: Inputs) -> tuple[int, ...]:
    """[B, Hq, Sq], packed [Hq, total_q]."""
    *outer, rows_q, heads, _ = inputs.q.shape
    return (*outer, heads, rows_q)


def call(inputs: Inputs, backend: str, **more: Any) -> Result:
    """The forward through `fa::forward`, which allocates; on a forced backend."""
    with fa.backend(backend), torch.no_grad():
        out, lse = torch.ops.fa.forward(inputs.q, inputs.k, inputs.v, **(inputs.options | more))
    return Result(out, lse)


def call_guarded(inputs: Inputs, backend: str, **more: Any) -> Result:
    """The forward into outputs that hold NaN and lie inside guarded buffers; guards are checked."""
    out = Guarded(inputs.out_shape, inputs.out_dtype, DEVICE)
    lse = Guarded(lse_shape(inputs), torch.float32, DEVICE)
    options = {n: v for n, v in (inputs.options | more).items() if n != "out_dtype"}
    if inputs.case.out_fp32:
        options["out_dtype"] = torch.float32
    with fa.backend(backend), torch.no_grad():
        torch.ops.fa.forward_out(
            inputs.q, inputs.k, inputs.v, **options, out=out.tensor, lse=lse.tensor
        )
    out.check("out")
    lse.check("lse")
    return Result(out.tensor, lse.tensor)


def forward(inputs: Inputs, backend: str, **more: Any) -> Result:
    """Guarded where the raw op takes the head dims as they are, else through `fa::forward`."""
    if "odd_dim" in inputs.case.features:
        return call(inputs, backend, **more)
    return call_guarded(inputs, backend, **more)


@functools.lru_cache(maxsize=2)
def inputs_of(case: Case) -> Inputs:
    """The case's tensors; every byte outside of the problem is NaN."""
    return case.make(DEVICE, poison=math.nan)


@functools.lru_cache(maxsize=2)
def expected_of(case: Case) -> Expected:
    """The right answer of `inputs_of(case)`, and how far off a result may be."""
    return expected(inputs_of(case), backward=False)


def check_case(case: Case, backend: str) -> str:
    """Runs a case on a backend and compares; returns "ran" or the sentence of a lawful refusal."""
    return check_inputs(inputs_of(case), backend, lambda: expected_of(case))


def check_inputs(
    inputs: Inputs, backend: str, right: Callable[[], Expected] | None = None, **more: Any
) -> str:
    """`check_case` for inputs at hand; `right` gives the answer where it is known already.

    `more`: options that do not change the answer.
    """
    case = inputs.case
    right = right or functools.cache(lambda: expected(inputs, backward=False))
    try:
        result = forward(inputs, backend, **more)
    except NotImplementedError as error:
        text = str(error)
        assert may_refuse(case, backend), f"{backend} must run {case.id} but refused: {text}"
        assert len(text) > 40 and "." in text, f"a refusal must be a sentence, not {text!r}"
        inputs.assert_unchanged()
        if not must_refuse(case):  # another row takes it
            assert_result(forward(inputs, "auto", **more), right())
        return text
    assert not must_refuse(case), f"no row covers {case.id}, yet {backend} returned a result"
    if not ON_CPU:
        torch.cuda.synchronize()
    inputs.assert_unchanged()
    assert result.out.dtype == inputs.out_dtype
    assert_result(result, right())
    return "ran"


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Standard normal values on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def ints(*values: int) -> Tensor:
    """An int32 tensor on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def inputs_from(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Inputs:
    """Inputs around tensors made by a test; `options` are those of `fa::forward`."""
    case = Case(dim=q.shape[-1], dim_v=v.shape[-1], backward=False)
    return Inputs(case, q, k, v, torch.empty(0), None, options)


def check_tensors(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """Runs and compares a call that is not a Case; a forced Hopper backend may not refuse here."""
    inputs = inputs_from(q, k, v, **options)
    result = call_guarded(inputs, backend)
    assert_result(result, expected(inputs, backward=False))
    return result


def need_memory(gigabytes: float) -> None:
    """Skips, with the figures, where the device has not that much memory free."""
    if ON_CPU:
        pytest.skip(f"needs {gigabytes} GB on a GPU; FA_TEST_DEVICE is cpu")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of GPU memory, {free:.0f} GB are free")


def fill_free_memory(gigabytes: float = 1.0) -> None:
    """Leaves NaN in the blocks that torch's allocator hands out next."""
    if not ON_CPU:
        blocks = [
            torch.full((1 << 20,), math.nan, device=DEVICE) for _ in range(int(256 * gigabytes))
        ]
        del blocks


def call_somewhere(inputs: Inputs, backend: str, lawful: bool) -> Result:
    """`call_guarded`; where the forced backend refuses and that is lawful, on "auto"."""
    try:
        return call_guarded(inputs, backend)
    except NotImplementedError as error:
        if not any(getattr(torch, row.dtype) == inputs.q.dtype for row in rows()):
            pytest.skip(f"this build holds no row for {inputs.q.dtype}")
        assert lawful, f"{backend} must run this call: {error}"
        return call_guarded(inputs, "auto")
