# SPDX-License-Identifier: BSD-3-Clause
# Which functions do users call, and what do their arguments mean?
"""The public functions. Each builds the options of one operator and calls it; nothing else.

Conventions of all of them: tensors are [batch, seqlen, heads, dim] ("BSHD"; packed: [total, heads,
dim]) of any strides whose last dim is contiguous. Query head h reads key head
h // (heads_q / heads_k). Masks are aligned at the bottom right: with the real lengths of a
sequence, key j is visible to query row i iff
i + k_len - q_len - left <= j <= i + k_len - q_len + right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fa import _cache_ops, ops
from fa._checks import layouts, tensor_types
from fa._ranges import ranged
from fa._raw import mapped, raw, transformed, unwatched
from fa._types import checked, fits, require
from fa._validate_types import argument_types, in_our_words
from fa.autograd import refuse_forward_mode

_FORWARD = torch.ops.fa.forward
_PACKET_CALL = type(_FORWARD).__call__
_ABSENT = object()
_grad_enabled = torch.is_grad_enabled
_autocast_enabled = torch._C._is_any_autocast_enabled


def _call(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the composite does, for tensors that `unwatched` lets through."""
    if _autocast_enabled() or "dropout_p" in options or transformed():
        return ops.forward(q, k, v, **options)
    if _grad_enabled():
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return ops.record(q, k, v, options, direct=True)
        for value in options.values():
            if isinstance(value, Tensor) and value.requires_grad:
                return ops.record(q, k, v, options, direct=True)
    return raw(q, k, v, options)


