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

  FA_DEVICE void load(const FwdTile& tile) {
    mbarrier_wait(&smem.q_slots.empty[at.slot()], at.parity());
    uint64_t* full = &smem.q_slots.full[at.slot()];
    mbarrier_expect(full, T::kQBytes);
    CUTE_UNROLL
    for (int panel = 0; panel < T::kDimQk / T::kPanel; ++panel)
      tma_load<L2Policy::kEvictFirst>(
          map, smem.q + (at.slot() * T::kDimQk + panel * T::kPanel) * T::kTileM, full,
          BoxCoord{panel * T::kPanel, tile.seq.q_begin + tile.seq.m_first, tile.head_q,
                   tile.seq.q_batch});
    at.advance();
  }
};

}  // namespace fa::sm90
