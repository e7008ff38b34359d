// SPDX-License-Identifier: BSD-3-Clause
// Where do the operands of the backward lie in shared memory?
#pragma once

#include "kernels_common/device/seq_info.h"
#include "kernels_sm80/bwd/config.h"
#include "kernels_sm80/fwd/smem.h"

namespace fa::sm80 {

// thread_again(), of which the compiler knows that it is not negative: halves the index arithmetic.
FA_DEVICE int thread_index() {
  const int thread = thread_again();
  __builtin_assume(thread >= 0 && thread < 1024);
  return thread;
}

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
  static constexpr int kPanels = (T::kDim + 63) / 64, kDsPanels = (T::kTileM + 63) / 64;
  static constexpr int kKeys = T::kTileN * kPanels * 64, kRows = T::kTileM * kPanels * 64;

  alignas(128) E k[kKeys];  // afterwards dK
  alignas(128) E v[kKeys];  // afterwards dV
  alignas(128) E q[T::kStages][kRows];
  alignas(128) E dout[T::kStages][kRows];
  alignas(128) E ds[T::kSlotsDs][T::kTileN * kDsPanels * 64];  // Pᵀ, then dSᵀ: keys x query rows
  alignas(16) float lse_log2[T::kStages][T::kTileM];
  alignas(16) float delta[T::kStages][T::kTileM];
  BwdState state;
};

}  // namespace fa::sm80
