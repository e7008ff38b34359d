// SPDX-License-Identifier: BSD-3-Clause
// Where do the operands of the backward lie in shared memory?
#pragma once

#include "kernels_common/device/seq_info.h"
#include "kernels_sm80/bwd/config.h"
#include "kernels_sm80/common/swizzled_tile.h"

namespace fa::sm80 {

// Facts of the current key tile that no product needs; kept out of registers.
struct BwdState {
  KeyTileInfo info;
  QueryRange range;
  Band band;
  const char *q, *dout;   // row 0 of the sequence, first query head of the group
  const float* lse_log2;  // tile 0 of the sequence, first query head of the group
  const float* delta;
  int tile;  // workspace tile 0 of the sequence, first query head of the group
  int head_k;
  uint32_t index;  // of the key tile in the order of tiles
};

template <class Row>
struct BwdSmem {
  using T = BwdTypes<Row>;
  using E = typename T::Element;
  using Keys = SwizzledTile<T::kTileN>;
  using Rows = SwizzledTile<T::kTileM>;

  alignas(128) E k[Keys::size(T::kDim)];  // afterwards dK
  alignas(128) E v[Keys::size(T::kDim)];  // afterwards dV
  alignas(128) E q[T::kStages][Rows::size(T::kDim)];
  alignas(128) E dout[T::kStages][Rows::size(T::kDim)];
  alignas(128) E ds[T::kSlotsDs][Keys::size(T::kTileM)];  // Pᵀ, then dSᵀ: keys x query rows
  alignas(16) float lse_log2[T::kStages][T::kTileM];
  alignas(16) float delta[T::kStages][T::kTileM];
  BwdState state;
};

}  // namespace fa::sm80
