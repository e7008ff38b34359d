# SPDX-License-Identifier: BSD-3-Clause
# Is a result right? Against fp64, with plain PyTorch attention in the same dtype as the yardstick.
"""The rule of docs/numerics.md, section "Tolerances".

Positions of NaN and inf must agree first. Then, per block of rows, the largest error against fp64
may be twice that of plain attention computed in the inputs' own dtype, plus a rounding floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cases import Inputs
from fa import reference
from fa._philox import keep_probability

ROW_BLOCK = 64


@dataclass
class Result:
    """What a call returns; gradients are None where it was not asked for them."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None:
                yield entry.name, value


@dataclass
class Expected:
    """The right answer and how far off an implementation may be; see docs/numerics.md."""

    exact: Result  # fp64
    yardstick: dict[str, Tensor]  # per element, the error that plain attention makes
    handed: dict[str, Tensor]  # per element, what the rounding of out and lse makes of a gradient
    floor: dict[str, float]  # errors of fp32 sums, which the yardstick need not have


def expected(
    inputs: Inputs,
    backward: bool | None = None,
    handed: tuple[Tensor, Tensor] | None = None,
) -> Expected:
    """`handed`: out and lse that a backward was handed; default: the right ones, rounded.

    They must be right by themselves, which assert_result() checks if the result holds them.
    """
    backward = inputs.case.backward if backward is None else backward
    plain = _Attention(inputs, inputs.q.dtype, backward)
    # fp64 copies: autograd would round the gradient of a 16-bit leaf.
    wide = _Attention(inputs, torch.float64, backward)
    exact = wide.result(inputs.dout.double(), inputs.dlse)
    yardstick = _errors(plain.result(inputs.dout, inputs.dlse), exact)
    by_inputs = {name: torch.zeros_like(error) for name, error in yardstick.items()}
    if backward and inputs.out_dtype != torch.float64:
        # A backward is handed the rounded out and lse: it takes dO.O from the one and P from the
        # other. What these roundings change in an exact backward is no implementation's error.
        # A shift of dO.O acts like one of dlse; P times (1 + e) like the row's gradients times it.
        out, lse = handed or (exact.out.to(inputs.out_dtype), exact.lse.float())
        shift = (inputs.dout.double() * (exact.out - out)).sum(-1).transpose(-1, -2)
        factor = torch.exp(exact.lse - lse).nan_to_num(1.0)  # [..., heads, rows]
        dlse = (shift if inputs.dlse is None else inputs.dlse + shift) * factor
        given = wide.result(inputs.dout * factor.transpose(-1, -2)[..., None], dlse)
        by_inputs = _errors(given, exact)
    return Expected(exact, yardstick, by_inputs, _floors(inputs))


