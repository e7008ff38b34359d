# SPDX-License-Identifier: BSD-3-Clause
# Which parameters, in which order, with which defaults have the functions of FlashAttention 2, 3?
"""Facts about other libraries, for the tests of fa.flash_attn (2.8.3) and fa.flash_attn_interface.

One line per function: parameters as Python writes them, without annotations.
"""

from __future__ import annotations

_FA2_TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
_FA2_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_FA2_RAW = "dropout_p, softmax_scale, causal"
_FA2_GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
_FA2_RAW_TAIL = (
    "window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
)

FLASH_ATTN_2 = {
    "flash_attn_func": f"q, k, v, {_FA2_TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {_FA2_TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {_FA2_TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {_FA2_LENGTHS}, {_FA2_TAIL}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_FA2_TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_FA2_LENGTHS}, {_FA2_TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
    "_flash_attn_forward": (
        f"q, k, v, {_FA2_RAW}, window_size_left, window_size_right, softcap, alibi_slopes, "
        "return_softmax"
    ),
    "_flash_attn_varlen_forward": (
        f"q, k, v, {_FA2_LENGTHS}, {_FA2_RAW}, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False"
    ),
    "_flash_attn_backward": f"{_FA2_GRADIENTS}, {_FA2_RAW}, {_FA2_RAW_TAIL}",
    "_flash_attn_varlen_backward": (
        f"{_FA2_GRADIENTS}, {_FA2_LENGTHS}, {_FA2_RAW}, {_FA2_RAW_TAIL}, zero_tensors=False"
    ),
}

BERT_PADDING = {
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "pad_input": "hidden_states, indices, batch, seqlen",
}

_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_FA3_TAIL = (
    f"softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
_ROTARY = "rotary_cos=None, rotary_sin=None"
_FA3_TUNING = "num_splits={}, pack_gqa=None, sm_margin=0"

FLASH_ATTN_3 = {
    "flash_attn_func": f"q, k, v, {_FA3_TAIL}",
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        f"seqused_k=None, {_FA3_TAIL}"
    ),
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {_DESCALES}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, "
        "return_attn_probs=False"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": (
        f"q, k_cache, v_cache, k=None, v=None, qv=None, {_ROTARY}, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
        f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {_DESCALES}, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        f"rotary_interleaved=True, scheduler_metadata=None, {_FA3_TUNING.format(0)}, "
        "return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
        "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, "
        f"{_FA3_TUNING.format(0)}"
    ),
    "_flash_attn_forward": (
        "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, "
        "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, "
        f"leftpad_k=None, {_ROTARY}, seqlens_rotary=None, {_DESCALES}, softmax_scale=None, "
        "causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, "
        f"rotary_interleaved=True, scheduler_metadata=None, {_FA3_TUNING.format(1)}"
    ),
    "_flash_attn_backward": (
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, "
        "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, "
        "softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, deterministic=False, sm_margin=0"
    ),
}
