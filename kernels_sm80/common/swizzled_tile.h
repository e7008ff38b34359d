// SPDX-License-Identifier: BSD-3-Clause
// Where does element (row, column) of a tile lie in shared memory, and at which address does each
// lane find its operand?
#pragma once

#include "kernels_common/device/launch_args.h"

namespace fa::sm80 {

// A tile of kRows rows of 16-bit elements, split into panels of 64 columns (128 bytes a row). The
// 16-byte chunk c of row r lies at chunk c ^ (r % 8): eight consecutive rows of one column touch
// all banks once.
template <int kRows>
struct SwizzledTile {
  static constexpr int kPanelBytes = kRows * 128;
  // Elements of a tile of kDim columns; the right half of the last panel may stay unused.
  static constexpr int size(int dim) { return kRows * panels(dim) * 64; }
  static constexpr int panels(int dim) { return (dim + 63) / 64; }

  // Byte offset of the 16-byte chunk `chunk` (8 elements) of `row`.
  FA_DEVICE static constexpr uint32_t offset(int row, int chunk) {
    return (chunk / 8) * kPanelBytes + row * 128 + (((chunk % 8) ^ (row % 8)) * 16);
  }
  // `lane_offset` is offset(row, 0 or 1) of this lane; moves it by `step` 16-column operands. An
  // operand is two chunks wide, so the step is an exclusive or that never meets the lane's own
  // chunk bit.
  FA_DEVICE static constexpr uint32_t step_columns(uint32_t lane_address, int step) {
    return (lane_address ^ ((step % 4) * 32)) + (step / 4) * kPanelBytes;
  }
};

// Lane addresses for ldmatrix.x4 at row 0, column 0 of a tile.
// A operand (16 rows x 16 columns), and V's transposed B operand (16 keys x 16 dims): rows by lane,
// columns by half.
template <int kRows>
FA_DEVICE uint32_t lane_offset_rows(int lane) {
  return SwizzledTile<kRows>::offset(lane % 16, lane / 16);
}
// K's B operand (16 keys x 16 dims): the halves of the 16 keys are two n8 tiles.
template <int kRows>
FA_DEVICE uint32_t lane_offset_keys(int lane) {
  return SwizzledTile<kRows>::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// threadIdx.x, read anew: what follows from it is not kept in registers across the key loop.
FA_DEVICE int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// thread_again(), of which the compiler knows that it is not negative: halves the index arithmetic.
FA_DEVICE int thread_index() {
  const int thread = thread_again();
  __builtin_assume(thread >= 0 && thread < 1024);
  return thread;
}

FA_DEVICE void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
FA_DEVICE uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
FA_DEVICE float2 load_shared_pair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}
FA_DEVICE uint4 load_shared_chunk(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

}  // namespace fa::sm80
