#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Which kernels exist? Turns tools/variants.csv into translation units, the registry and rows.json.

One row of the table is one compiled kernel. `--out` writes only files whose text changed, so that a
second run rebuilds nothing. `--check` verifies the table and the block of README.md made from it,
`--format` aligns the columns, `--readme` rewrites the block.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import fnmatch
import io
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "variants.csv"
README = ROOT / "README.md"
README_BEGIN, README_END = "<!-- variants:begin -->", "<!-- variants:end -->"

PROFILES = ("dev", "release", "full", "lab")  # each contains the ones before it
# Core-seconds that a cold build of a profile may take: 3 minutes, 30 minutes on two cores.
PROFILE_BUDGET_S = {"dev": 360, "release": 3600, "full": 3600}

# Column value -> C++ enumerator of kernels_common/host/kernel_config.h.
LOADERS = {"tma": "LoadKind::kTma", "cpasync": "LoadKind::kCpAsync", "paged": "LoadKind::kPaged"}
ENUMS: dict[str, dict[str, str]] = {
    "op": {"fwd": "Op::kForward", "bwd": "Op::kBackward"},
    "dtype": {"fp16": "DType::kFp16", "bf16": "DType::kBf16", "e4m3": "DType::kE4m3"},
    "kv_dtype": {"fp16": "DType::kFp16", "bf16": "DType::kBf16", "e4m3": "DType::kE4m3"},
    "mask": {"none": "MaskKind::kNone", "band": "MaskKind::kBand"},
    "score": {"scale": "ScoreKind::kScale", "any": "ScoreKind::kAny"},
    "kv": LOADERS | {"selftma": "LoadKind::kSelfTma"},
    "q": LOADERS,
    "sched": {"static": "SchedKind::kStatic", "dynamic": "SchedKind::kDynamic"},
    "step": {"overlap": "StepKind::kOverlap", "serial": "StepKind::kSerial"},
}
INTEGERS = ("arch", "d_qk", "d_v", "tile_m", "tile_n", "warps", "stages", "cluster", "est_s")
ARCHS = {"80": "80", "90": "90a"}  # column `arch` -> the entry of FA_ARCHS that builds it
GPU_NAMES = {"80": "Ampere and Ada (8.x), newer through PTX", "90": "Hopper (9.0)"}
# Widths of a Hopper product that CUTLASS offers without its header of all multiples of 8. That adds
# 30 seconds to a row: only rows that need it ask for it.
PLAIN_WIDTHS = ("32", "64", "96", "128", "192", "256")
DEFAULT_LOADER = {"80": "cpasync", "90": "tma"}  # not spelled in an id

# Keys of the column `knobs`, per op: name -> allowed value -> C++ text.
KNOBS: dict[str, dict[str, dict[str, str]]] = {
    "fwd": {
        "turns": {k: f"Turns::k{k.title()}" for k in ("none", "gemm")},
        "rescale": {k: f"Rescale::k{k.title()}" for k in ("always", "voted", "exact")},
        "q_slots": {"1": "1", "2": "2"},
        "o_buf": {"0": "0", "1": "1", "2": "2"},
        "dropout": {"0": "0", "1": "1"},
        "pack": {"0": "0", "1": "1"},
        "v_rows": {"0": "0", "2": "2", "4": "4"},
    },
    "bwd": {
        "dropout": {"0": "0", "1": "1"},
        "stages_ds": {"1": "1", "2": "2"},
        "dq": {k: f"DqAdd::k{k.title()}" for k in ("atomic", "vector", "bulk")},
        "dq_turns": {"1": "1", "2": "2", "4": "4", "8": "8"},
    },
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; every field is the column's text."""

    id: str
    arch: str
    op: str
    dtype: str
    kv_dtype: str
    d_qk: str
    d_v: str
    mask: str
    score: str
    kv: str
    q: str
    tile_m: str
    tile_n: str
    warps: str
    stages: str
    cluster: str
    sched: str
    step: str
    knobs: str
    profile: str
    est_s: str
    why: str

    def stem(self) -> str:
        """The id that the columns spell; a table id is this, or this plus `_<tag>`."""
        dims = f"d{self.d_qk}" if self.d_qk == self.d_v else f"d{self.d_qk}x{self.d_v}"
        parts = [f"sm{self.arch}", self.op, self.dtype, dims, self.mask]
        if self.score != "scale":
            parts.append(self.score)
        if self.kv != DEFAULT_LOADER.get(self.arch):
            parts.append(self.kv)
        return "_".join(parts)

    def knob_items(self) -> list[tuple[str, str]]:
        return [(k, v) for k, _, v in (item.partition("=") for item in self.knobs.split())]


COLUMNS = tuple(f.name for f in dataclasses.fields(Row))


class TableError(Exception):
    """The table cannot be read at all; the text says where."""


def parse(text: str) -> list[Row]:
    """Rows of the table's text. Raises TableError naming line and column."""
    lines = list(csv.reader(io.StringIO(text)))
    if not lines:
        raise TableError("variants.csv is empty; its first line must hold the column names.")
    header = tuple(cell.strip() for cell in lines[0])
    if header != COLUMNS:
        raise TableError(
            f"variants.csv, line 1: columns are {','.join(header)}; expected {','.join(COLUMNS)}."
        )
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) != len(COLUMNS):
            raise TableError(
                f"variants.csv, line {number}: {len(cells)} cells; expected {len(COLUMNS)}. "
                "Quote a cell that holds a comma."
            )
        rows.append(Row(*(cell.strip() for cell in cells)))
    return rows


