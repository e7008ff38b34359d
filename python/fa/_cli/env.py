# SPDX-License-Identifier: BSD-3-Clause
# What is around fa here: compilers, GPUs and their state, packages, the clone? For a bug report.
"""`python -m fa env` and tools/collect_env.py.

Needs nothing but Python, and imports neither torch nor fa: a report is wanted most where those do
not load. What fa itself knows comes from `python -m fa info` in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["run"]

ROOT = Path(__file__).resolve().parents[3]  # of a clone; of an installed package something else
PACKAGES = (
    *("fa-kernels", "torch", "triton", "numpy", "transformers", "accelerate"),
    *("flash-attn", "flash-attn-3", "nvidia-cudnn-frontend", "nvidia-cutlass", "cuda-bindings"),
    *("cuda-core", "cmake", "ninja", "scikit-build-core", "pytest", "hypothesis", "matplotlib"),
)
PROGRAMS = (
    *(("nvcc", "--version"), ("ncu", "--version"), ("compute-sanitizer", "--version")),
    *(
        ("g++", "--version"),
        ("cmake", "--version"),
        ("ninja", "--version"),
        ("ccache", "--version"),
    ),
)
SMI_FIELDS = (
    *("name", "driver_version", "compute_cap", "memory.total", "memory.used", "power.limit"),
    *("clocks.sm", "clocks.max.sm", "temperature.gpu", "persistence_mode", "mig.mode.current"),
)
HIDDEN = re.compile(r"(?:TOKEN|KEY|SECRET|PASS|CREDENTIAL)", re.IGNORECASE)
NAMES = re.compile(r"^(?:FA_|CUDA_|CUDNN_|NVIDIA_VISIBLE|TORCH_|PYTORCH_|NCCL_|OMP_|PYTHONPATH$)")


def run(arguments: Sequence[str], prog: str = "python -m fa env") -> int:
    """The command. Returns its exit code."""
    argparse.ArgumentParser(
        prog=prog if " " in prog or prog.endswith(".py") else f"python -m fa {prog}",
        description="Prints what is around fa on this machine, for a bug report.",
    ).parse_args(arguments)
    for title, lines in sections():
        print(f"== {title}")
        print("\n".join(lines) or "none")
        print()
    return 0


def sections() -> Iterator[tuple[str, list[str]]]:
    """(title, lines) in reading order."""
    yield "fa", _fa()
    yield "system", _system()
    yield "GPUs (nvidia-smi)", _gpus()
    yield "programs", _programs()
    yield "packages", _packages()
    yield "clone", _clone()
    yield "variables", _variables()


def _output(
    *command: str, timeout: float = 60, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Status and the two streams of a command; (-1, the reason) where it does not run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        return -1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def _fa() -> list[str]:
    """`python -m fa info`, or why that fails."""
    folder = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (folder, os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "PYTHONPATH": path}
    command = (sys.executable, "-m", "fa", "info")
    status, text = _output(*command, timeout=300, environment=environment)
    lines = text.splitlines()
    if status != 0:  # the end of a traceback says what went wrong
        return [f"python -m fa info fails with status {status}:", *lines[-8:]]
    return lines


def _system() -> list[str]:
    lines = [f"{platform.platform()}, Python {platform.python_version()} ({sys.executable})"]
    names = re.findall(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.M)
    lines.append(f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs")
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.M)
    if memory:
        lines.append(f"{int(memory[1]) / 2**20:.0f} GiB of memory")
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', _read("/etc/os-release"), re.M)
    return [*lines, name[1]] if name else lines


def _read(name: str) -> str:
    try:
        return Path(name).read_text()
    except OSError:
        return ""


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ["no nvidia-smi on PATH"]
    query = f"--query-gpu={','.join(SMI_FIELDS)}"
    status, text = _output(program, query, "--format=csv,noheader")
    if status != 0:
        return [f"nvidia-smi fails with status {status}: {text}"]
    lines = []
    for number, line in enumerate(text.splitlines()):
        values = [value.strip() for value in line.split(",")]
        pairs = (f"{n} {v}" for n, v in zip(SMI_FIELDS, values, strict=False))
        lines.append(f"{number}: " + ", ".join(pairs))
    return lines


def _programs() -> list[str]:
    lines = []
    for name, option in PROGRAMS:
        found = shutil.which(name)
        if found is None:
            lines.append(f"{name}: not on PATH")
            continue
        _, text = _output(found, option)
        version = re.search(r"(?:release|version)\s+([\d.]+)|\b(\d+\.\d+[\d.]*)\b", text)
        word = next((g for g in version.groups() if g), "") if version else "unknown version"
        lines.append(f"{name}: {word.rstrip('.')} at {found}")
    return lines


def _packages() -> list[str]:
    lines = []
    for name in PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    return lines


def _clone() -> list[str]:
    if not (ROOT / "tools" / "variants.csv").is_file():
        return ["fa does not lie in a clone of its source"]
    status, commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if status != 0:
        return [f"{ROOT}, without git"]
    _, changed = _output("git", "-C", str(ROOT), "status", "--porcelain")
    count = len(changed.splitlines())
    return [f"{ROOT} at {commit}, {count} files changed or new"]


def _variables() -> list[str]:
    """Those that change what runs; values that may be secrets are not shown."""
    return [
        f"{name}={'(hidden)' if HIDDEN.search(name) else value}"
        for name, value in sorted(os.environ.items())
        if NAMES.match(name)
    ]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], "collect_env.py"))
