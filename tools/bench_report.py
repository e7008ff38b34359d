# SPDX-License-Identifier: BSD-3-Clause
# How does one run look as a page or a picture?
"""A page without other files (HTML, bars drawn as SVG), or a PNG plot of the forward table.

python3 tools/bench_report.py docs/results/h200.jsonl page.html
python3 tools/bench_report.py docs/results/h200.jsonl plot.png     # needs matplotlib
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterable
from pathlib import Path

import perf_page
from bench_cells import Record, by_cell, cell_label, is_ours, read_lines
from bench_tables import OTHER_OPS, columns_of, figure, other_table

SUFFIXES = (".html", ".png")
COLORS = ("#1b6ca8", "#56a3d9", "#8fc1e3", "#0b3c5d", "#d98e04", "#a33b20", "#6b7f3a", "#7d5ba6")
BAR, GAP, LEFT, WIDTH = 14, 10, 440, 480  # pixels

STYLE = """
body { font: 14px/1.5 sans-serif; margin: 2em auto; max-width: 70em; color: #222; }
table { border-collapse: collapse; } td, th { padding: 0.15em 0.7em; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr:nth-child(even) { background: #f4f4f4; }
svg text { font: 12px sans-serif; }
"""


def page(lines: list[Record], notes: Iterable[str] = ()) -> str:
    """The HTML page of one run."""
    first = lines[0]
    about = (
        f"{first['gpu']}, driver {first['driver']}, torch {first['torch']}, commit "
        f"{first['commit'][:12]}, {first['date']}, timer {first['timer']}, L2 {first['l2']}. "
        "Bars: TFLOP/s of the median; lines on them: from the 80th to the 20th percentile of the "
        f"time. {_machine(lines)}"
    )
    parts = [
        "<!doctype html><meta charset=utf-8><title>fa bench</title>",
        f"<style>{STYLE}</style>",
    ]
    parts += ["<h1>Attention on this machine</h1>", f"<p>{html.escape(about)}</p>"]
    for op in dict.fromkeys(line["op"] for line in lines if line["op"] not in OTHER_OPS):
        cells = by_cell(lines, op)
        parts += [f"<h2>{html.escape(op)}</h2>", bars(list(cells.values()), columns_of(cells))]
    parts.append(_table(other_table(lines)))
    parts += [f"<p>{html.escape(note)}</p>" for note in notes]
    return "\n".join(parts) + "\n"


def _machine(lines: list[Record]) -> str:
    """The range of clock and temperature over the run."""
    words = []
    for name, title, unit in (("sm_mhz", "SM clock", "MHz"), ("celsius", "temperature", "°C")):
        values = [x for line in lines for x in line[name] or () if x is not None]
        span = f"{min(values)} to {max(values)} {unit}" if values else "unknown"
        words.append(f"{title} {span}")
    return ", ".join(words) + "."


def bars(cells: list[dict[str, Record]], names: list[str]) -> str:
    """One group of horizontal bars per cell, ours in blues."""
    top = max((r["tflops"] or 0.0 for columns in cells for r in columns.values()), default=0.0)
    if not top:
        return ""
    ours = [name for name in names if is_ours(name)]
    colors = dict(zip([*ours, *(n for n in names if n not in ours)], _palette(ours), strict=False))
    shapes, y = [], 0
    for columns in cells:
        label = html.escape(cell_label(next(iter(columns.values()))))
        shapes.append(f'<text x="{LEFT - 8}" y="{y + BAR - 3}" text-anchor="end">{label}</text>')
        for name, line in columns.items():
            x = LEFT + _length(line["tflops"], top)
            shapes.append(
                f'<rect x="{LEFT}" y="{y}" width="{x - LEFT:.1f}" height="{BAR - 2}" '
                f'fill="{colors.get(name, COLORS[-1])}"/>'
                f'<text x="{x + 6:.1f}" y="{y + BAR - 3}">{html.escape(figure(line))} '
                f"{html.escape(name)}</text>" + _spread(line, y, top)
            )
            y += BAR
        y += GAP
    size = f'width="{LEFT + WIDTH + 220}" height="{y}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>' + "".join(shapes) + "</svg>"


def _palette(ours: list[str]) -> list[str]:
    """Blues for ours, the other colors for the peers."""
    return [*COLORS[:4], *COLORS[4:]] if len(ours) >= 4 else [*COLORS[: len(ours)], *COLORS[4:]]


def _length(tflops: float | None, top: float) -> float:
    return WIDTH * (tflops or 0.0) / top


def _spread(line: Record, y: int, top: float) -> str:
    """A line from the rate at p80 to the rate at p20."""
    if not (line["p20_ms"] and line["p80_ms"] and line["tflops"]):
        return ""
    low, high = (
        LEFT + _length(line["tflops"] * line["median_ms"] / line[name], top)
        for name in ("p80_ms", "p20_ms")
    )
    middle = y + BAR / 2 - 1
    return f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="#222"/>'


def _table(markdown: list[str]) -> str:
    """A Markdown table as HTML."""
    rows = [[html.escape(c.strip()) for c in line.strip("|").split("|")] for line in markdown]
    cells = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows if "---" not in row[0]]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>" if cells else ""


def write(path: Path, lines: list[Record], notes: Iterable[str] = ()) -> None:
    """Writes the page or the plot; ValueError where there is nothing to show."""
    if not lines:
        raise ValueError(f"{path}: nothing was measured, so there is nothing to show.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        perf_page.plot(lines, path)
    else:
        path.write_text(page(lines, notes))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lines", type=Path, help="what bench.py --json wrote")
    parser.add_argument("report", type=Path, help="a page .html or a plot .png")
    options = parser.parse_args(arguments)
    if options.report.suffix not in SUFFIXES:
        parser.error(f"{options.report} must end in {' or '.join(SUFFIXES)}.")
    write(options.report, read_lines(options.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
