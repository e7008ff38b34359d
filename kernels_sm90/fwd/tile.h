// SPDX-License-Identifier: BSD-3-Clause
// Which rows, heads and key blocks does tile number i have? Producer and consumers ask the same
// functions.
#pragma once

#include "kernels_common/device/seq_info.h"
#include "kernels_sm90/fwd/config.h"

namespace fa::sm90 {

struct FwdTile {
  SeqInfo seq;
  Band band;
  KeyRange range;
  int head_q, head_k;

  FA_DEVICE bool has_rows() const { return seq.m_first < seq.q_slot; }
  FA_DEVICE bool has_keys() const { return range.begin < range.end; }
};

template <class Row>
FA_DEVICE FwdTile fwd_tile(const FwdArgs& args, int index) {
  using T = FwdTypes<Row>;
  const TileCoord coord = tile_coord(args.order, index);
  const int batch = coord.head / args.heads_q;  // packed: 0
  FwdTile tile;
  tile.seq = seq_info(args.seq, coord.m, batch, T::kTileM);
  tile.head_q = coord.head - batch * args.heads_q;
  tile.head_k = tile.head_q / args.group;
  const SeqInfo& s = tile.seq;
  if constexpr (T::Mask::kNeeded)
    tile.band = make_band(args.band, s.q_len, s.k_len);
  else
    tile.band = Band{kUnlimited, kUnlimited, 0, 0};
  tile.range = KeyRange{0, 0, 0, 0, 0, 0};
  if (s.m_first < s.q_len)
    tile.range = key_range(tile.band, s.m_first, min_of(s.m_first + T::kTileM, s.q_len) - 1,
                           s.k_len, T::kTileN);
  return tile;
}

// Every second round runs backwards, so that no block always gets the longer tile of a round.
class StaticTiles {
 public:
  FA_DEVICE explicit StaticTiles(const TileOrder& order) : num_tiles_(order.num_tiles) { settle(); }
  FA_DEVICE bool valid() const { return index_ < num_tiles_; }
  FA_DEVICE int index() const { return index_; }
  FA_DEVICE void next() {
    first_ += gridDim.x;
    backwards_ = !backwards_;
    settle();
  }

 private:
  // A block without a tile in the last, incomplete round has none afterwards either.
  FA_DEVICE void settle() {
    index_ = first_ + (backwards_ ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }

  int num_tiles_, index_ = 0;
  int first_ = 0;  // of this round
  bool backwards_ = false;
};

}  // namespace fa::sm90
