# SPDX-License-Identifier: BSD-3-Clause
# Are the operators right citizens of torch on CUDA tensors: checks, compile, fakes, errors?

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import gradients
import harness
import pytest
import torch
from harness import DEVICE, ON_CPU, inputs_from, ints, randn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fa
from cases import Case
from compare import assert_bitwise, assert_result, expected

FORWARD = torch.ops.fa.forward


def dense(dim: int = 64) -> tuple[Tensor, ...]:
    return randn(2, 100, 4, dim), randn(2, 130, 2, dim, seed=1), randn(2, 130, 2, dim, seed=2)


OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 20, "window_right": 5},
    "scale": {"softmax_scale": 0.3, "num_splits": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("op", ["forward", "_forward"])
def test_opcheck(op: str, name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.fa, op).default, dense(), OPTIONS[name])


def test_opcheck_packed_and_sinks() -> None:
    q, k, v = randn(100, 4, 64), randn(130, 2, 64, seed=1), randn(130, 2, 64, seed=2)
    options = {"cu_seqlens_q": ints(0, 40, 100), "cu_seqlens_k": ints(0, 30, 130)}
    options |= {"sinks": randn(4, dtype=torch.float32), "max_seqlen_q": 60}
    torch.library.opcheck(torch.ops.fa._forward.default, (q, k, v), options)


