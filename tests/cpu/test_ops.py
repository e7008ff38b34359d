# SPDX-License-Identifier: BSD-3-Clause
# Do the torch operators keep what their schemas promise, and their gradients too?
"""opcheck, fakes, tracing, modes, autograd and refusals of torch.ops.fa.*, without a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fa import reference  # noqa: E402


def tensors(dtype=torch.float32, sq=16, sk=20, hq=4, hk=2, d=32, dv=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(2, sq, hq, d, generator=g).to(dtype),
        torch.randn(2, sk, hk, d, generator=g).to(dtype),
        torch.randn(2, sk, hk, dv, generator=g).to(dtype),
    )


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_forward(grad):
    inputs = [t.requires_grad_(grad) for t in tensors()]
    torch.library.opcheck(torch.ops.fa.forward.default, inputs, {"causal": True})


def test_forward_equals_the_reference():
    q, k, v = tensors()
    out, lse = torch.ops.fa.forward(q, k, v, causal=True)
    want, want_lse = reference.attention(q, k, v, causal=True)
    assert (out - want).abs().max() < 1e-5
    assert (lse - want_lse).abs().max() < 1e-5