def _row_problems(row: Row) -> list[str]:
    found = []
    if row.arch not in ARCHS:
        found.append(f"arch {row.arch!r} is not one of {', '.join(ARCHS)}")
    for column, values in ENUMS.items():
        value = getattr(row, column)
        if value not in values:
            found.append(f"{column} {value!r} is not one of {', '.join(values)}")
    for column in INTEGERS:
        value = getattr(row, column)
        if not re.fullmatch(r"[1-9][0-9]*", value):
            found.append(f"{column} {value!r} is not a positive whole number")
    if row.profile not in PROFILES:
        found.append(f"profile {row.profile!r} is not one of {', '.join(PROFILES)}")
    if not row.why:
        found.append("why is empty; say what earns the row its build time")
    allowed = KNOBS.get(row.op, {})
    seen: set[str] = set()
    for key, value in row.knob_items():
        if key not in allowed:
            known = ", ".join(allowed) or "none"
            found.append(f"knob {key!r} is not known for op {row.op} (known: {known})")
        elif value not in allowed[key]:
            found.append(f"knob {key}={value} is not one of {', '.join(allowed[key])}")
        if key in seen:
            found.append(f"knob {key!r} is given twice")
        seen.add(key)
    stem = row.stem()
    if row.id != stem and not re.fullmatch(re.escape(stem) + r"_[a-z][a-z0-9]*", row.id):
        found.append(f"the columns spell {stem}; the id must be that, or that plus _<tag>")
    if len(row.id) > 63:
        found.append("the id is longer than 63 characters, the room in fa_kernel_desc")
    return [f"row {row.id}: {text}." for text in found]


def problems(rows: list[Row]) -> list[str]:
    """Every rule of the table that is broken, as sentences; empty when it is sound."""
    found = [text for row in rows for text in _row_problems(row)]
    ids = [row.id for row in rows]
    found += [
        f"row {i}: the id stands twice." for i in sorted({i for i in ids if ids.count(i) > 1})
    ]
    if found:
        return found
    for profile in PROFILES:
        held = in_profile(rows, profile)
        banded = {(r.arch, r.op, r.dtype, r.d_qk, r.d_v) for r in held if r.mask == "band"}
        for row in held:
            key = (row.arch, row.op, row.dtype, row.d_qk, row.d_v)
            if row.mask != "band" and key not in banded:
                found.append(f"row {row.id}: profile {profile} has no band row beside it.")
        total = sum(int(r.est_s) for r in held)
        if total > PROFILE_BUDGET_S.get(profile, total):
            found.append(
                f"profile {profile} is estimated at {total} core-seconds; "
                f"the budget is {PROFILE_BUDGET_S[profile]}."
            )
    return found


def in_profile(rows: list[Row], profile: str) -> list[Row]:
    """Rows of a profile and of the smaller ones that it contains."""
    return [r for r in rows if PROFILES.index(r.profile) <= PROFILES.index(profile)]


