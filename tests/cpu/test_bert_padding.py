# SPDX-License-Identifier: BSD-3-Clause
# Do padded batches reach packed calls, and come back, as with FlashAttention-2's bert_padding?
"""fa.flash_attn.bert_padding on the CPU backend."""

from __future__ import annotations

import pytest
import torch

from fa import reference
from fa.flash_attn import bert_padding, flash_attn_varlen_func
from flash_attn_calls import close, draw, ints, written
from signatures import BERT_PADDING

HEADS = ((4, 16), (2, 16), (2, 8))  # of q, k, v: heads, head dim


@pytest.mark.parametrize("name", BERT_PADDING)
def test_signature(name: str) -> None:
    assert written(getattr(bert_padding, name)) == BERT_PADDING[name]


def test_unpad_and_pad_are_inverse() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    x = draw(3, 5, 2, 4, grad=True)
    for kind in (torch.bool, torch.int64):
        tokens, places, cu, longest, used = bert_padding.unpad_input(x, mask.to(kind))
        assert torch.equal(tokens, x[mask.bool()]) and places.tolist() == [0, 1, 3, *range(10, 15)]
        assert torch.equal(cu, ints(0, 3, 3, 8)) and torch.equal(used, ints(3, 0, 5))
        assert longest == 5 and isinstance(longest, int)
        back = bert_padding.pad_input(tokens, places, 3, 5)
        assert torch.equal(back, x * mask[:, :, None, None])
        (grad,) = torch.autograd.grad(back.sum(), x)
        assert torch.equal(grad, mask[:, :, None, None].expand_as(x).double())
    unused = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    tokens, _, cu, _, used = bert_padding.unpad_input(x, mask, unused)
    assert torch.equal(cu, ints(0, 4, 5, 10)) and torch.equal(used, ints(3, 0, 5))
    assert torch.equal(tokens, x[(mask + unused).bool()])


def test_several_sequences_in_a_row() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = draw(3, 6, 4)
    tokens, places, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(cu, ints(0, 2, 5, 8, 10, 16)) and longest == 6
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :5], x[2]]))
    back = bert_padding.pad_input(tokens, places, 3, 6)
    assert torch.equal(back[2], x[2]) and (back[:2, 5] == 0).all()


def test_attention_of_a_padded_batch() -> None:
    mask = torch.arange(13) < torch.tensor([[13], [4], [9]])
    q, k, v = (draw(3, 13, h, d, seed=i) for i, (h, d) in enumerate(HEADS))
    parts = [bert_padding.unpad_input(t, mask) for t in (q, k, v)]
    (packed_q, places, cu, longest, _), (packed_k, *_), (packed_v, *_) = parts
    out = flash_attn_varlen_func(
        packed_q, packed_k, packed_v, cu, cu, longest, longest, causal=True
    )
    used = mask.sum(1, dtype=torch.int32)
    want, _ = reference.attention(q, k, v, seqused_q=used, seqused_k=used, causal=True)
    close(bert_padding.pad_input(out, places, 3, 13), want)


def test_rows_by_index() -> None:
    x, at = draw(6, 3, grad=True), torch.tensor([4, 0, 2])
    rows, whole = bert_padding.index_first_axis_residual(x, at)
    assert torch.equal(rows, x[at]) and torch.equal(whole, x)
    (grad,) = torch.autograd.grad(rows.sum() + 2 * whole.sum(), x)
    want = torch.full_like(x, 2.0)
    want[at] += 1
    assert torch.equal(grad, want)
    put = bert_padding.index_put_first_axis(rows, at, 6)
    assert torch.equal(put[at], rows) and (put[[1, 3, 5]] == 0).all()
    assert torch.equal(bert_padding.index_first_axis(x, at), rows)


def test_padding_errors() -> None:
    x = draw(3, 5, 4)
    with pytest.raises(ValueError, match=r"attention_mask: shape \[3, 4\]"):
        bert_padding.unpad_input(x, torch.ones(3, 4))
    with pytest.raises(ValueError, match="unused_mask"):
        bert_padding.unpad_input(x, torch.ones(3, 5), torch.ones(5, 3))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bert_padding.nothing
