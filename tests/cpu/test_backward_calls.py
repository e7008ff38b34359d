# SPDX-License-Identifier: BSD-3-Clause
# Is the backward the same whichever way it is asked for, and are its buffers its own?
"""Gradients by the operator, by autograd, compiled and under selective checkpoints, for every
option; buffers of the caller; rows without a visible key, whatever their incoming gradients hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fa
from fa import _cuda, cpu

OPS = torch.ops.fa
INT = torch.int32


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


Q, K, V = draw(2, 9, 4, 16), draw(2, 12, 2, 16), draw(2, 12, 2, 8)
PACKED = draw(14, 4, 16), draw(20, 2, 16), draw(20, 2, 8)
ENDS = {"cu_seqlens_q": ints(0, 0, 5, 12), "cu_seqlens_k": ints(0, 4, 4, 18)}
POOLS = Q, draw(6, 4, 2, 16), draw(6, 4, 2, 8)
PAGES = {"page_table": ints(5, 1, 0, 2, 5, 3).view(2, 3), "seqused_k": ints(9, 7)}
SEED = {"dropout_p": 0.3, "philox_seed_offset": torch.tensor([7, 3])}

DENSE = (Q, K, V)
EVERY: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": (DENSE, {}),
    "causal": (DENSE, {"causal": True}),
    "window": (DENSE, {"window_left": 3, "window_right": 1}),
    "chunk": (DENSE, {"attention_chunk": 4, "causal": True}),
    "softcap": (DENSE, {"softcap": 2.0}),
    "alibi": (DENSE, {"alibi_slopes": torch.rand(2, 4)}),
    "sinks": (DENSE, {"sinks": draw(4)}),
    "scale": (DENSE, {"softmax_scale": 0.7}),
    "dropout": (DENSE, SEED),
    "packed, one side empty": (PACKED, ENDS),
    "used": (DENSE, {"seqused_q": ints(9, 0), "seqused_k": ints(3, 12)}),
    "padded": (DENSE, {"leftpad_k": ints(5, 0), "causal": True}),
    "one cache row twice": (DENSE, {"kv_batch_idx": ints(1, 1)}),
    "one page twice": (POOLS, {**PAGES, "causal": True}),
    "deterministic": (DENSE, {"deterministic": True, "batch_invariant": True, "num_splits": 2}),
    "fp32 out": (tuple(t.bfloat16() for t in DENSE), {"out_dtype": torch.float32}),
}


WEIGHTS = draw(2000)


def loss_of(out: Tensor, lse: Tensor) -> Tensor:
    weights = WEIGHTS[: out.numel()].view(out.shape)
    return (out.float() * weights).sum() + torch.where(lse > -math.inf, lse, 0.0).sin().sum()


def leaves(inputs: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
    sinks = [options["sinks"]] if "sinks" in options else []
    return [t.clone().requires_grad_() for t in (*inputs, *sinks)]


def gradients(function: Callable[..., Tensor], name: str) -> list[Tensor]:
    inputs, options = EVERY[name]
    given = leaves(inputs, options)
    return list(torch.autograd.grad(function(*given), given))


def by(call: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    """A loss of the leaves, of which a fourth one is the sinks."""
    options = dict(EVERY[name][1])
    if call is fa.attention:
        left, right = options.pop("window_left", -1), options.pop("window_right", -1)
        options |= {"window_size": (left, right), "return_lse": True}

    def loss(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        more = {"sinks": sinks[0]} if sinks else {}
        return loss_of(*call(q, k, v, **{**options, **more}))

    return loss


def of_the_operator(name: str) -> list[Tensor]:
    """fa::backward with what autograd would hand to it."""
    inputs, options = EVERY[name]
    out, lse = OPS.forward(*inputs, **options)
    ends = [t.clone().requires_grad_() for t in (out, lse)]
    dout, dlse = torch.autograd.grad(loss_of(*ends), ends)
    options = {n: x for n, x in options.items() if n != "out_dtype"}
    *found, dsinks = OPS.backward(dout, *inputs, out, lse, dlse=dlse, **options)
    return found + [dsinks] * ("sinks" in options)


@pytest.mark.parametrize("name", EVERY)
def test_every_way_to_a_gradient_gives_the_same_bits(name: str) -> None:
    torch._dynamo.reset()
    want = of_the_operator(name)
    compiled = torch.compile(by(OPS.forward, name), backend="aot_eager", fullgraph=True)
    ways = {"operator": by(OPS.forward, name), "function": by(fa.attention, name)}
    for way, function in {**ways, "compiled": compiled}.items():
        for got, right in zip(gradients(function, name), want, strict=True):
            assert torch.equal(got, right), way


SAVED = (OPS._forward.default, OPS._forward_dense.default)


def policy(save: bool, _: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    kept = save and op in SAVED
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("save", [True, False], ids=["attention saved", "recomputed"])
@pytest.mark.parametrize("name", ["causal", "sinks", "packed, one side empty", "dropout"])
def test_selective_checkpoints(name: str, save: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy sees the raw operator by its name and decides whether it runs a second time."""
    want, runs, real = of_the_operator(name), [], cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *a, **o: (runs.append(0), real(*a, **o))[1])
    contexts = functools.partial(
        create_selective_checkpoint_contexts, functools.partial(policy, save)
    )

    def loss(*given: Tensor) -> Tensor:
        inner = by(OPS.forward, name)
        return checkpoint(inner, *given, use_reentrant=False, context_fn=contexts)

    for got, right in zip(gradients(loss, name), want, strict=True):
        assert torch.equal(got, right)
    assert len(runs) == (1 if save else 2)


