// SPDX-License-Identifier: BSD-3-Clause
// Which warpgroup does what, and how many registers does each thread of it get?
#pragma once

#include "kernels_sm90/common/barriers.h"

namespace fa::sm90 {

// Warpgroup 0 brings the operands, the others compute.
enum class Role { kProducer, kConsumer };

FA_DEVICE Role role_of(int warpgroup) { return warpgroup == 0 ? Role::kProducer : Role::kConsumer; }

// The block starts with an equal share per thread; setmaxnreg then moves registers from the
// producer to the consumers.
template <int kThreads>
struct RegisterBudget {
  static constexpr int kConsumers = kThreads / kWarpgroupThreads - 1;
  static_assert(
      kThreads % kWarpgroupThreads == 0 && (kConsumers == 2 || kConsumers == 3),
      "a Hopper forward row has 12 or 16 warps: one producer warpgroup and two or three consumers");
  static constexpr int kLaunch = 65536 / kThreads / 8 * 8;
  static constexpr int kPool = kLaunch * (kConsumers + 1);
  static constexpr int kConsumer = (kPool - 32) / kConsumers / 8 * 8;
  static constexpr int kProducer = kPool - kConsumer * kConsumers;
  static_assert(kProducer >= 24 && kConsumer <= 240);
};

template <int kRegisters>
FA_DEVICE void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
FA_DEVICE void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fa::sm90
