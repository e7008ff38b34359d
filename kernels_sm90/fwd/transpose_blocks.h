// SPDX-License-Identifier: BSD-3-Clause
// How does V become the operand that e4m3 products need, inside the attention kernel? Two warps
// turn each block that TMA brought from rows of keys to rows of columns.
#pragma once

#include "kernels_sm90/common/stmatrix.h"
#include "kernels_sm90/fwd/smem.h"

namespace fa::sm90 {

// The thread again, without a register that holds it.
FA_DEVICE int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A transposed load of 16-bit elements gives lane 4i + q the columns 2i and 2i + 1 of keys 2q and
// 2q + 1; with the same of eight keys further, its bytes are keys 2q, 2q + 1, 2q + 8, 2q + 9 of one
// column each: the order of value_keys.h. Eight rows of even columns would meet four groups of
// banks; so columns 2m and 2m + 1 change places where m / 4 is odd, which the epilogue undoes by
// renaming registers.
template <class Row>
class BlockTransposer {
  using T = FwdTypes<Row>;
  static constexpr int kRowBytes = T::kPanel;                      // of one key in a panel
  static constexpr int kPanelChunks = kRowBytes / 16;              // 16 columns each
  static constexpr int kChunks = T::kDimV / 16 / T::kTransposers;  // of one warp
  static constexpr int kSteps = T::kRowKeys / 32;                  // 32 keys each
  static constexpr int kLoads = kChunks * kSteps;
  static constexpr int kInFlight =
      T::kThreads == 384 && kSteps == 2 ? 4 : 2;  // what registers hold

 public:
  FA_DEVICE BlockTransposer(FwdSmem<Row>& smem, int thread) {
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
    const int first = warp * kChunks;
    const int key_swizzle = kRowBytes == 128 ? lane % 8 : lane / 2 % 4;
    from_ = shared_address(smem.v_rows.data) + first / kPanelChunks * (T::kRowKeys * kRowBytes) +
            lane * kRowBytes + ((key_swizzle ^ first % kPanelChunks) * 16);
    // Matrices of a store: even columns, odd ones, both of the next 16 keys.
    const int i = lane % 8, odd = lane / 8 % 2, next = lane / 16;
    const int column = (2 * i + odd) ^ (i / 4);
    to_ = shared_address(smem.v) + (first * 16 + column) * 128 + ((next ^ column % 8) * 16);
  }

  FA_DEVICE void transpose(int row_slot, int slot, int half) const {
    const uint32_t from = from_ + row_slot * kSlotBytes;
    const uint32_t to = to_ + slot * (T::kLoadedKeys * T::kDimV);
    uint32_t in[kInFlight][4];
    CUTE_UNROLL
    for (int i = 0; i < kInFlight; ++i) load(from, i, in[i]);
    CUTE_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      store(to, half, i, in[i % kInFlight]);
      if (i + kInFlight < kLoads) load(from, i + kInFlight, in[i % kInFlight]);
    }
  }

  // Keys outside of [begin, end) of a slot become zeros: no row sees them, and they may be NaN.
  FA_DEVICE void hide(int row_slot, int begin, int end) const {
    uint32_t from = from_ + row_slot * kSlotBytes;
#pragma unroll 1
    for (int key = lane_now(); key < T::kRowKeys; key += 32) {
      if (key < begin || key >= end) {
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk)
          asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(from ^ chunk * 16), "r"(0)
                       : "memory");
      }
      from += 32 * kRowBytes;
    }
    fence_async_shared();  // before TMA writes here again
    __syncwarp();
  }

 private:
  static constexpr int kSlotBytes = T::kRowKeys * T::kDimV;

  FA_DEVICE static void load(uint32_t from, int i, uint32_t (&x)[4]) {
    load_matrices_trans((from ^ i / kSteps * 16) + i % kSteps * 32 * kRowBytes, x);
  }
  FA_DEVICE static void store(uint32_t to, int half, int i, const uint32_t (&x)[4]) {
    const int key = half * T::kRowKeys + i % kSteps * 32;
    const uint32_t at = (to ^ key % 128) + key / 128 * (128 * T::kDimV) + i / kSteps * 2048;
    store_matrices(at, __byte_perm(x[0], x[1], 0x6420), __byte_perm(x[0], x[1], 0x7531),
                   __byte_perm(x[2], x[3], 0x6420), __byte_perm(x[2], x[3], 0x7531));
  }

  uint32_t from_, to_;
};

// `thread`: among the warps that transpose.
template <class Row>
FA_DEVICE void transpose_blocks(FwdSmem<Row>& smem, int thread) {
  using T = FwdTypes<Row>;
  const BlockTransposer<Row> block(smem, thread);
  uint32_t halves = 0;  // of blocks, so far: where both rings have got to, in one register
  for (PackedCursor<kTileSlots> at{0};; at.advance()) {
    mbarrier_wait(&smem.tile_slots.full[at.slot()], at.parity());
    const FwdTile& tile = smem.tiles[at.slot()];
    if (tile.last) return;
    if (tile.has_work()) {
#pragma unroll 1
      for (int half = 2 * tile.range.end - 1; half >= 2 * tile.range.begin; --half) {
        if ((half & 1) != 0)
          mbarrier_wait(&smem.v_slots.empty[halves / 2 % T::kStages],
                        ~(halves / (2 * T::kStages)) & 1);
        mbarrier_wait(&smem.row_slots.full[halves % T::kRowSlots], halves / T::kRowSlots & 1);
        const int first = half * T::kRowKeys;
        if (first < tile.keys_lo || first + T::kRowKeys > tile.keys_hi)
          block.hide(halves % T::kRowSlots, tile.keys_lo - first, tile.keys_hi - first);
        block.transpose(halves % T::kRowSlots, halves / 2 % T::kStages, half & 1);
        __syncwarp();  // one lane speaks for its warp
        if (lane_now() == 0) mbarrier_arrive(&smem.row_slots.empty[halves % T::kRowSlots]);
        if ((half & 1) == 0) {
          fence_async_shared();
          __syncwarp();
          if (lane_now() == 0) mbarrier_arrive(&smem.v_slots.full[halves / 2 % T::kStages]);
        }
        ++halves;
      }
    }
    __syncwarp();
    if (lane_now() == 0) mbarrier_arrive(&smem.tile_slots.empty[at.slot()]);
  }
}

}  // namespace fa::sm90
