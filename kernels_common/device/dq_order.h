// SPDX-License-Identifier: BSD-3-Clause
// Where does element (row, column) of a dQ tile lie in its fp32 sum? The main kernel that adds and
// the convert kernel that reads use the same order.
#pragma once

#include "kernels_common/device/launch_args.h"

namespace fa {

// An order is a type with
//   static constexpr int kRun;   // 2 or 4: columns c .. c + kRun - 1 lie together, c % kRun == 0
//   FA_HOST_DEVICE static constexpr int offset(int row, int col);
// into tile_m * head_dim_qk floats; where no two columns lie together, kRun = 1 and
//   FA_DEVICE static void load(const float* tile, int row, int col, float (&to)[8]);
// for the eight columns from `col`, a multiple of 8. A warp of convert reads 16 rows, 16 columns.

// As the accumulators of products of 64 rows and kColumns columns hold it, one product after the
// other: four values lie together that belong to one thread, 128 of a vector reduce to one warp,
// 16 * kColumns as well; columns (c, c + 1) of row r, then of row r + 8.
template <int kDim, int kColumns = 64>
struct AccumulatorOrder {
  static constexpr int kRun = 2;
  FA_HOST_DEVICE static constexpr int offset(int row, int col) {
    const int part = row / 64 * (kDim / kColumns) + col / kColumns, warp = row % 64 / 16;
    const int lane = row % 8 * 4 + col % 8 / 2;
    return (part * 4 + warp) * 16 * kColumns + col % kColumns / 8 * 128 + lane * 4 +
           row % 16 / 8 * 2 + col % 2;
  }
};

}  // namespace fa
