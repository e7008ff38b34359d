# SPDX-License-Identifier: BSD-3-Clause
# What do the demo's figures look like?
"""The table of the demo as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fa._cli.lengths import Line, Plan

STYLES = {"standard": ("standard attention", "#b5482a", "s"), "ours": ("fa", "#1f5fa8", "o")}


def write_plot(lines: list[Line], plan: Plan, where: str, path: Path) -> None:
    """Time and peak memory over N, both axes logarithmic. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    dtype = str(plan.dtype).removeprefix("torch.")
    figure.suptitle(
        f"Causal attention, batch 1, {plan.heads} heads of {plan.dim}, {dtype}, {where}"
    )
    _panel(left, lines, "seconds", 1e3, "time of one call [ms]")
    _panel(right, lines, "peak_bytes", 2.0**-20, "peak memory beyond q, k, v [MiB]")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axes: Any, lines: list[Line], quantity: str, scale: float, label: str) -> None:
    for field, (name, colour, marker) in STYLES.items():
        points = [
            (line.length, getattr(cost, quantity) * scale)
            for line in lines
            if (cost := getattr(line, field)) is not None and getattr(cost, quantity)
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker)
    ticks = [line.length for line in lines]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("sequence length N")
    axes.set_ylabel(label)
    axes.grid(True, which="major", alpha=0.3)
    if axes.lines:
        axes.legend()
