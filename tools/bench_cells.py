# SPDX-License-Identifier: BSD-3-Clause
# What is one measurement, and what do two of them say about each other? No torch, no GPU.
"""Cells, JSON lines, ratios to the best peer, geometric means and comparisons of the benchmark."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# The fields of one JSON line, in order; every line has all of them, null where one has no meaning.
FIELDS = (
    *(
        "date",
        "commit",
        "gpu",
        "driver",
        "torch",
        "op",
        "dtype",
        "head_dim",
        "head_dim_v",
        "causal",
    ),
    *("window", "batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "score", "layout"),
    *("deterministic", "num_splits", "impl", "row", "median_ms", "tflops", "gbs", "repeats"),
    *("timer", "l2", "run_id"),
)
CELL_FIELDS = (
    *("op", "dtype", "head_dim", "head_dim_v", "causal", "window", "batch", "heads_q", "heads_k"),
    *("seqlen_q", "seqlen_k", "score", "layout", "num_splits", "l2"),
)
LENGTHS = (1024, 4096, 16384)
HEAD_DIMS = (64, 128, 256)
TOKENS = 16384
HIDDEN = 2048


@dataclass(frozen=True)
class Cell:
    """One shape. Of the forward table: `tokens` rows in total, `hidden / head_dim` heads.

    The fields from `dim_v` on describe other shapes; 0 and () stand for "as in the forward table".
    """

    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    tokens: int = TOKENS
    hidden: int = HIDDEN
    dim_v: int = 0
    heads_q: int = 0
    heads_k: int = 0
    seqlen_k: int = 0
    window: tuple[int, int] = (-1, -1)
    lengths: tuple[int, ...] = ()  # of packed sequences, q and k alike; seqlen is the longest
    tag: str = ""  # names `lengths`
    work: str = "forward"  # "backward", or "step": both

    @property
    def batch(self) -> int:
        return len(self.lengths) or max(1, self.tokens // self.seqlen)

    @property
    def heads(self) -> int:
        return self.heads_q or max(1, self.hidden // self.head_dim)

    @property
    def key_heads(self) -> int:
        return self.heads_k or self.heads

    @property
    def head_dim_v(self) -> int:
        return self.dim_v or self.head_dim

    @property
    def keys(self) -> int:
        return self.seqlen_k or self.seqlen

    @property
    def plain(self) -> bool:
        """Whether the forward table has it."""
        return self == Cell(
            self.dtype, self.head_dim, self.causal, self.seqlen, self.tokens, self.hidden
        )

    @property
    def flops(self) -> float:
        """Forward: 2 (D + D_v) per visible pair of rows and head; backward: 2 (3 D + 2 D_v).

        A causal square counts as half of S².
        """
        if self.lengths:
            pairs = sum(visible_pairs(n, n, self.causal, self.window) for n in self.lengths)
        else:
            pairs = self.batch * visible_pairs(self.seqlen, self.keys, self.causal, self.window)
        d, d_v = self.head_dim, self.head_dim_v
        width = {"forward": d + d_v, "backward": 3 * d + 2 * d_v, "step": 4 * d + 3 * d_v}
        return 2.0 * pairs * self.heads * width[self.work]

    @property
    def bytes(self) -> float:
        """q, k, v read once and out written once, 2 bytes an element; backward: and the gradients.

        That is q, k, v, out, dout read and dq, dk, dv written.
        """
        rows_q = sum(self.lengths) or self.batch * self.seqlen
        rows_k = sum(self.lengths) or self.batch * self.keys
        d, d_v = self.head_dim, self.head_dim_v
        forward = (d + d_v) * (rows_q * self.heads + rows_k * self.key_heads)
        gradients = (2 * d + 2 * d_v) * (rows_q * self.heads + rows_k * self.key_heads)
        size = {"forward": forward, "backward": gradients, "step": forward + gradients}
        return 2.0 * size[self.work]

    @property
    def name(self) -> str:
        return cell_label(self.fields())

    def fields(self) -> Record:
        """What this cell contributes to its JSON lines."""
        return {
            "op": self.work if self.work != "forward" else "forward" if self.plain else "shapes",
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "causal": self.causal,
            "window": list(self.window),
            "batch": self.batch,
            "heads_q": self.heads,
            "heads_k": self.key_heads,
            "seqlen_q": self.seqlen,
            "seqlen_k": self.keys,
            "score": "scale",
            "layout": f"packed {self.tag}" if self.lengths else "bshd",
            "deterministic": False,
            "num_splits": 0,
        }


def visible_pairs(rows: int, keys: int, causal: bool, window: tuple[int, int] = (-1, -1)) -> float:
    """Pairs of a row and a key that it sees; rows² / 2 for a causal square."""
    left, right = window[0], 0 if causal else window[1]
    if left < 0 and right < 0:
        return float(rows * keys)
    if left < 0 and right == 0 and rows == keys:
        return rows * rows / 2
    shift, pairs = keys - rows, 0
    for row in range(rows):
        first = max(0, row + shift - left) if left >= 0 else 0
        last = min(keys - 1, row + shift + right) if right >= 0 else keys - 1
        pairs += max(0, last - first + 1)
    return float(pairs)


def cell_label(line: Record) -> str:
    """How tables name a cell: dtype, head dims, mask, length, and what is not as usual."""
    same = line["head_dim_v"] in (None, line["head_dim"])
    words = [line["dtype"], f"D{line['head_dim']}" + ("" if same else f"x{line['head_dim_v']}")]
    words.append("causal" if line["causal"] else "full")
    window = tuple(line["window"] or (-1, -1))
    if window != (-1, -1):
        words[-1] = f"window {window[0]},{window[1]}"
    if (line["layout"] or "").startswith("packed"):
        words.append(line["layout"])
    elif line["seqlen_k"] in (None, line["seqlen_q"]):
        words.append(f"S{line['seqlen_q']}")
    else:
        words.append(f"S{line['seqlen_q']}x{line['seqlen_k']}")
    if line["op"] in ("shapes", "step"):
        words.append(f"B{line['batch']} H{line['heads_q']}")
        if line["heads_k"] != line["heads_q"]:
            words[-1] += f"/{line['heads_k']}"
    return " ".join(words)


def forward_cells(
    dtypes: Iterable[str],
    head_dims: Iterable[int] = HEAD_DIMS,
    lengths: Iterable[int] = LENGTHS,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
) -> list[Cell]:
    """The cells of the forward table, in its order."""
    dims, sizes = list(head_dims), list(lengths)
    return [
        Cell(dtype, dim, causal, length, tokens, hidden)
        for dtype in dtypes
        for dim in dims
        for causal in (False, True)
        for length in sizes
    ]


def backward_cells(*table: Any) -> list[Cell]:
    """The cells of the backward table: those of the forward."""
    return [replace(cell, work="backward") for cell in forward_cells(*table)]


def step_cells() -> list[Cell]:
    """Forward and backward of a training step with grouped heads, 16384 tokens."""
    return [
        Cell("bfloat16", 128, True, length, heads_q=32, heads_k=8, work="step")
        for length in (2048, 4096, 16384)
    ]


# One long sequence among many short ones, and lengths as they come.
MIXED = (16384, *(128 * n for n in range(1, 17)), *(96 * n for n in range(2, 21)))
DRAWN = tuple(128 + 1920 * (7919 * n % 101) // 100 for n in range(24))


def shape_cells() -> list[Cell]:
    """The second set: what the forward table does not vary. 16384 tokens unless lengths say so."""
    bf16, window = "bfloat16", (1023, 0)
    group = {"heads_q": 32, "heads_k": 8}
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    latent = {"dim_v": 128, "heads_q": 16}
    return [
        *(Cell(bf16, 128, True, s, **group) for s in lengths),
        *(Cell(bf16, 128, False, s, **group) for s in (512, 4096)),
        *(Cell(bf16, d, False, 16384, window=window) for d in (64, 128)),
        Cell(bf16, 128, False, 16384, window=(4095, 0)),
        Cell(bf16, 128, False, 16384, window=(1024, 1024)),
        *(Cell(bf16, 128, c, max(MIXED), lengths=MIXED, tag="mixed") for c in (False, True)),
        *(Cell(bf16, 128, c, max(DRAWN), lengths=DRAWN, tag="drawn") for c in (False, True)),
        Cell(bf16, 128, True, 1024, tokens=1024, seqlen_k=16384),
        Cell(bf16, 128, True, 128, tokens=1024, seqlen_k=8192, **group),
        Cell(bf16, 128, False, 4096, seqlen_k=512),
        Cell(bf16, 128, True, 1024, tokens=1024, heads_q=4),
        Cell(bf16, 128, True, 4096, tokens=4096, heads_q=4),
        Cell(bf16, 64, True, 2048, tokens=2048, heads_q=8),
        *(Cell(bf16, 192, c, s, **latent) for c in (False, True) for s in LENGTHS),
        *(Cell(bf16, d, c, 4096, heads_q=16) for d in (96, 192) for c in (False, True)),
        *(Cell("float16", d, c, 4096, heads_q=2048 // d) for d in HEAD_DIMS for c in (False, True)),
    ]


def record(**known: Any) -> Record:
    """A JSON line with every field, null where not given; an unknown field is a ValueError."""
    unknown = set(known) - set(FIELDS)
    if unknown:
        raise ValueError(f"fields {sorted(unknown)} are not part of a benchmark line.")
    return {name: known.get(name) for name in FIELDS}


def cell_key(line: Record) -> tuple[Any, ...]:
    """Equal for lines that measured the same thing, whoever did the work."""
    return tuple(str(line[name]) for name in CELL_FIELDS)


def column(line: Record) -> str:
    """Who did the work: a peer's name, or ours with its architecture ("fa sm90", "… det")."""
    row = line["row"] or ""
    name = f"fa {row.split('_')[0]}" if line["impl"] == "fa" and row else line["impl"]
    return name + (" det" if line["deterministic"] else "")


