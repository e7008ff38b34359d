// SPDX-License-Identifier: BSD-3-Clause
// Which rows, heads and key blocks does tile number i have? One warp works it out, the others read
// it in shared memory.
#pragma once

#include "kernels_common/device/score.h"
#include "kernels_common/device/value_keys.h"
#include "kernels_sm90/fwd/config.h"

namespace fa::sm90 {

// Key blocks of one consumer warpgroup, as in KeyRange; it passes the others of its tile.
struct alignas(16) OwnBlocks {
  int begin, full_begin, full_end, end;
};

// Written by one lane, read by loaders and consumers, who keep none of it in registers.
struct FwdTile {
  SeqInfo seq;
  Band band;
  KeyRange range;
  ScoreTile score;
  int head_q, head_k;           // packed rows: the first query head of the group
  int split;                    // packed rows: which part of the tile's keys
  int keys_lo, keys_hi;         // keys that some row of the sequence sees
  int scrub_first, scrub_last;  // the first (rightmost), last block holds V rows outside them
  // e4m3: factors of scores and of V; where the tile's V begins in FwdArgs::v_keys.
  float scale_log2, qk_descale, v_descale;
  int v_begin, v_batch;
  OwnBlocks own[3];  // per consumer warpgroup
  // The same: blocks at the left end of the tile before that it has still to pass; unmasked tiles
  // have none, and those at the right end of this tile stand here.
  int passes[3];
  int last;  // 1: no tile, the block is done

