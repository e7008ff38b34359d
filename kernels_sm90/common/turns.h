// SPDX-License-Identifier: BSD-3-Clause
// In which order do the consumer warpgroups issue their products? A token that goes round, or none.
#pragma once

#include "kernels_common/host/kernel_config.h"
#include "kernels_sm90/common/barriers.h"

namespace fa::sm90 {

// Strict round robin: while one warpgroup's products run, the others do their softmax. Every
// warpgroup must take equally many turns, which holds because a block that one of them passes takes
// its turn too.
// Against no turns at S 1k / 4k / 16k, full: D 128 524 / 639 / 683 to 467 / 574 / 599 TFLOP/s, D 64
// 351 / 474 / 519 to 317 / 436 / 531 (H200, 2026-11-29).
template <int kWarpgroups>
struct GemmTurns {
  int warpgroup;
  static constexpr int kPair = 2 * kWarpgroupThreads;

  // The last warpgroup makes the arrival that lets warpgroup 0 start.
  FA_DEVICE void begin() const {
    if (warpgroup == kWarpgroups - 1) arrive<kPair>(Barrier::kTurn, 0);
  }
  FA_DEVICE void wait_turn() const { sync<kPair>(Barrier::kTurn, warpgroup); }
  FA_DEVICE void pass_turn() const {
    arrive<kPair>(Barrier::kTurn, warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1);
  }
  // Takes the arrival that is left over, so that the barrier ends as it began.
  FA_DEVICE void end() const {
    if (warpgroup == 0) sync<kPair>(Barrier::kTurn, 0);
  }
};

struct NoTurns {
  int warpgroup;
  FA_DEVICE void begin() const {}
  FA_DEVICE void wait_turn() const {}
  FA_DEVICE void pass_turn() const {}
  FA_DEVICE void end() const {}
};

template <Turns kTurns, int kWarpgroups>
struct TurnsOf {
  using type = NoTurns;
};
template <int kWarpgroups>
struct TurnsOf<Turns::kGemm, kWarpgroups> {
  using type = GemmTurns<kWarpgroups>;
};

}  // namespace fa::sm90