def test_opcheck_out() -> None:
    q, k, v = dense()
    out, lse = torch.empty_like(q), torch.empty(2, 4, 100, device=DEVICE)
    torch.library.opcheck(
        torch.ops.fa.forward_out.default, (q, k, v), {"causal": True, "out": out, "lse": lse}
    )


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "qkv"])
def test_fake_strides_are_the_real_ones(layout: str) -> None:
    if layout == "qkv":
        q, k, v = randn(2, 100, 3, 4, 64).unbind(2)
    elif layout == "bhsd":
        q, k, v = (randn(2, 4, n, 64).transpose(1, 2) for n in (100, 130, 130))
    else:
        q, k, v = randn(2, 100, 4, 64), randn(2, 130, 4, 64), randn(2, 130, 4, 64)
    real = FORWARD(q, k, v, causal=True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        fake = FORWARD(*fakes, causal=True)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@harness.each_backend()
@pytest.mark.parametrize("entry", ["attention", "op"])
def test_compile_fullgraph(backend: str, entry: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if entry == "attention":
            return fa.attention(q * 1.0, k, v, causal=True) + 1
        return FORWARD(q * 1.0, k, v, causal=True)[0] + 1

    q, k, v = dense()
    with fa.backend(backend), torch.no_grad():
        eager = model(q, k, v)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_bitwise("out", compiled, eager)


def test_compile_with_inductor_and_graphs(cuda_only: None) -> None:
    """The default compiler, and mode "reduce-overhead", which captures CUDA graphs."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa.attention(q * 2.0, k, v, causal=True).sum(-1)

    q, k, v = dense()
    with torch.no_grad():
        eager = model(q, k, v)
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            again = compiled(q, k, v).clone()
    assert torch.allclose(again.float(), eager.float(), atol=0.05, rtol=0.02)


def test_compile_packed_with_changing_lengths() -> None:
    """cu_seqlens of other contents and other hints must not compile again and again."""
    from torch._dynamo.testing import CompileCounter  # no attribute of torch until it is imported

    counter = CompileCounter()

    def model(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        return fa.attention_varlen(q, k, v, cu, cu, longest, longest, causal=True)

    q, k, v = (randn(300, 4, 64, seed=n) for n in range(3))
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for longest in (100, 120, 140, 160, 180):
            cu = ints(0, longest, 300)
            assert_bitwise("out", compiled(q, k, v, cu, longest), model(q, k, v, cu, longest))
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations for five lengths"


def test_autocast_casts_to_a_kernel_dtype() -> None:
    q, k, v = (t.float() for t in dense())
    with torch.autocast(DEVICE, torch.bfloat16):
        out = fa.attention(q, k, v)
    assert out.dtype == torch.bfloat16


# --- gradients ----------------------------------------------------------------------------------


def test_gradient_is_refused_on_a_gpu(cuda_only: None) -> None:
    """Without a backward row the forward of a recording call runs, its backward says why not."""
    if gradients.rows():
        pytest.skip("this build holds backward rows")
    q, k, v = (t.requires_grad_() for t in dense())
    assert isinstance(fa.supports(q, k, v, causal=True), str)
    with pytest.raises(NotImplementedError, match="backward") as caught:
        fa.attention(q, k, v, causal=True).sum().backward()
    assert "cpu" in str(caught.value), "the sentence says what to do"
    assert q.grad is None
    with torch.no_grad():
        fa.attention(q, k, v, causal=True)


def test_gradient_through_the_torch_implementation() -> None:
    q, k, v = (t.requires_grad_() for t in dense())
    with fa.backend("cpu"):
        out = fa.attention(q, k, v, causal=True)
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want, _ = fa.reference.attention(*wide, causal=True)
    right = torch.autograd.grad(want.square().sum(), wide)
    for name, a, b in zip("qkv", grads, right, strict=True):
        assert (a.double() - b).abs().max() < 0.03 * b.abs().max(), f"d{name}"


def test_the_short_way_of_a_backward_equals_the_operator() -> None:
    """Autograd calls the kernel itself; under a mode that watches it calls fa::backward."""
    inputs = [t.requires_grad_() for t in dense()]
    if fa.supports(*inputs, causal=True) is not True:
        pytest.skip(f"no gradient here: {fa.supports(*inputs, causal=True)}")
    out = fa.attention(*inputs, causal=True, deterministic=True)
    dout = torch.randn_like(out)
    short = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        operator = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    assert counter.get_total_flops() > 0
    douts = torch.stack([dout, torch.zeros_like(dout)])
    batched = torch.autograd.grad(out, inputs, douts, retain_graph=True, is_grads_batched=True)
    for name, a, b, c in zip("qkv", short, operator, batched, strict=True):
        assert_bitwise(f"d{name}", a, b)
        assert_bitwise(f"d{name}, batched", c[0], b)
        assert not c[1].any()


# --- errors -------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "dtypes differ": (lambda q, k, v: FORWARD(q, k.half(), v), ValueError, "k"),
    "fp32 inputs": (
        lambda q, k, v: FORWARD(q.float(), k.float(), v.float()),
        (ValueError, NotImplementedError),
        "float32",
    ),
    "head dims differ": (lambda q, k, v: FORWARD(q, k[..., :32], v), ValueError, "32"),
    "key lengths differ": (lambda q, k, v: FORWARD(q, k, v[:, :-1]), ValueError, "129"),
    "batches differ": (lambda q, k, v: FORWARD(q[:1], k, v), ValueError, "2"),
    "rank": (lambda q, k, v: FORWARD(q[0], k, v), ValueError, "q"),
    "window": (lambda q, k, v: FORWARD(q, k, v, window_left=-2), ValueError, "-2"),
    "causal window": (
        lambda q, k, v: FORWARD(q, k, v, causal=True, window_right=4),
        ValueError,
        "4",
    ),
    "scale": (lambda q, k, v: FORWARD(q, k, v, softmax_scale=-1.0), ValueError, "-1"),
    "chunk": (lambda q, k, v: FORWARD(q, k, v, attention_chunk=-3), ValueError, "-3"),
    "cu_seqlens dtype": (
        lambda q, k, v: FORWARD(q[0], k[:1], v[:1], cu_seqlens_q=ints(0, 100).long()),
        ValueError,
        "cu_seqlens_q",
    ),
    "cu_seqlens device": (
        lambda q, k, v: FORWARD(q[0], k[:1], v[:1], cu_seqlens_q=ints(0, 100).cpu()),
        ValueError,
        "cu_seqlens_q",
    ),
    "k on the cpu": (lambda q, k, v: FORWARD(q, k.cpu(), v), ValueError, "k"),
    "last dim strided": (
        lambda q, k, v: FORWARD(q, randn(2, 130, 2, 128)[..., ::2], v),
        ValueError,
        "k",
    ),
    "row stride misaligned": (
        lambda q, k, v: FORWARD(q, randn(2, 130, 2, 68)[..., :64], v),
        ValueError,
        "68",
    ),
    "address misaligned": (
        lambda q, k, v: FORWARD(q, randn(2 * 130 * 2 * 64 + 1)[1:].view(2, 130, 2, 64), v),
        ValueError,
        "k",
    ),
    "sinks shape": (
        lambda q, k, v: FORWARD(q, k, v, sinks=randn(3, dtype=torch.float32)),
        ValueError,
        "sinks",
    ),
    "dropout": (lambda q, k, v: FORWARD(q, k, v, dropout_p=1.0), ValueError, "dropout"),
    "pages": (
        lambda q, k, v: FORWARD(q, k, v, page_table=ints(0).view(1, 1), seqused_k=ints(1)),
        NotImplementedError,
        "page",
    ),
    "descale": (
        lambda q, k, v: FORWARD(q, k, v, k_descale=randn(2, 2, dtype=torch.float32)),
        ValueError,
        "descale",
    ),
    "head dim": (
        lambda q, k, v: FORWARD(*(randn(1, 8, 1, 512) for _ in range(3))),
        NotImplementedError,
        "512",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_refused_by_name(name: str, cuda_only: None) -> None:
    call, error, text = BAD[name]
    q, k, v = dense()
    with pytest.raises(error) as caught:
        call(q, k, v)
    message = str(caught.value)
    assert text in message.lower(), message
    assert len(message) > 30, message
    assert "no kernel image" not in message
    assert_result(harness.call(inputs_from(q, k, v), "auto"), expected(inputs_from(q, k, v), False))


def test_outputs_of_a_wrong_shape_or_dtype_are_refused() -> None:
    q, k, v = dense()
    out, lse = torch.full_like(q, 5.0), torch.full((2, 4, 100), 5.0, device=DEVICE)
    for bad_out, bad_lse in (
        (out[:, :50], lse),
        (out.float()[..., :32], lse),
        (out, lse[..., :50]),
        (out, lse.double() if DEVICE == "cuda" else lse.half()),
    ):
        with pytest.raises(ValueError, match=r"out|lse"):
            torch.ops.fa.forward_out(q, k, v, out=bad_out, lse=bad_lse)
        assert (out == 5).all()
        assert (lse == 5).all()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="sm70"), fa.backend("sm70"):
        pass


def test_plan_is_named(cuda_only: None) -> None:
    q, k, v = dense()
    for backend in harness.backends():
        with fa.backend(backend):
            assert backend in fa.explain(q, k, v, causal=True)
            assert fa.supports(q, k, v, causal=True) is True
            capped = harness.covered(Case(causal=True, softcap=3.0), backend)
            assert (fa.supports(q, k, v, causal=True, softcap=3.0) is True) == capped


def test_fallback_to_an_ampere_row_is_named(cuda_only: None) -> None:
    """No Hopper row splits the keys of single heads: an Ampere row does, and the plan says so."""
    if set(harness.backends()) != {"sm80", "sm90"}:
        pytest.skip(f"needs rows of both architectures, {harness.backends()} run here")
    q, k, v = randn(100, 4, 64), randn(130, 4, 64, seed=1), randn(130, 4, 64, seed=2)
    options = {"cu_seqlens_q": ints(0, 40, 100), "cu_seqlens_k": ints(0, 30, 130), "num_splits": 2}
    plan = fa.explain(q, k, v, causal=True, **options)
    assert plan.split("\nrow ", 1)[1].split()[0].startswith("sm80_"), plan
    assert "fallback" in plan, plan
    assert "sm90_" in plan, "the Hopper row and its reason are named"
    with fa.backend("sm90"):
        assert isinstance(fa.supports(q, k, v, causal=True, **options), str)
        with pytest.raises(NotImplementedError, match="sm90"):
            fa.attention_varlen(q, k, v, causal=True, **options)
    with torch.no_grad():
        fa.attention_varlen(q, k, v, causal=True, **options)


def test_environment_variable_forces_a_backend(cuda_only: None) -> None:
    script = """
        import torch, fa
        q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
        print(fa.explain(q, q, q, causal=True))
        out = fa.attention(q, q, q, causal=True)
        want, _ = fa.reference.attention(q, q, q, causal=True)
        assert (out.double() - want).abs().max() < 3e-2
    """
    if "sm80" not in harness.backends():
        pytest.skip("this build holds no Ampere row")
    assert "sm80_" in _script(script, FA_BACKEND="sm80")


# --- both implementations of the operators --------------------------------------------------------

BOTH = """
    import hashlib, sys, torch, fa
    from fa import _shim
    assert _shim.implementation.split(":")[0] == sys.argv[1], _shim.implementation
    generator = torch.Generator("cuda").manual_seed(5)
    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")
    digest = hashlib.sha256()
    def add(*tensors):
        for t in tensors:
            digest.update(f"{tuple(t.shape)}{t.stride()}{t.dtype}".encode())
            digest.update(t.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    q, k, v = randn(2, 100, 4, 64), randn(2, 130, 2, 64), randn(2, 130, 2, 64)
    p, kp, vp = randn(100, 4, 64), randn(130, 2, 64), randn(130, 2, 64)
    cu_q, cu_k = ints(0, 40, 100), ints(0, 30, 130)
    sinks = randn(4, dtype=torch.float32)
    with torch.no_grad():
        for backend in sys.argv[2:]:
            with fa.backend(backend):
                add(*torch.ops.fa.forward(q, k, v, causal=True))
                add(*torch.ops.fa.forward(q, k, v, window_left=9, softmax_scale=0.2, sinks=sinks))
                add(fa.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v))
                add(fa.attention(q[..., :50], k[..., :50], v[..., :50], causal=True))
                out, lse = torch.empty_like(q), torch.empty(2, 4, 100, device="cuda")
                torch.ops.fa.forward_out(q, k, v, out=out, lse=lse)
                add(out, lse)
        add(*torch.ops.fa.forward(p, kp, vp, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True))
        add(*torch.ops.fa.forward(q, k, v, seqused_k=ints(3, 130), leftpad_k=ints(1, 100)))
        add(*torch.ops.fa.forward(q, k, v, kv_batch_idx=ints(1, 0), seqused_q=ints(0, 50)))
        add(*torch.ops.fa.forward(q, k, v, out_dtype=torch.float32, attention_chunk=32))
    for bad, error in (
        (dict(window_left=-2), ValueError),
        (dict(dropout_p=1.0), ValueError),
        (dict(causal=True, window_right=2), ValueError),
    ):
        for entry in (torch.ops.fa.forward, fa.attention):
            if entry is fa.attention and any("window" in name for name in bad):
                continue
            try:
                entry(q, k, v, **bad)
            except error as caught:
                digest.update(str(caught).encode())
            else:
                raise AssertionError(f"{bad} was accepted")
    print("digest", digest.hexdigest())
"""


def _script(text: str, *arguments: str, **environment: str) -> str:
    """The output of a fresh Python process that runs `text`; its failure fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _digest(implementation: str) -> str:
    output = _script(BOTH, implementation, *harness.backends(), FA_TORCH_OPS=implementation)
    return output.split("digest ")[1].strip()


def test_shim_and_ctypes_agree_in_every_bit_and_sentence(cuda_only: None) -> None:
    assert _digest("shim") == _digest("ctypes")


def test_the_rehearsal_is_labelled() -> None:
    """A run with FA_TEST_DEVICE=cpu says nothing about kernels; a GPU run must not be one."""
    assert (DEVICE == "cpu") == ON_CPU
    assert DEVICE in ("cpu", "cuda")
