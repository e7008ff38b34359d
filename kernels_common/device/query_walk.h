// SPDX-License-Identifier: BSD-3-Clause
// In which order do key tiles start and come to their query blocks, and how many add to a block
// before one does where the order is fixed? Pure; host and device.
#pragma once

#include "kernels_common/device/dq_turns.h"
#include "kernels_common/device/tile_scheduler.h"

namespace fa {

// Key tiles start in descending order. In turns (dq_turns.h) they add in that order too and walk
// from the first row on: under a causal mask nobody waits. But the longest tiles start last, and a
// call would end with few of them. So the last section of heads goes the other way round: key tiles
// start in ascending order, the longest first, and in turns they walk from the last row on, which
// all see; each is as far behind the one before it as an addition takes. (Ascending in every
// section, a call would end with the long tiles of a last section of few heads.)
FA_HOST_DEVICE constexpr bool in_last_section(const TileOrder& order, int index) {
  return (index / (order.tiles_m * order.section) + 1) * order.section >= order.heads;
}
FA_HOST_DEVICE constexpr TileCoord walking_tile_coord(const TileOrder& order, int index) {
  return in_last_section(order, index) ? key_tile_coord(order, index) : tile_coord(order, index);
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
