// SPDX-License-Identifier: BSD-3-Clause
// What lies where in shared memory? The struct is the memory map.
#pragma once

#include "kernels_sm90/common/pipeline.h"
#include "kernels_sm90/fwd/config.h"
#include "kernels_sm90/fwd/tile.h"

namespace fa::sm90 {

inline constexpr int kSmemLimit = 232448;  // bytes a thread block may use
// Tiles described ahead: the divisions of a description take about a microsecond, in which the
// loader would not load (causal, D 128, S 1k: 350 TFLOP/s with them in the loader, 448 ahead of
// it).
inline constexpr int kTileSlots = 4;
inline constexpr int kSmemAlign = 1024;  // of a tile with 128-byte swizzle

// Where a thread that loads beside its other work has got to; kept off its registers.
template <class Row>
struct SelfLoadState {
  SlotCursor<FwdTypes<Row>::kQSlots> q_at{1};
  SlotCursor<FwdTypes<Row>::kStages> k_at{1}, v_at{1};
  const TensorMap *q, *k, *v;
};
struct NoSelfLoadState {};

// Halves of blocks of V before they are transposed, (kRowKeys, dim_v, slot), panels as in K.
template <class Row>
struct ValueRows {
  using T = FwdTypes<Row>;
  alignas(kSmemAlign) typename T::E data[T::kRowKeys * T::kDimV * T::kRowSlots];
};
struct NoValueRows {};

template <class Row>
struct FwdSmem {
  using T = FwdTypes<Row>;
  using E = typename T::E;

  alignas(kSmemAlign) E q[cute::cosize_v<typename T::LayoutQ>];
  alignas(kSmemAlign) E k[cute::cosize_v<typename T::LayoutK>];
  alignas(kSmemAlign) E v[cute::cosize_v<typename T::LayoutVt>];
  [[no_unique_address]] std::conditional_t<T::kTransposes, ValueRows<Row>, NoValueRows> v_rows;
  // 16-bit numbers, panels of kOutPanel columns as in a 16-bit Q, one slot
  alignas(T::kOwnOutput
              ? kSmemAlign
              : 16) uint16_t o[T::kOwnOutput ? T::kTileM * T::kOutPanels * T::kOutPanel : 8];
  SlotBarriers<T::kQSlots> q_slots;
  SlotBarriers<T::kStages> k_slots, v_slots;
  [[no_unique_address]] std::conditional_t<
      T::kTransposes, SlotBarriers<T::kTransposes ? T::kRowSlots : 1>, NoValueRows> row_slots;
  SlotBarriers<kTileSlots> tile_slots;
  float row_sums[T::kSumsInShared ? 2 : 1][T::kSumsInShared ? 32 * T::kConsumerWarps : 1];
  FwdTile tiles[kTileSlots];
  [[no_unique_address]] std::conditional_t<T::kSelfLoad, SelfLoadState<Row>, NoSelfLoadState> self;

  // Where the 16 rows of one warp go before the TMA store: panel p at + p·tile_m·kOutPanel.
  FA_DEVICE uint16_t* output_rows(int q_slot, int warp) {
    uint16_t* base = o;
    if constexpr (!T::kOwnOutput)
      base = reinterpret_cast<uint16_t*>(q + q_slot * T::kTileM * T::kDimQk);
    return base + warp * 16 * T::kOutPanel;
  }
};

template <class Row>
inline constexpr int kFwdSmemBytes = static_cast<int>(sizeof(FwdSmem<Row>));

}  // namespace fa::sm90
