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
  int32_t heads;      // batch * heads_q (packed: heads_q); rows that pack query heads: of heads_k
  int32_t section;    // heads walked together so that their K and V stay in L2; >= 1
  int32_t num_tiles;  // tiles_m * heads
};

// Softcap and ALiBi; see score.h.
struct ScoreArgs {
  int32_t capped;       // 1: a softcap
  float inner;          // multiplies products of q and k: scale / softcap / 2, or scale * log2(e)
  float outer;          // with a softcap and ALiBi: 2 * softcap * log2(e)
  const float* slopes;  // ALiBi, [B, Hq]; null: none
  int64_t slopes_stride_batch, slopes_stride_head;  // elements
};

// Factors of stored e4m3 numbers; null: 1. [B, Hkv], or, with blocks, [B, H, blocks], where H are
// the tensor's own heads and block i holds rows [i * block, (i + 1) * block) of a sequence.
struct DescaleArg {
  const float* data;
  int64_t stride_batch, stride_head, stride_block;  // elements, 0 where one factor serves all
  int32_t block;                                    // rows; 0: no blocks
};

// V with its keys contiguous and in the order of value_keys.h, made by a kernel of its own from
// FwdArgs::v: [batch (packed k: 1), heads_k, dim_v, tiles * kValueTile] e4m3.
struct TransposedV {
  void* data;          // workspace
  int32_t tiles;       // of kValueTile keys, in one head
  int64_t stride_dim;  // elements between the columns of the V that was passed: 1, or its rows are
                       // contiguous and this is not
};

// Dropout of P: docs/numerics.md has the formula of the keep bit.
struct DropoutArgs {
  const int64_t* seed_offset;  // [2] on the device, or null: none
  int32_t threshold;           // kept iff the byte of (batch, head, row, key) >= threshold
  float keep_scale;            // 256 / (256 - threshold): what a kept P is multiplied by
};

// Keys of a tile worked on in parts. With count > 1, out and lse are partial results of this many
// parts, and num_tiles counts every part of a tile.
struct SplitArgs {
  int32_t count;                   // >= 1
  int64_t stride_out, stride_lse;  // elements from one part to the next
};

struct FwdArgs {
  TensorArg q, k, v, out;
  float* lse;  // [B, Hq, Sq] or packed [Hq, total_q]; null: not wanted
  int64_t lse_stride_batch, lse_stride_head;
  SeqArgs seq;
  BandArgs band;
  TileOrder order;
  uint32_t* next_tile;  // zeroed: counts the tiles that blocks have taken; null: dealt in rounds
  SplitArgs splits;
  int32_t heads_q, heads_k, group;  // group = heads_q / heads_k
  int32_t dim_qk, dim_v;            // real dims, <= the row's head dims, multiples of 8
  int32_t out_fp32;                 // 1: out holds fp32
  int32_t out_fp16;                 // e4m3 only: 1: out holds fp16, else bf16 or fp32
  ScoreArgs score;
  DropoutArgs dropout;
  float scale_log2;     // of what ScoreArgs leaves: softmax scale * log2(e), capped
                        // 2 * softcap * log2(e), with ALiBi 1
  float rescale_limit;  // how far, in powers of two, a row's maximum may grow unheeded
  const void* sinks;    // [Hq] or null: raw logits that only enter the denominator
  int64_t sinks_stride;
  int32_t sinks_dtype;  // fa_dtype
  DescaleArg q_descale, k_descale, v_descale;
  TransposedV v_keys;  // e4m3 only
};

// Threads of the kernels around the backward's main one.
inline constexpr int kBwdRowThreads = 256;

// The workspace of a backward. Query rows are padded per sequence to whole tiles of the row's
// tile_m; workspace_tile() of seq_info.h numbers the tiles. Prepare fills it, the main kernel reads
// the statistics and adds to the sums, convert reads the sums.
struct BwdWorkspace {
  float* lse_log2;  // [tile, tile_m]: LSE * log2(e); +inf where no key is seen or the row is none
                    // of the sequence's, so that exp2(score - lse_log2) is 0
  float* delta;     // [tile, tile_m]: rowsum(dO * O) - dlse; 0 for those rows
  float* dq_sum;  // [tile, tile_m * head_dim_qk of the table row], zeroed; the order inside a tile
                  // is the kernel's DqOrder. Unscaled: convert multiplies by the softmax scale
  int32_t* cleared;  // [section of BwdArgs::order], zeroed: key tiles of the section before that
                     // have cleared their share of its sums; null: prepare clears all sums, else
                     // those of section 0
  int32_t* turns;    // [tile], zeroed: key tiles that have added to a dQ tile; null if not
                     // deterministic
  float* dsinks;     // [tile]: a tile's part of its head's dsinks; null: not wanted
};

struct BwdArgs {
  TensorArg q, k, v, out, dq, dk, dv;
  TensorArg dout;        // what the main kernel reads, in the dtype of q
  TensorArg dout_given;  // the caller's; fp32 is rounded into `dout`, in the workspace, by prepare
  const float* lse;      // [B, Hq, Sq] or packed [Hq, total_q]
  const float* dlse;     // as lse, or null: zero
  int64_t lse_stride_batch, lse_stride_head;
  int64_t dlse_stride_batch, dlse_stride_head;
  SeqArgs seq;
  BandArgs band;
  TileOrder rows;   // query tiles of tile_m rows, heads = batch * heads_q (packed q: heads_q)
  TileOrder order;  // key tiles of tile_n keys, heads = batch * heads_k (packed k: heads_k)
  BwdWorkspace work;
  int32_t heads_q, heads_k, group;    // group = heads_q / heads_k
  int32_t dim_qk, dim_v;              // real dims, <= the row's head dims, multiples of 8
  int32_t out_fp32, dout_fp32;        // 1: fp32, else the dtype of q
  int32_t dq_fp32, dk_fp32, dv_fp32;  // 1: the gradient is stored as fp32, else in the dtype of q
  int32_t accumulate;                 // 1: gradients are added to what the buffers hold
  int32_t deterministic;              // 1: dQ tiles are added to in a fixed order of key tiles
  ScoreArgs score;
  float scale_log2;  // as in FwdArgs: what score.h leaves, times this, minus lse_log2 is log2 of P
  float scale;       // softmax scale
  DropoutArgs dropout;
  const void* sinks;  // [Hq] or null
  int64_t sinks_stride;
  int32_t sinks_dtype;  // fa_dtype
  float* dsinks;        // [Hq] or null
};

// Rows of a block of the merging kernel.
inline constexpr int kCombineWarps = 4;

// `count` partial results over disjoint keys; packed ones have batch 1 and rows total_q.
struct CombineArgs {
  TensorArg out_partial, out;  // the last dimension is contiguous
  int64_t out_partial_stride_part;
  const float* lse_partial;  // [count, B, H, S], rows contiguous
  int64_t lse_partial_stride_part, lse_partial_stride_batch, lse_partial_stride_head;
  float* lse;  // or null: not wanted
  int64_t lse_stride_batch, lse_stride_head;
  int32_t count, batch, rows, heads, dim_v;
  int32_t partial_dtype, out_dtype;  // fa_dtype: fp32, bf16 or fp16
};

struct LaunchArgs {
  union {
    FwdArgs fwd;
    BwdArgs bwd;
  };
  int32_t grid;  // thread blocks of the main kernel
};

}  // namespace fa
