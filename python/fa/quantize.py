# SPDX-License-Identifier: BSD-3-Clause
# How do 16-bit q, k and v become e4m3 numbers and their factors, and what does that cost?
"""Quantisation for the e4m3 kernels, in torch operations, on any device.

x = fa.quantize_qkv(q, k, v, granularity="head")
out = fa.attention(x.q, x.k, x.v, causal=True, **x.options)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa._checks import tensor_types
from fa._raw import transformed
from fa._types import checked

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
GRANULARITIES = ("tensor", "head", "block")


@dataclass(frozen=True)
class QuantizedQkv:
    """e4m3 tensors of the shapes given, and what `fa.attention` must be told of them."""

    q: Tensor  # float8_e4m3fn, as the others
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)  # descales, and blocks where there are

    def __post_init__(self) -> None:
        tensor_types(q=self.q, k=self.k, v=self.v)


@checked()
def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    granularity: str = "tensor",
    hadamard: bool = False,
    *,
    block_q: int = 128,
    block_k: int = 128,
) -> QuantizedQkv:
    """e4m3 q, k and v with the factors that give the real numbers back: x ~ descale * x_e4m3.

    A factor is the largest magnitude it serves, divided by 448, so that nothing saturates. NaN
    gives a NaN factor.

    Args:
        q: [B, Sq, Hq, D] or packed [total, Hq, D]; float16, bfloat16 or float32.
        k: [B, Sk, Hkv, D] or packed; v: [B, Sk, Hkv, Dv].
        granularity: "tensor": one factor each for q, k and v, [1]. "head": one per batch entry and
            key head, [B, Hkv]; the query heads of a group share theirs; packed: [1, Hkv]. "block":
            one per `block_q` rows of q and `block_k` of k and v, [B, H, blocks]; dense only.
        hadamard: first multiply q and k by the same orthogonal matrix along D (signs, then a
            Hadamard matrix), which leaves Q K^T as it is and spreads outliers over all columns. D
            must be a power of two times an odd number; the matrix has the power of two.
        block_q, block_k: rows of a block.

    Returns:
        QuantizedQkv; pass `**x.options` to `fa.attention`.

    Raises:
        TypeError, ValueError: no tensors; another granularity, dtype or shape; heads that do not
            divide; blocks of packed tensors.

    Example:
        >>> q, k, v = torch.randn(3, 1, 256, 4, 64)
        >>> x = fa.quantize_qkv(q, k, v, granularity="head")
        >>> x.q.dtype, x.options["k_descale"].shape
        (torch.float8_e4m3fn, torch.Size([1, 4]))
        >>> fa.attention(x.q, x.k, x.v, causal=True, **x.options).dtype
        torch.bfloat16
    """
    _check(q, k, v, granularity, block_q, block_k)
    if hadamard:
        q, k = rotate(q), rotate(k)
    if granularity == "block":
        q8, q_descale = _by_block(q, block_q)
        k8, k_descale = _by_block(k, block_k)
        v8, v_descale = _by_block(v, block_k)
        blocks = {"descale_block_q": block_q, "descale_block_k": block_k}
    else:
        heads_k = k.shape[-2] if granularity == "head" else 0
        q8, q_descale = _by_head(q, heads_k)
        k8, k_descale = _by_head(k, heads_k)
        v8, v_descale = _by_head(v, heads_k)
        blocks = {}
    return QuantizedQkv(
        q8,
        k8,
        v8,
        {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale} | blocks,
    )


def rotate(x: Tensor) -> Tensor:
    """x times an orthogonal matrix along its last dim, in x's dtype; the same for every tensor.

    (Quarot, arXiv:2404.00456, section 3: R = diag(signs) H / sqrt(n).) Dot products are kept.
    """
    dim = x.shape[-1]
    n = dim & -dim
    matrix = torch.ones(1, 1, device=x.device)
    while matrix.shape[0] < n:  # Sylvester's construction
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    # Fixed signs, without which a constant row would land in one column.
    signs = 1.0 - 2.0 * ((torch.arange(dim, device=x.device) * 2654435761 >> 13) & 1)
    spread = (x.float() * signs).unflatten(-1, (dim // n, n)) @ (matrix * n**-0.5)
    return spread.flatten(-2).to(x.dtype)


def relative_rmse(actual: Tensor, right: Tensor) -> float:
    """sqrt(mean((actual - right)^2) / mean(right^2)), in fp64: the figure of docs/numerics.md."""
    right = right.double()
    error = actual.double() - right
    return float((error.square().mean() / right.square().mean()).sqrt())


def _check(q: Tensor, k: Tensor, v: Tensor, granularity: str, block_q: int, block_k: int) -> None:
    if granularity not in GRANULARITIES:
        names = ", ".join(f'"{g}"' for g in GRANULARITIES)
        raise ValueError(f'granularity: "{granularity}" is not one of {names}.')
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(
                f"{name}: dtype {t.dtype} must be torch.float16, torch.bfloat16 or torch.float32."
            )
        if t.dim() not in (3, 4) or (granularity == "block" and t.dim() != 4):
            what = "[B, S, heads, dim]" + ("" if granularity == "block" else " or packed")
            raise ValueError(f'{name}: shape {list(t.shape)} must be {what} for "{granularity}".')
    if q.shape[-2] % max(1, k.shape[-2]) or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"q has {q.shape[-2]} heads, k {k.shape[-2]} and v {v.shape[-2]}: k and v need the "
            "same number, and q a multiple of it."
        )
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block < 1:
            raise ValueError(f"{name}: {block} must be at least 1 row.")


def _factor(largest: Tensor) -> Tensor:
    """What a group of numbers of this largest magnitude is divided by; 1 for zeros."""
    return torch.where(largest == 0, 1.0, largest.float() / LARGEST)


def _by_head(x: Tensor, heads_k: int) -> tuple[Tensor, Tensor]:
    """heads_k 0: one factor for the whole tensor."""
    if x.numel() == 0:
        batch = x.shape[0] if x.dim() == 4 else 1
        ones = torch.ones((batch, heads_k) if heads_k else (1,), device=x.device)
        return x.to(FP8), ones
    if heads_k == 0:
        factor = _factor(_largest(x)).reshape(1)
        return _divide(x, factor), factor
    groups = x.unflatten(-2, (heads_k, -1))  # [..., rows, heads_k, group, D]
    largest = _largest(groups, (-1, -2)).amax(dim=-2)  # [B, heads_k] or [heads_k]
    factor = _factor(largest)
    divided = _divide(groups, factor[..., None, :, None, None])
    return divided.flatten(-3, -2), factor.reshape(-1, heads_k)


def _by_block(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = x.shape
    blocks = -(-rows // block)
    if x.numel() == 0:
        return x.to(FP8), torch.ones((batch, heads, blocks), device=x.device)
    largest = _largest(x, (-1,))  # [B, S, H]
    largest = torch.nn.functional.pad(largest, (0, 0, 0, blocks * block - rows))
    factor = _factor(largest.unflatten(1, (blocks, block)).amax(dim=2))  # [B, blocks, H]
    rows_of = factor.repeat_interleave(block, dim=1)[:, :rows, :, None]
    return _divide(x, rows_of), factor.transpose(1, 2).contiguous()


def _largest(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """Largest magnitude along `dim`, read once; NaN wins."""
    return torch.linalg.vector_norm(x, float("inf"), dim)


def _divide(x: Tensor, factor: Tensor) -> Tensor:
    """x / factor in fp32, rounded to e4m3: on a GPU one kernel, no tensor in between.

    The largest quotient is 448 but for the rounding of the division, which e4m3 does not see.
    """
    # Neither autograd nor torch.func's transforms know of `out`; the attention refuses a gradient.
    if transformed() or (x.requires_grad and torch.is_grad_enabled()):
        return (x.float() / factor).to(FP8)
    return torch.div(x, factor, out=torch.empty_like(x, dtype=FP8))
