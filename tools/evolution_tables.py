# SPDX-License-Identifier: BSD-3-Clause
# What do the measured lines say, in tables and in words? English and Chinese, the same figures.
"""Tables of docs/evolution.md and docs/evolution.zh.md, one function each. No torch, no GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from evolution_lines import Line, chosen

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("standard", "fa1", "fa2", "fa3")
ORDER = (*NAMES, "fa3 e4m3")  # of columns
FP8 = "float8_e4m3fn"
TOKENS = 16384  # of a call in the tables of equal tokens
AGREES = 0.25  # a counted figure further from its formula is marked
OUT_OF_MEMORY = "OutOfMemoryError"  # in the note of a call that did not fit
Words = dict[str, str]


def words_of(language: str) -> Words:
    """What tables say in "en" or "zh": tools/evolution/words.json."""
    found: Words = json.loads((ROOT / "tools" / "evolution" / "words.json").read_text())[language]
    return found


class PageError(Exception):
    """A sentence: why no page can be made of these lines."""


# --- figures ------------------------------------------------------------------------------------


def size(value: float | None) -> str:
    """Bytes as a reader wants them."""
    if value is None:
        return "–"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f} B"


def column(one: Line) -> str:
    """The generation, e4m3 apart."""
    return f"{one['impl']} e4m3" if one["dtype"] == FP8 else one["impl"]


def columns(lines: Iterable[Line]) -> list[str]:
    """In the order of history."""
    found = {column(one) for one in lines}
    return [name for name in ORDER if name in found]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table; the first row is its head."""
    head, *rest = rows
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rest)]


def by_length(lines: Iterable[Line]) -> dict[int, dict[str, Line]]:
    """{length: {column: line}}, lengths ascending."""
    found: dict[int, dict[str, Line]] = {}
    for one in lines:
        found.setdefault(one["seqlen"], {})[column(one)] = one
    return dict(sorted(found.items()))


def is_short(one: Line) -> bool:
    """Whether the call is one short sequence, apart from the tables of equal tokens."""
    return one["batch"] == 1 and one["seqlen"] < TOKENS


def whole(lines: Iterable[Line], kind: str, **wanted: Any) -> list[Line]:
    """`chosen` without the single short sequences."""
    return [one for one in chosen(lines, kind, **wanted) if not is_short(one)]


def main_dim(lines: Iterable[Line]) -> int:
    """The head dim that the tables are about: the largest that was measured."""
    return max(one["head_dim"] for one in lines)


def gain(cells: dict[str, Line], name: str) -> float | None:
    """How many times as fast as standard attention in this cell."""
    if name not in cells or "standard" not in cells:
        return None
    return cells["standard"]["median_ms"] / cells[name]["median_ms"]


# --- tables -------------------------------------------------------------------------------------


def machine_line(lines: list[Line], words: Words) -> list[str]:
    """Where the figures come from."""
    first = lines[0]
    return [words["by"].format(**{**first, "commit": first["commit"][:12]})]


def time_table(lines: list[Line], words: Words, op: str, causal: bool, dim: int) -> list[str]:
    """Milliseconds, TFLOP/s and the gain over standard attention, by length."""
    return _times(lines, whole(lines, "time", op=op, causal=causal, head_dim=dim), words)


def short_table(lines: list[Line], words: Words, dim: int) -> list[str]:
    """The same of single short sequences."""
    wanted = [one for one in chosen(lines, "time", head_dim=dim) if is_short(one)]
    return _times(lines, wanted, words)


def _missing(lines: list[Line], cells: dict[str, Line], name: str, words: Words) -> str:
    """What stands where a generation has no figure in a cell in which others have one."""
    one = next(iter(cells.values()))
    same = {field: one[field] for field in ("op", "causal", "head_dim", "batch", "seqlen")}
    notes = [line["note"] for line in chosen(lines, "absent", **same) if column(line) == name]
    return words["no_memory"] if any(OUT_OF_MEMORY in note for note in notes) else "–"


