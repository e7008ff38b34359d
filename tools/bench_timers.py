# SPDX-License-Identifier: BSD-3-Clause
# How long does a call take? Several callables in turn, by events, by graph replay or by CUPTI.
"""The clocks of the benchmark.

* events: CUDA events around calls made one after the other. What a program sees whose host is fast
  enough; where the host is slower than the kernel, the gaps count.
* graph: the same calls captured once and replayed, so that no host time falls between kernels.
* cupti: the time in which at least one kernel, copy or fill ran, as CUPTI (through torch's
  profiler) recorded it: no gaps at all. A diagnosis, not what a program sees.
* host: the CPU's own clock, for CPU tensors.

L2 hot: calls follow each other on the same tensors. L2 cold: 256 MB are written before each call,
outside of what is timed.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

KINDS = ("events", "graph", "cupti")
L2_FLUSH_BYTES = 256 << 20
FLUSH_KERNEL = "FillFunctor<signed char>"  # part of its name; no attention call fills int8


@dataclass
class Impl:
    """One way to compute a cell. `context` is entered around its calls (backend choice)."""

    name: str
    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    row: str | None = None
    deterministic: bool = False
    samples_ms: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Of the time per call in milliseconds; share 0.5 is the median."""
        ordered = sorted(self.samples_ms)
        if share == 0.5:
            return statistics.median(ordered)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


Sampler = Callable[[], float]  # milliseconds per call of one more sample


class Timer:
    """One clock, on one device."""

    def __init__(self, device: str, l2: str = "hot", kind: str = "events") -> None:
        self.cuda = device.startswith("cuda")
        if not self.cuda and kind != "events":
            raise ValueError(f"timer {kind} needs CUDA tensors, not {device}: leave it away.")
        self.name = kind if self.cuda else "host"
        self.l2 = l2
        self.flush: torch.Tensor | None = None
        self.stream = torch.cuda.Stream() if self.name == "graph" else None
        if self.cuda and l2 == "cold":
            self.flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device)

    def around(self) -> AbstractContextManager[Any]:
        """Entered around everything that is timed: graphs are captured on a stream of their own.

        A backward runs on the stream of its forward, so the forward must run there too.
        """
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def prepare(self, call: Callable[[], Any], calls: int) -> Sampler:
        """A sampler of `calls` calls in a row. Raises what a capture of `call` raises."""
        if not self.cuda:
            return lambda: _host_ms(call, calls)
        if self.name == "cupti":
            return lambda: self._recorded(call, calls)
        if self.name == "graph":
            replay, calls_of_one = self._captured(call, calls)
            return lambda: self._between_events(replay, calls // calls_of_one, calls_of_one)
        return lambda: self._between_events(call, calls, 1)

    def _between_events(self, run: Callable[[], Any], runs: int, calls: int) -> float:
        """Milliseconds per call; each run holds `calls` of them. Cold: each run is timed alone."""
        pairs = []
        for _ in range(runs if self.flush is not None else 1):
            if self.flush is not None:
                self.flush.fill_(1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(1 if self.flush is not None else runs):
                run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / (runs * calls)

    def _captured(self, call: Callable[[], Any], calls: int) -> tuple[Callable[[], Any], int]:
        """Replays a graph, and how many calls it holds: all of them, cold a single one."""
        held = 1 if self.flush is not None else calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(held):
                call()
        graph.replay()  # the first one also uploads it
        torch.cuda.synchronize()
        return graph.replay, held

    def _recorded(self, call: Callable[[], Any], calls: int) -> float:
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
            for _ in range(calls):
                if self.flush is not None:
                    self.flush.fill_(1)
                call()
            torch.cuda.synchronize()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and FLUSH_KERNEL not in event.name
        ]
        if not spans:
            raise RuntimeError("CUPTI recorded no kernel: is another profiler attached?")
        return covered(spans) / 1e3 / calls


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) spans: kernels that overlap count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _host_ms(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e3 / calls


def time_interleaved(
    impls: list[Impl], timer: Timer, repeats: int, sample_ms: float, max_calls: int = 50
) -> dict[str, str]:
    """Fills `samples_ms` of every implementation; one sample of each per round, order rotated.

    Returns why some cannot be timed by this timer, {name: reason}; they have no samples.
    """
    samplers: list[tuple[Impl, Sampler]] = []
    failed = {}
    for impl in impls:
        impl.samples_ms.clear()
        with impl.context():
            rough = _rough_ms(impl.call, timer)
            calls = max(1, min(max_calls, round(sample_ms / max(rough, 1e-4))))
            try:
                samplers.append((impl, timer.prepare(impl.call, calls)))
            except Exception as error:  # a call that cannot be captured must not stop the others
                first = (str(error) or "no text").splitlines()[0]
                failed[impl.name] = f"{type(error).__name__}: {first}"
                if timer.cuda:
                    torch.cuda.synchronize()
    for turn in range(repeats):
        for step in range(len(samplers)):
            impl, sample = samplers[(turn + step) % len(samplers)]
            with impl.context():
                impl.samples_ms.append(sample())
    return failed


def _rough_ms(call: Callable[[], Any], timer: Timer) -> float:
    """Of one call after a warm-up, to choose how many fill a sample."""
    if not timer.cuda:
        _host_ms(call, 2)
        return _host_ms(call, 2)
    timer._between_events(call, 2, 1)
    return timer._between_events(call, 2, 1)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """The collector would fall into single samples of microseconds."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
