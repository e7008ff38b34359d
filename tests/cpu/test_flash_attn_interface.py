# SPDX-License-Identifier: BSD-3-Clause
# Does code that was written for FlashAttention-3 get its signatures and the right results?
"""fa.flash_attn_interface on the CPU backend, against fa.reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fa import flash_attn_interface as fa3
from fa import reference
from flash_attn_calls import close, draw, ints, tables, written
from paging import from_pages, to_pages
from signatures import FLASH_ATTN_3

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("name", FLASH_ATTN_3)
def test_signature(name: str) -> None:
    assert written(getattr(fa3, name)) == FLASH_ATTN_3[name]


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"softmax_scale": 0.3}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (5, 2)}, {"window_left": 5, "window_right": 2}),
    "causal window": (
        {"causal": True, "window_size": (4, 4)},
        {"causal": True, "window_left": 4},
    ),
    "chunk": ({"causal": True, "attention_chunk": 4}, {"causal": True, "attention_chunk": 4}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "splits": ({"num_splits": 4}, {}),
    "chosen splits": ({"num_splits": -1, "pack_gqa": False}, {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_dense(name: str) -> None:
    theirs, ours = CALLS[name]
    q, k, v = (draw(2, n, h, d, seed=i, grad=True) for i, (n, h, d) in enumerate(SHAPES))
    out, lse = fa3.flash_attn_func(q, k, v, **theirs, return_attn_probs=True)
    want, want_lse = reference.attention(q, k, v, **ours)
    close(out, want)
    close(lse, want_lse)
    only = fa3.flash_attn_func(q, k, v, **theirs)
    assert isinstance(only, Tensor) and torch.equal(only, out)
    dout = draw(*out.shape, seed=9)
    for got, right in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(want, (q, k, v), dout),
        strict=True,
    ):
        close(got, right)


SHAPES = ((9, 4, 16), (13, 2, 16), (13, 2, 8))


def test_fourth_positional_argument_is_the_scale() -> None:
    q, k, v = (draw(1, n, h, d, seed=i) for i, (n, h, d) in enumerate(SHAPES))
    close(
        fa3.flash_attn_func(q, k, v, 0.4, True),
        reference.attention(q, k, v, softmax_scale=0.4, causal=True)[0],
    )


@pytest.mark.parametrize("name", CALLS)
def test_packed_sequences(name: str) -> None:
    theirs, ours = CALLS[name]
    q, k, v = (draw(n, h, d, seed=i, grad=True) for i, (n, h, d) in enumerate(SHAPES))
    lengths = {
        "cu_seqlens_q": ints(0, 4, 4, 9),
        "cu_seqlens_k": ints(0, 6, 9, 13),
        "seqused_q": ints(3, 0, 5),
        "seqused_k": ints(6, 2, 4),
    }
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, max_seqlen_q=5, max_seqlen_k=6, **lengths, **theirs, return_attn_probs=True
    )
    want, want_lse = reference.attention(q, k, v, **lengths, **ours)
    close(out, want)
    close(lse, want_lse)
    for got, right in zip(
        torch.autograd.grad(out.sum() + lse[lse > -9e9].sum(), (q, k, v)),
        torch.autograd.grad(want.sum() + want_lse[want_lse > -9e9].sum(), (q, k, v)),
        strict=True,
    ):
        close(got, right)


def test_q_k_v_in_one_tensor() -> None:
    stacked = draw(2, 7, 3, 2, 8, grad=True)
    out, lse = fa3.flash_attn_qkvpacked_func(stacked, causal=True, return_attn_probs=True)
    want, want_lse = reference.attention(*stacked.unbind(2), causal=True)
    close(out, want)
    close(lse, want_lse)
    close(*(torch.autograd.grad(x.square().sum(), stacked)[0] for x in (out, want)))

    joined = draw(2, 7, 4 + 2 + 2, 8, grad=True)
    out = fa3.flash_attn_qkvpacked_func(joined, num_heads_q=4, window_size=(3, 0))
    want, _ = reference.attention(*joined.split([4, 2, 2], dim=2), window_left=3, window_right=0)
    close(out, want)
    close(*(torch.autograd.grad(x.square().sum(), joined)[0] for x in (out, want)))
    for wrong in (None, 8, 3):
        with pytest.raises(ValueError, match="num_heads_q"):
            fa3.flash_attn_qkvpacked_func(joined, num_heads_q=wrong)


def test_e4m3_with_descales() -> None:
    q, k, v = (draw(2, n, h, d, seed=i).float().to(FP8) for i, (n, h, d) in enumerate(SHAPES))
    descales = {f"{x}_descale": draw(2, 2, seed=i).abs().float() for i, x in enumerate("qkv")}
    out = fa3.flash_attn_func(q, k, v, **descales, causal=True)
    want, _ = reference.attention(q, k, v, **descales, causal=True)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - want).abs().max()) < 2e-2
    with pytest.raises(NotImplementedError, match="no backward"):
        fa3.flash_attn_func(q.clone().requires_grad_(), k, v, **descales)


def test_a_combination_in_the_layout_of_fa3() -> None:
    q, k, v = (draw(2, n, h, d, seed=i) for i, (n, h, d) in enumerate(SHAPES))
    halves = [
        fa3.flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True)
        for part in (slice(0, 5), slice(5, 13))
    ]
    outs = torch.stack([out for out, _ in halves]).float()
    lses = torch.stack([lse.transpose(1, 2) for _, lse in halves]).float()  # [n, B, S, H]
    want, want_lse = reference.attention(q, k, v)
    out, lse = fa3.flash_attn_combine(outs, lses)
    close(out.double(), want, 1e-5)
    close(lse.double(), want_lse.transpose(1, 2), 1e-5)
    buffer = torch.full_like(out, float("nan"), dtype=torch.bfloat16)
    result, _ = fa3.flash_attn_combine(outs, lses, buffer)
    assert result is buffer and torch.equal(buffer, out.bfloat16())
    assert fa3.flash_attn_combine(outs, lses, out_dtype=torch.half)[0].dtype == torch.half
    with pytest.raises(ValueError, match=r"lse_partial: shape .* \[n, batch, seqlen, heads\]"):
        fa3.flash_attn_combine(outs, lses.transpose(2, 3))
    with pytest.raises(ValueError, match="out: .*bfloat16"):
        fa3.flash_attn_combine(outs, lses, buffer, torch.half)
    with pytest.raises(ValueError, match="float32"):
        fa3.flash_attn_combine(outs.double(), lses)


CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one length": {"cache_seqlens": 5},
    "full": {"cache_seqlens": None},
    "rows": {"cache_batch_idx": ints(3, 0)},
    "leftpad": {"cache_leftpad": ints(2, 0)},
    "append": {"new": 3},
    "append, leftpad": {"new": 3, "cache_leftpad": ints(2, 0)},
    "append, rotary": {"new": 3, "rotary": 8},
    "append, rotary of halves": {"new": 3, "rotary": 8, "rotary_interleaved": False},
    "append, rotary, positions": {"new": 3, "rotary": 8, "rotary_seqlens": ints(1, 30)},
    "append, rotary, not causal": {"new": 3, "rotary": 8, "causal": False},
}


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("name", CACHES)
def test_kvcache(name: str, paged: bool) -> None:
    options = {"cache_seqlens": ints(6, 9), "causal": True, **CACHES[name]}
    new, rotary = options.pop("new", 0), options.pop("rotary", 0)
    q, k, v = draw(2, 3, 4, 16), draw(4, 16, 2, 16, seed=1), draw(4, 16, 2, 8, seed=2)
    rows = options.get("cache_batch_idx", ints(0, 1))
    if "cache_batch_idx" not in options:
        k, v = k[:2], v[:2]
    want_k, want_v, used = k.clone(), v.clone(), options["cache_seqlens"]
    used = (
        ints(16, 16)
        if used is None
        else used.clone()
        if isinstance(used, Tensor)
        else ints(used, used)
    )
    want_q, extra = q, {}
    if rotary:
        cos, sin = tables(rotary)
        extra |= {"rotary_cos": cos, "rotary_sin": sin}
        turn = {"interleaved": options.get("rotary_interleaved", True)}
        at = options.get("rotary_seqlens", used)[:, None] + torch.arange(3)
        first = at if options["causal"] else at[:, :1].expand(2, 3)
        want_q = torch.ops.fa.apply_rotary(q, cos, sin, positions=first, **turn)
    if new:
        k_new, v_new = draw(2, new, 2, 16, seed=3), draw(2, new, 2, 8, seed=4)
        extra |= {"k": k_new, "v": v_new}
        turned = (
            torch.ops.fa.apply_rotary(k_new, cos, sin, positions=at, **turn) if rotary else k_new
        )
        for b, row in enumerate(rows.tolist()):
            begin = int(used[b])
            want_k[row, begin : begin + new], want_v[row, begin : begin + new] = turned[b], v_new[b]
        used += new
    want, want_lse = reference.attention(
        *(want_q, want_k, want_v),
        kv_batch_idx=rows,
        seqused_k=used,
        leftpad_k=options.get("cache_leftpad"),
        causal=options["causal"],
    )
    if paged:
        (k, v), table = to_pages([k, v], 4, torch.Generator().manual_seed(0), poison=9.0)
        extra["page_table"] = table
    result = fa3.flash_attn_with_kvcache(q, k, v, **extra, **options, return_softmax_lse=True)
    out, lse, *partials = result
    close(out, want)
    close(lse, want_lse)
    assert [p.numel() for p in partials] == [0, 0]
    if new:
        close(from_pages(k, table, 16) if paged else k, want_k)
        close(from_pages(v, table, 16) if paged else v, want_v)
    if not new:
        assert torch.equal(fa3.flash_attn_with_kvcache(q, k, v, **extra, **options), out)


def test_kvcache_with_packed_queries_and_keys() -> None:
    q, k_new, v_new = draw(5, 4, 16), draw(4, 2, 16, seed=3), draw(4, 2, 8, seed=4)
    k, v = draw(2, 16, 2, 16, seed=1), draw(2, 16, 2, 8, seed=2)
    want_k, want_v = k.clone(), v.clone()
    for b, (begin, rows) in enumerate(((6, slice(0, 1)), (9, slice(1, 4)))):
        count = rows.stop - rows.start
        want_k[b, begin : begin + count], want_v[b, begin : begin + count] = (
            k_new[rows],
            v_new[rows],
        )
    want, _ = reference.attention(
        q, want_k, want_v, cu_seqlens_q=ints(0, 2, 5), seqused_k=ints(7, 12), causal=True
    )
    out = fa3.flash_attn_with_kvcache(
        *(q, k, v, k_new, v_new),
        cache_seqlens=ints(6, 9),
        cu_seqlens_q=ints(0, 2, 5),
        cu_seqlens_k_new=ints(0, 1, 4),
        max_seqlen_q=3,
        causal=True,
    )
    close(out, want)
    close(k, want_k)


def test_scheduler_metadata_belongs_to_a_batch_size() -> None:
    q, k, v = draw(2, 1, 4, 16), draw(2, 16, 2, 16, seed=1), draw(2, 16, 2, 8, seed=2)
    used = ints(6, 9)
    metadata = fa3.get_scheduler_metadata(2, 1, 16, 4, 2, 16, used, num_splits=3)
    assert metadata.dtype == torch.int32 and metadata.tolist() == [3, 3]
    plain = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used)
    planned = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, scheduler_metadata=metadata)
    assert torch.equal(plain, planned)
    wrong = fa3.get_scheduler_metadata(4, 1, 16, 4, 2, 16, ints(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"scheduler_metadata: \[4\].* 2 sequences"):
        fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, scheduler_metadata=wrong)
    with pytest.raises(ValueError, match="cache_seqlens"):
        fa3.get_scheduler_metadata(3, 1, 16, 4, 2, 16, used)
    with pytest.raises(ValueError, match="num_heads_q"):
        fa3.get_scheduler_metadata(2, 1, 16, 4, 3, 16, used)


def test_raw_forward_and_backward() -> None:
    q, k, v = (draw(2, n, h, d, seed=i, grad=True) for i, (n, h, d) in enumerate(SHAPES))
    want, _ = reference.attention(q, k, v, causal=True, window_left=6, softcap=3.0)
    dout = draw(*want.shape, seed=7)
    right = torch.autograd.grad(want, (q, k, v), dout)
    q, k, v = (t.detach() for t in (q, k, v))
    shape = {"causal": True, "window_size_left": 6, "window_size_right": 6, "softcap": 3.0}
    out, lse, *partials = fa3._flash_attn_forward(q, k, v, **shape)
    close(out, want)
    assert [p.numel() for p in partials] == [0, 0]
    given = torch.full_like(out, float("nan"))
    assert fa3._flash_attn_forward(q, k, v, out_=given, **shape)[0] is given
    assert torch.equal(given, out)
    shape["is_causal"] = shape.pop("causal")
    buffers = {n: torch.full_like(t, float("nan")) for n, t in (("dq", q), ("dk", k), ("dv", v))}
    delta = fa3._flash_attn_backward(
        dout, q, k, v, out, lse, **buffers, **shape, deterministic=True
    )
    for got, gradient in zip(buffers.values(), right, strict=True):
        close(got, gradient)
    close(delta.double(), (dout * out).sum(-1).transpose(1, 2), 1e-5)
    with pytest.raises(ValueError, match="dk: is None"):
        fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=buffers["dq"], dv=buffers["dv"])


def test_raw_passes_of_packed_sequences() -> None:
    q, k, v = (draw(n, h, d, seed=i, grad=True) for i, (n, h, d) in enumerate(SHAPES))
    lengths = {"cu_seqlens_q": ints(0, 4, 9), "cu_seqlens_k": ints(0, 6, 13)}
    want, _ = reference.attention(q, k, v, **lengths)
    dout = draw(*want.shape, seed=7)
    right = torch.autograd.grad(want, (q, k, v), dout)
    q, k, v = (t.detach() for t in (q, k, v))
    hints = {"max_seqlen_q": 5, "max_seqlen_k": 7}
    out, lse, _, _ = fa3._flash_attn_forward(q, k, v, **lengths, **hints)
    close(out, want)
    given = torch.full_like(out, float("nan"))
    _, again, _, _ = fa3._flash_attn_forward(q, k, v, out_=given, **lengths, **hints)
    assert torch.equal(given, out) and torch.equal(again, lse)
    buffers = {n: torch.full_like(t, float("nan")) for n, t in (("dq", q), ("dk", k), ("dv", v))}
    fa3._flash_attn_backward(dout, q, k, v, out, lse, **lengths, **hints, **buffers)
    for got, gradient in zip(buffers.values(), right, strict=True):
        close(got, gradient)


def _refusals() -> list[Any]:
    q, k, v = (draw(2, n, h, d, seed=i) for i, (n, h, d) in enumerate(SHAPES))
    packed = (q[0], k[0], v[0], ints(0, 9), ints(0, 13), 9, 13)
    calls = {
        "flash_attn_func": (q, k, v),
        "flash_attn_varlen_func": packed,
        "flash_attn_with_kvcache": (q, k, v),
        "_flash_attn_forward": (q, k, v),
        "_flash_attn_backward": (q, q, k, v, q, q),
        "flash_attn_qkvpacked_func": (draw(2, 9, 3, 4, 16),),
        "get_scheduler_metadata": (2, 9, 13, 4, 2, 16, ints(9, 9)),
    }
    refused = {"qv": q, "pack_gqa": True, "sm_margin": 8}
    return [
        pytest.param(name, args, {option: value}, id=f"{name}, {option}")
        for name, args in calls.items()
        for option, value in refused.items()
        if f"{option}=" in FLASH_ATTN_3[name]
    ]


@pytest.mark.parametrize("name, args, option", _refusals())
def test_what_is_not_supported_is_refused_by_name(
    name: str, args: tuple[Any, ...], option: dict[str, Any]
) -> None:
    (word,) = option
    with pytest.raises(NotImplementedError, match=f"^{word}: "):
        getattr(fa3, name)(*args, **option)


def test_errors_come_with_names() -> None:
    q, k, v = (draw(2, n, h, d, seed=i) for i, (n, h, d) in enumerate(SHAPES))
    with pytest.raises(TypeError, match="q must be a torch.Tensor"):
        fa3.flash_attn_func(q.tolist(), k, v)
    with pytest.raises(TypeError, match="window_size"):
        fa3.flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(ValueError, match="cache_seqlens: is None, and k"):
        fa3.flash_attn_with_kvcache(q, k, v, q[:, :1, :2], q[:, :1, :2, :8])
    strided = k.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ValueError, match="k_cache: stride"):
        fa3.flash_attn_with_kvcache(q, strided, v)
    close(fa3.flash_attn_func(q, strided, v), reference.attention(q, k, v)[0])
    with pytest.raises(ValueError, match="cu_seqlens_k: was given together with pages"):
        fa3._flash_attn_forward(
            q,
            k,
            v,
            page_table=ints(0, 1)[:, None],
            cu_seqlens_k=ints(0, 1, 2),
            seqused_k=ints(1, 1),
        )


def test_compiles_without_a_break() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        return out.square().sum() + lse.sum()

    q, k, v = (draw(1, 9, 2, 8, seed=i, grad=True) for i in range(3))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)),
        torch.autograd.grad(loss(q, k, v), (q, k, v)),
        strict=True,
    ):
        close(got, want)
