// SPDX-License-Identifier: BSD-3-Clause
// How do rows get from global into shared memory? cp.async, 16 bytes a lane.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "kernels_sm80/common/swizzled_tile.h"

namespace fa::sm80 {

// 16 bytes from global to shared memory past L1, or 16 zero bytes.
FA_DEVICE void copy_chunk(uint32_t dst, const char* src, bool wanted) {
  const int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(bytes));
}

// kCount rows, kRowStep apart, of a SwizzledTile<kTileRows> of kDim columns. `src`: this thread's
// first chunk; `row`: its row in the tile; rows outside [row_lo, row_hi) and columns >= dim become
// zero and are not read.
template <int kTileRows, int kDim, int kCount, int kRowStep, bool kCheckRows>
FA_DEVICE void load_panels(const char* src, int64_t row_bytes, int row, int row_lo, int row_hi,
                           int chunk, int dim, uint32_t smem) {
  const uint32_t dst = smem + SwizzledTile<kTileRows>::offset(row, chunk);
  int64_t step = kRowStep * row_bytes;
  asm volatile(""
               : "+l"(step));  // hides that multiples of it do not change between blocks: they
                               // would take two registers each
  CUTE_UNROLL
  for (int i = 0; i < kCount / kRowStep; ++i) {
    const int r = row + i * kRowStep;
    const bool row_wanted = !kCheckRows || (r >= row_lo && r < row_hi);
    CUTE_UNROLL
    for (int p = 0; p < SwizzledTile<kTileRows>::panels(kDim); ++p) {
      if (p * 64 + 64 > kDim && p * 64 + chunk * 8 >= kDim) continue;  // no product reads it
      // Rows 4 apart alternate between two chunk positions; rows 8 or 16 apart share one.
      const uint32_t at = kRowStep % 8 == 0
                              ? dst + i * kRowStep * 128 + p * SwizzledTile<kTileRows>::kPanelBytes
                              : ((dst ^ (i % 2 * 64)) + i * kRowStep * 128 +
                                 p * SwizzledTile<kTileRows>::kPanelBytes);
      copy_chunk(at, src + p * 128, row_wanted && chunk * 8 + p * 64 < dim);
    }
    src += step;
  }
}

}  // namespace fa::sm80
