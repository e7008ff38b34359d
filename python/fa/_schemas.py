# SPDX-License-Identifier: BSD-3-Clause
# Which operators exist in torch's namespace `fa`, and what are their arguments?
"""The schemas of the operators, written once; fakes, shim and tests read them from here."""

from __future__ import annotations

# One line per option of the forward: also the order in which libfa_torch.so finds them.
_SEQUENCES = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "Tensor? leftpad_k=None, Tensor? kv_batch_idx=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "Tensor? page_table=None"
)
_SCALES = (
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "int descale_block_q=0, int descale_block_k=0, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, float? softmax_scale=None"
)
_MASK = (
    "bool causal=False, SymInt window_left=-1, SymInt window_right=-1, SymInt attention_chunk=0, "
    "float softcap=0.0, float dropout_p=0.0, Tensor? philox_seed_offset=None"
)
_EXECUTION = "SymInt num_splits=0, bool batch_invariant=False, bool? deterministic=None"

_INPUTS = "Tensor q, Tensor k, Tensor v"
_OPTIONS = f"{_SEQUENCES}, {_SCALES}, {_MASK}, {_EXECUTION}"
_FORWARD = f"{_INPUTS}, *, {_OPTIONS}, ScalarType? out_dtype=None"
# The backward learns from `out` what out_dtype was.
_BACKWARD = (
    f"Tensor dout, {_INPUTS}, Tensor out, Tensor lse, *, {_OPTIONS}, "
    "Tensor? dlse=None, ScalarType? grad_dtype=None"
)

_ROTARY = (
    "(Tensor x, Tensor cos, Tensor sin, *, Tensor? positions=None, bool interleaved=False) "
    "-> Tensor"
)
SCHEMAS: dict[str, str] = {
    "_forward": f"({_FORWARD}) -> (Tensor out, Tensor lse)",
    # The common call with few arguments: torch spends about 0.2 microseconds on each that a schema
    # has. Only the fast path of torch.ops.fa.forward and fa.attention calls it.
    "_forward_dense": (
        f"({_INPUTS}, float? softmax_scale, bool causal, SymInt window_left, SymInt window_right) "
        "-> (Tensor out, Tensor lse)"
    ),
    "forward": f"({_FORWARD}) -> (Tensor out, Tensor lse)",
    "forward_out": f"({_FORWARD}, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "backward": f"({_BACKWARD}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    "backward_out": (
        f"({_BACKWARD}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, bool accumulate=False) "
        "-> Tensor dsinks"
    ),
    # fa::backward in the order in which libfa_torch.so reads it; nobody else implements it.
    "_backward_kernel": (
        f"({_FORWARD}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse=None, "
        "ScalarType? grad_dtype=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
    ),
    "combine": (
        "(Tensor out_partial, Tensor lse_partial, *, ScalarType? out_dtype=None) "
        "-> (Tensor out, Tensor lse)"
    ),
    "_combine": (
        "(Tensor out_partial, Tensor lse_partial, *, ScalarType? out_dtype=None) "
        "-> (Tensor out, Tensor lse)"
    ),
    "append_kv": (
        "(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, *, "
        "Tensor cache_seqlens, Tensor? page_table=None, Tensor? cu_seqlens_new=None, "
        "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False, "
        "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_seqlens=None) -> ()"
    ),
    "apply_rotary": _ROTARY,
    "_apply_rotary": _ROTARY,
    # What libfa_torch.so asks when its checks refuse a call: the sentence, as UTF-8 bytes.
    "_refusal": f"({_FORWARD}, Tensor? out=None, Tensor? lse=None) -> Tensor",
    # The torch implementation on whatever device the tensors are: fa.backend("cpu") on a GPU.
    "_forward_torch": f"({_FORWARD}) -> (Tensor out, Tensor lse)",
    "_forward_out_torch": f"({_FORWARD}, Tensor(a!) out, Tensor(b!) lse) -> ()",
}

# What each public operator does, for the pages that are made from here (tools/docs_api.py).
MEANINGS: dict[str, str] = {
    "forward": (
        "Exact attention and its LSE: q [B, Sq, Hq, D] (packed [total_q, Hq, D]), k and v to "
        "out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (packed [Hq, total_q]). Differentiable in q, k, v "
        "and sinks, through out and lse."
    ),
    "forward_out": (
        "The same into buffers of the caller; the dtype of out counts as out_dtype. Has no "
        "gradient: an input that requires one is refused."
    ),
    "backward": (
        "The gradients of a forward with the same options, from what it returned: dq, dk and dv in "
        "q's dtype or grad_dtype (fp32), dense in the dimension orders of q, k and v; dsinks in "
        "the dtype of the sinks, [0] where there are none. dout is in q's dtype or fp32, of any "
        "strides; dlse is like lse, None is 0. An input that requires a gradient is refused."
    ),
    "backward_out": (
        "The same into buffers of the caller, each in q's dtype or fp32, of memory of its own; "
        "with accumulate, sums in fp32 are added to what these hold. Returns dsinks, of this call."
    ),
    "combine": (
        "Merges attention over disjoint sets of keys: out_partial [n, B, Sq, Hq, Dv] and "
        "lse_partial [n, B, Hq, Sq] (packed [n, total_q, Hq, Dv] and [n, Hq, total_q]). "
        "Differentiable."
    ),
    "append_kv": (
        "Writes new keys and values into a cache, in place; new key t goes to cache_seqlens + t. "
        'Torch operations so far: CUDA tensors need fa.backend("cpu").'
    ),
    "apply_rotary": (
        "Turns the first 2 m dims of x [B, S, H, D] (packed [total, H, D]) by the tables cos and "
        "sin [positions, m]. Differentiable in x. Torch operations so far, as append_kv."
    ),
}
