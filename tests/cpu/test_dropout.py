# SPDX-License-Identifier: BSD-3-Clause
# Does dropout drop what docs/numerics.md says, everywhere the same, forward and backward?
"""The generator against its published answers, the mask against the formula, then whole calls."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa
from cases import Case, sweep
from compare import Result, assert_bitwise, assert_lse, assert_result, expected
from fa import _cpu_tiles, _philox, cpu, reference
from paging import to_pages

OPS = torch.ops.fa
INT = torch.int32
SEED = torch.tensor([20261129, 5])


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


# ---- the generator ------------------------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    """In Python numbers, as the paper writes it (Salmon et al., 2011)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        x, y = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (y >> 32) ^ c1 ^ k0, y % 2**32, (x >> 32) ^ c3 ^ k1, x % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def in_torch(counter: list[int], key: list[int]) -> list[int]:
    words = _philox.philox4x32(tuple(torch.tensor(c) for c in counter), (key[0], key[1]))  # type: ignore[arg-type]
    return [int(w) for w in words]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert philox(counter, key) == answer
    assert in_torch(counter, key) == answer


def test_random_counters() -> None:
    rng = random.Random(1)
    for _ in range(50):
        counter, key = ([rng.getrandbits(32) for _ in range(n)] for n in (4, 2))
        assert in_torch(counter, key) == philox(counter, key)


