// SPDX-License-Identifier: BSD-3-Clause
// May this score be seen? BandMask with one bit per score instead of two comparisons.
#pragma once

#include "kernels_common/device/band_mask.h"

namespace fa::sm90 {

struct BandBits : BandMask {
  template <int kSlabRows, class View>
  FA_DEVICE void apply(View& view, int row, int col) const {
    constexpr int kCols = decltype(cute::size<1>(view))::value;
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(view); ++r) {
      const Columns seen = columns(row + acc_row(r, kSlabRows), col);
      const int from = columns_before(seen.begin), to = columns_before(seen.end);
      CUTE_UNROLL
      for (int word = 0; word < kCols; word += 32) {
        const uint32_t visible = low_bits(to - word) & ~low_bits(from - word);
        CUTE_UNROLL
        for (int c = word; c < kCols && c < word + 32; ++c)
          if ((visible >> (c - word) & 1) == 0) view(r, c) = -INFINITY;
      }
    }
  }

 private:
  // How many columns c of the thread have acc_col(c) < x.
  FA_DEVICE static int columns_before(int x) {
    const int positive = max_of(x, 0);
    return (positive / 8) * 2 + min_of(positive % 8, 2);
  }
  FA_DEVICE static uint32_t low_bits(int n) {
    return n <= 0 ? 0u : 0xffffffffu >> (32 - min_of(n, 32));
  }
};

}  // namespace fa::sm90
