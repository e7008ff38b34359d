# SPDX-License-Identifier: BSD-3-Clause
# Does what a refusal suggests run?
"""The advice of messages, followed: that of libfa over a cross product of options, with the rows
that ship (tests/cpp/advice_test.cpp does so with other tables), and that of the Python package.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fa
import gen_variants
from fa import _abi, _lib, _validate
from fa.kernels import NOMINAL

FP8 = torch.float8_e4m3fn
INT = torch.int32
GPUS = ("h200", "a100", "rtx4090")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def option_sets(rows_q: int, heads: int, heads_k: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One option each; the calls below have every pair of them."""

    def blocks(rows: int) -> dict[str, Any]:
        count_q, count_k = -(-rows_q // rows), -(-512 // rows)
        return {
            "q_descale": meta(2, heads, count_q),
            "k_descale": meta(2, heads_k, count_k),
            "descale_block_q": rows,
            "descale_block_k": rows,
        }

    sets: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"num_splits": 4},
        {"softcap": 5.0},
        {"alibi_slopes": meta(heads)},
        {"dropout_p": 0.1, "philox_seed_offset": meta(2, dtype=torch.int64)},
        {"batch_invariant": True},
        {"leftpad_k": meta(2, dtype=INT)},
        {"kv_batch_idx": meta(2, dtype=INT)},
    ]
    return sets if dtype != FP8 else [*sets, blocks(128), blocks(100)]


Call = tuple[int, Callable[..., bytes], dict[str, Any]]  # operation, params of options, options


def calls() -> Iterator[Call]:
    for gpu, dtype, dims, heads_k, rows_q, arch in itertools.product(
        GPUS,
        (torch.float16, FP8),
        ((64, 64), (80, 80), (192, 128), (128, 256)),
        (8, 3, 2),
        (1, 512),
        (0, 80, 90),
    ):
        heads = 8 if heads_k != 3 else 9
        q, k, v = (
            meta(2, n, h, d, dtype=dtype)
            for n, h, d in (
                (rows_q, heads, dims[0]),
                (512, heads_k, dims[0]),
                (512, heads_k, dims[1]),
            )
        )
        dout = meta(2, rows_q, heads, dims[1], dtype=dtype)
        sets = option_sets(rows_q, heads, heads_k, dtype)
        for first, second in itertools.combinations_with_replacement(sets, 2):
            options = {"force_arch": arch, **first, **second}
            for op, grad in ((_lib.FORWARD, None), (_lib.BACKWARD, _abi.Gradients(dout, q, k, v))):
                if dtype == FP8 and grad is not None:
                    continue

                def params(q=q, k=k, v=v, grad=grad, gpu=gpu, **options: Any) -> bytes:
                    sms, smem = NOMINAL[gpu]
                    return _abi.params_from_tensors(
                        *(q, k, v),
                        softmax_scale=1.0,
                        addresses=False,
                        grad=grad,
                        sm_count=sms,
                        smem_limit=smem,
                        **options,
                    )

                yield op, params, options


@pytest.mark.usefixtures("shipped")
def test_advice_of_the_library_with_the_rows_that_ship() -> None:
    ids = {row["id"] for row in _lib.kernels_list()}
    held = gen_variants.parse(gen_variants.TABLE.read_text())
    header, lines = ",".join(gen_variants.COLUMNS), set()
    kinds = {"runs": 0, "line": 0, "none": 0, "tiles": 0}
    for op, params, options in calls():
        text = _lib.why_not(op, params(**options))
        if text is None:
            continue
        advised = re.search(r"It runs with (.*?)\. ", text)
        if advised:
            kinds["runs"] += 1
            names = [n for n in ("num_splits", "force_arch", "reserve_sms") if n in advised[1]]
            again = params(**{**options, **dict.fromkeys(names, 0)})
            assert names and _lib.why_not(op, again) is None, text
        line = re.search(r"The row needed in tools/variants.csv: (.*)$", text)
        if line:
            kinds["line"] += 1
            lines.add(line[1])
            continue
        none = re.search(r"No line of tools/variants.csv would serve it: [^.]", text)
        assert none or "A row of smaller tiles is needed" in text, text
        kinds["none" if none else "tiles"] += 1
    assert kinds["runs"] and kinds["line"] and kinds["none"], kinds
    for line in lines:
        (row,) = gen_variants.parse(f"{header}\n{line}\n")
        assert row.id not in ids, line
        problems = gen_variants.problems([*held, row])
        assert all("core-seconds" in text for text in problems), problems  # the budget is full


# ---- the package: (the refused call, what its message holds, the calls that it advises) ----------

Q, K, V = (torch.randn(2, n, h, 16).bfloat16() for n, h in ((8, 4), (16, 2), (16, 2)))
GRAD = Q.clone().requires_grad_()
TABLE, USED = torch.tensor([[0], [1]], dtype=INT), torch.tensor([9, 16], dtype=INT)
STORED = Q, K.to(FP8), V.to(FP8)
WIDE = [torch.randn(1, 8, 2, 576).bfloat16() for _ in range(3)]


