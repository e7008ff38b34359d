// SPDX-License-Identifier: BSD-3-Clause
// In which order does a query tile visit its key blocks? Right edge, interior, left edge; the same
// on both architectures.
#pragma once

#include "kernels_common/device/block_range.h"

namespace fa {

struct Masked {
  static constexpr bool kMasked = true;
};
struct Unmasked {
  static constexpr bool kMasked = false;
};

// From right to left. The rightmost block holds the ragged end of the keys, so it is masked:
// by first(), or, where Step::kFirstIsNext, by next(), which saves a copy of the body in the code
// (and, where Step::kFirstMayBeWhole, only if it needs it).
// The range must not be empty. `score` is handed on to the step: a policy of score.h.
template <class Mask, class Step, class Score>
FA_DEVICE void attend_tile(Step& step, const KeyRange& range, Score score) {
  int n = range.end - 1;
  if constexpr (requires { requires Step::kFirstIsNext; }) {
    int stop = Mask::kNeeded ? min_of(range.full_end, n) : n;
    if constexpr (requires { requires Step::kFirstMayBeWhole; }) stop = range.full_end;
    while (true) {  // right edge, interior, left edge: both edges run through one loop
      for (; n >= stop; --n) step.next(n, Masked{}, score);
      if (n < range.begin) break;
      for (; n >= range.full_begin; --n) step.next(n, Unmasked{}, score);
      stop = range.begin;
    }
  } else {
    step.first(n, score);
    --n;
    if constexpr (Mask::kNeeded)
      for (; n >= range.full_end; --n) step.next(n, Masked{}, score);    // right edge of the band
    for (; n >= range.full_begin; --n) step.next(n, Unmasked{}, score);  // interior
    if constexpr (Mask::kNeeded)
      for (; n >= range.begin; --n) step.next(n, Masked{}, score);  // left edge
  }
  step.last();
}

}  // namespace fa
