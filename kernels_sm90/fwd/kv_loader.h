// SPDX-License-Identifier: BSD-3-Clause
// How do key block n and value block n reach shared memory?
#pragma once

#include "kernels_common/device/grid_order.h"
#include "kernels_sm90/common/tma.h"
#include "kernels_sm90/fwd/smem.h"

namespace fa::sm90 {

// Guarantees zeros in rows beyond the tensor and in columns beyond the real head dim; every other
// row of the box holds what memory holds, seen by the call or not.
template <class Row>
struct TmaKv {
  using T = FwdTypes<Row>;
  const TensorMap& k_map;
  const TensorMap& v_map;
  FwdSmem<Row>& smem;
  SlotCursor<T::kStages> k_at{1};
  SlotCursor<T::kTransposes ? T::kRowSlots : T::kStages> v_at{1};

  FA_DEVICE void load_k(const FwdTile& tile, int n) {
    load<T::kDimQk, T::kTileN>(k_map, smem.k, smem.k_slots, k_at, tile, n);
  }
  FA_DEVICE void load_v(const FwdTile& tile, int n) {
    if constexpr (T::kTransposes)
      for (int half = 1; half >= 0; --half)
        load<T::kDimV, T::kRowKeys>(v_map, smem.v_rows.data, smem.row_slots, v_at, tile,
                                    2 * n + half);
    else if constexpr (T::kFp8)
      load_transposed(tile, n);
    else
      load<T::kDimV, T::kTileN>(v_map, smem.v, smem.v_slots, v_at, tile, n);
  }

 private:
  template <int kDim, int kKeys, int kSlots>
  FA_DEVICE static void load(const TensorMap& map, typename T::E* tiles,
                             SlotBarriers<kSlots>& slots, SlotCursor<kSlots>& at,
                             const FwdTile& tile, int n) {
    mbarrier_wait(&slots.empty[at.slot()], at.parity());
    uint64_t* full = &slots.full[at.slot()];
    mbarrier_expect(full, kKeys * kDim * T::kElementBytes);
    CUTE_UNROLL
    for (int panel = 0; panel < kDim / T::kPanel; ++panel)
      tma_load<L2Policy::kEvictLast>(
          map, tiles + (at.slot() * kDim + panel * T::kPanel) * kKeys, full,
          BoxCoord{panel * T::kPanel, tile.seq.k_begin + n * kKeys, tile.head_k, tile.seq.k_batch});
    at.advance();
  }

  // Panels of 128 keys of all columns; keys behind the sequence's are zeros or another's. Written
  // by the kernel ahead: Q and the first K do not wait for it.
  FA_DEVICE void load_transposed(const FwdTile& tile, int n) {
    wait_for_kernel_ahead();
    mbarrier_wait(&smem.v_slots.empty[v_at.slot()], v_at.parity());
    uint64_t* full = &smem.v_slots.full[v_at.slot()];
    mbarrier_expect(full, T::kVBytes);
    CUTE_UNROLL
    for (int panel = 0; panel < T::kLoadedKeys / 128; ++panel)
      tma_load<L2Policy::kEvictLast>(
          v_map, smem.v + (v_at.slot() * T::kLoadedKeys + panel * 128) * T::kDimV, full,
          BoxCoord{tile.v_begin + n * T::kTileN + panel * 128, 0, tile.head_k, tile.v_batch});
    v_at.advance();
  }
};

}  // namespace fa::sm90
