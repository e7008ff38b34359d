# SPDX-License-Identifier: BSD-3-Clause
# Does a deterministic backward repeat its bits; do graphs, streams and autograd agree?

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import gradients
import harness
import pytest
import torch
from harness import DEVICE, ON_CPU, randn
from test_determinism import repeat
from torch import Tensor

import fa
from cases import Case
from compare import Result, assert_bitwise, assert_result
from fa._layout import strides_like_order

MEDIUM = [
    Case(batch=2, heads_q=8, heads_k=2, dim=128, q=777, k=1100, causal=True),
    Case(batch=2, heads_q=8, dim=64, q=777, k=1100, dtype="fp16"),
    Case(heads_q=4, heads_k=2, dim=128, q=(3, 700, 321), k=(3, 700, 321), window=(128, 0)),
    Case(batch=2, heads_q=8, dim=120, dim_v=40, q=300, k=515, sinks="fp32", causal=True, dlse=True),
    Case(batch=2, heads_q=8, dim=64, q=1024, k=1024, window=(100, 30)),
    Case(batch=2, heads_q=8, heads_k=2, dim=96, q=777, k=1100, causal=True),
    Case(batch=2, heads_q=8, heads_k=2, dim=256, q=777, k=1100, causal=True),
    Case(batch=2, heads_q=8, dim=192, dim_v=128, q=777, k=1100, window=(300, 30)),
]
SMALL = [
    Case(heads_q=2, dim=64, q=129, k=257, causal=True),
    Case(heads_q=2, dim=128, q=193, k=300),
    Case(heads_q=4, heads_k=1, dim=128, q=(1, 65, 3), k=(70, 1, 129), causal=True),
    Case(heads_q=4, heads_k=1, dim=96, q=(1, 65, 3), k=(70, 1, 129), causal=True),
    Case(heads_q=2, dim=128, q=200, k=400, window=(50, 50), sinks="same"),
    Case(heads_q=2, dim=256, q=193, k=300, causal=True),
    Case(heads_q=2, heads_k=1, dim=192, dim_v=128, q=(129, 65), k=(257, 70), causal=True),
    Case(heads_q=2, dim=64, q=193, k=300, softcap=20.0),
    Case(heads_q=2, dim=128, q=200, k=400, causal=True, alibi="h"),
]


def runner(case: Case, backend: str) -> Callable[[], list[Tensor]]:
    inputs = case.make(DEVICE)
    out, lse = gradients.forward(inputs)

    def run() -> list[Tensor]:
        result = gradients.call(inputs, backend, out, lse, deterministic=True)
        return [t for name, t in result.items() if name not in ("out", "lse")]

    return run


def each_case(cases: list[Case]) -> pytest.MarkDecorator:
    held = [case for case in cases if ON_CPU or gradients.covered(case)]
    if not held:
        held = [pytest.param(None, marks=pytest.mark.skip("no backward row covers these"))]
    return pytest.mark.parametrize("case", held, ids=lambda case: getattr(case, "id", "none"))


def needed(case: Case, backend: str) -> None:
    if not (ON_CPU or gradients.covered(case, backend)):
        pytest.skip(f"{backend} has no backward row for {case.id}")


@gradients.each_backend()
@each_case(MEDIUM)
def test_100_runs(case: Case, backend: str) -> None:
    needed(case, backend)
    repeat(runner(case, backend), 2 if ON_CPU else 100)


# More heads than fit into a section: on Hopper the last section goes the other way round.
SECTIONS = [
    replace(case, batch=2, heads_q=2 if ON_CPU else 64, dim=dim, q=520, k=700)
    for dim in (64, 96, 128, 256)
    for case in (Case(causal=True), Case(window=(150, 90)))
]


@gradients.each_backend()
@each_case(SECTIONS)
def test_both_walks_over_the_rows(case: Case, backend: str) -> None:
    needed(case, backend)
    gradients.check_case(case, backend, deterministic=True)
    repeat(runner(case, backend), 2 if ON_CPU else 20)


@gradients.each_backend()
@each_case(SMALL)
def test_1000_runs_of_a_small_shape(case: Case, backend: str) -> None:
    needed(case, backend)
    repeat(runner(case, backend), 3 if ON_CPU else 1000)


