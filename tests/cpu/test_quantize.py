# SPDX-License-Identifier: BSD-3-Clause
# Do e4m3 tensors and their factors give back what was quantised, as well as the format can?

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fa
from fa._layout import pad_head_dim
from fa.quantize import FP8, GRANULARITIES, relative_rmse, rotate

B, SQ, SK, HQ, HK, D = 2, 37, 150, 4, 2, 64


def tensors(outliers: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Normal values of other sizes per head and batch entry; a share of them ten times as large."""
    g = torch.Generator().manual_seed(seed)
    result = []
    for rows, heads in ((SQ, HQ), (SK, HK), (SK, HK)):
        t = torch.randn(B, rows, heads, D, generator=g)
        t[torch.rand(t.shape, generator=g) < outliers] *= 10
        result.append(t)
    q, k, v = result
    return q, k, v


def dequantized(x: Tensor, factor: Tensor, block: int) -> Tensor:
    """The definition of docs/numerics.md, for dense tensors."""
    if block:
        rows = torch.arange(x.shape[1]) // block
        return x.float() * factor.expand(B, x.shape[2], -1)[:, :, rows].permute(0, 2, 1)[..., None]
    heads = factor.expand(B, HK).repeat_interleave(x.shape[2] // HK, dim=1)
    return x.float() * heads[:, None, :, None]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_back(granularity: str, dtype: torch.dtype) -> None:
    inputs = [t.to(dtype) for t in tensors()]
    x = fa.quantize_qkv(*inputs, granularity, block_q=16, block_k=40)
    for name, t, stored in zip("qkv", inputs, (x.q, x.k, x.v), strict=True):
        block = x.options.get("descale_block_q" if name == "q" else "descale_block_k", 0)
        back = dequantized(stored, x.options[f"{name}_descale"], block)
        assert stored.dtype == FP8 and stored.shape == t.shape
        # Three bits behind the point: half a unit is 2^-4, and 2^-10 of the smallest normal number.
        largest = t.float().abs().max()
        bound = t.float().abs() * 2.0**-4 + largest * 2.0**-10 / 448 * 1.01
        assert ((back - t.float()).abs() <= bound).all()
        assert stored.float().abs().max() == 448


def test_factors_serve_what_their_granularity_says() -> None:
    q, k, v = tensors()
    k = k * torch.tensor([1.0, 100.0])[None, None, :, None]
    q[0, :, :2] *= 7
    shapes = {"tensor": ((1,), (1,)), "head": ((B, HK), (B, HK)), "block": ((B, HQ, 3), (B, HK, 2))}
    for granularity, (q_shape, k_shape) in shapes.items():
        x = fa.quantize_qkv(q, k, v, granularity, block_q=16, block_k=128)
        assert tuple(x.options["q_descale"].shape) == q_shape
        assert tuple(x.options["k_descale"].shape) == k_shape == tuple(x.options["v_descale"].shape)
    heads = fa.quantize_qkv(q, k, v, "head").options
    assert torch.equal(heads["k_descale"], k.abs().amax(dim=(1, 3)) / 448)
    groups = q.unflatten(2, (HK, -1)).abs().amax(dim=(1, 3, 4)) / 448
    assert torch.equal(heads["q_descale"], groups)
    blocks = fa.quantize_qkv(q, k, v, "block", block_q=16, block_k=128).options
    assert torch.equal(blocks["q_descale"][:, :, 2], q[:, 32:].abs().amax(dim=(1, 3)) / 448)


@pytest.mark.parametrize("dim", [64, 96, 40, 7])
def test_rotation_keeps_products(dim: int) -> None:
    g = torch.Generator().manual_seed(dim)
    q, k = torch.randn(3, 5, 2, dim, generator=g), torch.randn(3, 6, 2, dim, generator=g)
    before = torch.einsum("bihd,bjhd->bhij", q, k)
    after = torch.einsum("bihd,bjhd->bhij", rotate(q), rotate(k))
    assert (after - before).abs().max() < 1e-4
    spike = torch.zeros(1, 1, 1, dim)
    spike[..., 0] = 1
    power_of_two = dim & -dim
    assert rotate(spike).abs().max() == pytest.approx(power_of_two**-0.5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_attention_of_the_quantised(granularity: str) -> None:
    inputs = tensors()
    right, _ = fa.reference.attention(*inputs, causal=True)
    x = fa.quantize_qkv(*inputs, granularity)
    out = fa.attention(x.q, x.k, x.v, causal=True, out_dtype=torch.float32, **x.options)
    assert relative_rmse(out, right) < 0.06


def test_the_rotation_halves_what_outliers_cost() -> None:
    q, k, v = tensors(outliers=2e-3)
    v = tensors()[2]
    right, _ = fa.reference.attention(q, k, v)
    errors = {}
    for hadamard in (False, True):
        x = fa.quantize_qkv(q, k, v, "head", hadamard)
        out = fa.attention(x.q, x.k, x.v, out_dtype=torch.float32, **x.options)
        errors[hadamard] = relative_rmse(out, right)
    assert errors[True] < 0.75 * errors[False], errors


def test_packed_empty_and_zero_tensors() -> None:
    q, k, v = (t.flatten(0, 1) for t in tensors())
    x = fa.quantize_qkv(q, k, v, "head")
    assert x.q.shape == q.shape and x.options["k_descale"].shape == (1, HK)
    cu_q, cu_k = (torch.tensor([0, n, B * n], dtype=torch.int32) for n in (SQ, SK))
    out = fa.attention_varlen(x.q, x.k, x.v, cu_q, cu_k, **x.options)
    assert out.shape == q.shape and torch.isfinite(out).all()
    for granularity in GRANULARITIES:
        zero = fa.quantize_qkv(*(torch.zeros(1, 9, 2, 16) for _ in range(3)), granularity)
        assert torch.isfinite(zero.options["k_descale"]).all() and not zero.k.float().any()
        none = fa.quantize_qkv(*(torch.zeros(1, 0, 2, 16) for _ in range(3)), granularity)
        assert not fa.attention(none.q, none.k, none.v, **none.options).numel()


@pytest.mark.parametrize("dim", [5, 8, 70, 72])
def test_head_dims_are_filled_up_for_kernels(dim: int) -> None:
    for dtype, unit in ((torch.bfloat16, 8), (FP8, 16)):
        x = torch.randn(2, 3, 2, dim).to(dtype)
        padded = pad_head_dim(x)
        assert padded.dtype == dtype
        assert padded.shape[-1] == (dim if dim % 8 == 0 else -(-dim // unit) * unit)
        assert torch.equal(padded[..., :dim].float(), x.float())
        assert not padded[..., dim:].float().any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"granularity": "row"}, ["row", '"tensor"', '"block"']),
        ({"q": torch.zeros(1, 2, 3, 8, dtype=torch.float64)}, ["q", "float64", "bfloat16"]),
        ({"q": torch.zeros(5, 2, 8), "granularity": "block"}, ["q", "[5, 2, 8]", "[B, S"]),
        ({"q": torch.zeros(1, 2, 3, 8)}, ["3 heads", "multiple"]),
        ({"block_k": 0}, ["block_k", "0", "at least 1"]),
    ],
)
def test_bad_calls(change: dict[str, object], words: list[str]) -> None:
    q, k, v = (torch.zeros(1, 4, 2, 8) for _ in range(3))
    with pytest.raises(ValueError) as caught:
        fa.quantize_qkv(**({"q": q, "k": k, "v": v} | change))  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value
