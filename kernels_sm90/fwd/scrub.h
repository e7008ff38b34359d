// SPDX-License-Identifier: BSD-3-Clause
// How are rows of V that no query may see cleared in shared memory?
#pragma once

#include "kernels_sm90/fwd/config.h"

namespace fa::sm90 {

// Zeros the rows outside [first, end) of one block of V (tile_n, dim_v); a row is 128 (64) bytes of
// each panel, whatever the swizzle. All consumers take part; `thread` counts them.
template <class Row>
FA_DEVICE void scrub_rows(typename FwdTypes<Row>::E* tile, int first, int end, int thread) {
  using T = FwdTypes<Row>;
  constexpr int kChunks = T::kPanel / 8;  // of 16 bytes
  for (int row = thread / kChunks; row < T::kTileN;
       row += T::kConsumers * kWarpgroupThreads / kChunks) {
    if (row >= first && row < end) continue;
    for (int panel = 0; panel < T::kDimV / T::kPanel; ++panel)
      reinterpret_cast<uint4*>(tile + (panel * T::kTileN + row) * T::kPanel)[thread % kChunks] =
          uint4{0, 0, 0, 0};
  }
}

}  // namespace fa::sm90
