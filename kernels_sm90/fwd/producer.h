// SPDX-License-Identifier: BSD-3-Clause
// In which order are Q, K and V of all tiles of a block brought? One lane of one warp; all blocks
// of a tile that some consumer needs.
#pragma once

#include "kernels_sm90/fwd/copy_kv.h"
#include "kernels_sm90/fwd/kv_loader.h"
#include "kernels_sm90/fwd/q_loader.h"

namespace fa::sm90 {

// K runs one block ahead of V, as the consumers use them. With two Q slots the next tile's Q is
// requested while the last blocks of this one are being worked on; with one it has to wait for the
// end of the tile, and K need not wait with it.
template <class Row>
FA_DEVICE void load_tile(const FwdTile& tile, TmaQ<Row>& q, TmaKv<Row>& kv) {
  const int begin = tile.range.begin;
  int n = tile.range.end - 1;
  if constexpr (FwdTypes<Row>::kQSlots == 1) kv.load_k(tile, n);
  q.load(tile);
  if constexpr (FwdTypes<Row>::kQSlots > 1) kv.load_k(tile, n);
#pragma unroll 1
  for (; n > begin; --n) {
    kv.load_k(tile, n - 1);
    kv.load_v(tile, n);
  }
  kv.load_v(tile, n);
}

// The same where V is transposed on its way: it is asked for before the next K, and before a Q that
// has to wait.
template <class Row>
FA_DEVICE void load_tile_values_first(const FwdTile& tile, TmaQ<Row>& q, TmaKv<Row>& kv) {
  if constexpr (FwdTypes<Row>::kQSlots > 1) q.load(tile);
#pragma unroll 1
  for (int n = tile.range.end - 1; n >= tile.range.begin; --n) {
    kv.load_k(tile, n);
    kv.load_v(tile, n);
    if (FwdTypes<Row>::kQSlots == 1 && n == tile.range.end - 1) q.load(tile);
  }
}

template <class Row>
using RowTiles = BlockTiles<FwdTypes<Row>::kTallUnmasked>;

// Passes over the empty places in the list of packed tiles. False: there is no tile any more.
template <class Row>
FA_DEVICE bool next_tile(const FwdArgs& args, RowTiles<Row>& tiles, FwdTile& tile) {
  while (true) {
    const uint32_t index = tiles.take();
    if (index >= static_cast<uint32_t>(args.order.num_tiles)) return false;
    fwd_tile<Row>(args, static_cast<int>(index), tile);
    const int rows = FwdTypes<Row>::kPacked ? args.group : 1;  // of a position
    if (tile.seq.m_first < tile.seq.q_slot * rows) return true;
  }
}

// Describes the tiles of this block, as far ahead as there are slots. One lane of its own warp.
template <class Row>
FA_DEVICE void schedule(const FwdArgs& args, FwdSmem<Row>& smem) {
  RowTiles<Row> tiles(args);
  FwdTile& none = smem.tiles[kTileSlots - 1];  // before the first
  none.range.begin = 0;
  for (OwnBlocks& own : none.own) own.begin = 0;
  for (SlotCursor<kTileSlots> at{1};; at.advance()) {
    mbarrier_wait(&smem.tile_slots.empty[at.slot()], at.parity());
    FwdTile& tile = smem.tiles[at.slot()];
    const bool last = !next_tile<Row>(args, tiles, tile);
    if (last) tile.last = 1;
    find_passes<Row>(smem.tiles[(at.slot() + kTileSlots - 1) % kTileSlots], tile);
    mbarrier_arrive(&smem.tile_slots.full[at.slot()]);
    if (last) return;
  }
}

// Brings the operands of the tiles described. One lane of its own warp.
template <class Row>
FA_DEVICE void produce(FwdSmem<Row>& smem, TmaQ<Row> q, TmaKv<Row> kv) {
  for (SlotCursor<kTileSlots> at{0};; at.advance()) {
    mbarrier_wait(&smem.tile_slots.full[at.slot()], at.parity());
    const FwdTile& tile = smem.tiles[at.slot()];
    if (tile.last) break;
    if (tile.has_work()) {
      if constexpr (FwdTypes<Row>::kTransposes)
        load_tile_values_first<Row>(tile, q, kv);
      else
        load_tile<Row>(tile, q, kv);
    }
    mbarrier_arrive(&smem.tile_slots.empty[at.slot()]);
  }
  if constexpr (FwdTypes<Row>::kFp8 && !FwdTypes<Row>::kTransposes)
    wait_for_kernel_ahead();  // this one must not end before it
}

// The same without TMA for K and V: one lane brings Q, two warps copy.
template <class Row>
FA_DEVICE void produce_q(FwdSmem<Row>& smem, TmaQ<Row> q) {
  for (SlotCursor<kTileSlots> at{0};; at.advance()) {
    mbarrier_wait(&smem.tile_slots.full[at.slot()], at.parity());
    const FwdTile& tile = smem.tiles[at.slot()];
    if (tile.last) return;
    if (tile.has_work()) q.load(tile);
    mbarrier_arrive(&smem.tile_slots.empty[at.slot()]);
  }
}

template <class Row>
FA_DEVICE void copy_kv(const FwdArgs& args, FwdSmem<Row>& smem, int thread) {
  CopyKv<Row> kv(args, smem, thread);
  for (SlotCursor<kTileSlots> at{0};; at.advance()) {
    mbarrier_wait(&smem.tile_slots.full[at.slot()], at.parity());
    const FwdTile& tile = smem.tiles[at.slot()];
    if (tile.last) return;
    if (tile.has_work()) {
      const int begin = tile.range.begin;
      int n = tile.range.end - 1;
      kv.load_k(tile, n);
#pragma unroll 1
      for (; n > begin; --n) {
        kv.load_k(tile, n - 1);
        kv.load_v(tile, n);
      }
      kv.load_v(tile, n);
      kv.flush();
    }
    __syncwarp();  // one lane speaks for its warp: all of it has read the description
    if (thread % 32 == 0) mbarrier_arrive(&smem.tile_slots.empty[at.slot()]);
  }
}

}  // namespace fa::sm90
