# SPDX-License-Identifier: BSD-3-Clause
# What limited the kernels of a report, and what changed since another one?
"""A table per kernel, a roofline and a comparison, from Nsight Compute's reports.

    python3 tools/ncu/ncu_table.py build/ncu/ROW.ncu-rep
    python3 tools/ncu/ncu_table.py new.ncu-rep --compare old.ncu-rep
    python3 tools/ncu/ncu_table.py build/ncu/*.ncu-rep --roofline roofline.png

REPORT is a .ncu-rep (read by PyPI's `ncu-report`, else by `ncu --import`) or a raw page saved as
.csv. FLOPs come from the .json that profile.sh writes beside a report: no counter sees those of
wgmma. The roofline's ceilings are the matrix product and the copy that docs/results/h200.jsonl
holds, measured, not those of a data sheet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench_cells
import ncu_reader
from ncu_reader import SECTOR_BYTES, Launch, Metric, ReportError
from resources import MAIN_KERNELS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "h200.jsonl"
TIME = "gpu__time_duration.sum"
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2_READ = "lts__t_sectors_srcunit_tex_op_read.sum"


@dataclass(frozen=True)
class Kernel:
    """One column: a launch and, if it does the call's arithmetic, the call's FLOPs."""

    launch: Launch
    flops: float | None = None

    def get(self, name: str) -> float | None:
        return self.launch.metrics.get(name)

    @property
    def dram_bytes(self) -> float | None:
        values = [self.get(name) for name in DRAM]
        return None if None in values else sum(v for v in values if v is not None)

    @property
    def tflops(self) -> float | None:
        ns = self.get(TIME)
        return self.flops / ns / 1e3 if self.flops and ns else None

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of DRAM."""
        size = self.dram_bytes
        return self.flops / size if self.flops and size else None


def read(path: Path) -> list[Kernel]:
    """The kernels of a report, with the FLOPs of the note beside it."""
    launches = ncu_reader.read_report(path)
    if not launches:
        raise ReportError(f"{path}: the report holds no kernel.")
    note_path, flops = path.with_suffix(".json"), None
    if note_path.is_file():
        flops = json.loads(note_path.read_text()).get("flops")
    return [
        Kernel(launch, flops if launch.label.split()[0] in MAIN_KERNELS else None)
        for launch in launches
    ]


def family(kernels: Sequence[Kernel]) -> str:
    """The metric set that fits: that of the first row's architecture, else sm90."""
    rows = [k.launch.row for k in kernels if k.launch.row]
    return rows[0][:4] if rows else "sm90"


# --- tables -------------------------------------------------------------------------------------


def shown(value: float | None, metric: str, unit: str = "") -> str:
    """A value in the unit a reader wants: µs, MB, GB, %, counts with a suffix."""
    if value is None:
        return "–"
    if metric == TIME:
        return f"{value / 1e3:.1f} µs"
    if "pct" in metric:
        return f"{value:.1f} %"
    if "bytes" in metric:
        return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
    if "sectors" in metric:
        return shown(value * SECTOR_BYTES, "bytes")
    if metric.endswith(".ratio") or "per_cycle" in metric:
        return f"{value:.2f}"
    for size, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.4g}{' ' + unit if unit and unit not in ('1', '%') else ''}"


def derived(kernels: Sequence[Kernel]) -> list[list[str]]:
    """What follows from several counters."""
    rows = []
    seconds = [(k.get(TIME) or 0) * 1e-9 for k in kernels]

    def add(title: str, cells: list[str]) -> None:
        if any(cell != "–" for cell in cells):
            rows.append([title, *cells])

    add("TFLOP/s", [f"{k.tflops:.0f}" if k.tflops else "–" for k in kernels])
    add("FLOPs per DRAM byte", [f"{k.intensity:.0f}" if k.intensity else "–" for k in kernels])
    rates = [
        f"{k.dram_bytes / s / 1e12:.2f} TB/s" if k.dram_bytes and s else "–"
        for k, s in zip(kernels, seconds, strict=True)
    ]
    add("DRAM rate", rates)
    l2 = [k.get(L2_READ) for k in kernels]
    add(
        "L2 read rate",
        [
            f"{n * SECTOR_BYTES / s / 1e12:.2f} TB/s" if n and s else "–"
            for n, s in zip(l2, seconds, strict=True)
        ],
    )
    return rows