def byte_of(seed: int, offset: int, head: int, i: int, j: int) -> int:
    words = philox([j // 16, i, head, offset % 2**32], [seed % 2**32, (seed >> 32) % 2**32])
    return words[j % 16 // 4] >> 8 * (j % 4) & 255


def test_the_worked_example_of_the_documentation() -> None:
    got = _philox.random_bytes(20261129, 5, torch.tensor([1 * 4 + 3]), (3, 4), (32, 48))
    want = [39, 48, 217, 87, 91, 114, 237, 64, 180, 143, 84, 91, 182, 53, 126, 249]
    assert got.flatten().tolist() == want
    text = (fa_root() / "docs" / "numerics.md").read_text()
    shown = " · ".join(" ".join(map(str, want[n : n + 4])) for n in range(0, 16, 4))
    assert shown in text and "keys 32, 33, 45" in text
    gone = _philox.dropped(0.25, (20261129, 5), torch.tensor([7]), (3, 4), (32, 48))
    assert (gone.flatten().nonzero().flatten() + 32).tolist() == [32, 33, 45]


def fa_root() -> Any:
    import host_build

    return host_build.ROOT


@pytest.mark.parametrize(("seed", "offset"), [(7, 0), (-1, -(2**63)), (2**62 + 3, 2**40 + 9)])
def test_bytes_are_the_formula(seed: int, offset: int) -> None:
    heads, rows, keys = torch.tensor([0, 5, 1023]), (2, 5), (13, 50)
    got = _philox.random_bytes(seed, offset, heads, rows, keys)
    want = [
        [[byte_of(seed, offset, int(h), i, j) for j in range(*keys)] for i in range(*rows)]
        for h in heads
    ]
    assert got.tolist() == want


def test_a_tile_holds_the_bytes_of_its_place() -> None:
    heads = torch.arange(3)
    whole = _philox.random_bytes(3, 4, heads, (0, 40), (0, 100))
    for rows in ((0, 40), (7, 8), (39, 40)):
        for keys in ((0, 100), (1, 2), (15, 17), (16, 32), (33, 99)):
            part = _philox.random_bytes(3, 4, heads, rows, keys)
            assert torch.equal(part, whole[:, slice(*rows), slice(*keys)])
    # Seed, offset, head, row and key block each matter.
    assert not torch.equal(whole, _philox.random_bytes(4, 4, heads, (0, 40), (0, 100)))
    assert not torch.equal(whole, _philox.random_bytes(3, 5, heads, (0, 40), (0, 100)))
    assert not torch.equal(whole, _philox.random_bytes(3 + 2**32, 4, heads, (0, 40), (0, 100)))
    assert len({bytes(b.tolist()) for b in whole[..., :96].reshape(-1, 16)}) == 3 * 40 * 6


@pytest.mark.parametrize(
    ("p", "t"),
    [
        *((0.0, 0), (0.001, 0), (1 / 512, 1), (0.1, 26), (0.5, 128), (0.998, 255)),
        *((511 / 512, 256), (0.9999, 256)),
    ],
)
def test_thresholds(p: float, t: int) -> None:
    assert _philox.threshold(p) == t
    assert _philox.keep_probability(p) == (256 - t) / 256


def test_statistics() -> None:
    """Bits are fair over heads, rows and keys, and neighbours in every direction independent."""
    p = 0.3
    heads, rows, keys = 16, 256, 512
    gone = _philox.dropped(p, (11, 22), torch.arange(heads), (0, rows), (0, keys)).double()
    share = 1 - _philox.keep_probability(p)
    deviation = math.sqrt(share * (1 - share))
    assert abs(float(gone.mean()) - share) < 4 * deviation / math.sqrt(gone.numel())
    for dims in ((1, 2), (0, 2), (0, 1)):
        means = gone.mean(dim=dims)
        spread = deviation / math.sqrt(gone.numel() / means.numel())
        assert float((means - share).abs().max()) < 5 * spread
        # The means scatter as independent bits would: neither too much nor too little.
        chi = float(((means - share) / spread).square().sum())
        assert abs(chi - means.numel()) < 5 * math.sqrt(2 * means.numel())
    centred = gone - share
    for dim in range(3):
        for step in (1, 2, 4, 15, 16):
            if step < gone.shape[dim]:
                a = centred.narrow(dim, 0, gone.shape[dim] - step)
                b = centred.narrow(dim, step, gone.shape[dim] - step)
                correlation = float((a * b).mean()) / deviation**2
                assert abs(correlation) < 5 / math.sqrt(a.numel()), (dim, step)
    other = _philox.dropped(p, (11, 23), torch.arange(heads), (0, rows), (0, keys)).double()
    correlation = float((centred * (other - share)).mean()) / deviation**2
    assert abs(correlation) < 5 / math.sqrt(gone.numel())
    whole = _philox.random_bytes(1, 2, torch.arange(heads), (0, rows), (0, keys)).long()
    counts = torch.bincount(whole.flatten(), minlength=256).double()
    mean = whole.numel() / 256
    assert abs(float(((counts - mean) ** 2 / mean).sum()) - 255) < 5 * math.sqrt(2 * 255)


# ---- attention ----------------------------------------------------------------------------------


def run(inputs: Any) -> Result:
    out, lse = cpu.forward(inputs.q, inputs.k, inputs.v, **inputs.options)
    options = inputs.options | {"dlse": inputs.dlse}
    grads = cpu.backward(inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, **options)
    return Result(out, lse, *grads[:3], grads[3] if "sinks" in inputs.options else None)


@pytest.mark.parametrize("case", sweep(31, 40, max_length=150), ids=lambda case: case.id)
def test_cases(case: Case) -> None:
    """Every other option with dropout, against the reference."""
    case = replace(case, backward=True)
    results = []
    for poison in (math.nan, math.inf):
        inputs = case.make(poison=poison)
        p = random.Random(case.id).choice((0.1, 0.5, 0.9))
        inputs.options |= {"dropout_p": p, "philox_seed_offset": SEED}
        results.append(run(inputs))
        if poison is math.nan:
            assert_result(results[0], expected(inputs))
    for (name, a), (_, b) in zip(results[0].items(), results[1].items(), strict=True):
        assert_bitwise(name, a, b)


@pytest.mark.parametrize("case", sweep(32, 12, max_length=150), ids=lambda case: case.id)
def test_many_small_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu_tiles, "TILE_M", 16)
    monkeypatch.setattr(_cpu_tiles, "TILE_N", 8)
    monkeypatch.setattr(_cpu_tiles, "TILE_SCORES", 900)
    inputs = replace(case, backward=True).make()
    inputs.options |= {"dropout_p": 0.4, "philox_seed_offset": SEED}
    assert_result(run(inputs), expected(inputs))


def mask_of_forward(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """[B, Hq, Sq, Sk] (packed [Hq, total_q, Sk]): P after dropout, through V = identity."""
    length = int(options.pop("identity", k.shape[-3]))
    eye = torch.eye(length, dtype=k.dtype)
    v = eye.repeat(k.shape[0] // length, 1)[:, None] if k.dim() == 3 else eye[None, :, None]
    v = v.expand(*k.shape[:-1], length)
    return OPS.forward(q, k, v, **options)[0].transpose(-2, -3)


def test_weights_are_those_of_the_formula() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 9, 4, 8, generator=g), torch.randn(2, 40, 2, 8, generator=g)
    p = 0.1
    plain = mask_of_forward(q, k)
    got = mask_of_forward(q, k, dropout_p=p, philox_seed_offset=SEED)
    seed, offset = SEED.tolist()
    for b in range(2):
        for h in range(4):
            for i in range(9):
                for j in range(40):
                    kept = byte_of(seed, offset, b * 4 + h, i, j) >= 26
                    want = float(plain[b, h, i, j]) * 256 / 230 if kept else 0.0
                    assert abs(float(got[b, h, i, j]) - want) < 1e-6


def test_lse_is_without_dropout() -> None:
    inputs = Case(q=70, k=130, causal=True, heads_q=4, heads_k=2, sinks="fp32").make()
    _, want = cpu.forward(inputs.q, inputs.k, inputs.v, **inputs.options)
    inputs.options |= {"dropout_p": 0.5, "philox_seed_offset": SEED}
    assert_bitwise("lse", cpu.forward(inputs.q, inputs.k, inputs.v, **inputs.options)[1], want)


def test_forward_and_backward_drop_the_same() -> None:
    """With V and dO the identity, O = P Z and dV = (P Z)^T."""
    n = 300
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, n, 1, 8, generator=g, dtype=torch.float64) for _ in range(2))
    eye = torch.eye(n, dtype=torch.float64)[None, :, None]
    options = {"dropout_p": 0.37, "philox_seed_offset": SEED, "causal": True}
    out, lse = OPS.forward(q, k, eye, **options)
    _, _, dv, _ = OPS.backward(eye, q, k, eye, out, lse, **options)
    assert torch.equal(out[0, :, 0] == 0, dv[0, :, 0].T == 0)
    assert (out[0, :, 0] - dv[0, :, 0].T).abs().max() < 1e-12
    gone = _philox.dropped(0.37, SEED.tolist(), torch.tensor([0]), (0, n), (0, n))[0]
    below = torch.ones(n, n, dtype=torch.bool).tril()
    assert torch.equal((out[0, :, 0] == 0) & below, gone & below)


def test_gradients_by_finite_differences() -> None:
    g = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(1, n, h, 4, generator=g, dtype=torch.float64).requires_grad_()
        for n, h in ((5, 2), (7, 1), (7, 1))
    )
    assert torch.autograd.gradcheck(
        lambda *t: OPS.forward(*t, dropout_p=0.4, philox_seed_offset=SEED, softcap=2.0), (q, k, v)
    )


