// SPDX-License-Identifier: BSD-3-Clause
// In which order does a key tile come to its query blocks, and how many key tiles add to a block
// before it where the order is fixed? Pure; host and device.
#pragma once

#include "kernels_common/device/dq_turns.h"
#include "kernels_common/device/tile_scheduler.h"

namespace fa {

// In turns (dq_turns.h) key tiles start and add in descending order and walk from the first row on.
// Under a causal mask nobody waits, but the longest tiles start last, and a call would end with few
// of them. So the last section of heads goes the other way round: key tiles start and add in
// ascending order, the longest first, and walk from the last row on, which they all see; each is as
// far behind the one before it as an addition takes.
FA_HOST_DEVICE constexpr bool reversed_walk(const TileOrder& order, int index) {
  return (index / (order.tiles_m * order.section) + 1) * order.section >= order.heads;
}
FA_HOST_DEVICE constexpr TileCoord tile_in_turns(const TileOrder& order, int index) {
  return reversed_walk(order, index) ? key_tile_coord(order, index) : tile_coord(order, index);
}

// The bounds of `range` are places of the walk: the numbers of the blocks, counted from the other
// end where it is reversed.
struct QueryWalk {
  QueryRange range;
  int first, step;  // block at place 0; 1 or -1

  FA_HOST_DEVICE constexpr int block(int place) const { return first + step * place; }
  FA_HOST_DEVICE constexpr bool reversed() const { return step < 0; }
};

FA_HOST_DEVICE constexpr QueryWalk query_walk(const QueryRange& range, bool reversed) {
  if (!reversed) return QueryWalk{range, 0, 1};
  const int mirror = range.begin + range.end;
  QueryWalk walk{range, mirror - 1, -1};
  walk.range.full_begin = mirror - range.full_end;
  walk.range.full_end = mirror - range.full_begin;
  return walk;
}

// How many key tiles add to query block m before tile `t` does.
FA_HOST_DEVICE int key_tiles_before(const Band& band, const KeyTileInfo& t, int m, int tile_m,
                                    int tile_n, bool reversed) {
  if (!reversed) return key_tiles_behind(band, t, m, tile_m, tile_n);
  const int first = m * tile_m, last = min_of(first + tile_m, t.q_len) - 1;
  return t.n_first / tile_n - key_range(band, first, last, t.k_len, tile_n).begin;
}

}  // namespace fa
