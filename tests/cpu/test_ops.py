# SPDX-License-Identifier: BSD-3-Clause
# Do the torch operators keep what their schemas promise, and their gradients too?
"""opcheck, fakes, tracing, modes, autograd and refusals of torch.ops.fa.*, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fa
from fa import _raw, _sharding, reference
from fa._schemas import SCHEMAS

OPS = torch.ops.fa
INT = torch.int32


def tensors(
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    sq: int = 16,
    sk: int = 20,
    hq: int = 4,
    hk: int = 2,
    d: int = 16,
    dv: int = 8,
    seed: int = 0,
) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, sq, hq, d), (batch, sk, hk, d), (batch, sk, hk, dv))
    return [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]


def packed(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Any]]:
    """Three sequences, one without queries, and a row that belongs to none."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(n, h, d, generator=g) for n, h, d in ((12, 4, 16), (19, 2, 16), (19, 2, 8))
    )
    cu_q, cu_k = torch.tensor([0, 4, 4, 11], dtype=INT), torch.tensor([0, 9, 12, 19], dtype=INT)
    return [q.to(dtype), k.to(dtype), v.to(dtype)], {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def bhsd(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 5, "window_right": 2},
    "chunk": {"attention_chunk": 7},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]), "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "used": {
        "seqused_q": torch.tensor([16, 3], dtype=INT),
        "seqused_k": torch.tensor([0, 17], dtype=INT),
        "leftpad_k": torch.tensor([0, 4], dtype=INT),
    },
    "cache rows": {"kv_batch_idx": torch.tensor([1, 0], dtype=INT)},
    "hints": {
        "max_seqlen_q": 16,
        "max_seqlen_k": 20,
        "num_splits": 3,
        "batch_invariant": True,
        "deterministic": True,
    },
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def test_schemas_are_those_of_the_design() -> None:
    for name, schema in SCHEMAS.items():
        assert str(getattr(OPS, name).default._schema).startswith(f"fa::{name}(")
        assert schema.count("Tensor") >= 3
    mutated = [a.name for a in OPS.backward_out.default._schema.arguments if a.is_write]
    assert mutated == ["dq", "dk", "dv"]
    assert [a.name for a in OPS.forward_out.default._schema.arguments if a.is_write] == [
        "out",
        "lse",
    ]
    assert [a.name for a in OPS.append_kv.default._schema.arguments if a.is_write] == [
        "k_cache",
        "v_cache",
    ]


@every_option
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_opcheck_forward(options: dict[str, Any], grad: bool) -> None:
    inputs = [t.requires_grad_(grad) for t in tensors()]
    torch.library.opcheck(OPS.forward.default, inputs, options)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_opcheck_forward_packed_and_strided(grad: bool) -> None:
    inputs, options = packed()
    torch.library.opcheck(OPS.forward.default, [t.requires_grad_(grad) for t in inputs], options)
    inputs = [bhsd(t).requires_grad_(grad) for t in tensors()]
    torch.library.opcheck(OPS.forward.default, inputs, {"out_dtype": torch.float32})


def test_opcheck_raw_operators() -> None:
    q, k, v = tensors()
    options = {"causal": True, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}
    out, lse = OPS.forward(q, k, v, **options)
    for op in (OPS._forward, OPS._forward_torch):
        torch.library.opcheck(op.default, (q, k, v), options)
        torch.library.opcheck(op.default, packed()[0], packed()[1])
    torch.library.opcheck(OPS._forward_dense.default, (q, k, v, None, True, -1, -1))
    for op in (OPS.forward_out, OPS._forward_out_torch):
        torch.library.opcheck(op.default, (q, k, v), {**options, "out": out, "lse": lse})
    grads = (torch.randn_like(out), q, k, v, out, lse)
    torch.library.opcheck(OPS.backward.default, grads, {**options, "dlse": torch.randn_like(lse)})
    torch.library.opcheck(OPS.backward.default, [bhsd(t) for t in grads[:5]] + [lse])
    buffers = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    torch.library.opcheck(OPS.backward_out.default, grads, {**options, **buffers})
    torch.library.opcheck(
        OPS.backward_out.default, grads, {**options, **buffers, "accumulate": True}
    )
    partial = torch.stack([out, out]).float(), torch.stack([lse, lse])
    torch.library.opcheck(OPS.combine.default, partial, {"out_dtype": torch.bfloat16})
    torch.library.opcheck(OPS.combine.default, [t.requires_grad_() for t in partial])
    torch.library.opcheck(OPS._refusal.default, (q, k, v), {}, test_utils="test_schema")


