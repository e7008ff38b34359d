# SPDX-License-Identifier: BSD-3-Clause
# How does a Hugging Face model run its attention through fa? By one call of `register`.
"""fa as an attention implementation of transformers.

    from fa.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())

Two functions are registered under one name. transformers asks `attention_mask` once per forward for
a mask and hands what it gets to `attention_forward` in every layer. No mask of S x S elements
is made: causal and windowed attention are options of the kernel, padding becomes three int32
lengths per sequence, packed sequences become `cu_seqlens`.

The coordinates. A padding mask has M columns, one for each key row that holds a token so far, and
the Sq query rows of a causal model are the last Sq of them. A sequence whose tokens are one run
[begin, end) of the columns is described by

    leftpad_k = begin,   seqused_k = end,   seqused_q = clamp(end - (M - Sq), 0, Sq),

with which fa's bottom-right alignment gives row i the position M - Sq + i, as it should.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

import fa
from fa._types import checked

__all__ = ["attention_forward", "attention_mask", "register"]

# Arguments of some models that change the result and that fa has no option for.
_REFUSED = (
    "alibi",
    "attention_bias",
    "attn_bias",
    "block_indices",
    "block_table",
    "cache",
    "head_mask",
    "indices",
    "k_cache",
    "layer_head_mask",
    "position_bias",
    "relative_position_bias",
    "v_cache",
)
# The dtype that tells packed sequences from padding: bool and int64 are taken by padding masks.
_SEGMENTS_DTYPE = torch.int8
_NOTES = "_fa_padding"
_PAGES = "_fa_pages"  # on the keys of a PagedCache: which pages are whose


@checked()
def register(name: str = "fa") -> str:
    """Makes attn_implementation=`name` run fa. Returns the name; calling it twice does no harm.

    Raises ValueError for a name to which transformers gives a meaning of its own, and ImportError
    where transformers is missing or has no attention and mask interface (it came with 4.53).
    """
    if not name or any(part in name for part in ("flash", "paged", "/", "|", ":")):
        raise ValueError(
            f'name: "{name}" has a meaning of its own in transformers: it may not be empty, nor '
            'hold "flash", "paged", "/", "|" or ":". Choose another, such as "fa".'
        )
    if name in ("eager", "sdpa", "flex_attention"):
        raise ValueError(
            f'name: "{name}" would replace an implementation of transformers. Choose "fa".'
        )
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"fa.integrations.transformers needs transformers 4.53 or newer ({error}). "
            "Install it with: pip install 'transformers>=4.56'"
        ) from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    return name


# ---------------------------------------------------------------------------------------------
# The mask: once per forward


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    cache_position: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """What `attention_forward` needs to know besides its own options; transformers calls this.

    Args:
        batch_size, device: of the mask.
        q_length, q_offset: query rows of this forward, and the position of the first one. Older
            versions pass `cache_position`, int64 [q_length], instead.
        kv_length, kv_offset: rows of the key tensor, and the position of the first one.
        mask_function: the pattern, as a function of indices; only its structure is looked at.
        attention_mask: [B, positions], true where there is a token; None: everywhere.
        use_vmap: whether the model added a pattern of its own; asked for in a traced graph alone.

    Returns:
        None when every key row holds a token; a bool tensor [B, M] when some do not; an int8 tensor
        [B, S] when rows hold several packed sequences, whose value changes where one begins.

    Raises NotImplementedError for a pattern that is none of: causal, bidirectional, a sliding
    window of either, packed sequences, or a chunk longer than the keys.
    """
    if q_length is None:
        if cache_position is None:
            raise TypeError(
                "attention_mask needs q_length, or cache_position of older transformers."
            )
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    kinds = dict(_parts(mask_function, use_vmap))
    if "chunk" in kinds and kv_length + kv_offset > kinds["chunk"]:
        raise NotImplementedError(
            f"fa: attention in chunks of {kinds['chunk']} with {kv_length + kv_offset} keys is not "
            'available through transformers. Use attn_implementation="sdpa" for this model.'
        )
    if "packed" in kinds:
        return (kinds["packed"] & 1).to(_SEGMENTS_DTYPE)  # ids count up: their parity changes
    rows = kv_length
    if "full" not in kinds:  # a static cache holds rows that no token has been written to
        rows = _filled_rows(kv_length, kv_offset, q_length, q_offset, attention_mask)
    if attention_mask is None:
        if rows == kv_length:
            return None
        return torch.ones(batch_size, rows, dtype=torch.bool, device=device)
    if attention_mask.shape[-1] < kv_offset + rows:
        raise ValueError(
            f"attention_mask: {attention_mask.shape[-1]} columns for {kv_offset + rows} positions. "
            "Pass one column for each token, those in the cache included."
        )
    mask = attention_mask[:, kv_offset : kv_offset + rows].to(torch.bool)
    if torch.compiler.is_compiling():
        return mask
    notes = _padding_of(mask, q_length)
    if rows == kv_length and not (notes.left or notes.right or notes.holes):
        return None
    setattr(mask, _NOTES, notes)
    return mask


def _filled_rows(
    kv_length: int,
    kv_offset: int | Tensor,
    q_length: int,
    q_offset: int | Tensor,
    mask: Tensor | None,
) -> int:
    """How many of the key rows hold a position that exists already."""
    if isinstance(q_offset, Tensor) and torch.compiler.is_compiling():
        if mask is None:
            raise NotImplementedError(
                "fa: a static cache under torch.compile needs an attention_mask with one column "
                "for each token so far; none was given."
            )
        positions = mask.shape[-1]
    else:
        positions = int(q_offset) + q_length
    return min(kv_length, positions - int(kv_offset))


def _parts(function: Callable | None, custom: bool) -> Iterator[tuple[str, Any]]:
    """The patterns that `function` is the intersection of, as (kind, value).

    transformers builds patterns by nesting closures; their names and cells say which ones.
    """
    if function is None:
        yield "causal", None
        return
    name = getattr(function, "__qualname__", type(function).__qualname__)
    cells: dict[str, Any] = {}
    if not torch.compiler.is_compiling():
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        closure = getattr(function, "__closure__", None) or ()
        cells = {n: c.cell_contents for n, c in zip(names, closure, strict=True)}
    elif not custom:  # cells cannot be read in a graph; use_vmap says whether the user added some
        yield ("full" if name == "bidirectional_mask_function" else "causal"), None
        return
    owner = name.split(".<locals>")[0]
    if name == "causal_mask_function":
        yield "causal", None
    elif name == "bidirectional_mask_function":
        yield "full", None
    elif owner == "and_masks" and "mask_functions" in cells:
        for inner in cells["mask_functions"]:
            yield from _parts(inner, custom)
    elif owner in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
        yield "window", cells["sliding_window"]
    elif owner == "chunked_overlay":
        yield "chunk", cells["chunk_size"]
    elif owner == "packed_sequence_mask_function":
        yield "packed", cells["packed_sequence_mask"]
    elif owner == "remap_positions_for_packed_sequence" and "mask_function" in cells:
        yield from _parts(cells["mask_function"], custom)
    else:
        raise NotImplementedError(
            f"fa: this model asks for the mask pattern {name}; causal, bidirectional, "
            "sliding-window and packed masks are available. Use "
            'attn_implementation="sdpa" for this model.'
        )


# ---------------------------------------------------------------------------------------------
# The attention: once per layer


@checked(q="query", k="key", v="value", sinks="s_aux", softmax_scale="scaling", dropout_p="dropout")
def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention; transformers calls this.

    Args:
        module: the layer; says whether the model is causal where is_causal is None.
        query: [B, Hq, Sq, D], any strides, no copy.
        key, value: [B, Hkv, Sk, D] and [B, Hkv, Sk, Dv], likewise.
        attention_mask: what the function `attention_mask` returned.
        scaling: of the scores; None: 1 / sqrt(D).
        softcap: of the scores; None: off.
        dropout: of the attention weights, in [0, 1); on a GPU where a kernel row has it.
        sliding_window: w: key j is visible to position p iff p - w < j (and j < p + w where the
            model is not causal).
        s_aux: [Hq], one sink logit for each head.

    Returns (out [B, Sq, Hq, Dv], None). Rows that are padding are 0 in a causal model.

    Raises NotImplementedError, naming it, for what fa cannot do here: a mask with more than two
    dimensions, attention weights as a result, biases, head masks, transformers' own paged caches.
    """
    _refuse(attention_mask, kwargs)
    pages = getattr(key, _PAGES, None)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [B, S, H, D]
    if is_causal is None:
        config = getattr(module, "config", None)
        is_causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True)
    options: dict[str, Any] = {"causal": bool(is_causal), "softmax_scale": scaling}
    if dropout:
        options["dropout_p"] = dropout
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux
    rows = k.shape[1] if pages is None else pages.length
    if sliding_window is not None and rows > sliding_window:  # else it hides nothing
        options["window_size"] = (sliding_window - 1, 0 if is_causal else sliding_window - 1)

    if pages is not None:
        options["page_table"] = pages.table
        if attention_mask is None:  # every row holds a token
            attention_mask = torch.ones(q.shape[0], rows, dtype=torch.bool, device=q.device)
        return _padded(q, k, v, attention_mask, options, rows), None
    if attention_mask is not None and attention_mask.dtype == _SEGMENTS_DTYPE:
        cu_seqlens = _segment_bounds(attention_mask)
        return _packed(q, k, v, cu_seqlens, cu_seqlens, options), None
    if kwargs.get("cu_seq_lens_q") is not None:
        cu_q, cu_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
        return _packed(q, k, v, cu_q.to(torch.int32), cu_k.to(torch.int32), options), None
    if attention_mask is None:
        return cast(Tensor, fa.attention(q, k, v, **options)), None
    return _padded(q, k, v, attention_mask, options, rows), None


