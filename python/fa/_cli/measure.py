# SPDX-License-Identifier: BSD-3-Clause
# How long does a call take, and how much memory does it need at its peak?
"""Time and peak memory of one call.

On a GPU: CUDA events, and the allocator's peak above what was allocated before the call. On the
CPU: the clock, and the peak resident set of the process above what it held before the call; each
call of the table runs in a process of its own (`in_own_process`), forked from one that has torch
imported and no threads yet, so that nothing left by an earlier call is counted or reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

MAX_REPEATS = 20


@dataclasses.dataclass
class Cost:
    """Of one call."""

    seconds: float
    peak_bytes: int | None  # None: this system does not tell
    difference: float | None = None  # largest difference to a reference, where there is one


class OutOfMemory(Exception):
    """The call needs more memory than there is."""


class TooSlow(Exception):
    """The call did not end within its limit."""


def cost(call: Callable[[], Any], device: torch.device, budget_s: float = 1.0) -> Cost:
    """Peak of the first call, median time of it or of as many more as fit into `budget_s`."""
    if device.type == "cuda":
        return _cost_on_gpu(call, device, budget_s)
    before = reset_peak()
    began = time.perf_counter()
    call()
    samples = [time.perf_counter() - began]
    peak = peak_since(before)
    while sum(samples) + samples[-1] < budget_s and len(samples) < MAX_REPEATS:
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    if len(samples) > 1:  # the first one also touched its memory for the first time
        samples = samples[1:]
    return Cost(statistics.median(samples), peak)


def _cost_on_gpu(call: Callable[[], Any], device: torch.device, budget_s: float) -> Cost:
    try:
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        once = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(device) - before
        samples = []
        for _ in range(max(3, min(MAX_REPEATS, int(budget_s / max(once, 1e-6))))):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e-3)
        return Cost(statistics.median(samples), peak)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise OutOfMemory from None


def reset_peak() -> int | None:
    """Lets the peak resident set begin anew. Returns the bytes held now, None if unknown."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory must not count as held
    try:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    except OSError:  # then only a process that never held more than now can tell
        held, peak = _status("VmRSS"), _status("VmHWM")
        return held if held is not None and peak is not None and peak <= held + (1 << 20) else None
    return _status("VmRSS")


def peak_since(held: int | None) -> int | None:
    """The peak resident set since `reset_peak` returned `held`, beyond it; None if unknown."""
    peak = _status("VmHWM")
    return None if peak is None or held is None else max(0, peak - held)


def _status(key: str) -> int | None:
    """A line of /proc/self/status in bytes; None where there is no such thing."""
    try:
        with open("/proc/self/status") as lines:
            for line in lines:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def free_bytes(device: torch.device) -> int:
    """Memory that a new tensor on `device` could take; on the CPU without swapping."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    folder = "/sys/fs/cgroup/"
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, _number(folder + limit) - _number(folder + usage))
    return free


def _number(file: str) -> int:
    with open(file) as text:
        return int(text.read())


def in_own_process(call: Callable[..., Cost], *arguments: Any, limit_s: float) -> Cost:
    """`call(*arguments)` in a process of its own, killed after `limit_s`.

    Raises TooSlow, OutOfMemory (also when the system killed the process), or RuntimeError with the
    text of whatever else went wrong.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fa"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, call, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise TooSlow
        kind, value = receiver.recv()
    except EOFError:
        raise OutOfMemory from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if kind == "memory":
        raise OutOfMemory
    if kind == "error":
        raise RuntimeError(value)
    return value


def _child(sender: Any, call: Callable[..., Cost], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send(("cost", call(*arguments)))
    except MemoryError:
        sender.send(("memory", None))
    except Exception as error:
        memory = "not enough memory" in str(error) or "can't allocate" in str(error)
        sender.send(("memory", None) if memory else ("error", f"{type(error).__name__}: {error}"))
    sys.stdout.flush()
