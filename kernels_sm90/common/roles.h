// SPDX-License-Identifier: BSD-3-Clause
// Which warpgroup does what, and how many registers does each thread of it get?
#pragma once

#include "kernels_sm90/common/barriers.h"

namespace fa::sm90 {

// Warpgroup 0 brings the operands, the others compute.
enum class Role { kProducer, kConsumer };

FA_DEVICE Role role_of(int warpgroup) { return warpgroup == 0 ? Role::kProducer : Role::kConsumer; }

// Who am I among the consumers? Kept in registers.
template <bool kReread>
class ConsumerThread {
 public:
  FA_DEVICE explicit ConsumerThread(int index)
      : index_(index), warp_(__shfl_sync(0xffffffffu, index / 32, 0)) {}
  FA_DEVICE int index() const { return index_; }
  FA_DEVICE int warp() const { return warp_; }
  FA_DEVICE int warp_of_lane() const { return warp_; }
  FA_DEVICE bool leader() const { return index_ % 32 == 0; }  // speaks for its warp

 private:
  int index_, warp_;
};

// Where registers are short: read where it is needed, and nothing derived from it ahead of time.
template <>
class ConsumerThread<true> {
 public:
  FA_DEVICE explicit ConsumerThread(int index) : leader_(index % 32 == 0) {}
  FA_DEVICE int index() const {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - kWarpgroupThreads;
  }
  // All lanes together, and one that stands alone.
  FA_DEVICE int warp() const { return __shfl_sync(0xffffffffu, warp_of_lane(), 0); }
  FA_DEVICE int warp_of_lane() const { return index() / 32; }
  FA_DEVICE bool leader() const { return leader_; }

 private:
  bool leader_;
};

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
