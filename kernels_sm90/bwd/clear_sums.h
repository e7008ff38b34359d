// SPDX-License-Identifier: BSD-3-Clause
// Who sets the dQ sums to zero? The key tiles of a section of heads those of the next one, so that
// the zeros are still in L2 when they are added to.
#pragma once

#include "kernels_common/device/dq_turns.h"
#include "kernels_sm90/bwd/config.h"

namespace fa::sm90 {

// Key tile `number` of the call clears its share of the sums of the next section. kThreads threads
// of whole warps; all have called `meet` before the share is counted.
template <class Row, int kThreads, class Meet>
FA_DEVICE void clear_share(const BwdArgs& args, int number, int thread, Meet meet) {
  using T = BwdTypes<Row>;
  if (args.work.cleared == nullptr) return;
  const int tiles = args.order.tiles_m * args.order.section * T::kConfig.cluster;
  const int section = number / tiles + 1;
  const int first = section * args.order.section;
  if (first >= args.order.heads) return;
  const int heads = min_of(args.order.section, args.order.heads - first);
  // Sums of a section lie together: units of 512 bytes, as many for every tile.
  constexpr int kUnit = 128, kTileUnits = T::kTileM * T::kDimQk / kUnit;
  const int of_head = args.group * args.rows.tiles_m * kTileUnits, all = heads * of_head;
  const int share = (all + tiles - 1) / tiles;
  const int begin = min_of(number % tiles * share, all), end = min_of(begin + share, all);
  float4* to = reinterpret_cast<float4*>(args.work.dq_sum) +
               (int64_t(first) * of_head + begin) * (kUnit / 4) + thread;
#pragma unroll 4
  for (int i = begin + thread / 32; i < end; i += kThreads / 32, to += kThreads) *to = float4{};
  meet();
  if (thread == 0) count_one(args.work.cleared + section);
}

// Before the first add of key tile `number`: its sums have been cleared. All tiles that it waits
// for have begun.
template <class Row>
FA_DEVICE void wait_for_clear(const BwdArgs& args, int number) {
  if (args.work.cleared == nullptr) return;
  const int tiles = args.order.tiles_m * args.order.section * Row::kConfig.cluster;
  const int section = number / tiles;
  if (section > 0) wait_for_count(args.work.cleared + section, tiles);
}

}  // namespace fa::sm90
