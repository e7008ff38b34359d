// SPDX-License-Identifier: BSD-3-Clause
// May this score be seen? Applied to one tile of scores, only in blocks that the band's edge
// crosses.
#pragma once

#include "kernels_common/device/acc_view.h"
#include "kernels_common/device/block_range.h"

namespace fa {

// Rows see every key: only the ragged end of the keys is masked.
struct NoMask {
  static constexpr bool kNeeded = false;
  int k_len;

  // `view` (rows, columns): scores; `row`, `col`: sequence position of the view's (0, 0).
  template <int kSlabRows, class View>
  FA_DEVICE void apply(View& view, int /*row*/, int col) const {
    const int end = k_len - col;
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(view); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c)
        if (acc_col(c) >= end) view(r, c) = -INFINITY;
    }
  }
};

struct BandMask {
  static constexpr bool kNeeded = true;
  Band band;
  int k_len;

  // Keys [begin, end) that row i sees, relative to the thread's first column `col`, so that the
  // columns of a loop are immediates.
  struct Columns {
    int begin, end;
  };
  FA_DEVICE Columns columns(int i, int col) const {
    Band window = band;
    window.chunk = 0;
    int begin = window.first_key(i) - col;
    int end = min_of(k_len, min_of(window.last_key(i), kUnlimited - 1) + 1) - col;
    if (band.chunk > 0) {  // one division a row, only where there are chunks
      const int first = floor_div(i + band.shift, band.chunk) * band.chunk - col;
      begin = max_of(begin, first);
      end = min_of(end, first + band.chunk);
    }
    return Columns{begin, end};
  }

  template <int kSlabRows, class View>
  FA_DEVICE void apply(View& view, int row, int col) const {
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(view); ++r) {
      const Columns seen = columns(row + acc_row(r, kSlabRows), col);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c)
        if (acc_col(c) < seen.begin || acc_col(c) >= seen.end) view(r, c) = -INFINITY;
    }
  }
};

// BandMask for a transposed tile: the view's rows are keys, its columns query rows. Also hides keys
// behind k_len and rows behind q_len.
struct TransposedBandMask {
  Band band;
  int q_len, k_len;

  // Query rows [begin, end) that see key j, relative to the thread's first column `col`.
  FA_DEVICE BandMask::Columns columns(int j, int col) const {
    Band window = band;
    window.chunk = 0;
    int begin = window.first_row(j) - col;
    int end =
        j >= k_len ? begin : min_of(q_len, min_of(window.last_row(j), kUnlimited - 1) + 1) - col;
    if (band.chunk > 0) {
      const int first = floor_div(j, band.chunk) * band.chunk - band.shift - col;
      begin = max_of(begin, first);
      end = min_of(end, first + band.chunk);
    }
    return BandMask::Columns{begin, end};
  }

  // `view` (keys, query rows): scores, or what else becomes `hidden` where nothing may be seen;
  // `key`, `row`: sequence position of the view's (0, 0).
  template <int kSlabRows, class View>
  FA_DEVICE void apply(View& view, int key, int row, float hidden = -INFINITY) const {
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(view); ++r) {
      const BandMask::Columns seen = columns(key + acc_row(r, kSlabRows), row);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c)
        if (acc_col(c) < seen.begin || acc_col(c) >= seen.end) view(r, c) = hidden;
    }
  }
};

}  // namespace fa
