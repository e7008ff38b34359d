// SPDX-License-Identifier: BSD-3-Clause
// In which order are Q, K and V of all tiles of a block brought? One lane of one warp; the same
// tiles and ranges as the consumers.
#pragma once

#include "kernels_sm90/fwd/kv_loader.h"
#include "kernels_sm90/fwd/q_loader.h"

namespace fa::sm90 {

// K runs one block ahead of V, as the consumers use them. With two Q slots the next tile's Q is
// requested while the last blocks of this one are being worked on.
template <class Row>
FA_DEVICE void produce(const FwdArgs& args, TmaQ<Row> q, TmaKv<Row> kv) {
  for (StaticTiles tiles(args.order); tiles.valid(); tiles.next()) {
    const FwdTile tile = fwd_tile<Row>(args, tiles.index());
    if (!tile.has_rows() || !tile.has_keys()) continue;  // the consumers touch no slot either
    int n = tile.range.end - 1;
    q.load(tile);
    kv.load_k(tile, n);
#pragma unroll 1
    for (; n > tile.range.begin; --n) {
      kv.load_k(tile, n - 1);
      kv.load_v(tile, n);
    }
    kv.load_v(tile, n);
  }
}

}  // namespace fa::sm90
