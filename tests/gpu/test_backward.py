# SPDX-License-Identifier: BSD-3-Clause
# Are the gradients of every backward row right, on the hand-picked problems and on drawn ones?

from __future__ import annotations

import math
import re
import zlib
from dataclasses import replace

import gradients
import harness
import pytest
import torch
from harness import DEVICE, ON_CPU, randn
from torch import Tensor

import fa
import libfa
from cases import Case, hand_picked, sweep
from compare import Result, assert_bitwise, assert_bitwise_result, assert_result

SWEEP_SEED = 20261201
SWEEP_COUNT = 120
SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16"}


def row_cases(row: libfa.Row) -> list[Case]:
    """Problems of the row's own size, on which this very row must run where it is the only one."""
    base = {"dtype": SHORT_DTYPE[row.dtype], "tag": row.backend}
    base |= {"dim": row.dim_qk, "dim_v": row.dim_v}
    if "_any" in row.id:
        base["softcap"] = 8.0
    band = {"causal": True} if row.mask == "band" else {}
    cases = [
        Case(**base, **band, q=257, k=321, batch=2, heads_q=4, heads_k=2),
        Case(**base, **band, q=row.tile_m, k=row.tile_n, heads_q=3, dlse=True),
        Case(**base, **band, q=1023, k=2047, heads_q=4, heads_k=1, values="x3"),
        Case(**base, **band, q=2, k=7, batch=3),
        Case(**base, **band, q=(70, 0, 257, 1), k=(90, 33, 130, 300), heads_q=4, heads_k=2),
        Case(**(base | {"dim": row.dim_qk - 8, "dim_v": row.dim_v - 24}), **band, q=300, k=193),
    ]
    if row.mask == "band":
        cases += [
            Case(**base, window=(100, 20), q=513, k=700, heads_q=4, heads_k=2),
            Case(**base, causal=True, q=700, k=300, heads_q=2, sinks="fp32", dlse=True),
            Case(**base, causal=True, chunk=150, q=400, k=470),
        ]
    if "_any" in row.id:
        cases.append(replace(cases[0], alibi="bh"))
        cases.append(replace(cases[0], alibi="h", softcap=0.0))
    return cases


def row_runs() -> list[tuple[libfa.Row, Case, bool]]:
    """Every case of every row; dense, grouped and packed ones also deterministic.

    Rows of the same size for less shared memory share their cases with the one that runs here.
    """
    runs = {}
    for row in gradients.rows():
        for number, case in enumerate(row_cases(row)):
            runs.setdefault((case, False), row)
            if number in (0, 2, 4, 6):
                runs.setdefault((case, True), row)
    return [(row, case, deterministic) for (case, deterministic), row in runs.items()]


@pytest.mark.parametrize(
    ("row", "case", "deterministic"),
    row_runs() or [pytest.param(None, None, 0, marks=pytest.mark.skip("no backward row here"))],
    ids=lambda value: getattr(value, "id", {True: "deterministic", False: "fast"}.get(value)),
)
def test_row(
    row: libfa.Row, case: Case, deterministic: bool, record_property: pytest.RecordProperty
) -> None:
    inputs = harness.inputs_of(case)
    options = {n: x for n, x in inputs.options.items() if not n.startswith("window_")}
    options.pop("out_dtype", None)
    with fa.backend(row.backend):
        plan = fa.explain(
            *(t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)),
            window_size=case.window,
            **options,
        )
    record_property("plan", plan)
    chosen = re.findall(r"^row\s+(\S+)", plan, re.MULTILINE)
    assert any(name.startswith(f"{row.backend}_bwd") for name in chosen), plan
    assert gradients.check_case(case, row.backend, deterministic=deterministic) == "ran"


def test_build_holds_backward_rows_for_this_device(cuda_only: None) -> None:
    """Everything below would pass without a single kernel: this is what fails then."""
    assert gradients.rows(), "the library holds no backward row for this device"


def can_be_case(case: Case) -> bool:
    return case.dtype in ("bf16", "fp16") and case.backward and case.cost < 3e9


HAND_PICKED = [case for case in hand_picked() if can_be_case(case)]
SWEEP = [case for case in sweep(SWEEP_SEED, SWEEP_COUNT) if can_be_case(case)]