def table(kernels: Sequence[Kernel], metrics: Sequence[Metric]) -> list[str]:
    """Markdown: one row per metric that some kernel has, one column per kernel."""
    rows = [["", *(k.launch.label for k in kernels)], ["---"] * (len(kernels) + 1)]
    group = ""
    for metric in metrics:
        if all(k.get(metric.name) is None for k in kernels):
            continue
        if metric.group != group:
            group = metric.group
            rows.append([f"**{group}**", *[""] * len(kernels)])
        units = [k.launch.units.get(metric.name, "") for k in kernels]
        cells = [
            shown(k.get(metric.name), metric.name, u) for k, u in zip(kernels, units, strict=True)
        ]
        rows.append([metric.title, *cells])
    rows += [["**derived**", *[""] * len(kernels)], *derived(kernels)]
    return ["| " + " | ".join(row) + " |" for row in rows]


def missing(kernels: Sequence[Kernel], metrics: Sequence[Metric]) -> list[str]:
    """Metrics of the set that no kernel has."""
    return [m.name for m in metrics if all(k.get(m.name) is None for k in kernels)]


def comparison(
    old: Sequence[Kernel], new: Sequence[Kernel], metrics: Sequence[Metric]
) -> list[str]:
    """Markdown: before, after and the change of every metric, kernel by kernel.

    Kernels pair up by function and row, in order; where only the row differs, by function.
    """
    lines: list[str] = []
    waiting = list(old)
    for kernel in new:
        same = [k for k in waiting if k.launch.label == kernel.launch.label]
        function = kernel.launch.label.split()[0]
        same = same or [k for k in waiting if k.launch.label.split()[0] == function]
        if not same:
            lines += ["", f"{kernel.launch.label}: the older report has no such kernel."]
            continue
        before = same[0]
        waiting.remove(before)
        title = kernel.launch.label
        if before.launch.label != title:
            title = f"{before.launch.label} → {title}"
        lines += ["", f"**{title}**", "", "| | before | after | change |", "|---|---|---|---|"]
        for metric in metrics:
            was, now = before.get(metric.name), kernel.get(metric.name)
            if was is None and now is None:
                continue
            cells = [
                shown(was, metric.name),
                shown(now, metric.name),
                change(was, now, metric.name),
            ]
            lines.append(f"| {metric.title} | " + " | ".join(cells) + " |")
    lines += [f"\n{k.launch.label}: the newer report has no such kernel." for k in waiting]
    return lines[1:]


def change(was: float | None, now: float | None, metric: str) -> str:
    """Points for percentages, else per cent of what it was."""
    if was is None or now is None:
        return "–"
    if "pct" in metric:
        return f"{now - was:+.1f} points"
    if was == 0:
        return "0" if now == 0 else "new"
    return f"{(now / was - 1) * 100:+.1f} %"


# --- roofline -----------------------------------------------------------------------------------


def ceilings(path: Path = RESULTS) -> tuple[float, float]:
    """Measured TFLOP/s of torch's matrix product and TB/s of its copy; ReportError without them."""
    lines = bench_cells.read_lines(path) if path.is_file() else []
    gemm = [line["tflops"] for line in lines if line["op"] == "gemm"]
    copy = [line["gbs"] / 1e3 for line in lines if line["op"] == "copy"]
    if not gemm or not copy:
        raise ReportError(
            f"{path} holds no line of the matrix product and the copy, the roofline's ceilings: "
            "`python3 tools/bench.py --ops gemm,copy --json FILE` measures them; name the file by "
            "--ceilings."
        )
    return max(gemm), max(copy)


