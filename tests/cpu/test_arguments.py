# SPDX-License-Identifier: BSD-3-Clause
# What does a public function say about an argument of a wrong type or shape?
"""Every argument of every function of `fa` and of its two drop-in modules, with values of wrong
types: a TypeError names the argument, and whatever is refused is refused in a sentence that speaks
of the caller's own arguments.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fa
from fa import flash_attn_interface as fa3
from fa import reference
from fa._schemas import SCHEMAS
from fa._validate_types import arguments
from fa.flash_attn import bert_padding
from fa.flash_attn import flash_attn_interface as fa2

INT = torch.int32


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


def draw(*shape: int, dtype: torch.dtype = torch.half) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


Q, K, V = draw(2, 8, 4, 16), draw(2, 12, 2, 16), draw(2, 12, 2, 16)
NEW = draw(2, 1, 2, 16)
ROWS = [draw(8, 4, 16) for _ in range(3)]  # packed
ENDS, LENGTHS, NONE, SWAPPED = ints(0, 3, 8), ints(3, 4), ints(0, 0), ints(1, 0)
COS = torch.ones(32, 4)
OUT, LSE = fa.attention(Q, K, V, return_lse=True)
PACKED_OUT, PACKED_LSE = fa.attention_varlen(*ROWS, ENDS, ENDS, return_lse=True)

# A value for each name of an argument, whichever function has it.
GOOD: dict[str, Any] = {
    **{"q": Q, "k": K, "v": V, "qkv": draw(2, 8, 3, 4, 16), "kv": draw(2, 12, 2, 2, 16)},
    **{"softmax_scale": 0.5, "causal": True, "is_causal": True, "window_size": (3, -1)},
    **{"window_size_left": 3, "window_size_right": -1, "attention_chunk": 8, "softcap": 1.0},
    **{"deterministic": True, "num_heads_q": 4, "num_heads_kv": 2, "num_splits": 1},
    **{"return_attn_probs": True, "return_softmax_lse": True, "return_lse": True},
    **{"return_softmax": False, "dropout_p": 0.1, "alibi_slopes": torch.ones(4)},
    **{"sinks": torch.zeros(4), "sm_margin": 0, "max_seqlen_q": 5, "max_seqlen_k": 5},
    **{"max_seqlen": 5, "seqused_q": NONE, "seqused_k": LENGTHS, "cu_seqlens": ENDS},
    **{"out_partial": draw(3, 2, 8, 4, 16, dtype=torch.float32), "out_dtype": torch.float32},
    **{"lse_partial": draw(3, 2, 8, 4, dtype=torch.float32), "k_cache": K, "v_cache": V},
    **{"cache_seqlens": LENGTHS, "cache_batch_idx": SWAPPED, "cache_leftpad": NONE},
    **{"kv_batch_idx": SWAPPED, "leftpad_k": NONE, "rotary_cos": COS, "rotary_sin": COS},
    **{"rotary_interleaved": True, "rotary_seqlens": LENGTHS, "scheduler_metadata": NONE},
    **{"dout": OUT, "out": OUT, "softmax_lse": LSE, "rng_state": torch.zeros(2).long()},
    **{"dq": Q.clone(), "dk": K.clone(), "dv": V.clone(), "zero_tensors": False},
    **{"batch_size": 2, "headdim": 16, "headdim_v": 16, "qkv_dtype": torch.half},
    **{"page_size": 4, "max_seqlen_k_new": 0, "has_softcap": False, "granularity": "block"},
    **{"hadamard": True, "block_q": 8, "block_k": 8, "outs": draw(3, 2, 8, 4, 16)},
    **{"lses": draw(3, 2, 4, 8, dtype=torch.float32), "device": "h200"},
    **{"input": torch.ones(6, 4), "indices": torch.tensor([0, 2]), "values": torch.ones(2, 4)},
    **{"first_axis_dim": 6, "hidden_states": torch.ones(2, 3, 4), "batch": 2, "seqlen": 3},
    **{"attention_mask": torch.ones(2, 3, dtype=INT), "unused_mask": torch.zeros(2, 3, dtype=INT)},
    "attention_mask_in_length": ints(2, 1, 0, 3, 0, 0).view(2, 3),
    **{"descale_block_q": 0, "descale_block_k": 0, "batch_invariant": True, "dtype": torch.double},
    "philox_seed_offset": torch.zeros(2).long(),
}
PACKED = {
    **dict(zip("qkv", ROWS, strict=True)),
    **{"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "qkv": draw(8, 3, 4, 16)},
    **{"kv": draw(8, 2, 4, 16), "dout": PACKED_OUT, "out": PACKED_OUT, "softmax_lse": PACKED_LSE},
    **{name: ROWS[0].clone() for name in ("dq", "dk", "dv")},
}
CACHE = {"k": NEW, "v": NEW, "k_new": NEW, "v_new": NEW, "k_cache": K, "v_cache": V}
OPTIONS = {
    name: GOOD[name]
    for name in (
        *("attention_chunk", "seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx", "dropout_p"),
        *("philox_seed_offset", "num_splits", "batch_invariant", "out_dtype", "max_seqlen_q"),
    )
}
APPEND = {"kv_batch_idx": SWAPPED, "leftpad_k": NONE, "rotary_cos": COS, "rotary_sin": COS}

Case = tuple[Callable[..., Any], dict[str, Any]]


def case(function: Callable[..., Any], without: str = "", **given: Any) -> Case:
    """Every argument that has a value here, but `without`."""
    values = {**GOOD, **given}
    names = [n for n in inspect.signature(function).parameters if n not in without.split()]
    return function, {n: values[n] for n in names if n in values} | given


def case3(name: str, **given: Any) -> Case:
    function = getattr(fa3, name)
    own = inspect.signature(function).parameters
    return case(function, "qv pack_gqa", **{n: x for n, x in given.items() if n in own})


def case2(name: str, **given: Any) -> Case:
    function = getattr(fa2, name)
    own = inspect.signature(function).parameters
    return case(function, "block_table", **{n: x for n, x in given.items() if n in own})


CASES: dict[str, Case] = {
    "attention": case(fa.attention, **OPTIONS),
    "attention_varlen": case(
        fa.attention_varlen,
        **dict(zip("qkv", ROWS, strict=True)),
        **{"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "causal": True, "return_lse": True},
    ),
    "attention_kvcache": (
        fa.attention_kvcache,
        {
            **{"q": Q, "k_cache": K.clone(), "v_cache": V.clone(), "k_new": NEW, "v_new": NEW},
            **{"cache_seqlens": LENGTHS, **APPEND, "rotary_interleaved": True},
            **{"rotary_seqlens": LENGTHS, "return_lse": True, "softcap": 1.0, "num_splits": 0},
        },
    ),
    "append_kv": (
        fa.append_kv,
        {
            **{"k_new": NEW, "v_new": NEW, "k_cache": K.clone(), "v_cache": V.clone()},
            **{"cache_seqlens": LENGTHS, **APPEND, "rotary_interleaved": True},
        },
    ),
    "combine": case(fa.combine),
    "explain": case(fa.explain, "device", causal=True, return_lse=True, softcap=1.0),
    "quantize_qkv": case(fa.quantize_qkv),
    "reference": case(
        reference.attention,
        "cu_seqlens_q cu_seqlens_k page_table q_descale k_descale v_descale",
    ),
    "QuantizedQkv": (fa.QuantizedQkv, {"q": Q, "k": K, "v": V}),
    **{f"bert_padding.{n}": case(getattr(bert_padding, n)) for n in bert_padding.__all__},
    **{
        f"fa3.{name}": case3(name)
        for name in (
            *("flash_attn_func", "flash_attn_qkvpacked_func", "get_scheduler_metadata"),
            *("_flash_attn_backward",),
        )
    },
    "fa3.flash_attn_varlen_func": case3("flash_attn_varlen_func", **PACKED),
    "fa3.flash_attn_combine": case(fa3.flash_attn_combine, "out"),
    "fa3.flash_attn_with_kvcache": case3("flash_attn_with_kvcache", **CACHE),
    "fa3._flash_attn_forward": case3(
        "_flash_attn_forward", k_new=NEW, v_new=NEW, seqlens_rotary=LENGTHS, leftpad_k=NONE
    ),
    **{
        f"fa2.{name}": case2(name, **PACKED if "varlen" in name else {})
        for name in (
            *("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"),
            *("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func"),
            *("flash_attn_varlen_kvpacked_func", "_flash_attn_forward", "_flash_attn_backward"),
            *("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
        )
    },
    "fa2.flash_attn_with_kvcache": case2("flash_attn_with_kvcache", **CACHE),
}
# Functions whose operands only differ in shape from what they take: errors of torch.
SHAPES_BY_TORCH = ("bert_padding", "reference")

WRONG: dict[str, Any] = {
    **{"a word": "x", "a fraction": 1.5, "None": None, "a number": 7, "a bool": True},
    **{"a list": [1, 2], "an object": object(), "a tensor": torch.randn(3, 5)},
    **{"a scalar": torch.tensor(2.5), "a vector": ints(0, 0, 0), "a dtype": torch.half},
}
SCHEMA_NAMES = {name for schema in SCHEMAS.values() for name in arguments(schema)}
UNMISTAKABLE = {name for name in SCHEMA_NAMES if "_" in name}  # unlike `positions`, no word
# Of the options, those that a function takes by **options.
OPEN = ("attention", "attention_varlen", "attention_kvcache", "append_kv", "explain")


def own_names(label: str, function: Callable[..., Any]) -> set[str]:
    names = set(inspect.signature(function).parameters) - {"options"}
    return names | (SCHEMA_NAMES | {"return_lse", "window_size"} if label in OPEN else set())


@pytest.mark.parametrize("label", CASES)
def test_the_calls_of_this_file_run(label: str) -> None:
    function, given = CASES[label]
    function(**given)


@pytest.mark.parametrize("label", CASES)
def test_what_is_refused_is_refused_in_a_sentence_about_own_arguments(label: str) -> None:
    function, given = CASES[label]
    own = own_names(label, function)
    others = "|".join(sorted(UNMISTAKABLE - own)) or "(?!)"
    foreign = re.compile(rf"(?<![\w.'])({others})(?!\w)")
    for name, right in given.items():
        for what, value in WRONG.items():
            try:
                function(**{**given, name: value})
            except (TypeError, ValueError, NotImplementedError) as error:
                text = str(error)
                told = f"{label}({name}={what}): {text}"
                if isinstance(error, TypeError):
                    assert re.match(rf"{name}(\[\d\])? must be ", text), told
                assert re.match(r"(\w+)", text)[1] in own, told  # type: ignore[index]
                assert foreign.search(text) is None, told
                assert text.endswith((".", ")")), told
            except (IndexError, RuntimeError):
                by_shape = isinstance(value, Tensor) and isinstance(right, Tensor)
                assert by_shape and label.startswith(SHAPES_BY_TORCH), f"{label}({name}={what})"


TYPES = {"float": float, "bool": bool, "int": int, "dtype": torch.dtype, "str": str}
TYPES["Tensor"] = Tensor


@pytest.mark.parametrize("label", CASES)
def test_a_value_of_a_wrong_type_is_never_accepted(label: str) -> None:
    function, given = CASES[label]
    for name, right in given.items():
        if isinstance(right, tuple):  # a window is a pair of either kind
            continue
        kind = next(name for name, own in TYPES.items() if isinstance(right, own))
        for what, value in WRONG.items():
            fits = value is None or isinstance(value, TYPES[kind])
            number = kind in ("float", "bool") and what in ("a number", "a scalar")
            length = name == "cache_seqlens" and what == "a number"
            if (fits or number or length) and (kind, what) != ("int", "a bool"):
                continue
            with pytest.raises((TypeError, ValueError)):
                function(**{**given, name: value})
                pytest.fail(f"{label}({name}={what}) ran")


@pytest.mark.parametrize("size", ["x", 1.5, None, torch.ones(2), True, [4]], ids=str)
def test_the_paged_cache_takes_whole_numbers(size: Any) -> None:
    pytest.importorskip("transformers")
    from fa.integrations.paged_cache import PagedCache, PagedLayer

    for make in (PagedCache, PagedLayer):
        with pytest.raises(TypeError, match="^page_size must be an integer, not "):
            make(size)
        with pytest.raises(ValueError, match="^page_size: 0 must be at least 1"):
            make(0)
        make(numpy.int64(4))
    with pytest.raises(TypeError, match="^tokens must be an integer, not str"):
        PagedLayer(4).crop("x")  # type: ignore[arg-type]


def test_the_layer_of_a_model_hears_of_its_own_arguments() -> None:
    pytest.importorskip("transformers")
    from fa.integrations.transformers import attention_forward, register

    with pytest.raises(TypeError, match="^name must be a string, not int"):
        register(3)  # type: ignore[arg-type]
    query, key = (t.transpose(1, 2) for t in (Q, K))
    layer = torch.nn.Module()
    for wrong, sentence in (
        ({"scaling": "x"}, "^scaling must be a number or None, not str"),
        ({"value": None}, "^value must be a torch.Tensor, not None"),
        ({"value": key[..., :0]}, "^value: head dim 0"),
        ({"key": key[:, :, :, :8]}, "^key: head dim 8 .* query has 16"),
        ({"scaling": -1.0}, "^scaling: -1.0 is not a finite number"),
        ({"s_aux": torch.zeros(3)}, r"^s_aux: shape \[3\] must be \[4\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            given = {"query": query, "key": key, "value": key, "is_causal": False, **wrong}
            attention_forward(layer, attention_mask=None, **given)  # type: ignore[arg-type]


def test_numbers_of_numpy_and_tensors_of_one_element_are_numbers() -> None:
    want = fa.attention(Q, K, V, softcap=2.0, num_splits=3, causal=True)
    given = {"softcap": numpy.float32(2), "num_splits": numpy.int64(3), "causal": numpy.bool_(True)}
    for options in (
        given,
        {"softcap": torch.tensor(2.0), "num_splits": torch.tensor(3), "causal": 1},
    ):
        assert torch.equal(fa.attention(Q, K, V, **options), want)
    assert torch.equal(fa3.flash_attn_func(Q, K, V, **given), want)


def test_arguments_of_the_two_libraries_in_each_others_places() -> None:
    """The fourth one is dropout_p there and softmax_scale here, the fifth ..."""
    with pytest.raises(TypeError, match="^softmax_scale must be a number or None, not bool"):
        fa3.flash_attn_func(Q, K, V, True)
    with pytest.raises(TypeError, match="^causal must be a bool, not None"):
        fa3.flash_attn_func(Q, K, V, 0.0, None, True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^dropout_p must be a number, not None"):
        fa2.flash_attn_func(Q, K, V, None, True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^flash_attn_func\(\) missing 1 required .*'v'"):
        fa2.flash_attn_func(Q, K)  # type: ignore[call-arg]


# ---- names: (call, the sentence's beginning) -----------------------------------------------------

SHORT, PAGE_TABLE = ints(3, 40), ints(0, 1).view(2, 1)
NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "lengths": (
        lambda: fa3.flash_attn_with_kvcache(Q, K, V, cache_seqlens=SHORT),
        "cache_seqlens: entry 1 is 40, and sequence 1 of k_cache has room for 12",
    ),
    "lengths, FA2": (
        lambda: fa2.flash_attn_with_kvcache(Q, K, V, cache_seqlens=SHORT),
        "cache_seqlens: entry 1 is 40, and sequence 1 of k_cache has room for 12",
    ),
    "no lengths": (
        lambda: fa3._flash_attn_forward(Q, K, V, NEW, NEW),
        "seqused_k: is None, and k_new was given",
    ),
    "no lengths, public": (
        lambda: fa3.flash_attn_with_kvcache(Q, K, V, NEW, NEW),
        "cache_seqlens: is None, and k was given",
    ),
    "one of two": (
        lambda: fa2.flash_attn_with_kvcache(Q, K, V, NEW, cache_seqlens=3),
        "v: is None, and k was given",
    ),
    "cache": (
        lambda: fa3.flash_attn_with_kvcache(Q, K.float(), V, NEW, NEW, cache_seqlens=3),
        "k_cache: dtype torch.float32 differs from q's",
    ),
    "cache, full": (
        lambda: fa2.flash_attn_with_kvcache(Q, K, V[:, 1:]),
        "v_cache: 11 rows (shape [2, 11, 2, 16]), and k_cache has 12",
    ),
    "pages": (
        lambda: fa2.flash_attn_with_kvcache(
            Q, K, V, cache_seqlens=3, block_table=PAGE_TABLE.float()
        ),
        "block_table: dtype torch.float32 is not torch.int32. Pass block_table.int()",
    ),
    "rows of pages": (
        lambda: fa3.flash_attn_with_kvcache(
            Q, K, V, cache_seqlens=3, page_table=PAGE_TABLE, cache_batch_idx=ints(0, 2)
        ),
        "cache_batch_idx: entry 1 is 2, and page_table has 2",
    ),
    "padding": (
        lambda: fa3.flash_attn_with_kvcache(Q, K, V, cache_seqlens=3, cache_leftpad=ints(0, -1)),
        "cache_leftpad: entry 1 is -1",
    ),
    "window": (
        lambda: fa3.flash_attn_func(Q, K, V, window_size=(-5, 0)),
        "window_size[0]: -5 is below -1",
    ),
    "window, raw": (
        lambda: fa2._flash_attn_forward(Q, K, V, 0.0, None, False, -1, -7, 0.0, None, False),
        "window_size_right: -7 is below -1",
    ),
    "window, cached": (
        lambda: fa2.flash_attn_with_kvcache(Q, K, V, cache_seqlens=3, window_size=(-5, 0)),
        "window_size[0]: -5 is below -1",
    ),
    "qkv": (lambda: fa2.flash_attn_qkvpacked_func(GOOD["qkv"].int()), "qkv's q: dtype torch.int32"),
    "kv": (
        lambda: fa2.flash_attn_kvpacked_func(Q, GOOD["kv"].float()),
        "kv's k: dtype torch.float32 differs from q's",
    ),
    "ends": (
        lambda: fa2.flash_attn_varlen_qkvpacked_func(PACKED["qkv"], ENDS.long(), 5),
        "cu_seqlens: dtype torch.int64 is not torch.int32. Pass cu_seqlens.int()",
    ),
    "lse": (
        lambda: fa3._flash_attn_backward(
            OUT, Q, K, V, OUT, LSE[:1], dq=Q.clone(), dk=K.clone(), dv=V.clone()
        ),
        "softmax_lse: shape [1, 4, 8] must be [2, 4, 8]",
    ),
    "lengths, backward": (
        lambda: fa3._flash_attn_backward(
            *(OUT, Q, K, V, OUT, LSE, None, None, SHORT.long()),
            **{"dq": Q.clone(), "dk": K.clone(), "dv": V.clone()},
        ),
        "sequed_q: dtype torch.int64",
    ),
    "a cache of ours": (
        lambda: fa.attention_kvcache(Q, K[..., :8], V, cache_seqlens=LENGTHS),
        "k_cache: head dim 8 (shape [2, 12, 2, 8]), and q has 16",
    ),
    "new rows of ours": (
        lambda: fa.attention_kvcache(
            Q, K, V, NEW[:, 0], NEW[:, 0], cache_seqlens=LENGTHS, cu_seqlens_new=ints(0, 1)
        ),
        "cu_seqlens_new: shape [2] must be [3] for this batch",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_messages_use_the_names_of_the_function_that_was_called(name: str) -> None:
    call, beginning = NAMES[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value).startswith(beginning), caught.value
