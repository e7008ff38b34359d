// SPDX-License-Identifier: BSD-3-Clause
// Which CUTLASS type is a DType, and how are fp32 pairs packed into it?
#pragma once

#include <cutlass/numeric_types.h>

#include "kernels_common/device/launch_args.h"
#include "kernels_common/host/kernel_config.h"

namespace fa {

template <DType kType>
struct ElementOf;
template <>
struct ElementOf<DType::kFp16> {
  using type = cutlass::half_t;
};
template <>
struct ElementOf<DType::kBf16> {
  using type = cutlass::bfloat16_t;
};
template <>
struct ElementOf<DType::kE4m3> {
  using type = cutlass::float_e4m3_t;
};
template <DType kType>
using Element = typename ElementOf<kType>::type;

// Two fp32 values to one 32-bit register, `low` in the lower half; one packed convert instruction.
template <DType kType>
FA_DEVICE uint32_t pack_pair(float low, float high) {
  uint32_t packed;
  if constexpr (kType == DType::kBf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Four fp32 values to the bytes of one register, `a` lowest; beyond 448 they saturate.
FA_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// The reverse: the lower half first.
template <DType kType>
FA_DEVICE float2 unpack_pair(uint32_t packed) {
  if constexpr (kType == DType::kBf16)
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  else
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

}  // namespace fa