def _refuse(mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raises for everything that would otherwise be ignored."""
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions: fa never holds the attention weights. Load the model with "
            'attn_implementation="eager" to see them.'
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name}: this model passes it to its attention, and fa has no option for it. "
                'Use attn_implementation="sdpa" or "eager" for this model.'
            )
    if mask is not None and mask.ndim != 2:
        raise NotImplementedError(
            f"attention_mask: {mask.ndim} dimensions, shape {tuple(mask.shape)}. fa takes None or "
            "a padding mask [B, positions]; for a mask of your own use "
            'attn_implementation="sdpa" or "eager".'
        )


def _segment_bounds(segments: Tensor) -> Tensor:
    """cu_seqlens, int32 [n + 1], of [B, S] rows laid end to end; each row begins a sequence."""
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    at = begins.flatten().nonzero().squeeze(1).to(torch.int32)
    return torch.nn.functional.pad(at, (0, 1), value=segments.numel())


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, options: dict[str, Any]
) -> Tensor:
    """Several sequences end to end in the rows of q, k and v."""
    out = fa.attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, **options
    )
    return cast(Tensor, out).unflatten(0, (q.shape[0], q.shape[1]))


@dataclasses.dataclass(frozen=True)
class _Padding:
    """One run of tokens per sequence, or holes; all about the M columns of one mask."""

    begin: Tensor  # int32 [B]: leftpad_k
    end: Tensor  # int32 [B]: seqused_k
    used_q: Tensor  # int32 [B]: seqused_q
    seqlen_q: int
    left: bool  # some sequence begins after column 0
    right: bool  # some sequence ends before column M
    holes: bool  # some sequence is more than one run


def _padding_of(mask: Tensor, seqlen_q: int) -> _Padding:
    """Reads one mask, bool [B, M]; one small copy to the host unless a graph is being traced."""
    columns = mask.shape[1]
    counts = mask.sum(1, dtype=torch.int32)
    position = torch.arange(1, columns + 1, device=mask.device, dtype=torch.int32)
    end = (mask * position).amax(1) if columns else counts
    begin = (
        torch.where(counts > 0, columns - (mask * position.flip(0)).amax(1), 0) if columns else end
    )
    begin = begin.to(torch.int32)
    used_q = (end - (columns - seqlen_q)).clamp(0, seqlen_q)
    one_run = (end - begin == counts).all()
    if torch.compiler.is_compiling():
        torch._assert_async(one_run, "attention_mask: holes are not available under torch.compile")
        return _Padding(begin, end, used_q, seqlen_q, True, True, False)
    left, right, run = torch.stack(((begin > 0).any(), (end < columns).any(), one_run)).tolist()
    return _Padding(begin, end, used_q, seqlen_q, left, right, not run)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any], rows: int
) -> Tensor:
    """Attention with a padding mask [B, M], M at most the key rows of a sequence."""
    columns, seqlen_q = mask.shape[1], q.shape[1]
    if mask.shape[0] != q.shape[0] or columns > rows:
        raise ValueError(
            f"attention_mask: shape {tuple(mask.shape)} does not fit {q.shape[0]} sequences with "
            f"{rows} key rows."
        )
    padding: _Padding | None = getattr(mask, _NOTES, None)
    if padding is None or padding.seqlen_q != seqlen_q or padding.end.device != q.device:
        padding = _padding_of(mask.to(q.device) != 0, seqlen_q)
    aligned = options["causal"] or "window_size" in options
    if padding.holes and "page_table" in options:
        raise NotImplementedError(
            "attention_mask: padding between the tokens of a sequence is not available in a "
            "PagedCache. Pad on one side only, or use a cache of transformers."
        )
    if padding.holes:
        return _with_holes(q, k[:, :columns], v[:, :columns], mask != 0, aligned, options)
    if padding.left:
        options["leftpad_k"] = padding.begin
    if padding.right or columns < rows or "page_table" in options:
        options["seqused_k"] = padding.end
    if padding.right and aligned:
        options["seqused_q"] = padding.used_q
    return cast(Tensor, fa.attention(q, k, v, **options))


def _with_holes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, aligned: bool, options: dict[str, Any]
) -> Tensor:
    """Padding between tokens: the tokens' rows are gathered into packed sequences."""
    if "window_size" in options:
        raise NotImplementedError(
            "attention_mask: padding between the tokens of a sequence, together with a sliding "
            "window, is not available. Pad on one side only."
        )
    mask = mask.to(q.device)
    batch, seqlen_q = q.shape[:2]
    rows = mask[:, mask.shape[1] - seqlen_q :] if aligned else mask.new_ones(batch, seqlen_q)
    bounds = _row_bounds(rows), _row_bounds(mask)
    packed = cast(Tensor, fa.attention_varlen(q[rows], k[mask], v[mask], *bounds, **options))
    out = packed.new_zeros(batch, seqlen_q, *packed.shape[1:])
    out[rows] = packed
    return out


def _row_bounds(mask: Tensor) -> Tensor:
    """cu_seqlens, int32 [B + 1], of the true elements of a mask [B, M] in row order."""
    counts = mask.sum(1).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(counts, (1, 0))
