// SPDX-License-Identifier: BSD-3-Clause
// What becomes of a product of q and k before the softmax sees it? One policy per combination of
// softcap and ALiBi; a call uses one of them throughout.
#pragma once

#include "kernels_common/device/acc_view.h"
#include "kernels_common/device/block_range.h"
#include "kernels_common/device/online_softmax.h"
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

// tanh(2h)/2 in two ways, with a relative error below 5e-7 each (tanh.approx errs by 5e-4, which
// fp32 results and LSE show). A score takes the way that its own size says, whatever its neighbours
// are; near 0 the difference that the second way takes would lose its digits.
struct HalfTanh {
  static constexpr float kSmall = 0.325f;  // a score of 0.65 times the cap

  // |h| <= kSmall: a weighted minimax fit, and no use of the exponential's unit.
  FA_DEVICE static float small(float h) {
    const float u = h * h;
    const float tail = -3.306293487548828f + u * 3.7827765941619873f;
    return h * (1.f + u * (-1.3332805633544922f + u * (2.128376007080078f + u * tail)));
  }

  FA_DEVICE static float any(float h) {
    constexpr float k4Log2e = 5.770780163555854f;
    float reciprocal;  // 1/2 - 1/(1 + exp 4h); of inf it is 0
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.f + exp2_approx(h * k4Log2e)));
    return fabsf(h) <= kSmall ? small(h) : 0.5f - reciprocal;
  }
};

// Policies turn products into scores that the softmax multiplies by FwdArgs::scale_log2, in place.
// `view` (rows, columns) of this thread; `row`, `col`: sequence position of its (0, 0). kVoted: the
// cheaper way of a tanh where a warp needs no other; the results are the same.
struct PlainScore {
  static constexpr bool kPlain = true, kHasCap = false, kHasAlibi = false;
  template <int kSlabRows, bool kVoted = true, class View>
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

  template <int kSlabRows, bool kVoted = true, class View>
  FA_DEVICE static void apply(View& view, const ScoreArgs& args, const ScoreTile& tile, int row,
                              int col) {
    if constexpr (kCapped) cap<kVoted>(view, args.inner);
    if constexpr (kAlibi) {
      // Column 0 of the view is `ahead` keys behind the row's own position.
      CUTE_UNROLL
      for (int r = 0; r < cute::size<0>(view); r += 2)
        subtract_distance(view, r, kCapped ? args.outer : args.inner, tile.slope,
                          static_cast<float>(row + acc_row(r, kSlabRows) + tile.shift - col));
    }
  }

 private:
  // Few blocks hold a score near the cap; a warp whose block has none needs the fit alone.
  template <bool kVoted, class View>
  FA_DEVICE static void cap(View& view, float inner) {
    float top[4] = {0.f, 0.f, 0.f, 0.f};  // four: one would be a long chain
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(view); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) {
        view(r, c) *= inner;
        float& t = top[r % 2 * 2 + c % 2];
        t = fmaxf(t, fabsf(view(r, c)));
      }
    }
    const float all = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
    if (!kVoted || __any_sync(0xffffffffu, all > HalfTanh::kSmall))
      for_each(view, [](float h) { return HalfTanh::any(h); });
    else
      for_each(view, [](float h) { return HalfTanh::small(h); });
  }
  template <class View, class Function>
  FA_DEVICE static void for_each(View& view, Function function) {
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(view); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) view(r, c) = function(view(r, c));
    }
  }

  // Rows r and r + 1 of the view lie 8 apart, as columns c and c + 2 do: the penalty of the lower
  // row is that of the upper one two columns before. A view of one row has no lower one.
  template <class View>
  FA_DEVICE static void subtract_distance(View& view, int r, float factor, float slope,
                                          float ahead) {
    constexpr bool kPair = decltype(cute::size<0>(view))::value > 1;
    float before[2] = {slope * fabsf(ahead + 8.f), slope * fabsf(ahead + 7.f)};
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(view); ++c) {
      const float penalty = slope * fabsf(ahead - static_cast<float>(acc_col(c)));
      view(r, c) = view(r, c) * factor - penalty;
      if constexpr (kPair) view(r + 1, c) = view(r + 1, c) * factor - before[c % 2];
      before[c % 2] = penalty;
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
