// SPDX-License-Identifier: BSD-3-Clause
// Which keys, heads and query blocks does a tile have, and which tile comes next? One thread works
// it out, the others read it in shared memory.
#pragma once

#include "kernels_common/device/query_walk.h"
#include "kernels_common/device/seq_info.h"
#include "kernels_sm90/bwd/cluster.h"
#include "kernels_sm90/bwd/config.h"

namespace fa::sm90 {

// The same value in all lanes, and known to be: it and what is counted up to it stay in uniform
// registers, which descriptors of products are made in. Read from memory, it would not be known.
FA_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

FA_DEVICE QueryRange uniform(const QueryRange& r) {
  return QueryRange{
      uniform(r.begin), uniform(r.full_begin), uniform(r.full_end), uniform(r.end), r.any_lo,
      r.any_hi};
}

struct BwdTile {
  KeyTileInfo seq;
  Band band;
  QueryWalk walk;
  int head_k;
  int keys_lo, keys_hi;  // keys that some row of the sequence sees
  int rows_lo, rows_hi;  // rows that see some key of the sequence
  int scrub_keys;        // the tile holds K rows outside of them, which TMA brings as they are
  int rows_end;          // rows from here on are behind the tensor and arrive as zeros
  // kStays:
  uint32_t round;  // tiles that this thread block had before
  uint32_t loads;  // those of them that had work

  // Otherwise nobody touches a slot.
  FA_HOST_DEVICE bool has_work() const { return walk.range.begin < walk.range.end; }
  // Whether it is a tile: behind the last one of a thread block comes none.
  FA_HOST_DEVICE bool exists() const { return walk.range.begin >= 0; }
  FA_HOST_DEVICE void be_none() { walk.range.begin = walk.range.end = -1; }
  // Block m holds rows of Q and dO that are not the problem's.
  FA_HOST_DEVICE bool ragged(int m, int tile_m) const {
    return m * tile_m < rows_lo || ((m + 1) * tile_m > rows_hi && rows_hi < rows_end);
  }
};

// First key of the other thread block of a pair.
template <class Row>
FA_DEVICE int other_first_key(const BwdTile& tile) {
  constexpr int kKeys = BwdTypes<Row>::kTileN;
  return tile.seq.n_first + (cluster_rank() == 0 ? kKeys : -kKeys);
}

// Rows that nobody sees may hold NaN, and 0 · NaN is NaN: K's must not reach dQ, Q's and dO's not
// dK and dV.
template <class Row>
FA_DEVICE void find_hidden_rows(const SeqArgs& args, BwdTile& tile) {
  const KeyTileInfo& s = tile.seq;
  const Band& band = tile.band;
  tile.keys_lo = max_of(0, band.first_key(0));
  tile.keys_hi = min_of(s.k_len, min_of(band.last_key(s.q_len - 1), kUnlimited - 1) + 1);
  tile.rows_lo = max_of(0, band.first_row(0));
  tile.rows_hi = min_of(s.q_len, min_of(band.last_row(s.k_len - 1), kUnlimited - 1) + 1);
  const int keys_end = (args.cu_k == nullptr ? args.seqlen_k : args.total_k) - s.k_begin;
  tile.rows_end = (args.cu_q == nullptr ? args.seqlen_q : args.total_q) - s.q_begin;
  tile.scrub_keys = s.n_first < tile.keys_lo ||
                    (s.n_first + BwdTypes<Row>::kTileN > tile.keys_hi && tile.keys_hi < keys_end);
}

// What has been stored is read again where it is needed: kStays, the thread has few registers.
template <class Row>
FA_DEVICE void forget_registers() {
  if constexpr (BwdTypes<Row>::kStays) asm volatile("" ::: "memory");
}

template <class Row>
FA_DEVICE void bwd_tile(const BwdArgs& args, int index, BwdTile& tile) {
  using T = BwdTypes<Row>;
  const int rank = T::kPair ? cluster_rank() : 0;
  index /= T::kConfig.cluster;
  const TileCoord coord = walking_tile_coord(args.order, index);
  const int batch = coord.head / args.heads_k;  // packed: 0
  tile.head_k = coord.head - batch * args.heads_k;
  tile.seq = key_tile_info(args.seq, coord.m, batch, T::kTileM, T::kWalkN);
  const KeyTileInfo& s = tile.seq;
  forget_registers<Row>();
  tile.band = make_band(args.band, s.q_len, s.k_len);
  forget_registers<Row>();
  const QueryRange range = s.n_first >= s.k_len ? QueryRange{0, 0, 0, 0, 0, 0}
                                                : query_range(tile.band, s.n_first, T::kWalkN,
                                                              s.q_len, s.k_len, T::kTileM);
  tile.walk = query_walk(range, args.work.turns != nullptr && in_last_section(args.order, index));
  forget_registers<Row>();
  tile.seq.n_first += rank * T::kTileN;
  find_hidden_rows<Row>(args.seq, tile);
}

// kStays, one thread: the number of the tile that comes next, which `tile` is then. Numbers are
// taken in the order in which tiles begin, so that a tile waits only for those that have begun.
// They are counted where clears of section 0 would be, which are prepare's; where nothing is
// counted, a thread block has one tile.
template <class Row>
FA_DEVICE int plan_tile(const BwdArgs& args, BwdTile& tile) {
  ++tile.round;
  tile.loads += tile.has_work();
  int number = args.order.num_tiles;
  if (args.work.cleared != nullptr)
    number = atomicAdd(args.work.cleared, 1);
  else if (tile.round == 0)
    number = static_cast<int>(blockIdx.x);
  if (number < args.order.num_tiles)
    bwd_tile<Row>(args, number, tile);
  else
    tile.be_none();
  return number;
}

// By a warp.
FA_DEVICE void copy_tile(BwdTile& to, const BwdTile& from, int lane) {
  constexpr int kWords = sizeof(BwdTile) / 4;
  static_assert(kWords <= 32);
  if (lane < kWords)
    reinterpret_cast<uint32_t*>(&to)[lane] = reinterpret_cast<const uint32_t*>(&from)[lane];
  __syncwarp();
}

}  // namespace fa::sm90