def select(rows: list[Row], archs: list[str], profile: str, only: str = "") -> list[Row]:
    """Rows to build. With a glob in `only`, the glob decides and the profile does not."""
    held = fnmatch_rows(rows, only) if only else in_profile(rows, profile)
    return [r for r in held if ARCHS[r.arch] in archs]


def fnmatch_rows(rows: list[Row], pattern: str) -> list[Row]:
    held = [r for r in rows if fnmatch.fnmatchcase(r.id, pattern)]
    if not held:
        raise TableError(f"FA_ONLY={pattern} matches no row of tools/variants.csv.")
    return held


def unit_text(row: Row) -> str:
    """The translation unit of one row."""
    fields = [("arch", row.arch)]
    fields += [(c, ENUMS[c][getattr(row, c)]) for c in ("op", "dtype", "kv_dtype")]
    fields += [("head_dim_qk", row.d_qk), ("head_dim_v", row.d_v)]
    fields += [(c, ENUMS[c][getattr(row, c)]) for c in ("mask", "score", "kv", "q")]
    fields += [(c, getattr(row, c)) for c in ("tile_m", "tile_n", "warps", "stages", "cluster")]
    fields += [(c, ENUMS[c][getattr(row, c)]) for c in ("sched", "step")]
    given = dict(row.knob_items())
    fields += [(k, KNOBS[row.op][k][given[k]]) for k in KNOBS[row.op] if k in given]
    config = "\n".join(f"      .{name} = {value}," for name, value in fields)
    wide = row.arch == "90" and not {row.tile_n, row.d_v} <= set(PLAIN_WIDTHS)
    define = "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n" if wide else ""
    return f"""\
// SPDX-License-Identifier: BSD-3-Clause
// Row {row.id} of tools/variants.csv. Generated: edit the table.
{define}#include "kernels_sm{row.arch}/{row.op}/launch.h"

namespace fa::rows {{

struct {row.id} {{
  static constexpr KernelConfig kConfig{{
{config}
  }};
}};

extern const KernelEntry entry_{row.id};
constinit const KernelEntry entry_{row.id} =
    sm{row.arch}::make_entry<{row.id}>("{row.id}");

}}  // namespace fa::rows
"""


def registry_text(rows: list[Row]) -> str:
    """The source of fa::kernels(), also for a build without rows."""
    externs = "".join(f"extern const KernelEntry entry_{r.id};\n" for r in rows)
    if rows:
        entries = "".join(f"    &rows::entry_{r.id},\n" for r in rows)
        body = f"constinit const KernelEntry* const kEntries[] = {{\n{entries}}};\n"
        result = "kEntries"
    else:
        body, result = "", "{}"
    return f"""\
// SPDX-License-Identifier: BSD-3-Clause
// Which rows does this build hold? Generated from tools/variants.csv.
#include "kernels_common/host/registry.h"

namespace fa {{
namespace rows {{
{externs}}}  // namespace rows

namespace {{
{body}}}  // namespace

std::span<const KernelEntry* const> kernels() {{ return {result}; }}

}}  // namespace fa
"""


def rows_json(rows: list[Row]) -> str:
    numbers = set(INTEGERS)
    return json.dumps(
        [
            {k: int(v) if k in numbers else v for k, v in dataclasses.asdict(r).items()}
            for r in rows
        ],
        indent=1,
    )


def write_if_different(path: Path, text: str) -> bool:
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True


def generate(rows: list[Row], out: Path) -> list[tuple[str, Path]]:
    """Writes units, registry and rows.json under `out`; returns (arch, unit) in table order."""
    units = [(r.arch, out / f"{r.id}.cu") for r in rows]
    for row, (_, path) in zip(rows, units, strict=True):
        write_if_different(path, unit_text(row))
    write_if_different(out / "registry.cpp", registry_text(rows))
    write_if_different(out / "rows.json", rows_json(rows) + "\n")
    wanted = {path for _, path in units}
    for stale in out.glob("*.cu"):
        if stale not in wanted:
            stale.unlink()
    return units


def format_table(rows: list[Row]) -> str:
    """The table with aligned columns; the last one is free text."""
    lines = [COLUMNS, *(dataclasses.astuple(r) for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS) - 1)]
    out = []
    for line in lines:
        last = line[-1]
        if "," in last or '"' in last:
            last = '"' + last.replace('"', '""') + '"'
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        out.append(",".join([*cells, last]).rstrip())
    return "\n".join(out) + "\n"


