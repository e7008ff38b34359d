// SPDX-License-Identifier: BSD-3-Clause
// Where does element (row, column) of a dQ tile lie in its fp32 sum? The main kernel that adds and
// the convert kernel that reads use the same order.
#pragma once

#include "kernels_common/device/launch_args.h"

namespace fa {

// An order is a type with
//   FA_HOST_DEVICE static constexpr int offset(int row, int col);
// into tile_m * head_dim_qk floats, and, for convert, by a whole warp,
//   FA_DEVICE static void load(const float* tile, int slab, int group, int lane,
//                              float (&to)[2][8]);
// of the 16 rows from 16 * slab and the 32 columns from 32 * group on: lane l gets the rows l / 4
// and l / 4 + 8, eight columns from l % 4 * 8 on.

#if defined(__CUDACC__)
// Nobody reads it again.
FA_DEVICE float4 load_once(const float* from) {
  return __ldcs(reinterpret_cast<const float4*>(from));
}

// Lane p of a quad holds words of chunk j in x[j], its own of four: those of chunk p are gathered,
// lane by lane.
FA_DEVICE void exchange_in_quad(float (&x)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const float got = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step);
      x[i] = upper ? got : x[i];
      x[i + step] = upper ? x[i + step] : got;
    }
  }
}
#endif

// As the accumulators of products of 64 rows and kColumns columns hold it, one product after the
// other: four values lie together that belong to one thread, 128 of a vector reduce to one warp,
// 16 * kColumns as well; columns (c, c + 1) of row r, then of row r + 8.
template <int kDim, int kColumns = 64>
struct AccumulatorOrder {
  FA_HOST_DEVICE static constexpr int offset(int row, int col) {
    const int part = row / 64 * (kDim / kColumns) + col / kColumns, warp = row % 64 / 16;
    const int lane = row % 8 * 4 + col % 8 / 2;
    return (part * 4 + warp) * 16 * kColumns + col % kColumns / 8 * 128 + lane * 4 +
           row % 16 / 8 * 2 + col % 2;
  }
#if defined(__CUDACC__)
  // As it lies: 512 contiguous bytes of a warp. Then the lanes of a quad, which hold a pair of
  // columns each, exchange chunks of eight.
  FA_DEVICE static void load(const float* tile, int slab, int group, int lane, float (&to)[2][8]) {
    const float* from = tile + offset(16 * slab, 32 * group) + lane * 4;
    float x[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float4 four = load_once(from + c * 128);
      x[0][c] = four.x, x[1][c] = four.y, x[2][c] = four.z, x[3][c] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      exchange_in_quad(x[i], lane);
#pragma unroll
      for (int c = 0; c < 4; ++c) to[i / 2][2 * c + i % 2] = x[i][c];
    }
  }
#endif
};

}  // namespace fa