def roofline(kernels: Sequence[Kernel], path: Path, peak: tuple[float, float]) -> int:
    """Draws the kernels whose FLOPs are known under the measured ceilings; returns how many.

    Raises ReportError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ReportError(
            f"{path}: a roofline needs matplotlib, which is not installed: pip install matplotlib."
        ) from None

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tflops, tbs = peak
    points = [k for k in kernels if k.tflops and k.intensity]
    figure, axis = plt.subplots(figsize=(7, 4.5))
    ridge = tflops / tbs
    right = max([ridge * 8, *(k.intensity * 2 for k in points if k.intensity)])
    left = min([ridge / 16, *(k.intensity / 2 for k in points if k.intensity)])
    axis.plot([left, ridge, right], [left * tbs, tflops, tflops], "k-", linewidth=1)
    axis.text(ridge * 0.9, tflops, f"bf16 product {tflops:.0f} TFLOP/s", ha="right", va="bottom")
    axis.text(left * 1.1, left * tbs * 1.3, f"copy {tbs:.2f} TB/s", rotation=0, va="bottom")
    for kernel in points:
        label = f"{kernel.launch.label}, {kernel.tflops:.0f}"
        axis.plot([kernel.intensity], [kernel.tflops], "o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("FLOPs per byte of DRAM")
    axis.set_ylabel("TFLOP/s")
    axis.grid(alpha=0.3)
    if points:
        axis.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
    return len(points)


# --- command line -------------------------------------------------------------------------------


def helpers(options: argparse.Namespace) -> int | None:
    """The questions of profile.sh; None where none was asked."""
    if options.have_ncu:
        print(ncu_reader.need_ncu())
        return 0
    if options.metrics:
        names = [m.name for m in ncu_reader.metric_set(options.metrics)]
        known, unknown = ncu_reader.known_metrics(names)
        if unknown:
            print(f"this ncu does not count {', '.join(unknown)} on this GPU.", file=sys.stderr)
        print(",".join(known))
        return 0
    if options.why:
        output = sys.stdin.read()
        reason = ncu_reader.complaint(output) or output.strip()[-2000:] or "ncu said nothing."
        print(f"{options.why}: nothing was profiled: {reason}", file=sys.stderr)
        return 0
    return None


def main(arguments: list[str] | None = None) -> int:
    """Exit status 2, with a sentence, where a report cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT", help=".ncu-rep or .csv")
    parser.add_argument("--compare", type=Path, help="an older report: before, after, change")
    parser.add_argument("--set", choices=ncu_reader.FAMILIES, help="metrics (default: the row's)")
    parser.add_argument("--roofline", type=Path, help="draw a roofline into this PNG")
    parser.add_argument("--ceilings", type=Path, default=RESULTS, help="JSON lines of bench.py")
    parser.add_argument("--have-ncu", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--metrics", choices=ncu_reader.FAMILIES, help=argparse.SUPPRESS)
    parser.add_argument("--why", metavar="ROW", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        status = helpers(options)
        if status is not None:
            return status
        if not options.reports:
            parser.error("which report? A .ncu-rep file, or a raw page saved as .csv.")
        kernels = [kernel for path in options.reports for kernel in read(path)]
        metrics = ncu_reader.metric_set(options.set or family(kernels))
        if options.compare:
            print("\n".join(comparison(read(options.compare), kernels, metrics)))
        else:
            print("\n".join(table(kernels, metrics)))
            absent = missing(kernels, metrics)
            if absent:
                print(f"\nNot in the report: {', '.join(absent)}.")
        if options.roofline:
            drawn = roofline(kernels, options.roofline, ceilings(options.ceilings))
            print(
                f"\n{options.roofline}: {drawn} of {len(kernels)} kernels, those whose FLOPs stand "
                "in a note beside the report and whose DRAM bytes were counted."
            )
    except ReportError as error:
        print(f"ncu_table.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
