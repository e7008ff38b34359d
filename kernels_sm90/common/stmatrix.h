// SPDX-License-Identifier: BSD-3-Clause
// How does a warp write a 16 x 16 block of 16-bit accumulators to shared memory?
#pragma once

#include <cstdint>

#include "kernels_common/device/launch_args.h"

namespace fa::sm90 {

// Four 8 x 8 matrices: (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15) of a 16 x 16
// block.
FA_DEVICE void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace fa::sm90
