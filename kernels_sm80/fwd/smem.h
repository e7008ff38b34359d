// SPDX-License-Identifier: BSD-3-Clause
// Where do Q, K, V and O of the forward lie in shared memory?
#pragma once

#include "kernels_common/device/philox.h"
#include "kernels_common/device/score.h"
#include "kernels_common/device/seq_info.h"
#include "kernels_sm80/common/swizzled_tile.h"
#include "kernels_sm80/fwd/config.h"

namespace fa::sm80 {

// The thread among those that share a key block.
template <class T>
FA_DEVICE int thread_in_team() {
  if constexpr (T::kPacked) return thread_again() % 32;
  return thread_again();
}

// Facts of the current tile that no product needs; kept out of registers, one copy per warp.
template <class Mask>
struct TileState {
  const char *k, *v;  // key 0 of the sequence and head
  SeqInfo seq;
  KeyRange range;
  int head_q, split;
  uint32_t tile;  // index in the order of tiles
  Mask mask;
  ScoreTile score;       // of rows with the score `any`
  DropoutPlace dropout;  // of rows that drop weights
};

// Of rows that drop weights: one copy per warp.
template <bool kDropout, int kWarps>
struct DropoutSmem {
  DropoutMemory dropout[kWarps];
};
template <int kWarps>
struct DropoutSmem<false, kWarps> {};

template <class Row>
struct FwdBuffers {
  using T = FwdTypes<Row>;
  using E = typename T::Element;
  static constexpr int kQueryDim = T::kDimQk > T::kDimV ? T::kDimQk : T::kDimV;
  using Keys = SwizzledTile<T::kTileN>;
  // Q, afterwards O; each warp touches its own rows only.
  alignas(128) E q[SwizzledTile<T::kTileM>::size(kQueryDim)];
  alignas(128) E k[T::kStages][Keys::size(T::kDimQk)];
  alignas(128) E v[T::kStages][Keys::size(T::kDimV)];
  TileState<typename T::Mask> state[T::kWarps];
};

// What only dropout needs lies behind the rest: a call without it leaves it away, which is a thread
// block more on a multiprocessor of 8.6 at head dim 64.
template <class Row>
struct FwdSmem : FwdBuffers<Row>, DropoutSmem<Row::kConfig.dropout == 1, Row::kConfig.warps> {};

}  // namespace fa::sm80
