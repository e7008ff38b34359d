# SPDX-License-Identifier: BSD-3-Clause
# Does libfa_torch.so read a call as the Python implementation does, without a GPU to run it on?
"""libfa_torch.so in a dry run: CPU tensors, every check and the plan for an H200, no launch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fa
import host_build
from fa import _abi, _backend, _buffers, _cuda, _layout, _lib, _raw, _schemas, _shim, _validate, ops

INT = torch.int32
NAMESPACE = "fa_dry"

pytestmark = pytest.mark.skipif(host_build.compiler() is None, reason="no g++ to compile with")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The library over the rows of tests/cpp/fixture.h, registered in a namespace of its own."""
    folder = tmp_path_factory.mktemp("rows")
    before, loaded = os.environ.get("FA_LIBRARY"), _lib._loaded
    os.environ["FA_LIBRARY"] = str(host_build.build(folder, "test::kStandIn"))
    _lib._loaded = None
    library = torch.library.Library(NAMESPACE, "DEF")
    for name in ("_forward", "_forward_dense", "forward_out", "_backward_kernel"):
        library.define(name + _schemas.SCHEMAS[name])
    shim = _shim.load()
    assert shim.fa_torch_register(NAMESPACE.encode(), 1) == 0
    yield shim
    _backend._listeners.remove(shim.fa_torch_set_backend)
    _lib._loaded = loaded
    if before is None:
        del os.environ["FA_LIBRARY"]
    else:
        os.environ["FA_LIBRARY"] = before


def tensors(
    *shape: int, dtype: torch.dtype = torch.bfloat16, dv: int | None = None
) -> list[Tensor]:
    batch, sq, sk, hq, hk, d = shape or (2, 16, 20, 4, 2, 64)
    g = torch.Generator().manual_seed(0)
    shapes = ((batch, sq, hq, d), (batch, sk, hk, d), (batch, sk, hk, dv or d))
    return [torch.randn(*s, generator=g).to(dtype) for s in shapes]


def bhsd(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def fields_of(data: bytes) -> dict[str, Any]:
    return dict(zip(_abi.FIELDS, _abi.unpack(data), strict=True))


def last_params(shim: ctypes.CDLL) -> dict[str, Any]:
    buffer = ctypes.create_string_buffer(_abi.SIZE)
    shim.fa_torch_last_params(buffer, _abi.SIZE)
    return fields_of(buffer.raw)


Q, K, V = tensors()
PACKED = [Q.reshape(32, 4, 64), K.reshape(40, 2, 64), V.reshape(40, 2, 64)]
CU = {
    "cu_seqlens_q": torch.tensor([0, 5, 5, 30], dtype=INT),
    "cu_seqlens_k": torch.tensor([0, 9, 20, 40], dtype=INT),
}
LENGTHS = torch.tensor([3, 16], dtype=INT)

FP8 = [t.to(torch.float8_e4m3fn) for t in (Q, K, V)]
FP8_COLUMNS = torch.empty(2, 2, 64, 32, dtype=torch.uint8).view(FP8[0].dtype)  # [B, H, D, S]

GOOD: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "plain": ([Q, K, V], {}),
    "causal": ([Q, K, V], {"causal": True, "window_left": 3, "softmax_scale": 0.25}),
    "window": ([Q, K, V], {"window_left": 0, "window_right": 1 << 40, "attention_chunk": 7}),
    "fp8": (FP8, {"causal": True}),
    "fp8 descales": (
        FP8,
        {
            "q_descale": torch.ones(1),
            "k_descale": torch.ones(2, 2).T,
            "v_descale": torch.ones(2, 1),
            "out_dtype": torch.float16,
            "sinks": torch.zeros(4).bfloat16(),
        },
    ),
    "fp8 v transposed": (
        [*FP8[:2], FP8_COLUMNS[..., :20].permute(0, 3, 1, 2)],
        {"out_dtype": torch.float32, "k_descale": torch.tensor(2.0)},
    ),
    "fp16 bhsd": ([bhsd(t).half() for t in (Q, K, V)], {"out_dtype": torch.float32}),
    "dims between": (tensors(2, 9, 20, 4, 2, 72, dv=40), {}),
    "expanded": ([Q[:, :, :1].expand_as(Q), K[:1].expand_as(K), V], {"num_splits": 1}),
    "packed": (PACKED, {**CU, "causal": True}),
    "packed with hints": (PACKED, {**CU, "max_seqlen_q": 25, "max_seqlen_k": 20}),
    "packed q": (
        [PACKED[0], *tensors(3, 16, 20, 4, 2, 64)[1:]],
        {"cu_seqlens_q": CU["cu_seqlens_q"]},
    ),
    "used": ([Q, K, V], {"seqused_q": LENGTHS, "seqused_k": LENGTHS, "leftpad_k": LENGTHS}),
    "cache rows": ([Q, *(torch.cat([t, t]) for t in (K, V))], {"kv_batch_idx": LENGTHS}),
    "sinks": ([Q, K, V], {"sinks": torch.zeros(4), "deterministic": True, "batch_invariant": True}),
    "bf16 sinks": ([Q, K, V], {"sinks": torch.zeros(8, dtype=torch.bfloat16)[::2]}),
    "no rows": ([Q[:, :0], K, V], {}),
    "no batch": ([Q[:0], K[:0], V[:0]], {}),
    "one row": ([bhsd(Q[:, :1]), K[:, :1], V[:, :1]], {}),
}


