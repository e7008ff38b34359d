// SPDX-License-Identifier: BSD-3-Clause
// Which hardware barriers does a Hopper kernel use: who arrives, who waits, how many threads?
#pragma once

#include "kernels_common/device/launch_args.h"

namespace fa::sm90 {

inline constexpr int kWarpgroupThreads = 128;

// 16 hardware barriers per thread block; 0 belongs to __syncthreads. Forward and backward may use
// the same one.
enum class Barrier : int {
  kTurn = 1,  // + warpgroup (0 .. 2): that warpgroup waits, its predecessor arrives; 256 threads
  kScrub =
      4,  // V rows overwritten by all consumers, before any of them reads the tile; all consumers
  kSlab = 5,  // + warpgroup (0 .. 2): the warpgroup has read its rows of Q, O may overwrite them;
              // 128 threads
  kDq = 8,    // backward, shared keys: the dQ warpgroup around its turn; 128 threads
  kOperands = 9,  // backward: P and dS of a block are stored; all compute warpgroups
  kSigns = 10,    // + warpgroup (0 .. 2): forward, its warps agree on a branch around products; 128
                  // threads
};

template <int kThreads>
FA_DEVICE void sync(Barrier barrier, int offset = 0) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier) + offset), "n"(kThreads)
               : "memory");
}

template <int kThreads>
FA_DEVICE void arrive(Barrier barrier, int offset = 0) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(barrier) + offset), "n"(kThreads)
               : "memory");
}

// The same for all threads: whether `x` holds for every one of them.
template <int kThreads>
FA_DEVICE bool sync_all(Barrier barrier, int offset, bool x) {
  int all;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "bar.red.and.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}"
      : "=r"(all)
      : "r"(static_cast<int>(barrier) + offset), "n"(kThreads), "r"(static_cast<int>(x))
      : "memory");
  return all != 0;
}

// Generic writes to shared memory become visible to TMA and WGMMA.
FA_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace fa::sm90