  // Otherwise neither side touches a slot of Q, K or V.
  FA_DEVICE bool has_work() const { return last == 0 && range.begin < range.end; }
};

// packed_row() of a group that is a power of two: consumers have no registers for a division.
FA_DEVICE PackedRow packed_row_by_shift(int row, int group) {
  return PackedRow{row >> (__ffs(group) - 1), row & (group - 1)};
}

template <class Row>
FA_DEVICE float scale_log2(const FwdArgs& args, const FwdTile& tile) {
  if constexpr (FwdTypes<Row>::kFp8) return tile.scale_log2;
  return args.scale_log2;
}

// The factor of a whole head; blocks have theirs, which the step looks up.
FA_DEVICE float descale_of(const DescaleArg& arg, int sequence, int head_k) {
  return arg.data == nullptr || arg.block > 0
             ? 1.f
             : arg.data[sequence * arg.stride_batch + head_k * arg.stride_head];
}

// `head`: of the tensor; `row`: of the sequence.
FA_DEVICE float block_descale_of(const DescaleArg& arg, int sequence, int head, int row) {
  return arg.block == 0 ? 1.f
                        : arg.data[sequence * arg.stride_batch + head * arg.stride_head +
                                   row / arg.block * arg.stride_block];
}

// e4m3: descales of q and k go into the factor that scores are multiplied by anyway. It stays above
// 0, so that 0 gives uniform weights without 0 · −inf.
FA_DEVICE void find_descales(const FwdArgs& args, FwdTile& tile) {
  const int b = tile.seq.index;
  if (b >= args.seq.batch) return;  // rows of no sequence
  const float qk =
      descale_of(args.q_descale, b, tile.head_k) * descale_of(args.k_descale, b, tile.head_k);
  const bool inside = args.score.capped != 0 || args.score.slopes != nullptr;
  tile.qk_descale = inside ? qk : 1.f;
  tile.scale_log2 = inside ? args.scale_log2 : fmaxf(args.scale_log2 * qk, 1e-30f);
  tile.v_descale = descale_of(args.v_descale, b, tile.head_k);
  tile.v_begin = value_tile_begin(args.seq, b) * kValueTile;
  tile.v_batch = args.seq.cu_k == nullptr ? b : 0;
}

// V rows that no row of the sequence sees may hold NaN, and 0 · NaN is NaN. Only the first and the
// last block of a tile can bring such rows; behind the end of the tensor TMA brings zeros.
template <class Row>
FA_DEVICE void find_hidden_keys(const SeqArgs& args, FwdTile& tile) {
  using T = FwdTypes<Row>;
  const SeqInfo& s = tile.seq;
  const KeySpan seen = seen_keys(tile.band, s.q_len, s.k_len);
  tile.keys_lo = seen.begin;
  tile.keys_hi = seen.end;
  const int end_of_tensor = (args.cu_k == nullptr ? args.seqlen_k : args.total_k) - s.k_begin;
  tile.scrub_first = tile.range.end * T::kTileN > tile.keys_hi && tile.keys_hi < end_of_tensor;
  tile.scrub_last = tile.range.begin * T::kTileN < tile.keys_lo;
}

// Rows of one warpgroup may need fewer blocks than the tile: under a causal mask, in a window, and
// behind the last row. A block whose rows are overwritten is passed by none, since all consumers
// take part in that. The loop stays one: this warp has few registers.
// `rows`: of a position.
template <class Row>
FA_DEVICE void find_own_blocks(FwdTile& tile, int rows) {
  using T = FwdTypes<Row>;
  const SeqInfo& s = tile.seq;
  const bool shared = tile.scrub_first || tile.scrub_last;
#pragma unroll 1
  for (int w = 0; w < T::kConsumers; ++w) {
    const int first = s.m_first + 64 * w, end = min_of(first + 64, s.q_len * rows);
    KeyRange r = tile.range;
    if (first >= s.q_slot * rows && !shared)
      r.full_begin = r.full_end = r.end = r.begin;
    else if (T::Mask::kNeeded && first < end && !shared && r.begin < r.end)
      r = range_within(r, tile.band, first / rows, (end - 1) / rows, s.k_len, T::kTileN);
    tile.own[w] = OwnBlocks{r.begin, r.full_begin, r.full_end, r.end};
  }
}

// A warpgroup passes the left end of a tile together with the right end of the next.
template <class Row>
FA_DEVICE void find_passes(const FwdTile& before, FwdTile& tile) {
#pragma unroll 1
  for (int w = 0; w < FwdTypes<Row>::kConsumers; ++w)
    tile.passes[w] = FwdTypes<Row>::Mask::kNeeded ? before.own[w].begin - before.range.begin
                                                  : tile.range.end - tile.own[w].end;
}

template <class Row>
FA_DEVICE void fwd_tile(const FwdArgs& args, int index, FwdTile& tile) {
  using T = FwdTypes<Row>;
  // The parts of a tile's keys are neighbours in the order.
  const int splits = T::kPacked ? args.splits.count : 1;
  tile.split = index % splits;
  const TileCoord coord = tile_coord(args.order, index / splits);
  const int heads = T::kPacked ? args.heads_k : args.heads_q;
  const int rows = T::kPacked ? args.group : 1;  // of a position
  const int batch = coord.head / heads;          // packed q: 0
  const SeqInfo s = seq_info(args.seq, coord.m, batch, T::kTileM, rows);
  const int head = coord.head - batch * heads, head_q = head * rows;
  tile.seq = s;
  tile.head_q = head_q;
  tile.head_k = T::kPacked ? head : head_q / args.group;
  const Band band = T::Mask::kNeeded ? make_band(args.band, s.q_len, s.k_len)
                                     : Band{kUnlimited, kUnlimited, 0, 0};
  tile.band = band;
  tile.range = s.m_first >= s.q_len * rows
                   ? KeyRange{0, 0, 0, 0, 0, 0}
                   : key_range(band, s.m_first / rows,
                               (min_of(s.m_first + T::kTileM, s.q_len * rows) - 1) / rows, s.k_len,
                               T::kTileN);
  if (splits > 1) tile.range = part_of(tile.range, tile.split, splits);
  if constexpr (T::kConfig.score == ScoreKind::kAny)
    tile.score = score_tile(args.score, s.index, head_q, s.q_len, s.k_len);
  tile.last = 0;
  find_hidden_keys<Row>(args.seq, tile);
  if constexpr (T::kFp8) {
    tile.scrub_first = tile.scrub_last = 0;  // the transposed V has zeros there
    find_descales(args, tile);
  }
  asm volatile("" ::: "memory");  // what is known so far leaves the registers
  find_own_blocks<Row>(tile, rows);
}

// The tiles of this block: dealt in rounds, of which every second runs backwards, so that no block
// always gets the longer tile of a round. Or, with a counter, the next one that nobody has: lengths
// that only the device knows cannot be dealt evenly. kShift: every pair of rounds begins at another
// block, so that tiles that come again with every head, like a short last one, come to all blocks.
template <bool kShift>
class BlockTiles {
 public:
  FA_DEVICE explicit BlockTiles(const FwdArgs& args) : next_tile_(args.next_tile) {}

  // Number of the next tile; order.num_tiles or more: there is none, nor will there be. Unsigned:
  // rounds may end beyond 2^31.
  FA_DEVICE uint32_t take() {
    const uint32_t first = first_;
    first_ += gridDim.x;
    if (next_tile_ != nullptr && first > 0) return gridDim.x + atomicAdd(next_tile_, 1u);
    const bool backwards = backwards_;
    backwards_ = !backwards_;
    const uint32_t place = place_;
    if (kShift && backwards) place_ = (place_ + gridDim.x * 3 / 8) % gridDim.x;
    return first + (backwards ? gridDim.x - 1 - place : place);
  }

 private:
  uint32_t* next_tile_;
  uint32_t first_ = 0;  // of this round
  bool backwards_ = false;
  uint32_t place_ = blockIdx.x;  // in a round that runs forwards
};

}  // namespace fa::sm90