LAYOUTS: dict[str, Any] = {
    "bshd": lambda q, k, v: (q, k, v),
    "bhsd": lambda q, k, v: (bhsd(q), bhsd(k), bhsd(v)),
    "sbhd": lambda q, k, v: tuple(
        t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)
    ),
    "q only": lambda q, k, v: (bhsd(q), k, v),
    "sliced qkv": lambda q, k, v: (
        torch.cat([q, q], dim=3)[..., : q.shape[-1]],
        torch.cat([k, k], dim=2)[:, :, : k.shape[2]],
        v,
    ),
    "expanded": lambda q, k, v: (
        q[:, :, :1].expand_as(q),
        k[:1].expand_as(k),
        v[:, :, :1].expand_as(v),
    ),
    "one row": lambda q, k, v: (bhsd(q[:, :1]), k, v),
    "one head": lambda q, k, v: (q[:, :, :1], k[:, :, :1], v[:, :, :1]),
    "one entry": lambda q, k, v: (bhsd(q[:1]), bhsd(k[:1]), bhsd(v[:1])),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_fakes_equal_the_real_thing(layout: Any, dtype: torch.dtype) -> None:
    q, k, v = layout(*tensors(dtype))
    sinks = torch.zeros(q.shape[2])
    options: dict[str, Any] = {"sinks": sinks}
    real = list(OPS._forward(q, k, v, **options))
    real += OPS.backward(torch.ones_like(real[0]), q, k, v, *real[:2], **options)
    with FakeTensorMode() as mode:
        fq, fk, fv, fs = (mode.from_tensor(t) for t in (q, k, v, sinks))
        fake = list(OPS._forward(fq, fk, fv, sinks=fs))
        fake += OPS.backward(fake[0], fq, fk, fv, *fake[:2], sinks=fs)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    for name, r, f in zip(names, real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype), name
        assert all(r.data_ptr() != t.data_ptr() for t in (q, k, v)), f"{name} aliases an input"


def test_outputs_follow_q_and_are_dense() -> None:
    q, k, v = tensors(dv=16)
    out, lse = OPS.forward(bhsd(q), k, v)
    assert out.stride() == bhsd(q).stride()
    assert lse.is_contiguous()
    out, _ = OPS.forward(q[:, ::2], k, v)
    assert out.is_contiguous()


def test_fake_cuda_tensors_need_no_gpu() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 16, 4, 60, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, 20, 2, 60, device="cuda", dtype=torch.bfloat16)
        v = torch.empty(2, 20, 2, 33, device="cuda", dtype=torch.bfloat16)
        out, lse = fa.attention(q, k, v, causal=True, return_lse=True)
        assert out.shape == (2, 16, 4, 33) and out.device.type == "cuda" and out.is_contiguous()
        assert lse.shape == (2, 4, 16) and lse.dtype == torch.float32
        dq, dk, dv, dsinks = OPS.backward(out, q, k, v, out, lse, grad_dtype=torch.float32)
        assert (dq.shape, dk.shape, dv.shape, dsinks.shape) == (q.shape, k.shape, v.shape, (0,))
        assert dq.dtype == torch.float32 and dv.device.type == "cuda"


# ---- who sees the composite ---------------------------------------------------------------------


