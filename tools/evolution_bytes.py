# SPDX-License-Identifier: BSD-3-Clause
# How many bytes must each generation of attention move? Formulas, from shapes and tiles alone.
"""Byte counts beside which tools/evolution.py sets what Nsight Compute counted.

Two borders are counted: DRAM, and from the L2 cache to the multiprocessors ("L2 → SM"). On a GPU
whose L2 holds K and V of the heads at work, re-reading them costs no DRAM traffic, so the number of
passes shows at the second border only. All counts are of one call, all batch entries and heads.
"""

from __future__ import annotations

from dataclasses import dataclass

FP32 = 4


@dataclass(frozen=True)
class Shape:
    """A square call: q, k and v of [batch, heads, length, dim], `element` bytes each.

    `out_element`: bytes of an element of O (2 for e4m3 inputs as well).
    """

    batch: int
    heads: int
    length: int
    dim: int
    causal: bool = False
    element: int = 2
    out_element: int = 2

    @property
    def count(self) -> int:
        """Sequences and heads: each is an attention problem of its own."""
        return self.batch * self.heads

    @property
    def rows(self) -> int:
        """Rows of one operand."""
        return self.count * self.length


@dataclass(frozen=True)
class Moved:
    """Bytes of one kernel or call at one border."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.read + other.read, self.written + other.written)

    def __rmul__(self, times: int) -> Moved:
        return Moved(times * self.read, times * self.written)


# --- standard attention -------------------------------------------------------------------------


def standard_kernels(shape: Shape) -> dict[str, Moved]:
    """DRAM bytes of the kernels of standard attention, each from cold caches.

    S = scale Q Kᵀ; a causal call masks S in place, reading one byte per pair once for all heads;
    P = softmax(S); O = P V. S and P are stored in the inputs' dtype.
    """
    e, square = shape.element, shape.count * shape.length**2
    operand = shape.rows * shape.dim * e
    kernels = {"scores": Moved(2 * operand, square * e)}
    if shape.causal:
        kernels["mask"] = Moved(square * e + shape.length**2, square * e)
    kernels["softmax"] = Moved(square * e, square * e)
    kernels["output"] = Moved(square * e + operand, operand)
    return kernels


def standard(shape: Shape) -> Moved:
    """DRAM bytes of standard attention: 4 N² + 4 N d elements a head (6 N² under a mask)."""
    return sum(standard_kernels(shape).values(), Moved(0, 0))


def standard_backward(shape: Shape) -> Moved:
    """DRAM bytes of its gradients by autograd, P kept by the forward; each kernel from cold caches.

    dV = Pᵀ dO; dP = dO Vᵀ; P dP, which torch stores before it subtracts P times its row sums for
    dS; masked again; dQ = dS K; dK = dSᵀ Q; and the scale times dQ and dK, where autograd applies
    it.
    """
    e, square = shape.element, shape.count * shape.length**2
    operand = shape.rows * shape.dim * e
    pairs = square * e
    moved = Moved(pairs + operand, operand)  # dV
    moved += Moved(2 * operand, pairs)  # dP
    moved += 2 * Moved(2 * pairs, pairs)  # P dP, dS
    if shape.causal:
        moved += Moved(pairs + shape.length**2, pairs)
    moved += Moved(2 * (pairs + operand), 2 * operand)  # dQ, dK
    return moved + Moved(2 * operand, 2 * operand)  # the scale


def standard_memory(shape: Shape) -> int:
    """Bytes that a forward allocates: S, P and O."""
    pairs = shape.count * shape.length**2
    return 2 * pairs * shape.element + shape.rows * shape.dim * shape.element


# --- FlashAttention 1's order -------------------------------------------------------------------


def fa1(shape: Shape, tile_rows: int, block_keys: int) -> Moved:
    """Bytes across the chip's border (L2 → SM, and back) of Algorithm 1 with these tiles.

    K and V once; Q once per block of keys that a tile of rows sees; O (fp32), m and l read before
    each but the first of these blocks and written after each but the last; O and LSE at the end.
    """
    reads = writes = 0
    d, n = shape.dim, shape.length
    state = d * FP32 + 2 * FP32
    for first_key in range(0, n, block_keys):
        reads += 2 * min(block_keys, n - first_key) * d * shape.element
        start = first_key // tile_rows * tile_rows if shape.causal else 0
        for first in range(start, n, tile_rows):
            rows = min(tile_rows, n - first)
            reads += rows * d * shape.element
            if first_key > 0:
                reads += rows * state
            end = first_key + block_keys
            last = end >= n or (shape.causal and end > first + tile_rows - 1)
            writes += rows * ((d * shape.out_element + FP32) if last else state)
    return Moved(reads * shape.count, writes * shape.count)


def fa1_memory(shape: Shape) -> int:
    """Bytes that a forward allocates: O, LSE, and O, m and l between passes."""
    return shape.rows * (shape.dim * (shape.out_element + FP32) + 3 * FP32)


# --- FlashAttention 2 and 3: O stays on the chip ------------------------------------------------


def seen_keys(length: int, tile_rows: int, block_keys: int, causal: bool) -> int:
    """Rows of K that the row tiles of one head read, in whole blocks, but none behind the end."""
    total = 0
    for first in range(0, length, tile_rows):
        end = min(first + tile_rows, length) if causal else length
        total += min(-(-end // block_keys) * block_keys, length)
    return total


def flash_l2(shape: Shape, tile_rows: int, block_keys: int) -> Moved:
    """L2 → SM bytes of the forward: Q once, K and V once per row tile that sees them.

    With e4m3 inputs a kernel ahead reads V and writes it transposed.
    """
    turned = shape.length * shape.dim if shape.element == 1 else 0
    keys = seen_keys(shape.length, tile_rows, block_keys, shape.causal)
    reads = (shape.length + 2 * keys) * shape.dim * shape.element
    writes = shape.length * (shape.dim * shape.out_element + FP32)
    return Moved((reads + turned) * shape.count, (writes + turned) * shape.count)


def flash(shape: Shape) -> Moved:
    """DRAM bytes that no forward can avoid: q, k and v read once, O and LSE written once.

    With e4m3 inputs V is also written transposed by a kernel ahead, and read again.
    """
    operand = shape.rows * shape.dim * shape.element
    turned = operand if shape.element == 1 else 0
    out = shape.rows * (shape.dim * shape.out_element + FP32)
    return Moved(3 * operand + turned, out + turned)


def flash_memory(shape: Shape) -> int:
    """Bytes that a forward allocates: O and LSE; with e4m3 inputs V transposed."""
    turned = shape.rows * shape.dim if shape.element == 1 else 0
    return shape.rows * (shape.dim * shape.out_element + FP32) + turned


def flash_backward_l2(shape: Shape, tile_rows: int, block_keys: int) -> Moved:
    """L2 → SM bytes of the backward's three kernels, where a block owns `block_keys` keys.

    prepare: O, dO and LSE in, δ, LSE·log₂e and cleared sums out. main: K and V once, Q, dO, LSE and
    δ of every row tile that sees the block; dK and dV out, dQ added to the sums. convert: sums in,
    dQ out.
    """
    d, n, e = shape.dim, shape.length, shape.element
    seen = 0  # rows of Q over all blocks of keys
    for first_key in range(0, n, block_keys):
        seen += n - (first_key // tile_rows * tile_rows if shape.causal else 0)
    prepare = Moved(n * (2 * d * e + FP32), n * (d * FP32 + 2 * FP32))
    main = Moved(2 * n * d * e + seen * (2 * d * e + 2 * FP32), 2 * n * d * e + seen * d * FP32)
    convert = Moved(n * d * FP32, n * d * e)
    one = prepare + main + convert
    return Moved(one.read * shape.count, one.written * shape.count)


def flash_backward(shape: Shape) -> Moved:
    """DRAM bytes of the same, every tensor once per kernel that touches it."""
    d, n, e = shape.dim, shape.rows, shape.element
    prepare = Moved(n * (2 * d * e + FP32), n * (d * FP32 + 2 * FP32))
    main = Moved(n * (4 * d * e + d * FP32 + 2 * FP32), n * (2 * d * e + d * FP32))
    convert = Moved(n * d * FP32, n * d * e)
    return prepare + main + convert