def rows(*inputs: Tensor, **options: Any) -> Callable[[], Any]:
    """The check that a call on a GPU meets first."""
    return lambda: _validate.forward(*inputs, options, kernels=True)


def torch_run(*inputs: Tensor, **options: Any) -> Callable[[], Any]:
    def run() -> Any:
        with fa.backend("cpu"):
            return fa.attention(*inputs, **options)

    return run


def second_derivative(call: Callable[..., Any]) -> Callable[[], Any]:
    def run() -> None:
        leaf = Q.double().requires_grad_()
        (dq,) = torch.autograd.grad(call(leaf, K.double(), V.double()), leaf, create_graph=True)
        (second,) = torch.autograd.grad(dq.square().sum(), leaf)
        assert second.abs().max() > 0

    return run


def tangent(call: Callable[..., Any]) -> Callable[[], Any]:
    x = Q.double()
    return lambda: torch.func.jvp(lambda q: call(q, K.double(), V.double()), (x,), (x,))


def summed(out: Any) -> Tensor:
    return (out[0] if isinstance(out, tuple) else out).sum()


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return summed(fa.attention(q, k, v))


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return summed(fa.reference.attention(q, k, v))


def no_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


PAGED = {"page_table": TABLE, "seqused_k": USED}
SLOPES = torch.ones(4, requires_grad=True)
COS = torch.ones(16, 8)


def append(k_new: Tensor) -> None:
    fa.append_kv(k_new, V[:, :1], K.clone(), V.clone(), cache_seqlens=torch.zeros(2, dtype=INT))


def into_buffers() -> None:
    out, lse = torch.empty_like(Q), torch.empty(2, 4, 8)
    torch.ops.fa.forward_out(GRAD, K, V, out=out, lse=lse)


REFUSED: dict[str, tuple[Callable[[], Any], str, list[Callable[[], Any]]]] = {
    "pages": (
        rows(Q, K, V, **PAGED),
        r'Gather the pages into k and v of \[batch, seqlen, heads, dim\].*fa.backend\("cpu"\)',
        [rows(Q, K[TABLE[:, 0]], V[TABLE[:, 0]], seqused_k=USED), torch_run(Q, K, V, **PAGED)],
    ),
    "e4m3 keys": (
        rows(*STORED),
        r'Pass q in torch.float8_e4m3fn too, or run .*fa.backend\("cpu"\)',
        [rows(Q.to(FP8), *STORED[1:]), torch_run(*STORED)],
    ),
    "head dim": (rows(*WIDE), r'reach 256\. Run the .*fa.backend\("cpu"\)', [torch_run(*WIDE)]),
    "fp32": (
        rows(*(t.float() for t in (Q, K, V))),
        r'\.to\(torch.bfloat16\)\), or run .*fa.backend\("cpu"\)',
        [rows(Q, K, V), torch_run(*(t.float() for t in (Q, K, V)))],
    ),
    "e4m3 gradient": (
        lambda: fa.attention(GRAD, *STORED[1:]),
        r"Convert q, k and v to torch.bfloat16 for training, or call this under torch.no_grad\(\)",
        [
            lambda: fa.attention(GRAD, *(t.bfloat16() for t in STORED[1:])),
            no_grad(lambda: fa.attention(GRAD, *STORED[1:])),
        ],
    ),
    "slopes": (
        lambda: fa.attention(Q, K, V, alibi_slopes=SLOPES),
        r"Pass alibi_slopes.detach\(\)",
        [lambda: fa.attention(Q, K, V, alibi_slopes=SLOPES.detach())],
    ),
    "rotary tables": (
        lambda: torch.ops.fa.apply_rotary(Q, COS.clone().requires_grad_(), COS),
        r"Pass cos.detach\(\)",
        [lambda: torch.ops.fa.apply_rotary(Q, COS, COS)],
    ),
    "append": (
        lambda: append(K[:, :1].clone().requires_grad_()),
        r"Pass k_new.detach\(\), or call it under torch.no_grad\(\)",
        [
            lambda: append(K[:, :1].clone().requires_grad_().detach()),
            no_grad(lambda: append(K[:, :1].clone().requires_grad_())),
        ],
    ),
    "buffers": (
        into_buffers,
        r"Call fa::forward, or call this under torch.no_grad\(\)",
        [no_grad(into_buffers), lambda: torch.ops.fa.forward(GRAD, K, V)],
    ),
    "double backward": (
        second_derivative(plain),
        "Use fa.reference.attention",
        [second_derivative(exact)],
    ),
    "forward mode": (
        tangent(plain),
        r"Use reverse mode \(backward, torch.func.vjp\), or fa.reference.attention",
        [lambda: torch.func.vjp(lambda q: plain(q, K, V), Q), tangent(exact)],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_advice_of_the_package(name: str) -> None:
    refused, sentence, advised = REFUSED[name]
    with pytest.raises((ValueError, NotImplementedError), match=sentence):
        refused()
    for call in advised:
        call()
