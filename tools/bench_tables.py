# SPDX-License-Identifier: BSD-3-Clause
# How are measurements printed? Markdown tables of the benchmark's lines and comparisons.
"""Tables of cells, of host times and ceilings, and of two runs. No torch, no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench_cells import (
    Change,
    Record,
    best_peer,
    by_cell,
    cell_label,
    column,
    geometric_mean,
    host_rival,
    is_ours,
    ratio,
)

# Cells below this many operations per byte are bound by memory on every GPU here: GB/s is printed.
MEMORY_BOUND = 64
PEERS = ("fa2", "cudnn", "fa3", "fa4")


def columns_of(cells: dict[tuple[Any, ...], dict[str, Record]]) -> list[str]:
    """Ours in order of appearance, then the peers as PEERS orders them."""
    names = dict.fromkeys(name for columns in cells.values() for name in columns)
    return sorted(names, key=lambda n: 1 + PEERS.index(n) if n in PEERS else not is_ours(n))


def forward_table(lines: Iterable[Record], op: str = "forward") -> list[str]:
    """A Markdown table: TFLOP/s of every column, ratios of ours, and their geometric means.

    A Hopper row is held against the best peer of its cell, an Ampere row against FA2 (the peer of
    its own generation) where that was measured.
    """
    cells = by_cell(lines, op)
    if not cells:
        return []
    names = columns_of(cells)
    ours = [name for name in names if is_ours(name)]
    header = ["cell", *names, *[f"{name} / {rival_name(name)}" for name in ours]]
    rows = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    ratios: dict[str, list[float]] = {name: [] for name in ours}
    for columns in cells.values():
        texts = [cell_label(next(iter(columns.values())))]
        texts += [figure(columns[n]) if n in columns else "–" for n in names]
        for name in ours:
            peer = rival(columns, name)
            if name in columns and peer is not None:
                ratios[name].append(ratio(columns[name], peer))
                texts.append(f"{ratios[name][-1]:.2f} ({column(peer)})")
            else:
                texts.append("–")
        rows.append("| " + " | ".join(texts) + " |")
    for name in ours:
        if ratios[name]:
            rows.append("")
            rows.append(
                f"{name}: geometric mean {geometric_mean(ratios[name]):.3f} × {rival_name(name)}, "
                f"worst cell {min(ratios[name]):.2f}, {len(ratios[name])} cells."
            )
    return rows


def rival_name(name: str) -> str:
    """What a column of ours is held against."""
    return "FA2" if name.startswith("fa sm80") else "best peer"


def rival(columns: dict[str, Record], name: str) -> Record | None:
    """The line a column of ours is held against in its cell; None where nothing was measured."""
    if name.startswith("fa sm80") and "fa2" in columns:
        return columns["fa2"]
    return best_peer(columns)


def figure(line: Record) -> str:
    """TFLOP/s, and GB/s where memory is what binds."""
    text, rate, moved = _number(line["tflops"]), line["tflops"], line["gbs"]
    if rate is not None and moved is not None and 1e3 * rate < MEMORY_BOUND * moved:
        text += f" ({_number(moved)} GB/s)"
    return text


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 10 else f"{value:.3g}"


OTHER_OPS = ("host", "gemm", "copy")


def report(lines: list[Record]) -> list[str]:
    """Every table of a run, with a title where the tables' names would not do."""
    text: list[str] = []
    for op in dict.fromkeys(line["op"] for line in lines if line["op"] not in OTHER_OPS):
        text += [f"{op}:", "", *forward_table(lines, op), ""]
    return text + other_table(lines)


def other_table(lines: Iterable[Record]) -> list[str]:
    """Host times, GEMM ceiling and copy, one Markdown row each."""
    chosen = [line for line in lines if line["op"] in OTHER_OPS]
    if not chosen:
        return []
    host = {line["impl"]: line["median_ms"] for line in chosen if line["op"] == "host"}
    rows = ["| what | who | figure | to SDPA |", "|---|---|---|---|"]
    for line in chosen:
        if line["op"] == "host":
            figure = f"{line['median_ms'] * 1000:.1f} µs per call"
            sdpa = host.get(host_rival(line["impl"]))
            share = f"{line['median_ms'] / sdpa:.2f}" if sdpa else "–"
        elif line["op"] == "gemm":
            figure, share = f"{_number(line['tflops'])} TFLOP/s", ""
        else:
            figure, share = f"{line['gbs'] / 1000:.3g} TB/s", ""
        what = f"{line['op']} {line['dtype']}"
        rows.append(f"| {what} | {line['impl']} | {figure} | {share} |")
    return rows


def change_table(changes: Iterable[Change]) -> list[str]:
    """A Markdown table of before and after."""
    rows = ["| cell | row | before | after | gain | unit |", "|---|---|---|---|---|---|"]
    for c in changes:
        rows.append(
            f"| {c.cell} | {c.row or c.name} | {c.before:.4g} | {c.after:.4g} "
            f"| {c.gain * 100:+.1f} % | {c.unit} |"
        )
    return rows
