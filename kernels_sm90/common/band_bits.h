// SPDX-License-Identifier: BSD-3-Clause
// May this score be seen? BandMask with one bit per score instead of two comparisons.
#pragma once

#include "kernels_common/device/band_mask.h"

namespace fa::sm90 {

struct BandBits : BandMask {
  template <int kSlabRows, class View>
  FA_DEVICE void apply(View& view, int row, int col) const {
    constexpr int kRows = decltype(cute::size<0>(view))::value,
                  kCols = decltype(cute::size<1>(view))::value;
    const int pos = row + band.shift;
    const int first = columns_before(pos - band.left - col),
              last = columns_before(pos + min_of(band.right, kUnlimited - 1) + 1 - col),
              keys = columns_before(k_len - col);
    int from[kRows], to[kRows];  // columns that a row sees
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int down = acc_row(r, kSlabRows) / 4;  // eight rows further: two columns
      from[r] = first + down;
      to[r] = min_of(last + down, keys);
    }
    if (band.chunk > 0) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int chunk = floor_div(pos + acc_row(r, kSlabRows), band.chunk) * band.chunk - col;
        from[r] = max_of(from[r], columns_before(chunk));
        to[r] = min_of(to[r], columns_before(chunk + band.chunk));
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int word = 0; word < kCols; word += 32) {
        const uint32_t visible = bits_from(from[r] - word) & ~bits_from(to[r] - word);
        CUTE_UNROLL
        for (int c = word; c < kCols && c < word + 32; ++c)
          if ((visible >> (c - word) & 1) == 0) view(r, c) = -INFINITY;
      }
    }
  }

 private:
  // How many columns c >= 0 of the thread have acc_col(c) < x; below 0 for a negative x, so that
  // x + 8 has two more for every x.
  FA_DEVICE static int columns_before(int x) { return (x >> 3) * 2 + min_of(x & 7, 2); }
  // Bits n and above; all of them for a negative n.
  FA_DEVICE static uint32_t bits_from(int n) {
    uint32_t bits;  // a shift by more than 31 leaves none, which C++ does not promise
    asm("shl.b32 %0, %1, %2;" : "=r"(bits) : "r"(0xffffffffu), "r"(max_of(n, 0)));
    return bits;
  }
};

}  // namespace fa::sm90
