// SPDX-License-Identifier: BSD-3-Clause
// In which order do the elements of a dQ tile lie in the fp32 sums, and how are they added?
#pragma once

#include "kernels_common/device/dq_order.h"
#include "kernels_common/device/dq_turns.h"
#include "kernels_sm80/bwd/smem.h"

namespace fa::sm80 {

// The sums of a tile lie in blocks of 16 rows x 8 columns, each in the order of the accumulators of
// mma.sync: register by register, lanes side by side. So one instruction of a warp adds 128
// consecutive bytes.
template <int kDim>
struct DqOrder {
  static constexpr int kRun = 1;      // see dq_order.h
  static constexpr int kBlock = 128;  // floats
  FA_HOST_DEVICE static constexpr int block(int row16, int column8) {
    return (row16 * (kDim / 8) + column8) * kBlock;
  }
  // Place of element (row, column) of the tile.
  FA_HOST_DEVICE static constexpr int offset(int row, int column) {
    return block(row / 16, column / 8) + (column % 2 + 2 * (row % 16 / 8)) * 32 + row % 8 * 4 +
           column % 8 / 2;
  }
  // Every second column lies together.
  FA_DEVICE static void load(const float* tile, int row, int column, float (&to)[8]) {
    CUTE_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const float4 four = *reinterpret_cast<const float4*>(tile + offset(row, column + odd));
      to[odd] = four.x, to[2 + odd] = four.y, to[4 + odd] = four.z, to[6 + odd] = four.w;
    }
  }
};

FA_DEVICE void add_to_global(float* to, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

// A warp's turn at its part of the sums of one query tile, which no other warp of the block adds
// to. `turn` counts the key tiles that have added to it; this one comes after `before` others.
FA_DEVICE void wait_for_turn(const int32_t* turn, int before, int lane) {
  if (lane == 0) wait_for_count(turn, before);
  __syncwarp();
}
FA_DEVICE void pass_turn(int32_t* turn, int lane) {
  __threadfence();
  __syncwarp();
  if (lane == 0) count_one(turn);
}

}  // namespace fa::sm80
