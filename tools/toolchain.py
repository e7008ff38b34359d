#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""What to build for, and with what? One answer for CMake, the build backend and the tools.

`toolchain.py archs|nvcc|cutlass|cuobjdump` prints the answer, or fails with a sentence that says
what to do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ARCHS = ("80", "90a")
NVCC_MINIMUM = (12, 8)
CUTLASS_PACKAGE = "nvidia-cutlass==4.2.0.0"
NVCC_PACKAGES = tuple(
    f"nvidia-{name}==13.0.*"
    for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime")
)


class ToolchainError(Exception):
    """A sentence: what is missing or wrong, and what to do."""


def parse_archs(text: str) -> list[str]:
    """FA_ARCHS as a list in the order of ARCHS; 'none' and '' mean no kernels."""
    words = [w for w in re.split(r"[;,\s]+", text.strip()) if w]
    if [w.lower() for w in words] == ["none"]:
        return []
    for word in words:
        if word not in ARCHS:
            raise ToolchainError(
                f"FA_ARCHS={text}: {word!r} is not an architecture we have kernels for. Allowed: "
                f"{', '.join(ARCHS)} (joined by ';') or none. 80 serves every GPU from 8.0 on, "
                "90a is Hopper's own."
            )
    return [a for a in ARCHS if a in words]


def _capabilities() -> tuple[list[float], str]:
    """Compute capabilities of the GPUs found, or why there are none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return [], "no nvidia-smi on PATH"
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi failed: {error}"
    if done.returncode != 0:
        reason = (done.stdout + done.stderr).strip().split("\n")[0]
        return [], f"nvidia-smi failed: {reason}"
    return [float(c) for c in re.findall(r"^\s*(\d+\.\d+)\s*$", done.stdout, re.M)], ""


def archs_for(capabilities: list[float]) -> list[str]:
    """The Ampere kernels serve every GPU from 8.0 on, newer ones by PTX; Hopper has its own."""
    if any(9.0 <= c < 10.0 for c in capabilities):
        return ["80", "90a"]
    return ["80"] if any(c >= 8.0 for c in capabilities) else []


def default_archs() -> tuple[list[str], str]:
    """Architectures of the GPUs in this machine, and a line that says where the answer is from."""
    capabilities, reason = _capabilities()
    archs = archs_for(capabilities)
    found = ", ".join(str(c) for c in sorted(set(capabilities)))
    if archs:
        return archs, f"fa: kernels for {';'.join(archs)} (GPU of compute capability {found})."
    reason = f"GPU of compute capability {found}; kernels need 8.0 or newer" if found else reason
    return [], (
        f"fa: host library without GPU kernels ({reason}). "
        "Set FA_ARCHS='80;90a' to build them anyway."
    )


def wanted_archs(asked: str | None = None) -> tuple[list[str], str]:
    """`asked`, else the environment's FA_ARCHS, else the GPUs found; with a line that explains."""
    text = asked if asked is not None else os.environ.get("FA_ARCHS", "")
    if not text.strip() or text.strip().lower() == "auto":
        return default_archs()
    archs = parse_archs(text)
    if archs:
        return archs, f"fa: kernels for {';'.join(archs)} (FA_ARCHS)."
    return [], "fa: host library without GPU kernels (FA_ARCHS=none)."


def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    """Release of an nvcc, or None when it does not run."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else None


def _package_folders(name: str) -> list[Path]:
    """Folders of an importable package, found without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def find_nvcc() -> str | None:
    """FA_NVCC, CUDACXX, CUDA_HOME, the nvcc wheels, /usr/local/cuda, PATH: the first >= 12.8."""
    named = os.environ.get("FA_NVCC")
    if named:
        version = nvcc_version(named)
        if version is None or version < NVCC_MINIMUM:
            state = "does not run" if version is None else f"is release {version[0]}.{version[1]}"
            raise ToolchainError(
                f"FA_NVCC={named} {state}; nvcc 12.8 or newer is needed. "
                "Correct FA_NVCC, or unset it to search."
            )
        return named
    homes = [os.environ.get(v) for v in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [os.environ.get("CUDACXX")]
    candidates += [f"{home}/bin/nvcc" for home in homes if home]
    candidates += [str(p / "cu13/bin/nvcc") for p in _package_folders("nvidia")]
    candidates += ["/usr/local/cuda/bin/nvcc", shutil.which("nvcc")]
    for candidate in candidates:
        if candidate and (nvcc_version(candidate) or (0, 0)) >= NVCC_MINIMUM:
            return candidate
    return None


def cuda_library_folder(nvcc: str) -> str:
    """Folder of libcudart_static.a: the wheels keep it in lib, where nvcc does not look."""
    done = subprocess.run([nvcc, "-dryrun", "x.cu"], capture_output=True, text=True, timeout=60)
    match = re.search(r"^#\$ TOP=(.*)$", done.stderr + done.stdout, re.M)
    top = Path(match[1].strip()) if match else Path(nvcc).resolve().parent.parent
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (top / folder / "libcudart_static.a").exists():
            return str((top / folder).resolve())
    raise ToolchainError(
        f"{nvcc}: no libcudart_static.a in {top.resolve()}/lib64 or lib. Install the CUDA runtime "
        "beside the compiler (package nvidia-cuda-runtime for an nvcc from the Python wheels)."
    )


def find_cutlass() -> str | None:
    """CUTLASS' include folder: FA_CUTLASS_DIR, else the Python package, which is never imported."""
    named = os.environ.get("FA_CUTLASS_DIR")
    roots = [Path(named)] if named else _package_folders("cutlass_library")
    for root in roots:
        for include in (root, root / "include", root / "source/include"):
            if (include / "cute/tensor.hpp").exists():
                return str(include)
    if named:
        raise ToolchainError(
            f"FA_CUTLASS_DIR={named} holds no include/cute/tensor.hpp. Name a CUTLASS 4.2 tree, or "
            "unset it to use the Python package."
        )
    return None


def find_cuda_tool(name: str) -> str | None:
    """cuobjdump or nvdisasm: beside nvcc, on PATH, or in the Python wheels."""
    nvcc = find_nvcc()
    candidates = [str(Path(nvcc).parent / name)] if nvcc else []
    candidates += [shutil.which(name) or ""]
    candidates += [str(p / "cu13/bin" / name) for p in _package_folders("nvidia")]
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


def main(argv: list[str]) -> int:
    try:
        if argv == ["archs"]:
            archs, line = wanted_archs()
            print(line, file=sys.stderr)
            print(";".join(archs))
        elif argv == ["nvcc"]:
            nvcc = find_nvcc()
            if nvcc is None:
                raise ToolchainError(
                    "No nvcc 12.8 or newer found. Install CUDA, or `pip install "
                    f"{' '.join(NVCC_PACKAGES)}`, or set FA_NVCC to the compiler's path, or set "
                    "FA_ARCHS=none for the host library."
                )
            print(f"{nvcc};{cuda_library_folder(nvcc)}")
        elif argv == ["cutlass"]:
            include = find_cutlass()
            if include is None:
                raise ToolchainError(
                    "CUTLASS' headers were not found. `pip install --no-deps "
                    f"{CUTLASS_PACKAGE}`, or set FA_CUTLASS_DIR to a CUTLASS 4.2 tree."
                )
            print(include)
        elif len(argv) == 1 and argv[0] in ("cuobjdump", "nvdisasm"):
            print(find_cuda_tool(argv[0]) or "")
        else:
            raise ToolchainError("usage: toolchain.py archs|nvcc|cutlass|cuobjdump|nvdisasm")
    except ToolchainError as error:
        print(f"fa: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