def test_make_fx_sees_the_raw_operator() -> None:
    q, k, v = tensors()
    graph = make_fx(lambda *t: OPS.forward(*t, causal=True)[0])(q, k, v).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"][0] is OPS._forward.default
    graph = make_fx(lambda *t: fa.attention(*t, causal=True))(q, k, v).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"][0] is OPS._forward.default


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def options_of(self, op: Any) -> dict[str, Any]:
        return next(options for func, options in self.calls if func is op)


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", [OPS.forward, fa.attention], ids=["op", "function"])
def test_modes_see_the_operators(call: Any) -> None:
    q, k, v = tensors()
    with Seen() as seen:
        call(q, k, v, causal=True)
    assert seen.options_of(OPS._forward.default)["causal"] is True
    with SeenFunctions() as functions:
        call(q, k, v, causal=True)
    assert any("fa.forward" in name for name in functions.functions)


class Subclass(Tensor):
    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("call", [OPS.forward, fa.attention], ids=["op", "function"])
def test_subclasses_see_the_composite(call: Any) -> None:
    q, k, v = tensors()
    Subclass.seen.clear()
    out = call(q.as_subclass(Subclass), k, v)
    assert any("fa.forward" in name for name in Subclass.seen)
    assert isinstance(out[0], Subclass)


def test_positional_and_named_arguments() -> None:
    q, k, v = tensors()
    want = OPS.forward(q, k, v)[0]
    assert torch.equal(OPS.forward(q=q, k=k, v=v)[0], want)
    assert torch.equal(OPS.forward(q, v=v, k=k)[0], want)
    with pytest.raises(TypeError, match="^v: was not passed"):
        OPS.forward(q, k)


# ---- gradients ----------------------------------------------------------------------------------


def gradients(
    call: Any, inputs: list[Tensor], sinks: Tensor | None, **options: Any
) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    if sinks is not None:
        leaves.append(sinks.detach().clone().to(inputs[0].dtype).requires_grad_())
        options["sinks"] = leaves[-1]
    out, lse = call(*leaves[:3], **options)
    g = torch.Generator().manual_seed(2)
    visible = lse.detach() > -torch.inf
    loss = (out * torch.randn(out.shape, generator=g, dtype=out.dtype)).sum()
    loss = (
        loss + (lse[visible] * torch.randn(lse.shape, generator=g, dtype=lse.dtype)[visible]).sum()
    )
    return list(torch.autograd.grad(loss, leaves))


def check_gradients(inputs: list[Tensor], options: dict[str, Any]) -> None:
    """The operator's, the function's and the reference's are the same, dlse included."""
    options = {n: x for n, x in options.items() if n not in OPTIONS["hints"]}
    sinks = options.pop("sinks", None)
    if (slopes := options.get("alibi_slopes")) is not None:
        options["alibi_slopes"] = slopes.float()
    want = gradients(reference.attention, inputs, sinks, **options)
    by_op = gradients(OPS.forward, inputs, sinks, **options)
    by_function = gradients(
        lambda *t, **o: fa.attention(*t, return_lse=True, **o), inputs, sinks, **options
    )
    for w, a, b in zip(want, by_op, by_function, strict=True):
        assert (a - w).abs().max() < 1e-10
        assert torch.equal(a, b)


@every_option
def test_gradients(options: dict[str, Any]) -> None:
    check_gradients(tensors(torch.float64), options)


def test_gradients_packed() -> None:
    inputs, options = packed(torch.float64)
    check_gradients(inputs, {**options, "causal": True, "sinks": torch.randn(4)})


