// SPDX-License-Identifier: BSD-3-Clause
// Running maximum and sum of each row, the factor that rescales older results, and the log-sum-exp
// at the end.
#pragma once

#include "kernels_common/device/acc_view.h"

namespace fa {

FA_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A NaN wins, where fmaxf would drop it: a row with a NaN score is NaN, not silently empty.
FA_DEVICE float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// A row lives in the four lanes of a quad. Sums stay per lane until finish(): only maxima are
// exchanged per block.
template <int kRows>
struct OnlineSoftmax {
  float max[kRows];    // of the raw scores
  float sum[kRows];    // of this lane's columns
  float alpha[kRows];  // what O and sum are multiplied by after update()

  FA_DEVICE void reset() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) max[r] = -INFINITY, sum[r] = 0.f, alpha[r] = 1.f;
  }

  // Scores to probabilities 2^(score·scale_log2 − max·scale_log2), in place. scale_log2 > 0: the
  // host replaces a scale of 0 by 1e-30, which gives the same uniform weights without the NaN of
  // −inf·0.
  template <class View>
  FA_DEVICE void update(View& scores, float scale_log2) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float m = max[r];
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) m = max_or_nan(m, scores(r, c));
      m = max_or_nan(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = max_or_nan(m, __shfl_xor_sync(0xffffffffu, m, 2));
      // A row without a visible key so far has max −inf; −inf − (−inf) would be NaN, so 0 is
      // subtracted: all terms are 0.
      const float shift = m == -INFINITY ? 0.f : m * scale_log2;
      // The difference first: max·scale − shift would be one fused operation whose rounding error,
      // the same in every block, adds up to 1e-4 of the sum over 2000 blocks.
      alpha[r] = max[r] == -INFINITY ? 0.f : exp2_approx((max[r] - m) * scale_log2);
      max[r] = m;
      float partial = 0.f;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) {
        const float p = exp2_approx(scores(r, c) * scale_log2 - shift);
        scores(r, c) = p;
        partial += p;
      }
      sum[r] = sum[r] * alpha[r] + partial;
    }
  }

  // The parts of update(), for steps that place them between other instructions. Returns whether a
  // row's alpha is not 1. kLazy: a maximum that grows by no more than 2^limit is not taken over.
  // Probabilities then stay below 2^limit, which fp16 and bf16 hold with the same relative error
  // (up to 2^8); sum and LSE use the same stale maximum. What is lost: with limit 0 the largest
  // probability is exactly 1, else it is rounded like the others.
  template <bool kLazy, class View>
  FA_DEVICE bool update_max(const View& scores, float scale_log2, float limit) {
    float top[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      top[r] = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < cute::size<1>(scores); ++c) top[r] = max_or_nan(top[r], scores(r, c));
    }
    return adopt_max<kLazy>(top, scale_log2, limit);
  }

  // `top`: the maxima of this lane's columns.
  template <bool kLazy>
  FA_DEVICE bool adopt_max(const float (&top)[kRows], float scale_log2, float limit) {
    bool grown = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float m = max_or_nan(max[r], top[r]);
      m = max_or_nan(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = max_or_nan(m, __shfl_xor_sync(0xffffffffu, m, 2));
      if (kLazy && (m - max[r]) * scale_log2 <= limit)
        m = max[r];  // −inf − (−inf) is NaN: takes over −inf
      alpha[r] = max[r] == m ? 1.f : exp2_approx((max[r] - m) * scale_log2);
      grown |= max[r] != m;
      max[r] = m;
    }
    return grown;
  }

  // What is subtracted from score·scale_log2 in row r.
  FA_DEVICE float shift(int r, float scale_log2) const {
    return max[r] == -INFINITY ? 0.f : max[r] * scale_log2;
  }

  // Full row sums; afterwards `sum` holds 1/sum (0 for an empty row) and `max` the natural-log LSE.
  // `sink` (natural units) adds one term to the denominator; −inf adds nothing. `lift`: the
  // probabilities were made 2^lift times what the formula says (e4m3 has its resolution there).
  FA_DEVICE void finish(float scale_log2, const float (&sink)[kRows], float lift = 0.f) {
    constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      // Base-2 maximum, as the sum counts.
      const float m2 = max[r] == -INFINITY ? -INFINITY : max[r] * scale_log2 - lift;
      const float s2 = sink[r] == -INFINITY ? -INFINITY : sink[r] * kLog2e;
      const float top = max_or_nan(m2, s2);
      const float keys =
          m2 == -INFINITY ? 0.f : total * exp2f(m2 - top);  // sum of the keys relative to top
      const float all = keys + (s2 == -INFINITY ? 0.f : exp2f(s2 - top));
      max[r] = top == -INFINITY ? -INFINITY : (top + log2f(all)) * kLn2;
      // O = acc · 2^(m2 − top) / all
      sum[r] = m2 == -INFINITY ? 0.f : exp2f(m2 - top) / all;
    }
  }
};

}  // namespace fa
