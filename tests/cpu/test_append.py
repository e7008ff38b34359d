# SPDX-License-Identifier: BSD-3-Clause
# Do new keys end up in their places of a cache, rotated for their positions, and nothing else?
"""fa.append_kv, fa::apply_rotary and fa.attention_kvcache over them, without a GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import fa
from compare import assert_bitwise
from fa import reference
from paging import from_pages, to_pages

OPS = torch.ops.fa
INT = torch.int32
FP8 = torch.float8_e4m3fn


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g).to(dtype)


def tables(d: int, positions: int = 64) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions)[:, None] / 100.0 ** (torch.arange(d // 2) * 2 / d)
    return angle.cos(), angle.sin()


def turned(x: list[float], p: int, cos: Tensor, sin: Tensor, interleaved: bool) -> list[float]:
    """One head of one row, one Python number at a time."""
    out, half = list(x), cos.shape[1]
    for m in range(half):
        a, b = (2 * m, 2 * m + 1) if interleaved else (m, m + half)
        c, s = float(cos[p, m]), float(sin[p, m])
        out[a], out[b] = x[a] * c - x[b] * s, x[a] * s + x[b] * c
    return out


# ---- rotary -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d", [2, 6, 10])
def test_rotation_of_single_numbers(d: int, interleaved: bool) -> None:
    cos, sin = tables(d)
    x, at = draw(2, 5, 3, 10), torch.tensor([[0, 3, 63, 1, 1], [7, 8, 9, 10, 11]])
    got = OPS.apply_rotary(x, cos, sin, positions=at, interleaved=interleaved)
    for b, i, h in itertools.product(range(2), range(5), range(3)):
        want = turned(x[b, i, h].tolist(), int(at[b, i]), cos, sin, interleaved)
        assert (got[b, i, h] - torch.tensor(want)).abs().max() < 1e-6
    # Packed, the default positions, and positions that broadcast.
    assert torch.equal(OPS.apply_rotary(x[0], cos, sin), OPS.apply_rotary(x, cos, sin)[0])
    rows = torch.arange(5)
    assert torch.equal(OPS.apply_rotary(x, cos, sin, positions=rows), OPS.apply_rotary(x, cos, sin))
    assert torch.equal(
        OPS.apply_rotary(x, cos, sin, positions=ints(4, 9)[:, None]),
        OPS.apply_rotary(x, cos, sin, positions=ints(4, 9)[:, None].expand(2, 5)),
    )


def test_scores_depend_on_distance_only() -> None:
    cos, sin = (t.double() for t in tables(8, 200))
    q, k = draw(1, 1, 1, 8).double(), draw(1, 1, 1, 8, seed=1).double()

    def score(i: int, j: int) -> float:
        a = OPS.apply_rotary(q, cos, sin, positions=ints(i))
        return float((a * OPS.apply_rotary(k, cos, sin, positions=ints(j))).sum())

    assert abs(score(17, 5) - score(112, 100)) < 1e-6


def test_rotary_rounds_once_and_follows_strides() -> None:
    x, (cos, sin) = draw(2, 5, 4, 16), tables(16)
    half = x.bfloat16()
    want = OPS.apply_rotary(half.float(), cos, sin).bfloat16()
    assert_bitwise("x", OPS.apply_rotary(half, cos, sin), want)
    view = half.transpose(1, 2).contiguous().transpose(1, 2)
    got = OPS.apply_rotary(view, cos, sin)
    assert got.stride() == view.stride() and torch.equal(got, want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_gradient(interleaved: bool) -> None:
    cos, sin = (t.double() for t in tables(6))
    x, at = draw(1, 4, 2, 8).double().requires_grad_(), ints(9, 1, 0, 5)
    assert torch.autograd.gradcheck(
        lambda t: OPS.apply_rotary(t, cos, sin, positions=at, interleaved=interleaved), x
    )
    torch.library.opcheck(
        OPS.apply_rotary.default,
        (x.float().detach().requires_grad_(), cos.float(), sin.float()),
        {"positions": at, "interleaved": interleaved},
    )
    with pytest.raises(NotImplementedError, match="cos: requires_grad"):
        OPS.apply_rotary(x, cos.requires_grad_(), sin)


# ---- append -------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cache rows": {"kv_batch_idx": ints(4, 0, 2)},
    "leftpad": {"leftpad_k": ints(0, 3, 7)},
    "rotary": {"rotary": 16},
    "part rotary": {"rotary": 6, "rotary_interleaved": True},
    "positions": {"rotary": 16, "rotary_seqlens": ints(1, 0, 30)},
    "packed": {"cu_seqlens_new": ints(1, 4, 4, 9), "rotary": 8, "leftpad_k": ints(0, 3, 7)},
    "packed rows": {"cu_seqlens_new": ints(0, 5, 6, 11), "kv_batch_idx": ints(1, 3, 0)},
}
USED = (0, 11, 29)


def problem(layout: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    options = dict(layout)
    rows = 5 if "kv_batch_idx" in options else 3
    lead = (11,) if "cu_seqlens_new" in options else (3, 5)
    new = [draw(*lead, 2, d, seed=3).to(dtype) for d in (16, 8)]
    caches = [draw(rows, 40, 2, d, seed=4).to(dtype) for d in (16, 8)]
    if "rotary" in options:
        options["rotary_cos"], options["rotary_sin"] = tables(options.pop("rotary"))
    return [*new, *caches], {**options, "cache_seqlens": ints(*USED)}


def appended(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The caches as the formula has them, row by row."""
    k_new, v_new, k_cache, v_cache = (t.clone() for t in tensors)
    cos, sin = options.get("rotary_cos"), options.get("rotary_sin")
    cu, rows = options.get("cu_seqlens_new"), options.get("kv_batch_idx")
    starts = options.get("rotary_seqlens", options["cache_seqlens"])
    for b, used in enumerate(options["cache_seqlens"].tolist()):
        row = b if rows is None else int(rows[b])
        k_b, v_b = (t[b] if cu is None else t[int(cu[b]) : int(cu[b + 1])] for t in (k_new, v_new))
        for t in range(len(k_b)):
            new = k_b[t]
            if cos is not None:
                new = OPS.apply_rotary(
                    new[None],
                    cos,
                    sin,
                    positions=starts[b : b + 1] + t,
                    interleaved=options.get("rotary_interleaved", False),
                )[0]
            k_cache[row, used + t], v_cache[row, used + t] = new, v_b[t]
    return [k_cache, v_cache]


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_dense(layout: dict[str, Any], dtype: torch.dtype) -> None:
    tensors, options = problem(layout, dtype)
    want = appended(tensors, options)
    before = [t.clone() for t in tensors[:2]]
    assert fa.append_kv(*tensors, **options) is None
    for name, got, right in zip(("k", "v"), tensors[2:], want, strict=True):
        assert torch.equal(bits(got), bits(right)), name
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(tensors, before, strict=False))
    assert options["cache_seqlens"].tolist() == list(USED)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_paged(layout: dict[str, Any], page_size: int) -> None:
    tensors, options = problem(layout, torch.float32)
    want = appended(tensors, options)
    pools, table = to_pages(
        tensors[2:], page_size, torch.Generator().manual_seed(0), poison=math.nan
    )
    before = [p.clone() for p in pools]
    fa.append_kv(*tensors[:2], *pools, page_table=table, **options)
    spare = set(range(len(pools[0]))) - set(table.flatten().tolist())
    for pool, right, old in zip(pools, want, before, strict=True):
        assert torch.equal(from_pages(pool, table, 40), right)
        for page in spare:
            assert torch.equal(bits(pool[page]), bits(old[page]))