@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD.keys())
def test_both_implementations_fill_the_same_params(
    shim: ctypes.CDLL, case: tuple[list[Tensor], dict[str, Any]]
) -> None:
    (q, k, v), options = case
    out, lse = torch.ops.fa_dry._forward(q, k, v, **options)
    _validate.forward(q, k, v, options, kernels=True)
    dtype = options.get("out_dtype") or _layout.out_dtypes(q.dtype)[0]
    want_out = _layout.empty_like_order(q, (*q.shape[:-1], v.shape[-1]), dtype)
    assert (out.shape, out.stride(), out.dtype) == (want_out.shape, want_out.stride(), dtype)
    assert lse.shape == _buffers.lse_shape(q, options) and lse.dtype == torch.float32
    assert lse.is_contiguous()
    ctypes_params = fields_of(_cuda.forward_params(q, k, v, out, lse, options))
    assert last_params(shim) == pytest.approx(ctypes_params, nan_ok=True)


BLOCKS: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "all": (
        FP8,
        {
            "q_descale": torch.ones(2, 1, 4),
            "k_descale": torch.ones(2, 3, 2).mT[:1],
            "v_descale": torch.ones(3, 2, 2).permute(2, 1, 0),
            "descale_block_q": 4,
            "descale_block_k": 8,
        },
    ),
    "one": (FP8, {"k_descale": torch.ones(2, 2, 1), "descale_block_k": 64}),
    "packed": (
        [t.to(FP8[0].dtype) for t in PACKED],
        {**CU, "q_descale": torch.ones(3, 4, 5), "descale_block_q": 7},
    ),
}


@pytest.mark.parametrize("case", BLOCKS.values(), ids=BLOCKS.keys())
def test_both_implementations_fill_the_same_descales_of_blocks(
    shim: ctypes.CDLL, case: tuple[list[Tensor], dict[str, Any]]
) -> None:
    """The table that is planned with here has no row for them: the refusal is the library's."""
    (q, k, v), options = case
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=torch.bfloat16)
    lse = torch.empty(_buffers.lse_shape(q, options))
    with pytest.raises(RuntimeError, match="descales per block on"):
        torch.ops.fa_dry.forward_out(q, k, v, **options, out=out, lse=lse)
    _validate.forward(q, k, v, options, kernels=True)
    ctypes_params = fields_of(_cuda.forward_params(q, k, v, out, lse, options))
    assert ctypes_params["descale.q.block"] == options.get("descale_block_q", 0)
    assert last_params(shim) == pytest.approx(ctypes_params, nan_ok=True)


