// SPDX-License-Identifier: BSD-3-Clause
// How do the sums of the backward become gradients? dQ from fp32 to its dtype, dsinks over all
// tiles, and zeros in the rows of dK and dV that are no key.
#pragma once

#include "kernels_common/device/bwd_rows.h"
#include "kernels_common/device/dq_order.h"
#include "kernels_common/device/grid_order.h"

namespace fa {

// dQ of one tile, and zeros in the rows of its slot that take no part.
template <class Row, class Order>
FA_DEVICE void convert_tile(const BwdArgs& args, int index, int thread) {
  constexpr KernelConfig kConfig = Row::kConfig;
  constexpr DType kType = kConfig.dtype;
  constexpr int kTileM = kConfig.tile_m, kDim = kConfig.head_dim_qk, kGroups = kDim / 32;
  static_assert(kTileM % 16 == 0 && kDim % 32 == 0, "a warp takes 16 rows and 32 columns");
  const RowTile t = row_tile(args, index, kTileM);
  const SeqInfo& s = t.seq;
  const float* sum = args.work.dq_sum + t.tile * (kTileM * kDim);
  const int end = min_of(args.accumulate ? s.q_len : s.q_slot, s.m_first + kTileM);
  const int lane = thread % 32, size = args.dq_fp32 ? 4 : 2;
  char* out = element_at(args.dq, s.q_batch, s.q_begin + s.m_first, t.head_q, 0, size);
  const int64_t row_bytes = args.dq.stride_row * size;
#pragma unroll 1
  for (int unit = thread / 32; unit < kTileM / 16 * kGroups; unit += kBwdRowThreads / 32) {
    const int slab = unit / kGroups, group = unit % kGroups;
    const int col = group * 32 + lane % 4 * 8;
    float grad[2][8] = {};
    if (s.m_first + slab * 16 < s.q_len && group * 32 < args.dim_qk)
      Order::load(sum, slab, group, lane, grad);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = slab * 16 + half * 8 + lane / 4, row = s.m_first + r;
      if (row >= end || col >= args.dim_qk) continue;
      char* to = out + r * row_bytes + col * size;
      for (float& x : grad[half]) x = row < s.q_len ? x * args.scale : 0.f;
      if (args.accumulate) {
        float before[8];
        load_eight<kType>(to, args.dq_fp32, before);
        for (int c = 0; c < 8; ++c) grad[half][c] += before[c];
      }
      store_eight<kType, true>(to, args.dq_fp32, grad[half]);
    }
  }
}

// dsinks of one head: its tiles in an order that is always the same.
FA_DEVICE void sum_dsinks(const BwdArgs& args, int head_q, int thread) {
  __shared__ float sums[kBwdRowThreads];
  const int groups = args.rows.heads / args.heads_q, tiles = args.rows.tiles_m;
  float sum = 0;
  for (int g = 0; g < groups; ++g)
    for (int m = thread; m < tiles; m += kBwdRowThreads)
      sum += args.work.dsinks[int64_t(g * args.heads_q + head_q) * tiles + m];
  sums[thread] = sum;
  for (int step = kBwdRowThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (thread < step) sums[thread] += sums[thread + step];
  }
  if (thread == 0) args.dsinks[head_q] = sums[0];
}

// Is row `row` of k (packed: of all rows; else of batch entry `batch`) a key of a sequence?
FA_DEVICE bool is_key(const SeqArgs& seq, int row, int batch) {
  int b = batch, slot = seq.seqlen_k;
  if (seq.cu_k != nullptr) {
    b = 0;
    for (int hi = seq.batch; b < hi;) {  // the largest b with cu_k[b] <= row
      const int mid = (b + hi + 1) >> 1;
      if (seq.cu_k[mid] <= row)
        b = mid;
      else
        hi = mid - 1;
    }
    if (b == seq.batch) return false;
    row -= seq.cu_k[b];
    slot = seq.cu_k[b + 1] - seq.cu_k[b];
  }
  const int used = seq.used_k == nullptr ? slot : clamp_to(seq.used_k[b], 0, slot);
  const int pad = seq.leftpad_k == nullptr ? 0 : max_of(seq.leftpad_k[b], 0);
  return row >= pad && row < used;
}

FA_DEVICE void clear_row(const TensorArg& t, int batch, int row, int heads, int row_bytes,
                         int bytes, int lane) {
  const int chunks = row_bytes / 16;
  for (int i = lane; i < heads * chunks; i += 32) {
    const int head = i / chunks;
    *reinterpret_cast<uint4*>(element_at(t, batch, row, head, 0, bytes) +
                              (i - head * chunks) * 16) = uint4{};
  }
}

// Rows of dK and dV that are no key get zeros: the main kernel writes the keys only. One warp a
// row.
FA_DEVICE void clear_rows(const BwdArgs& args, int block, int thread) {
  const int rows = args.seq.cu_k != nullptr ? args.seq.total_k : args.seq.seqlen_k;
  const int64_t first = int64_t(block) * kClearRows;
  const int64_t all = args.seq.cu_k != nullptr ? rows : int64_t(rows) * args.seq.batch;
  for (int r = thread / 32; r < kClearRows; r += kBwdRowThreads / 32) {
    if (first + r >= all) break;
    const int batch = static_cast<int>((first + r) / rows);
    const int row = static_cast<int>(first + r - int64_t(batch) * rows);
    if (is_key(args.seq, row, batch)) continue;
    const int dk_bytes = args.dk_fp32 ? 4 : 2, dv_bytes = args.dv_fp32 ? 4 : 2;
    clear_row(args.dk, batch, row, args.heads_k, args.dim_qk * dk_bytes, dk_bytes, thread % 32);
    clear_row(args.dv, batch, row, args.heads_k, args.dim_v * dv_bytes, dv_bytes, thread % 32);
  }
}

// `Order`: how the main kernel of this row lays out a dQ tile. Blocks as convert_jobs() says.
template <class Row, class Order>
__global__ void __launch_bounds__(kBwdRowThreads)
    fa_bwd_convert(const __grid_constant__ BwdArgs args) {
  wait_for_kernel_ahead();
  const ConvertJobs jobs = convert_jobs(args);
  const int thread = threadIdx.x;
  int block = blockIdx.x;
  // The tiles that main has added to last come first: their sums may still be in L2.
  if (block < jobs.tiles) return convert_tile<Row, Order>(args, jobs.tiles - 1 - block, thread);
  block -= jobs.tiles;
  if (block < jobs.sinks) return sum_dsinks(args, block, thread);
  clear_rows(args, block - jobs.sinks, thread);
}

}  // namespace fa
