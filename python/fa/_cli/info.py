# SPDX-License-Identifier: BSD-3-Clause
# What is installed here, what has been built, and what would run?
"""`python -m fa info`: the environment, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import fa
from fa import _abi, _backend, _lib, _shim

# Everything that changes what fa does, or where it looks.
VARIABLES = (
    *("FA_BACKEND", "FA_CACHE", "FA_LIBRARY", "FA_LOG", "FA_NVTX", "FA_TORCH_OPS"),
    *("FA_ARCHS", "FA_BUILD_DIR", "FA_CUTLASS_DIR", "FA_NVCC", "FA_ONLY", "FA_PROFILE"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "OMP_NUM_THREADS"),
)
PACKAGES = ("numpy", "triton", "transformers", "accelerate", "gguf", "matplotlib")


def run(arguments: Sequence[str], prog: str = "info") -> int:
    """The command. Returns its exit code."""
    argparse.ArgumentParser(
        prog=f"python -m fa {prog}", description="Prints the environment, for a bug report."
    ).parse_args(arguments)
    width = 12
    for name, value in report():
        first, *rest = value.splitlines() or [""]
        print(f"{name:<{width}}{first}".rstrip())
        for line in rest:
            print(" " * width + line)
    return 0


def report() -> Iterator[tuple[str, str]]:
    """(name, value) in reading order; a value may have several lines."""
    yield "fa", f"{fa.__version__} in {Path(fa.__file__).parent}"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.platform()}, {os.cpu_count()} CPUs"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, cuDNN {_cudnn()}"
    yield "packages", ", ".join(_versions()) or "none of " + ", ".join(PACKAGES)
    yield "driver", _driver()
    yield "GPUs", "\n".join(_gpus()) or "none visible to torch"
    yield "libfa.so", _library()
    yield "rows", "\n".join(_rows()) or "none"
    yield "CUDA ops", _implementation()
    yield "backend", f"{_backend.current()} (FA_BACKEND={os.environ.get('FA_BACKEND', '')})"
    given = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    yield "variables", "\n".join(given) or "none of " + ", ".join(VARIABLES)


def summary() -> str:
    """The first lines of the demo."""
    lines = [f"fa {fa.__version__}, torch {torch.__version__}, Python {platform.python_version()}"]
    lines += _gpus() or [f"no GPU; {os.cpu_count()} CPU cores"]
    lines.append(f"libfa.so: {_library().splitlines()[0]}")
    with_rows = list(_rows())
    lines.append(f"kernel rows: {len(with_rows)}" if with_rows else "kernel rows: none")
    return "\n".join(lines)


def device_name(device: torch.device) -> str:
    """For the title of a picture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _cudnn() -> str:
    version = torch.backends.cudnn.version() if torch.version.cuda else None
    return str(version or "none")


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi found"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return ", ".join(sorted(set(done.stdout.split()))) or "nvidia-smi names none"


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    lines = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index} {p.name}, capability {p.major}.{p.minor}, "
            f"{p.multi_processor_count} multiprocessors, {p.total_memory / 2**30:.0f} GiB"
        )
    return lines


def _library() -> str:
    try:
        _lib.load()
    except ImportError as error:
        return f"not usable: {error}"
    return f"{_lib.version()}, ABI {_abi.ABI_VERSION}, {_lib.path()}"


def has_rows() -> bool:
    """Whether this build holds any kernel."""
    return next(_rows(), None) is not None


def _rows() -> Iterator[str]:
    if not _lib.available():
        return
    for row in _lib.kernels_list():
        registers = f", {row['registers']} registers" if row["registers"] >= 0 else ""
        yield (
            f"{row['id']}: tile {row['tile_m']} x {row['tile_n']}, {row['threads']} threads, "
            f"{row['smem_bytes'] / 1024:.0f} KiB shared{registers}"
        )


def _implementation() -> str:
    kind, _, reason = _shim.implementation.partition(": ")
    if kind == "shim":
        return f"libfa_torch.so, {_lib.path().with_name('libfa_torch.so')}"
    return f"Python and ctypes ({reason})"
