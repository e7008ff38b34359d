# SPDX-License-Identifier: BSD-3-Clause
# Do torch.compile and torch.export take the operators without a graph break, and stay right?
"""Compiled against eager, forward and backward, static and dynamic shapes; without a GPU."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fa

OPS = torch.ops.fa
INT = torch.int32


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def tensors(sq: int = 16, sk: int = 20, batch: int = 2, grad: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(sq)
    shapes = ((batch, sq, 4, 16), (batch, sk, 2, 16), (batch, sk, 2, 8))
    return [torch.randn(*s, generator=g).requires_grad_(grad) for s in shapes]


def by_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = OPS.forward(q * 1.5, k, v, causal=True, window_left=9)
    return out.sin().sum() + lse.sum()


def by_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = fa.attention(q * 1.5, k, v, causal=True, window_size=(9, -1), return_lse=True)
    return out.sin().sum() + lse.sum()


def results(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    loss = function(*inputs)
    if not loss.requires_grad:
        return [loss]
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("function", [by_op, by_function])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_fullgraph_aot_eager(function: Any, grad: bool) -> None:
    inputs = tensors(grad=grad)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, want in zip(results(compiled, inputs), results(function, inputs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler: no g++")
def test_fullgraph_inductor() -> None:
    inputs = tensors(grad=True)
    compiled = torch.compile(by_op, fullgraph=True)
    for got, want in zip(results(compiled, inputs), results(by_op, inputs), strict=True):
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("function", [by_op, by_function])
def test_dynamic_shapes_compile_at_most_twice(function: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for length in (16, 24, 33, 50, 129):
        inputs = tensors(length, length + 3, grad=True)
        for got, want in zip(results(compiled, inputs), results(function, inputs), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count <= 2


def test_new_hints_compile_at_most_twice() -> None:
    """max_seqlen changes at every step of a training run on packed sequences."""

    def function(q: Tensor, k: Tensor, cu: Tensor, longest: int) -> Tensor:
        return fa.attention_varlen(q, k, k, cu, cu, longest, longest, causal=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    q, k, _ = (t.reshape(-1, *t.shape[2:]) for t in tensors(20, 20))
    for cut in (3, 7, 11, 16, 22):
        cu = torch.tensor([0, cut, 40], dtype=INT)
        longest = max(cut, 40 - cut)
        assert torch.equal(compiled(q, k, cu, longest), function(q, k, cu, longest))
    assert counter.frame_count <= 2


def test_default_number_of_splits_traces() -> None:
    compiled = torch.compile(
        lambda *t: OPS.forward(*t, num_splits=0)[0], backend="aot_eager", fullgraph=True
    )
    inputs = tensors(1, 33)
    assert torch.equal(compiled(*inputs), OPS.forward(*inputs)[0])


@pytest.mark.parametrize("length", [196, 257])
def test_strides_of_saved_tensors(length: int) -> None:
    """Fake and real strides of out, lse and gradients agree where a head-major q comes in."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return OPS.forward(q, k, v)[0].transpose(1, 2).sum()

    inputs = [
        t.transpose(1, 2).contiguous().detach().requires_grad_() for t in tensors(length, length)
    ]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, want in zip(results(compiled, inputs), results(function, inputs), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_mutating_operators_functionalise() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = q.new_zeros(2, 16, 4, 8), q.new_zeros(2, 4, 16)
        OPS.forward_out(q, k, v, out=out, lse=lse)
        return out * 2, lse

    inputs = tensors()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(*inputs), function(*inputs), strict=True):
        assert torch.equal(got, want)


def test_expanded_inputs() -> None:
    q, k, v = tensors()
    k, v = k[:, :, :1].expand(2, 20, 4, 16), v[:, :, :1].expand(2, 20, 4, 8)
    compiled = torch.compile(fa.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), fa.attention(q, k, v))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.sinks = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        return fa.attention(q, k, v, causal=True, sinks=self.sinks).flatten(-2)


def test_a_module_trains_compiled_under_autocast() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 16, 32)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    gradients = []
    for module in (block, compiled):
        block.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(x).float().square().sum()
        loss.backward()
        gradients.append([p.grad.clone() for p in block.parameters()])
    for got, want in zip(*gradients, strict=True):
        assert want.abs().max() > 0
        assert (got - want).abs().max() <= 2e-2 * want.abs().max()


def test_export_names_the_raw_operator() -> None:
    block = Block().eval()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(
        block, (torch.randn(2, 16, 32),), dynamic_shapes={"x": {1: length}}
    ).run_decompositions()
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert targets.count(OPS._forward.default) == 1
    assert OPS.forward.default not in targets
    x = torch.randn(2, 50, 32)
    assert (program.module()(x) - block(x)).abs().max() < 1e-5


def test_backend_is_not_traced_away() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with fa.backend("cpu"):
            return fa.attention(q, k, v)

    with pytest.raises(Exception, match="inside a function that torch.compile"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(*tensors())
    compiled = torch.compile(fa.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors()), fa.attention(*tensors()))
    with fa.backend("sm80"), pytest.raises(ValueError, match='"sm80" takes CUDA tensors only'):
        compiled(*tensors())
