# SPDX-License-Identifier: BSD-3-Clause
# What is one measurement, and what do two of them say about each other? No torch, no GPU.
"""Cells, JSON lines, ratios to the best peer, geometric means and comparisons of the benchmark.

bench_models.py holds the cells of well-known models, bench_tables.py what is printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# The fields of one JSON line, in order; null where one has no meaning.
BASE_FIELDS = (
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
# Fields that a file written before they existed lacks: read_lines fills them with null. The last
# three hold [before, after] of the cell.
LATER_FIELDS = ("p20_ms", "p80_ms", "model", "sm_mhz", "celsius", "watts")
FIELDS = (*BASE_FIELDS, *LATER_FIELDS)
LOSS = 0.03  # a comparison fails on more, if both runs' p20 to p80 do not explain it
CELL_FIELDS = (
    *("op", "dtype", "head_dim", "head_dim_v", "causal", "window", "batch", "heads_q", "heads_k"),
    *("seqlen_q", "seqlen_k", "score", "layout", "num_splits", "l2", "model"),
)
LENGTHS = (1024, 4096, 16384)
HEAD_DIMS = (64, 128, 256)
TOKENS = 16384
ELEMENT_BYTES = {"float8_e4m3fn": 1, "float32": 4}  # else 2
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
    softcap: float = 0.0
    sinks: bool = False  # one logit per query head
    model: str = ""  # whose shape this is

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
    def score(self) -> str:
        """What happens to a score beside the scale."""
        words = [f"softcap {self.softcap:g}"] * bool(self.softcap) + ["sinks"] * self.sinks
        return " ".join(words) or "scale"

    @property
    def plain(self) -> bool:
        """Whether the forward table has it."""
        return self == Cell(
            self.dtype, self.head_dim, self.causal, self.seqlen, self.tokens, self.hidden
        )

    @property
    def flops(self) -> float:
        """Forward: 2 (D + D_v) per visible pair of rows and head; backward: 2 (3 D + 2 D_v).

        Pairs are counted exactly: S (S + 1) / 2 of a causal square.
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
        """The least a GPU can move: every tensor once, whatever the tiles read again out of the L2.

        Forward: q, k, v read, out (bf16 for e4m3 inputs) and LSE (fp32) written. Backward: q, k, v,
        out, dout and LSE read, dq, dk, dv written. Decoding with groups reads a key head once.
        """
        rows_q = sum(self.lengths) or self.batch * self.seqlen
        rows_k = sum(self.lengths) or self.batch * self.keys
        d, d_v = self.head_dim, self.head_dim_v
        size = ELEMENT_BYTES.get(self.dtype, 2)
        size_out = max(size, 2)
        q, k = rows_q * self.heads * d * size, rows_k * self.key_heads * d * size
        v, out = rows_k * self.key_heads * d_v * size, rows_q * self.heads * d_v * size_out
        lse = rows_q * self.heads * 4
        forward = q + k + v + out + lse
        backward = 2 * (q + k + v + out) + lse
        return float({"forward": forward, "backward": backward}.get(self.work, forward + backward))

    @property
    def name(self) -> str:
        return cell_label(self.fields())

    @property
    def op(self) -> str:
        """Which table it belongs to."""
        if self.model:
            return "models" if self.work == "forward" else f"models {self.work}"
        return self.work if self.work != "forward" else "forward" if self.plain else "shapes"

    def fields(self) -> Record:
        """What this cell contributes to its JSON lines."""
        return {
            "op": self.op,
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
            "score": self.score,
            "layout": f"packed {self.tag}" if self.lengths else "bshd",
            "deterministic": False,
            "num_splits": 0,
            "model": self.model or None,
        }


def visible_pairs(rows: int, keys: int, causal: bool, window: tuple[int, int] = (-1, -1)) -> float:
    """Pairs of a row and a key that it sees, masks aligned at the bottom right."""
    left, right = window[0], 0 if causal else window[1]
    if left < 0 and right < 0:
        return float(rows * keys)
    if left < 0 and right == 0 and rows == keys:
        return rows * (rows + 1) / 2
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
    if line["op"] not in ("forward", "backward", "host", "gemm", "copy"):
        words.append(f"B{line['batch']} H{line['heads_q']}")
        if line["heads_k"] != line["heads_q"]:
            words[-1] += f"/{line['heads_k']}"
    if line["score"] not in (None, "scale"):
        words.append(line["score"])
    model = line.get("model")
    return " ".join([f"{model}:"] * bool(model) + words)


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


