// SPDX-License-Identifier: BSD-3-Clause
// How is dQ of a block made, in which order do the elements of its tile lie in the fp32 sums, and
// how are they added?
#pragma once

#include "kernels_common/device/dq_order.h"
#include "kernels_common/device/dq_turns.h"
#include "kernels_sm80/bwd/smem.h"
#include "kernels_sm80/common/mma.h"

namespace fa::sm80 {

// The sums of a tile lie in blocks of 16 rows x 8 columns, each in the order of the accumulators of
// mma.sync: register by register, lanes side by side. So one instruction of a warp adds 128
// consecutive bytes.
template <int kDim>
struct DqOrder {
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
  FA_DEVICE static void load(const float* tile, int slab, int group, int lane, float (&to)[2][8]) {
    const float* from = tile + block(slab, 4 * group + lane % 4) + lane / 4 * 4;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {  // row half, odd columns
      const float4 four = load_once(from + i * 32);
      float (&row)[8] = to[i / 2];
      row[i % 2] = four.x, row[2 + i % 2] = four.y, row[4 + i % 2] = four.z,
              row[6 + i % 2] = four.w;
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

// dQ = dS·K of a block of query rows, which every warp makes a part of.
template <class Row>
class DqWriter {
  using T = BwdTypes<Row>;
  using Smem = BwdSmem<Row>;
  using Keys = SwizzledTile<T::kTileN>;
  using Order = DqOrder<T::kDim>;
  using Dq = Accumulator<T::kDqSlabs, T::kDqBlocks * 16>;

 public:
  // `smem`: address of BwdSmem.
  FA_DEVICE DqWriter(const BwdArgs& args, const BwdState& state, uint32_t smem)
      : args_(args), state_(state), smem_(smem) {}

  // Of the block whose dS lies in slot `ds`, to the sums of workspace tile `tile`.
  FA_DEVICE void add(int ds, int tile) const {
    Dq dq;
    cute::clear(dq);
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
    const int warp_m = warp / T::kDqWarpsN, warp_n = warp % T::kDqWarpsN;
    multiply(dq, ds, lane, warp_m, warp_n);
    float* to = args_.work.dq_sum + int64_t(tile) * (T::kTileM * T::kDim) +
                Order::block(warp_m * T::kDqSlabs, warp_n * 2) + lane;
    int32_t* turn = args_.work.turns;
    if (turn != nullptr) {
      turn += int64_t(tile) * T::kConfig.dq_turns + warp;
      wait_for_turn(turn, tiles_before(tile), lane);
    }
    CUTE_UNROLL
    for (int s = 0; s < T::kDqSlabs; ++s) {
      CUTE_UNROLL
      for (int c = 0; c < 2 * T::kDqBlocks; ++c) {
        CUTE_UNROLL
        for (int r = 0; r < 4; ++r)
          add_to_global(to + Order::block(s, c / 2 * T::kDqWarpsN * 2 + c % 2) + r * 32,
                        dq(cute::make_coord(r % 2, r / 2), s, c));
      }
    }
    if (turn != nullptr) pass_turn(turn, lane);
  }

 private:
  // How many key tiles add to a dQ tile before this one.
  FA_DEVICE int tiles_before(int tile) const {
    const int m = (tile - state_.tile) % args_.rows.tiles_m;
    return key_tiles_behind(state_.band, state_.info, m, T::kTileM, T::kTileN);
  }

  FA_DEVICE void multiply(Dq& dq, int ds, int lane, int warp_m, int warp_n) const {
    constexpr int kSteps = T::kTileN / 16, kTotal = kSteps * T::kDqBlocks;
    // dS lies transposed: 16 keys x 16 query rows, and each 8 x 8 matrix is turned on its way.
    const uint32_t rows =
        smem_ + uint32_t(offsetof(Smem, ds)) + ds * uint32_t(sizeof(Smem::ds[0])) +
        Keys::offset(lane / 16 * 8 + lane % 8, warp_m * T::kDqSlabs * 2 + lane / 8 % 2);
    const uint32_t keys = smem_ + uint32_t(offsetof(Smem, k)) +
                          (lane_offset_rows<T::kTileN>(lane) ^ uint32_t(warp_n * 32));
    uint32_t a[2][T::kDqSlabs][4], b[2][4];
    auto load_a = [&](int j) {
      CUTE_UNROLL
      for (int s = 0; s < T::kDqSlabs; ++s)
        load_matrix_transposed((rows ^ uint32_t(s * 32)) + j * 16 * 128, a[j % 2][s]);
    };
    auto load_b = [&](int t) {
      load_matrix_transposed(
          Keys::step_columns(keys, t % T::kDqBlocks * T::kDqWarpsN) + t / T::kDqBlocks * 16 * 128,
          b[t % 2]);
    };
    load_a(0);
    load_b(0);
    CUTE_UNROLL
    for (int t = 0; t < kTotal; ++t) {
      const int j = t / T::kDqBlocks, i = t % T::kDqBlocks;
      if (t + 1 < kTotal) load_b(t + 1);
      if (i == 0 && j + 1 < kSteps) load_a(j + 1);
      CUTE_UNROLL
      for (int s = 0; s < T::kDqSlabs; ++s)
        multiply_pair<T::kType>(dq, s, i, a[j % 2][s], b[t % 2]);
    }
  }

  const BwdArgs& args_;
  const BwdState& state_;
  uint32_t smem_;
};

}  // namespace fa::sm80