@gradients.each_backend()
@pytest.mark.parametrize("case", HAND_PICKED, ids=lambda case: case.id)
def test_hand_picked(case: Case, backend: str) -> None:
    gradients.check_case(case, backend)


@gradients.each_backend()
@pytest.mark.parametrize("case", SWEEP, ids=lambda case: case.id)
def test_sweep(case: Case, backend: str) -> None:
    even = zlib.crc32(case.id.encode()) % 2 == 0  # hash() of a word changes from run to run
    gradients.check_case(case, backend, deterministic=even)


# ---- what lies outside the problem ---------------------------------------------------------------

POISONED = [
    Case(q=200, k=200, dim=128, causal=True, heads_q=2),
    Case(q=(129, 0, 255, 1), k=(70, 5, 255, 64), dim=128, causal=True, heads_q=4, heads_k=2),
    Case(q=(40, 60), k=(80, 60), seqused_q=(13, 60), seqused_k=(80, 22), slack_q=5, slack_k=70),
    Case(batch=3, q=100, k=200, seqused_q=(100, 0, 37), seqused_k=(200, 64, 0), causal=True),
    Case(batch=2, q=70, k=140, leftpad_k=(0, 33), seqused_k=(140, 99), causal=True, dlse=True),
    Case(batch=2, q=70, k=140, leftpad_k=(65, 140), window=(31, 5), sinks="fp32", dlse=True),
    Case(q=64, k=400, window=(30, 0), dim=128, tag="hidden_keys"),
    Case(q=300, k=40, causal=True, batch=2, sinks="same", dlse=True),
    Case(q=(129, 0, 255), k=(70, 5, 255), dim=128, causal=True, heads_q=4, heads_k=2, softcap=8.0),
    Case(batch=2, q=70, k=140, leftpad_k=(0, 33), seqused_k=(140, 99), softcap=4.0, alibi="h"),
]


@gradients.each_backend()
@pytest.mark.parametrize("case", POISONED, ids=lambda case: case.id)
def test_poison_changes_no_bit(case: Case, backend: str) -> None:
    """The Scrub rule: NaN or inf in rows of q, k, v and dout outside of the problem."""
    results = []
    for poison in (math.nan, math.inf, 0.0):
        inputs = case.make(DEVICE, poison=poison)
        out, lse = gradients.forward(inputs)
        results.append(gradients.call_guarded(inputs, backend, out, lse, deterministic=True))
    assert_result(results[0], gradients.right_for(case.make(DEVICE), results[0]))
    assert_bitwise_result(results[0], results[1])
    assert_bitwise_result(results[0], results[2])


@gradients.each_backend()
def test_rows_that_are_none_get_zeros(backend: str) -> None:
    """Rows of no sequence, left padding, rows and keys behind the lengths in use."""
    case = Case(batch=2, q=100, k=140, seqused_q=(30, 100), seqused_k=(140, 99), leftpad_k=(5, 33))
    inputs = case.make(DEVICE)
    result = gradients.call_guarded(inputs, backend, *gradients.forward(inputs))
    assert (result.dq[0, 30:] == 0).all()
    for grad in (result.dk, result.dv):
        assert (grad[0, :5] == 0).all() and (grad[1, :33] == 0).all() and (grad[1, 99:] == 0).all()
    packed = Case(q=(20, 30), k=(40, 0), slack_q=9, slack_k=70)
    inputs = packed.make(DEVICE)
    result = gradients.call_guarded(inputs, backend, *gradients.forward(inputs))
    assert (result.dq[20:] == 0).all()
    assert (result.dk[40:] == 0).all() and (result.dv[40:] == 0).all()


@gradients.each_backend()
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_no_query_row(backend: str, packed: bool) -> None:
    """dK, dV and dsinks are written all the same: zeros."""
    case = Case(q=(0, 0), k=(40, 3), heads_q=4, sinks="fp32", slack_k=5)
    if not packed:
        case = Case(batch=2, q=0, k=40, heads_q=4, sinks="same")
    inputs = case.make(DEVICE)
    harness.fill_free_memory(0.1)
    result = gradients.call_guarded(inputs, backend, *gradients.forward(inputs))
    assert result.dq.numel() == 0
    for grad in (result.dk, result.dv, result.dsinks):
        assert (grad == 0).all()