class ForwardPacket(type(_FORWARD)):  # type: ignore[misc]
    """torch.ops.fa.forward with a short way for the common call, which the host time needs."""

    @ranged("forward", q=1, k=2)
    def __call__(
        self, q: Any = _ABSENT, k: Any = _ABSENT, v: Any = _ABSENT, /, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        if is_compiling():
            return _PACKET_CALL(self, *_given(q, k, v), *args, **options)
        try:
            if not args and unwatched(q, k, v):
                return _call(q, k, v, options)
            return _composite(_given(q, k, v) + list(args), options)
        except RuntimeError as error:
            return _second_try(error, (*_given(q, k, v), *args), options)


def _composite(args: list[Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """`fa::forward` by the dispatcher; by itself where torch.func's transforms must see inside."""
    if transformed() and len(args) == 3:
        return ops.forward(*args, **options)
    return _PACKET_CALL(_FORWARD, *args, **options)


def _given(*args: Any) -> list[Any]:
    """The positional arguments that were passed: others came by name, or are missing."""
    return [value for value in args if value is not _ABSENT]


class ForwardOutPacket(type(_FORWARD)):  # type: ignore[misc]
    """torch.ops.fa.forward_out: errors of their own type, odd head dims, no lost gradients."""

    def __call__(self, /, *args: Any, **options: Any) -> None:
        if is_compiling():
            return _PACKET_CALL(self, *args, **options)
        refuse_forward_mode(*args, *options.values())
        _refuse_vmap("forward_out")
        if _grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (*args, *options.values())
        ):
            raise NotImplementedError(
                "fa::forward_out: an input requires a gradient, and autograd does not see what is "
                "written into a buffer. Call fa::forward, or call this under torch.no_grad()."
            )
        try:
            return _PACKET_CALL(self, *args, **options)
        except RuntimeError as error:
            if not str(error).startswith(_PAD):
                raise _typed(error) from None
        buffers = options.pop("out"), options.pop("lse")
        options["out_dtype"] = buffers[0].dtype
        for buffer, result in zip(buffers, _FORWARD(*args, **options), strict=True):
            buffer.copy_(result)
        return None


class TypedPacket(type(_FORWARD)):  # type: ignore[misc]
    """The other operators of torch.ops.fa: TypeErrors in our words, and nothing else."""

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        if is_compiling():
            return _PACKET_CALL(self, *args, **options)
        name = self._qualified_op_name.removeprefix("fa::")
        if name in ("backward_out", "append_kv"):
            _refuse_vmap(name)
        try:
            if transformed() and name in _SEEN_INSIDE:
                return _SEEN_INSIDE[name](*args, **options)
            return _PACKET_CALL(self, *args, **options)
        except RuntimeError as error:
            wrong = in_our_words(error)
            if wrong is None:
                raise
            raise wrong from None


# Composite operators: torch.func's transforms must see what they are made of.
_SEEN_INSIDE: dict[str, Any] = {"combine": ops.combine, "apply_rotary": _cache_ops.rotary}


def _refuse_vmap(name: str) -> None:
    """What vmap knows of an operator is a loop over it, which cannot write into buffers."""
    if mapped():
        raise NotImplementedError(
            f"fa::{name}: called under torch.vmap, which has no rule for what is written into a "
            "buffer. Call it outside of vmap, with the mapped dimension as a part of the batch."
        )


_FORWARD.__class__ = ForwardPacket
torch.ops.fa.forward_out.__class__ = ForwardOutPacket
for _op in ("backward", "backward_out", "combine", "append_kv", "apply_rotary"):
    getattr(torch.ops.fa, _op).__class__ = TypedPacket

_PAD, _UNSUPPORTED = "fa: pad: ", "fa: not supported: "


def _typed(error: RuntimeError) -> Exception:
    """An error of a raw operator as the exception that its text stands for."""
    text = str(error)
    if isinstance(error, NotImplementedError):
        return error
    wrong = in_our_words(error)
    if wrong is not None:
        return wrong
    if text.startswith(_UNSUPPORTED):
        return NotImplementedError(text.removeprefix(_UNSUPPORTED))
    return error


def _second_try(
    error: RuntimeError, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """What the raw operator refused: odd head dims go the composite way; the rest gets its type."""
    if str(error).startswith(_PAD):
        return _PACKET_CALL(_FORWARD, *args, **options)
    layouts(**dict(zip("qkv", args, strict=False)))
    raise _typed(error) from None


@ranged("forward", q=0, k=1)
def forward(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """`torch.ops.fa.forward(q, k, v, **options)`, without the packet's own cost where possible."""
    if is_compiling():
        return _FORWARD(q, k, v, **options)
    try:
        if unwatched(q, k, v):
            return _call(q, k, v, options)
        return _composite([q, k, v], options)
    except RuntimeError as error:
        tensor_types(q=q, k=k, v=v)
        return _second_try(error, (q, k, v), options)


def window_options(window_size: Any, options: dict[str, Any]) -> None:
    """(left, right), each -1 or None for unlimited, as options of the operator."""
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(side is None or fits("int", side) for side in window_size):
        raise TypeError(
            f"window_size must be a pair (left, right) of integers or None, not {window_size!r}. "
            "-1 or None is unlimited."
        )
    if all(side is None or side == -1 for side in window_size):
        return
    for name in ("window_left", "window_right"):
        if options.get(name) not in (None, -1):
            raise ValueError(
                f"{name}: {options[name]} was given beside window_size {tuple(window_size)}, which "
                "says both sides. Pass one of the two."
            )
    left, right = window_size
    if left is not None and left != -1:
        options["window_left"] = left
    if right is not None and right != -1:
        options["window_right"] = right


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * Q K^T) V, differentiable in q, k, v and sinks.

    Formula: S = softmax_scale * Q K^T, capped S <- softcap * tanh(S / softcap) if softcap > 0,
    minus alibi_slope * |i + Sk - Sq - j|, masked; LSE = log(sum_j exp S_ij [+ exp(sink)]) (natural
    logarithm); O = exp(S - LSE) V. A row without visible keys has O = 0, LSE = -inf (or the sink).

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float8_e4m3fn (on the CPU also float32, float64).
        k: [B, Sk, Hkv, D], dtype and device of q (on the CPU float8_e4m3fn also with a 16-bit q);
            Hq is a multiple of Hkv.
        v: [B, Sk, Hkv, Dv].
        causal: aligned at the bottom right: row i sees keys j <= i + Sk - Sq.
        window_size: (left, right) numbers of keys around the diagonal; -1 or None: unlimited.
        softcap: in units of scores; 0 switches it off.
        softmax_scale: None means 1 / sqrt(D).
        sinks: [Hq], float32 or q's dtype (beside float8_e4m3fn bfloat16): a logit per head that
            enters the denominator only.
        alibi_slopes: float32 [Hq] or [B, Hq].
        deterministic: of the backward, the same call then has the same bits; None:
            torch.are_deterministic_algorithms_enabled().
        return_lse: also return LSE, float32 [B, Hq, Sq] (float64 for float64 inputs).
        **options: any other option of `torch.ops.fa.forward`: attention_chunk, seqused_q,
            seqused_k, leftpad_k, kv_batch_idx, page_table, dropout_p (in [0, 1); the seed is drawn
            from torch's generator unless philox_seed_offset, int64 [2], is given), q_descale,
            k_descale, v_descale (float32, factors of float8_e4m3fn inputs; docs/numerics.md),
            num_splits, batch_invariant, out_dtype, ...

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype (bfloat16 for float8_e4m3fn), dense in q's dimension
            order; or (out, lse). Both have a gradient.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape, stride, device or value; the message
            names the argument, its value, and what is allowed.
        NotImplementedError: no kernel row covers the call; the message lists the nearest ones. A
            gradient that does not exist: of float8_e4m3fn inputs, alibi_slopes and descales, of a
            gradient, in forward mode.
        ImportError: CUDA tensors, and libfa.so is missing; with the command that builds it.
        RuntimeError: a CUDA call failed, or the build has no kernel for this GPU.

    Example:
        >>> q = torch.randn(2, 128, 8, 64)
        >>> k, v = torch.randn(2, 2, 128, 2, 64)
        >>> out, lse = fa.attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
    """
    if causal is not False:
        options["causal"] = causal
    if window_size != (-1, -1):
        window_options(window_size, options)
    if type(softcap) is not float or softcap != 0.0:
        options["softcap"] = softcap
    if softmax_scale is not None:
        options["softmax_scale"] = softmax_scale
    if sinks is not None:
        options["sinks"] = sinks
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if deterministic is not None:
        options["deterministic"] = deterministic
    if options and not is_compiling():
        argument_types("forward", options)
    if type(return_lse) is not bool:
        require("bool", return_lse=return_lse)
    result = forward(q, k, v, options)
    return result if return_lse else result[0]


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences of several lengths, packed one after the other.

    Args:
        q: [total_q, Hq, D]; sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        k, v: [total_k, Hkv, D] and [total_k, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1] on q's device. None: that side is dense, [B, S,
            H, D].
            Each begins with 0, never decreases and ends within the tensor. On a GPU their values
            are not read by the host, so not checked: others give wrong rows or an illegal access.
        max_seqlen_q, max_seqlen_k: hints for the choice of a kernel, of whatever value: like that
            choice, they change no more than the rounding, with `batch_invariant` not a bit.
        **options: as `attention`, including causal, window_size and return_lse.

    Returns:
        out [total_q, Hq, Dv], or (out, lse) with lse [Hq, total_q]. Rows that belong to no sequence
        have out 0 and lse -inf.

    Raises: as `attention`.

    Example:
        >>> ends = torch.tensor([0, 3, 10], dtype=torch.int32)  # sequences of 3 and 7 tokens
        >>> q = k = v = torch.randn(10, 4, 64)
        >>> fa.attention_varlen(q, k, v, ends, ends, causal=True).shape
        torch.Size([10, 4, 64])
    """
    if cu_seqlens_q is not None:
        options["cu_seqlens_q"] = cu_seqlens_q
    if cu_seqlens_k is not None:
        options["cu_seqlens_k"] = cu_seqlens_k
    if max_seqlen_q is not None:
        options["max_seqlen_q"] = max_seqlen_q
    if max_seqlen_k is not None:
        options["max_seqlen_k"] = max_seqlen_k
    return attention(q, k, v, **options)


@checked(out_partial="outs", lse_partial="lses")
@ranged("combine")
def combine(
    outs: Tensor | list[Tensor] | tuple[Tensor, ...],
    lses: Tensor | list[Tensor] | tuple[Tensor, ...],
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of keys into attention over all of them; differentiable.

    With w_n = exp(lse_n - lse) and lse = log(sum_n exp lse_n): out = sum_n w_n out_n.

    Args:
        outs: [n, B, Sq, Hq, Dv] (packed [n, total_q, Hq, Dv]), or a list of n tensors.
        lses: [n, B, Hq, Sq] (packed [n, Hq, total_q]), natural logarithms, or a list.
        out_dtype: of the merged out; None: the dtype of outs.

    Returns:
        (out [B, Sq, Hq, Dv], lse [B, Hq, Sq]), packed as the parts are. Where every lse is -inf:
        out 0, lse -inf.

    Raises:
        TypeError, ValueError: no tensors, n = 0, shapes or dtypes that disagree.

    Example:
        >>> q, k, v = torch.randn(3, 1, 16, 2, 32)
        >>> halves = [fa.attention(q, k[:, s], v[:, s], return_lse=True)
        ...           for s in (slice(0, 8), slice(8, 16))]
        >>> out, lse = fa.combine([o for o, _ in halves], [lse for _, lse in halves])
        >>> torch.allclose(out, fa.attention(q, k, v), atol=1e-6)
        True
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    options = {} if out_dtype is None else {"out_dtype": out_dtype}
    return torch.ops.fa.combine(outs, lses, **options)


def _stacked(name: str, parts: Any) -> Tensor:
    """Partial results as one tensor, of which a list or tuple holds equal ones."""
    if not isinstance(parts, (list, tuple)):
        tensor_types(**{name: parts})
        return parts
    if not parts:
        raise ValueError(f"{name}: n = 0 partial results. Pass at least one.")
    for n, part in enumerate(parts):
        tensor_types(**{f"{name}[{n}]": part})
        if part.shape != parts[0].shape:
            raise ValueError(
                f"{name}[{n}]: shape {list(part.shape)}, and {name}[0] has "
                f"{list(parts[0].shape)}. Partial results must be of one shape."
            )
    return torch.stack(tuple(parts))


# Reached through ops for its side effect: the operators exist once this module is imported.
assert ops.NAMESPACE == "fa"
