#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""What does it cost in accuracy, and save in work, not to follow every maximum of a row?

    python3 tools/softmax_error.py [--dim 64] [--lengths 1024 2048 4096] [--rules sum256 average4]

Emulates the softmax of the Hopper rows on the CPU: scores and sums in fp32, P rounded to the dtype
of the inputs, O rounded once. A rule says when a row takes the maximum of a block over and the
block's probabilities are made anew:

    every     in every block in which it grew
    sumN      where one lane's probabilities of the block add up to N
    averageN  where they add up to N times that lane's average block so far and to more than 1; or
              to 256

Per rule: root mean square of the errors beside `every`, largest error beside `every`, and the share
of blocks in which a warp (16 rows) makes its probabilities anew.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
WARP_ROWS, LANES, COLUMNS = 16, 4, 2  # a row lies in four lanes, in pairs of columns
MOST = 256.0  # a probability above has less precision in fp16
KINDS = ("normal", "x1.5", "x3", "x20", "outliers")

# (sums of the block, sums so far, blocks so far), sums [rows, lanes] -> [rows]: is the old maximum
# too small?
Rule = Callable[[Tensor, Tensor, int], Tensor]


def rule(name: str) -> Rule | None:
    """None: every maximum is taken over."""
    if name == "every":
        return None
    for prefix in ("sum", "average"):
        if name.startswith(prefix):
            try:
                value = float(name.removeprefix(prefix))
            except ValueError:
                break
            if prefix == "sum":
                return lambda block, before, blocks: ~(block < value).all(1)
            return lambda block, before, blocks: (
                ~(block < (value / blocks * before).clamp(1.0, MOST)).all(1)
            )
    raise ValueError(f"rule is {name!r}; allowed are every, sumN and averageN, for example sum256.")


@dataclass(frozen=True)
class Outcome:
    """O [rows, dim] in the dtype of the inputs; `redone`: share of (warp, block) pairs."""

    out: Tensor
    redone: float


def lane_sums(p: Tensor) -> Tensor:
    return p.unflatten(1, (-1, LANES, COLUMNS)).sum((1, 3))


def attend(q: Tensor, k: Tensor, v: Tensor, block: int, too_small: Rule | None) -> Outcome:
    """One head: q [rows, dim], k and v [keys, dim]; keys are a multiple of `block`."""
    rows, dim = q.shape
    factor = LOG2_E / math.sqrt(dim)
    scores = q.float() @ k.float().T
    top = torch.full((rows,), -math.inf)
    sums = torch.zeros(rows, LANES)
    out = torch.zeros(rows, v.shape[1], dtype=torch.float64)
    redone = visited = 0
    starts = range(k.shape[0] - block, -1, -block)  # from the last block, as the kernels do
    for blocks, first in enumerate(starts):
        s = scores[:, first : first + block]
        largest = torch.maximum(top, s.amax(1))
        if too_small is None or blocks == 0:
            adopt = largest > top
        else:
            p = torch.exp2((s - top[:, None]) * factor)
            adopt = too_small(lane_sums(p), sums, blocks)
        if blocks > 0:
            redone += int(adopt.unflatten(0, (-1, WARP_ROWS)).any(1).sum())
            visited += rows // WARP_ROWS
        after = torch.where(adopt, largest, top)
        alpha = torch.exp2((top - after) * factor)
        top = after
        p = torch.exp2((s - top[:, None]) * factor)
        sums = sums * alpha[:, None] + lane_sums(p)
        out = (
            out * alpha[:, None].double()
            + p.to(v.dtype).double() @ v[first : first + block].double()
        )
    return Outcome((out / sums.sum(1, keepdim=True).double()).to(q.dtype), redone / max(visited, 1))


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.double() @ k.double().T / math.sqrt(q.shape[1])
    return scores.softmax(1) @ v.double()


def draw(kind: str, rows: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Standard normal, times a factor, or with one value in a thousand ten times as large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator).to(dtype)
    if kind == "outliers":
        return torch.where(torch.rand(rows, dim, generator=generator) < 1e-3, x * 10, x)
    return x * (1 if kind == "normal" else float(kind.removeprefix("x")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rows", type=int, default=512, help="query rows, a multiple of 16")
    parser.add_argument("--block", type=int, default=128, help="keys of a block")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rules", nargs="+", default=["sum256", "sum16", "average4", "average3"])
    options = parser.parse_args()
    if options.rows <= 0 or options.rows % WARP_ROWS:
        parser.error(f"--rows is {options.rows}; allowed are multiples of {WARP_ROWS}.")
    if options.block <= 0 or options.block % (LANES * COLUMNS):
        parser.error(f"--block is {options.block}; allowed are multiples of {LANES * COLUMNS}.")
    wrong = [n for n in options.lengths if n <= 0 or n % options.block]
    if wrong:
        parser.error(f"--lengths has {wrong[0]}; allowed are multiples of --block.")
    try:
        rules = {name: rule(name) for name in options.rules}
    except ValueError as error:
        parser.error(str(error))
    dtype = getattr(torch, options.dtype)
    print("| keys | inputs | " + " | ".join(f"{n}: rms, largest, redone" for n in rules) + " |")
    print("|---|---|" + "---|" * len(rules))
    for length in options.lengths:
        for kind in KINDS:
            sizes = (options.rows, length, length)
            q, k, v = (draw(kind, n, options.dim, i, dtype) for i, n in enumerate(sizes))
            right = exact(q, k, v)
            base = attend(q, k, v, options.block, None).out.double() - right
            cells = []
            for too_small in rules.values():
                result = attend(q, k, v, options.block, too_small)
                error = result.out.double() - right
                cells.append(
                    f"{float(error.norm() / base.norm()):.3f}, "
                    f"{float(error.abs().max() / base.abs().max()):.2f}, {result.redone:.3f}"
                )
            print(f"| {length} | {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
