// SPDX-License-Identifier: BSD-3-Clause
// How do the query rows of a tile reach shared memory?
#pragma once

#include "kernels_sm90/common/tma.h"
#include "kernels_sm90/fwd/smem.h"

namespace fa::sm90 {

// Rows beyond the tensor and columns beyond dim_qk arrive as zeros; rows beyond the sequence hold
// whatever is there: they only reach their own output rows, which the epilogue replaces.
template <class Row>
struct TmaQ {
  using T = FwdTypes<Row>;
  const TensorMap& map;
  FwdSmem<Row>& smem;
  SlotCursor<T::kQSlots> at{1};
  int group = 1;  // query heads of a key head, where they are packed

  FA_DEVICE void load(const FwdTile& tile) {
    mbarrier_wait(&smem.q_slots.empty[at.slot()], at.parity());
    uint64_t* full = &smem.q_slots.full[at.slot()];
    mbarrier_expect(full, T::kQBytes);
    CUTE_UNROLL
    for (int panel = 0; panel < T::kDimQk / T::kPanel; ++panel)
      tma_load<L2Policy::kEvictFirst>(
          map, smem.q + (at.slot() * T::kDimQk + panel * T::kPanel) * T::kTileM, full,
          box_of(tile, panel * T::kPanel));
    at.advance();
  }

  // The map of packed rows has the heads before the positions.
  FA_DEVICE BoxCoord box_of(const FwdTile& tile, int dim) const {
    if constexpr (T::kPacked)
      return BoxCoord{dim, tile.head_q, tile.seq.q_begin + tile.seq.m_first / group,
                      tile.seq.q_batch};
    else
      return BoxCoord{dim, tile.seq.q_begin + tile.seq.m_first, tile.head_q, tile.seq.q_batch};
  }
};

}  // namespace fa::sm90
