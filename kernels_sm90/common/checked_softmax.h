// SPDX-License-Identifier: BSD-3-Clause
// Online softmax that looks for a maximum only where it has to: probabilities are made with the
// row's old maximum, and their sum says whether that was good enough.
#pragma once

#include "kernels_common/device/element.h"
#include "kernels_common/device/online_softmax.h"

namespace fa::sm90 {

// Tensor cores and arithmetic share the ports of the register file: while products run, every
// instruction saved is time. A block whose scores exceed the old maximum by little needs no
// maximum, no exchange between lanes and no rescaling of O. Sums and the LSE use the same stale
// maximum, so nothing but the rounding of the largest probability differs.
struct CheckedSoftmax {
  // Of one lane's probabilities in one block. Below it a probability has the precision of any
  // other; NaN, inf and rows without a key so far are never below.
  static constexpr float kLimit = 256.f;

  // The first block of a tile after softmax.reset(): scores to probabilities by the row's maximum,
  // in place, since the registers of packed ones may still feed a product.
  template <class Scores>
  FA_DEVICE static void first(OnlineSoftmax<2>& softmax, Scores& scores, float scale_log2) {
    auto view = acc_view(scores);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float m = softmax.max[r];
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) m = max_or_nan(m, view(r, c));
      m = max_or_nan(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = max_or_nan(m, __shfl_xor_sync(0xffffffffu, m, 2));
      softmax.max[r] = m;
      const float shift = softmax.shift(r, scale_log2);
      float sum = 0.f;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); c += 2) {
        view(r, c) = exp2_approx(view(r, c) * scale_log2 - shift);
        view(r, c + 1) = exp2_approx(view(r, c + 1) * scale_log2 - shift);
        sum += view(r, c) + view(r, c + 1);
      }
      softmax.sum[r] = sum;
    }
  }

  // Probabilities of a block, packed in the order of the accumulator; `scores` stay as they are.
  // False: some row of this lane was not good enough, and nothing is settled.
  template <DType kType, class Scores, class Packed>
  FA_DEVICE static void attempt(const OnlineSoftmax<2>& softmax, const Scores& scores,
                                Packed& packed, float scale_log2, float (&sums)[2]) {
    const float shift[2] = {softmax.max[0] * scale_log2, softmax.max[1] * scale_log2};
    sums[0] = sums[1] = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores) / 2; ++i) {  // pairs of columns, rows in alternation
      const float a = exp2_approx(scores.data()[2 * i] * scale_log2 - shift[i % 2]);
      const float b = exp2_approx(scores.data()[2 * i + 1] * scale_log2 - shift[i % 2]);
      sums[i % 2] += a + b;
      packed.data()[i] = pack_pair<kType>(a, b);
    }
  }

  // Adopts the block's maximum in the rows named and makes all probabilities anew. Returns through
  // softmax.alpha what O is multiplied by. A row decides by itself, and its sum is added in one
  // order here, in attempt() and in first(): neither a neighbour that adopts nor a block without a
  // visible key before shows in its bits.
  template <DType kType, class Scores, class Packed>
  FA_DEVICE static void settle(OnlineSoftmax<2>& softmax, Scores& scores, Packed& packed,
                               float scale_log2, const bool (&adopt)[2], float (&sums)[2]) {
    auto view = acc_view(scores);
    float shift[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float m = softmax.max[r];
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) m = max_or_nan(m, view(r, c));
      m = max_or_nan(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = max_or_nan(m, __shfl_xor_sync(0xffffffffu, m, 2));
      if (!adopt[r]) m = softmax.max[r];
      softmax.alpha[r] =
          softmax.max[r] == -INFINITY ? 0.f : exp2_approx((softmax.max[r] - m) * scale_log2);
      softmax.max[r] = m;
      shift[r] = softmax.shift(r, scale_log2);
      softmax.sum[r] *= softmax.alpha[r];
      sums[r] = 0.f;
    }
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores) / 2; ++i) {
      const float a = exp2_approx(scores.data()[2 * i] * scale_log2 - shift[i % 2]);
      const float b = exp2_approx(scores.data()[2 * i + 1] * scale_log2 - shift[i % 2]);
      sums[i % 2] += a + b;
      packed.data()[i] = pack_pair<kType>(a, b);
    }
  }
};

}  // namespace fa::sm90