@gradients.each_backend()
@each_case(MEDIUM[:2])
def test_100_runs_beside_a_busy_neighbour(case: Case, backend: str, cuda_only: None) -> None:
    """Another stream keeps part of the device busy, so that blocks start at other moments."""
    needed(case, backend)
    noise = torch.randn(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    run = runner(case, backend)

    def disturbed() -> list[Tensor]:
        with torch.cuda.stream(side):
            torch.mm(noise, noise)
        return run()

    repeat(disturbed, 100)
    side.synchronize()


# ---- autograd ------------------------------------------------------------------------------------

TRAINED = [
    Case(batch=2, heads_q=4, heads_k=2, q=130, k=200, dim=128, causal=True, dlse=True),
    Case(q=(70, 0, 130), k=(90, 5, 130), heads_q=4, heads_k=2, dim=128, sinks="fp32", dlse=True),
    Case(batch=2, q=130, k=200, dim=128, layout=("bhsd", "padded", "sbhd", "bhsd")),
    Case(q=33, k=66, dim=100, dim_v=60, causal=True, tag="odd"),
    Case(q=64, k=64, dim=128, layout=("bshd", "bshd", "bshd", "scalar")),
]


@gradients.each_backend()
@each_case(TRAINED)
def test_autograd_equals_the_raw_operator(case: Case, backend: str) -> None:
    needed(case, backend)
    inputs = harness.inputs_of(case)
    result = gradients.through_autograd(inputs, backend, deterministic=True)
    assert_result(result, gradients.right_for(inputs, result))
    raw = gradients.call(inputs, backend, result.out, result.lse, deterministic=True)
    for name, value in raw.items():
        assert_bitwise(name, value, dict(result.items())[name])
    for name in gradients.GRADIENTS:  # the gradient is dense in the order of its tensor
        like = getattr(inputs, name[1:])
        for whose in (raw,) if "odd_dim" in case.features else (raw, result):
            assert getattr(whose, name).stride() == strides_like_order(like, like.shape)


def leaves() -> list[Tensor]:
    return [randn(2, n, 4, 128, seed=n).requires_grad_() for n in (100, 130, 131)]


# Compiled graphs and recomputation run in autograd's thread, which takes the device's own backend:
# `fa.backend` holds for the thread that calls it.
def test_function_operator_and_compiled_agree() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa.attention(q, k, v, causal=True, deterministic=True)

    def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.fa.forward(q, k, v, causal=True, deterministic=True)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    q, k, _ = leaves()
    v = randn(2, 130, 4, 128, seed=7).requires_grad_()
    dout = randn(2, 100, 4, 128, seed=9)
    results = [
        torch.autograd.grad(f(q, k, v), (q, k, v), dout) for f in (function, operator, compiled)
    ]
    for other in results[1:]:
        for name, a, b in zip(gradients.GRADIENTS, results[0], other, strict=True):
            assert_bitwise(name, a, b)


def test_checkpoint_and_autocast() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k = (randn(2, n, 4, 128, dtype=torch.float32, seed=n).requires_grad_() for n in (100, 130))
    v = randn(2, 130, 4, 128, dtype=torch.float32, seed=5).requires_grad_()

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa.attention(q, k, v, causal=True, deterministic=True).float().square().sum()

    with torch.autocast(DEVICE, torch.bfloat16):
        plain = torch.autograd.grad(model(q, k, v), (q, k, v))
        again = torch.autograd.grad(checkpoint(model, q, k, v, use_reentrant=False), (q, k, v))
    for name, a, b in zip(gradients.GRADIENTS, plain, again, strict=True):
        assert a.dtype == torch.float32
        assert_bitwise(name, a, b)


@gradients.each_backend()
def test_double_backward_is_refused(backend: str) -> None:
    q, k, _ = leaves()
    v = randn(2, 130, 4, 128, seed=7).requires_grad_()
    with fa.backend(backend):
        (dq,) = torch.autograd.grad(fa.attention(q, k, v).float().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            dq.float().sum().backward()


def test_flops_of_a_step() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, _ = leaves()
    v = randn(2, 130, 4, 128, seed=7).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        fa.attention(q, k, v).float().sum().backward()
    product = 2 * 2 * 4 * 100 * 130 * 128
    assert counter.get_total_flops() == (2 + 5) * product


# ---- graphs, streams, memory ---------------------------------------------------------------------


@gradients.each_backend()
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("heads_k", [2, 80], ids=["few", "many"])  # tiles
@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
def test_graph_capture(
    dim: int, heads_k: int, backend: str, deterministic: bool, cuda_only: None
) -> None:
    """Captured once, replayed on other contents: counters and sums start anew each time."""
    heads = {"heads_q": max(4, heads_k), "heads_k": heads_k}
    case = Case(**heads, batch=2, q=200, k=300, dim=dim, causal=True, sinks="fp32")
    needed(case, backend)
    inputs = case.make(DEVICE, poison=0.0)
    out, lse = gradients.forward(inputs)
    gradients.call(inputs, backend, out, lse, deterministic=deterministic)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gradients.call(inputs, backend, out, lse, deterministic=deterministic)
    for seed in range(3):
        fresh = case.make(DEVICE, poison=0.0, seed=seed)
        for name in ("q", "k", "v", "dout"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        inputs.options["sinks"].copy_(fresh.options["sinks"])
        new_out, new_lse = gradients.forward(inputs)
        out.copy_(new_out)
        lse.copy_(new_lse)
        graph.replay()
        torch.cuda.synchronize()
        replayed = Result(out, lse, result.dq, result.dk, result.dv, result.dsinks)
        assert_result(replayed, gradients.right_for(fresh, replayed))


@gradients.each_backend()
@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
def test_two_streams(dim: int, backend: str, cuda_only: None) -> None:
    """Two backwards at a time have workspaces of their own, whether blocks stay or pair up."""
    case = Case(batch=2, heads_q=8, q=500, k=500, dim=dim, causal=True)
    needed(case, backend)
    runs = [runner(replace(case, tag=tag), backend) for tag in ("one", "two")]
    want = [run() for run in runs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in runs]
    got: list[list[Tensor]] = [[], []]
    for _ in range(5):
        for n, (stream, run) in enumerate(zip(streams, runs, strict=True)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got[n] = run()
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_bitwise("gradient", x, y)


def test_no_synchronisation(cuda_only: None) -> None:
    q, k, _ = leaves()
    v = randn(2, 130, 4, 128, seed=7).requires_grad_()
    loss = fa.attention(q, k, v).float().sum()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_of_a_step(cuda_only: None) -> None:
    """Beside gradients: dQ in fp32 and two floats a row, nothing that grows with Sq x Sk."""
    q, k, v = (randn(1, 8192, 8, 128, seed=n).requires_grad_() for n in range(3))
    out = fa.attention(q, k, v, causal=True)
    dout = torch.randn_like(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    peak = torch.cuda.max_memory_allocated() - before
    bytes_of_q = q.numel() * 2
    assert len(grads) == 3
    assert peak < (3 + 2) * bytes_of_q * 1.05 + 2**20
