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

// O and dO of a row, eight columns of a lane, as they lie in memory.
template <DType kType>
struct RowChunk {
  uint4 out{}, dout{};

  // Neither is read again soon enough to keep it in L2.
  FA_DEVICE void load(const char* out_row, const char* dout_row) {
    out = __ldcs(reinterpret_cast<const uint4*>(out_row));
    dout = __ldcs(reinterpret_cast<const uint4*>(dout_row));
  }
  FA_DEVICE float dot() const {
    const uint32_t a[] = {out.x, out.y, out.z, out.w}, b[] = {dout.x, dout.y, dout.z, dout.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_pair<kType>(a[i]), y = unpack_pair<kType>(b[i]);
      sum += x.x * y.x;
      sum += x.y * y.y;
    }
    return sum;
  }
};

// The same where one of them is fp32. A dO in fp32 is rounded to the dtype of q on the way: the
// main kernel reads it, and both must see the same numbers.
template <DType kType>
FA_DEVICE float dot_of_fp32(const BwdArgs& args, const RowTile& t, int row, int col) {
  const SeqInfo& s = t.seq;
  float out[8], dout[8], sum = 0;
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
  return sum;
}

// What is known of a row before its dot is: read early.
struct RowStatistics {
  float lse, dlse;
};

FA_DEVICE RowStatistics load_statistics(const BwdArgs& args, const RowTile& t, int row) {
  const SeqInfo& s = t.seq;
  RowStatistics x{-INFINITY, 0};
  if (row >= s.q_len) return x;
  const int64_t i = s.q_begin + row;
  x.lse = args.lse[s.q_batch * args.lse_stride_batch + t.head_q * args.lse_stride_head + i];
  if (args.dlse != nullptr && x.lse != -INFINITY)
    x.dlse = args.dlse[s.q_batch * args.dlse_stride_batch + t.head_q * args.dlse_stride_head + i];
  return x;
}

// Of the row at `at` of the workspace; returns what it adds to dsinks.
FA_DEVICE float store_statistics(const BwdArgs& args, RowStatistics x, int64_t at, float dot,
                                 float sink) {
  constexpr float kLog2E = 1.4426950408889634f;
  const bool seen = x.lse != -INFINITY;
  const float delta = seen ? dot - x.dlse : 0;
  args.work.lse_log2[at] = seen ? x.lse * kLog2E : INFINITY;
  args.work.delta[at] = delta;
  return seen && sink != -INFINITY ? -exp2f((sink - x.lse) * kLog2E) * delta : 0;
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

// rowsum(dO · O) of all rows of a tile, kBatch of a thread at a time, whose loads are all under way
// before the first value is used.
template <class Row, bool kFp32, int kBatch>
FA_DEVICE void multiply_rows(const BwdArgs& args, const RowTile& t, int thread, float* dots) {
  constexpr KernelConfig kConfig = Row::kConfig;
  constexpr DType kType = kConfig.dtype;
  constexpr int kTileM = kConfig.tile_m, kLanes = row_lanes<kConfig.head_dim_v>();
  constexpr int kRows = kBwdRowThreads / kLanes;  // of all threads at once
  static_assert(kTileM % (kRows * kBatch) == 0 && kConfig.head_dim_v <= 8 * kLanes,
                "all lanes of a warp have a row, and eight of its columns");
  const SeqInfo& s = t.seq;
  const int lane = thread % kLanes, col = lane * 8;
  const char* out = element_at(args.out, s.q_batch, s.q_begin + s.m_first, t.head_q, col, 2);
  const char* dout = element_at(args.dout, s.q_batch, s.q_begin + s.m_first, t.head_q, col, 2);
  const int rows = col < args.dim_v ? s.q_len - s.m_first : 0;  // that the lane reads
#pragma unroll 1
  for (int r = thread / kLanes; r < kTileM; r += kRows * kBatch) {
    RowChunk<kType> chunks[kBatch];
    if constexpr (!kFp32) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t row = r + i * kRows;
        if (row < rows)
          chunks[i].load(out + row * args.out.stride_row * 2,
                         dout + row * args.dout.stride_row * 2);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = r + i * kRows;
      float dot = 0;
      if constexpr (!kFp32)
        dot = chunks[i].dot();
      else if (row < rows)
        dot = dot_of_fp32<kType>(args, t, s.m_first + row, col);
      for (int step = kLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
      if (lane == 0) dots[row] = dot;
    }
  }
}

// Whether the sums of row tile `tile` are not left to main.
FA_DEVICE bool clears(const BwdArgs& args, int64_t tile) {
  return args.work.cleared == nullptr ||
         tile < int64_t(args.order.section) * args.group * args.rows.tiles_m;
}

// Sums of a tile, if anybody adds to or reads them.
template <int kFloats>
FA_DEVICE void clear_sums(const BwdArgs& args, const RowTile& t, int thread) {
  static_assert(kFloats % (kBwdRowThreads * 4) == 0);
  if (t.seq.m_first >= t.seq.q_len) return;
  float* sum = args.work.dq_sum + t.tile * kFloats + thread * 4;
#pragma unroll
  for (int i = 0; i < kFloats; i += kBwdRowThreads * 4)
    *reinterpret_cast<float4*>(sum + i) = float4{};
}

// One block per workspace tile. What main reads first comes last, so that it is in L2.
template <class Row>
__global__ void __launch_bounds__(kBwdRowThreads)
    fa_bwd_prepare(const __grid_constant__ BwdArgs args) {
  constexpr KernelConfig kConfig = Row::kConfig;
  constexpr int kTileM = kConfig.tile_m;
  constexpr int kSteps = kTileM * row_lanes<kConfig.head_dim_v>() / kBwdRowThreads;
  static_assert(kTileM <= kBwdRowThreads, "a thread has a row");
  __shared__ float dots[kTileM];
  const int thread = threadIdx.x;
  let_next_kernel_begin();
  const RowTile t = row_tile(args, args.rows.num_tiles - 1 - static_cast<int>(blockIdx.x), kTileM);
  if (clears(args, t.tile)) clear_sums<kTileM * kConfig.head_dim_qk>(args, t, thread);
  if (t.tile == 0 && args.work.cleared != nullptr)
    for (int i = thread; i * args.order.section < args.order.heads; i += kBwdRowThreads)
      args.work.cleared[i] = 0;
  const bool has_row = thread < kTileM;
  const RowStatistics row =
      has_row ? load_statistics(args, t, t.seq.m_first + thread) : RowStatistics{};
  if (args.out_fp32 || args.dout_fp32)
    multiply_rows<Row, true, 1>(args, t, thread, dots);
  else
    multiply_rows<Row, false, min_of(kSteps, 2)>(args, t, thread, dots);
  __syncthreads();
  const float dsink =
      has_row ? store_statistics(args, row, t.tile * kTileM + stat_position<kConfig.arch>(thread),
                                 dots[thread], sink_of(args, t.head_q))
              : 0;
  if (args.work.dsinks != nullptr) {
    const float sum = block_sum(dsink, thread);
    if (thread == 0) args.work.dsinks[t.tile] = sum;
  }
  if (args.work.turns != nullptr && thread < kConfig.dq_turns)
    args.work.turns[t.tile * kConfig.dq_turns + thread] = 0;
}

}  // namespace fa
