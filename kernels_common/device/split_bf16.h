// SPDX-License-Identifier: BSD-3-Clause
// How is a number >= 0 kept as a bf16 and eight more bits, so that both come out of it by moving
// bytes? Pure; host and device.
#pragma once

#include "kernels_common/device/launch_args.h"

namespace fa {

// Half a unit of bf16 is added to the bits of the fp32 number: the upper half is then its nearest
// bf16, and the byte below belongs to the same sum. NaN stays NaN: the quiet one, which is what
// arithmetic makes.
FA_HOST_DEVICE uint32_t raised(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __viaddmin_u32(bits, 0x8000u, 0x7fffffffu);  // one instruction
#else
  return bits + 0x8000u < 0x7fffffffu ? bits + 0x8000u : 0x7fffffffu;
#endif
}

// Byte i of the result is the byte of (high, low) that digit i of `selector` names.
template <uint32_t selector>
FA_HOST_DEVICE uint32_t move_bytes(uint32_t low, uint32_t high) {
#if defined(__CUDA_ARCH__)
  // Written out: the compiler would else look through several moves and keep the fp32 number.
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "n"(selector));
  return result;
#else
  const uint64_t both = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
#endif
}

// Two bf16 of two raised numbers, and the eight more bits of four.
FA_HOST_DEVICE uint32_t bf16_pair(uint32_t x, uint32_t y) { return move_bytes<0x7632>(x, y); }
FA_HOST_DEVICE uint32_t rest_of_four(uint32_t x0, uint32_t y0, uint32_t x1, uint32_t y1) {
  return move_bytes<0x5410>(move_bytes<0x0051>(x0, y0), move_bytes<0x0051>(x1, y1));
}

// The bits of the two numbers again, to 16 bits; 0 exactly. `r`: the first or the second pair of
// `rest`. Their last byte repeats another one, which makes NaN of infinity.
struct BitPair {
  uint32_t x, y;
};
FA_HOST_DEVICE BitPair with_rest(uint32_t pair, uint32_t rest, int r) {
  const uint32_t x = r == 0 ? move_bytes<0x1040>(pair, rest) : move_bytes<0x1060>(pair, rest);
  const uint32_t y = r == 0 ? move_bytes<0x3252>(pair, rest) : move_bytes<0x3272>(pair, rest);
  return BitPair{x - 0x8000u, y - 0x8000u};
}

}  // namespace fa
