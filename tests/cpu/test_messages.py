# SPDX-License-Identifier: BSD-3-Clause
# Does every failure name the argument, its value, what is allowed, and what to do?
"""The conditions of the error contract: exception type and text; afterwards all still works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa
import host_build
from fa import _validate

OPS = torch.ops.fa
INT = torch.int32
ROOT = host_build.ROOT


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 16, 4, 64), (2, 20, 2, 64), (2, 20, 2, 32))
    return [torch.randn(*s, generator=g).to(dtype) for s in shapes]


Q, K, V = tensors()
PACKED = [Q.reshape(32, 4, 64), K.reshape(40, 2, 64), V.reshape(40, 2, 32)]
CU = {
    "cu_seqlens_q": torch.tensor([0, 5, 32], dtype=INT),
    "cu_seqlens_k": torch.tensor([0, 9, 40], dtype=INT),
}
LENGTHS = torch.tensor([3, 4], dtype=INT)
ROTARY = {"rotary_cos": torch.ones(64, 8), "rotary_sin": torch.ones(64, 8)}


def cu(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=INT)


# (inputs, options, exception, what the text must hold: the name, the value, the cure)
BAD: dict[str, tuple[list[Any], dict[str, Any], type[Exception], list[str]]] = {
    "q's type": (["x", K, V], {}, TypeError, ["q", "str", "Tensor"]),
    "None": ([Q, None, V], {}, TypeError, ["k", "None", "Tensor"]),
    "option's type": ([Q, K, V], {"causal": "yes"}, TypeError, ["causal", "str", "bool"]),
    "dtype": ([Q.int(), K, V], {}, ValueError, ["q:", "torch.int32", "torch.bfloat16", ".to("]),
    "mixed": ([Q, K.half(), V], {}, ValueError, ["k:", "float16 differs", "q's torch.float32"]),
    "device": ([Q, K, V.to("meta")], {}, ValueError, ["v:", "meta", "cpu", "Move"]),
    "dims": ([Q[0], K, V], {}, ValueError, ["q:", "[16, 4, 64]", "[batch, seqlen, heads, dim]"]),
    "packed dims": ([Q, *PACKED[1:]], CU, ValueError, ["q:", "[total, heads, dim]"]),
    "rows": ([Q, K, V[:, 1:]], {}, ValueError, ["v:", "19 rows", "k has 20"]),
    "heads of v": ([Q, K, V[:, :, 1:]], {}, ValueError, ["v:", "1 heads", "k has 2"]),
    "head dim": ([Q, K[..., :32], V], {}, ValueError, ["k:", "head dim 32 (", "q has 64"]),
    "no head dim": ([Q, K, V[..., :0]], {}, ValueError, ["v:", "head dim 0"]),
    "batch": ([Q, K[:1], V[:1]], {}, ValueError, ["k:", "batch size 1", "q's 2", "kv_batch_idx"]),
    "heads": ([Q[:, :, :3], K, V], {}, ValueError, ["q:", "3 heads", "multiple", "2"]),
    "no heads": ([Q, K[:, :, :0], V[:, :, :0]], {}, ValueError, ["q:", "4 heads", "k's 0"]),
    "scale": ([Q, K, V], {"softmax_scale": -2.0}, ValueError, ["softmax_scale", "-2.0", ">= 0"]),
    "nan": ([Q, K, V], {"softmax_scale": float("nan")}, ValueError, ["softmax_scale", "nan"]),
    "softcap": ([Q, K, V], {"softcap": -1.0}, ValueError, ["softcap", "-1.0", "0"]),
    "left": ([Q, K, V], {"window_left": -2}, ValueError, ["window_left", "-2", "-1 means unlim"]),
    "right": ([Q, K, V], {"window_right": -3}, ValueError, ["window_right", "-3", "unlimited"]),
    "causal window": (
        *([Q, K, V], {"causal": True, "window_right": 2}),
        *(ValueError, ["window_right", "2", "causal=True", "causal=False"]),
    ),
    "chunk": ([Q, K, V], {"attention_chunk": -1}, ValueError, ["attention_chunk", "-1", "0"]),
    "splits": ([Q, K, V], {"num_splits": -1}, ValueError, ["num_splits", "-1", "0"]),
    "hint": ([Q, K, V], {"max_seqlen_q": -1}, ValueError, ["max_seqlen_q", "-1", "None"]),
    "out_dtype": (
        *([Q, K, V], {"out_dtype": torch.float16}),
        *(ValueError, ["out_dtype", "torch.float16", "Allowed"]),
    ),
    "cu dtype": (
        *(PACKED, {**CU, "cu_seqlens_q": CU["cu_seqlens_q"].long()}),
        *(ValueError, ["cu_seqlens_q", "torch.int64", "torch.int32", ".int()"]),
    ),
    "cu shape": (
        *(PACKED, {**CU, "cu_seqlens_k": cu(0, 40)}),
        *(ValueError, ["cu_seqlens_k", "1 sequences", "2", "[3]"]),
    ),
    "cu falls": (
        *(PACKED, {**CU, "cu_seqlens_k": cu(0, 41, 40)}),
        *(ValueError, ["cu_seqlens_k", "[0, 41, 40]", "40 rows"]),
    ),
    "cu too long": (
        *(PACKED, {**CU, "cu_seqlens_q": cu(0, 5, 33)}),
        *(ValueError, ["cu_seqlens_q", "[0, 5, 33]", "32 rows"]),
    ),
    "used": (
        *([Q, K, V], {"seqused_k": cu(3, 21)}),
        *(ValueError, ["seqused_k", "entry 1 is 21", "20"]),
    ),
    "used shape": (
        *([Q, K, V], {"seqused_q": cu(3, 4, 5)}),
        *(ValueError, ["seqused_q", "[3]", "[2]"]),
    ),
    "leftpad": ([Q, K, V], {"leftpad_k": cu(0, -1)}, ValueError, ["leftpad_k", "entry 1 is -1"]),
    "cache row": (
        *([Q, K, V], {"kv_batch_idx": cu(0, 2)}),
        *(ValueError, ["kv_batch_idx", "entry 1 is 2", "[0, 1]"]),
    ),
    "packed cache": (
        *(PACKED, {**CU, "kv_batch_idx": cu(0, 1)}),
        *(ValueError, ["kv_batch_idx", "cu_seqlens_k"]),
    ),
    "sinks": ([Q, K, V], {"sinks": torch.zeros(3)}, ValueError, ["sinks", "[3]", "[4]"]),
    "sinks dtype": (
        *([Q, K, V], {"sinks": torch.zeros(4).half()}),
        *(ValueError, ["sinks", "torch.float16", "torch.float32"]),
    ),
    "slopes": (
        *([Q, K, V], {"alibi_slopes": torch.zeros(3, 4)}),
        *(ValueError, ["alibi_slopes", "[3, 4]", "[4] or [2, 4]"]),
    ),
    "dropout": ([Q, K, V], {"dropout_p": 1.0}, ValueError, ["dropout_p", "1.0", "[0, 1)"]),
    "drops": ([Q, K, V], {"dropout_p": -0.1}, ValueError, ["dropout_p", "-0.1", "[0, 1)"]),
    "seed dtype": (
        *([Q, K, V], {"dropout_p": 0.1, "philox_seed_offset": cu(1, 2)}),
        *(ValueError, ["philox_seed_offset", "torch.int32", "int64", "[2]"]),
    ),
    "seed shape": (
        *([Q, K, V], {"philox_seed_offset": torch.zeros(3, dtype=torch.int64)}),
        *(ValueError, ["philox_seed_offset", "[3]", "[2]"]),
    ),
    "seed device": (
        [Q, K, V],
        {"philox_seed_offset": torch.zeros(2, dtype=torch.int64, device="meta")},
        *(ValueError, ["philox_seed_offset", "meta", "cpu", "Move"]),
    ),
    "pages without lengths": (
        *([Q, K, V], {"page_table": torch.zeros(2, 1, dtype=INT)}),
        *(ValueError, ["page_table", "seqused_k", "[batch]"]),
    ),
    "pages dtype": (
        *([Q, K, V], {"page_table": torch.zeros(2, 1), "seqused_k": cu(3, 4)}),
        *(ValueError, ["page_table", "torch.float32", ".int()"]),
    ),
    "pages shape": (
        *([Q, K, V], {"page_table": torch.zeros(3, 1, dtype=INT), "seqused_k": cu(3, 4)}),
        *(ValueError, ["page_table", "[3, 1]", "[2, pages]", "kv_batch_idx"]),
    ),
    "pages stride": (
        *([Q, K, V], {"page_table": torch.zeros(3, 2, dtype=INT).T, "seqused_k": cu(3, 4)}),
        *(ValueError, ["page_table", "stride 2", ".contiguous()"]),
    ),
    "packed pages": (
        [*PACKED[:1], K, V],
        {**CU, "page_table": torch.zeros(2, 1, dtype=INT), "seqused_k": cu(3, 4)},
        *(ValueError, ["k:", "cu_seqlens_k", "[total, heads, dim]"]),
    ),
    "few pages": (
        *([Q, K, V], {"page_table": torch.zeros(2, 1, dtype=INT), "seqused_k": cu(3, 21)}),
        *(ValueError, ["seqused_k", "entry 1 is 21", "[0, 20]"]),
    ),
    "page number": (
        *([Q, K, V], {"page_table": cu(0, 2).view(2, 1), "seqused_k": cu(3, 4)}),
        *(ValueError, ["page_table", "entry [1, 0] is 2", "2 pages", "[0, 1]"]),
    ),
    "page row": (
        [Q, K, V],
        {"page_table": cu(0, 1).view(2, 1), "seqused_k": cu(3, 4), "kv_batch_idx": cu(2, 0)},
        *(ValueError, ["kv_batch_idx", "entry 0 is 2", "page_table has 2"]),
    ),
    **{
        name: ([Q, K, V], {name: torch.ones(1)}, ValueError, [name, "[1]", "float8_e4m3fn"])
        for name in ("q_descale", "k_descale", "v_descale")
    },
    "descale block": (
        *([Q, K, V], {"descale_block_k": 64}),
        *(ValueError, ["descale_block_k", "64", "k_descale or v_descale"]),
    ),
    "negative block": (
        *([Q, K, V], {"descale_block_q": -1}),
        *(ValueError, ["descale_block_q", "-1", "0"]),
    ),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_bad_calls(
    case: tuple[list[Any], dict[str, Any], type[Exception], list[str]], grad: bool
) -> None:
    inputs, options, kind, words = case
    if grad:
        inputs = [
            t.clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
            for t in inputs
        ]
    for call in (OPS.forward, fa.attention):
        with pytest.raises(kind) as caught:
            call(*inputs, **options)
        text = str(caught.value)
        for word in words:
            assert word in text, f"{word!r} is missing in: {text}"
    works_still()


def works_still() -> None:
    out, lse = OPS.forward(Q, K, V, causal=True)
    want, want_lse = fa.reference.attention(Q, K, V, causal=True)
    assert (out - want).abs().max() < 1e-5 and (lse - want_lse).abs().max() < 1e-5


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_bad_calls_leave_outputs_alone(
    case: tuple[list[Any], dict[str, Any], type[Exception], list[str]],
) -> None:
    inputs, options, kind, _ = case
    out, lse = torch.full((2, 16, 4, 32), 7.0), torch.full((2, 4, 16), 7.0)
    if "cu_seqlens_q" in options:
        out, lse = out.reshape(32, 4, 32), torch.full((4, 32), 7.0)
    with pytest.raises(kind):
        OPS.forward_out(*inputs, **options, out=out, lse=lse)
    assert (out == 7).all() and (lse == 7).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"out": torch.empty(2, 16, 4, 64)}, ["out:", "[2, 16, 4, 64]", "[2, 16, 4, 32]"]),
        ({"out": torch.empty(2, 16, 4, 32).half()}, ["out:", "torch.float16", "torch.float32"]),
        ({"lse": torch.empty(2, 16, 4)}, ["lse:", "[2, 16, 4]", "[2, 4, 16]"]),
        ({"lse": torch.empty(2, 4, 16).half()}, ["lse:", "torch.float16"]),
    ],
)
def test_bad_buffers(wrong: dict[str, Tensor], words: list[str]) -> None:
    good = {"out": torch.full((2, 16, 4, 32), 7.0), "lse": torch.full((2, 4, 16), 7.0)}
    with pytest.raises(ValueError) as caught:
        OPS.forward_out(Q, K, V, **{**good, **wrong})
    assert all(word in str(caught.value) for word in words), caught.value
    for name in good.keys() - wrong.keys():
        assert (good[name] == 7).all()


def test_forward_out_loses_no_gradient() -> None:
    buffers = {"out": torch.full((2, 16, 4, 32), 7.0), "lse": torch.full((2, 4, 16), 7.0)}
    with pytest.raises(NotImplementedError, match="forward_out: an input requires a gradient"):
        OPS.forward_out(Q, K, V.clone().requires_grad_(), **buffers)
    assert (buffers["out"] == 7).all()
    with torch.no_grad():
        OPS.forward_out(Q, K, V.clone().requires_grad_(), **buffers)
    assert torch.equal(buffers["out"], OPS.forward(Q, K, V)[0])


def test_bad_backward_calls() -> None:
    out, lse = OPS.forward(Q, K, V)
    good = {"dout": out, "q": Q, "k": K, "v": V, "out": out, "lse": lse}
    for wrong, words in (
        ({"dout": out[:, 1:]}, ["dout:", "[2, 15, 4, 32]", "[2, 16, 4, 32]"]),
        ({"dout": out.half()}, ["dout:", "torch.float16"]),
        ({"out": out[..., 1:]}, ["out:", "[2, 16, 4, 31]"]),
        ({"lse": lse.transpose(1, 2)}, ["lse:", "[2, 16, 4]", "[2, 4, 16]"]),
        ({"dlse": lse[:1]}, ["dlse:", "[1, 4, 16]"]),
        ({"grad_dtype": torch.float16}, ["grad_dtype", "torch.float16", "Allowed"]),
        ({"window_left": -7}, ["window_left", "-7"]),
    ):
        with pytest.raises(ValueError) as caught:
            OPS.backward(**{**good, **wrong})
        assert all(word in str(caught.value) for word in words), caught.value
    buffers = {n: torch.full_like(good[n[1:]], 7.0) for n in ("dq", "dk", "dv")}
    with pytest.raises(ValueError, match=r"dk: shape \[2, 20, 2, 32\] must be \[2, 20, 2, 64\]"):
        OPS.backward_out(**good, **{**buffers, "dk": torch.zeros_like(V)})
    with pytest.raises(ValueError, match="philox_seed_offset: None, and dropout_p is 0.1"):
        OPS.backward_out(**good, **buffers, dropout_p=0.1)
    assert all((b == 7).all() for b in buffers.values())


def test_bad_combine_calls() -> None:
    out, lse = torch.zeros(3, 2, 16, 4, 32), torch.zeros(3, 2, 4, 16)
    for args, options, words in (
        ((out[:0], lse[:0]), {}, ["n = 0", "at least one"]),
        ((out[0, 0], lse), {}, ["out_partial", "[16, 4, 32]", "[n, B, Sq, Hq, D]"]),
        ((out, lse.transpose(2, 3)), {}, ["lse_partial", "[3, 2, 16, 4]", "[3, 2, 4, 16]"]),
        ((out, lse.half()), {}, ["lse_partial", "torch.float16", "torch.float32"]),
        ((out.int(), lse), {}, ["out_partial", "torch.int32"]),
        ((out, lse), {"out_dtype": torch.int32}, ["out_dtype", "torch.int32"]),
    ):
        with pytest.raises(ValueError) as caught:
            OPS.combine(*args, **options)
        assert all(word in str(caught.value) for word in words), caught.value
    for outs, lses, sentence in (
        ([], [], "^outs: n = 0 partial results"),
        (out, lse.transpose(2, 3), r"^lses: shape \[3, 2, 16, 4\] .* for outs \[3, 2, 16, 4, 32\]"),
        ([out[0], out[1, :1]], [*lse[:2]], r"^outs\[1\]: shape \[1, 16, .* outs\[0\] has \[2, 16"),
        ([*out], [*lse[:2], lse[2, 1:]], r"^lses\[2\]: shape \[1, 4, 16\], and lses\[0\] has \[2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fa.combine(outs, lses)


def test_values_of_another_dtype_than_a_stored_cache() -> None:
    with pytest.raises(ValueError, match=r"^v: dtype torch.float16 differs from k's .*e4m3fn\."):
        fa.attention(Q.half(), K.to(torch.float8_e4m3fn), V.half())


@pytest.mark.parametrize(
    ("lengths", "rotary", "words"),
    [
        (LENGTHS.long(), {}, "torch.int64 is not torch.int32. Pass cache_seqlens.int()"),
        (LENGTHS.long(), ROTARY, "torch.int64 is not torch.int32. Pass cache_seqlens.int()"),
        (cu(3, 4, 5), {}, "shape [3] must be [2]"),
        (cu(3, 21), {}, "entry 1 is 21, and sequence 1 of k_cache has room for 20"),
        (-1, {}, "entry 0 is -1"),
    ],
    ids=["dtype", "dtype, rotated", "shape", "too long", "negative"],
)
def test_lengths_of_a_cache_are_called_as_the_caller_calls_them(
    lengths: Any, rotary: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(ValueError) as caught:
        fa.attention_kvcache(Q, K, V, cache_seqlens=lengths, **rotary)
    text = str(caught.value)
    assert text.startswith("cache_seqlens: ") and words in text, text


def test_unknown_options_and_missing_arguments() -> None:
    with pytest.raises((TypeError, RuntimeError), match="casual"):
        OPS.forward(Q, K, V, casual=True)
    with pytest.raises((TypeError, RuntimeError), match="casual"):
        fa.attention(Q, K, V, casual=True)
    with pytest.raises(TypeError, match="casual"):
        fa.supports(Q, K, V, casual=True)
    with pytest.raises(TypeError, match="window_size"):
        fa.attention(Q, K, V, window_size=5)


# ---- for kernels: what the CPU path allows and a GPU does not -----------------------------------


@pytest.mark.parametrize(
    ("inputs", "kind", "words"),
    [
        (tensors(torch.float32), ValueError, ["q:", "torch.float32", "bfloat16", 'backend("cpu")']),
        (tensors(torch.float8_e5m2), ValueError, ["q:", "float8_e5m2", "float8_e4m3fn"]),
        (
            [Q.bfloat16(), K.to(torch.float8_e4m3fn), V.to(torch.float8_e4m3fn)],
            *(NotImplementedError, ["k:", "float8_e4m3fn", "bfloat16"]),
        ),
        (
            [t.repeat(1, 1, 1, 9).half() for t in (Q, K, V)],
            *(NotImplementedError, ["q:", "head dim 576", "256"]),
        ),
    ],
    ids=["fp32", "e5m2", "mixed fp8", "large head dim"],
)
def test_for_kernels(inputs: list[Tensor], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        _validate.forward(*inputs, {}, kernels=True)
    assert all(word in str(caught.value) for word in words), caught.value


def test_options_without_a_kernel_row_are_refused_by_name() -> None:
    inputs = tensors(torch.bfloat16)
    with pytest.raises(NotImplementedError) as caught:
        _validate.forward(*inputs, {"page_table": torch.zeros(2, 1, dtype=INT)}, kernels=True)
    text = str(caught.value)
    assert text.startswith("page_table: ") and 'fa.backend("cpu")' in text, text


@pytest.mark.parametrize("call", [fa.attention, torch.ops.fa.forward], ids=["function", "operator"])
def test_an_option_of_another_library_is_refused_by_name(call):
    with pytest.raises(
        TypeError, match='"is_causal" is not an option.*causal, window_left'
    ) as caught:
        call(Q, K, V, is_causal=True)
    assert "take causal" in str(caught.value)


# ---- wrong Python types -------------------------------------------------------------------------

NEW = K[:, :1], V[:, :1]
WRONG_TYPES: dict[str, tuple[Any, str]] = {
    "a list of lengths": (
        lambda: fa.attention_varlen(Q[0], K[0], V[0], [0, 16], CU["cu_seqlens_k"]),
        r"^cu_seqlens_q must be a torch.Tensor or None, not list\. Pass torch.tensor\("
        r"cu_seqlens_q, dtype=torch.int32\)",
    ),
    "a word as scale": (
        lambda: fa.attention(Q, K, V, softmax_scale="small"),
        r"^softmax_scale must be a number or None, not str\.",
    ),
    "a word as scale of the operator": (
        lambda: OPS.forward(Q, K, V, softmax_scale="small"),
        r"^softmax_scale must be a number or None, not str\.",
    ),
    "with a gradient": (
        lambda: OPS.forward(Q.clone().requires_grad_(), K, V, softcap="small"),
        r"^softcap must be a number, not str\.",
    ),
    "no dropout": (lambda: fa.attention(Q, K, V, dropout_p=None), "^dropout_p must be a number"),
    "a word as mask": (
        lambda: fa.attention(Q, K, V, causal="yes"),
        "^causal must be a bool, not str",
    ),
    "half a key": (
        lambda: fa.attention(Q, K, V, window_size=(1.5, 0)),
        r"^window_size must be a pair \(left, right\) of integers or None, not \(1.5, 0\)",
    ),
    "a word as dtype": (
        lambda: fa.attention(Q, K, V, out_dtype="float16"),
        "^out_dtype must be a torch.dtype or None, not str",
    ),
    "supports": (
        lambda: fa.supports(Q[0], K[0], V[0], cu_seqlens_q=[0, 16]),
        "^cu_seqlens_q must be a torch.Tensor or None",
    ),
    "explain": (lambda: fa.explain(Q, K, V, softmax_scale="small"), "^softmax_scale must be"),
    "a cache's lengths": (
        lambda: fa.attention_kvcache(Q, K, V, cache_seqlens=[3, 4]),
        "^cache_seqlens must be a torch.Tensor or an integer, not list. .*dtype=torch.int32",
    ),
    "a cache's pages": (
        lambda: fa.attention_kvcache(Q, K, V, cache_seqlens=LENGTHS, page_table=[[0], [1]]),
        "^page_table must be a torch.Tensor or None, not list",
    ),
    "a cache's new keys": (
        lambda: fa.attention_kvcache(Q, K, V, [1], [2], cache_seqlens=LENGTHS),
        "^k_new must be a torch.Tensor or None, not list",
    ),
    "a cache's packed queries": (
        lambda: fa.attention_kvcache(Q[0], K, V, cache_seqlens=LENGTHS, cu_seqlens_q=[0, 2, 16]),
        "^cu_seqlens_q must be a torch.Tensor or None, not list",
    ),
    "appended": (
        lambda: fa.append_kv(*NEW, K, V, cache_seqlens=[3, 4]),
        "^cache_seqlens must be a torch.Tensor, not list",
    ),
    "rotated": (lambda: OPS.apply_rotary(Q, [1], [2]), "^cos must be a torch.Tensor, not list"),
    "combined": (lambda: fa.combine(3, 4), "^outs must be a torch.Tensor, not int"),
    "a combined part": (lambda: fa.combine([Q, 4], [Q, Q]), r"^outs\[1\] must be a torch.Tensor"),
    "the backward": (
        lambda: OPS.backward(Q, Q, K, V, Q, Q, softmax_scale="small"),
        "^softmax_scale must be a number or None, not str",
    ),
    "a buffer": (
        lambda: OPS.forward_out(Q, K, V, softcap="small", out=Q.clone(), lse=Q[:, 0]),
        "^softcap must be a number, not str",
    ),
    "no argument": (
        lambda: fa.append_kv(*NEW, K, V, cache_seqlens=LENGTHS, block_table=3),
        '^"block_table" is not an argument of fa::append_kv. .*page_table',
    ),
}


MISSING: dict[str, tuple[Any, str]] = {
    "out": (
        lambda: OPS.forward_out(Q, K, V),
        "^out: was not passed to fa::forward_out. Pass a torch.Tensor as out. fa::forward alloc",
    ),
    "v": (lambda: OPS.forward(Q, K), r"^v: was not passed to fa::forward\."),
    "lse": (lambda: OPS.backward(Q, Q, K, V, Q), r"^lse: was not passed to fa::backward\."),
    "dv": (
        lambda: OPS.backward_out(Q, Q, K, V, Q, Q, dq=Q, dk=K),
        "^dv: was not passed to fa::backward_out. .* fa::backward allocates",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_argument_is_a_type_error_that_names_it(name: str) -> None:
    call, sentence = MISSING[name]
    with pytest.raises(TypeError, match=sentence):
        call()


def nested(t: Tensor) -> Tensor:
    return torch.nested.nested_tensor([t[0, :3], t[1]], layout=torch.jagged)


@pytest.mark.parametrize("call", [fa.attention, OPS.forward], ids=["function", "operator"])
def test_sparse_and_nested_tensors_are_refused_in_a_sentence(call: Any) -> None:
    with pytest.raises(ValueError, match=r"^q: layout torch.sparse_coo .* Pass q.to_dense\(\)"):
        call(Q.to_sparse(), K, V)
    with pytest.raises(ValueError, match=r"^v: layout torch.sparse_coo"):
        call(Q, K, V.to_sparse())
    with pytest.raises(ValueError, match=r"^q: is a nested tensor.*q.offsets\(\).*varlen"):
        call(nested(Q), nested(K), nested(V))


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_python_type_is_a_type_error_that_names_the_argument(name: str) -> None:
    call, sentence = WRONG_TYPES[name]
    with pytest.raises(TypeError, match=sentence):
        call()


def test_every_argument_of_every_schema_has_its_type() -> None:
    from fa._schemas import SCHEMAS
    from fa._validate_types import KINDS, wrong_type

    assert set(KINDS) == set(SCHEMAS)
    for op, kinds in KINDS.items():
        schema = getattr(OPS, op).default._schema
        assert list(kinds) == [a.name for a in schema.arguments], op
        for argument in schema.arguments:
            optional = "Optional" in str(argument.type)
            assert kinds[argument.name].endswith("?") == optional, (op, argument.name)
            assert str(wrong_type(op, argument.name, "str")).startswith(f"{argument.name} must be")


# ---- two words for one thing ---------------------------------------------------------------------


@pytest.mark.parametrize("call", [fa.attention, fa.explain])
def test_a_window_is_said_once(call: Callable[..., Any]) -> None:
    for side in ("window_left", "window_right"):
        with pytest.raises(ValueError, match=rf"^{side}: 3 was given beside window_size \(2, 0\)"):
            call(Q, K, V, window_size=(2, 0), **{side: 3})
        answer = fa.supports(Q, K, V, window_size=(2, 0), **{side: 3})
        assert str(answer).startswith(f"{side}: 3 was given beside")
    call(Q, K, V, window_size=(-1, None), window_left=3)
    call(Q, K, V, window_size=(2, 0), window_left=-1)


def test_explain_says_where_there_is_no_backward() -> None:
    q, k, v = (t.to(torch.float8_e4m3fn) for t in (Q, K, V))
    assert "; forward, no splits" in fa.explain(q, k, v)
    assert "; forward and backward, no splits" in fa.explain(Q, K, V)