def test_entries_of_other_pages_are_not_read() -> None:
    tensors, options = problem({}, torch.float32)
    want = appended(tensors, options)
    pools, table = to_pages(tensors[2:], 4, torch.Generator().manual_seed(0))
    whole = table.clone()
    for row, used in enumerate(USED):
        written = range(used // 4, (used + 4) // 4 + 1)
        for column in set(range(10)) - set(written):
            table[row, column] = -1
    fa.append_kv(*tensors[:2], *pools, page_table=table, **options)
    assert torch.equal(from_pages(pools[0], whole, 40), want[0])


def test_strided_caches_and_a_cache_appended_to_itself() -> None:
    tensors, options = problem({}, torch.float32)
    want = appended(tensors, options)
    both = torch.full((2, 3, 2, 40, 16), math.nan)  # K and V of a layer, heads before keys
    both[0], both[1, ..., :8] = tensors[2].transpose(1, 2), tensors[3].transpose(1, 2)
    views = both[0].transpose(1, 2), both[1, ..., :8].transpose(1, 2)
    fa.append_kv(*tensors[:2], *views, **options)
    assert torch.equal(views[0], want[0]) and torch.equal(views[1], want[1])
    assert torch.isnan(both[1, ..., 8:]).all()
    k, v = (t.clone() for t in tensors[2:])
    lengths = ints(1, 2, 3)  # moves rows 0 .. 4 by 1 .. 3: source and target overlap
    want = [k.clone(), v.clone()]
    for b, n in enumerate(lengths.tolist()):
        want[0][b, n : n + 5], want[1][b, n : n + 5] = k[b, :5], v[b, :5]
    fa.append_kv(k[:, :5], v[:, :5], k, v, cache_seqlens=lengths)
    assert torch.equal(k, want[0]) and torch.equal(v, want[1])


# ---- attention over it --------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_kvcache_is_append_rotate_attend(layout: dict[str, Any], paged: bool, causal: bool) -> None:
    """FA#1402: without a mask all queries stand at cache_seqlens, else query i at + i."""
    tensors, options = problem(layout, torch.float64)
    cos, sin = (options.get(n) for n in ("rotary_cos", "rotary_sin"))
    for name in ("rotary_cos", "rotary_sin"):
        if name in options:
            options[name] = options[name].double()
    q = draw(3, 5, 4, 16).double()
    k_all, v_all = appended(tensors, options)
    cu = options.get("cu_seqlens_new")
    used = options["cache_seqlens"] + (5 if cu is None else cu.diff())
    turned_q = q
    if cos is not None:
        starts = options.get("rotary_seqlens", options["cache_seqlens"])
        at = starts[:, None] + (torch.arange(5) if causal else torch.zeros(5)).int()
        turned_q = OPS.apply_rotary(
            q,
            cos.double(),
            sin.double(),
            positions=at,
            interleaved=options.get("rotary_interleaved", False),
        )
    where = {n: options[n] for n in ("kv_batch_idx", "leftpad_k") if n in options}
    want, want_lse = reference.attention(
        turned_q, k_all, v_all, seqused_k=used, causal=causal, **where
    )
    caches = tensors[2:]
    if paged:
        caches, options["page_table"] = to_pages(caches, 8, torch.Generator().manual_seed(0))
    out, lse = fa.attention_kvcache(
        q, *caches, *tensors[:2], causal=causal, return_lse=True, **options
    )
    assert (out - want).abs().max() < 1e-12
    assert (lse - want_lse).nan_to_num(0.0).abs().max() < 1e-12
    got = from_pages(caches[0], options["page_table"], 40) if paged else caches[0]
    assert (got - k_all).abs().max() < 1e-12


def test_decoding_step_by_step_equals_one_causal_call() -> None:
    """Megatron-LM#1425: 63 cached keys and one new give the last row of the full call."""
    cos, sin = tables(16)
    q, k, v = draw(2, 20, 4, 16), draw(2, 20, 2, 16, seed=1), draw(2, 20, 2, 16, seed=2)
    whole = fa.attention(
        OPS.apply_rotary(q, cos, sin), OPS.apply_rotary(k, cos, sin), v, causal=True
    )
    pools, table = to_pages([torch.full((2, 24, 2, 16), math.nan)] * 2, 4, torch.Generator())
    begin = 0
    for n in (7, 1, 4, 1, 7):
        part = slice(begin, begin + n)
        out = fa.attention_kvcache(
            *(q[:, part], *pools, k[:, part], v[:, part]),
            cache_seqlens=begin,
            page_table=table,
            rotary_cos=cos,
            rotary_sin=sin,
            causal=True,
        )
        assert (out - whole[:, part]).abs().max() < 1e-5
        begin += n


@pytest.mark.parametrize("used", [False, True])
def test_packed_queries_are_rotated_by_their_rows(used: bool) -> None:
    cos, sin = tables(8, 32)
    q, k, v = draw(14, 4, 8), draw(3, 30, 2, 8), draw(3, 30, 2, 8, seed=1)
    cu, lengths = ints(1, 5, 5, 12), ints(3, 9, 25)
    options: dict[str, Any] = {"cu_seqlens_q": cu, "window_size": (6, 2)}
    q_lens = [4, 0, 7]
    if used:
        options["seqused_q"], q_lens = ints(2, 0, 6), [2, 0, 6]
    out = fa.attention_kvcache(
        q, k, v, cache_seqlens=lengths, rotary_cos=cos, rotary_sin=sin, **options
    )
    for b, n in enumerate(q_lens):
        first, length = int(cu[b]), int(lengths[b])
        rows = OPS.apply_rotary(q[first : first + n], cos, sin, positions=length + torch.arange(n))
        want, _ = reference.attention(
            *(rows[None], k[b : b + 1, :length], v[b : b + 1, :length]),
            window_left=6,
            window_right=2,
        )
        assert torch.allclose(out[first : first + n], want[0].float(), atol=1e-5)
    # Dense rows that no sequence has may stand anywhere, beyond the tables too.
    dense = fa.attention_kvcache(
        *(draw(3, 10, 4, 8), k, v),
        cache_seqlens=lengths,
        rotary_cos=cos,
        rotary_sin=sin,
        causal=True,
        seqused_q=ints(10, 10, 7),
    )
    assert torch.isfinite(dense).all() and (dense[2, 7:] == 0).all()


def test_gradient_of_the_queries() -> None:
    cos, sin = (t.double() for t in tables(8))
    q = draw(2, 3, 2, 8).double().requires_grad_()
    new = [draw(2, 3, 2, 8, seed=s).double() for s in (1, 2)]
    caches = [torch.full((2, 9, 2, 8), math.nan, dtype=torch.float64) for _ in range(2)]
    out = fa.attention_kvcache(
        q, *caches, *new, cache_seqlens=0, rotary_cos=cos, rotary_sin=sin, causal=True
    )
    (got,) = torch.autograd.grad(out.sum(), q)
    turned_q, turned_k = (OPS.apply_rotary(t, cos, sin) for t in (q, new[0]))
    want = torch.autograd.grad(
        reference.attention(turned_q, turned_k, new[1], causal=True)[0].sum(), q
    )[0]
    assert (got - want).abs().max() < 1e-12


# ---- as operators -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_opcheck(layout: dict[str, Any]) -> None:
    tensors, options = problem(layout, torch.float32)
    torch.library.opcheck(OPS.append_kv.default, tensors, options)
    pools, table = to_pages(tensors[2:], 16, torch.Generator().manual_seed(0), poison=0.0)
    torch.library.opcheck(
        OPS.append_kv.default, [*tensors[:2], *pools], {**options, "page_table": table}
    )


def test_compiled_equals_eager() -> None:
    """The caches are mutated in the compiled graph as in eager, and read after that."""
    tensors, options = problem({"rotary": 16}, torch.float32)
    lengths = options.pop("cache_seqlens")
    q = draw(3, 5, 4, 16)

    def step(q: Tensor, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        first = fa.attention_kvcache(q, k, v, k_new, v_new, cache_seqlens=n, causal=True, **options)
        return fa.attention_kvcache(
            q + first.sum(), k, v, k_new * 2, v_new, cache_seqlens=n + 1, **options
        )

    eager = [t.clone() for t in tensors]
    want = step(q, *eager, lengths)
    torch._dynamo.reset()
    compiled = [t.clone() for t in tensors]
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(q, *compiled, lengths)
    assert torch.equal(got, want)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)


def test_functionalisation_keeps_the_mutation() -> None:
    """AOT turns it into a function of the caches, whose results the caches then become."""
    graphs = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return make_boxed_func(module.forward)

    def step(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        fa.append_kv(K, V, k_cache, v_cache, cache_seqlens=N)
        return k_cache.sum() + v_cache.sum()

    torch._dynamo.reset()
    caches = KC.clone(), VC.clone()
    got = torch.compile(step, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*caches)
    want = KC.clone(), VC.clone()
    assert torch.equal(got, step(*want))
    assert torch.equal(caches[0], want[0]) and torch.equal(caches[1], want[1])
    (graph,) = graphs
    text = str(graph.graph)
    assert "auto_functionalized" in text and "fa.append_kv.default" in text


def test_compiled_on_views_of_one_pool() -> None:
    """Aliases: K and V of two layers in one buffer."""
    pool = draw(2, 2, 3, 40, 2, 16)
    new, lengths = [draw(3, 5, 2, 16, seed=s) for s in (1, 2)], ints(*USED)

    def step(pool: Tensor) -> Tensor:
        for layer in range(2):
            fa.append_kv(*new, pool[layer, 0], pool[layer, 1], cache_seqlens=lengths + layer)
        return pool.sum()

    eager, compiled = pool.clone(), pool.clone()
    torch._dynamo.reset()
    assert torch.equal(
        torch.compile(step, backend="aot_eager", fullgraph=True)(compiled), step(eager)
    )
    assert torch.equal(eager, compiled) and not torch.equal(eager, pool)


def test_export() -> None:
    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.zeros(3, 40, 2, 16))
            self.register_buffer("v", torch.zeros(3, 40, 2, 16))

        def forward(self, q: Tensor, k_new: Tensor, v_new: Tensor, n: Tensor) -> Tensor:
            return fa.attention_kvcache(
                q, self.k, self.v, k_new, v_new, cache_seqlens=n, causal=True
            )

    args = draw(3, 5, 4, 16), draw(3, 5, 2, 16), draw(3, 5, 2, 16, seed=1), ints(0, 3, 9)
    program = torch.export.export(Step(), args)
    assert "fa.append_kv" in str(program.graph)
    module, eager = program.module(), Step()
    assert torch.equal(module(*args), eager(*args))
    assert torch.equal(module.k, eager.k)


# ---- refusals -----------------------------------------------------------------------------------

K, V = draw(2, 3, 2, 16), draw(2, 3, 2, 8)
KC, VC = draw(2, 9, 2, 16), draw(2, 9, 2, 8)
COS, SIN = tables(8, 8)
N = ints(0, 5)
POOLS = draw(4, 4, 2, 16), draw(4, 4, 2, 8)
TABLE = ints(0, 1, 2, 3).view(2, 2)

BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "type": ({"k_new": None}, TypeError, ["k_new", "None", "Tensor"]),
    "dtype": ({"v_new": V.half()}, ValueError, ["v_new", "float16", "float32", ".to("]),
    "cache dtype": ({"k_cache": KC.int()}, ValueError, ["k_cache", "int32", "bfloat16"]),
    "dims": ({"k_new": K[0]}, ValueError, ["k_new", "[3, 2, 16]", "[batch, rows, heads, dim]"]),
    "rows": ({"v_new": V[:, 1:]}, ValueError, ["v_new", "[2, 2, 2, 8]", "[2, 3, 2, 16]"]),
    "heads": ({"k_new": K[:, :, :1]}, ValueError, ["k_new", "heads and head dim"]),
    "head dim": ({"v_new": V[..., :4]}, ValueError, ["v_new", "[2, 3, 2, 4]", "v_cache"]),
    "caches": ({"v_cache": VC[:, 1:]}, ValueError, ["v_cache", "[2, 8, 2, 8]", "k_cache"]),
    "one cache": (
        {"v_new": K, "k_cache": KC, "v_cache": KC},
        *(ValueError, ["v_cache", "k_cache", "share no memory"]),
    ),
    "expanded": (
        {"k_cache": KC[:1].expand(2, -1, -1, -1)},
        *(ValueError, ["k_cache", "expanded", "dimension 0"]),
    ),
    "device": ({"k_new": K.to("meta"), "v_new": V}, ValueError, ["k_new", "meta", "cpu"]),
    "lengths": ({"cache_seqlens": ints(1, 2, 3)}, ValueError, ["k_new", "batch size 2", "3"]),
    "lengths dtype": ({"cache_seqlens": N.long()}, ValueError, ["cache_seqlens", "int64", "int32"]),
    "too long": ({"cache_seqlens": ints(0, 7)}, ValueError, ["cache_seqlens", "entry 1", "7", "9"]),
    "negative": ({"cache_seqlens": ints(-1, 7)}, ValueError, ["entry 0 is -1", "[0, 6]"]),
    "cache rows": ({"kv_batch_idx": ints(0, 2)}, ValueError, ["kv_batch_idx", "entry 1 is 2"]),
    "leftpad": ({"leftpad_k": ints(0, 6)}, ValueError, ["leftpad_k", "entry 1 is 6", "[0, 5]"]),
    "cu": (
        {"k_new": K[0], "v_new": V[0], "cu_seqlens_new": ints(0, 2, 4)},
        *(ValueError, ["cu_seqlens_new", "[0, 2, 4]", "3 rows"]),
    ),
    "one table": ({"rotary_cos": COS}, ValueError, ["rotary_sin", "None", "both"]),
    "table shape": (
        {"rotary_cos": draw(8, 9), "rotary_sin": draw(8, 9)},
        *(ValueError, ["rotary_cos", "[8, 9]", "16"]),
    ),
    "tables": ({"rotary_cos": COS, "rotary_sin": SIN[1:]}, ValueError, ["rotary_sin", "[7, 4]"]),
    "short tables": (
        {"rotary_cos": COS[:7], "rotary_sin": SIN[:7]},
        *(ValueError, ["positions 0 to 7", "7 positions"]),
    ),
    "no tables": ({"rotary_seqlens": N}, ValueError, ["rotary_seqlens", "rotary_cos"]),
    "pairing": ({"rotary_interleaved": True}, ValueError, ["rotary_interleaved", "rotary_cos"]),
    "page": (
        {"k_cache": POOLS[0], "v_cache": POOLS[1], "page_table": ints(0, 1, 2, 4).view(2, 2)},
        *(ValueError, ["page_table", "[1, 1] is 4", "4 pages"]),
    ),
    "few pages": (
        {"k_cache": POOLS[0], "v_cache": POOLS[1], "page_table": TABLE[:, :1]},
        *(ValueError, ["cache_seqlens", "entry 1 is 5", "room for 4"]),
    ),
    "page rows": (
        {"k_cache": POOLS[0], "v_cache": POOLS[1], "page_table": TABLE[:1]},
        *(ValueError, ["page_table", "[1, 2]", "[2, pages]"]),
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_bad_calls_write_nothing(case: tuple[dict[str, Any], type[Exception], list[str]]) -> None:
    given, kind, words = case
    call = {"k_new": K, "v_new": V, "k_cache": KC, "v_cache": VC, "cache_seqlens": N, **given}
    before = {n: call[n].clone() for n in ("k_cache", "v_cache")}
    with pytest.raises(kind) as caught:
        fa.append_kv(**call)
    assert all(word in str(caught.value) for word in words), caught.value
    assert all(torch.equal(call[n], before[n]) for n in before)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": K[0, 0]}, ["x:", "[2, 16]", "[total, heads, dim]"]),
        ({"x": K.int()}, ["x:", "int32"]),
        ({"cos": COS[:2], "sin": SIN[:2]}, ["cos", "2 positions", "3 rows"]),
        ({"positions": ints(0, 1, 8)}, ["positions", "0 to 8", "[0, 7]"]),
        ({"positions": ints(0, 1)}, ["positions", "[2]", "[2, 3]"]),
        ({"positions": torch.zeros(3)}, ["positions", "float32", "int64"]),
        ({"sin": SIN[:, 1:]}, ["sin", "[8, 3]", "[8, 4]"]),
    ],
)
def test_bad_rotations(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        OPS.apply_rotary(**{"x": K, "cos": COS, "sin": SIN, **given})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"v_new": None}, ValueError, ["v_new", "None", "k_new"]),
        ({"k_new": None, "v_new": None, "cu_seqlens_new": ints(0, 1, 2)}, ValueError, ["k_new"]),
        ({"cache_seqlens": None}, TypeError, ["cache_seqlens", "None", "Tensor"]),
        ({"softcap": -1.0}, ValueError, ["softcap"]),
        ({"causal": True, "window_size": (-1, 3)}, ValueError, ["window_right", "3"]),
        ({"casual": True}, TypeError, ["casual"]),
        ({"cache_seqlens": ints(0, 7)}, ValueError, ["cache_seqlens", "entry 1"]),
    ],
)
def test_bad_kvcache_calls_write_nothing(
    given: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    caches = KC.clone(), VC.clone()
    call = {"k_new": K, "v_new": V, "cache_seqlens": N, **given}
    with pytest.raises(kind) as caught:
        fa.attention_kvcache(draw(2, 3, 4, 16), *caches, **call)
    assert all(word in str(caught.value) for word in words), caught.value
    assert torch.equal(caches[0], KC) and torch.equal(caches[1], VC)


@pytest.mark.parametrize("name", ["k_new", "v_new", "k_cache", "v_cache", "rotary_cos"])
def test_gradients_are_refused_not_lost(name: str) -> None:
    call = {"k_new": K, "v_new": V, "k_cache": KC.clone(), "v_cache": VC.clone()}
    call |= {"cache_seqlens": N, "rotary_cos": COS, "rotary_sin": SIN}
    call[name] = call[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"append_kv: {name} requires a gradient"):
        fa.append_kv(**call)
    with torch.no_grad():
        fa.append_kv(**call)


def test_a_mutated_cache_does_not_give_wrong_gradients() -> None:
    q, k, v = draw(2, 3, 4, 16).requires_grad_(), KC.clone(), VC.clone()
    out = fa.attention_kvcache(q, k, v, cache_seqlens=5)
    fa.append_kv(K, V, k, v, cache_seqlens=N)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gpu_backends_refuse() -> None:
    from fa import _cache_ops

    with pytest.raises(NotImplementedError, match='append_kv: no kernel.*fa.backend\\("cpu"\\)'):
        _cache_ops._append_kv_cuda(K, V, KC, VC, cache_seqlens=N)
    with pytest.raises(NotImplementedError, match='apply_rotary: no kernel.*backend\\("cpu"\\)'):
        _cache_ops._apply_rotary_cuda(K, COS, SIN)
    with fa.backend("cpu"):
        assert torch.equal(
            _cache_ops._apply_rotary_cuda(K, COS, SIN), OPS.apply_rotary(K, COS, SIN)
        )
