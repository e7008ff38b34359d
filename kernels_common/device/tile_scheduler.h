// SPDX-License-Identifier: BSD-3-Clause
// In which order are the query tiles of a call worked on? Pure; host and device.
#pragma once

#include "kernels_common/device/block_range.h"

namespace fa {

struct TileCoord {
  int m;     // row tile of the head (packed: index into the padded list of tiles)
  int head;  // 0 .. order.heads-1: batch * heads_q + head_q (packed: head_q)
};

// Every tile exactly once: sections of heads whose K and V fit in L2; inside one, the longest row
// tiles (largest m, under a causal mask) first, over all heads of the section.
FA_HOST_DEVICE constexpr TileCoord tile_coord(const TileOrder& order, int index) {
  const int per_section = order.tiles_m * order.section;
  const int section = index / per_section;
  const int rest = index - section * per_section;
  const int first_head = section * order.section;
  const int width = min_of(order.section, order.heads - first_head);
  const int from_last = rest / width;
  return TileCoord{order.tiles_m - 1 - from_last, first_head + rest - from_last * width};
}

// Packed q: sequence b owns the tiles [packed_offset(cu[b], b), packed_offset(cu[b + 1], b + 1)) of
// every head, of which the first ceil(len / tile_m) hold rows; "sequence" B owns the rows after
// cu[B]. Always enough, known on the host.
FA_HOST_DEVICE constexpr int packed_offset(int cu, int b, int tile_m) { return cu / tile_m + b; }
FA_HOST_DEVICE constexpr int packed_tiles(int total_q, int batch, int tile_m) {
  return total_q / tile_m + batch + 1;
}

}  // namespace fa
