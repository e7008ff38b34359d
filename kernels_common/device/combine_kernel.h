// SPDX-License-Identifier: BSD-3-Clause
// Merges partial results over disjoint keys by their LSE; docs/numerics.md, "Merging partial
// results".
#pragma once

#include "kernels_common/api/fa.h"
#include "kernels_common/device/element.h"
#include "kernels_common/device/online_softmax.h"

namespace fa {

// A warp per row, whose values lie in the lanes: kColumns in each, 32 apart.
template <class Part, int kColumns>
__global__ void __launch_bounds__(32 * kCombineWarps, 4)
    fa_combine_parts(const __grid_constant__ CombineArgs args) {
  constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
  const int lane = threadIdx.x % 32;
  const int64_t rows = int64_t(args.batch) * args.rows * args.heads;
  const int64_t index = int64_t(blockIdx.x) * kCombineWarps + threadIdx.x / 32;
  if (index >= rows) return;
  const int head = int(index % args.heads);
  const int64_t outer = index / args.heads;
  const int row = int(outer % args.rows), batch = int(outer / args.rows);

  // LSE of the parts, 32 at a time, one per lane. An absent part is −inf.
  const float* lses = args.lse_partial + batch * args.lse_partial_stride_batch +
                      head * args.lse_partial_stride_head + row;
  const auto lse_of = [&](int part) {
    return part < args.count ? lses[part * args.lse_partial_stride_part] : -INFINITY;
  };
  float top = -INFINITY;
  for (int first = 0; first < args.count; first += 32) top = max_or_nan(top, lse_of(first + lane));
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    top = max_or_nan(top, __shfl_xor_sync(0xffffffffu, top, step));
  const float shift = top == -INFINITY ? 0.f : top;
  float total = 0.f;
  for (int first = 0; first < args.count; first += 32)
    total += exp2f((lse_of(first + lane) - shift) * kLog2e);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);

  float sum[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum[c] = 0.f;
  const Part* parts = static_cast<const Part*>(args.out_partial.data) +
                      batch * args.out_partial.stride_batch + row * args.out_partial.stride_row +
                      head * args.out_partial.stride_head;
  for (int first = 0; first < args.count; first += 32) {
    const float weights =
        total == 0.f ? 0.f : exp2f((lse_of(first + lane) - shift) * kLog2e) / total;
    const int end = args.count - first < 32 ? args.count - first : 32;
#pragma unroll 4
    for (int i = 0; i < end; ++i) {
      const float weight = __shfl_sync(0xffffffffu, weights, i);
      const Part* part = parts + (first + i) * args.out_partial_stride_part;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = c * 32 + lane;
        const float value = column < args.dim_v ? float(part[column]) : 0.f;
        // Selected, not multiplied: the O of an absent part may hold anything.
        sum[c] = weight == 0.f ? sum[c] : fmaf(weight, value, sum[c]);
      }
    }
  }

  if (args.lse != nullptr && lane == 0)
    args.lse[batch * args.lse_stride_batch + head * args.lse_stride_head + row] =
        top == -INFINITY ? -INFINITY : shift + log2f(total) * kLn2;
  const int64_t to =
      batch * args.out.stride_batch + row * args.out.stride_row + head * args.out.stride_head;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = c * 32 + lane;
    if (column >= args.dim_v) continue;
    if (args.out_dtype == FA_FP32)
      static_cast<float*>(args.out.data)[to + column] = sum[c];
    else if (args.out_dtype == FA_BF16)
      static_cast<cutlass::bfloat16_t*>(args.out.data)[to + column] = cutlass::bfloat16_t(sum[c]);
    else
      static_cast<cutlass::half_t*>(args.out.data)[to + column] = cutlass::half_t(sum[c]);
  }
}

}  // namespace fa
