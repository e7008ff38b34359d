# SPDX-License-Identifier: BSD-3-Clause
# How do time and memory grow with the sequence length, with and without the score matrix?
"""Standard attention against fa for N = 512, 1024, ...: the table that explains the kernels."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fa
from fa._cli import measure
from fa._cli.progress import Progress

CHECK_UP_TO = 4096  # the largest difference is looked at up to this length
SEED = 20


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured: one causal call per length, batch 1."""

    device: str
    dtype: torch.dtype
    heads: int
    dim: int
    longest: int
    cell_limit_s: float  # no call is made that should take longer
    total_limit_s: float

    def lengths(self) -> Iterator[int]:
        n = 512
        while n <= self.longest:
            yield n
            n *= 2


def plan(device: torch.device, dtype: torch.dtype, quick: bool) -> Plan:
    """Shapes that show the difference on this device within its time."""
    if device.type == "cuda":
        longest, total = (16384, 10.0) if quick else (131072, 60.0)
        return Plan(str(device), dtype, 16, 128, longest, 5.0, total)
    longest, total = (2048, 25.0) if quick else (8192, 40.0)
    return Plan(str(device), dtype, 4, 64, longest, 10.0, total)


@dataclasses.dataclass
class Line:
    """One length; a cost is None where the call was not made, and `why` says why."""

    length: int
    standard: measure.Cost | None = None
    ours: measure.Cost | None = None
    standard_why: str = ""
    ours_why: str = ""


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook: the matrix of all scores, its mask, its softmax. [B, N, H, D] each.

    softmax(Q K^T / sqrt(D)) V, causal; the softmax of 16-bit scores in fp32, as model code has it.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    n = q.shape[2]
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5  # [B, H, N, N]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def fa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = fa.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


CALLS = {"standard": standard_attention, "fa": fa_attention}


def inputs(plan: Plan, length: int) -> list[Tensor]:
    generator = torch.Generator(plan.device).manual_seed(SEED)
    shape = (1, length, plan.heads, plan.dim)
    return [
        torch.randn(shape, generator=generator, device=plan.device, dtype=plan.dtype)
        for _ in range(3)
    ]


def cell(name: str, plan: Plan, length: int) -> measure.Cost:
    """One implementation at one length, in this process."""
    call = CALLS[name]
    with torch.no_grad():
        call(*inputs(plan, 64))  # loads kernels, starts threads
        q, k, v = inputs(plan, length)
        result = measure.cost(lambda: call(q, k, v), torch.device(plan.device))
        if name == "fa" and length <= CHECK_UP_TO:
            error = fa_attention(q, k, v).float() - standard_attention(q, k, v).float()
            result.difference = error.abs().max().item()
        return result


def measure_lengths(plan: Plan) -> list[Line]:
    """The table, as far as time and memory go; a length that does not fit says why."""
    lines: list[Line] = []
    ends = time.monotonic() + plan.total_limit_s
    todo = list(plan.lengths())
    with Progress("attention, N by N", 2 * len(todo), "calls") as progress:
        for length in todo:
            line = Line(length)
            for name in CALLS:
                before = getattr(lines[-1], _FIELD[name]) if lines else None
                progress.update(0, f"{name} at N = {length}")
                cost, why = _one(name, plan, length, before, len(lines) > 0, ends)
                setattr(line, _FIELD[name], cost)
                setattr(line, _FIELD[name] + "_why", why)
                progress.update(1)
            if line.standard is None and line.ours is None:
                lines.append(line)
                break
            lines.append(line)
    return lines


_FIELD = {"standard": "standard", "fa": "ours"}


def _one(
    name: str,
    plan: Plan,
    length: int,
    before: measure.Cost | None,
    follows: bool,
    ends: float,
) -> tuple[measure.Cost | None, str]:
    """A cost, or why there is none. Time and score matrix grow fourfold from line to line."""
    if follows and before is None:
        return None, "not tried, as the length before was not measured"
    left = ends - time.monotonic()
    if before is not None:
        seconds = 4 * before.seconds
        if seconds > plan.cell_limit_s or 2 * seconds > left:
            return None, f"not tried: about {seconds:.0f} s a call"
        need = (4 if name == "standard" else 2) * (before.peak_bytes or 0)
        free = measure.free_bytes(torch.device(plan.device))
        if need > 0.8 * free:
            return None, f"does not fit: about {gib(need)}, {gib(free)} free"
    try:
        if torch.device(plan.device).type == "cuda":
            return cell(name, plan, length), ""
        limit = max(30.0, 5 * plan.cell_limit_s)
        return measure.in_own_process(cell, name, plan, length, limit_s=limit), ""
    except measure.OutOfMemory:
        return None, "out of memory"
    except measure.TooSlow:
        return None, f"stopped after {limit:.0f} s"


def gib(size: float) -> str:
    """Bytes for a reader: 1536 * 2**20 -> "1.5 GiB"."""
    unit, name = next((u for u in _UNITS if size < 1000 * u[0]), _UNITS[-1])
    size /= unit
    return f"{size:.{2 if size < 1 else 1 if size < 100 else 0}f} {name}"


_UNITS = ((1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"))


def table(lines: list[Line]) -> str:
    """The lines as text."""
    head = ("N", "standard", "fa", "ratio", "standard", "fa", "ratio", "max diff")
    rows: list[tuple[Any, ...]] = [("", "time", "", "", "peak memory", "", "", ""), head]
    notes = []
    for line in lines:
        s, o = line.standard, line.ours
        rows.append(
            (
                line.length,
                seconds(s.seconds) if s else "-",
                seconds(o.seconds) if o else "-",
                f"{s.seconds / o.seconds:.2f}" if s and o else "-",
                gib(s.peak_bytes) if s and s.peak_bytes is not None else "-",
                gib(o.peak_bytes) if o and o.peak_bytes is not None else "-",
                f"{s.peak_bytes / o.peak_bytes:.1f}"
                if s and o and s.peak_bytes and o.peak_bytes
                else "-",
                f"{o.difference:.1e}" if o and o.difference is not None else "",
            )
        )
        notes += [
            f"  N = {line.length}, {name}: {why}."
            for name, why in (("standard", line.standard_why), ("fa", line.ours_why))
            if why
        ]
    widths = [max(len(str(r[i])) for r in rows) for i in range(len(head))]
    text = ["  ".join(str(c).rjust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
    return "\n".join([*text, *notes])


def seconds(value: float) -> str:
    """0.0123 -> "12.3 ms"."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.{1 if value / scale >= 10 else 2}f} {unit}"
    return f"{value * 1e6:.0f} us"