@pytest.mark.parametrize("scale", [None, 0.25])
def test_few_arguments_say_the_same(shim: ctypes.CDLL, scale: float | None) -> None:
    torch.ops.fa_dry._forward(
        Q, K, V, softmax_scale=scale, causal=True, window_left=9, window_right=0
    )
    want = last_params(shim)
    out, lse = torch.ops.fa_dry._forward_dense(Q, K, V, scale, True, 9, 0)
    want.update({"out.data": out.data_ptr(), "lse.data": lse.data_ptr()})
    assert last_params(shim) == pytest.approx(want, nan_ok=True)
    with pytest.raises(ValueError, match="^window_left: -4 is below -1"):
        torch.ops.fa_dry._forward_dense(Q, K, V, scale, False, -4, -1)


def test_forward_out_writes_where_it_is_told(shim: ctypes.CDLL) -> None:
    out, lse = bhsd(torch.full_like(Q, 7.0)), torch.full((2, 4, 16), 7.0)
    torch.ops.fa_dry.forward_out(Q, K, V, out=out, lse=lse, causal=True)
    params = last_params(shim)
    assert params["out.data"] == out.data_ptr() and params["lse.data"] == lse.data_ptr()
    assert params["out.stride_head"] == out.stride(2)
    assert (out == 7).all() and (lse == 7).all()  # the dry run launches nothing


TRAINED = {name: case for name, case in GOOD.items() if case[0][0].dtype == torch.bfloat16}


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("name", TRAINED)
def test_both_implementations_fill_the_same_params_of_a_backward(
    shim: ctypes.CDLL, name: str, grad_dtype: torch.dtype | None
) -> None:
    (q, k, v), options = TRAINED[name]
    out, lse = torch.ops.fa_dry._forward(q, k, v, **options)
    dout, dlse = bhsd(out) if out.dim() == 4 else out.clone(), torch.zeros_like(lse)
    more = {"out": out, "lse": lse, "dout": dout, "grad_dtype": grad_dtype}
    more |= {} if grad_dtype is None else {"dlse": dlse}
    kernel = torch.ops.fa_dry._backward_kernel
    if "kv_batch_idx" in options:
        with pytest.raises(RuntimeError, match="^fa: left to Python: kv_batch_idx"):
            kernel(q, k, v, **options, **more)
        return
    *grads, dsinks = kernel(q, k, v, **options, **more)
    for like, grad in zip((q, k, v), grads, strict=True):
        want = _layout.empty_like_order(like, like.shape, grad_dtype)
        assert (grad.shape, grad.stride(), grad.dtype) == (want.shape, want.stride(), want.dtype)
    sinks = options.get("sinks")
    assert dsinks.shape == ((0,) if sinks is None else (q.shape[-2],))
    assert sinks is None or dsinks.dtype == torch.float32
    given = _abi.Gradients(*(dout, *grads), more.get("dlse"), None if sinks is None else dsinks)
    want_params = fields_of(_cuda.forward_params(q, k, v, out, lse, {**options, "grad": given}))
    assert last_params(shim) == pytest.approx(want_params, nan_ok=True)


