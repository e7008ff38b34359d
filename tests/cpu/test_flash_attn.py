# SPDX-License-Identifier: BSD-3-Clause
# Does code that was written for FlashAttention-2 get its signatures and the right results?
"""fa.flash_attn on the CPU backend, against fa.reference."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import fa
from fa import flash_attn as package
from fa import reference
from fa._philox import dropped
from fa.flash_attn import bert_padding
from fa.flash_attn import flash_attn_interface as fa2
from flash_attn_calls import close, draw, ints, tables, written
from paging import from_pages, to_pages
from signatures import FLASH_ATTN_2

SHAPES = ((9, 4, 16), (13, 2, 16), (13, 2, 8))
SLOPES = torch.tensor([[0.1, 0.2, 0.5, 1.0], [0.3, 0.0, 0.7, 0.2]])


@pytest.mark.parametrize("name", FLASH_ATTN_2)
def test_signature(name: str) -> None:
    assert written(getattr(fa2, name)) == FLASH_ATTN_2[name]
    if not name.startswith("_"):
        assert getattr(package, name) is getattr(fa2, name)
    else:
        assert getattr(fa2, f"_wrapped{name}") is getattr(fa2, name)


def test_imports_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    for module in (fa2, bert_padding):
        monkeypatch.setitem(sys.modules, module.__name__.removeprefix("fa."), module)
    x = draw(1, 5, 2, 8)
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        assert torch.equal(import_module(name).flash_attn_func(x, x, x), fa.attention(x, x, x))
    assert import_module("flash_attn.bert_padding").pad_input is bert_padding.pad_input


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"softmax_scale": 0.3}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (5, 2)}, {"window_left": 5, "window_right": 2}),
    "causal window": ({"causal": True, "window_size": (4, 4)}, {"causal": True, "window_left": 4}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "alibi": ({"alibi_slopes": SLOPES[0]}, {"alibi_slopes": SLOPES[0]}),
    "alibi window": (
        {"alibi_slopes": SLOPES, "window_size": (3, 0)},
        {"alibi_slopes": SLOPES, "window_left": 3, "window_right": 0},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_dense(name: str) -> None:
    theirs, ours = CALLS[name]
    q, k, v = (draw(2, n, h, d, seed=i, grad=True) for i, (n, h, d) in enumerate(SHAPES))
    out, lse, dmask = fa2.flash_attn_func(q, k, v, **theirs, return_attn_probs=True)
    want, want_lse = reference.attention(q, k, v, **ours)
    close(out, want)
    close(lse, want_lse)
    assert dmask.numel() == 0
    only = fa2.flash_attn_func(q, k, v, **theirs)
    assert isinstance(only, Tensor) and torch.equal(only, out)
    dout = draw(*out.shape, seed=9)
    for got, right in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(want, (q, k, v), dout),
        strict=True,
    ):
        close(got, right)


def test_positional_arguments() -> None:
    q, k, v = (draw(1, n, h, d, seed=i) for i, (n, h, d) in enumerate(SHAPES))
    want, _ = reference.attention(
        q, k, v, softmax_scale=0.4, causal=True, window_left=3, softcap=2.0, alibi_slopes=SLOPES[0]
    )
    close(fa2.flash_attn_func(q, k, v, 0.0, 0.4, True, (3, -1), 2.0, SLOPES[0], True), want)


@pytest.mark.parametrize("name", CALLS)
def test_packed_sequences(name: str) -> None:
    theirs, ours = CALLS[name]
    if "alibi_slopes" in ours and ours["alibi_slopes"].dim() == 2:
        both = {"alibi_slopes": torch.cat([SLOPES, SLOPES[:1]])}
        theirs, ours = theirs | both, ours | both
    q, k, v = (draw(n, h, d, seed=i, grad=True) for i, (n, h, d) in enumerate(SHAPES))
    lengths = {"cu_seqlens_q": ints(0, 4, 4, 9), "cu_seqlens_k": ints(0, 6, 9, 13)}
    out, lse, _ = fa2.flash_attn_varlen_func(
        q, k, v, max_seqlen_q=5, max_seqlen_k=6, **lengths, **theirs, return_attn_probs=True
    )
    want, want_lse = reference.attention(q, k, v, **lengths, **ours)
    close(out, want)
    close(lse, want_lse)
    for got, right in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(want.square().sum(), (q, k, v)),
        strict=True,
    ):
        close(got, right)


def test_stacked_tensors() -> None:
    qkv, kv, q = draw(2, 7, 3, 2, 8, grad=True), draw(2, 9, 2, 2, 8, grad=True), draw(2, 7, 4, 8)
    for got, want, leaf in (
        (
            fa2.flash_attn_qkvpacked_func(qkv, causal=True),
            reference.attention(*qkv.unbind(2), causal=True)[0],
            qkv,
        ),
        (
            fa2.flash_attn_kvpacked_func(q, kv, 0.0, 0.2, True),
            reference.attention(q, *kv.unbind(2), causal=True, softmax_scale=0.2)[0],
            kv,
        ),
        (
            fa2.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), ints(0, 5, 14), 9, causal=True),
            reference.attention(
                *qkv.flatten(0, 1).unbind(1),
                cu_seqlens_q=ints(0, 5, 14),
                cu_seqlens_k=ints(0, 5, 14),
                causal=True,
            )[0],
            qkv,
        ),
        (
            fa2.flash_attn_varlen_kvpacked_func(
                q.flatten(0, 1), kv.flatten(0, 1), ints(0, 5, 14), ints(0, 9, 18), 9, 9
            ),
            reference.attention(
                q.flatten(0, 1),
                *kv.flatten(0, 1).unbind(1),
                cu_seqlens_q=ints(0, 5, 14),
                cu_seqlens_k=ints(0, 9, 18),
            )[0],
            kv,
        ),
    ):
        close(got, want)
        close(*(torch.autograd.grad(x.square().sum(), leaf)[0] for x in (got, want)))
    with pytest.raises(ValueError, match="qkv: shape .* 3 tensors"):
        fa2.flash_attn_qkvpacked_func(kv)
    with pytest.raises(ValueError, match="kv: shape .* 2 tensors"):
        fa2.flash_attn_kvpacked_func(q, qkv)


# ---- what differs, as the docstrings of fa.flash_attn say ---------------------------------------


def shift_of(slopes: Tensor, q_len: int, k_len: int) -> Tensor:
    """[H, q_len]: slope * (i + Sk - Sq)."""
    return slopes[:, None] * (torch.arange(q_len) + k_len - q_len)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 5), (13, 0), (3, 0)])
def test_lse_under_causal_alibi(window: tuple[int, int]) -> None:
    q, k, v = (draw(2, n, h, d, seed=i) for i, (n, h, d) in enumerate(SHAPES))
    out, lse, _ = fa2.flash_attn_func(
        q, k, v, causal=True, window_size=window, alibi_slopes=SLOPES, return_attn_probs=True
    )
    want, want_lse = reference.attention(
        q, k, v, causal=True, window_left=window[0], alibi_slopes=SLOPES
    )
    close(out, want)
    if window != (3, 0):  # a window in use: not their causal kernel
        want_lse = want_lse + torch.stack([shift_of(s, 9, 13) for s in SLOPES])
    close(lse, want_lse, 1e-6)
    # Computed as they do: slope * j in the place of -slope * (i + Sk - Sq - j).
    if window == (-1, -1):
        s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4
        s = s + SLOPES[:, :, None, None] * torch.arange(13)
        hidden = torch.arange(13) > torch.arange(9)[:, None] + 4
        close(lse, s.masked_fill(hidden, -math.inf).logsumexp(-1), 1e-6)


def test_lse_under_causal_alibi_of_packed_sequences() -> None:
    q, k, v = (draw(n, h, d, seed=i) for i, (n, h, d) in enumerate(SHAPES))
    lengths = {"cu_seqlens_q": ints(0, 4, 8), "cu_seqlens_k": ints(0, 6, 9)}
    _, lse, _ = fa2.flash_attn_varlen_func(
        *(q, k, v, *lengths.values(), 4, 6),
        causal=True,
        alibi_slopes=SLOPES,
        return_attn_probs=True,
    )
    _, want = reference.attention(q, k, v, **lengths, causal=True, alibi_slopes=SLOPES)
    for b, (rows, k_len) in enumerate(((slice(0, 4), 6), (slice(4, 8), 3))):
        want[:, rows] += shift_of(SLOPES[b], 4, k_len)
    assert torch.isneginf(want[:, 8]).all()  # the row of no sequence
    close(lse, want, 1e-6)


def test_rows_without_a_key() -> None:
    q, k, v = draw(1, 5, 2, 8), draw(1, 3, 2, 8), draw(1, 3, 2, 8)
    out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :2] == 0).all() and torch.isneginf(lse[:, :, :2]).all()


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_and_its_matrix(packed: bool) -> None:
    q, k, v = (draw(2, n, h, d, seed=i, grad=True) for i, (n, h, d) in enumerate(SHAPES))
    options = {"causal": True, "softcap": 5.0, "alibi_slopes": SLOPES}
    torch.manual_seed(3)
    if packed:
        cu_q, cu_k = ints(0, 9, 18), ints(0, 13, 26)
        q, k, v = (t.flatten(0, 1).detach().requires_grad_() for t in (q, k, v))
        out, lse, dmask = fa2.flash_attn_varlen_func(
            *(q, k, v, cu_q, cu_k, 9, 13, 0.3), **options, return_attn_probs=True
        )
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    else:
        out, lse, dmask = fa2.flash_attn_func(q, k, v, 0.3, **options, return_attn_probs=True)
    torch.manual_seed(3)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64)
    want, _ = reference.attention(q, k, v, **options, dropout_p=0.3, philox_seed_offset=seed)
    close(out, want)
    close(*(torch.autograd.grad(x.square().sum(), v)[0] for x in (out, want)))
    # The matrix: weights without dropout, signs of the mask, lengths rounded up.
    assert dmask.shape == (2, 4, 128, 128) and dmask.dtype == q.dtype
    assert (dmask[:, :, 9:] == 0).all() and (dmask[:, :, :, 13:] == 0).all()
    unit = torch.eye(13, dtype=torch.float64).expand(2, 2, 13, 13).transpose(1, 2)
    weights, _ = reference.attention(q, k, unit.flatten(0, 1) if packed else unit, **options)
    weights = weights.view(2, 9, 4, 13).transpose(1, 2)
    shown = dmask[:, :, :9, :13]
    close(shown.abs(), weights.float().double(), 1e-6)
    gone = dropped(0.3, seed.tolist(), torch.arange(8), (0, 9), (0, 13)).view(2, 4, 9, 13)
    assert torch.equal(shown < 0, gone & (weights > 0))


def test_the_matrix_of_weights_has_a_limit() -> None:
    q = torch.zeros(1, 2**13 + 1, 1, 8)
    with pytest.raises(NotImplementedError, match="return_attn_probs: 8193 query rows x 8193"):
        fa2.flash_attn_func(q, q, q, 0.5, window_size=(1, 0), return_attn_probs=True)


# ---- caches -------------------------------------------------------------------------------------

CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one length": {"cache_seqlens": 5},
    "full": {"cache_seqlens": None},
    "rows": {"cache_batch_idx": ints(3, 0)},
    "leftpad": {"cache_leftpad": ints(2, 0)},
    "append": {"new": 3},
    "append, rotary": {"new": 3, "rotary": 8},
    "append, rotary of halves": {"new": 3, "rotary": 8, "rotary_interleaved": False},
    "append, rotary, window": {"new": 3, "rotary": 8, "window_size": (4, 0)},
    "append, leftpad, slopes": {"new": 3, "cache_leftpad": ints(2, 0), "alibi_slopes": SLOPES},
}


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("name", CACHES)
def test_kvcache(name: str, paged: bool) -> None:
    options = {"cache_seqlens": ints(6, 9), "causal": True, **CACHES[name]}
    new, rotary = options.pop("new", 0), options.pop("rotary", 0)
    q, k, v = draw(2, 3, 4, 16), draw(4, 16, 2, 16, seed=1), draw(4, 16, 2, 8, seed=2)
    rows, used = options.get("cache_batch_idx", ints(0, 1)), options["cache_seqlens"]
    if "cache_batch_idx" not in options:
        k, v = k[:2], v[:2]
    used = ints(*([16 if used is None else used] * 2)) if not isinstance(used, Tensor) else used
    used, want_q, want_k, want_v = used.clone(), q, k.clone(), v.clone()
    extra: dict[str, Any] = {}
    if new:
        k_new, v_new = draw(2, new, 2, 16, seed=3), draw(2, new, 2, 8, seed=4)
        extra |= {"k": k_new, "v": v_new}
        turned = k_new
        if rotary:
            cos, sin = tables(rotary)
            extra |= {"rotary_cos": cos, "rotary_sin": sin}
            interleaved = options.get("rotary_interleaved", True)
            want_q, turned = (
                torch.ops.fa.apply_rotary(
                    x, cos, sin, positions=used[:, None] + torch.arange(3), interleaved=interleaved
                )
                for x in (q, k_new)
            )
        for b, row in enumerate(rows.tolist()):
            begin = int(used[b])
            want_k[row, begin : begin + new] = turned[b]
            want_v[row, begin : begin + new] = v_new[b]
        used += new
    leftpad = options.get("cache_leftpad")
    want, want_lse = reference.attention(
        *(want_q, want_k, want_v),
        kv_batch_idx=rows,
        seqused_k=used,
        leftpad_k=leftpad,
        causal=True,
        window_left=options.get("window_size", (-1, -1))[0],
        alibi_slopes=options.get("alibi_slopes"),
    )
    if "alibi_slopes" in options:
        lengths = (used - leftpad).tolist()
        want_lse = want_lse + torch.stack(
            [shift_of(s, 3, n) for s, n in zip(SLOPES, lengths, strict=True)]
        )
    if paged:
        (k, v), table = to_pages([k, v], 4, torch.Generator().manual_seed(0), poison=9.0)
        extra["block_table"] = table
    out, lse = fa2.flash_attn_with_kvcache(q, k, v, **extra, **options, return_softmax_lse=True)
    close(out, want)
    close(lse, want_lse, 1e-6)
    if new:
        close(from_pages(k, table, 16) if paged else k, want_k)
        close(from_pages(v, table, 16) if paged else v, want_v)
    else:
        assert torch.equal(fa2.flash_attn_with_kvcache(q, k, v, **extra, **options), out)


def test_packed_queries_over_pages() -> None:
    q, k, v = draw(9, 4, 16), draw(2, 16, 2, 16, seed=1), draw(2, 16, 2, 8, seed=2)
    want, _ = reference.attention(
        q, k, v, cu_seqlens_q=ints(0, 4, 9), seqused_k=ints(7, 12), causal=True
    )
    (k, v), table = to_pages([k, v], 4, torch.Generator().manual_seed(0), used=[7, 12])
    out = fa2.flash_attn_varlen_func(
        *(q, k, v, ints(0, 4, 9), ints(0, 7, 19), 5, 12), causal=True, block_table=table
    )
    close(out, want)


# ---- the passes one by one ----------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_raw_passes(packed: bool, dropout_p: float) -> None:
    q, k, v = (draw(2, n, h, d, seed=i, grad=True) for i, (n, h, d) in enumerate(SHAPES))
    lengths: dict[str, Any] = {}
    if packed:
        q, k, v = (t.flatten(0, 1).detach().requires_grad_() for t in (q, k, v))
        lengths = {"cu_seqlens_q": ints(0, 9, 18), "cu_seqlens_k": ints(0, 13, 26)}
    hints = {"max_seqlen_q": 9, "max_seqlen_k": 13} if packed else {}
    forward = fa2._flash_attn_varlen_forward if packed else fa2._flash_attn_forward
    backward = fa2._flash_attn_varlen_backward if packed else fa2._flash_attn_backward
    shape = {
        "dropout_p": dropout_p,
        "softmax_scale": 0.25,
        "causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": SLOPES,
    }
    out, lse, dmask, rng_state = forward(
        *(q, k, v), **lengths, **hints, **shape, return_softmax=dropout_p > 0
    )
    assert not out.requires_grad and (dmask.numel() > 0) == (dropout_p > 0)
    want, want_lse = reference.attention(
        *(q, k, v),
        **lengths,
        softmax_scale=0.25,
        causal=True,
        alibi_slopes=SLOPES,
        dropout_p=dropout_p,
        philox_seed_offset=rng_state,
    )
    close(out, want)
    assert lse.shape == want_lse.shape and rng_state.dtype == torch.int64
    dout = draw(*out.shape, seed=9)
    right = torch.autograd.grad(want, (q, k, v), dout)
    buffers = {n: torch.full_like(t, math.nan) for n, t in (("dq", q), ("dk", k), ("dv", v))}
    q, k, v = (t.detach() for t in (q, k, v))
    delta = backward(
        *(dout, q, k, v, out, lse),
        **buffers,
        **lengths,
        **hints,
        **shape,
        deterministic=False,
        rng_state=rng_state,
    )
    for got, gradient in zip(buffers.values(), right, strict=True):
        close(got, gradient, 1e-5)  # the LSE was shifted in fp32 and back
    close(delta.double(), (dout * out).sum(-1).transpose(-1, -2), 1e-5)
    if dropout_p:
        with pytest.raises(ValueError, match="rng_state: is None"):
            backward(
                *(dout, q, k, v, out, lse),
                **buffers,
                **lengths,
                **hints,
                **shape,
                deterministic=False,
            )
    else:
        with pytest.raises(ValueError, match="return_softmax: True"):
            forward(q, k, v, **lengths, **hints, **shape, return_softmax=True)


def test_raw_forward_over_pages_and_padding() -> None:
    q, k, v = draw(9, 4, 16), draw(2, 16, 2, 16, seed=1), draw(2, 16, 2, 8, seed=2)
    lengths = {"cu_seqlens_q": ints(0, 4, 9), "leftpad_k": ints(2, 1)}
    want, _ = reference.attention(q, k, v, **lengths, seqused_k=ints(7, 12))
    (k, v), table = to_pages([k, v], 4, torch.Generator().manual_seed(0), used=[7, 12])
    out, _, _, _ = fa2._flash_attn_varlen_forward(
        *(q, k, v),
        cu_seqlens_k=ints(0, 16, 32),
        max_seqlen_q=5,
        max_seqlen_k=16,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        block_table=table,
        seqused_k=ints(7, 12),
        zero_tensors=True,
        **lengths,
    )
    close(out, want)


def test_errors_come_with_names() -> None:
    q, k, v = (draw(2, n, h, d, seed=i) for i, (n, h, d) in enumerate(SHAPES))
    with pytest.raises(TypeError, match="q must be a torch.Tensor"):
        fa2.flash_attn_func(q.tolist(), k, v)
    with pytest.raises(TypeError, match="window_size"):
        fa2.flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(ValueError, match="dropout_p: 1.5"):
        fa2.flash_attn_func(q, k, v, 1.5)
    with pytest.raises(ValueError, match="cache_seqlens: is None, and k"):
        fa2.flash_attn_with_kvcache(q, k, v, q[:, :1, :2], q[:, :1, :2, :8])
    with pytest.raises(NotImplementedError, match="alibi_slopes: requires_grad"):
        fa2.flash_attn_func(q, k, v, alibi_slopes=SLOPES.clone().requires_grad_())
    strided = k.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ValueError, match="k_cache: stride"):
        fa2.flash_attn_with_kvcache(q, strided, v)
    close(fa2.flash_attn_func(q, strided, v), reference.attention(q, k, v)[0])


def test_compiles_without_a_break() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=SLOPES[0]).square().sum()

    q, k, v = (draw(1, 9, 4, 8, seed=i, grad=True) for i in range(3))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)),
        torch.autograd.grad(loss(q, k, v), (q, k, v)),
        strict=True,
    ):
        close(got, want)


assert fa.flash_attn is package