@pytest.mark.parametrize("causal", [False, True])
def test_dense_packed_padded_and_paged_drop_the_same(causal: bool) -> None:
    """Places count from the first real row and key of a sequence, wherever they lie."""
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(3, 20, 4, 8, generator=g), torch.randn(3, 33, 2, 8, generator=g)
    v = torch.randn(3, 33, 2, 8, generator=g)
    options: dict[str, Any] = {"dropout_p": 0.25, "philox_seed_offset": SEED, "causal": causal}
    want, want_lse = OPS.forward(q, k, v, **options)
    cu_q, cu_k = (torch.arange(4, dtype=INT) * n for n in (20, 33))
    packed, packed_lse = OPS.forward(
        *(t.flatten(0, 1) for t in (q, k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options
    )
    wide = [torch.nn.functional.pad(t, (0, 0, 0, 0, 9, 0), value=math.nan) for t in (k, v)]
    padded = OPS.forward(q, *wide, leftpad_k=ints(9, 9, 9), **options)[0]
    pools, table = to_pages([k, v], 8, g)
    paged = OPS.forward(q, *pools, page_table=table, seqused_k=ints(33, 33, 33), **options)[0]
    for got in (packed.unflatten(0, (3, 20)), padded, paged):
        assert (got - want).abs().max() < 1e-6
        assert torch.equal(got == 0, want == 0)
    assert_lse(packed_lse.unflatten(1, (3, 20)).transpose(0, 1), want_lse.double())


def test_expectation_is_attention_without_dropout() -> None:
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, n, 2, 8, generator=g) for n in (3, 50, 50))
    want = OPS.forward(q, k, v)[0]
    draws = torch.stack(
        [
            OPS.forward(q, k, v, dropout_p=0.3, philox_seed_offset=torch.tensor([9, n]))[0]
            for n in range(400)
        ]
    )
    spread = draws.std(dim=0) / 20
    assert ((draws.mean(dim=0) - want).abs() / spread).max() < 4.5


