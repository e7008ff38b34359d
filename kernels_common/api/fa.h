/* SPDX-License-Identifier: BSD-3-Clause */
/* The C interface of libfa: what a caller fills in, what it may call, and who owns what. C99, no
 * CUDA types. */
#ifndef FA_H_
#define FA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define FA_API __attribute__((visibility("default")))
#else
#define FA_API
#endif

#define FA_ABI_VERSION 1

typedef enum {
  FA_OK = 0,
  FA_ERROR_INVALID = 1, /* an argument is wrong: its text says which, its value, what is allowed */
  FA_ERROR_UNSUPPORTED = 2, /* no kernel row covers the call: the text lists the nearest rows */
  FA_ERROR_WORKSPACE = 3,   /* the workspace is too small; *needed says how much */
  FA_ERROR_ABI = 4,         /* the caller was compiled against another fa.h */
  FA_ERROR_DEVICE = 5,      /* no usable GPU, or one this build holds no kernel for */
  FA_ERROR_CUDA = 6,        /* a CUDA call failed: the text names the call and the row */
  FA_ERROR_INTERNAL = 7
} fa_status;

typedef enum {
  FA_FP16 = 1,
  FA_BF16 = 2,
  FA_E4M3 = 3,
  FA_FP32 = 4
} fa_dtype; /* numbers are never reused */
typedef enum { FA_FORWARD = 1, FA_BACKWARD = 2, FA_COMBINE = 3, FA_APPEND_KV = 4 } fa_op;

/* Strides count elements; the stride of a dim of size <= 1 is ignored. Packed: [total, H, D],
 * stride_batch unused. */
typedef struct {
  void* data;
  int64_t stride_batch, stride_row, stride_head, stride_dim;
  int32_t dtype, reserved;
} fa_tensor;

/* Slopes, sinks, descales: stride 0 broadcasts; block 0: one factor per head. */
typedef struct {
  const void* data;
  int64_t stride_batch, stride_head, stride_block;
  int32_t dtype, block;
} fa_factors;

/* seqlen_*: the dense length, or a hint (maximum) when that side is packed; 0 = unknown. total_*:
 * rows of a packed tensor. */
typedef struct {
  int32_t batch, seqlen_q, seqlen_k, heads_q, heads_k, dim_qk, dim_v, total_q, total_k, reserved;
} fa_shape;

typedef struct {
  float scale; /* NaN: 1/sqrt(dim_qk) */
  float softcap;
  fa_factors alibi_slopes; /* fp32 [Hq] or [B, Hq] */
  fa_factors sinks;        /* [Hq] */
} fa_score;

typedef struct {
  int32_t window_left, window_right; /* -1: unlimited; causal: right = 0 */
  int32_t chunk;                     /* 0: none */
  int32_t align;                     /* 0 bottom-right, 1 top-left */
} fa_mask;

typedef struct {
  const int32_t *cu_q, *cu_k;                                 /* [B + 1] */
  const int32_t *used_q, *used_k, *leftpad_k, *batch_index_k; /* [B] */
} fa_sequences;

typedef struct {
  const int32_t* table; /* [B, pages] */
  int64_t table_stride;
  int32_t page_size, num_pages;
} fa_pages;

typedef struct {
  fa_factors q, k, v;
} fa_descale;

typedef struct {
  float p;
  const int64_t* seed_offset; /* device, [2] */
} fa_dropout;

typedef struct {
  fa_tensor dout, dq, dk, dv;
  const float* dlse; /* strides of fa_params.lse */
  float* dsinks;     /* [Hq] */
  int32_t accumulate;
} fa_gradients;

/* [B, Hq, Sq], or [Hq, total_q] when packed (stride_batch unused). Rows are contiguous. NULL data:
 * not wanted. */
typedef struct {
  float* data;
  int64_t stride_batch, stride_head;
} fa_lse;

