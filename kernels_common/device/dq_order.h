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

// Rows one after the other: what coalesced atomics want.
template <int kDim>
struct RowOrder {
  static constexpr int kRun = 4;
  FA_HOST_DEVICE static constexpr int offset(int row, int col) { return row * kDim + col; }
};

}  // namespace fa