class _Attention:
    """The reference's formula with every step in `dtype`, and torch's autograd of it."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype, backward: bool) -> None:
        options = {name: v for name, v in inputs.options.items() if name != "out_dtype"}
        tensors = {name: getattr(inputs, name) for name in ("q", "k", "v")}
        if "sinks" in options:
            tensors["sinks"] = options.pop("sinks")
        self._leaves = {
            n: t.detach().to(dtype).requires_grad_(backward) for n, t in tensors.items()
        }
        self._dtype, self._backward = dtype, backward
        self._out, self._lse = reference.attention(**self._leaves, **options, dtype=dtype)

    def result(self, dout: Tensor, dlse: Tensor | None) -> Result:
        result = Result(self._out.detach(), self._lse.detach())
        if not self._backward:
            return result
        gradients: tuple[Tensor | None, ...] = (None,) * len(self._leaves)
        if self._out.requires_grad:  # else no row of the call sees a key, or there is none
            pairs = [(self._out, dout)]
            if dlse is not None and self._lse.requires_grad:
                pairs.append((self._lse, dlse))
            gradients = torch.autograd.grad(
                [y for y, _ in pairs],
                list(self._leaves.values()),
                [dy.to(self._dtype) for _, dy in pairs],
                allow_unused=True,
                retain_graph=True,
            )
        for (name, leaf), grad in zip(self._leaves.items(), gradients, strict=True):
            setattr(result, f"d{name}", torch.zeros_like(leaf) if grad is None else grad)
        return result


def _errors(result: Result, exact: Result) -> dict[str, Tensor]:
    """|result - exact| per element; where a yardstick overflowed (fp16 scores) it measures 0."""
    right = dict(exact.items())
    return {name: _finite((value.double() - right[name]).abs()) for name, value in result.items()}


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, posinf=0.0, neginf=0.0)


def _floors(inputs: Inputs) -> dict[str, float]:
    """Rounding of fp32 sums: 1e-5 at unit scale, more where large terms cancel."""

    def largest(x: Tensor) -> float:
        return float(_finite(x.double()).abs().max()) if x.numel() else 0.0

    def norm(x: Tensor) -> float:
        return largest(_finite(x.double()).norm(dim=-1))

    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    case, eps = inputs.case, torch.finfo(torch.float32).eps
    if q.dtype == torch.float64:
        eps = torch.finfo(torch.float64).eps
    scale = inputs.options.get("softmax_scale", case.dim**-0.5)
    score = scale * norm(q) * norm(k) + 0.31 * bool(case.alibi) * max(q.shape[-3], k.shape[-3])
    grow = 1.0 / max(keep_probability(inputs.options.get("dropout_p", 0.0)), 1 / 256)
    # scale * (dP + dlse - dO.O); dropout divides what it keeps
    d_score = scale * (norm(dout) * norm(v) * grow + (4 if case.dlse else 0))
    rows = max(1, q.shape[-3]) ** 0.5
    unit = 1e-5 if q.dtype != torch.float64 else 1e-13
    # Scores are rounded to fp32, so weights err by eps * score relatively: 16-bit outputs hide it.
    weights = 4 * eps * score if inputs.options.get("out_dtype") == torch.float32 else 0.0
    return {
        "out": (unit + weights * largest(v)) * grow,
        "lse": 2 * unit + 4 * eps * score,
        "dq": unit + 4 * eps * d_score * largest(k),
        "dk": unit + 4 * eps * d_score * largest(q) * rows,
        "dv": unit * grow * (1 if q.dtype != torch.float64 else 10 * rows),
        "dsinks": unit + 4 * eps * (d_score / max(scale, 1e-3)) * rows,
    }


def assert_result(actual: Result, right: Expected) -> None:
    """Every tensor of `actual`: non-finite positions, then errors per block of rows."""
    exact = dict(right.exact.items())
    for name, value in actual.items():
        floor = right.floor[name]
        if name == "lse":
            assert_lse(value, right.exact.lse, floor)
            continue
        column = (slice(None), None, None) if name == "dsinks" else ...
        expectation = (exact[name], right.yardstick[name], right.handed[name])
        want, yardstick, handed = (t[column] for t in expectation)
        assert_close(name, value[column], want, yardstick, handed, floor)


def assert_close(
    name: str, actual: Tensor, exact: Tensor, yardstick: Tensor, handed: Tensor, floor: float
) -> None:
    """Tensors [..., rows, heads, D]; bounds the largest error of each ROW_BLOCK rows."""
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    assert_same_nonfinite(name, actual, exact)
    if actual.numel() == 0:
        return
    error = _finite((actual.double() - exact).abs())
    # Any result is rounded to its dtype once, whatever luck the yardstick had.
    rounding = _finite(exact.abs()) * torch.finfo(actual.dtype).eps
    rounding, handed = _block_max(rounding), _block_max(handed)
    bound = torch.maximum(2 * torch.maximum(_block_max(yardstick), handed), rounding + handed)
    bound += floor
    worst = _block_max(error)
    excess = worst > bound
    if not excess.any():
        return
    block = int(excess.nonzero()[0])
    first = block * ROW_BLOCK
    rows = error[..., first : first + ROW_BLOCK, :, :]
    at = _unravel(int(rows.argmax()), rows.shape)
    at = (*at[:-3], at[-3] + first, *at[-2:])
    raise AssertionError(
        f"{name}: error {float(worst[block]):.3e} above {float(bound[block]):.3e} in rows "
        f"{first}..{first + rows.shape[-3] - 1} ({int(excess.sum())} of {len(excess)} row blocks "
        f"wrong); largest at {list(at)}: {float(actual[at]):.6g}, expected {float(exact[at]):.6g}"
    )


def assert_lse(actual: Tensor, exact: Tensor, floor: float = 2e-5) -> None:
    """LSE is never 16-bit, so the yardstick does not apply: [..., heads, rows]."""
    assert actual.shape == exact.shape, f"lse: shape {actual.shape}, expected {exact.shape}"
    assert_same_nonfinite("lse", actual, exact)
    error = _finite((actual.double() - exact).abs())
    excess = error > floor + 4 * torch.finfo(actual.dtype).eps * _finite(exact.abs())
    if excess.any():
        at = tuple(excess.nonzero()[0].tolist())
        raise AssertionError(
            f"lse: {int(excess.sum())} rows wrong, the first at {list(at)}: "
            f"{float(actual[at]):.8g}, expected {float(exact[at]):.8g}, allowed {floor:.1e}"
        )


def assert_same_nonfinite(name: str, actual: Tensor, exact: Tensor) -> None:
    """NaN, +inf and -inf stand at the same places."""
    for kind, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        differ = test(actual) != test(exact.to(actual.dtype))
        if differ.any():
            at = tuple(differ.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {kind} at other places than in the reference, {int(differ.sum())} "
                f"elements, the first at {list(at)}: {float(actual[at])}, "
                f"expected {float(exact[at]):.6g}"
            )


def assert_bitwise(name: str, a: Tensor, b: Tensor) -> None:
    """Equal bits, so -0 differs from 0; prints where the first difference stands."""
    assert a.dtype == b.dtype and a.shape == b.shape, (
        f"{name}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
    )
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differ = a.contiguous().view(bits) != b.contiguous().view(bits)
    if differ.any():
        at = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(differ.sum())} of {differ.numel()} elements differ, the first at "
            f"{list(at)}: {float(a[at])!r} against {float(b[at])!r}"
        )


def assert_bitwise_result(a: Result, b: Result) -> None:
    second = dict(b.items())
    for name, value in a.items():
        assert_bitwise(name, value, second[name])


def _block_max(x: Tensor) -> Tensor:
    """[..., rows, heads, D] -> the largest element of every block of rows."""
    per_row = x.movedim(-3, 0).flatten(1).amax(dim=1)
    pad = -len(per_row) % ROW_BLOCK
    return torch.nn.functional.pad(per_row, (0, pad)).view(-1, ROW_BLOCK).amax(dim=1)


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        at.append(rest)
    return tuple(reversed(at))


def same_up_to_rounding(name: str, a: Tensor, b: Tensor, ulps: float = 4.0) -> None:
    """Two ways to the same result: equal up to `ulps` roundings of the largest element."""
    assert_same_nonfinite(name, a, b)
    scale = float(_finite(b.double()).abs().max()) if b.numel() else 0.0
    error = float(_finite(a.double() - b.double()).abs().max()) if b.numel() else 0.0
    bound = ulps * torch.finfo(a.dtype).eps * scale
    assert error <= bound or math.isclose(error, bound), (
        f"{name}: differs by {error:.3e}, allowed {bound:.3e}"
    )
