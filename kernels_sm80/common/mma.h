// SPDX-License-Identifier: BSD-3-Clause
// What does one warp multiply? Operands by ldmatrix, products by mma.sync, and in which order their
// steps go over the head dim.
#pragma once

#include <cute/arch/mma_sm80.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "kernels_common/device/element.h"

namespace fa::sm80 {

template <DType kType>
using MmaAtom = std::conditional_t<kType == DType::kBf16, cute::SM80_16x8x16_F32BF16BF16F32_TN,
                                   cute::SM80_16x8x16_F32F16F16F32_TN>;

// One warp's accumulator of 16·kSlabs x kCols: ((column pair, row half), slab, n8 tile).
template <int kSlabs, int kCols>
using Accumulator = decltype(cute::make_tensor<float>(
    cute::Layout<
        cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::Int<kSlabs>, cute::Int<kCols / 8>>>{}));

FA_DEVICE void load_matrix(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
FA_DEVICE void load_matrix_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Columns [16·i, 16·i + 16) of slab s: two n8 tiles of mma.sync.
template <DType kType, class Acc>
FA_DEVICE void multiply_pair(Acc& acc, int s, int i, const uint32_t (&a)[4],
                             const uint32_t (&b)[4]) {
  using cute::make_coord;
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    float &d0 = acc(make_coord(0, 0), s, 2 * i + h), &d1 = acc(make_coord(1, 0), s, 2 * i + h),
          &d2 = acc(make_coord(0, 1), s, 2 * i + h), &d3 = acc(make_coord(1, 1), s, 2 * i + h);
    MmaAtom<kType>::fma(d0, d1, d2, d3, a[0], a[1], a[2], a[3], b[2 * h], b[2 * h + 1], d0, d1, d2,
                        d3);
  }
}

// Which 16 dims a product over the head dim takes at its step j of kSteps: the same place of every
// panel in turn. Their addresses differ by a constant, so one swizzled address per operand is live
// instead of four.
template <int kSteps>
FA_DEVICE constexpr int dim_step(int j) {
  if constexpr (kSteps % 4 != 0) return j;  // half of the last panel: in order
  constexpr int kPanels = (kSteps + 3) / 4;
  return j % kPanels * 4 + j / kPanels;
}

}  // namespace fa::sm80