@pytest.fixture
def short_way(shim: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Autograd's backward of CPU tensors by the dry kernel, as of CUDA tensors by the real one.

    Holds "kernel" for each call of the kernel, "operator" for each of fa::backward's CPU code.
    """
    taken: list[str] = []
    kernel, checked = torch.ops.fa_dry._backward_kernel.default._op, ops._backward_torch

    def spy(*args: Any, **options: Any) -> Any:
        taken.append("kernel")
        return kernel(*args, **options)

    def operator(*args: Any, **options: Any) -> Any:
        taken.append("operator")
        return checked(*args, **options)

    monkeypatch.setattr(_cuda, "kernel", spy)
    monkeypatch.setattr(_raw, "_backward", _cuda.by_kernel)
    monkeypatch.setattr(_raw, "_backward_device", "cpu")
    monkeypatch.setattr(ops, "_backward_torch", operator)
    monkeypatch.setattr(ops, "_refuse_gpu_backend", lambda q: None)
    return taken


def leaves() -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in (Q, K, V)]


def test_autograd_calls_the_kernel_itself(shim: ctypes.CDLL, short_way: list[str]) -> None:
    inputs, sinks = leaves(), torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    options = {"causal": True, "softmax_scale": 0.5, "sinks": sinks}
    out, lse = fa.attention(*inputs, **options, deterministic=True, return_lse=True)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    grads = torch.autograd.grad((out, lse), (*inputs, sinks), (dout, dlse))
    assert short_way == ["kernel"]
    for t, grad in zip((*inputs, sinks), grads, strict=True):
        assert (grad.shape, grad.dtype) == (t.shape, t.dtype)
    seen = last_params(shim)
    assert seen["q.data"] == inputs[0].data_ptr()
    assert seen["grad.dout.data"] == dout.data_ptr()
    assert seen["grad.dlse"] == dlse.data_ptr()
    assert seen["lse.data"] != 0
    assert seen["mask.window_right"] == 0
    assert seen["score.scale"] == 0.5
    assert seen["score.sinks.data"] == sinks.data_ptr()
    assert seen["options.deterministic"] == 1
    assert seen["options.force_arch"] == 0


def test_tensor_options_reach_the_kernel(shim: ctypes.CDLL, short_way: list[str]) -> None:
    packed = [t.detach().clone().requires_grad_() for t in PACKED]
    out = fa.attention_varlen(*packed, *CU.values(), window_size=(3, 1))
    out.float().square().sum().backward()
    assert short_way == ["kernel"]
    seen = last_params(shim)
    assert seen["seq.cu_q"] == CU["cu_seqlens_q"].data_ptr()
    assert seen["seq.cu_k"] == CU["cu_seqlens_k"].data_ptr()
    assert (seen["mask.window_left"], seen["mask.window_right"]) == (3, 1)
    assert packed[0].grad is not None


def test_the_backend_of_the_forward_is_that_of_the_kernel(
    shim: ctypes.CDLL, short_way: list[str]
) -> None:
    inputs = leaves()
    with fa.backend("sm80"):
        out = fa.attention(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert short_way == ["kernel"]
    assert last_params(shim)["options.force_arch"] == 80
    with fa.backend("cpu"):
        out = fa.attention(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert short_way == ["kernel", "operator"], "the torch implementation has no kernel"


def test_what_the_kernel_leaves_goes_through_the_operator(short_way: list[str]) -> None:
    inputs = leaves()
    out = fa.attention(*inputs)
    everywhere = torch.ones((), dtype=out.dtype).expand_as(out)  # dout of a sum: strides 0
    got = torch.autograd.grad(out, inputs, everywhere, retain_graph=True)
    assert short_way == ["kernel", "operator"]
    del short_way[:]
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        counted = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    assert short_way == ["operator"], "a mode wants to see fa::backward"
    assert counter.get_total_flops() > 0
    for a, b in zip(got, counted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_what_autograd_hands_over(shim: ctypes.CDLL, short_way: list[str]) -> None:
    """One gradient alone, a second backward, recomputed tensors, a search for NaN."""
    from torch.utils.checkpoint import checkpoint

    inputs = leaves()
    out, lse = fa.attention(*inputs, return_lse=True)
    for _ in range(2):
        torch.autograd.grad(lse, inputs, torch.ones_like(lse), retain_graph=True)
    assert short_way == ["kernel"] * 2
    assert last_params(shim)["grad.dlse"] != 0
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert last_params(shim)["grad.dlse"] == 0
    del short_way[:]
    out = checkpoint(fa.attention, *inputs, use_reentrant=False)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=False):
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert short_way == ["kernel"]


def test_transformed_gradients_go_through_the_operator(short_way: list[str]) -> None:
    inputs = leaves()
    out = fa.attention(*inputs)
    douts = torch.stack([torch.ones_like(out), torch.full_like(out, 2.0)])

    def gradients(dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    batched = torch.func.vmap(gradients)(douts)
    assert set(short_way) == {"operator"}
    for number, dout in enumerate(douts):
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            for a, b in zip(batched, gradients(dout), strict=True):
                torch.testing.assert_close(a[number], b)


def test_second_derivatives_are_still_refused(short_way: list[str]) -> None:
    inputs = leaves()
    out = fa.attention(*inputs)
    (dq,) = torch.autograd.grad(out, inputs[:1], torch.ones_like(out), create_graph=True)
    assert short_way == ["kernel"]
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.sum().backward()


def test_errors_of_the_library_come_through(
    short_way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("launch of a row: an illegal memory access was encountered.")

    inputs = leaves()
    out = fa.attention(*inputs)
    monkeypatch.setattr(_cuda, "kernel", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def unusual_backwards() -> dict[str, dict[str, Any]]:
    out, lse = torch.empty_like(Q), torch.zeros(2, 4, 16)
    return {
        "one number": {"dout": out.new_tensor(1.0).expand_as(out)},
        "odd rows": {"dout": torch.zeros(2, 16, 4, 68, dtype=out.dtype)[..., :64]},
        "odd address": {"dout": torch.zeros(out.numel() + 4, dtype=out.dtype)[4:].view_as(out)},
        "dtype of dout": {"dout": out.half()},
        "shape of dout": {"dout": out[:, 1:]},
        "strided lse": {"lse": lse.transpose(1, 2).contiguous().transpose(1, 2)},
        "strides of dlse": {"dlse": torch.zeros(2, 4, 17)[..., :16]},
        "dlse": {"dlse": lse.double()},
        "grad_dtype": {"grad_dtype": torch.float16},
        "out": {"out": out.double()},
    }


@pytest.mark.parametrize("wrong", unusual_backwards().values(), ids=unusual_backwards().keys())
def test_unusual_backwards_are_left_to_python(shim: ctypes.CDLL, wrong: dict[str, Any]) -> None:
    good = {"out": torch.empty_like(Q), "lse": torch.zeros(2, 4, 16), "dout": torch.empty_like(Q)}
    torch.ops.fa_dry._backward_kernel(Q, K, V, **good)
    with pytest.raises(RuntimeError, match="^fa: left to Python"):
        torch.ops.fa_dry._backward_kernel(Q, K, V, **(good | wrong))


def bad_calls() -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    return {
        "dtype": ([Q.float(), K.float(), V.float()], {}),
        "fp8 cache": ([Q, *(t.to(torch.float8_e4m3fn) for t in (K, V))], {}),
        "fp8 descale": (FP8, {"q_descale": torch.ones(3)}),
        "fp8 descale dtype": (FP8, {"v_descale": torch.ones(1).double()}),
        "fp8 descale batch": (FP8, {"v_descale": torch.ones(3, 1)}),
        "fp8 descale dims": (FP8, {"v_descale": torch.ones(1, 1, 1)}),
        "fp8 out_dtype": (FP8, {"out_dtype": torch.float8_e4m3fn}),
        "fp8 sinks": (FP8, {"sinks": torch.zeros(4).half()}),
        "fp8 blocks": (FP8, {"k_descale": torch.ones(2, 2, 2), "descale_block_k": 64}),
        "fp8 block dims": (FP8, {"k_descale": torch.ones(2, 2), "descale_block_k": 64}),
        "fp8 block heads": (FP8, {"q_descale": torch.ones(2, 2, 1), "descale_block_q": 64}),
        "fp8 block batch": (FP8, {"q_descale": torch.ones(3, 4, 1), "descale_block_q": 64}),
        "mixed dtypes": ([Q, K.half(), V], {}),
        "dims": ([Q[0], K, V], {}),
        "packed dims": ([Q, K, V], CU),
        "rows of v": ([Q, K, V[:, 1:]], {}),
        "heads of v": ([Q, K, V[:, :, 1:]], {}),
        "head dim of k": ([Q, K[..., :32], V], {}),
        "batch of k": ([Q, K[:1], V[:1]], {}),
        "heads": ([Q[:, :, :3], K, V], {}),
        "large head dim": (tensors(1, 4, 4, 1, 1, 264), {}),
        "cu dtype": (PACKED, {**CU, "cu_seqlens_q": CU["cu_seqlens_q"].long()}),
        "cu shape": (PACKED, {**CU, "cu_seqlens_k": CU["cu_seqlens_k"][:2]}),
        "cu is empty": (PACKED, {**CU, "cu_seqlens_q": torch.empty(0, dtype=INT)}),
        "used": ([Q, K, V], {"seqused_k": LENGTHS.repeat(2)}),
        "used stride": ([Q, K, V], {"seqused_k": LENGTHS.repeat_interleave(2)[::2]}),
        "packed cache": (PACKED, {**CU, "kv_batch_idx": LENGTHS}),
        "scale": ([Q, K, V], {"softmax_scale": float("nan")}),
        "softcap": ([Q, K, V], {"softcap": -1.0}),
        "window": ([Q, K, V], {"window_left": -2}),
        "causal window": ([Q, K, V], {"causal": True, "window_right": 3}),
        "chunk": ([Q, K, V], {"attention_chunk": -1}),
        "splits": ([Q, K, V], {"num_splits": -1}),
        "hint": ([Q, K, V], {"max_seqlen_k": -1}),
        "sinks shape": ([Q, K, V], {"sinks": torch.zeros(3)}),
        "sinks dtype": ([Q, K, V], {"sinks": torch.zeros(4).double()}),
        "alibi": ([Q, K, V], {"alibi_slopes": torch.zeros(4).half()}),
        "out_dtype": ([Q, K, V], {"out_dtype": torch.float16}),
        "dropout": ([Q, K, V], {"dropout_p": 0.5}),
        "dropout value": ([Q, K, V], {"dropout_p": 1.5}),
        "seed": ([Q, K, V], {"philox_seed_offset": torch.zeros(2, dtype=torch.int32)}),
        "strided seed": ([Q, K, V], {"philox_seed_offset": torch.zeros(4, dtype=torch.int64)[::2]}),
        "pages": ([Q, K, V], {"page_table": torch.zeros(2, 1, dtype=INT)}),
        "descale": ([Q, K, V], {"k_descale": torch.ones(1)}),
        "descale block": ([Q, K, V], {"descale_block_q": 64}),
    }


@pytest.mark.parametrize("case", bad_calls().values(), ids=bad_calls().keys())
def test_both_implementations_refuse_with_the_same_sentence(
    shim: ctypes.CDLL, case: tuple[list[Tensor], dict[str, Any]]
) -> None:
    inputs, options = case
    with pytest.raises((ValueError, NotImplementedError)) as want:
        _validate.forward(*inputs, options, kernels=True)
    prefix = "fa: not supported: " if want.type is NotImplementedError else ""
    kind = RuntimeError if want.type is NotImplementedError else ValueError
    with pytest.raises(kind) as got:
        torch.ops.fa_dry._forward(*inputs, **options)
    assert str(got.value) == prefix + str(want.value)


BUFFERS: dict[str, dict[str, Any]] = {
    "out shape": {"out": Q[:, 1:]},
    "out dtype": {"out": Q.half()},
    "out_dtype": {"out_dtype": torch.float32},
    "lse shape": {"lse": torch.empty(2, 16, 4)},
    "lse dtype": {"lse": torch.empty(2, 4, 16, dtype=torch.bfloat16)},
    "lse stride": {"lse": torch.empty(2, 16, 4).transpose(1, 2)},
}


@pytest.mark.parametrize("wrong", BUFFERS.values(), ids=BUFFERS.keys())
def test_wrong_buffers(shim: ctypes.CDLL, wrong: dict[str, Any]) -> None:
    options = {"out": torch.full_like(Q, 7.0), "lse": torch.full((2, 4, 16), 7.0), **wrong}
    rest = {n: x for n, x in options.items() if n not in ("out", "lse")}
    out, lse = options["out"].clone(), options["lse"].clone()
    with pytest.raises(ValueError) as want:
        _buffers.outputs(Q, K, V, rest, options["out"], options["lse"], kernels=True)
    with pytest.raises(ValueError) as got:
        torch.ops.fa_dry.forward_out(Q, K, V, **options)
    assert str(got.value) == str(want.value)
    assert torch.equal(options["out"], out) and torch.equal(
        options["lse"].nan_to_num(), lse.nan_to_num()
    )


def test_errors_of_the_library_pass_through(shim: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match=r"k.*stride 100 is not a multiple of 8 elements"):
        k = torch.as_strided(K, (2, 20, 2, 48), (2560, 100, 50, 1))
        torch.ops.fa_dry._forward(Q[..., :48], k, V)
    with pytest.raises(ValueError, match="last dimension"):
        torch.ops.fa_dry._forward(Q.transpose(1, 3).contiguous().transpose(1, 3), K, V)
    with pytest.raises(RuntimeError, match="^fa: not supported: .*softcap.*sm90_fwd_bf16_d64_band"):
        torch.ops.fa_dry._forward(Q, K, V, softcap=30.0)
    with pytest.raises(RuntimeError, match="^fa: pad: head dims 60 and 64"):
        torch.ops.fa_dry._forward(Q[..., :60], K[..., :60], V)


def test_backend_reaches_the_library(shim: ctypes.CDLL) -> None:
    import fa

    seen = {}
    for name in ("auto", "sm80", "sm90"):
        with fa.backend(name):
            torch.ops.fa_dry._forward(Q, K, V)
            seen[name] = last_params(shim)["options.force_arch"]
            assert (
                fields_of(_cuda.forward_params(Q, K, V, Q, torch.empty(2, 4, 16), {}))[
                    "options.force_arch"
                ]
                == seen[name]
            )
    assert seen == {"auto": 0, "sm80": 80, "sm90": 90}
    torch.ops.fa_dry._forward(Q, K, V)
    assert last_params(shim)["options.force_arch"] == 0


def test_cpu_backend_goes_to_torch(shim: ctypes.CDLL) -> None:
    """What fa.backend("cpu") does with CUDA tensors, tried on the tensors that are here."""
    import fa

    want = torch.ops.fa._forward_torch(Q, K, V, causal=True, softcap=3.0)
    with fa.backend("cpu"):
        got = torch.ops.fa_dry._forward(Q, K, V, causal=True, softcap=3.0)
        out, lse = torch.empty_like(Q), torch.empty(2, 4, 16)
        torch.ops.fa_dry.forward_out(Q, K, V, causal=True, softcap=3.0, out=out, lse=lse)
        with pytest.raises(ValueError, match="^seqused_k: entry 1 is 21"):
            used = torch.tensor([3, 21], dtype=INT)
            torch.ops.fa_dry._forward(Q, K, V, seqused_k=used)
    for a, b in zip((*got, out, lse), (*want, *want), strict=True):
        assert torch.equal(a, b)


def test_no_reference_leaks(shim: ctypes.CDLL) -> None:
    sinks = torch.zeros(4)
    for options in ({"sinks": sinks}, {"sinks": sinks, "window_left": -5}):
        weak = [t.detach().clone() for t in (Q, K, V)]
        for _ in range(3):
            try:
                torch.ops.fa_dry._forward(*weak, **options)
            except ValueError:
                assert "window_left" in options
        assert sinks._use_count() == 1, "the stack kept a reference to the sinks"
        assert [t._use_count() for t in weak] == [1, 1, 1]


def test_argument_table_equals_the_schema(shim: ctypes.CDLL) -> None:
    assert shim.fa_torch_arguments().decode() == _shim.arguments()
    assert shim.fa_torch_abi_version() == _abi.ABI_VERSION
    assert _shim.arguments().startswith("T q,T k,T v,o cu_seqlens_q")


def test_prototypes_equal_torchs(tmp_path: Path) -> None:
    """extern "C" functions declared twice with other types do not compile."""
    include = Path(torch.__file__).parent / "include"
    if not (include / "torch/csrc/stable/c/shim.h").is_file():
        pytest.skip(f"torch {torch.__version__} came without its headers")
    source = tmp_path / "both.cpp"
    text = (
        "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n"
        "#include <torch/csrc/stable/c/shim.h>\n"
        '#include "python/torch_c_abi.h"\n%s\n'
    )
    command = [
        *(str(host_build.compiler()), "-std=c++20", "-fsyntax-only", "-DUSE_CUDA"),
        *(f"-I{include}", f"-I{host_build.ROOT}", str(source)),
    ]
    source.write_text(text % "")
    subprocess.run(command, check=True)
    source.write_text(text % 'extern "C" AOTITorchError aoti_torch_get_dim(void*, int64_t*);')
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0 and "aoti_torch_get_dim" in result.stderr


def test_header_declares_exactly_what_is_called() -> None:
    import re

    python = host_build.ROOT / "python"
    header = (python / "torch_c_abi.h").read_text()
    declared = set(re.findall(r"\b(?:aoti_)?torch_\w+(?=\()", header))
    files = ("torch_ops.cpp", "torch_call.h", "torch_stack.h")
    used = "".join((python / name).read_text() for name in files)
    called = set(re.findall(r"\b(?:aoti_)?torch_(?!constants|ops|stack|call\.h|c_abi)\w+", used))
    assert declared == called


def test_registers_for_cuda_on_request(shim: ctypes.CDLL) -> None:
    code = (
        "import torch, fa; from fa import _shim; assert _shim.implementation == 'shim', "
        "_shim.implementation; print(torch._C._dispatch_dump('fa::_forward'))"
    )
    python = str(host_build.ROOT / "python")
    environment = {**os.environ, "FA_TORCH_OPS": "shim", "PYTHONPATH": python}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "torch_ops.cpp" in next(x for x in done.stdout.splitlines() if x.startswith("CUDA:"))


def test_explain_plans_the_backward_of_a_call_that_records(shim: ctypes.CDLL) -> None:
    q, k, v = (t.clone().requires_grad_() for t in tensors(2, 300, 500, 4, 2, 128))
    text = fa.explain(q, k, v, causal=True, deterministic=True, device="h200")
    assert "row        sm90_fwd_bf16_d128_band" in text
    assert "row        sm90_bwd_bf16_d128_band" in text
    assert "descending (deterministic)" in text
    with torch.no_grad():
        assert "_bwd_" not in fa.explain(q, k, v, causal=True, device="h200")
    # The Hopper row has no softcap; no backward row of this table has one.
    text = fa.explain(q, k, v, softcap=3.0, device="h200")
    assert "score is `scale`: no softcap" in text


def test_workspace_of_a_backward_is_dq_and_two_floats_a_row(shim: ctypes.CDLL) -> None:
    q, k, v = tensors(2, 300, 500, 4, 2, 128)
    grad = _abi.Gradients(q, q, k, v)
    h200 = {"force_arch": 90, "sm_count": 132, "smem_limit": 232448}
    params = _abi.params_from_tensors(q, k, v, q, grad=grad, addresses=False, **h200)
    padded_rows = 2 * 4 * 320  # tiles of 64
    assert _lib.workspace_size(_lib.BACKWARD, params) == padded_rows * (128 + 2) * 4
    wide = _abi.Gradients(q.float(), q, k, v)
    params = _abi.params_from_tensors(q, k, v, q, grad=wide, addresses=False, **h200)
    rounded = 2 * 300 * 4 * 128 * 2
    assert _lib.workspace_size(_lib.BACKWARD, params) == padded_rows * 130 * 4 + rounded