typedef struct {
  int32_t num_splits; /* 0: choose */
  int32_t force_arch; /* 0: the device's; 80 or 90 */
  int32_t reserve_sms, deterministic, batch_invariant;
  int32_t sm_count, smem_limit; /* 0: the device's */
} fa_options;

/* Optional, the caller's: zero before first use, left zero by every call; one per stream. Nothing
 * of this version uses it. */
typedef struct {
  void* data;
  size_t bytes;
} fa_state;

typedef struct fa_params {
  uint32_t struct_size, abi_version; /* first, always */
  fa_tensor q, k, v, out;            /* [B, S, H, D] */
  fa_lse lse;
  fa_shape shape;
  fa_score score;
  fa_mask mask;
  fa_sequences seq;
  fa_pages pages;
  fa_descale descale;
  fa_dropout dropout;
  fa_gradients grad;
  fa_options options;
  fa_state state;
} fa_params;

/* Merging of partial results: out_partial [n, B, S, H, D] in fp32, bf16 or fp16, out in one of
 * them; lse_partial [n, B, H, S] in fp32. */
typedef struct fa_combine_params {
  uint32_t struct_size, abi_version;
  int32_t count, batch, seqlen_q, heads_q, dim_v, reserved;
  fa_tensor out_partial, out;
  int64_t out_stride_part;
  fa_lse lse_partial, lse;
  int64_t lse_stride_part;
} fa_combine_params;

/* New keys and values written into a cache: declared, answered by FA_ERROR_UNSUPPORTED. */
typedef struct fa_append_kv_params {
  uint32_t struct_size, abi_version;
  fa_tensor k_new, v_new, k_cache, v_cache;
  fa_shape shape;
  fa_sequences seq;
  fa_pages pages;
  const int32_t *cache_seqlens, *rotary_seqlens; /* [B] */
  fa_tensor rotary_cos, rotary_sin;
  int32_t rotary_interleaved, reserved;
} fa_append_kv_params;

typedef struct {
  uint32_t struct_size;
  char id[64];
  int32_t op, arch, dtype, dim_qk, dim_v, mask, kv, tile_m, tile_n, stages, threads, smem_bytes;
  int32_t registers;   /* -1 without a device */
  int32_t local_bytes; /* -1 without a device */
} fa_kernel_desc;

typedef struct {
  const char* name; /* "q.stride_row", ... ; structs as "fa_params.q" paths without the prefix */
  uint32_t offset, size;
} fa_field;

FA_API void fa_params_init(fa_params* params,
                           size_t struct_size); /* zero, then defaults; the only constructor */
FA_API void fa_combine_params_init(fa_combine_params* params, size_t struct_size);
FA_API void fa_append_kv_params_init(fa_append_kv_params* params, size_t struct_size);

FA_API fa_status fa_workspace_size(fa_op op, const fa_params* params, size_t* bytes);
FA_API fa_status fa_forward(const fa_params* params, void* workspace, size_t bytes, size_t* needed,
                            void* stream);
FA_API fa_status fa_backward(const fa_params* params, void* workspace, size_t bytes, size_t* needed,
                             void* stream);
FA_API fa_status fa_combine(const fa_combine_params* params, void* stream);
FA_API fa_status fa_append_kv(const fa_append_kv_params* params, void* stream);
FA_API fa_status fa_explain(fa_op op, const fa_params* params, char* text, size_t capacity);

FA_API int fa_kernel_count(void);
FA_API fa_status fa_kernel_info(int index,
                                fa_kernel_desc* desc); /* desc->struct_size is set by the caller */
FA_API size_t fa_abi_layout(const fa_field** fields);  /* every field of fa_params */
FA_API int fa_abi_version(void);
FA_API const char* fa_version(void); /* "0.1.0+g1a2b3c4 cuda13.0" */
FA_API const char* fa_status_name(fa_status status);
FA_API const char* fa_last_error(void); /* this thread's last failure, a complete sentence */

#ifdef __cplusplus
}
#endif
#endif /* FA_H_ */