def readme_block(rows: list[Row]) -> str:
    """The support table of README.md: shipped rows, grouped by GPU, direction and head dim."""
    groups: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for row in in_profile(rows, "full"):
        dim = row.d_qk if row.d_qk == row.d_v else f"{row.d_qk}/{row.d_v}"
        group = groups.setdefault((row.arch, row.op, dim), {"dtype": [], "mask": [], "score": []})
        drops = dict(row.knob_items()).get("dropout") == "1"
        cells = {"dtype": row.dtype, "mask": row.mask, "score": row.score + "+dropout" * drops}
        for column, values in group.items():
            if cells[column] not in values:
                values.append(cells[column])
    words = {"fwd": "forward", "bwd": "backward"}
    masks = {"none": "none", "band": "causal, windows, chunks"}
    scores = {"scale": "scale", "any": "scale, softcap, ALiBi"}
    scores["any+dropout"] = scores["any"] + ", dropout"
    lines = [
        README_BEGIN,
        "| GPU | direction | head dim | dtypes | masks | scores |",
        "|---|---|---|---|---|---|",
    ]
    for (arch, op, dim), group in sorted(
        groups.items(),
        key=lambda g: (-int(g[0][0]), words[g[0][1]] != "forward", len(g[0][2]), g[0]),
    ):
        mask = "; ".join(masks[m] for m in sorted(group["mask"], key=list(masks).index))
        if "any+dropout" in group["score"]:  # says the same and more
            group["score"] = [s for s in group["score"] if s != "any"]
        score = "; ".join(scores[s] for s in sorted(group["score"], key=list(scores).index))
        lines.append(
            f"| {GPU_NAMES[arch]} | {words[op]} | {dim} | {', '.join(sorted(group['dtype']))} "
            f"| {mask} | {score} |"
        )
    return "\n".join([*lines, README_END])


def with_block(readme: str, rows: list[Row]) -> str:
    """README text with its block renewed. Raises TableError when the markers are missing."""
    begin, end = readme.find(README_BEGIN), readme.find(README_END)
    if begin < 0 or end < begin:
        raise TableError(f"README.md has no block {README_BEGIN} … {README_END}; add both lines.")
    return readme[:begin] + readme_block(rows) + readme[end + len(README_END) :]


def _check(rows: list[Row]) -> list[str]:
    found = problems(rows)
    if not found:
        if TABLE.read_text() != format_table(rows):
            found.append("variants.csv is not aligned; run tools/gen_variants.py --format.")
        readme = README.read_text()
        if readme != with_block(readme, rows):
            found.append("README.md's support table is old; run tools/gen_variants.py --readme.")
    return found


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the generated sources")
    parser.add_argument("--archs", default="", help="of FA_ARCHS: 80, 90a, separated by ';'")
    parser.add_argument("--profile", default="release", choices=PROFILES)
    parser.add_argument("--only", default="", help="glob over ids, instead of a profile")
    parser.add_argument("--check", action="store_true", help="table, alignment, README block")
    parser.add_argument("--format", action="store_true", help="align the table's columns")
    parser.add_argument("--readme", action="store_true", help="rewrite README.md's block")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _parse_args(argv)
    try:
        rows = parse(TABLE.read_text())
        found = _check(rows) if args.check else problems(rows)
        if args.format and not problems(rows):
            write_if_different(TABLE, format_table(rows))
        if args.readme and not problems(rows):
            write_if_different(README, with_block(README.read_text(), rows))
        chosen = select(rows, re.split(r"[;, ]+", args.archs), args.profile, args.only)
        if args.out and not found:
            for arch, path in generate(chosen, args.out):
                print(f"{arch} {path}")
    except (TableError, OSError) as error:
        found = [str(error)]
    for text in found:
        print(f"gen_variants: {text}", file=sys.stderr)
    if found:
        return 1
    if args.check:
        for profile in PROFILES:
            held = in_profile(rows, profile)
            total = sum(int(r.est_s) for r in held)
            print(f"{profile}: {len(held)} rows, about {total} core-seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
