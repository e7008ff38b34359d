# SPDX-License-Identifier: BSD-3-Clause
# What do the kernels do at the same time? Draws the diagrams of docs/schedules, lists their rows.
"""Writes docs/schedules/*.svg, and the tables of rows in the pages beside them.

    python3 tools/schedules.py            # renew them
    python3 tools/schedules.py --check    # exit code 1 if they are not what this would write

A diagram has one lane per actor, time to the right, not to scale. Arrows are waits: from where
something is signalled to where it is waited for. The tables come from tools/variants.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from html import escape
from pathlib import Path

import gen_variants

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "schedules"
ROWS_BEGIN, ROWS_END = "<!-- rows:begin -->", "<!-- rows:end -->"

# Kind of work -> (fill, what the legend calls it).
KINDS = {
    "load": ("#cfe2f3", "copies"),
    "qk": ("#f9cb9c", "products of scores"),
    "pv": ("#f6b26b", "products into sums"),
    "soft": ("#d9ead3", "softmax, rounding"),
    "store": ("#ead1dc", "results to memory"),
    "plan": ("#eeeeee", "bookkeeping"),
    "wait": ("#ffffff", "waits"),
}
UNIT, LANE, LEFT, TOP = 31, 40, 172, 48


@dataclasses.dataclass
class Diagram:
    """Boxes (lane, begin, width, text, kind), arrows (lane, time, lane, time, text)."""

    title: str
    lanes: list[str]
    boxes: list[tuple[int, float, float, str, str]] = dataclasses.field(default_factory=list)
    arrows: list[tuple[int, float, int, float, str]] = dataclasses.field(default_factory=list)
    marks: list[tuple[float, str]] = dataclasses.field(default_factory=list)

    def row(self, lane: int, begin: float, *items: tuple[float, str, str]) -> None:
        """Boxes one after the other: (width, text, kind); an empty text leaves a gap."""
        for width, text, kind in items:
            if text:
                self.boxes.append((lane, begin, width, text, kind))
            begin += width

    def svg(self) -> str:
        end = max(begin + width for _, begin, width, _, _ in self.boxes)
        width = round(LEFT + UNIT * end + 20)
        bottom = TOP + LANE * len(self.lanes)
        height = bottom + 44
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            f"<title>{escape(self.title)}</title>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#cc0000"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="10" y="20" font-weight="bold">{escape(self.title)}</text>',
        ]
        for i, name in enumerate(self.lanes):
            y = TOP + LANE * i
            out.append(f'<line x1="0" y1="{y}" x2="{width}" y2="{y}" stroke="#dddddd"/>')
            out.append(f'<text x="10" y="{y + 24}">{escape(name)}</text>')
        out.append(f'<line x1="0" y1="{bottom}" x2="{width}" y2="{bottom}" stroke="#dddddd"/>')
        out += [line for mark in self.marks for line in self._mark(*mark, bottom)]
        out += [line for box in self.boxes for line in self._box(*box)]
        out += [line for arrow in self.arrows for line in self._arrow(*arrow)]
        return "\n".join([*out, *self._legend(bottom + 14), "</svg>", ""])

    def _box(self, lane: int, begin: float, width: float, text: str, kind: str) -> list[str]:
        x, y = LEFT + UNIT * begin, TOP + LANE * lane + 7
        dash = ' stroke-dasharray="3 2"' if kind == "wait" else ""
        return [
            f'<rect x="{x:g}" y="{y}" width="{UNIT * width - 2:g}" height="{LANE - 14}" rx="3" '
            f'fill="{KINDS[kind][0]}" stroke="#666666"{dash}/>',
            f'<text x="{x + UNIT * width / 2 - 1:g}" y="{y + 17}" text-anchor="middle" '
            f'font-size="11">{escape(text)}</text>',
        ]

    def _arrow(self, lane: int, time: float, to: int, then: float, text: str) -> list[str]:
        down = to > lane
        y1 = TOP + LANE * lane + (LANE - 7 if down else 7)
        y2 = TOP + LANE * to + (7 if down else LANE - 7)
        x1, x2 = LEFT + UNIT * time, LEFT + UNIT * then
        lines = [
            f'<line x1="{x1:g}" y1="{y1}" x2="{x2:g}" y2="{y2}" stroke="#cc0000" '
            'marker-end="url(#a)"/>'
        ]
        if text:
            lines.append(
                f'<text x="{(x1 + x2) / 2 + 4:g}" y="{(y1 + y2) / 2 + 4:g}" font-size="10" '
                'fill="#cc0000" stroke="#ffffff" stroke-width="3" paint-order="stroke">'
                f"{escape(text)}</text>"
            )
        return lines

    def _mark(self, time: float, text: str, bottom: int) -> list[str]:
        x = LEFT + UNIT * time
        return [
            f'<line x1="{x:g}" y1="{TOP}" x2="{x:g}" y2="{bottom}" stroke="#999999" '
            'stroke-dasharray="4 3"/>',
            f'<text x="{x + 3:g}" y="{TOP - 4}" font-size="10" fill="#666666">'
            f"{escape(text)}</text>",
        ]

    def _legend(self, y: int) -> list[str]:
        out, x = [], 10
        used = {kind for *_, kind in self.boxes}
        for kind, (fill, text) in KINDS.items():
            if kind not in used:
                continue
            out.append(
                f'<rect x="{x}" y="{y}" width="14" height="12" fill="{fill}" stroke="#666666"/>'
            )
            out.append(f'<text x="{x + 19}" y="{y + 10}" font-size="11">{escape(text)}</text>')
            x += 34 + 6 * len(text)
        if self.arrows:
            out.append(
                f'<line x1="{x}" y1="{y + 6}" x2="{x + 20}" y2="{y + 6}" stroke="#cc0000" '
                'marker-end="url(#a)"/>'
            )
            out.append(f'<text x="{x + 26}" y="{y + 10}" font-size="11">is waited for</text>')
        return out


# ---- the five families --------------------------------------------------------------------------


def hopper_forward() -> Diagram:
    d = Diagram(
        "Hopper forward, 16 bits: two warpgroups take turns at the tensor cores",
        ["warp 1: describes tiles", "warp 0: TMA", "warpgroup 1: products", "warpgroup 1: rest"]
        + ["warpgroup 2: products", "warpgroup 2: rest"],
    )
    d.row(0, 0, (1.6, "tile i", "plan"), (1.6, "i+1", "plan"), (1.6, "i+2", "plan"))
    d.row(1, 1.6, (1.1, "Q", "load"), (1.3, "K2", "load"), (1.3, "K1", "load"), (1.3, "V2", "load"))
    d.row(1, 9.4, (1.3, "K0", "load"), (1.3, "V1", "load"))
    d.row(1, 20.8, (1.3, "V0", "load"), (1.1, "Q'", "load"), (1.3, "K'", "load"))
    for lane, at in ((2, 4.0), (4, 6.4)):
        d.row(lane, at, (2.4, "S2=Q·K2ᵀ", "qk"))
        d.row(lane + 1, at + 2.4, (4.4, "softmax 2", "soft"))
        for i, (scores, softmax, values) in enumerate(
            (
                ("S1=Q·K1ᵀ", "softmax 1", "O+=P2·V2"),
                ("S0=Q·K0ᵀ", "softmax 0", "O+=P1·V1"),
                ("S'=Q'·K'ᵀ", "softmax'", "O+=P0·V0"),
            )
        ):
            t = at + (7.2 if lane == 2 else 9.6) + 9.6 * i
            d.row(lane, t, (2.4, scores, "qk"), (2.4, values, "pv"))
            d.row(lane + 1, t + (2.4 if i == 2 else 4.8), (4.4, softmax, "soft"))
        d.row(lane + 1, t + 6.8, (2.2, "O/l, LSE", "store"))
    d.arrows += [
        (0, 1.6, 1, 1.6, ""),
        (1, 4.0, 2, 4.0, "full"),
        (2, 6.4, 4, 6.4, ""),
        (4, 8.8, 1, 9.4, "K slot empty"),
        (2, 16.0, 4, 16.0, ""),
        (4, 20.8, 1, 20.8, "V slot empty"),
        (2, 25.6, 4, 25.6, ""),
        (4, 30.4, 2, 30.4, "turn"),
    ]
    d.marks += [(4.0, "tile i"), (30.4, "tile i+1")]
    return d


def hopper_forward_e4m3() -> Diagram:
    d = Diagram(
        "Hopper forward, e4m3: V is transposed ahead, P·V of every block starts at 0",
        ["kernel ahead", "warp 0: TMA", "warpgroup 1: products", "warpgroup 1: rest"]
        + ["warpgroup 2: products", "warpgroup 2: rest"],
    )
    d.row(0, 0, (4, "V → Vᵀ, workspace", "load"))
    d.row(1, 5, (1.2, "Q", "load"), (1.4, "K2", "load"), (1.4, "K1", "load"), (1.4, "V2", "load"))
    d.row(1, 10.4, (0.8, "", ""), (1.4, "K0", "load"), (3.2, "", ""), (1.4, "V1", "load"))
    d.row(1, 19.6, (2, "", ""), (1.4, "V0", "load"))
    for lane, at in ((2, 7.6), (4, 9.2)):
        for i, n in enumerate((2, 1, 0)):
            t = at + 8.6 * i
            d.row(lane, t, (2.2, f"S{n}=QK{n}ᵀ", "qk"), (3, "", ""), (2.2, f"P{n}·V{n}", "pv"))
            d.row(lane + 1, t + 2.2, (3, f"softmax {n}", "soft"), (2.2, "", ""))
            d.row(lane + 1, t + 7.4, (1.2, "O+=", "soft"))
        d.row(lane + 1, at + 25.8, (2.4, "O/l, LSE", "store"))
    d.arrows += [
        (0, 4, 1, 5, "stream order"),
        (1, 7.6, 2, 7.6, "full"),
        (2, 9.8, 1, 11.2, "empty"),
        (1, 10.4, 2, 12.8, ""),
    ]
    return d


def hopper_backward() -> Diagram:
    d = Diagram(
        "Hopper backward, main kernel: one key tile, query block after query block",
        ["warpgroup 0, lane 0: TMA", "warpgroup 1: products", "warpgroup 1: rest"]
        + ["warpgroup 2: products", "warpgroup 2: rest", "warpgroup 0, 2 warps: adds"],
    )
    d.row(0, 0, (1, "K, V", "load"), (1.8, "Q, dO, 0", "load"), (1.8, "block 1", "load"))
    d.row(0, 17.4, (1.8, "block 2", "load"))
    for lane, late in ((1, 0.0), (3, 0.4)):
        for m in (0, 1):
            t = 2.8 + 14.4 * m + late
            d.row(lane, t, (2.2, f"S{m}=K·Qᵀ", "qk"), (2.4, f"dP{m}=V·dOᵀ", "qk"))
            d.row(lane + 1, t + 2.2, (2.4, f"P{m}", "soft"), (2, f"dS{m}", "soft"))
            d.row(lane, t + 6.6, (2.4, f"dV+=P{m}·dO", "pv"), (2.4, f"dQ{m}=dS{m}·K", "pv"))
            d.row(lane, t + 11.4, (2.6, f"dK+=dS{m}·Q", "pv"))
            d.row(lane + 1, t + 11.4, (1.4, f"dQ{m}", "store"))
        d.row(lane + 1, 32 + late, (2, "dK, dV", "store"))
    d.row(5, 16.0, (2, "add dQ0", "store"))
    d.row(5, 30.4, (2, "add dQ1", "store"))
    d.arrows += [
        (0, 2.8, 1, 2.8, "full"),
        (4, 9.8, 1, 9.9, "both have stored dS0"),
        (4, 15.6, 5, 16.0, ""),
        (1, 16.8, 0, 17.4, "Q0, dO0 empty"),
        (4, 24.2, 1, 24.3, "both have stored dS1"),
    ]
    return d


def ampere_forward() -> Diagram:
    d = Diagram(
        "Ampere forward: two slots (above) and one slot (below) of K and V",
        ["2 slots: cp.async", "warp 0", "warp 1", "1 slot: cp.async", "warp 0", "warp 1"],
    )
    d.row(0, 0, (1, "Q", "load"), (2, "K2, V2", "load"), (0.5, "", ""), (6, "K1, V1", "load"))
    d.row(0, 9.5, (3.4, "", ""), (6, "K0, V0", "load"))
    for lane, late in ((1, 0.0), (2, 0.3)):
        for i, n in enumerate((2, 1, 0)):
            t = 3.5 + 9.4 * i + late
            d.row(lane, t, (3.3, f"S{n}=Q·K{n}ᵀ", "qk"), (2.4, f"softmax {n}", "soft"))
            d.row(lane, t + 5.7, (3.3, f"O+=P{n}·V{n}", "pv"))
        d.row(lane, 31.7 + late, (2, "O/l, LSE", "store"))
    d.row(3, 0, (1, "Q", "load"), (1.6, "K2", "load"), (0.9, "", ""), (3.4, "V2", "load"))
    d.row(3, 6.9, (0.4, "", ""), (5.4, "K1", "load"), (0.5, "", ""), (3.4, "V1", "load"))
    d.row(3, 16.6, (0.4, "", ""), (5.4, "K0", "load"), (0.5, "", ""), (3.4, "V0", "load"))
    for lane, late in ((4, 0.0), (5, 0.3)):
        for i, n in enumerate((2, 1, 0)):
            t = 3.5 + 9.7 * i + late
            d.row(
                lane, t, (3.3, f"S{n}=Q·K{n}ᵀ", "qk"), (0.3, "", ""), (2.4, f"softmax {n}", "soft")
            )
            d.row(lane, t + 6, (3.3, f"O+=P{n}·V{n}", "pv"))
        d.row(lane, 32.6 + late, (2, "O/l, LSE", "store"))
    d.arrows += [
        (0, 3, 1, 3.5, ""),
        (0, 9.5, 1, 12.9, "wait, barrier"),
        (0, 18.9, 1, 22.3, "wait, barrier"),
        (3, 2.6, 4, 3.5, ""),
        (3, 6.9, 4, 7.1, "wait, barrier"),
        (3, 12.7, 4, 13.2, "wait, barrier"),
    ]
    return d


def ampere_backward() -> Diagram:
    d = Diagram(
        "Ampere backward, main kernel: one step of a pair of warps",
        ["cp.async", "first warp of the pair", "second warp"],
    )
    d.row(0, 0, (14, "Q, dO, LSE, δ of the next step", "load"))
    d.row(1, 0, (4, "Sᵀ=K·Qᵀ", "qk"), (2.4, "Pᵀ half 1", "soft"))
    d.row(1, 6.4, (4.6, "dV+=Pᵀ·dO, Pᵀ half 2", "pv"), (4, "dQ before, share", "pv"))
    d.row(1, 15.0, (2.6, "dV+= half 2", "pv"))
    d.row(2, 0, (4, "dQ before, share", "pv"), (4, "dPᵀ=V·dOᵀ", "qk"), (2.2, "dSᵀ half 1", "soft"))
    d.row(2, 10.2, (4.8, "dK+=dSᵀ·Q, dSᵀ half 2", "pv"), (2.6, "dK+= half 2", "pv"))
    d.arrows += [(1, 6.4, 2, 8.0, "P half 1"), (1, 8.7, 2, 12.6, "P half 2")]
    d.marks += [(0, "barrier: Q, dO here, dS of the step before complete"), (17.8, "barrier")]
    d.row(2, 17.8, (0.9, "…", "wait"))
    d.row(1, 17.8, (0.9, "…", "wait"))
    return d


# Page -> (diagram, architecture, direction, which dtypes its rows have).
FAMILIES = {
    "hopper_forward": (hopper_forward, "90", "fwd", ("bf16", "fp16")),
    "hopper_forward_e4m3": (hopper_forward_e4m3, "90", "fwd", ("e4m3",)),
    "hopper_backward": (hopper_backward, "90", "bwd", ("bf16", "fp16")),
    "ampere_forward": (ampere_forward, "80", "fwd", ("bf16", "fp16")),
    "ampere_backward": (ampere_backward, "80", "bwd", ("bf16", "fp16")),
}
OTHERS = ("dq_turns=8", "dq=atomic")  # the same in every row of a family


def rows_table(arch: str, op: str, dtypes: tuple[str, ...]) -> str:
    """The shipped rows of a family, those that differ in dtype and mask alone in one line."""
    groups: dict[tuple[str, ...], set[str]] = {}
    rows = gen_variants.in_profile(gen_variants.parse(gen_variants.TABLE.read_text()), "full")
    for row in rows:
        if (row.arch, row.op) != (arch, op) or row.dtype not in dtypes:
            continue
        dim = row.d_qk if row.d_qk == row.d_v else f"{row.d_qk}/{row.d_v}"
        items = [item for item in row.knobs.split() if item not in OTHERS]
        items += [f"cluster={row.cluster}"] * (row.cluster != "1")
        items += [f"sched={row.sched}"] * (row.sched != "static")
        knobs = " ".join(items)
        tag = row.id.removeprefix(row.stem()).removeprefix("_")
        key = (dim, tag, row.score, row.tile_m, row.tile_n, row.warps, row.stages, knobs)
        groups.setdefault(key, set()).add(row.mask)
    lines = [
        "| head dim | mask | score | query rows × keys | warps | slots | knobs |",
        "|---|---|---|---|---|---|---|",
    ]
    for (dim, tag, score, m, n, warps, stages, knobs), masks in groups.items():
        name = dim + (f" (`_{tag}`)" if tag else "")
        cells = (name, ", ".join(sorted(masks)), score, f"{m} × {n}", warps, stages, f"`{knobs}`")
        lines.append(f"| {' | '.join(cells if knobs else (*cells[:-1], '–'))} |")
    return "\n".join(lines)


def renewed(page: str, text: str) -> str:
    """A page with its table of rows as it should be."""
    _, arch, op, dtypes = FAMILIES[page]
    begin, end = text.find(ROWS_BEGIN), text.find(ROWS_END)
    if begin < 0 or end < begin:
        raise SystemExit(f"docs/schedules/{page}.md has no lines {ROWS_BEGIN} and {ROWS_END}.")
    table = rows_table(arch, op, dtypes)
    return f"{text[:begin]}{ROWS_BEGIN}\n{table}\n{text[end:]}"


def wanted() -> dict[Path, str]:
    """Every file that this writes, and its text."""
    files = {}
    for page, (draw, *_) in FAMILIES.items():
        files[FOLDER / f"{page}.svg"] = draw().svg()
        path = FOLDER / f"{page}.md"
        files[path] = renewed(page, path.read_text(encoding="utf-8"))
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what is old")
    check = parser.parse_args().check
    old = []
    for path, text in wanted().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and old:
        print(f"Old: {', '.join(old)}. Renew them: python3 tools/schedules.py")
        return 1
    print("\n".join(old) or "docs/schedules: up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