def memory_line(lines: list[Line], words: Words) -> list[str]:
    """What the allocator said about calls that did not fit, one sentence for the first of them."""
    for one in chosen(lines, "absent"):
        found = [re.search(pattern, one["note"]) for pattern in _ALLOCATOR]
        if OUT_OF_MEMORY in one["note"] and all(found):
            asked, capacity, held = (match[1] for match in found if match)
            call = f"{words[column(one)]}, {words[one['op']]}, N = {one['seqlen']}"
            return [words["did_not_fit"].format(call, held, asked, capacity)]
    return []


_ALLOCATOR = (
    r"Tried to allocate ([\d.]+ \w+)",
    r"total capacity of ([\d.]+ \w+)",
    r"([\d.]+ \w+) is allocated by PyTorch",
)


def _times(lines: list[Line], wanted: list[Line], words: Words) -> list[str]:
    names = columns(wanted)
    rows = [[words["length"], *(words[name] for name in names)]]
    for length, cells in by_length(wanted).items():
        texts = []
        for name in names:
            one = cells.get(name)
            if one is None:
                texts.append(_missing(lines, cells, name, words))
                continue
            times = gain(cells, name)
            more = f", {words['faster'].format(times)}" if times and name != "standard" else ""
            texts.append(f"{one['median_ms']:.3g} ms, {one['tflops']:.0f} TFLOP/s{more}")
        rows.append([str(length), *texts])
    return markdown(rows)


def memory_table(lines: list[Line], words: Words, op: str, dim: int) -> list[str]:
    """What one call allocates, and the formula's figure where there is one."""
    wanted = whole(lines, "time", op=op, causal=False, head_dim=dim)
    names = columns(wanted)
    rows = [[words["length"], *(words[name] for name in names)]]
    for length, cells in by_length(wanted).items():
        texts = []
        for name in names:
            one = cells.get(name)
            if one is None:
                texts.append(_missing(lines, cells, name, words))
                continue
            text = size(one["peak_bytes"])
            if one["model_memory"]:
                text += f" ({size(one['model_memory'])})"
            texts.append(text)
        rows.append([str(length), *texts])
    return markdown(rows)


def bytes_table(lines: list[Line], words: Words, border: str) -> list[str]:
    """Counted bytes beside their formula, one row per call. `border`: "dram" or "l2"."""
    rows = [
        [
            words[name]
            for name in ("call", "length", "row", "kernels", "counted", "formula", "ratio")
        ]
    ]
    found = sorted(
        chosen(lines, "bytes"),
        key=lambda one: (
            one["op"] != "forward",
            one["causal"],
            one["seqlen"],
            ORDER.index(column(one)),
        ),
    )
    for one in found:
        if border == "dram":
            parts = (one["dram_read"], one["dram_written"])
            counted = None if None in parts else sum(parts)
            formula = one["model_dram"]
        else:
            counted, formula = one["l2_read"], one["model_l2_read"]
            if formula is None:
                continue
        ratio = counted / formula if counted is not None and formula else None
        mark = "" if ratio is None or abs(ratio - 1) <= AGREES else " ⚠"
        mask = words["causal" if one["causal"] else "full"]
        rows.append(
            [
                f"{words[column(one)]}, {words[one['op']]}, {mask}",
                str(one["seqlen"]),
                one["row"] or "torch",
                str(len(one["kernels"] or [])),
                size(counted),
                size(formula),
                "–" if ratio is None else f"{ratio:.2f}{mark}",
            ]
        )
    return markdown(rows)


def error_table(lines: list[Line], words: Words) -> list[str]:
    """Differences from fp64."""
    rows = [[words["call"], "D", words["rms"], words["largest"], words["to_standard"]]]
    errors = chosen(lines, "error")
    for one in sorted(errors, key=lambda one: (one["head_dim"], ORDER.index(column(one)))):
        base = relative_error(errors, one)
        rows.append(
            [
                words[column(one)],
                str(one["head_dim"]),
                f"{one['rms_error']:.2e}",
                f"{one['max_error']:.2e}",
                "–" if base is None else f"{base:.2f}",
            ]
        )
    return markdown(rows)


def relative_error(errors: list[Line], one: Line) -> float | None:
    """A line's rms error over that of standard attention in the same dtype and head dim."""
    same = [
        other["rms_error"]
        for other in errors
        if other["impl"] == "standard"
        and (other["dtype"], other["head_dim"]) == (one["dtype"], one["head_dim"])
    ]
    return one["rms_error"] / same[0] if same and same[0] else None


