// SPDX-License-Identifier: BSD-3-Clause
// What lies where in shared memory? The struct is the memory map.
#pragma once

#include "kernels_sm90/bwd/tile.h"

namespace fa::sm90 {

inline constexpr int kBwdSmemLimit = 232448;  // bytes a thread block may use
inline constexpr int kBwdSmemAlign = 1024;    // of a tile with 128-byte swizzle

template <class Row>
struct BwdSmem {
  using T = BwdTypes<Row>;
  using E = typename T::E;

  alignas(kBwdSmemAlign) E k[cute::cosize_v<typename T::LayoutK>];
  // Pairs: half of the columns of the other block's K.
  alignas(kBwdSmemAlign) E other_k[T::kPair ? cute::cosize_v<typename T::LayoutOtherKt> : 0];
  alignas(kBwdSmemAlign) E v[cute::cosize_v<typename T::LayoutV>];
  alignas(kBwdSmemAlign) E q[cute::cosize_v<typename T::LayoutQ>];
  alignas(kBwdSmemAlign) E dout[cute::cosize_v<typename T::LayoutDo>];
  alignas(kBwdSmemAlign) E ds[cute::cosize_v<typename T::LayoutDsT>];
  // Pairs: the other block's.
  alignas(kBwdSmemAlign) E ds_in[T::kPair ? cute::cosize_v<typename T::LayoutDsT> : 0];
  alignas(kBwdSmemAlign) E p[T::kShareKeys ? cute::cosize_v<typename T::LayoutDsT> : 0];
  // dQ parts on their way to memory, kDqSlots for each compute warpgroup.
  alignas(128) float dq[T::kShareKeys ? 0 : T::kComputes][T::kDqSlots][T::kDqFloats];
  alignas(16) float lse_log2[T::kSlots][T::kTileM];  // arrive with Q
  alignas(16) float delta[T::kDoSlots][T::kTileM];   // arrive with dO
  SlotBarriers<T::kSlots> q_slots;                   // readers: compute warps
  SlotBarriers<T::kDoSlots> do_slots;                // readers: compute warps
  SlotBarriers<T::kDsSlots> ds_slots;  // shared keys: written by compute warps, read by dQ's
  // Own keys, of each compute warpgroup: written by its warps, read by the lane that adds.
  SlotBarriers<T::kDqSlots> dq_slots[T::kComputes];
  // Pairs. A slot of what the other block sends is empty where its `ds` is.
  uint64_t ds_in_full[T::kPair ? T::kDsSlots : 0], other_k_full[T::kPair ? 1 : 0];
  uint64_t k_full, v_full;
  uint64_t sums_clear;           // own keys, not kStays: the sums of the section are zero
  int2 visible_rows[T::kTileN];  // [first, end) of the rows that see each key of the tile
  BwdTile tile;                  // kStays: of the compute warps
  BwdTile ahead;                 // kStays: the one whose operands are brought
  BwdTile adding[T::kStays ? T::kComputes : 0];  // of the warps that add dQ
  // kStays: read by compute warps; `ahead` is planned; the sums of its section are zero, too; all
  // who read it have done so; a barrier that nobody arrives at.
  uint64_t k_empty, v_empty, planned, ready, taken, passed;

  // Where dK and dV pass through on their way to memory. kStays: the place of dS, so that V of the
  // next tile may come.
  FA_DEVICE E* staging() {
    static_assert(!T::kStays || sizeof(ds) >= sizeof(v));
    return T::kStays ? ds : v;
  }
};

template <class Row>
inline constexpr int kBwdSmemBytes = static_cast<int>(sizeof(BwdSmem<Row>));

}  // namespace fa::sm90
