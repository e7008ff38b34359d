# SPDX-License-Identifier: BSD-3-Clause
# Does every tool that needs a GPU say so in one sentence, with exit status 2, where there is none?

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import machine
import toolchain

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable

# Every program under tools/ that needs a GPU, as one would start it.
TOOLS = {
    "bench.py": (PYTHON, "tools/bench.py"),
    "bench.py --timer": (PYTHON, "tools/bench.py", "--timer", "cupti", "--ops", "models"),
    "python -m fa bench": (PYTHON, "-m", "fa", "bench"),
    "python -m fa profile": (PYTHON, "-m", "fa", "profile", "sm90_fwd_bf16_d128_band"),
    "ncu/profile.sh": ("bash", "tools/ncu/profile.sh", "sm90_fwd_bf16_d128_band"),
    "ncu/one_call.py": (PYTHON, "tools/ncu/one_call.py", "sm90_fwd_bf16_d128_band"),
    "evolution.py": (PYTHON, "tools/evolution.py", "--quick"),
    "overhead.py": (PYTHON, "tools/overhead.py"),
    "fuzz.py": (PYTHON, "tools/fuzz.py", "--count", "1"),
    "train.py": (PYTHON, "tools/train.py", "--tiny", "--device", "cuda"),
    "driver.py": (PYTHON, "tools/driver.py"),
    "fp8_error.py": (PYTHON, "tools/fp8_error.py"),
    "fp8_cost.py": (PYTHON, "tools/fp8_cost.py"),
    "microbench/run.py": (PYTHON, "tools/microbench/run.py"),
    "gpu_check.sh": ("bash", "tools/gpu_check.sh", "quick"),
    "gpu_check.sh full": ("bash", "tools/gpu_check.sh", "full"),
    "sanitize.sh": ("bash", "tools/sanitize.sh", "quick"),
}


def without_gpu(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "python"), *sys.path])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHON": PYTHON}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **hidden, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("name", TOOLS)
def test_one_sentence_and_status_2(name: str) -> None:
    if "train.py" in name:
        pytest.importorskip("transformers", reason="transformers is not installed")
    done = without_gpu(*TOOLS[name])
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert "needs a CUDA GPU, and none can be used here: " in sentence
    assert sentence.endswith(".")


def test_the_microbenchmarks_themselves_say_it_too(tmp_path: Path) -> None:
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc 12.8 or newer here")
    program = str(tmp_path / "memory")
    flags = ["-std=c++20", "-gencode", "arch=compute_90a,code=sm_90a"]
    flags += [f"-L{toolchain.cuda_library_folder(nvcc)}", "-o", program]
    subprocess.run([nvcc, *flags, str(ROOT / "tools/microbench/memory.cu")], check=True)
    done = without_gpu(program)
    assert done.returncode == 2
    assert done.stderr.startswith("memory needs a Hopper GPU, and CUDA finds none here: ")
    for source in (ROOT / "tools/microbench").glob("*.cu"):
        assert f'no_hopper("{source.stem}")' in source.read_text()


def test_wrong_names_come_before_the_gpu() -> None:
    done = without_gpu(PYTHON, "tools/microbench/run.py", "nothing")
    assert done.returncode == 2
    assert "allowed are beside, memory, wgmma" in done.stderr


def test_a_driver_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:
            return 100

        def cuGetErrorName(self, status: int, name: object) -> int:
            name._obj.value = b"CUDA_ERROR_NO_DEVICE"  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Driver())
    assert machine.why_no_gpu() == "cuInit answers 100: CUDA_ERROR_NO_DEVICE"


@pytest.mark.parametrize(("gigabytes", "cores", "count"), [(141, 16, 13), (24, 16, 2), (80, 4, 4)])
def test_how_many_processes_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, cores: int, count: int
) -> None:
    class Driver:
        def cuDeviceGet(self, device: object, number: int) -> int:
            return 0

        def cuDeviceTotalMem_v2(self, size: object, device: object) -> int:
            size._obj.value = gigabytes * 10**9  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(machine, "why_no_gpu", lambda: "there is none")
    assert machine.processes() == 1
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(cores)))
    assert machine.processes() == count


def test_clocks_are_read_from_nvidia_smi_and_may_be_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert machine.parse_smi("1980, 3201, 45, 120.53\n") == machine.State(1980, 3201, 45, 121)
    assert machine.parse_smi("1980, [N/A], 45, [N/A]\n").memory_mhz is None
    assert machine.parse_smi("No devices were found\n") == machine.State()
    assert str(machine.State(1980, None, 45, None)) == (
        "SM 1980 MHz, memory unknown, temperature 45 °C, power unknown"
    )

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    monkeypatch.setenv("PATH", str(tmp_path))
    nobody = machine.Watch("0a-1b")
    assert (nobody.source, nobody.read()) == ("unknown", machine.State())
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$3" = --id=GPU-0a-1b ] && echo 1500, 3000, 60, 700\n')
    smi.chmod(0o755)
    watch = machine.Watch("0a-1b")
    assert (watch.source, watch.read()) == ("nvidia-smi", machine.State(1500, 3000, 60, 700))
    smi.write_text("#!/bin/sh\necho 1, 1, 1, 1\n")
    assert watch.read().celsius == 60, "one reading serves for some seconds"