def ablation_table(lines: list[Line], words: Words) -> list[str]:
    """Rate of each row of the ablation, and over the shipped one of the same run, by length."""
    found = chosen(lines, "ablation")
    if not found:
        return [words["no_ablation"]]
    lengths = sorted({one["seqlen"] for one in found})
    names = list(dict.fromkeys((one["impl"], one["row"]) for one in found))
    rows = [[words["row"], *(f"N = {n}" for n in lengths)]]
    for impl, row in names:
        texts = [f"{row} ({words['shipped']})" if impl == "fa3" else str(row)]
        for length in lengths:
            here = [one for one in found if one["seqlen"] == length]
            one = next((other for other in here if other["impl"] == impl), None)
            same = [o for o in here if one and o["impl"] == "fa3" and o["run_id"] == one["run_id"]]
            base = same[0] if same else None  # a ratio is worth something within one run only
            text = "–" if one is None else f"{one['tflops']:.0f} TFLOP/s"
            if one and base and impl != "fa3":
                text += f" ({base['median_ms'] / one['median_ms']:.2f})"
            texts.append(text)
        rows.append(texts)
    return markdown(rows)


def claim_table(lines: list[Line], words: Words, dim: int) -> list[str]:
    """Each claim that is made about FlashAttention, and the figures of this run."""
    full = by_length(whole(lines, "time", op="forward", causal=False, head_dim=dim))
    both = {n: c for n, c in full.items() if "standard" in c and "fa2" in c}
    if len(both) < 2:
        raise PageError("fewer than two lengths have both standard attention and FlashAttention 2.")
    low = min(both)
    rows = [[words["claim"], words["figure"]]]

    def add(claim: str, **figures: object) -> None:
        rows.append([words[f"c_{claim}"], words[f"f_{claim}"].format(**figures)])

    peaks = {n: [size(both[n][name]["peak_bytes"]) for name in ("standard", "fa2")] for n in both}
    # Equal tokens: above the common number of tokens a call has more of them.
    tokens = [n for n in both if both[n]["fa2"]["batch"] * n == both[low]["fa2"]["batch"] * low]
    (s0, f0), (s1, f1) = peaks[low], peaks[max(tokens)]
    add("memory", low=low, high=max(tokens), s0=s0, s1=s1, f0=f0, f1=f1)
    counted = by_length(chosen(lines, "bytes", op="forward", causal=False, head_dim=dim))
    longest = max(n for n, c in counted.items() if "standard" in c and "fa2" in c)
    dram = {
        name: counted[longest][name]["dram_read"] + counted[longest][name]["dram_written"]
        for name in ("standard", "fa2")
    }
    x = dram["standard"] / dram["fa2"]
    add("bytes", high=longest, s=size(dram["standard"]), f=size(dram["fa2"]), x=x)
    parts = [
        f"{words[name]} {one['l2_read'] / one['model_l2_read']:.2f}"
        for name, one in counted[longest].items()
        if one["model_l2_read"] and one["l2_read"]
    ]
    add("l2", high=longest, text=", ".join(parts))
    long = [n for n in both if n >= 1024] or list(both)
    two, three = ([g for n in long if (g := gain(full[n], f))] for f in ("fa2", "fa3"))
    three = three or [float("nan")]
    add(
        "faster",
        **{"low": min(long), "high": max(long), "a": min(two), "b": max(two)},
        **{"c": min(three), "d": max(three)},
    )
    errors = chosen(lines, "error", head_dim=dim)
    texts = [
        f"{words[column(one)]} {share:.2f}"
        for one in errors
        if one["impl"] != "standard" and (share := relative_error(errors, one)) is not None
    ]
    add("exact", text=", ".join(texts))
    short = [one for one in chosen(lines, "time", head_dim=dim) if is_short(one)]
    gains = {n: g for n, cells in by_length(short).items() if (g := gain(cells, "fa2"))}
    if not gains:
        raise PageError("no single short sequence was timed.")
    a, b = min(gains.values()), max(gains.values())
    add("short", heads=short[0]["heads"], low=min(gains), high=max(gains), a=a, b=b)
    return markdown(rows)
