# SPDX-License-Identifier: BSD-3-Clause
# What did Nsight Compute count? Reports and recorded CSV as plain numbers, and the metric sets.
"""Reads `.ncu-rep` files and raw CSV pages; knows the metrics of tools/ncu/metrics_*.csv.

A report is read by PyPI's `ncu-report` where it is installed, else by `ncu --import`.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

SETS = Path(__file__).resolve().parent / "ncu"
FAMILIES = ("sm80", "sm90")
SECTOR_BYTES = 32
# Columns of a raw CSV page that are no metrics.
PLAIN = {"ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context"}
PLAIN |= {"Stream", "Block Size", "Grid Size", "Device", "CC", "Section Name"}


class ReportError(Exception):
    """A sentence: what could not be read or asked, and what to do."""


@dataclass(frozen=True)
class Metric:
    """One line of a set: ncu's name, the group it is shown in, and what it says in words."""

    name: str
    group: str
    title: str


@dataclass
class Launch:
    """One profiled kernel: its demangled name and every number, in base units."""

    name: str
    metrics: dict[str, float] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    @property
    def row(self) -> str | None:
        """The row of tools/variants.csv that the kernel's type names, if it is a row's kernel."""
        found = re.search(r"\bsm(?:80|90)_(?:fwd|bwd)_\w+", self.name)
        return found[0] if found else None

    @property
    def label(self) -> str:
        """Function and row, short enough for a column."""
        function = re.split(r"[<(]", self.name)[0].split()[-1].split("::")[-1]
        return f"{function} {self.row}" if self.row else function


def metric_set(family: str) -> list[Metric]:
    """The set of "sm80" or "sm90" rows; ReportError for another word."""
    if family not in FAMILIES:
        raise ReportError(f"set {family!r}: allowed are {' and '.join(FAMILIES)}.")
    with (SETS / f"metrics_{family}.csv").open(newline="") as file:
        return [
            Metric(line["metric"], line["group"], line["title"]) for line in csv.DictReader(file)
        ]


def find_ncu() -> str | None:
    """ncu on PATH or in the CUDA toolkit's usual place."""
    found = shutil.which("ncu")
    usual = Path("/usr/local/cuda/bin/ncu")
    return found or (str(usual) if usual.is_file() else None)


def need_ncu() -> str:
    """Path of ncu; ReportError with a sentence where there is none."""
    found = find_ncu()
    if found is None:
        raise ReportError(
            "ncu was not found: Nsight Compute comes with the CUDA toolkit; install it, or put the "
            "folder that holds ncu on PATH."
        )
    return found


def known_metrics(names: Iterable[str], chip: str | None = None) -> tuple[list[str], list[str]]:
    """`names` that this ncu counts on the chip (default: of GPU 0), and those it does not know."""
    command = [need_ncu(), "--query-metrics", "--query-metrics-collection", "profiling"]
    if chip:
        command += ["--chips", chip]
    done = subprocess.run(command, capture_output=True, text=True)
    bases = {line.split()[0] for line in done.stdout.splitlines() if line[:1].isalpha()}
    if len(bases) < 100:  # an ncu that cannot list them: let it judge the names itself
        return list(names), []
    names = list(names)
    # Metrics counted from machine code may be listed apart: then they are let through.
    listed = any("__sass_" in base for base in bases)
    known = [n for n in names if n.split(".")[0] in bases or ("__sass_" in n and not listed)]
    return known, [n for n in names if n not in known]


def complaint(output: str) -> str | None:
    """Why ncu counted nothing, a sentence, from what it printed; None where it does not say."""
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM): run as "
            "root, or set the driver's module option NVreg_RestrictProfilingToAdminUsers=0."
        )
    if "No kernels were profiled" in output:
        return "no kernel of that name was launched in the profiled range."
    errors = re.findall(r"==ERROR== (.*)", output)
    return errors[0].strip() if errors else None


# --- reading ------------------------------------------------------------------------------------


def number(text: str) -> float | None:
    """A cell as a number: "1,234.5" is one, "n/a" and "" are none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def read_csv(text: str) -> list[Launch]:
    """Launches of `ncu --csv --page raw --print-units base`, whose second line holds the units."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ReportError(
            'no line begins with "ID": this is not a raw page. Write one by `ncu --import REPORT '
            "--csv --page raw --print-units base`."
        )
    header, units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    launches = []
    for row in rows:
        if len(row) != len(header):
            continue
        cells = dict(zip(header, row, strict=True))
        launch = Launch(cells["Kernel Name"])
        for name, unit in zip(header, units, strict=True):
            value = number(cells[name])
            if name not in PLAIN and value is not None and "__" in name:
                launch.metrics[name], launch.units[name] = value, unit
        launches.append(launch)
    return launches


def read_report(path: Path) -> list[Launch]:
    """Every kernel of a report (.ncu-rep) or of a recorded raw page (.csv), in order of launch."""
    path = Path(path)
    if not path.is_file():
        raise ReportError(f"{path}: there is no such report.")
    if path.suffix == ".csv":
        return read_csv(path.read_text())
    if importlib.util.find_spec("ncu_report") is not None:
        return _by_package(path)
    if find_ncu() is None:
        raise ReportError(
            f"{path}: reading a report needs PyPI's package ncu-report (pip install ncu-report) or "
            "ncu itself, and neither was found."
        )
    command = [need_ncu(), "--import", str(path), "--csv", "--page", "raw", "--print-units", "base"]
    done = subprocess.run(
        [*command, "--print-kernel-base", "demangled"], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise ReportError(f"ncu cannot import {path}: {(done.stderr or done.stdout).strip()}")
    return read_csv(done.stdout)


def _by_package(path: Path) -> list[Launch]:
    package = importlib.import_module("ncu_report")
    context = package.load_report(str(path))
    launches = []
    for r in range(context.num_ranges()):
        part = context.range_by_idx(r)
        for a in range(part.num_actions()):
            action = part.action_by_idx(a)
            launch = Launch(action.name(action.NameBase_DEMANGLED))
            for name in action.metric_names():
                metric = action.metric_by_name(name)
                if (
                    metric is None
                    or not metric.has_value()
                    or metric.kind() == metric.ValueKind_STRING
                ):
                    continue
                launch.metrics[name], launch.units[name] = metric.as_double(), metric.unit()
            launches.append(launch)
    return launches
