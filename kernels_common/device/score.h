// SPDX-License-Identifier: BSD-3-Clause
// What becomes of a product of q and k before the softmax sees it? One policy per combination of
// softcap and ALiBi; a call uses one of them throughout.
#pragma once

#include "kernels_common/device/acc_view.h"
#include "kernels_common/device/block_range.h"
#include "kernels_common/host/kernel_config.h"

namespace fa {

// What a policy needs to know of a tile.
struct ScoreTile {
  float slope;  // ALiBi slope of the head times log2(e); 0 without ALiBi
  int shift;    // position of query row 0 on the key axis: k_len - q_len
};

// `sequence`: SeqInfo::index.
FA_DEVICE ScoreTile score_tile(const ScoreArgs& args, int sequence, int head_q, int q_len,
                               int k_len) {
  constexpr float kLog2e = 1.4426950408889634f;
  const float slope =
      args.slopes == nullptr
          ? 0.f
          : args.slopes[sequence * args.slopes_stride_batch + head_q * args.slopes_stride_head] *
                kLog2e;
  return ScoreTile{slope, k_len - q_len};
}

// tanh(2h)/2. With t = tanh(h) = P/Q, tanh(2h) = 2t/(1 + t²) = 2PQ/(P² + Q²): one reciprocal, and
// where t approaches 1 its error enters squared. P and Q are a weighted minimax fit on |h| <= 4.7,
// beyond which the result is 1/2 in fp32: relative error below 3.1e-7 (the cost of tanh.approx, a
// second operation of the exponential's unit; that one errs by 5e-4, which fp32 results and LSE
// show). min and max of a NaN are the NaN.
FA_DEVICE float half_tanh_of_double(float h) {
  asm("min.NaN.f32 %0, %0, 0f40966666;\n\tmax.NaN.f32 %0, %0, 0fC0966666;" : "+f"(h));  // ±4.7
  const float u = h * h;
  const float p = h * (1.f + u * (0.11898506432771683f + u * 0.0018186250235885382f));
  const float q =
      1.f + u * (0.4523181915283203f + u * (0.019258776679635048f + u * 7.786970672896132e-05f));
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(p * p + q * q));
  return p * q * reciprocal;
}

// Policies turn products into scores that the softmax multiplies by FwdArgs::scale_log2, in place.
// `view` (rows, columns) of this thread; `row`, `col`: sequence position of its (0, 0).
struct PlainScore {
  static constexpr bool kPlain = true, kHasCap = false, kHasAlibi = false;
  template <int kSlabRows, class View>
  FA_DEVICE static void apply(View&, const ScoreArgs&, const ScoreTile&, int, int) {}
};

template <bool kCapped, bool kAlibi>
struct AnyScore {
  static constexpr bool kPlain = false, kHasCap = kCapped, kHasAlibi = kAlibi;

  // 1 − tanh² at a score that apply() left, `penalty` below what it was without ALiBi.
  FA_DEVICE static float cap_derivative(float score, float penalty, const ScoreArgs& args) {
    const float half_tanh = kAlibi ? __fdividef(score + penalty, args.outer) : score;
    return 1.f - 4.f * half_tanh * half_tanh;
  }

  template <int kSlabRows, class View>
  FA_DEVICE static void apply(View& view, const ScoreArgs& args, const ScoreTile& tile, int row,
                              int col) {
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(view); ++r) {
      // Column 0 of the view is `ahead` keys behind the row's own position.
      const float ahead = static_cast<float>(row + acc_row(r, kSlabRows) + tile.shift - col);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) {
        float s = view(r, c) * args.inner;
        if constexpr (kCapped) s = half_tanh_of_double(s);
        if constexpr (kCapped && kAlibi) s *= args.outer;
        if constexpr (kAlibi) s -= tile.slope * fabsf(ahead - static_cast<float>(acc_col(c)));
        view(r, c) = s;
      }
    }
  }
};
using SoftCapScore = AnyScore<true, false>;
using AlibiScore = AnyScore<false, true>;
using SoftCapAlibiScore = AnyScore<true, true>;

// Calls run(policy) with the policy of this call. Around whole tiles: a branch inside the step
// would cost more than the policies (10 % where there is no softcap). `run` must be inlined: give a
// lambda
// __attribute__((always_inline)).
template <ScoreKind kKind, class Run>
FA_DEVICE void with_score(const ScoreArgs& args, Run&& run) {
  if constexpr (kKind == ScoreKind::kScale) {
    run(PlainScore{});
  } else if (args.capped != 0) {
    if (args.slopes != nullptr)
      run(SoftCapAlibiScore{});
    else
      run(SoftCapScore{});
  } else {
    if (args.slopes != nullptr)
      run(AlibiScore{});
    else
      run(PlainScore{});
  }
}

}  // namespace fa
