# SPDX-License-Identifier: BSD-3-Clause
# Are the two flash-attn modules right on a GPU, and do they refuse by name what no row does?
"""fa.flash_attn and fa.flash_attn_interface over the kernels; their meaning is tested in cpu/."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import DEVICE, ON_CPU, ints, randn
from torch import Tensor

import fa
from fa import flash_attn_interface as fa3
from fa import reference
from fa.flash_attn import bert_padding
from fa.flash_attn import flash_attn_interface as fa2


def dense(length_q: int = 100, length_k: int = 130) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, length_q, 4, 64), (2, length_k, 2, 64), (2, length_k, 2, 64))
    return tuple(randn(*shape, seed=i) for i, shape in enumerate(shapes))  # type: ignore[return-value]


def close(name: str, got: Tensor, exact: Tensor, plain: Tensor) -> None:
    """At most twice the error of plain attention in the inputs' dtype, and a rounding floor."""
    assert got.shape == exact.shape and torch.equal(got.isfinite(), exact.isfinite()), name
    error = (got.double() - exact).nan_to_num(0.0, 0.0, 0.0).abs().max()
    allowed = 2 * (plain.double() - exact).nan_to_num(0.0, 0.0, 0.0).abs().max() + 1e-5
    assert error <= allowed, (name, float(error), float(allowed))


def check(results: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...], **options: Any) -> None:
    exact = reference.attention(*inputs, **options)
    plain = reference.attention(*inputs, **options, dtype=torch.bfloat16)
    for name, got, right, rough in zip(("out", "lse"), results, exact, plain, strict=True):
        close(name, got, right, rough)


CAUSAL_WINDOW = {"causal": True, "window_size": (40, 40)}


def test_dense_calls() -> None:
    inputs = dense()
    check(fa3.flash_attn_func(*inputs, None, True, return_attn_probs=True), inputs, causal=True)
    out, lse, _ = fa2.flash_attn_func(*inputs, 0.0, 0.2, **CAUSAL_WINDOW, return_attn_probs=True)
    check((out, lse), inputs, softmax_scale=0.2, causal=True, window_left=40)
    qkv = randn(2, 100, 3, 4, 64)
    parts = qkv.unbind(2)
    want = fa.attention(*parts, causal=True)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, causal=True), want)
    assert torch.equal(fa2.flash_attn_qkvpacked_func(qkv, causal=True), want)


def test_packed_calls() -> None:
    inputs = tuple(t.flatten(0, 1) for t in dense())
    lengths = {"cu_seqlens_q": ints(0, 60, 200), "cu_seqlens_k": ints(0, 75, 260)}
    hints = {"max_seqlen_q": 140, "max_seqlen_k": 185}
    options = {**lengths, **hints, "causal": True, "return_attn_probs": True}
    check(fa3.flash_attn_varlen_func(*inputs, **options), inputs, **lengths, causal=True)
    out, lse, _ = fa2.flash_attn_varlen_func(*inputs, **options)
    check((out, lse), inputs, **lengths, causal=True)


def test_a_padded_batch() -> None:
    mask = torch.arange(100, device=DEVICE) < ints(100, 37)[:, None]
    q, k, v = dense(100, 100)
    (tokens, places, cu, longest, used), *rest = (
        bert_padding.unpad_input(t, mask) for t in (q, k, v)
    )
    (k_tokens, *_), (v_tokens, *_) = rest
    out = fa2.flash_attn_varlen_func(tokens, k_tokens, v_tokens, cu, cu, longest, longest)
    want = fa.attention(q, k, v, seqused_q=used, seqused_k=used)
    assert torch.equal(bert_padding.pad_input(out, places, 2, 100), want)


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_gradients(module: Any) -> None:
    inputs = tuple(t.requires_grad_() for t in dense())
    if fa.supports(*inputs, causal=True) is not True:
        with pytest.raises(NotImplementedError):
            module.flash_attn_func(*inputs, causal=True).sum().backward()
        return
    dout = randn(2, 100, 4, 64, seed=9)
    got = torch.autograd.grad(module.flash_attn_func(*inputs, causal=True), inputs, dout)
    rough = [t.detach().requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    plain = reference.attention(*rough, causal=True, dtype=torch.bfloat16)[0]
    right = reference.attention(*exact, causal=True)[0]
    for name, a, b, c in zip(
        "qkv",
        got,
        torch.autograd.grad(right, exact, dout.double()),
        torch.autograd.grad(plain, rough, dout),
        strict=True,
    ):
        close(f"d{name}", a, b, c)


def test_a_dense_cache() -> None:
    q, (_, k, v) = randn(2, 3, 4, 64), dense()
    used = ints(90, 130)
    metadata = fa3.get_scheduler_metadata(2, 3, 130, 4, 2, 64, used, causal=True)
    options = {"cache_seqlens": used, "causal": True, "return_softmax_lse": True}
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata, **options)
    check((out, lse), (q, k, v), seqused_k=used, causal=True)
    check(
        fa2.flash_attn_with_kvcache(q, k, v, cache_batch_idx=ints(1, 0), **options),
        *((q, k, v),),
        seqused_k=used,
        kv_batch_idx=ints(1, 0),
        causal=True,
    )


@pytest.mark.skipif(ON_CPU, reason="the CPU backend has pages and appends; FA_TEST_DEVICE is cpu")
def test_what_no_row_does_is_refused_by_name() -> None:
    q, (_, k, v) = randn(2, 3, 4, 64), dense()
    before = k.clone()
    pages = {"cache_seqlens": ints(64, 64)}
    pool = k.flatten(0, 1)[:256].unflatten(0, (4, 64))
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
    for module, name in ((fa2, "block_table"), (fa3, "page_table")):
        with pytest.raises(NotImplementedError, match=name):  # as this module calls it
            module.flash_attn_with_kvcache(q, pool, pool, **pages, **{name: table})
        with pytest.raises(NotImplementedError, match="append_kv"):
            module.flash_attn_with_kvcache(q, k, v, k[:, :3], v[:, :3], **pages)
    assert torch.equal(k, before)
    with fa.backend("cpu"):  # the same calls in torch operations
        fa3.flash_attn_with_kvcache(q, k, v, k[:, 100:103], v[:, 100:103], **pages, causal=True)
    assert torch.equal(k[:, 64:67], before[:, 100:103])
