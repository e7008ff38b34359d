// SPDX-License-Identifier: BSD-3-Clause
// Where do Q, K, V and O lie in shared memory, and at which address does each lane find its
// operand?
#pragma once

#include "kernels_common/device/philox.h"
#include "kernels_common/device/score.h"
#include "kernels_common/device/seq_info.h"
#include "kernels_sm80/fwd/config.h"

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

// Facts of the current tile that no product needs; kept out of registers, one copy per warp.
template <class Mask>
struct TileState {
  const char *k, *v;  // key 0 of the sequence and head
  SeqInfo seq;
  KeyRange range;
  int head_q, split;
  uint32_t tile;  // index in the order of tiles
  Mask mask;
  ScoreTile score;       // of rows with the score `any`
  DropoutPlace dropout;  // of rows that drop weights
};

template <class Row>
struct FwdSmem {
  using T = FwdTypes<Row>;
  using E = typename T::Element;
  static constexpr int kQueryDim = T::kDimQk > T::kDimV ? T::kDimQk : T::kDimV;
  using Keys = SwizzledTile<T::kTileN>;
  // Q, afterwards O; each warp touches its own rows only.
  alignas(128) E q[SwizzledTile<T::kTileM>::size(kQueryDim)];
  alignas(128) E k[T::kStages][Keys::size(T::kDimQk)];
  alignas(128) E v[T::kStages][Keys::size(T::kDimV)];
  TileState<typename T::Mask> state[T::kWarps];
};

}  // namespace fa::sm80
