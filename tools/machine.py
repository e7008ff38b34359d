# SPDX-License-Identifier: BSD-3-Clause
# Is a GPU here, at which clocks does it run, and how hot is it? Needs no package, not even torch.
"""What tools ask about the machine.

    python3 tools/machine.py            # the GPUs, their clocks and temperature
    python3 tools/machine.py require X  # exit status 2 and one sentence, in the name of tool X
    python3 tools/machine.py processes  # how many that test or check may run side by side

A tool that needs a GPU calls `require_gpu` first, so that all of them say the same.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

NO_GPU = 2  # the exit status of a tool that needs a GPU where there is none


def why_no_gpu(torch_too: bool = False) -> str | None:
    """Why no CUDA GPU can be used here; None where one can. torch_too: torch must see it as well.

    Reads CUDA_VISIBLE_DEVICES as CUDA does.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the NVIDIA driver's libcuda.so.1 is not installed"
    status = driver.cuInit(0)
    if status != 0:
        return f"cuInit answers {status}: {_error_name(driver, status)}"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value < 1:
        return "CUDA counts no device"
    if torch_too:
        import torch

        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} cannot use CUDA"
    return None


def _error_name(driver: Any, status: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"unknown error").decode()


def require_gpu(tool: str, instead: str = "", torch_too: bool = False) -> None:
    """Ends the program with NO_GPU and one sentence where no GPU can be used.

    `instead`: what works without one, as the end of the sentence.
    """
    reason = why_no_gpu(torch_too)
    if reason is not None:
        end = f"; {instead}" if instead else ""
        print(
            f"{tool} needs a CUDA GPU, and none can be used here: {reason}{end}.", file=sys.stderr
        )
        raise SystemExit(NO_GPU)


PROCESS_BYTES = 10 << 30  # what a process of the tests may hold on the GPU


def processes() -> int:
    """As many as the cores and the memory of the first GPU carry, at most 16; 1 without a GPU."""
    if why_no_gpu() is not None:
        return 1
    driver, device, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    cores = len(os.sched_getaffinity(0))
    return max(1, min(16, cores, size.value // PROCESS_BYTES))


def require_matplotlib(tool: str) -> None:
    """Ends the program with status 2 and one sentence where no plot can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        print(
            f"{tool} needs matplotlib, which is not installed: pip install matplotlib. "
            "Nothing was written.",
            file=sys.stderr,
        )
        raise SystemExit(2)


# --- clocks and temperature ---------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """One reading; None where it is not known."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    celsius: int | None = None
    watts: int | None = None

    def __str__(self) -> str:
        parts = (
            ("SM", self.sm_mhz, "MHz"),
            ("memory", self.memory_mhz, "MHz"),
            ("temperature", self.celsius, "°C"),
            ("power", self.watts, "W"),
        )
        return ", ".join(
            f"{name} {value} {unit}" if value is not None else f"{name} unknown"
            for name, value, unit in parts
        )


SMI_QUERY = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
SMI_SECONDS = 10.0  # a reading of nvidia-smi takes a good part of a second: one serves that long


class Watch:
    """Reads clocks, temperature and power of one GPU; never sets anything.

    By NVML, which the driver brings; else by nvidia-smi; else everything is unknown. `uuid` as
    torch names the device; None is the first one.
    """

    def __init__(self, uuid: str | None = None) -> None:
        self._uuid = None if uuid is None else "GPU-" + uuid.removeprefix("GPU-")
        self._nvml, self._handle = _open_nvml(self._uuid)
        self._smi = None if self._nvml is not None else shutil.which("nvidia-smi")
        self._last, self._last_time = State(), -SMI_SECONDS

    @property
    def source(self) -> str:
        """Who answers: "NVML", "nvidia-smi" or "unknown"."""
        return "NVML" if self._nvml is not None else "nvidia-smi" if self._smi else "unknown"

    def read(self) -> State:
        """The state now (of nvidia-smi: at most SMI_SECONDS old)."""
        if self._nvml is not None:
            return State(
                self._number("nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
                self._number("nvmlDeviceGetClockInfo", 2),  # NVML_CLOCK_MEM
                self._number("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
                self._number("nvmlDeviceGetPowerUsage", scale=1000),  # milliwatts
            )
        if self._smi is not None and time.monotonic() - self._last_time >= SMI_SECONDS:
            self._last, self._last_time = self._ask_smi(self._smi), time.monotonic()
        return self._last

    def _number(self, function: str, *which: int, scale: int = 1) -> int | None:
        value = ctypes.c_uint()
        status = getattr(self._nvml, function)(self._handle, *which, ctypes.byref(value))
        return round(value.value / scale) if status == 0 else None

    def _ask_smi(self, program: str) -> State:
        command = [program, f"--query-gpu={SMI_QUERY}", "--format=csv,noheader,nounits"]
        command += [f"--id={self._uuid or 0}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return State()
        return parse_smi(done.stdout)


def parse_smi(text: str) -> State:
    """The first line of `nvidia-smi --query-gpu=SMI_QUERY --format=csv,noheader,nounits`."""
    lines = text.strip().splitlines()
    words = [word.strip() for word in lines[0].split(",")] if lines else []
    if len(words) != len(SMI_QUERY.split(",")):
        return State()
    numbers: list[int | None] = []
    for word in words:
        try:
            numbers.append(round(float(word)))
        except ValueError:  # "[N/A]"
            numbers.append(None)
    return State(*numbers)


def _open_nvml(uuid: str | None) -> tuple[Any, Any]:
    """NVML and the handle of a device, or None twice."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() != 0:
        return None, None
    found = -1
    if uuid is not None:
        found = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
    if found != 0:
        found = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
    return (nvml, handle) if found == 0 else (None, None)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["require"] and len(arguments) == 2:
        require_gpu(arguments[1])
        return 0
    if arguments == ["processes"]:
        print(processes())
        return 0
    if arguments:
        asked = arguments[0] in ("-h", "--help")
        usage = "usage: machine.py [require TOOL | processes]"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    reason = why_no_gpu()
    watch = Watch()
    print(f"GPU: {'usable' if reason is None else 'none, ' + reason}")
    print(f"{watch.read()} (asked: {watch.source})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
