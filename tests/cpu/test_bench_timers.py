# SPDX-License-Identifier: BSD-3-Clause
# Do the benchmark's timers time what they say: events, graphs, CUPTI, hot and cold, in turn?

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from bench_timers import FLUSH_KERNEL, Impl, Timer, covered, time_interleaved


def test_overlapping_kernels_count_once() -> None:
    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.8)]) == 5.0
    assert covered([]) == 0.0


def test_a_call_that_cannot_be_captured_is_named_and_the_others_are_timed() -> None:
    class Choosy(Timer):
        def prepare(self, call, calls):
            if call is bad:
                raise RuntimeError("no capture\nof this")
            return super().prepare(call, calls)

    def bad() -> None:
        pass

    good = Impl("good", lambda: None)
    failed = time_interleaved([good, Impl("bad", bad)], Choosy("cpu"), 3, 0.01)
    assert failed == {"bad": "RuntimeError: no capture"}
    assert len(good.samples_ms) == 3
    with pytest.raises(ValueError, match="graph needs CUDA"):
        Timer("cpu", kind="graph")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.cuda with a stream whose events stand 3 ms apart; holds what was done, in order."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 3.0

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    class Stream:
        def wait_stream(self, other: object) -> None:
            done.append("wait")

    @contextlib.contextmanager
    def capture(graph: Graph, stream: Stream) -> Iterator[None]:
        done.append("capture")
        yield
        done.append("captured")

    fakes = {"Event": Event, "CUDAGraph": Graph, "graph": capture, "Stream": Stream}
    fakes |= {"stream": lambda s: contextlib.nullcontext(), "current_stream": Stream}
    fakes["synchronize"] = lambda: None
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return done


class Flush:
    def __init__(self, done: list[str]) -> None:
        self.done = done

    def fill_(self, value: int) -> None:
        self.done.append("flush")


def test_events_and_graphs_time_what_they_say(fake_gpu: list[str]) -> None:
    def call() -> None:
        fake_gpu.append("call")

    events = Timer("cuda")
    assert events.prepare(call, 3)() == 1.0, "3 ms for three calls"
    assert fake_gpu == ["event", "call", "call", "call", "event"]
    del fake_gpu[:]
    graphs = Timer("cuda", kind="graph")
    with graphs.around():
        sample = graphs.prepare(call, 2)
    assert fake_gpu == ["wait", "capture", "call", "call", "captured", "replay"]
    del fake_gpu[:]
    assert sample() == 1.5
    assert fake_gpu == ["event", "replay", "event"]
    for timer, one in ((events, "call"), (graphs, "replay")):
        timer.flush = Flush(fake_gpu)  # type: ignore[assignment]
        sample = timer.prepare(call, 2)
        del fake_gpu[:]
        assert sample() == 3.0, "each call alone, 3 ms"
        assert fake_gpu == ["flush", "event", one, "event"] * 2


def test_cupti_counts_kernels_and_not_the_flush(
    fake_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(name: str, start: float, end: float, kind: str = "CUDA") -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        device = getattr(torch.autograd.DeviceType, kind)
        return SimpleNamespace(name=name, time_range=span, device_type=device)

    class Profile:
        recorded = [
            event(f"void fill<at::native::{FLUSH_KERNEL}>", 0.0, 500.0),
            event("fa_fwd", 1000.0, 3000.0),
            event("fa_combine_parts", 2500.0, 4000.0),
            event("cudaLaunchKernel", 0.0, 9000.0, "CPU"),
        ]

        def __init__(self, activities: list[object], acc_events: bool) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA] and acc_events

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def events(self) -> list[SimpleNamespace]:
            return self.recorded

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    timer = Timer("cuda", kind="cupti")
    assert timer.prepare(lambda: None, 2)() == 1.5, "3 ms of kernels for two calls"
    Profile.recorded = []
    with pytest.raises(RuntimeError, match="CUPTI recorded no kernel"):
        timer.prepare(lambda: None, 1)()
