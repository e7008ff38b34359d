// SPDX-License-Identifier: BSD-3-Clause
// What does a loading warpgroup of its own gain? Here a thread that also computes requests the
// tiles (tools/evolution.py).
#pragma once

#include "kernels_sm90/fwd/kv_loader.h"
#include "kernels_sm90/fwd/q_loader.h"

namespace fa::sm90 {

// The first thread of the consumers requests blocks with the same boxes of TMA as the loading warp
// would. A slot is requested again once every warpgroup is through with its block, so this thread,
// and with it its warpgroup, waits for the others after each block. Two stages: K of block n − 2
// and V of block n − 1 follow block n.
template <class Row>
struct SelfLoads {
  FwdSmem<Row>& smem;

  // The kernel's parameters, whose addresses would take registers of every thread.
  FA_DEVICE void bring(const TensorMap& q, const TensorMap& k, const TensorMap& v) const {
    smem.self.q = &q, smem.self.k = &k, smem.self.v = &v;
  }

  // Before anything of a tile is waited for.
  FA_DEVICE void begin_tile(const FwdTile& tile) const {
    TmaQ<Row> q{*smem.self.q, smem, smem.self.q_at};
    q.load(tile);
    smem.self.q_at = q.at;
    const int n = tile.range.end - 1;
    request(tile, n, true, false);
    request(tile, n - 1, true, false);
    request(tile, n, false, true);
  }

  // This warpgroup is through with block n.
  FA_DEVICE void after(const FwdTile& tile, int n) const {
    request(tile, n - 2, true, false);
    request(tile, n - 1, false, true);
  }

 private:
  FA_DEVICE void request(const FwdTile& tile, int n, bool k, bool v) const {
    if (n < tile.range.begin) return;
    TmaKv<Row> kv{*smem.self.k, *smem.self.v, smem, smem.self.k_at, smem.self.v_at};
    if (k) kv.load_k(tile, n);
    if (v) kv.load_v(tile, n);
    smem.self.k_at = kv.k_at, smem.self.v_at = kv.v_at;
  }
};

}  // namespace fa::sm90
