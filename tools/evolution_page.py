# SPDX-License-Identifier: BSD-3-Clause
# How do measured lines become the page about attention's evolution, in two languages?
"""Writes docs/evolution.md, docs/evolution.zh.md and their plots from docs/results/evolution.jsonl.

    python3 tools/evolution_page.py            # write
    python3 tools/evolution_page.py --check    # status 1 where a page is older than the results

The texts are tools/evolution/page.en.tmpl and page.zh.tmpl; `{{name}}` stands for the block of that
name below. Both languages show the same figures and plots.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import evolution_lines
import evolution_tables as tables
import machine
from evolution_lines import Line, chosen
from evolution_tables import PageError, Words, column, columns, main_dim, words_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "evolution.jsonl"
TEMPLATES = {"en": "page.en.tmpl", "zh": "page.zh.tmpl"}
PAGES = {"en": "evolution.md", "zh": "evolution.zh.md"}
PLOTS = ("evolution_time.png", "evolution_memory.png", "evolution_bytes.png")
SMALL = "evolution_short_and_exact.png"
NEEDED = ("time", "error", "bytes")  # a page without these would have holes


def blocks(lines: list[Line], words: Words) -> dict[str, list[str]]:
    """What stands for each {{name}} of a template."""
    dim = main_dim(chosen(lines, "time"))
    made: dict[str, list[str]] = {
        "machine": tables.machine_line(lines, words),
        "claims": tables.claim_table(lines, words, dim),
        "time full": tables.time_table(lines, words, "forward", False, dim),
        "time causal": tables.time_table(lines, words, "forward", True, dim),
        "time short": tables.short_table(lines, words, dim),
        "time backward": tables.time_table(lines, words, "backward", False, dim),
        "memory forward": tables.memory_table(lines, words, "forward", dim),
        "memory backward": tables.memory_table(lines, words, "backward", dim),
        "memory line": tables.memory_line(lines, words),
        "dram": tables.bytes_table(lines, words, "dram"),
        "l2": tables.bytes_table(lines, words, "l2"),
        "errors": tables.error_table(lines, words),
        "ablations": tables.ablation_table(lines, words),
    }
    for name in (*PLOTS, SMALL):
        made[f"plot {name}"] = [f"![{name.removesuffix('.png')}](results/{name})"]
    return made


def page(template: str, lines: list[Line], words: Words) -> str:
    """The template with every {{name}} replaced; PageError for a name that is none."""
    found = blocks(lines, words)

    def block(match: re.Match[str]) -> str:
        if match[1] not in found:
            raise PageError(f"{{{{{match[1]}}}}}: allowed names are {', '.join(sorted(found))}.")
        return "\n".join(found[match[1]])

    return re.sub(r"\{\{([^}]+)\}\}", block, template)


# --- plots --------------------------------------------------------------------------------------


def plots(lines: list[Line], folder: Path) -> None:
    """Time, memory and bytes over the sequence length; English words, for both languages."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    words, dim = words_of("en"), main_dim(chosen(lines, "time"))

    def draw(
        name: str,
        panels: Sequence[tuple[str, list[Line], Callable[[Line], float | None]]],
        unit: str,
        *formulas: str,
    ) -> None:
        figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
        several = formulas or ("",) * len(panels)
        for axis, (title, some, value), formula in zip(axes.flat, panels, several, strict=True):
            for label in columns(some):
                mine = [one for one in some if column(one) == label]
                points = sorted((one["seqlen"], value(one)) for one in mine if value(one))
                if not points:
                    continue
                color = f"C{tables.ORDER.index(label)}"
                axis.plot(*zip(*points, strict=True), "o-", color=color, label=words[label])
                model = sorted((o["seqlen"], o[formula]) for o in mine if formula and o[formula])
                if model:
                    axis.plot(*zip(*model, strict=True), "--", color=color, alpha=0.6)
            axis.set_xscale("log", base=2)
            lengths = sorted({one["seqlen"] for one in some})
            axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
            axis.set_yscale("log")
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("sequence length")
            axis.set_ylabel(unit)
            axis.grid(alpha=0.3)
        axes.flat[0].legend(fontsize=6, framealpha=0.4)
        figure.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / name, dpi=90, metadata={"Software": None})
        plt.close(figure)

    def times(op: str, causal: bool) -> list[Line]:
        return tables.whole(lines, "time", op=op, causal=causal, head_dim=dim)

    def dram(one: Line) -> float | None:
        parts = (one["dram_read"], one["dram_written"])
        return None if None in parts else sum(parts)

    forward = chosen(lines, "bytes", op="forward", causal=False)
    rate = [
        (f"{op} {'causal' if causal else 'full'}, D{dim}", times(op, causal), _rate)
        for op, causal in (("forward", False), ("forward", True), ("backward", False))
    ]
    draw(PLOTS[0], rate, "TFLOP/s")
    memory = [
        (f"{op}, D{dim}: allocated by one call", times(op, False), _peak)
        for op in ("forward", "backward")
    ]
    draw(PLOTS[1], memory, "bytes", "model_memory", "model_memory")
    borders = [
        (f"DRAM, forward, D{dim}", forward, dram),
        (f"L2 → SM, forward, D{dim}", [o for o in forward if o["model_l2_read"]], _l2_read),
    ]
    draw(PLOTS[2], borders, "bytes (dashes: formula)", "model_dram", "model_l2_read")
    plot_small(lines, folder / SMALL, words)


