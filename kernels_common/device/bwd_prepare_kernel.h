// SPDX-License-Identifier: BSD-3-Clause
// What does the backward need to know of every query row before it starts? LSE and row dot in the
// form the main kernel reads; sums and turns start at zero.
#pragma once

#include "kernels_common/device/bwd_rows.h"
#include "kernels_common/device/fwd_epilogue.h"
#include "kernels_common/device/grid_order.h"

namespace fa {

// Lanes that share a row, eight values each.
template <int kDim>
constexpr int row_lanes() {
  return kDim <= 64 ? 8 : kDim <= 128 ? 16 : 32;
}

// rowsum(dO · O) over the lanes of a row, the same in each of them. A dO in fp32 is rounded to the
// dtype of q on the way: the main kernel reads it, and both must see the same numbers.
template <DType kType, int kLanes>
FA_DEVICE float row_dot(const BwdArgs& args, const RowTile& t, int row, int lane) {
  float sum = 0;
  const SeqInfo& s = t.seq;
  for (int col = lane * 8; row < s.q_len && col < args.dim_v; col += kLanes * 8) {
    float out[8], dout[8];
    load_eight<kType>(
        element_at(args.out, s.q_batch, s.q_begin + row, t.head_q, col, args.out_fp32 ? 4 : 2),
        args.out_fp32, out);
    load_eight<kType>(element_at(args.dout_given, s.q_batch, s.q_begin + row, t.head_q, col,
                                 args.dout_fp32 ? 4 : 2),
                      args.dout_fp32, dout);
    if (args.dout_fp32) {
      char* to = element_at(args.dout, s.q_batch, s.q_begin + row, t.head_q, col, 2);
      store_eight<kType>(to, false, dout);
      load_eight<kType>(to, false, dout);
    }
    for (int i = 0; i < 8; ++i) sum += out[i] * dout[i];
  }
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// The statistics of a row of the sequence; returns what it adds to dsinks.
FA_DEVICE float store_statistics(const BwdArgs& args, const RowTile& t, int row, int64_t at,
                                 float dot, float sink) {
  constexpr float kLog2E = 1.4426950408889634f;
  const SeqInfo& s = t.seq;
  const bool live = row < s.q_len;
  const int64_t i = s.q_begin + row;
  const float lse =
      live ? args.lse[s.q_batch * args.lse_stride_batch + t.head_q * args.lse_stride_head + i]
           : -INFINITY;
  const bool seen = live && lse != -INFINITY;
  const float dlse =
      seen && args.dlse != nullptr
          ? args.dlse[s.q_batch * args.dlse_stride_batch + t.head_q * args.dlse_stride_head + i]
          : 0;
  const float delta = seen ? dot - dlse : 0;
  args.work.lse_log2[at] = seen ? lse * kLog2E : INFINITY;
  args.work.delta[at] = delta;
  return seen && sink != -INFINITY ? -exp2f((sink - lse) * kLog2E) * delta : 0;
}

// Sum over the block in an order that is always the same; valid in thread 0.
FA_DEVICE float block_sum(float value, int thread) {
  __shared__ float sums[kBwdRowThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (thread % 32 == 0) sums[thread / 32] = value;
  __syncthreads();
  if (thread == 0)
    for (int w = 1; w < kBwdRowThreads / 32; ++w) value += sums[w];
  return value;
}

// One block per workspace tile.
template <class Row>
__global__ void __launch_bounds__(kBwdRowThreads)
    fa_bwd_prepare(const __grid_constant__ BwdArgs args) {
  constexpr KernelConfig kConfig = Row::kConfig;
  constexpr int kTileM = kConfig.tile_m, kLanes = row_lanes<kConfig.head_dim_v>();
  static_assert(kTileM % (kBwdRowThreads / kLanes) == 0, "all lanes of a warp have a row");
  const int thread = threadIdx.x;
  let_next_kernel_begin();
  const RowTile t = row_tile(args, blockIdx.x, kTileM);
  const float sink = sink_of(args, t.head_q);
  float dsink = 0;
  for (int r = thread / kLanes; r < kTileM; r += kBwdRowThreads / kLanes) {
    const int row = t.seq.m_first + r;
    const float dot = row_dot<kConfig.dtype, kLanes>(args, t, row, thread % kLanes);
    if (thread % kLanes == 0)
      dsink += store_statistics(
          args, t, row, int64_t(t.tile) * kTileM + stat_position<kConfig.arch>(r), dot, sink);
  }
  if (args.work.dsinks != nullptr) {
    const float sum = block_sum(dsink, thread);
    if (thread == 0) args.work.dsinks[t.tile] = sum;
  }
  if (args.work.turns != nullptr && thread < kConfig.dq_turns)
    args.work.turns[t.tile * kConfig.dq_turns + thread] = 0;
  if (t.seq.m_first >= t.seq.q_len) return;  // nobody adds to this tile, nobody reads it
  constexpr int kFloats = kTileM * kConfig.head_dim_qk;
  float* sum = args.work.dq_sum + t.tile * kFloats;
  for (int i = thread * 4; i < kFloats; i += kBwdRowThreads * 4)
    *reinterpret_cast<float4*>(sum + i) = float4{};
}

}  // namespace fa