# ---- buffers -------------------------------------------------------------------------------------

OUT, LSE = OPS.forward(Q, K, V, causal=True)
DOUT = draw(2, 9, 4, 8)


def buffers(dtype: torch.dtype = torch.float32, **given: Tensor) -> dict[str, Tensor]:
    own = {n: torch.ones_like(t, dtype=dtype) for n, t in (("dq", Q), ("dk", K), ("dv", V))}
    return {**own, **given}


@pytest.mark.parametrize("accumulate", [False, True])
def test_buffers_of_mixed_dtypes(accumulate: bool) -> None:
    """Sums are added before they are rounded, each buffer in its own dtype."""
    q, k, v = (t.bfloat16() for t in DENSE)
    out, lse = OPS.forward(q, k, v, causal=True)
    call = (DOUT.bfloat16(), q, k, v, out, lse)
    exact = OPS.backward(*call, causal=True, grad_dtype=torch.float32)[:3]
    into = buffers(torch.float32, dk=torch.ones_like(k))
    OPS.backward_out(*call, causal=True, accumulate=accumulate, **into)
    for (name, got), want in zip(into.items(), exact, strict=True):
        assert torch.equal(got, (want + accumulate).to(got.dtype)), name


def test_accumulated_twice_is_the_sum_and_sinks_are_returned() -> None:
    """What ring attention adds up; dsinks are of one call, whatever the buffers held."""
    sinks = draw(4)
    out, lse = OPS.forward(Q, K, V, sinks=sinks)
    call = (DOUT, Q, K, V, out, lse)
    want = OPS.backward(*call, sinks=sinks)
    into = {n: torch.zeros_like(t) for n, t in buffers().items()}
    found = [OPS.backward_out(*call, sinks=sinks, accumulate=True, **into) for _ in range(2)]
    for got, right in zip(into.values(), want[:3], strict=True):
        assert torch.equal(got, 2 * right)
    assert all(torch.equal(dsinks, want[3]) for dsinks in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ring_attention(dtype: torch.dtype) -> None:
    """Four ranks, causal: each merges what it sees of the others' keys, and its backward takes the
    merged out and LSE for every part; dQ adds up in fp32 and is rounded once.
    """
    ranks, rows = 4, 16
    q, k, v, dout = (draw(1, ranks * rows, h, 32, seed=h).to(dtype) for h in (4, 2, 2, 4))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    own = [slice(rows * n, rows * (n + 1)) for n in range(ranks)]
    dk, dv = (torch.zeros_like(t, dtype=wide) for t in (k, v))
    outs, dqs = [], []
    for n in range(ranks):
        seen = [(own[m], {"causal": m == n}) for m in range(n + 1)]
        parts = [OPS.forward(q[:, own[n]], k[:, s], v[:, s], out_dtype=wide, **o) for s, o in seen]
        out, lse = fa.combine([o for o, _ in parts], [x for _, x in parts])
        dq = torch.zeros_like(q[:, own[n]], dtype=wide)
        for s, o in seen:
            call = (dout[:, own[n]], q[:, own[n]], k[:, s], v[:, s], out, lse)
            OPS.backward_out(*call, **o, dq=dq, dk=dk[:, s], dv=dv[:, s], accumulate=True)
        outs.append(out)
        dqs.append(dq)
    leaves = [t.double().requires_grad_() for t in (q.clone(), k.clone(), v.clone())]
    want, _ = fa.reference.attention(*leaves, causal=True)
    right = torch.autograd.grad(want, leaves, dout.double())
    whole = OPS.backward(dout, q, k, v, *OPS.forward(q, k, v, causal=True), causal=True)
    for name, got, exact, once in zip(
        ("dq", "dk", "dv"), (torch.cat(dqs, 1), dk, dv), right, whole, strict=False
    ):
        error = (got.double() - exact).abs().max()
        assert error <= max(1.5 * (once.double() - exact).abs().max(), 1e-12), name
    assert (torch.cat(outs, 1).double() - want).abs().max() < (1e-12 if wide == dtype else 2e-2)


SHARED = torch.zeros(2, 12, 2, 16)
WRONG_BUFFERS: dict[str, tuple[dict[str, Tensor], str]] = {
    "two in one": ({"dk": SHARED, "dv": SHARED[..., :8]}, "dv: begins at the address of dk"),
    "an input": ({"dq": Q}, "dq: begins at the address of q, and would be written while"),
    "values": ({"dv": V}, "dv: begins at the address of v"),
    "expanded": (
        {"dk": torch.zeros(1, 12, 2, 16).expand(2, -1, -1, -1)},
        "dk: dimension 0 is expanded (stride 0)",
    ),
    "elsewhere": ({"dq": torch.zeros_like(Q, device="meta")}, "dq: is on meta and q on cpu"),
    "too exact": ({"dv": torch.zeros_like(V).double()}, "dv: dtype torch.float64 must be"),
}


@pytest.mark.parametrize("name", WRONG_BUFFERS)
def test_buffers_that_are_not_the_calls_own(name: str) -> None:
    wrong, sentence = WRONG_BUFFERS[name]
    kept = [t.clone() for t in (Q, K, V)]
    with pytest.raises(ValueError) as caught:
        OPS.backward_out(DOUT, Q, K, V, OUT, LSE, causal=True, **buffers(**wrong))
    assert str(caught.value).startswith(sentence), caught.value
    assert all(torch.equal(a, b) for a, b in zip((Q, K, V), kept, strict=True))


def test_slices_of_one_buffer_are_apart() -> None:
    """The gradient of packed q, k and v, as a model with one projection has it."""
    q, k, v = (draw(2, 9, 2, 16, seed=n) for n in range(3))
    out, lse = OPS.forward(q, k, v)
    whole = torch.full((2, 9, 3, 2, 16), math.nan)
    OPS.backward_out(
        out, q, k, v, out, lse, **dict(zip(("dq", "dk", "dv"), whole.unbind(2), strict=True))
    )
    for got, want in zip(whole.unbind(2), OPS.backward(out, q, k, v, out, lse)[:3], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("which", ["q", "k", "lse"])
def test_outputs_over_inputs_are_refused(which: str) -> None:
    q = draw(1, 8, 8, 8)
    given = {"out": torch.empty_like(q), "lse": torch.empty(1, 8, 8)}
    kept, k = q.clone(), q.clone()
    given |= {"lse": given["out"][..., 0]} if which == "lse" else {"out": {"q": q, "k": k}[which]}
    with pytest.raises(
        ValueError, match=f"begins at the address of {'out' if which == 'lse' else which}"
    ):
        OPS.forward_out(q, k, q, **given)
    assert torch.equal(q, kept)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_odd_head_dims_are_padded_for_kernels(
    grad_dtype: torch.dtype | None, indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fa::backward does with a CUDA tensor, up to the launch."""

    def launched(*args: Any) -> Tensor:
        *call, dq, dk, dv, accumulate, options = args
        assert call[1].shape[-1] == 24 and call[3].shape[-1] == 16 and not accumulate
        assert all(t.stride(-1) == 1 and t.stride(-2) % 8 == 0 for t in (dq, dk, dv))
        found = OPS.backward(*call, **options, grad_dtype=dq.dtype)
        for buffer, grad in zip((dq, dk, dv), found, strict=False):
            buffer.copy_(grad)
        return found[3]

    q, k, v = (draw(2, n, h, d).bfloat16() for n, h, d in ((9, 4, 17), (12, 2, 17), (12, 2, 12)))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    options: dict[str, Any] = {"causal": True, "sinks": draw(4)}
    options |= {"kv_batch_idx": ints(1, 1)} if indexed else {}
    out, lse = OPS.forward(q, k, v, **options)
    dout = draw(2, 9, 4, 12).bfloat16()
    want = OPS.backward(dout, q, k, v, out, lse, grad_dtype=grad_dtype, **options)
    monkeypatch.setattr(_cuda, "_backward", launched)
    got = _cuda.backward(dout, q, k, v, out, lse, grad_dtype=grad_dtype, **options)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        assert (a.float() - b.float()).abs().max() < 2e-2


# ---- rows without a key --------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_incoming_gradients_of_rows_without_a_key_reach_nothing(
    poison: float, dtype: torch.dtype
) -> None:
    """8 queries and 3 keys: the first 5 rows see nothing, and their LSE of -inf has no gradient."""
    inputs = [draw(1, n, 2, 8, seed=i).to(dtype).requires_grad_() for i, n in enumerate((8, 3, 3))]
    out, lse = OPS.forward(*inputs, causal=True)
    found = []
    for value in (0.0, poison):
        dout, dlse = torch.ones_like(out), torch.ones_like(lse)
        dout[:, :5], dlse[..., :5] = value, value
        found.append(torch.autograd.grad([out, lse], inputs, [dout, dlse], retain_graph=True))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)
    assert (found[1][0][:, :5] == 0).all()


def test_sinks_in_a_dtype_of_the_model_under_autocast() -> None:
    """Autocast casts 16-bit tensors to one dtype; a gradient comes back in the tensor's own."""
    sinks = draw(4).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        out = fa.attention(Q, K, V, sinks=sinks)
    assert out.dtype == torch.float16
    (grad,) = torch.autograd.grad(out.float().sum(), sinks)
    halves = [t.half() for t in DENSE]
    right = sinks.detach().half().requires_grad_()
    want = torch.autograd.grad(fa.attention(*halves, sinks=right).float().sum(), right)[0]
    assert grad.dtype == torch.bfloat16 and torch.equal(grad, want.bfloat16())
