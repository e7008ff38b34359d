# SPDX-License-Identifier: BSD-3-Clause
# Does a call keep to its stream, never wait, and survive capture in a CUDA graph?

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import harness
import pytest
import torch
from harness import inputs_from, ints, randn

import fa
from compare import Result, assert_bitwise, assert_result, expected

pytestmark = pytest.mark.usefixtures("cuda_only")
SLEEP = 200_000_000  # cycles: some 100 ms


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Any call of torch that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def packed(seed: int) -> tuple[torch.Tensor, ...]:
    return tuple(randn(400, 4, 64, seed=seed + n) for n in range(3))


@harness.each_backend()
@pytest.mark.parametrize("kind", ["dense", "causal", "packed"])
def test_capture_and_replay(backend: str, kind: str) -> None:
    """A replay computes from what the static inputs hold then, lengths included."""
    options: dict[str, object] = {"causal": kind != "dense"}
    if kind == "packed":
        static = packed(0)
        cu = ints(0, 100, 250, 400)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        backend = "auto" if backend == "sm90" else backend
    else:
        static = tuple(randn(2, 200, 4, 64, seed=n) for n in range(3))
    inputs = inputs_from(*static, **options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        harness.call(inputs, backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = harness.call(inputs, backend)
    for seed in (10, 20):
        for n, tensor in enumerate(static):
            tensor.copy_(randn(*tensor.shape, seed=seed + n))
        if kind == "packed":
            cu.copy_(ints(0, seed, 3 * seed, 390))
        graph.replay()
        eager = harness.call(inputs, backend)
        assert_bitwise("out", captured.out, eager.out)
        assert_bitwise("lse", captured.lse, eager.lse)
        assert_result(captured, expected(inputs, backward=False))


FIRST_USE = """
    import torch, fa
    torch.zeros(1, device="cuda").add_(1)
    for dim, causal in ((64, False), (128, True)):  # each the first use of its kernel
        q, k, v = (
            torch.randn(2, 200, 4, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with fa.backend("{backend}"), torch.cuda.graph(graph):
            out, lse = torch.ops.fa.forward(q, k, v, causal=causal)
        graph.replay()
        torch.cuda.synchronize()
        want, want_lse = fa.reference.attention(q, k, v, causal=causal)
        assert (out.double() - want).abs().max() < 3e-2, (out.double() - want).abs().max()
        assert (lse.double() - want_lse).abs().max() < 1e-3
    print("replayed")
"""


def run_script(text: str, **environment: str) -> str:
    """The output of a fresh Python process that runs `text`; its failure fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@harness.each_backend()
def test_first_use_inside_a_capture(backend: str) -> None:
    """Attributes are set and modules loaded while a stream captures: the capture must survive."""
    assert "replayed" in run_script(FIRST_USE.format(backend=backend))


@harness.each_backend()
def test_never_waits(backend: str, no_sync: None) -> None:
    q, k, v = (randn(2, 200, 4, 64, seed=n) for n in range(3))
    for options in ({}, {"causal": True}, {"window_left": 30}):
        harness.call(inputs_from(q, k, v, **options), backend)
    with fa.backend(backend):
        fa.attention(q, k, v, causal=True)


def test_packed_call_never_waits() -> None:
    q, k, v = packed(0)
    cu, used = ints(0, 100, 250, 400), ints(50, 150, 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fa.attention_varlen(q, k, v, cu, cu, causal=True, seqused_k=used)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@harness.each_backend()
def test_returns_before_the_device_is_done(backend: str) -> None:
    """torch's debug mode sees torch's own waits only; this sees every kind."""
    q, k, v = (randn(2, 200, 4, 64, seed=n) for n in range(3))
    inputs = inputs_from(q, k, v, causal=True)
    harness.call(inputs, backend)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    harness.call(inputs, backend)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the call waited for the device"
    torch.cuda.synchronize()


@harness.each_backend()
def test_side_stream_order(backend: str) -> None:
    """The kernel runs after what its stream holds, and no earlier than the data is there."""
    side = torch.cuda.Stream()
    want = [randn(2, 200, 4, 64, seed=n) for n in range(3)]
    q, k, v = (torch.full_like(t, float("nan")) for t in want)
    inputs = inputs_from(q, k, v, causal=True)
    right = expected(inputs_from(*want, causal=True), backward=False)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        for tensor, value in zip((q, k, v), want, strict=True):
            tensor.copy_(value)
        result = harness.call(inputs, backend)
    side.synchronize()
    assert_result(result, right)


@harness.each_backend()
def test_side_stream_does_not_wait_for_the_default_stream(backend: str) -> None:
    q, k, v = (randn(2, 200, 4, 64, seed=n) for n in range(3))
    inputs = inputs_from(q, k, v, causal=True)
    torch.cuda.synchronize()  # the inputs come from the default stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        first = harness.call(inputs, backend)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    default_done = torch.cuda.Event()
    default_done.record()
    with torch.cuda.stream(side):
        second = harness.call(inputs, backend)
        side_done = torch.cuda.Event()
        side_done.record()
    side_done.synchronize()
    assert not default_done.query(), "the call was ordered behind the default stream"
    torch.cuda.synchronize()
    assert_bitwise("out", second.out, first.out)


@harness.each_backend()
def test_two_streams_at_once(backend: str) -> None:
    """Calls that overlap share nothing: no workspace, no counter, no static buffer."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    problems = [
        inputs_from(*(randn(2, 700, 8, 128, seed=10 * s + n) for n in range(3)), causal=True)
        for s in range(2)
    ]
    alone = [harness.call(p, backend) for p in problems]
    torch.cuda.synchronize()
    results: list[list[Result]] = [[], []]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[n].append(harness.call(problems[n], backend))
    torch.cuda.synchronize()
    for n in range(2):
        for result in results[n]:
            assert_bitwise("out", result.out, alone[n].out)
            assert_bitwise("lse", result.lse, alone[n].lse)


@harness.each_backend()
def test_threads(backend: str) -> None:
    """Two host threads with a stream each."""
    problems = [
        inputs_from(*(randn(1, 300, 4, 64, seed=10 * s + n) for n in range(3)), causal=True)
        for s in range(2)
    ]
    alone = [harness.call(p, backend) for p in problems]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                results = [harness.call(problems[n], backend) for _ in range(100)]
                torch.cuda.current_stream().synchronize()
            for result in results:
                assert_bitwise("out", result.out, alone[n].out)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures


@harness.each_backend()
def test_first_call_of_a_thread(backend: str) -> None:
    """A thread that has made no CUDA call has no current context, which tensor maps need."""
    q, k, v = (randn(2, 300, 4, 64, seed=n) for n in range(3))
    out, lse = torch.empty_like(q), torch.empty(2, 4, 300, device="cuda")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with fa.backend(backend):
                torch.ops.fa.forward_out(q, k, v, causal=True, out=out, lse=lse)
        except BaseException as error:
            failures.append(error)

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not failures, failures
    torch.cuda.synchronize()
    alone = harness.call(inputs_from(q, k, v, causal=True), backend)
    assert_bitwise("out", out, alone.out)
    assert_bitwise("lse", lse, alone.lse)


@pytest.mark.alone
@harness.each_backend()
def test_memory_comes_from_torch_and_goes_back(backend: str) -> None:
    q, k, v = (randn(4, 500, 8, 64, seed=n) for n in range(3))
    inputs = inputs_from(q, k, v, causal=True)
    harness.call(inputs, backend)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        harness.call(inputs, backend)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.mem_get_info()[0] >= free - (32 << 20), "memory outside of torch's allocator"
