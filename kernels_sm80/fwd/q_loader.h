// SPDX-License-Identifier: BSD-3-Clause
// How do a tile's query rows get into shared memory? Each warp loads the rows it will read.
#pragma once

#include "kernels_sm80/fwd/kv_loader.h"

namespace fa::sm80 {

// Guarantees zeros in rows >= the number of rows given and in columns >= dim_qk.
template <class Row>
struct PlainQ {
  using T = FwdTypes<Row>;

  // `rows`: the tile's first row in global memory; `count`: rows that exist. `smem_q`: address of
  // FwdSmem::q.
  FA_DEVICE static void load(const char* rows, int64_t row_bytes, int count, int dim,
                             uint32_t smem_q, int warp, int lane) {
    const int row = warp * T::kWarpRows + lane / 8;
    load_panels<T::kTileM, T::kDimQk, T::kWarpRows, 4, true>(
        rows + row * row_bytes + (lane % 8) * 16, row_bytes, row, 0, count, lane % 8, dim, smem_q);
  }
};

}  // namespace fa::sm80
