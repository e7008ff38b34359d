# SPDX-License-Identifier: BSD-3-Clause
# How does a padded batch become packed sequences, and how does it come back?
"""Padding of FlashAttention-2's `flash_attn.bert_padding`, in differentiable torch operations.

The number of real tokens decides the shape of what is packed, so packing waits for the device.
Errors are torch's own (an index out of range, sizes that disagree), but for masks whose shape is
not that of the batch: ValueError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa._types import checked

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


@checked()
def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns rows `indices` (int64 [n]) of input [rows, ...]: [n, ...]."""
    return input.index_select(0, indices)


@checked()
def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns [first_axis_dim, ...] with values [n, ...] in rows `indices` (int64 [n]), else 0."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_copy(0, indices, values)


@checked()
def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (rows `indices` of input, input as a second branch), whose gradients add up."""
    return index_first_axis(input, indices), input.view_as(input)


@checked()
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch.

    Args:
        hidden_states: [B, S, ...].
        attention_mask: [B, S], bool or integers, 1 for a real token.
        unused_mask: [B, S], 1 for places that are packed and count as room, but are not used.

    Returns:
        tokens [total, ...]; their places in the flattened batch, int64 [total]; cu_seqlens
        int32 [B + 1]; the longest length; the lengths in use, int32 [B] (without unused places).
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    packed = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        packed = attention_mask + unused_mask
    tokens, places, cu_seqlens, longest = _pack(hidden_states, packed != 0)
    return tokens, places, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


@checked()
def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs a batch whose rows hold several sequences one after the other.

    Args:
        hidden_states: [B, S, ...].
        attention_mask_in_length: [B, S], the lengths of a row's sequences, then zeros:
            [2, 3, 0, 0, 0] is a row of 2 + 3 tokens.

    Returns:
        tokens, places, cu_seqlens int32 [sequences + 1], the longest length, as `unpad_input`.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    filled = attention_mask_in_length.sum(-1, keepdim=True)  # [B, 1]
    column = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    tokens, places, _, _ = _pack(hidden_states, column < filled)
    lengths = attention_mask_in_length.flatten()
    cu_seqlens, longest = _ends(lengths[lengths != 0])
    return tokens, places, cu_seqlens, longest


@checked()
def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`.

    hidden_states [total, ...] go to the places `indices` (int64 [total]) of the flattened batch.
    Returns [batch, seqlen, ...], 0 where nothing was.
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if hidden_states.dim() < 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name}: shape {list(mask.shape)} must be [batch, seqlen], the first two dimensions "
            f"of hidden_states, which is {list(hidden_states.shape)}."
        )


def _pack(hidden_states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    places = mask.flatten().nonzero().flatten()
    cu_seqlens, longest = _ends(mask.sum(-1))
    return index_first_axis(hidden_states.flatten(0, 1), places), places, cu_seqlens, longest


def _ends(lengths: Tensor) -> tuple[Tensor, int]:
    """Running sum with a leading 0, int32, and the longest; 0 where there is none."""
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def __getattr__(name: str) -> Any:
    """`rearrange` and `repeat`, which others import from the original, are einops' functions."""
    if name not in ("rearrange", "repeat"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import einops
    except ImportError as error:
        raise ImportError(
            f"{name} is a function of einops, which fa does not need: pip install einops."
        ) from error
    return getattr(einops, name)