def test_gradient_of_one_output_only() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(torch.float64))
    out, lse = OPS.forward(q, k, v)
    (dq,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    want = torch.autograd.grad(reference.attention(q, k, v)[1].sum(), q)[0]
    assert (dq - want).abs().max() < 1e-12
    (dv,) = torch.autograd.grad(out.sum(), v)  # dout is expanded: all its strides are 0
    assert (
        dv - torch.autograd.grad(reference.attention(q, k, v)[0].sum(), v)[0]
    ).abs().max() < 1e-12


def test_backward_out_accumulates() -> None:
    q, k, v = tensors()
    out, lse = OPS.forward(q, k, v)
    dout = torch.randn_like(out)
    want = OPS.backward(dout, q, k, v, out, lse)
    buffers = [torch.full_like(t, 3.0) for t in (q, k, v)]
    names = dict(zip(("dq", "dk", "dv"), buffers, strict=True))
    OPS.backward_out(dout, q, k, v, out, lse, **names)
    for buffer, w in zip(buffers, want, strict=False):
        assert torch.equal(buffer, w)
    OPS.backward_out(dout, q, k, v, out, lse, **names, accumulate=True)
    for buffer, w in zip(buffers, want, strict=False):
        assert torch.equal(buffer, w + w)


def test_deterministic_reaches_the_backward() -> None:
    for flag, algorithms, want in ((None, True, True), (None, False, False), (True, False, True)):
        q, k, v = (t.requires_grad_() for t in tensors())
        torch.use_deterministic_algorithms(algorithms)
        try:
            out = fa.attention(q, k, v, deterministic=flag)
        finally:
            torch.use_deterministic_algorithms(False)
        with Seen() as seen:
            out.sum().backward()
        assert bool(seen.options_of(OPS.backward.default).get("deterministic")) is want


def test_autocast() -> None:
    q, k, v = (t.requires_grad_() for t in tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = fa.attention(q, k, v), OPS.forward(q, k, v)[0]
    for out in outs:
        assert out.dtype == torch.bfloat16
    outs[0].float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert OPS.forward(q.detach().double(), k.double(), v.double())[0].dtype == torch.float64


def test_checkpoint_recomputes() -> None:
    q, k, v = (t.requires_grad_() for t in tensors())
    with Seen() as seen:
        torch.utils.checkpoint.checkpoint(
            fa.attention, q, k, v, use_reentrant=False
        ).sum().backward()
    assert sum(func is OPS._forward.default for func, _ in seen.calls) == 2
    got = q.grad.clone()
    q.grad = None
    fa.attention(q, k, v).sum().backward()
    assert torch.equal(got, q.grad)


def test_vmap_equals_a_loop() -> None:
    q, k, v = (torch.stack([t, 2 * t]) for t in tensors())
    got = torch.func.vmap(lambda *t: fa.attention(*t, causal=True))(q, k, v)
    for i in range(2):
        assert torch.equal(got[i], fa.attention(q[i], k[i], v[i], causal=True))


TRANSFORM_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {
        "causal": True,
        "window_size": (3, 0),
        "softcap": 5.0,
        "seqused_k": torch.tensor([7, 5], dtype=torch.int32),
    },
}


def loss_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out, lse = fa.attention(q, k, v, return_lse=True, **options)
    return out.square().sum() + lse.nan_to_num(neginf=0.0).sum()


def gradients_of(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(loss_of(*leaves, **options), leaves)


@pytest.mark.parametrize("options", TRANSFORM_OPTIONS.values(), ids=TRANSFORM_OPTIONS)
def test_gradients_by_torch_func(options: dict[str, Any]) -> None:
    inputs = tensors()
    want = gradients_of(*inputs, **options)

    def loss(*t: Tensor) -> Tensor:
        return loss_of(*t, **options)

    assert all(map(torch.equal, torch.func.grad(loss, argnums=(0, 1, 2))(*inputs), want))
    value, pull = torch.func.vjp(loss, *inputs)
    assert all(map(torch.equal, pull(torch.ones_like(value)), want))
    (sinks,) = torch.func.grad(lambda *s: loss_of(*inputs, sinks=s[0], **options), argnums=(0,))(
        torch.zeros(4)
    )
    leaf = torch.zeros(4, requires_grad=True)
    loss_of(*inputs, sinks=leaf, **options).backward()
    assert torch.equal(sinks, leaf.grad)


@pytest.mark.parametrize("options", TRANSFORM_OPTIONS.values(), ids=TRANSFORM_OPTIONS)
def test_gradients_through_vmap(options: dict[str, Any]) -> None:
    """In every order; what vmap hands out requires no gradient, and must not lose one."""
    stacked = [torch.stack([t, 2 * t]) for t in tensors()]
    want = [gradients_of(*(t[i] for t in stacked), **options) for i in range(2)]

    def loss(*t: Tensor) -> Tensor:
        return loss_of(*t, **options)

    def mapped(*t: Tensor) -> Tensor:
        return torch.func.vmap(loss)(*t).sum() + sum(x.sum() for x in t)

    inside = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacked)
    outside = torch.func.grad(mapped, argnums=(0, 1, 2))(*stacked)
    leaves = [t.detach().requires_grad_() for t in stacked]
    autograd = torch.autograd.grad(mapped(*leaves), leaves)
    for i in range(2):
        for a, b, c, exact in zip(inside, outside, autograd, want[i], strict=True):
            torch.testing.assert_close(a[i], exact)
            torch.testing.assert_close(b[i] - 1, exact)
            torch.testing.assert_close(c[i] - 1, exact)


def test_combine_under_torch_func() -> None:
    q, k, v = tensors()

    def loss(q: Tensor) -> Tensor:
        parts = [
            fa.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(3), slice(3, 9))
        ]
        return fa.combine(*zip(*parts, strict=True))[0].square().sum()

    leaf = q.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(q), leaf.grad)
    twice = torch.stack([q, q]).requires_grad_()
    torch.func.vmap(loss)(twice).sum().backward()
    torch.testing.assert_close(twice.grad[1], leaf.grad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_vmap_inside_a_compiled_function(backend: str) -> None:
    stacked = [torch.stack([t, 2 * t]).requires_grad_() for t in tensors()]
    loss = torch.func.vmap(loss_of)
    want = torch.autograd.grad(loss(*stacked).sum(), stacked)
    got = torch.autograd.grad(torch.compile(loss, backend=backend)(*stacked).sum(), stacked)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_calls_under_vmap() -> None:
    q, k, v = (torch.stack([t, t]) for t in tensors())
    for options, kind, words in (
        ({"window_size": (-7, 0)}, ValueError, "window_left: -7"),
        ({"softmax_scale": "small"}, TypeError, "^softmax_scale must be a number"),
        ({"casual": True}, TypeError, '"casual" is not an option'),
    ):
        with pytest.raises(kind, match=words):
            torch.func.vmap(lambda *t, o=options: fa.attention(*t, **o))(q, k, v)
    with pytest.raises(ValueError, match="^k: dtype torch.float16 differs from q's"):
        torch.func.vmap(fa.attention)(q, k.half(), v)


# ---- refusals -----------------------------------------------------------------------------------


def test_double_backward_is_refused() -> None:
    q, k, v = (t.requires_grad_() for t in tensors())
    # Of a sum the incoming gradient is a constant, of a square it is not.
    for loss in (fa.attention(q, k, v).sum(), fa.attention(q, k, v).square().sum()):
        (dq,) = torch.autograd.grad(loss, q, create_graph=True)
        with pytest.raises(NotImplementedError, match="double backward is not supported"):
            (q.sum() + dq.sum()).backward(retain_graph=True)
        for source in (q, k):  # by a gradient of it alone, which is not found to be absent
            with pytest.raises(NotImplementedError, match="double backward is not supported"):
                torch.autograd.grad(dq.sum(), source, allow_unused=True, retain_graph=True)
    gradient = torch.func.grad(loss_of)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        torch.func.grad(lambda t: gradient(t, k.detach(), v.detach()).sum())(q.detach())
    out, lse = (t.detach() for t in OPS.forward(q, k, v))
    with pytest.raises(NotImplementedError, match="double backward"):
        OPS.backward(torch.ones_like(out), q, k, v, out, lse)


@pytest.mark.parametrize("call", [lambda *t: OPS.forward(*t)[0], fa.attention])
def test_forward_mode_is_refused(call: Any) -> None:
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda t: call(t, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            call(q, k, dual)
        call(q, k, v)  # no tangent, no refusal
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.hessian(lambda t: call(t, k, v).sum())(q)


def test_constants_have_no_gradient() -> None:
    q, k, v = tensors()
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        fa.attention(q, k, v, alibi_slopes=slopes)
    with torch.no_grad():
        fa.attention(q, k, v, alibi_slopes=slopes)


# ---- the other functions ------------------------------------------------------------------------


def test_varlen_and_kvcache() -> None:
    (q, k, v), cu = packed()
    want, want_lse = reference.attention(q, k, v, **cu, causal=True)
    out, lse = fa.attention_varlen(
        q, k, v, cu["cu_seqlens_q"], cu["cu_seqlens_k"], 7, 9, causal=True, return_lse=True
    )
    assert (out - want).abs().max() < 1e-5
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    q, k, v = tensors(sq=1)
    lengths = torch.tensor([5, 20], dtype=INT)
    out = fa.attention_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    assert torch.equal(out[:1], fa.attention(q[:1], k[:1, :5], v[:1, :5]))
    assert torch.equal(
        fa.attention_kvcache(q, k, v, cache_seqlens=5), fa.attention(q, k[:, :5], v[:, :5])
    )


def test_window_size_forms() -> None:
    q, k, v = tensors()
    want = OPS.forward(q, k, v, window_left=3, window_right=0)[0]
    for window in ((3, 0), [3, 0]):
        assert torch.equal(fa.attention(q, k, v, window_size=window), want)
    assert torch.equal(fa.attention(q, k, v, window_size=(3, None), causal=True), want)
    with pytest.raises(TypeError, match="window_size"):
        fa.attention(q, k, v, window_size=3)


def test_combine_and_its_gradient() -> None:
    q, k, v = tensors(torch.float64)
    k, v = k.requires_grad_(), v.requires_grad_()
    parts = [OPS.forward(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 7), (7, 8), (8, 20))]
    out, lse = fa.combine([o for o, _ in parts], [s for _, s in parts])
    want, want_lse = OPS.forward(q, k, v)
    assert (out - want).abs().max() < 1e-12 and (lse - want_lse).abs().max() < 1e-12
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum() + lse.sin().sum(), (k, v))
    expected = torch.autograd.grad((want * weight).sum() + want_lse.sin().sum(), (k, v))
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_flop_counter() -> None:
    q, k, v = (t.requires_grad_() for t in tensors())
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        fa.attention(q, k, v).sum().backward()
    pairs = 2 * 16 * 20 * 4
    assert counter.get_total_flops() == 2 * pairs * (16 + 8) + 2 * pairs * (3 * 16 + 2 * 8)
    (q, k, v), cu = packed()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        OPS.forward(q, k, v, **cu)
    assert counter.get_total_flops() == 2 * (4 * 9 + 0 * 3 + 7 * 7) * 4 * (16 + 8)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Rank 0 of four; collectives of the fake process group do nothing."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


