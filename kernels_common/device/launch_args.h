// SPDX-License-Identifier: BSD-3-Clause
// What a kernel reads: plain values with no optional meaning left. Host-safe.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FA_HOST_DEVICE __host__ __device__ __forceinline__
#define FA_DEVICE __device__ __forceinline__
#else
#define FA_HOST_DEVICE inline
#endif

namespace fa {

// Element strides; the last dimension is contiguous. Packed tensors [total, H, D] have stride_batch
// = 0.
struct TensorArg {
  void* data;
  int64_t stride_batch, stride_row, stride_head;
};

// Lengths as the host knows them; what is null is not in use. See seq_info.h for what they mean
// together.
struct SeqArgs {
  const int32_t* cu_q;           // [B + 1] or null: q is packed
  const int32_t* cu_k;           // [B + 1] or null: k and v are packed
  const int32_t* used_q;         // [B] or null
  const int32_t* used_k;         // [B] or null
  const int32_t* leftpad_k;      // [B] or null
  const int32_t* batch_index_k;  // [B] or null: row of k and v that batch entry b reads
  int32_t batch;
  int32_t seqlen_q, seqlen_k;  // dense lengths (packed: the hint, not used by kernels)
  int32_t total_q, total_k;    // rows of a packed q, k
};

// Band of visible keys of one call; windows are clamped to 2^30 so that sums of positions never
// overflow.
struct BandArgs {
  int32_t left, right;  // -1: unlimited
  int32_t chunk;        // 0: none
  int32_t top_left;     // 1: diagonal anchored at (0, 0) instead of bottom-right
};

// Order in which tiles are handed out; see tile_scheduler.h.
struct TileOrder {
  int32_t tiles_m;    // row tiles of one head (packed: the bound of packed_tiles())
  int32_t heads;      // batch * heads_q (packed: heads_q)
  int32_t section;    // heads walked together so that their K and V stay in L2; >= 1
  int32_t num_tiles;  // tiles_m * heads
};

struct FwdArgs {
  TensorArg q, k, v, out;
  float* lse;  // [B, Hq, Sq] or packed [Hq, total_q]; null: not wanted
  int64_t lse_stride_batch, lse_stride_head;
  SeqArgs seq;
  BandArgs band;
  TileOrder order;
  int32_t heads_q, heads_k, group;  // group = heads_q / heads_k
  int32_t dim_qk, dim_v;            // real dims, <= the row's head dims, multiples of 8
  int32_t out_fp32;                 // 1: out holds fp32
  float scale_log2;                 // softmax scale * log2(e)
  float scale;                      // softmax scale
  float rescale_limit;              // how far, in powers of two, a row's maximum may grow unheeded
  const void* sinks;                // [Hq] or null: raw logits that only enter the denominator
  int64_t sinks_stride;
  int32_t sinks_dtype;  // fa_dtype
};

struct LaunchArgs {
  FwdArgs fwd;
  int32_t grid;      // thread blocks
  int32_t sm_count;  // of the device
};

}  // namespace fa