def test_everything_dropped() -> None:
    q, k, v = (torch.randn(1, 5, 1, 8) for _ in range(3))
    options = {"dropout_p": 0.9999, "philox_seed_offset": SEED}
    for call in (OPS.forward, reference.attention):
        out, lse = call(q, k, v, **options)
        assert (out == 0).all() and torch.isfinite(lse).all()
    out, lse = OPS.forward(q, k, v, **options)
    grads = OPS.backward(torch.ones_like(out), q, k, v, out, lse, **options)
    assert all((t == 0).all() for t in grads[:3])


# ---- the seed -----------------------------------------------------------------------------------


def tensors(grad: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(2, 17, 2, 8, generator=g).requires_grad_(grad) for _ in range(3)]


@pytest.mark.parametrize("call", [lambda *t, **o: OPS.forward(*t, **o)[0], fa.attention])
@pytest.mark.parametrize("grad", [False, True])
def test_the_drawn_seed_follows_the_generator(call: Any, grad: bool) -> None:
    inputs = tensors(grad)

    def results() -> list[Tensor]:
        out = call(*inputs, dropout_p=0.5)
        grads = torch.autograd.grad(out.square().sum(), inputs) if grad else ()
        return [out.detach(), *grads]

    torch.manual_seed(1)
    first, second = results(), results()
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(1)
    again = results()
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(1)
    call(*inputs)  # no dropout, no draw
    assert torch.equal(results()[0], first[0])


def test_the_backward_uses_the_seed_of_its_forward() -> None:
    inputs = tensors(True)
    torch.manual_seed(3)
    out = fa.attention(*inputs, dropout_p=0.5)
    fa.attention(*inputs, dropout_p=0.5)
    got = torch.autograd.grad(out.square().sum(), inputs)
    torch.manual_seed(3)
    drawn = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64)
    ref, _ = reference.attention(
        *(t.double() for t in inputs), dropout_p=0.5, philox_seed_offset=drawn
    )
    want = torch.autograd.grad(ref.square().sum(), inputs)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-4


def test_compile_and_checkpoint_and_opcheck() -> None:
    def loss(*t: Tensor) -> Tensor:
        return fa.attention(*t, dropout_p=0.5, causal=True).square().sum()

    inputs = tensors(True)
    torch.manual_seed(2)
    want = torch.autograd.grad(loss(*inputs), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.manual_seed(2)
    got = torch.autograd.grad(compiled(*inputs), inputs)
    torch.manual_seed(2)
    kept = torch.utils.checkpoint.checkpoint(loss, *inputs, use_reentrant=False)
    recomputed = torch.autograd.grad(kept, inputs)
    for a, b, c in zip(want, got, recomputed, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    options = {"dropout_p": 0.5, "philox_seed_offset": SEED}
    for op in (OPS.forward, OPS._forward):
        torch.library.opcheck(op.default, [t.detach() for t in inputs], options)
    torch.library.opcheck(OPS.forward.default, inputs, options)
    out, lse = OPS.forward(*(t.detach() for t in inputs), **options)
    torch.library.opcheck(
        OPS.backward.default, (out, *(t.detach() for t in inputs), out, lse), options
    )


@pytest.mark.parametrize("decomposed", [False, True])
def test_an_exported_program_draws_at_every_call(decomposed: bool) -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return fa.attention(q, k, v, dropout_p=0.5)

    program = torch.export.export(Attend(), tuple(tensors()))
    module = (program.run_decompositions({}) if decomposed else program).module()
    torch.manual_seed(1)
    first, second = module(*tensors()), module(*tensors())
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, fa.attention(*tensors(), dropout_p=0.5))


def test_the_raw_operator_needs_a_seed() -> None:
    q, k, v = tensors()
    with pytest.raises(
        ValueError, match=r"philox_seed_offset: None.*dropout_p is 0\.5.*int64 \[2\]"
    ):
        OPS._forward(q, k, v, dropout_p=0.5)
    out, lse = OPS.forward(q, k, v)
    with pytest.raises(ValueError, match="philox_seed_offset: None"):
        OPS.backward(out, q, k, v, out, lse, dropout_p=0.5)
