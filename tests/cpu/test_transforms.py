# SPDX-License-Identifier: BSD-3-Clause
# Do the operators beside attention work under torch.func's transforms, or say that they do not?
"""Rotation, merging and quantisation under grad, vjp, vmap and jvp; what writes into buffers is
refused. Attention itself: test_ops.py. Nothing may lose a gradient or a tangent without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fa

OPS = torch.ops.fa
INT = torch.int32


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).double()


X, COS, SIN = draw(4, 2, 5, 3, 8), draw(4, 9, 3), draw(4, 9, 3, seed=1)  # the first dim is mapped
AT = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])


def squared(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = AT) -> Tensor:
    return OPS.apply_rotary(x, cos, sin, positions=positions, interleaved=True).square().sum()


def gradient(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By torch.autograd, of one entry."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(squared(leaf, cos, sin), leaf)[0]


WANT = torch.stack([gradient(*t) for t in zip(X, COS, SIN, strict=True)])


def test_the_gradient_of_a_rotation_is_that_of_its_formula() -> None:
    one, (cos, sin) = X[0].clone().requires_grad_(), (t[0][AT].unsqueeze(-2) for t in (COS, SIN))
    a, b = one[..., 0:6:2], one[..., 1:6:2]
    turned = torch.cat([a * cos - b * sin, a * sin + b * cos, one[..., 6:]], -1)
    (want,) = torch.autograd.grad(turned.square().sum(), one)
    assert (WANT[0] - want).abs().max() < 1e-12


def test_gradients_of_a_rotation() -> None:
    one = (X[0], COS[0], SIN[0])
    assert torch.equal(torch.func.grad(squared)(*one), WANT[0])
    _, pull = torch.func.vjp(lambda x: OPS.apply_rotary(x, *one[1:]), X[0])
    back = OPS.apply_rotary(torch.ones_like(X[0]), COS[0], -SIN[0])
    assert torch.equal(pull(torch.ones_like(X[0]))[0], back)
    each = torch.func.jacrev(lambda x: OPS.apply_rotary(x, *one[1:]).sum((0, 1, 2)))(X[0])
    assert torch.equal(each.sum(0), back)
    assert torch.equal(torch.func.vmap(torch.func.grad(squared))(X, COS, SIN), WANT)
    mapped = torch.func.grad(lambda x: torch.func.vmap(squared)(x, COS, SIN).sum())
    assert torch.equal(mapped(X), WANT)
    leaf = X.clone().requires_grad_()
    torch.func.vmap(squared)(leaf, COS, SIN).sum().backward()
    assert torch.equal(leaf.grad, WANT)


def test_a_rotation_is_linear_so_that_its_gradient_has_one() -> None:
    one = (COS[0], SIN[0])
    second = torch.func.grad(lambda x: torch.func.grad(squared)(x, *one).square().sum())(X[0])
    leaf = X[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(squared(leaf, *one), leaf, create_graph=True)
    assert torch.equal(torch.autograd.grad(first.square().sum(), leaf)[0], second)
    assert second.abs().max() > 0


def test_rotations_and_their_positions_under_vmap() -> None:
    want = torch.stack([OPS.apply_rotary(*t) for t in zip(X, COS, SIN, strict=True)])
    assert torch.equal(torch.func.vmap(OPS.apply_rotary)(X, COS, SIN), want)
    rows = torch.stack([AT, AT + 1, AT.flip(0), AT])
    got = torch.func.vmap(lambda x, at: OPS.apply_rotary(x, COS[0], SIN[0], positions=at))(X, rows)
    want = torch.stack(
        [OPS.apply_rotary(x, COS[0], SIN[0], positions=at) for x, at in zip(X, rows, strict=True)]
    )
    assert torch.equal(got, want)


def test_attention_over_a_cache_with_rotated_queries() -> None:
    k, v = draw(2, 9, 3, 8), draw(2, 9, 3, 8, seed=1)
    options = {"cache_seqlens": torch.tensor([3, 5], dtype=INT), "causal": True}
    options |= {"rotary_cos": COS[0], "rotary_sin": SIN[0]}

    def loss(q: Tensor) -> Tensor:
        return fa.attention_kvcache(q, k, v, **options).square().sum()

    q = draw(2, 4, 3, 8, seed=2)
    leaf = q.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.equal(torch.func.grad(loss)(q), leaf.grad)


Q = draw(4, 2, 5, 3, 8).float()
SLOPES = torch.rand(4, 3)


def sloped(q: Tensor, slopes: Tensor) -> Tensor:
    return fa.attention(q, q, q, alibi_slopes=slopes).sum()


CONSTANTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "slopes": (sloped, (Q, SLOPES), "alibi_slopes"),
    "cos": (lambda x, cos, sin: squared(x, cos, sin), (X, COS, SIN), "cos"),
}


@pytest.mark.parametrize("way", ["grad", "grad of vmap", "vmap of grad", "autograd of vmap"])
@pytest.mark.parametrize("name", CONSTANTS)
def test_what_has_no_gradient_is_refused_under_every_transform(name: str, way: str) -> None:
    """vmap hands out tensors that require no gradient, whatever they were made of."""
    function, inputs, argument = CONSTANTS[name]
    of_second = torch.func.grad(function, argnums=1)
    mapped = torch.func.vmap(function)
    with pytest.raises(NotImplementedError, match=f"^{argument}: requires_grad is True"):
        if way == "grad":
            of_second(*(t[0] for t in inputs))
        elif way == "grad of vmap":
            torch.func.grad(lambda *t: mapped(*t).sum(), argnums=1)(*inputs)
        elif way == "vmap of grad":
            torch.func.vmap(of_second)(*inputs)
        else:
            mapped(inputs[0], inputs[1].clone().requires_grad_(), *inputs[2:])


K = draw(2, 9, 3, 8).float()
ONE, LSE = draw(2, 5, 3, 8).float(), torch.zeros(2, 3, 5)
ZERO = torch.zeros(2, dtype=INT)


def appended(x: Tensor) -> Tensor:
    fa.append_kv(x, x, K.clone(), K.clone(), cache_seqlens=ZERO)
    return x.sum()


def forward_out(x: Tensor) -> Tensor:
    OPS.forward_out(x, x, x, out=torch.empty(2, 5, 3, 8), lse=torch.empty(2, 3, 5))
    return x.sum()


def backward(x: Tensor) -> Tensor:
    return OPS.backward(x, x, x, x, x, LSE)[0].sum()


def backward_out(x: Tensor) -> Tensor:
    buffers: dict[str, Any] = {n: torch.empty(2, 5, 3, 8) for n in ("dq", "dk", "dv")}
    OPS.backward_out(x, x, x, x, x, LSE, **buffers)
    return x.sum()


def rotated(x: Tensor) -> Tensor:
    return OPS.apply_rotary(x, COS[0].float(), SIN[0].float())


def merged(x: Tensor) -> Tensor:
    return fa.combine(torch.stack([x, x]), torch.stack([LSE, LSE]))[0]


TANGENTS = (appended, forward_out, backward, backward_out, rotated, merged)


@pytest.mark.parametrize("way", ["jvp", "jvp of vmap", "vmap of jvp", "dual"])
@pytest.mark.parametrize("function", TANGENTS)
def test_no_tangent_is_lost(function: Callable[[Tensor], Tensor], way: str) -> None:
    stacked = torch.stack([ONE, ONE])
    # vmap is refused first by what writes into buffers.
    sentence = "forward-mode differentiation is not supported|called under torch.vmap"
    with pytest.raises(NotImplementedError, match=sentence):
        if way == "jvp":
            torch.func.jvp(function, (ONE,), (ONE,))
        elif way == "jvp of vmap":
            torch.func.jvp(torch.func.vmap(function), (stacked,), (stacked,))
        elif way == "vmap of jvp":
            torch.func.vmap(lambda x: torch.func.jvp(function, (x,), (x,))[1])(stacked)
        else:
            with forward_ad.dual_level():
                function(forward_ad.make_dual(ONE, ONE))


@pytest.mark.parametrize("function", [appended, forward_out, backward_out])
def test_nothing_is_written_into_buffers_under_vmap(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotImplementedError, match=r"^fa::\w+: called under torch.vmap.*outside"):
        torch.func.vmap(function)(torch.stack([ONE, ONE]))
    function(ONE)


def test_quantisation_and_merging_under_vmap() -> None:
    stacked = torch.stack([ONE, 2 * ONE])
    got = torch.func.vmap(lambda x: fa.quantize_qkv(x, x, x, "head").q.float())(stacked)
    want = torch.stack([fa.quantize_qkv(x, x, x, "head").q.float() for x in stacked])
    assert torch.equal(got, want)
    for call in (fa.combine, OPS.combine):
        parts, lses = torch.stack([stacked, stacked]), torch.zeros(2, 2, 2, 3, 5)
        got = torch.func.vmap(lambda o, s, c=call: c(o, s)[0])(parts, lses)
        assert torch.equal(got, torch.stack([call(parts[n], lses[n])[0] for n in range(2)]))
