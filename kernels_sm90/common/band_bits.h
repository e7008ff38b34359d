// SPDX-License-Identifier: BSD-3-Clause
// May this score be seen? BandMask with one bit per score instead of two comparisons.
#pragma once

#include "kernels_common/device/band_mask.h"

namespace fa::sm90 {

struct BandBits {
  static constexpr bool kNeeded = true;
  Band band;
  int k_len;

  template <int kSlabRows, class View>
  FA_DEVICE void apply(View& view, int row, int col) const {
    constexpr int kCols = decltype(cute::size<1>(view))::value;
    Band window = band;
    window.chunk = 0;
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(view); ++r) {
      const int i = row + acc_row(r, kSlabRows);
      int begin = window.first_key(i) - col;
      int end = min_of(k_len, min_of(window.last_key(i), kUnlimited - 1) + 1) - col;
      if (band.chunk > 0) {  // one division a row, only where there are chunks
        const int first = floor_div(i + band.shift, band.chunk) * band.chunk - col;
        begin = max_of(begin, first);
        end = min_of(end, first + band.chunk);
      }
      const int from = columns_before(begin), to = columns_before(end);
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