def host_rival(name: str) -> str:
    """The entry of SDPA that does the same as an entry of the host table."""
    part = name.partition(".")[2].removesuffix("_op")
    return f"sdpa.{part}" if part in ("record", "backward", "train") else "sdpa"


def ratio(ours: Record, peer: Record) -> float:
    """How many times as fast as `peer` ours is: above 1 is faster."""
    return peer["median_ms"] / ours["median_ms"]


def geometric_mean(values: Iterable[float]) -> float:
    """NaN for no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def read_lines(path: Path | str) -> list[Record]:
    """Every line of a JSON-lines file, with every field; one with others is a ValueError."""
    lines = []
    for number, text in enumerate(Path(path).read_text().splitlines(), start=1):
        if not text.strip():
            continue
        line = json.loads(text)
        wrong = sorted((set(BASE_FIELDS) - set(line)) | (set(line) - set(FIELDS)))
        if wrong:
            raise ValueError(f"{path}:{number}: fields {wrong} are missing or unknown.")
        lines.append({name: line.get(name) for name in FIELDS})
    return lines


def write_lines(path: Path | str, lines: Iterable[Record]) -> None:
    """Replaces the file at `path`; null fields that `read_lines` fills in are left out."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    kept = (
        {name: v for name, v in line.items() if v is not None or name not in LATER_FIELDS}
        for line in lines
    )
    Path(path).write_text("".join(json.dumps(k, separators=(",", ":")) + "\n" for k in kept))


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
    kindest: float = 0.0  # the gain if now were its p20 and before its p80, where those are known

    @property
    def gain(self) -> float:
        change = self.after / self.before
        return (1 / change if self.unit == "ms" else change) - 1

    @property
    def lost(self) -> bool:
        """Slower by more than LOSS, and by more than the spread of both runs explains."""
        return self.gain < -LOSS and self.kindest < 0


def compare(old: list[Record], new: list[Record]) -> list[Change]:
    """Ours in `new` against the same cells in `old`.

    Figures of two runs differ by the machine's mood, so what is compared is the ratio to the best
    of the peers that both runs measured in the cell; the milliseconds only where there is none.
    """
    changes = []
    for op in ("forward", "shapes", "backward", "step", "models", "models step", "host"):
        before_cells = by_cell(old, op)
        for key, columns in by_cell(new, op).items():
            before = before_cells.get(key, {})
            shared = [n for n in columns if n in before and not is_ours(n)]
            for name, line in columns.items():
                if not is_ours(name) or name not in before:
                    continue
                common = [n for n in shared if op != "host" or n == host_rival(name)]
                then, now = before[name]["median_ms"], line["median_ms"]
                unit = "ms"
                old_peer, new_peer = best_peer(before, common), best_peer(columns, common)
                if old_peer and new_peer:
                    then, now = ratio(before[name], old_peer), ratio(line, new_peer)
                    unit = "x best of " + ", ".join(common)
                cell = f"{op} {cell_label(line)}"
                one = Change(cell, name, line["row"] or "", then, now, unit)
                kindest = (1 + one.gain) * _share(line, "p20_ms") / _share(before[name], "p80_ms")
                changes.append(replace(one, kindest=kindest - 1))
    return changes


def _share(line: Record, name: str) -> float:
    """The median over a quantile's time, as a factor on the gain: p20 above 1, p80 below."""
    return line["median_ms"] / (line[name] or line["median_ms"])


def not_measured(
    old: list[Record],
    new: list[Record],
    refused: set[tuple[tuple[Any, ...], str]] | None = None,
) -> list[str]:
    """Names of cells of ours that `old` has and `new` has not, of the ops that `new` ran.

    `refused`: only those whose (cell_key, backend) is in it.
    """
    ops = {line["op"] for line in new}
    seen = {(cell_key(line), column(line)) for line in new}
    return [
        f"{line['op']} {cell_label(line)} {line['row'] or column(line)}"
        for line in old
        if (refused is not None or line["op"] in ops)
        and is_ours(column(line))
        and (cell_key(line), column(line)) not in seen
        and (refused is None or (cell_key(line), (line["row"] or "").split("_")[0]) in refused)
    ]
