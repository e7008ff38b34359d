# SPDX-License-Identifier: BSD-3-Clause
# Which weights does dropout keep? Random bytes that depend on nothing but seed, offset and place.
"""Philox4x32-10 in torch operations on any device; the bits of docs/numerics.md, "Dropout".

One call gives 16 bytes, for 16 neighbouring keys of a row, so a tile of any shape and place finds
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

KEYS_PER_CALL = 16
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def threshold(dropout_p: float) -> int:
    """A weight is dropped iff its byte is below this: 256 p, rounded half up, in [0, 256]."""
    return math.floor(256 * dropout_p + 0.5)


def keep_probability(dropout_p: float) -> float:
    """The realised one, which kept weights are divided by; 0 if everything is dropped."""
    return (256 - threshold(dropout_p)) / 256


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds; words are int64 tensors in [0, 2^32), of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _product(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word of x * by: in halves, since int64 has no room for 64 bits and no sign."""
    low = (x & 0xFFFF) * by  # < 2^48
    middle = (x >> 16) * by + (low >> 16)  # < 2^49
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def random_bytes(
    seed: int, offset: int, heads: Tensor, rows: tuple[int, int], keys: tuple[int, int]
) -> Tensor:
    """uint8 [heads, rows, keys] of the rows and keys [begin, end) of one or more sequences.

    heads: int64 [n], b * Hq + h each. seed and offset: int64 of any sign.
    """
    device, (first, last) = heads.device, keys
    blocks = range(first // KEYS_PER_CALL, -(-last // KEYS_PER_CALL))
    words = philox4x32(
        (
            torch.arange(blocks.start, blocks.stop, device=device),
            torch.arange(*rows, device=device)[:, None],
            heads[:, None, None],
            torch.tensor(offset & _MASK, device=device),
        ),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    shape = (len(heads), rows[1] - rows[0], len(blocks), KEYS_PER_CALL)
    out = torch.empty(shape, dtype=torch.uint8, device=device)
    for byte in range(KEYS_PER_CALL):
        out[..., byte] = (words[byte // 4] >> 8 * (byte % 4)) & 0xFF
    begin = first - blocks.start * KEYS_PER_CALL
    return out.flatten(2)[..., begin : begin + last - first]


def dropped(
    dropout_p: float,
    seed_offset: Sequence[int],
    heads: Tensor,
    rows: tuple[int, int],
    keys: tuple[int, int],
) -> Tensor:
    """bool [heads, rows, keys]: which weights dropout replaces by 0."""
    seed, offset = seed_offset
    if rows[0] >= rows[1] or keys[0] >= keys[1]:
        shape = (len(heads), rows[1] - rows[0], keys[1] - keys[0])
        return torch.zeros(shape, dtype=torch.bool, device=heads.device)
    # As int16: 256 is one more than a byte holds.
    return random_bytes(seed, offset, heads, rows, keys).short() < threshold(dropout_p)
