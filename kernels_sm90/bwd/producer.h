// SPDX-License-Identifier: BSD-3-Clause
// In which order are K, V, and all blocks of Q and dO brought? One lane; the same tiles, heads
// and blocks as the consumers.
#pragma once

#include "kernels_sm90/bwd/smem.h"
#include "kernels_sm90/common/tma.h"

namespace fa::sm90 {

// Guarantees zeros in rows beyond the tensor and in columns beyond the real head dim; every other
// row of a box holds what memory holds, seen by the call or not. The statistics are padded.
template <class Row>
class BwdLoader {
  using T = BwdTypes<Row>;
  using E = typename T::E;

 public:
  FA_DEVICE BwdLoader(const TensorMap& q, const TensorMap& k, const TensorMap& v,
                      const TensorMap& dout, const BwdArgs& args, BwdSmem<Row>& smem)
      : q_map_(q), k_map_(k), v_map_(v), do_map_(dout), args_(args), smem_(smem) {}

  // What the first products need comes first, then as many blocks as there are slots.
  FA_DEVICE void begin() {
    begin_head();
    load_k();
    load_q();
    load_v();
    if constexpr (T::kPair) load_other_keys();
    if constexpr (!T::kRefillDo) load_do();
    advance();
    for (int i = 1; i < T::kSlots; ++i) next();
  }

  // All that begin() has left.
  FA_DEVICE void finish() {
    while (more()) next();
  }

  // kStays: tile after tile. Places become free in the order in which they are filled here.
  FA_DEVICE void bring_all() {
    uint32_t parity = 0;
#pragma unroll 1
    while (true) {
      mbarrier_wait(&smem_.planned, parity);
      if (!tile().exists()) return;
      if (tile().has_work()) {
        begin_head();
        if (tile().loads == 0) load_k();
        load_q();
        if (tile().loads == 0) load_v();
        load_do();
        if (tile().loads > 0) load_k(), load_v();
        advance();
#pragma unroll 1
        while (more()) next();
      }
      parity ^= 1;
      mbarrier_arrive(&smem_.taken);
    }
  }

  // The next block, once all readers of its slots have released them.
  FA_DEVICE void next() {
    if (!more()) return;
    load_q();
    if constexpr (!T::kRefillDo) load_do();
    advance();
  }

 private:
  FA_DEVICE const BwdTile& tile() const { return T::kStays ? smem_.ahead : smem_.tile; }
  FA_DEVICE bool more() const { return head_ != (tile().head_k + 1) * args_.group; }
  FA_DEVICE void begin_head() {
    head_ = tile().head_k * args_.group;
    place_ = tile().walk.range.begin;
  }
  FA_DEVICE void advance() {
    at_.advance();
    do_at_.advance();
    if (++place_ < tile().walk.range.end) return;
    place_ = tile().walk.range.begin;
    ++head_;
  }

  FA_DEVICE void load_q() const {
    const int slot = at_.slot();
    mbarrier_wait(&smem_.q_slots.empty[slot], at_.parity());
    uint64_t* full = &smem_.q_slots.full[slot];
    mbarrier_expect(full, T::kQBytes + T::kStatBytes);
    load_rows<T::kDimQk, T::kPanelQk>(q_map_, smem_.q + slot * T::kTileM * T::kDimQk, full);
    load_stats(args_.work.lse_log2, smem_.lse_log2[slot], full);
  }

  FA_DEVICE void load_do() const {
    const int slot = do_at_.slot();
    mbarrier_wait(&smem_.do_slots.empty[slot], do_at_.parity());
    uint64_t* full = &smem_.do_slots.full[slot];
    mbarrier_expect(full, T::kDoBytes + T::kStatBytes);
    load_rows<T::kDimV, T::kPanelV>(do_map_, smem_.dout + slot * T::kTileM * T::kDimV, full);
    load_stats(args_.work.delta, smem_.delta[slot], full);
  }

  FA_DEVICE void load_k() const {
    if constexpr (T::kStays) mbarrier_wait(&smem_.k_empty, (tile().loads & 1) ^ 1);
    load_keys<T::kDimQk, T::kPanelQk>(k_map_, smem_.k, &smem_.k_full);
  }
  FA_DEVICE void load_v() const {
    if constexpr (T::kStays) mbarrier_wait(&smem_.v_empty, (tile().loads & 1) ^ 1);
    load_keys<T::kDimV, T::kPanelV>(v_map_, smem_.v, &smem_.v_full);
  }

  template <int kDim, int kPanel>
  FA_DEVICE void load_keys(const TensorMap& map, E* to, uint64_t* full) const {
    const KeyTileInfo& s = tile().seq;
    mbarrier_expect(full, T::kTileN * kDim * 2);
    CUTE_UNROLL
    for (int panel = 0; panel < kDim / kPanel; ++panel)
      tma_load<L2Policy::kEvictFirst>(
          map, to + panel * kPanel * T::kTileN, full,
          BoxCoord{panel * kPanel, s.k_begin + s.n_first, tile().head_k, s.k_batch});
  }
  // Of the columns of dQ that this block makes.
  FA_DEVICE void load_other_keys() const {
    const KeyTileInfo& s = smem_.tile.seq;
    mbarrier_expect(smem_.other_k_full, T::kKBytes / 2);
    CUTE_UNROLL
    for (int panel = 0; panel < T::kDimQk / 2 / T::kPanelQk; ++panel)
      tma_load<L2Policy::kEvictFirst>(
          k_map_, smem_.other_k + panel * T::kPanelQk * T::kTileN, smem_.other_k_full,
          BoxCoord{cluster_rank() * (T::kDimQk / 2) + panel * T::kPanelQk,
                   s.k_begin + other_first_key<Row>(smem_.tile), smem_.tile.head_k, s.k_batch});
  }
  template <int kDim, int kPanel>
  FA_DEVICE void load_rows(const TensorMap& map, E* to, uint64_t* full) const {
    const KeyTileInfo& s = tile().seq;
    CUTE_UNROLL
    for (int panel = 0; panel < kDim / kPanel; ++panel)
      tma_load<L2Policy::kEvictLast>(
          map, to + panel * kPanel * T::kTileM, full,
          BoxCoord{panel * kPanel, s.q_begin + tile().walk.block(place_) * T::kTileM, head_,
                   s.q_batch});
  }
  FA_DEVICE void load_stats(const float* from, float* to, uint64_t* full) const {
    bulk_load(
        to, from + workspace_tile(args_, tile().seq, head_, tile().walk.block(place_)) * T::kTileM,
        T::kStatBytes, full);
  }

  const TensorMap& q_map_;
  const TensorMap& k_map_;
  const TensorMap& v_map_;
  const TensorMap& do_map_;
  const BwdArgs& args_;
  BwdSmem<Row>& smem_;
  SlotCursor<T::kSlots> at_{1};
  SlotCursor<T::kDoSlots> do_at_{1};
  int head_ = 0, place_ = 0;  // of the next block: head, place in the walk
};

}  // namespace fa::sm90
