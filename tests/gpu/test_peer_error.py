# SPDX-License-Identifier: BSD-3-Clause
# How large is our error beside FlashAttention 3's on the same inputs? Against fp64.

from __future__ import annotations

import importlib
from collections.abc import Callable

import harness
import pytest
import torch
from harness import randn
from torch import Tensor

import fa
from fa import reference

LENGTH = 2048
# Root mean square of our errors over that of FlashAttention 3. Both take every maximum over: the
# largest probability is 1 and needs no rounding. Tiles of other widths round the others at
# other moments.
MOST = 1.005


def outliers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Standard normal; one value in a thousand ten times as large."""
    x = randn(*shape, dtype=dtype, seed=seed)
    chosen = randn(*shape, dtype=torch.float32, seed=seed + 100) > 3.09
    return torch.where(chosen, x * 10, x)


def scaled(factor: float) -> Callable[..., Tensor]:
    return lambda *shape, dtype, seed: randn(*shape, dtype=dtype, seed=seed) * factor


VALUES = {"normal": scaled(1), "x3": scaled(3), "x20": scaled(20), "outliers": outliers}


def peer() -> Callable[..., Tensor]:
    """flash_attn_func of FlashAttention 3; skips where it cannot be imported."""
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        try:
            return importlib.import_module(name).flash_attn_func
        except (ImportError, AttributeError, OSError):
            continue
    pytest.skip("FlashAttention 3 cannot be imported: nothing to compare with")


def compare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    name: str,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """Root mean square and largest error of sm90 rows, each beside those of FlashAttention 3, which
    knows no slopes."""
    function = peer()
    exact, _ = reference.attention(q, k, v, causal=causal, alibi_slopes=slopes, softcap=softcap)
    with fa.backend("sm90"), torch.no_grad():
        ours = fa.attention(q, k, v, causal=causal, alibi_slopes=slopes, softcap=softcap)
    try:
        answer = function(q, k, v, causal=causal, softcap=softcap)
    except RuntimeError as error:  # its wheel on PyPI is built for bf16 alone
        if "does not support" not in str(error):
            raise
        pytest.skip(f"FlashAttention 3 here: {str(error).splitlines()[0]}")
    theirs = answer[0] if isinstance(answer, tuple) else answer
    errors = [(x.double() - exact).flatten() for x in (ours, theirs)]
    rms = [float(e.square().mean().sqrt()) for e in errors]
    top = [float(e.abs().max()) for e in errors]
    print(
        f"{name} {'causal' if causal else 'full'}: rms {rms[0]:.3e} / {rms[1]:.3e}"
        f" = {rms[0] / rms[1]:.4f}, largest {top[0]:.3e} / {top[1]:.3e}"
    )
    assert rms[0] <= MOST * rms[1], f"rms error {rms[0]:.4e}, FlashAttention 3 has {rms[1]:.4e}"
    # The largest of a million errors is a matter of luck within one unit of the last place.
    unit = torch.finfo(q.dtype).eps * float(exact.abs().max()) / 2
    assert top[0] <= top[1] + unit, f"largest error {top[0]:.4e}, FlashAttention 3 has {top[1]:.4e}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_error_against_fp64(
    dtype: torch.dtype, dim: int, values: str, causal: bool, cuda_only: None
) -> None:
    if "sm90" not in harness.backends():
        pytest.skip(f"no Hopper row runs on {torch.cuda.get_device_name()}")
    q, k, v = (VALUES[values](1, LENGTH, 4, dim, dtype=dtype, seed=n) for n in range(3))
    compare(q, k, v, causal, f"{dtype} D{dim} {values}")


@pytest.mark.parametrize("policy", ["slopes", "softcap"])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_error_with_policies(
    dtype: torch.dtype, dims: tuple[int, int], values: str, policy: str, cuda_only: None
) -> None:
    """Slopes of 0 leave the scores of the call without ALiBi, which FlashAttention 3 can answer."""
    if "sm90" not in harness.backends():
        pytest.skip(f"no Hopper row runs on {torch.cuda.get_device_name()}")
    widths = (dims[0], dims[0], dims[1])
    q, k, v = (VALUES[values](1, LENGTH, 4, d, dtype=dtype, seed=n) for n, d in enumerate(widths))
    name = f"{dtype} D{dims[0]}/{dims[1]} {values} {policy}"
    if policy == "slopes":
        compare(q, k, v, True, name, slopes=torch.zeros(4, device=q.device))
    else:
        compare(q, k, v, True, name, softcap=30.0)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_error_of_packed_query_heads(dim: int, values: str, cuda_only: None) -> None:
    """Calls whose query heads share tiles; split where the library chooses to."""
    if "sm90" not in harness.backends():
        pytest.skip(f"no Hopper row runs on {torch.cuda.get_device_name()}")
    q = VALUES[values](2, 48, 16, dim, dtype=torch.bfloat16, seed=0)
    k, v = (VALUES[values](2, LENGTH, 4, dim, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    with fa.backend("sm90"):
        plan = fa.explain(q, k, v, causal=True)
    assert f"sm90_fwd_bf16_d{dim}_band_gqa" in plan
    compare(q, k, v, True, f"packed D{dim} {values}")
