# SPDX-License-Identifier: BSD-3-Clause
# What does a whole problem look like, over every option at once?
"""Problem: a Case with pages, dropout or e4m3 on top; from whatever source of numbers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cases import Case, Inputs, draw_case
from paging import to_pages

FP8 = torch.float8_e4m3fn
MAX_LENGTH = 100
MOST = 8_000_000  # multiplications of one problem


@dataclass(frozen=True)
class Problem:
    """A Case and what it is turned into."""

    case: Case
    page_size: int = 0  # 0: not paged
    heads_first: bool = False  # memory order inside of a page
    dropout_p: float = 0.0
    fp8: str = ""  # "all": q, k and v in e4m3; "cache": k and v
    descales: str = ""  # "head" or "block"
    batch_invariant: bool = False
    num_splits: int = 0

    def make(self, poison: float) -> Inputs:
        """Tensors and options; what must not be read holds `poison` (e4m3 has no inf: NaN)."""
        inputs = self.case.make(poison=poison)
        generator = torch.Generator().manual_seed(len(self.case.id))
        if self.fp8:
            self._store(inputs, generator)
        if self.page_size:
            self._page(inputs, generator, poison)
        if self.dropout_p:
            inputs.options["dropout_p"] = self.dropout_p
            inputs.options["philox_seed_offset"] = torch.randint(
                2**62, (2,), generator=generator, dtype=torch.int64
            )
        return inputs

    def how(self) -> dict[str, Any]:
        """Options that choose how a call runs."""
        return {"batch_invariant": self.batch_invariant, "num_splits": self.num_splits}

    def _store(self, inputs: Inputs, generator: torch.Generator) -> None:
        case, options = self.case, inputs.options
        names = ("q", "k", "v") if self.fp8 == "all" else ("k", "v")
        for name in names:
            setattr(inputs, name, getattr(inputs, name).to(FP8))
        options["out_dtype"] = torch.float32
        if self.fp8 == "all" and "sinks" in options:
            options["sinks"] = options["sinks"].float()
        heads_k = case.heads_k or case.heads_q
        longest = {"q": _longest(case.q), "k": _longest(case.k)}
        for name in names if self.descales else ():
            shape: tuple[int, ...] = (case.sequences, heads_k)
            if self.descales == "block":
                side = "q" if name == "q" else "k"
                room = longest[side]
                if side == "k" and self.page_size:
                    room = -(-room // self.page_size) * self.page_size
                heads = case.heads_q if name == "q" else heads_k
                shape = (case.sequences, heads, -(-room // 24))
                options[f"descale_block_{side}"] = 24
            options[f"{name}_descale"] = torch.rand(shape, generator=generator) + 0.5

    def _page(self, inputs: Inputs, generator: torch.Generator, poison: float) -> None:
        options, rows = inputs.options, inputs.k.shape[0]
        sequences = self.case.sequences
        used = options.setdefault(
            "seqused_k", torch.full((sequences,), inputs.k.shape[1], dtype=torch.int32)
        )
        owners = options.get("kv_batch_idx", torch.arange(sequences)).tolist()
        room = [0] * rows
        for owner, count in zip(owners, used.tolist(), strict=True):
            room[owner] = max(room[owner], count)
        pools, options["page_table"] = to_pages(
            [inputs.k, inputs.v],
            self.page_size,
            generator,
            poison=poison,
            unused=-1 if math.isnan(poison) else 2**31 - 1,
            used=room,
        )
        if self.heads_first:
            pools = [_heads_first(pool) for pool in pools]
        inputs.k, inputs.v = pools


def _longest(side: int | tuple[int, ...]) -> int:
    return max(side, default=0) if isinstance(side, tuple) else side


def _heads_first(pool: Tensor) -> Tensor:
    return pool.transpose(1, 2).contiguous().transpose(1, 2)


def draw(seed: int, number: int) -> Problem:
    """Problem `number` of a seed."""
    rng = random.Random(f"{seed}:{number}")
    while True:
        problem = build(rng, f"problem{seed}_{number}")
        if problem.case.cost <= MOST:
            return problem


def build(rng: Any, tag: str) -> Problem:
    """The problem that a source of numbers (as random.Random) chooses; it may cost above MOST."""
    case = replace(draw_case(rng, tag, MAX_LENGTH), backward=True)
    fp8 = rng.choice(("", "", "", "all", "cache"))
    if not fp8 and rng.random() < 0.3:
        case = replace(case, dtype=rng.choice(("fp32", "fp64")), out_fp32=False)
        if case.dtype == "fp32":  # its yardstick is fp32 itself: no room beside large scores
            case = replace(case, values="normal")
    if fp8:  # peaked and constant values would only test the saturation of e4m3
        case = replace(case, backward=False, values="normal", out_fp32=False, dlse=False)
    paged = not case.packed_k and _longest(case.k) > 0 and rng.random() < 0.45
    return Problem(
        case,
        page_size=rng.choice((1, 3, 16, 64, 256)) if paged else 0,
        heads_first=rng.random() < 0.3,
        dropout_p=rng.choice((0.0, 0.0, 0.1, 0.5, 0.97)),
        fp8=fp8,
        descales=rng.choice(("", "head", "block")) if fp8 else "",
        batch_invariant=rng.random() < 0.3,
        num_splits=rng.choice((0, 0, 1, 3)),
    )
