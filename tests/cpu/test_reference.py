# SPDX-License-Identifier: BSD-3-Clause
# Is the fp64 reference itself right? Against scalar loops, torch's SDPA and finite differences.

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fa import reference

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.7},
    "uniform": {"softmax_scale": 0.0},
    "causal": {"causal": True},
    "window": {"window_left": 2, "window_right": 1},
    "left_only": {"window_left": 1},
    "right_only": {"window_right": 0},
    "causal_window": {"causal": True, "window_left": 2},
    "chunk": {"attention_chunk": 3},
    "causal_chunk": {"attention_chunk": 2, "causal": True},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05], dtype=torch.float64)},
    "alibi_batch": {"alibi_slopes": torch.linspace(0.1, 0.8, 8, dtype=torch.float64).view(2, 4)},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "all": {
        "causal": True,
        "window_left": 4,
        "attention_chunk": 5,
        "softcap": 2.0,
        "softmax_scale": 0.9,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05], dtype=torch.float64),
        "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64),
    },
}
LENGTHS = [(4, 7), (7, 4), (5, 5), (3, 0), (1, 6)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def problem(q_len: int, k_len: int, heads_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return (
        draw(2, q_len, 4, 3),
        draw(2, k_len, heads_k, 3, seed=1),
        draw(2, k_len, heads_k, 2, seed=2),
    )


def scalar_attention(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The formula of docs/numerics.md, one Python number at a time."""
    (batch, q_len, heads, dim), (k_len, heads_k) = q.shape, k.shape[1:3]
    out, lse = torch.zeros(*q.shape[:3], v.shape[3]), torch.zeros(batch, heads, q_len)
    out, lse = out.double(), lse.double()
    scale = options.get("softmax_scale", 1 / math.sqrt(dim))
    left, right = options.get("window_left", -1), options.get("window_right", -1)
    right = 0 if options.get("causal") else right
    chunk, cap = options.get("attention_chunk", 0), options.get("softcap", 0.0)
    slopes, sinks = options.get("alibi_slopes"), options.get("sinks")
    for b, h, i in itertools.product(range(batch), range(heads), range(q_len)):
        position, weights, h_k = i + k_len - q_len, {}, h // (heads // heads_k)
        for j in range(k_len):
            if left >= 0 and j < position - left or right >= 0 and j > position + right:
                continue
            if chunk and math.floor(position / chunk) != math.floor(j / chunk):
                continue
            s = scale * sum(float(q[b, i, h, d]) * float(k[b, j, h_k, d]) for d in range(dim))
            s = cap * math.tanh(s / cap) if cap else s
            if slopes is not None:
                slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
                s -= float(slope) * abs(position - j)
            weights[j] = math.exp(s)
        total = sum(weights.values()) + (math.exp(sinks[h]) if sinks is not None else 0.0)
        lse[b, h, i] = math.log(total) if total else -math.inf
        for j, weight in weights.items():
            out[b, i, h] += weight / total * v[b, j, h_k]
    return out, lse


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_equals_scalar_loops(name: str, lengths: tuple[int, int]) -> None:
    q, k, v = problem(*lengths)
    out, lse = reference.attention(q, k, v, **FEATURES[name])
    right_out, right_lse = scalar_attention(q, k, v, FEATURES[name])
    torch.testing.assert_close(out, right_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, right_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [(4, 7), (7, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_by_finite_differences(name: str, lengths: tuple[int, int]) -> None:
    options = dict(FEATURES[name])
    q, k, v = (x.requires_grad_() for x in problem(*lengths))
    sinks = options.pop("sinks", None)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks.clone().requires_grad_()]
    leaves = [leaf for leaf in leaves if leaf.numel()]

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        # gradcheck hands over copies of the leaves that have elements; the others are constants.
        at = {id(leaf): x for leaf, x in zip(leaves, given, strict=True)}
        s = given[-1] if sinks is not None else None
        out, lse = reference.attention(
            at.get(id(q), q), at.get(id(k), k), at.get(id(v), v), sinks=s, **options
        )
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert gradcheck(call, leaves, eps=1e-6, atol=1e-7, rtol=1e-5)


def test_equals_sdpa() -> None:
    q, k, v = draw(2, 5, 4, 8), draw(2, 9, 2, 8, seed=1), draw(2, 9, 2, 8, seed=2)
    out, _ = reference.attention(q, k, v, window_left=3, window_right=2, softmax_scale=0.4)
    mask = reference.visible(5, 9, 3, 2, 0)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=0.4, enable_gqa=True
    )
    torch.testing.assert_close(out, right.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_visible_equals_its_definition() -> None:
    for q_len, k_len, left, right, chunk in itertools.product(
        (1, 2, 5), (0, 1, 4, 7), (-1, 0, 2, 9), (-1, 0, 1, 2**31 - 1), (0, 1, 3)
    ):
        seen = reference.visible(q_len, k_len, left, right, chunk)
        for i, j in itertools.product(range(q_len), range(k_len)):
            p = i + k_len - q_len
            inside = (left < 0 or j >= p - left) and (right < 0 or j <= p + right)
            inside &= chunk == 0 or math.floor(p / chunk) == math.floor(j / chunk)
            assert bool(seen[i, j]) == inside, (q_len, k_len, left, right, chunk, i, j)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


OPTIONS = FEATURES["all"] | {"window_right": -1}


def test_packed_equals_a_loop_over_sequences() -> None:
    q_lens, k_lens = (3, 0, 4, 2), (5, 3, 0, 1)
    q, k, v = draw(11, 4, 3), draw(12, 2, 3, seed=1), draw(12, 2, 2, seed=2)
    cu_q, cu_k = ints(0, 3, 3, 7, 9), ints(0, 5, 8, 8, 9)
    out, lse = reference.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **OPTIONS)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b] + q_lens[b]), slice(cu_k[b], cu_k[b] + k_lens[b])
        one, one_lse = reference.attention(q[rows][None], k[keys][None], v[keys][None], **OPTIONS)
        assert torch.equal(out[rows], one[0]) and torch.equal(lse[:, rows], one_lse[0])
    assert (out[9:] == 0).all() and (lse[:, 9:] == -math.inf).all()


def test_lengths_padding_and_cache_rows_equal_slices() -> None:
    q, k, v = draw(2, 4, 4, 3), draw(4, 8, 2, 3, seed=1), draw(4, 8, 2, 2, seed=2)
    out, lse = reference.attention(
        q,
        k,
        v,
        seqused_q=ints(3, 4),
        seqused_k=ints(7, 5),
        leftpad_k=ints(2, 5),
        kv_batch_idx=ints(3, 0),
        **OPTIONS,
    )
    one = reference.attention(q[:1, :3], k[3:, 2:7], v[3:, 2:7], **OPTIONS)
    assert torch.equal(out[:1, :3], one[0]) and torch.equal(lse[:1, :, :3], one[1])
    assert (out[0, 3] == 0).all() and (lse[0, :, 3] == -math.inf).all()
    assert (out[1] == 0).all()  # no key left: its LSE is the sink
    assert torch.equal(lse[1], OPTIONS["sinks"][:, None].expand(4, 4))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_hidden_values_reach_nothing(poison: float) -> None:
    clean = [x.requires_grad_() for x in problem(3, 9)]
    options = {"window_left": 1, "window_right": 1, "seqused_k": ints(8, 8)}
    out, lse = reference.attention(*clean, **options)
    hidden = [0, 1, 2, 3, 8]  # rows 0..2 stand at 5..7 and see 4..7
    dirty = []
    for x in clean:
        y = x.detach().clone()
        if x is not clean[0]:
            y[:, hidden] = poison
        dirty.append(y.requires_grad_())
    dirty_out, dirty_lse = reference.attention(*dirty, **options)
    assert torch.equal(out, dirty_out) and torch.equal(lse, dirty_lse)
    for a, b in zip(
        torch.autograd.grad((out.sin().sum() + lse.sum()), clean),
        torch.autograd.grad((dirty_out.sin().sum() + dirty_lse.sum()), dirty),
        strict=True,
    ):
        assert torch.equal(a, b) and not torch.isnan(b).any()


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_without_keys_have_zero_gradients(with_sinks: bool) -> None:
    q, k, v = (x.requires_grad_() for x in problem(6, 2))  # causal: rows 0..3 see nothing
    sinks = torch.tensor([0.5, 1.0, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    out, lse = reference.attention(q, k, v, causal=True, sinks=sinks if with_sinks else None)
    assert (out[:, :4] == 0).all()
    want = sinks[:, None].expand(4, 4) if with_sinks else torch.full((4, 4), -math.inf)
    assert torch.equal(lse[0, :, :4], want.double())
    dout = draw(*out.shape, seed=3)
    dout[:, :4] = math.nan  # whatever the loss does with rows that do not exist
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, torch.ones_like(lse)))
    assert (grads[0][:, :4] == 0).all() and (grads[0][:, 4:] != 0).all()
    assert not any(torch.isnan(g).any() for g in grads)


def test_precision_of_every_step() -> None:
    q, k, v = (x.bfloat16() for x in problem(4, 5))
    exact, lse = reference.attention(q, k, v)
    rough, _ = reference.attention(q, k, v, dtype=torch.bfloat16)
    assert exact.dtype == lse.dtype == torch.float64 and rough.dtype == torch.bfloat16
    error = (rough.double() - exact).abs().max()
    assert 1e-4 < error < 5e-2  # a yardstick that is exact would measure nothing


def test_refuses_what_has_no_meaning() -> None:
    q, k, v = problem(4, 5)
    with pytest.raises(ValueError, match="4 heads, not a multiple of k's 3"):
        reference.attention(q, draw(2, 5, 3, 3), draw(2, 5, 3, 2))
    with pytest.raises(ValueError, match="-1 is the only"):
        reference.attention(q, k, v, window_left=-2)
    with pytest.raises(ValueError, match="contradicts window_right=3"):
        reference.attention(q, k, v, causal=True, window_right=3)
