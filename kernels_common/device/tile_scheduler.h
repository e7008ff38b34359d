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

// Key tiles of the backward: as tile_coord, with `m` the key tile; the first keys, which the most
// rows see under a causal mask, come first. (A deterministic backward takes tile_coord: every key
// tile of a head comes after those behind it, so that a block which waits for its turn waits for
// one that has started.)
FA_HOST_DEVICE constexpr TileCoord key_tile_coord(const TileOrder& order, int index) {
  const TileCoord at = tile_coord(order, index);
  return TileCoord{order.tiles_m - 1 - at.m, at.head};
}

// Packed q: sequence b owns the tiles [packed_offset(cu[b], b), packed_offset(cu[b + 1], b + 1)) of
// every head, of which the first ceil(len / tile_m) hold rows; "sequence" B owns the rows after
// cu[B]. Always enough, known on the host.
FA_HOST_DEVICE constexpr int packed_offset(int cu, int b, int tile_m) { return cu / tile_m + b; }
FA_HOST_DEVICE constexpr int packed_tiles(int total_q, int batch, int tile_m) {
  return total_q / tile_m + batch + 1;
}

// Blocks of the convert kernel, one after the other: query tiles, heads with a sink, groups of
// kClearRows rows of k where some may be no key.
struct ConvertJobs {
  int tiles, sinks, clears;
  FA_HOST_DEVICE constexpr int total() const { return tiles + sinks + clears; }
};
inline constexpr int kClearRows = 64;

FA_HOST_DEVICE constexpr ConvertJobs convert_jobs(const BwdArgs& args) {
  const SeqArgs& s = args.seq;
  const bool may_be_none = s.cu_k != nullptr || s.used_k != nullptr || s.leftpad_k != nullptr;
  const int64_t rows = s.cu_k != nullptr ? s.total_k : int64_t(s.seqlen_k) * s.batch;
  const bool clear = may_be_none && args.accumulate == 0;
  return ConvertJobs{args.rows.num_tiles, args.dsinks != nullptr ? args.heads_q : 0,
                     clear ? static_cast<int>((rows + kClearRows - 1) / kClearRows) : 0};
}

}  // namespace fa