def plot_small(lines: list[Line], path: Path, words: Words) -> None:
    """What one short sequence takes, and how far each answer is from fp64."""
    import matplotlib.pyplot as plt

    dim = main_dim(chosen(lines, "time"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6))
    short = [one for one in chosen(lines, "time", head_dim=dim) if tables.is_short(one)]
    for label in columns(short):
        points = sorted((o["seqlen"], o["median_ms"]) for o in short if column(o) == label)
        color = f"C{tables.ORDER.index(label)}"
        left.plot(*zip(*points, strict=True), "o-", color=color, label=words[label])
    lengths = sorted({one["seqlen"] for one in short})
    left.set_xscale("log", base=2)
    left.set_xticks(lengths, [str(n) for n in lengths])
    left.set_yscale("log")
    left.set_title(f"one sequence, forward, D{dim}", fontsize=9)
    left.set_xlabel("sequence length")
    left.set_ylabel("ms")
    left.grid(alpha=0.3)
    left.legend(fontsize=7)
    errors = {column(one): one["rms_error"] for one in chosen(lines, "error", head_dim=dim)}
    names = [name for name in tables.ORDER if name in errors]
    colors = [f"C{tables.ORDER.index(name)}" for name in names]
    right.bar(names, [errors[name] for name in names], color=colors)
    right.set_yscale("log")
    right.set_title(f"difference from fp64, D{dim}", fontsize=9)
    right.set_ylabel("root mean square")
    right.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def _rate(one: Line) -> float | None:
    return one["tflops"]


def _l2_read(one: Line) -> float | None:
    return one["l2_read"]


def _peak(one: Line) -> float | None:
    return one["peak_bytes"]


# --- command line -------------------------------------------------------------------------------


def pages(lines: list[Line]) -> dict[Path, str]:
    """Both pages; PageError where a kind of line is missing."""
    absent = [kind for kind in NEEDED if not chosen(lines, kind)]
    if absent:
        raise PageError(
            f"no lines of kind {', '.join(absent)}: `python3 tools/evolution.py --json FILE` "
            "measures all kinds on a GPU whose counters may be read."
        )
    made = {}
    for language, name in PAGES.items():
        template = (ROOT / "tools" / "evolution" / TEMPLATES[language]).read_text()
        made[ROOT / "docs" / name] = page(template, lines, words_of(language))
    return made


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 with --check where a page is stale; 2: no results, or no plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the lines to use")
    options = parser.parse_args(arguments)
    if not options.results.is_file():
        if options.check and not any((ROOT / "docs" / name).exists() for name in PAGES.values()):
            print(f"{options.results} does not exist and neither do the pages made from it.")
            return 0
        print(
            f"evolution_page.py: {options.results} does not exist; on a GPU tools/evolution.py "
            "--json writes it.",
            file=sys.stderr,
        )
        return 2
    lines = evolution_lines.read(options.results)
    try:
        made = pages(lines)
    except PageError as error:
        print(f"evolution_page.py: {options.results}: {error}", file=sys.stderr)
        return 2
    if options.check:
        stale = [
            path for path, text in made.items() if not path.is_file() or path.read_text() != text
        ]
        for path in stale:
            print(f"{path} does not follow from {options.results}: run tools/evolution_page.py.")
        return 1 if stale else 0
    machine.require_matplotlib("evolution_page.py")
    for path, text in made.items():
        path.write_text(text)
    plots(lines, ROOT / "docs" / "results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