# ---- buffers -------------------------------------------------------------------------------------

ONE = Case(batch=2, heads_q=4, heads_k=2, q=130, k=200, dim=128, causal=True, dlse=True)


@gradients.each_backend()
def test_gradients_in_fp32(backend: str) -> None:
    """Unrounded: 16-bit gradients are these, rounded once."""
    inputs = ONE.make(DEVICE)
    out, lse = gradients.forward(inputs)
    wide = gradients.call_guarded(
        inputs, backend, out, lse, dtype=torch.float32, deterministic=True
    )
    assert_result(wide, gradients.right_for(inputs, wide))
    rounded = gradients.call(inputs, backend, out, lse, deterministic=True)
    for name in gradients.GRADIENTS:
        assert_bitwise(name, getattr(wide, name).to(inputs.q.dtype), getattr(rounded, name))
    chosen = gradients.call(inputs, backend, out, lse, deterministic=True, grad_dtype=torch.float32)
    for name in gradients.GRADIENTS:
        assert_bitwise(name, getattr(chosen, name), getattr(wide, name))


@gradients.each_backend()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accumulate(backend: str, dtype: torch.dtype) -> None:
    """Added to what the buffers hold; rows that are no key keep it."""
    case = replace(ONE, seqused_k=(200, 77), seqused_q=(130, 60))
    inputs = case.make(DEVICE)
    out, lse = gradients.forward(inputs)
    plain = gradients.call_guarded(
        inputs, backend, out, lse, dtype=torch.float32, deterministic=True
    )
    start = {
        name: randn(*getattr(plain, name).shape, dtype=dtype, seed=n)
        for n, name in enumerate(gradients.GRADIENTS)
    }
    added = gradients.call_guarded(
        *(inputs, backend, out, lse),
        **{"dtype": dtype, "start": start, "accumulate": True, "deterministic": True},
    )
    for name in gradients.GRADIENTS:
        want = (start[name].float() + getattr(plain, name)).to(dtype)
        assert torch.allclose(getattr(added, name).float(), want.float(), rtol=1e-2, atol=1e-6)
        if dtype == torch.float32:
            assert_bitwise(name, getattr(added, name), want)
    assert torch.equal(added.dk[1, 77:], start["dk"][1, 77:])
    assert torch.equal(added.dq[1, 60:], start["dq"][1, 60:])


@gradients.each_backend()
def test_strided_gradients(backend: str) -> None:
    """Buffers in [B, H, S, D] order, inside wider rows."""
    inputs = ONE.make(DEVICE)
    out, lse = gradients.forward(inputs)
    want = gradients.call(inputs, backend, out, lse, deterministic=True)
    buffers = {}
    for name, like in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        batch, rows, heads, dim = like.shape
        wide = torch.full((batch, heads, rows, dim + 64), math.nan, dtype=like.dtype, device=DEVICE)
        buffers[name] = wide[..., :dim].transpose(1, 2)
    options = gradients.backward_options(inputs, {"deterministic": True})
    with fa.backend(backend), torch.no_grad():
        torch.ops.fa.backward_out(
            inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, **options, **buffers
        )
    for name, buffer in buffers.items():
        assert_bitwise(name, buffer, getattr(want, name))


@gradients.each_backend()
def test_dout_of_every_kind(backend: str) -> None:
    """fp32, expanded in any dimension, a scalar's, transposed: the same numbers, the same bits."""
    inputs = replace(ONE, dlse=False).make(DEVICE)
    out, lse = gradients.forward(inputs)
    base = inputs.dout
    kinds = {
        "fp32": base.float(),
        "transposed": base.transpose(1, 2).contiguous().transpose(1, 2),
        "heads expanded": base[:, :, :1].expand_as(base),
        "batch expanded": base[:1].expand_as(base),
        "rows expanded": base[:, :1].expand_as(base),
        "one number": base.new_tensor(0.5).expand_as(base),
        "wide rows": torch.cat([base, base], -1)[..., : base.shape[-1]],
    }
    for name, dout in kinds.items():
        inputs.dout = dout
        got = gradients.call(inputs, backend, out, lse, deterministic=True)
        inputs.dout = dout.to(base.dtype).contiguous()
        want = gradients.call(inputs, backend, out, lse, deterministic=True)
        for grad in gradients.GRADIENTS:
            assert_bitwise(f"{name}: {grad}", getattr(got, grad), getattr(want, grad))