def test_dtensor_shards_batch_and_heads(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    g = torch.Generator().manual_seed(0)
    local = [torch.randn(4, n, h, 8, generator=g) for n, h in ((6, 8), (9, 4), (9, 4))]
    want = [t.requires_grad_() for t in local]
    fa.attention(*want, causal=True).sum().backward()
    for placement, lse_placement in ((Shard(0), Shard(0)), (Shard(2), Shard(1))):
        q, k, v = (
            DTensor.from_local(t.detach(), mesh, [placement]).requires_grad_() for t in local
        )
        out, lse = fa.attention(q, k, v, causal=True, return_lse=True)
        assert out.placements == (placement,) and lse.placements == (lse_placement,)
        assert torch.equal(out.to_local(), fa.attention(*local, causal=True))
        out.to_local().sum().backward()
        for got, w in zip((q, k, v), want, strict=True):
            assert got.grad.placements == (placement,)
            assert torch.equal(got.grad.to_local(), w.grad)
    # Six key heads on four ranks: no whole groups, so no rank may keep its shard.
    q = DTensor.from_local(
        torch.randn(1, 6, 3, 8), mesh, [Shard(2)], shape=(1, 6, 12, 8), stride=(576, 96, 8, 1)
    )
    k = DTensor.from_local(
        torch.randn(1, 6, 2, 8), mesh, [Shard(2)], shape=(1, 6, 6, 8), stride=(288, 48, 8, 1)
    )
    assert OPS.forward(q, k, k)[0].placements == (Replicate(),)
    sinks = DTensor.from_local(torch.zeros(8), mesh, [Shard(0)])
    with pytest.raises((NotImplementedError, RuntimeError), match="sinks: a DTensor"):
        q, k, v = (DTensor.from_local(t.detach(), mesh, [Shard(2)]) for t in local)
        fa.attention(q, k, v, sinks=sinks)


def test_dtensor_options_are_refused_before_a_rule_is_asked(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DTensor may remember the choice for a call without the option (torch 2.11 does)."""
    from torch.distributed.tensor import DTensor, Shard

    monkeypatch.setattr(_sharding, "_choices", None)  # a rule that is asked fails in another way
    q, k, v = (
        DTensor.from_local(torch.randn(4, 6, h, 8), mesh, [Shard(2)]).requires_grad_()
        for h in (2, 1, 1)
    )
    for name, shape in (("sinks", (2,)), ("alibi_slopes", (2,)), ("seqused_k", (4,))):
        option = DTensor.from_local(torch.zeros(shape), mesh, [Shard(0)])
        with pytest.raises(NotImplementedError, match=f"{name}: a DTensor placed"):
            fa.attention(q, k, v, **{name: option})
    monkeypatch.undo()
    out, lse = fa.attention(q, k, v, return_lse=True)
    monkeypatch.setattr(_sharding, "_choices", None)
    with pytest.raises(NotImplementedError, match="dlse: a DTensor placed"):
        torch.autograd.grad(lse, q, torch.ones_like(lse))


# ---- the short way ------------------------------------------------------------------------------


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which raw operators were called past the composite."""
    calls: list[str] = []

    def spy(name: str) -> Any:
        function = getattr(_raw, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        return call

    for name in ("_dense", "_full"):
        monkeypatch.setattr(_raw, name, spy(name))
    return calls


@pytest.mark.parametrize("call", [OPS.forward, fa.attention], ids=["op", "function"])
def test_plain_calls_take_the_short_way(call: Any, short_calls: list[str]) -> None:
    q, k, v = tensors()
    call(q, k, v, causal=True, softmax_scale=0.3)
    call(q, k, v, softcap=1.0)
    assert short_calls == ["_dense", "_full"]
    call(q.requires_grad_(), k, v, causal=True)[0].sum().backward()
    call(q, k, v, sinks=torch.zeros(4, requires_grad=True))
    assert short_calls == ["_dense", "_full", "_dense", "_full"]


@pytest.mark.parametrize("call", [OPS.forward, fa.attention], ids=["op", "function"])
def test_watched_calls_take_the_composite(call: Any, short_calls: list[str]) -> None:
    q, k, v = tensors()
    with Seen():
        call(q, k, v)
    with FakeTensorMode() as mode:
        call(*(mode.from_tensor(t) for t in (q, k, v)))
    make_fx(lambda *t: call(*t))(q, k, v)
    torch.compile(lambda *t: call(*t), backend="aot_eager", fullgraph=True)(q, k, v)
    call(q.as_subclass(Subclass), k, v)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda t: call(t, k, v), (q,), (q,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(q, k, v)
    assert short_calls == []
