// SPDX-License-Identifier: BSD-3-Clause
// Row maxima by three-way maxima of integers: half as many instructions as by floats.
#pragma once

#include "kernels_common/device/element.h"
#include "kernels_common/device/online_softmax.h"

namespace fa::sm90 {

// Read as integers, numbers of which one is positive have the same largest one; so it is found
// while products run, at half an instruction per score. Where the largest is negative
// or there was no key yet, adopt() looks again; a positive NaN is larger than all, and a negative
// one makes the row NaN by its sum.
struct ExactSoftmax {
  // Largest of the old maxima and the scores, whole rows, as integers.
  template <class View>
  FA_DEVICE static void find(const OnlineSoftmax<2>& softmax, const View& scores, int (&top)[2]) {
    static_assert(decltype(cute::size<1>(scores))::value % 2 == 0);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) top[r] = __float_as_int(softmax.max[r]);
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(scores); c += 2) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r)
        top[r] =
            __vimax3_s32(top[r], __float_as_int(scores(r, c)), __float_as_int(scores(r, c + 1)));
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      top[r] = ::max(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
      top[r] = ::max(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
    }
  }

  // The maxima that find() found, and those that it could not find, as numbers.
  template <class View>
  FA_DEVICE static void look_again(const OnlineSoftmax<2>& softmax, const View& scores,
                                   const int (&top)[2], float (&m)[2]) {
    m[0] = __int_as_float(top[0]), m[1] = __int_as_float(top[1]);
    if (!__any_sync(0xffffffffu, top[0] < 0 || top[1] < 0)) return;
    find_any(softmax, scores, m);
  }

  // Whether a row of this warp has another maximum than before. If so, softmax.alpha is what its
  // sum and O are multiplied by.
  template <class View>
  FA_DEVICE static bool adopt(OnlineSoftmax<2>& softmax, const View& scores, const int (&top)[2],
                              float scale_log2) {
    bool other = false;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) other |= top[r] < 0 || top[r] != __float_as_int(softmax.max[r]);
    if (!__any_sync(0xffffffffu, other)) return false;
    float m[2];
    look_again(softmax, scores, top, m);
    take(softmax, m, scale_log2);
    return true;
  }

  // The same by floats, for maxima of any sign, without a vote.
  template <class View>
  FA_DEVICE static void adopt_any(OnlineSoftmax<2>& softmax, const View& scores, float scale_log2) {
    float m[2];
    find_any(softmax, scores, m);
    take(softmax, m, scale_log2);
  }

  // Without a vote: what find() found, where all rows of this warp had a maximum above 0
  // before. It never falls, so that one look at it serves a tile. kGuarded: with the questions for
  // empty rows, which have the same answer here; the compiler orders the two forms differently.
  template <bool kGuarded>
  FA_DEVICE static void adopt_positive(OnlineSoftmax<2>& softmax, const int (&top)[2],
                                       float scale_log2) {
    const float m[2] = {__int_as_float(top[0]), __int_as_float(top[1])};
    if constexpr (kGuarded) {
      take(softmax, m, scale_log2);
    } else {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        softmax.alpha[r] = exp2_approx((softmax.max[r] - m[r]) * scale_log2);
        softmax.max[r] = m[r];
      }
    }
  }

  // Probabilities of a block in place, added to the sums of this lane's, in the order of
  // probabilities(). `shift`: what is subtracted, per row.
  template <class Scores>
  FA_DEVICE static void in_place(Scores& scores, float scale_log2, const float (&shift)[2],
                                 float (&sums)[2]) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores) / 2; ++i) {
      float& a = scores.data()[2 * i];
      float& b = scores.data()[2 * i + 1];
      a = exp2_approx(a * scale_log2 - shift[i % 2]);
      b = exp2_approx(b * scale_log2 - shift[i % 2]);
      sums[i % 2] += a + b;
    }
  }

  // Probabilities of a block, packed in the order of the accumulator, and the sums of this lane's.
  template <DType kType, class Scores, class Packed>
  FA_DEVICE static void probabilities(const OnlineSoftmax<2>& softmax, const Scores& scores,
                                      Packed& packed, float scale_log2, float (&sums)[2]) {
    const float shift[2] = {softmax.shift(0, scale_log2), softmax.shift(1, scale_log2)};
    sums[0] = sums[1] = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores) / 2; ++i) {  // pairs of columns, rows in alternation
      const float a = exp2_approx(scores.data()[2 * i] * scale_log2 - shift[i % 2]);
      const float b = exp2_approx(scores.data()[2 * i + 1] * scale_log2 - shift[i % 2]);
      sums[i % 2] += a + b;
      packed.data()[i] = pack_pair<kType>(a, b);
    }
  }

 private:
  // Largest of the old maxima and the scores, whole rows, of any sign.
  template <class View>
  FA_DEVICE static void find_any(const OnlineSoftmax<2>& softmax, const View& scores,
                                 float (&m)[2]) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float y = softmax.max[r];
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(scores); ++c) y = max_or_nan(y, scores(r, c));
      y = max_or_nan(y, __shfl_xor_sync(0xffffffffu, y, 1));
      m[r] = max_or_nan(y, __shfl_xor_sync(0xffffffffu, y, 2));
    }
  }

  FA_DEVICE static void take(OnlineSoftmax<2>& softmax, const float (&m)[2], float scale_log2) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      softmax.alpha[r] =
          softmax.max[r] == -INFINITY ? 0.f : exp2_approx((softmax.max[r] - m[r]) * scale_log2);
      softmax.max[r] = m[r];
    }
  }
};

}  // namespace fa::sm90
