// SPDX-License-Identifier: BSD-3-Clause
// Deterministic backward: when may a key tile add to the dQ sums of a query block? In descending
// order of the key tiles, which a counter in global memory keeps.
#pragma once

#include "kernels_common/device/block_range.h"
#include "kernels_common/device/seq_info.h"

namespace fa {

// How many key tiles add to query block m before tile `t` does: those with higher block numbers.
// Under a causal mask the last key tile also begins with the block, and every other reaches it
// later in any case: nobody waits.
FA_HOST_DEVICE int key_tiles_behind(const Band& band, const KeyTileInfo& t, int m, int tile_m,
                                    int tile_n) {
  const int first = m * tile_m, last = min_of(first + tile_m, t.q_len) - 1;
  const KeyRange range = key_range(band, first, last, t.k_len, tile_n);
  return range.end - 1 - t.n_first / tile_n;
}

#if defined(__CUDACC__)
// By one thread: what others added before `turn` reached `before` is visible afterwards.
FA_DEVICE void wait_for_count(const int32_t* turn, int before) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
  } while (seen != before);
}
FA_DEVICE void count_one(int32_t* turn) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}
// count_one(turn), and how far `next` was just before: waits for memory once for both.
FA_DEVICE int count_one_and_look(int32_t* turn, const int32_t* next) {
  int seen;
  asm volatile(
      "ld.relaxed.gpu.global.s32 %0, [%2];\n\t"
      "fence.acq_rel.gpu;\n\t"
      "red.relaxed.gpu.global.add.s32 [%1], 1;"
      : "=r"(seen)
      : "l"(turn), "l"(next)
      : "memory");
  return seen;
}
#endif

}  // namespace fa