@gradients.each_backend()
def test_dlse_of_every_stride(backend: str) -> None:
    inputs = ONE.make(DEVICE)
    out, lse = gradients.forward(inputs)
    want = gradients.call(inputs, backend, out, lse, deterministic=True)
    dense = inputs.dlse
    inputs.dlse = dense.transpose(1, 2).contiguous().transpose(1, 2)
    got = gradients.call(inputs, backend, out, lse, deterministic=True)
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    inputs.dlse = dense
    both = gradients.call(inputs, backend, out, strided, deterministic=True)
    for name in gradients.GRADIENTS:
        assert_bitwise(name, getattr(got, name), getattr(want, name))
        assert_bitwise(name, getattr(both, name), getattr(want, name))


@gradients.each_backend()
def test_f95_a_packed_lse_inside_a_larger_buffer(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cudnn-frontend PR#462: the workspace of one layout of the LSE, used with another."""
    inputs = replace(ONE, batch=1, q=(100, 200), k=(150, 150), slack_q=212).make(DEVICE)
    out, lse = gradients.forward(inputs)
    want = gradients.call_guarded(inputs, backend, out, lse, deterministic=True)
    real, held = torch.empty, []

    def guarded(*size: int, **options: object) -> Tensor:
        if options.get("dtype") is not torch.uint8:
            return real(*size, **options)
        held.append(torch.full((size[0] + 1024,), 171, dtype=torch.uint8, device=DEVICE))
        return held[-1][512:-512]

    wide = torch.full((4, 2, 600), math.nan, device=DEVICE)
    strided = wide[:, 0, : lse.shape[1]].copy_(lse)
    inputs.dlse = wide[:, 1, : lse.shape[1]].copy_(inputs.dlse)
    monkeypatch.setattr(torch, "empty", guarded)
    got = gradients.call_guarded(inputs, backend, out, strided, deterministic=True)
    assert ON_CPU or backend == "cpu" or held, "kernels of the backward need a workspace"
    assert all((t[:512] == 171).all() and (t[-512:] == 171).all() for t in held)
    for name in gradients.GRADIENTS:
        assert_bitwise(name, getattr(got, name), getattr(want, name))


@gradients.each_backend()
def test_refused_calls_touch_no_gradient(backend: str) -> None:
    inputs = replace(ONE, dlse=False).make(DEVICE)
    out, lse = gradients.forward(inputs)
    held = {n: torch.full_like(getattr(inputs, n[1:]), 3.0) for n in gradients.GRADIENTS}
    good = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse)
    wrong = {
        "dk: shape": {**held, "dk": held["dk"][:, 1:]},
        "grad_dtype": {**held, "grad_dtype": torch.float32},
        "window_left": {**held, "window_left": -7},
    }
    if not harness.ON_CPU:
        wrong["dv: a stride is 0"] = {**held, "dv": held["dv"][:, :1].expand_as(held["dv"])}
    with fa.backend(backend), torch.no_grad():
        for text, options in wrong.items():
            with pytest.raises(ValueError, match=text.split(":")[0]):
                torch.ops.fa.backward_out(*good, **options)
    assert all((t == 3).all() for t in held.values())


# ---- many heads ----------------------------------------------------------------------------------

# More than are walked together, each batch entry fewer (plan_backward.cpp); fewer on the CPU.
MANY_HEADS = [
    Case(batch=9, heads_q=8, q=1000, k=1000, dim=128, causal=True),
    Case(batch=9, heads_q=8, heads_k=2, q=900, k=500, dim=128, causal=True),
    Case(batch=9, heads_q=16, heads_k=4, q=1100, k=1100, dim=64, window=(300, 0)),
    Case(batch=9, heads_q=4, q=1000, k=1300, dim=256, causal=True),
    Case(batch=9, heads_q=8, q=1000, k=1000, dim=96, dtype="fp16"),
    Case(batch=9, heads_q=8, heads_k=4, q=700, k=700, dim=128, softcap=20.0, causal=True),
]


