// SPDX-License-Identifier: BSD-3-Clause
// How does a warp move 8 x 8 matrices of 16-bit elements between registers and shared memory?
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

// Four 8 x 8 matrices: lane l has the address of row l % 8 of matrix l / 8, and gets rows 2 (l % 4)
// and one more of column l / 4.
FA_DEVICE void load_matrices_trans(uint32_t address, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed: the addresses are those of its columns.
FA_DEVICE void store_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

}  // namespace fa::sm90