def is_ours(name: str) -> bool:
    """Whether a column is one of ours; "fa2" is not."""
    return name == "fa" or name.startswith(("fa ", "fa."))


def by_cell(lines: Iterable[Record], op: str) -> dict[tuple[Any, ...], dict[str, Record]]:
    """{cell: {column: line}} of one op, in the order of the lines."""
    cells: dict[tuple[Any, ...], dict[str, Record]] = {}
    for line in lines:
        if line["op"] == op:
            cells.setdefault(cell_key(line), {})[column(line)] = line
    return cells


def best_peer(columns: dict[str, Record], among: Iterable[str] | None = None) -> Record | None:
    """The fastest line that is not ours."""
    peers = [
        line
        for name, line in columns.items()
        if not is_ours(name) and (among is None or name in set(among))
    ]
    return min(peers, key=lambda line: line["median_ms"]) if peers else None


def ratio(ours: Record, peer: Record) -> float:
    """How many times as fast as `peer` ours is: above 1 is faster."""
    return peer["median_ms"] / ours["median_ms"]


def geometric_mean(values: Iterable[float]) -> float:
    """NaN for no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def read_lines(path: Path | str) -> list[Record]:
    """Every line of a JSON-lines file; a line with other fields is a ValueError."""
    lines = []
    for number, text in enumerate(Path(path).read_text().splitlines(), start=1):
        if not text.strip():
            continue
        line = json.loads(text)
        if set(line) != set(FIELDS):
            wrong = sorted(set(line) ^ set(FIELDS))
            raise ValueError(f"{path}:{number}: fields {wrong} are missing or unknown.")
        lines.append(line)
    return lines


def write_lines(path: Path | str, lines: Iterable[Record]) -> None:
    """Replaces the file at `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


# --- tables -------------------------------------------------------------------------------------


def columns_of(cells: dict[tuple[Any, ...], dict[str, Record]]) -> list[str]:
    """Ours first, then the peers, each in order of appearance."""
    names = dict.fromkeys(name for columns in cells.values() for name in columns)
    return sorted(names, key=lambda name: not is_ours(name))


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
        texts += [_number(columns[n]["tflops"]) if n in columns else "–" for n in names]
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


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 10 else f"{value:.3g}"


def other_table(lines: Iterable[Record]) -> list[str]:
    """Host times, GEMM ceiling and copy, one Markdown row each."""
    chosen = [line for line in lines if line["op"] in ("host", "gemm", "copy")]
    if not chosen:
        return []
    host = {line["impl"]: line["median_ms"] for line in chosen if line["op"] == "host"}
    rows = ["| what | who | figure | to SDPA |", "|---|---|---|---|"]
    for line in chosen:
        if line["op"] == "host":
            figure = f"{line['median_ms'] * 1000:.1f} µs per call"
            sdpa = host.get("sdpa.train" if line["impl"].endswith(".train") else "sdpa")
            share = f"{line['median_ms'] / sdpa:.2f}" if sdpa else "–"
        elif line["op"] == "gemm":
            figure, share = f"{_number(line['tflops'])} TFLOP/s", ""
        else:
            figure, share = f"{line['gbs'] / 1000:.3g} TB/s", ""
        what = f"{line['op']} {line['dtype']}"
        rows.append(f"| {what} | {line['impl']} | {figure} | {share} |")
    return rows


# --- two runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One column of one cell in two runs. `gain` 0.05: 5 % faster than before."""

    cell: str
    name: str
    row: str
    before: float
    after: float
    unit: str  # "x best of <peers>" or "ms"

    @property
    def gain(self) -> float:
        change = self.after / self.before
        return (1 / change if self.unit == "ms" else change) - 1


def compare(old: list[Record], new: list[Record]) -> list[Change]:
    """Ours in `new` against the same cells in `old`.

    Figures of two runs differ by the machine's mood, so what is compared is the ratio to the best
    of the peers that both runs measured in the cell; the milliseconds only where there is none.
    """
    changes = []
    for op in ("forward", "shapes", "backward", "step", "decode", "host"):
        before_cells = by_cell(old, op)
        for key, columns in by_cell(new, op).items():
            before = before_cells.get(key, {})
            common = [n for n in columns if n in before and not is_ours(n)]
            for name, line in columns.items():
                if not is_ours(name) or name not in before:
                    continue
                then, now = before[name]["median_ms"], line["median_ms"]
                unit = "ms"
                old_peer, new_peer = best_peer(before, common), best_peer(columns, common)
                if old_peer and new_peer:
                    then, now = ratio(before[name], old_peer), ratio(line, new_peer)
                    unit = "x best of " + ", ".join(common)
                cell = f"{op} {cell_label(line)}"
                changes.append(Change(cell, name, line["row"] or "", then, now, unit))
    return changes


def change_table(changes: Iterable[Change]) -> list[str]:
    """A Markdown table of before and after."""
    rows = ["| cell | row | before | after | gain | unit |", "|---|---|---|---|---|---|"]
    for c in changes:
        rows.append(
            f"| {c.cell} | {c.row or c.name} | {c.before:.4g} | {c.after:.4g} "
            f"| {c.gain * 100:+.1f} % | {c.unit} |"
        )
    return rows