@gradients.each_backend()
@pytest.mark.parametrize("case", MANY_HEADS, ids=lambda case: case.id)
def test_many_heads(case: Case, backend: str) -> None:
    """Each batch entry gets what it gets alone, and the same bits again, whatever memory held."""
    if ON_CPU:
        case = replace(case, batch=2, q=70, k=50)
    elif not gradients.covered(case, backend):
        pytest.skip(f"{backend} has no backward row for {case.id}")
    inputs = case.make(DEVICE)
    tensors = [inputs.dout, inputs.q, inputs.k, inputs.v, *gradients.forward(inputs)]
    options = gradients.backward_options(inputs, {})

    def backward(parts: list[Tensor], deterministic: bool = True) -> Result:
        harness.fill_free_memory()
        with fa.backend(backend), torch.no_grad():
            grads = torch.ops.fa.backward(*parts, **options, deterministic=deterministic)
        return Result(parts[4], parts[5], *grads[:3])

    whole, again = backward(tensors), backward(tensors)
    fast = [backward(tensors, deterministic=False) for _ in range(3)]
    alone = [backward([t[i : i + 1] for t in tensors]) for i in range(case.batch)]
    for name in gradients.GRADIENTS:
        assert_bitwise(name, getattr(again, name), getattr(whole, name))
        want = torch.cat([getattr(one, name) for one in alone]).float()
        for got in (whole, *fast):
            error = (getattr(got, name).float() - want).abs().max()
            assert error <= 0.02 * want.abs().max(), f"{name} off by {error}"


# ---- more tiles than multiprocessors -------------------------------------------------------------

# Thread blocks of some rows go on to another tile. Between tiles with work: sequences without rows
# of q or of k, and places that belong to no sequence.
PACKED_Q, PACKED_K = (70, 300, 0, 1, 129, 200), (90, 0, 130, 500, 128, 1)
MANY_TILES = [
    Case(**lengths, **band, dtype=dtype, dim=dim, heads_q=16, heads_k=8)
    for dim, dtype in ((64, "bf16"), (96, "bf16"), (128, "fp16"))
    for lengths in (
        {"q": PACKED_Q * (1 if ON_CPU else 8), "k": PACKED_K * (1 if ON_CPU else 8)},
        {"q": PACKED_Q, "k": 300},
        {"batch": 1 if ON_CPU else 12, "q": 150, "k": 520},
    )
    for band in ({"causal": True}, {"window": (60, 200)})
]


@gradients.each_backend()
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("case", MANY_TILES, ids=lambda case: case.id)
def test_more_tiles_than_multiprocessors(case: Case, deterministic: bool, backend: str) -> None:
    gradients.check_case(case, backend, deterministic=deterministic)


# ---- dropout -------------------------------------------------------------------------------------

DROPPED = [
    Case(batch=2, heads_q=4, heads_k=2, q=130, k=200, dim=64, causal=True, dlse=True),
    Case(q=(70, 0, 129), k=(90, 5, 257), heads_q=4, dim=128, window=(64, 10)),
    Case(dtype="fp16", batch=2, heads_q=2, q=257, k=300, dim=128, sinks="fp32"),
]


@gradients.each_backend()
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("case", DROPPED, ids=lambda case: case.id)
def test_dropout(case: Case, p: float, backend: str) -> None:
    """Both passes drop the same weights: those that docs/numerics.md says."""
    inputs = case.make(DEVICE)
    seed_offset = torch.tensor([2**40 + 11, 7], dtype=torch.int64, device=DEVICE)
    inputs.options |= {"dropout_p": p, "philox_seed_offset": seed_offset}
    out, lse = gradients.forward(inputs)
    try:
        result = gradients.call_guarded(inputs, backend, out, lse, deterministic=True)
    except NotImplementedError as error:
        assert "dropout" in str(error)
        pytest.skip(f"{backend} has no backward row with dropout for {case.id}")
    assert_result(result, gradients.right_for(inputs, result))
