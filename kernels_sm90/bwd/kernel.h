// SPDX-License-Identifier: BSD-3-Clause
// How does one thread block run? A key tile of a key head, or (T::kStays) one after the other: a
// warpgroup loads and may add dQ, two more multiply, over all query blocks of all heads of the
// group.
#pragma once

#include "kernels_common/device/grid_order.h"
#include "kernels_sm90/bwd/clear_sums.h"
#include "kernels_sm90/bwd/dq_step.h"
#include "kernels_sm90/bwd/dq_writer.h"
#include "kernels_sm90/bwd/epilogue.h"
#include "kernels_sm90/bwd/producer.h"
#include "kernels_sm90/bwd/step.h"
#include "kernels_sm90/bwd/tall_step.h"
#include "kernels_sm90/bwd/wide_step.h"
#include "kernels_sm90/common/roles.h"

namespace fa::sm90 {

template <class Row>
struct BwdParams {
  TensorMap q, k, v, dout;
  BwdArgs args;
};

// Own keys: whether spare warps add dQ.
template <class Row>
FA_DEVICE bool adds_by_warps(const BwdArgs& args) {
  return BwdTypes<Row>::kBulkDq || args.work.turns != nullptr;
}

template <class Row>
FA_DEVICE void begin_block(const BwdArgs& args, BwdSmem<Row>& smem) {
  using T = BwdTypes<Row>;
  if (threadIdx.x == 0) {
    smem.q_slots.init(T::kComputeWarps);
    smem.do_slots.init(T::kComputeWarps, T::kRefillDo ? T::kComputes : 1);
    for (int i = 0; i < T::kDsSlots; ++i) {
      mbarrier_init(&smem.ds_slots.full[i], T::kComputeWarps);
      mbarrier_init(&smem.ds_slots.empty[i], T::kDsReaderWarps);
    }
    for (auto& slots : smem.dq_slots) slots.init(1, kWarpgroupThreads / 32);
    mbarrier_init(&smem.k_full, 1);
    mbarrier_init(&smem.v_full, 1);
    if constexpr (T::kPair) {
      for (uint64_t& full : smem.ds_in_full) mbarrier_init(&full, 1);
      mbarrier_init(smem.other_k_full, 1);
    }
    mbarrier_init(&smem.sums_clear, 1);
    if constexpr (T::kStays) {
      mbarrier_init(&smem.k_empty, T::kComputeWarps);
      mbarrier_init(&smem.v_empty, T::kComputeWarps);
      mbarrier_init(&smem.planned, 1);
      mbarrier_init(&smem.ready, 1);
      // By the loader, a compute warp for all of them, and the warps that add dQ.
      mbarrier_init(&smem.taken, 2 + (adds_by_warps<Row>(args) ? T::kComputes : 0));
      mbarrier_init(&smem.passed, 1);
      smem.tile.round = smem.ahead.round = ~0u;
      for (BwdTile& tile : smem.adding) tile.round = ~0u;
      smem.ahead.loads = 0;
      smem.ahead.be_none();
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_shared();
    if constexpr (!T::kStays) bwd_tile<Row>(args, blockIdx.x, smem.tile);
  }
  __syncthreads();
  if constexpr (T::kPair) {
    arrive_in_cluster();
    wait_for_cluster();
  }
}

// kStays, one warp: plans tile after tile, sees to it that its sums are zero, and clears its share
// of the next section's: behind the first loads of the tile, which everybody waits for; at head dim
// 64 that of the first tile alone, others as soon as they are planned.
template <class Row>
FA_DEVICE void plan_tiles(const BwdArgs& args, BwdSmem<Row>& smem) {
  BwdTile& tile = smem.ahead;
  const int lane = threadIdx.x % 32;
  while (true) {
    int number;
    __syncwarp();  // all have read the tile before
    if (lane == 0) {
      mbarrier_wait(&smem.taken, tile.round & 1);
      number = plan_tile<Row>(args, tile);
      mbarrier_arrive(&smem.planned);
      if (number < args.order.num_tiles) wait_for_clear<Row>(args, number);
      mbarrier_arrive(&smem.ready);
    }
    __syncwarp();
    number = uniform(number);
    if (number >= args.order.num_tiles) return;
    if (tile.has_work() && (tile.round == 0 || !BwdTypes<Row>::kTall))
      mbarrier_wait(&smem.v_full, tile.loads & 1);
    clear_share<Row, 32>(args, number, lane, [] { __syncwarp(); });
  }
}

// kStays, compute threads: the next tile is in smem.tile then. Nobody reads the former any more,
// nor its dK and dV on their way.
template <class Row>
FA_DEVICE void take_tile(BwdSmem<Row>& smem, int warp) {
  using T = BwdTypes<Row>;
  sync<T::kComputeThreads>(Barrier::kOperands);
  if (warp == 4 * kFirstCompute) {
    mbarrier_wait(&smem.ready, (smem.tile.round & 1) ^ 1);
    __syncwarp();
    copy_tile(smem.tile, smem.ahead, threadIdx.x % 32);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&smem.taken);
  }
  sync<T::kComputeThreads>(Barrier::kOperands);
}

// Blocks in the order of the walk for every head of the group: one edge, interior, the other edge.
// The first block of all is masked by first(); both edges run through one loop.
template <class Step>
FA_DEVICE void accumulate_tile(Step& step, const QueryRange& range, int head_q, int group) {
  int i = range.begin;
  step.begin_head(head_q);
  step.first(i);
  ++i;
#pragma unroll 1
  for (int g = 0; g < group; ++g) {
    if (g > 0) step.begin_head(head_q + g);
    int stop = range.full_begin;
    while (true) {
#pragma unroll 1
      for (; i < stop; ++i) step.next(i, Masked{});
      if (i >= range.end) break;
#pragma unroll 1
      for (; i < range.full_end; ++i) step.next(i, Unmasked{});
      stop = range.end;
    }
    i = range.begin;
  }
  step.last();
}

// Warp 3, own keys: sums of this section and of the next one. The stores come behind the first
// loads, which everybody waits for.
template <class Row>
FA_DEVICE void clear_sums(const BwdArgs& args, BwdSmem<Row>& smem) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    wait_for_clear<Row>(args, blockIdx.x);
    mbarrier_arrive(&smem.sums_clear);
  }
  __syncwarp();
  if (smem.tile.has_work()) mbarrier_wait(&smem.v_full, 0);
  clear_share<Row, 32>(args, blockIdx.x, lane, [] { __syncwarp(); });
}

// kStays, warpgroup 0: a lane loads, two warps may add dQ, one plans.
template <class Row>
FA_DEVICE void serve(const BwdParams<Row>& params, BwdSmem<Row>& smem, int warp) {
  const BwdArgs& args = params.args;
  const bool adds = (warp == 1 || warp == 2) && adds_by_warps<Row>(args);
  BwdLoader<Row> loader(params.q, params.k, params.v, params.dout, args, smem);
  if (threadIdx.x == 0) loader.bring_all();
  if (warp == 3) plan_tiles<Row>(args, smem);
  if (adds) DqWriter<Row>(args, smem).add_tiles(args.group);
}

// A compute thread, kStays: one tile after the other.
template <class Row>
FA_DEVICE void compute_tiles(const BwdArgs& args, BwdSmem<Row>& smem, int warp, int thread) {
  using T = BwdTypes<Row>;
  const BwdTile& tile = smem.tile;
  std::conditional_t<T::kTall, BwdTallStep<Row>, BwdStep<Row>> step(smem, args, thread);
#pragma unroll 1
  while (true) {
    take_tile(smem, warp);
    // Read ahead of any branch: ptxas must see that the warp is together.
    const QueryRange range = uniform(tile.walk.range);
    const int head_k = uniform(tile.head_k);
    if (range.begin < 0) return;
    const BwdEpilogue<Row> epilogue(args, smem,
                                    DqWriter<Row>::thread() - kFirstCompute * kWarpgroupThreads);
    if (range.begin == range.end) {
      epilogue.store_empty();
      continue;
    }
    accumulate_tile(step, range, head_k * args.group, args.group);
    epilogue.store(step.dk(), step.dv());
  }
}

// Warpgroup 0 where keys are shared: its tile, whose dQ it makes, and its share of the next
// section's sums.
template <class Row>
FA_DEVICE void make_dq(const BwdParams<Row>& params, BwdSmem<Row>& smem) {
  const BwdArgs& args = params.args;
  const BwdTile& tile = smem.tile;
  const auto clear = [&] {
    clear_share<Row, kWarpgroupThreads>(args, blockIdx.x, threadIdx.x,
                                        [] { sync<kWarpgroupThreads>(Barrier::kDq); });
  };
  if (!tile.has_work()) return clear();
  BwdLoader<Row> loader(params.q, params.k, params.v, params.dout, args, smem);
  DqStep<Row> step(smem, args, loader);
  clear();
  wait_for_clear<Row>(args, blockIdx.x);
  const QueryRange range = uniform(tile.walk.range);
#pragma unroll 1
  for (int g = 0; g < args.group; ++g)
#pragma unroll 1
    for (int i = range.begin; i < range.end; ++i)
      step.next(tile.head_k * args.group + g, i, g == 0 && i == range.begin);
  step.finish((tile.head_k + 1) * args.group - 1);
}

// A compute thread, shared keys: its tile.
template <class Row>
FA_DEVICE void compute_tile(const BwdParams<Row>& params, BwdSmem<Row>& smem, int thread) {
  using T = BwdTypes<Row>;
  const BwdArgs& args = params.args;
  const BwdTile& tile = smem.tile;
  const BwdEpilogue<Row> epilogue(args, smem, thread);
  if (!tile.has_work()) return epilogue.store_empty();
  with_score<T::kConfig.score>(args.score, [&](auto score) __attribute__((always_inline)) {
    BwdWideStep<Row, decltype(score)> step(smem, args, thread);
    if constexpr (T::kRefillDo) step.bring_dout_by(params.dout);
    accumulate_tile(step, uniform(tile.walk.range), tile.head_k * args.group, args.group);
    epilogue.store(step.dk(), step.dv());
  });
}

// Own keys, not kStays: the one tile. ptxas orders a step by what stands around it: with the roles
// in functions of their own, blocks without masks took 2 to 4 % longer (16k, H200).
template <class Row>
FA_DEVICE void run_tile(const BwdParams<Row>& params, BwdSmem<Row>& smem) {
  using T = BwdTypes<Row>;
  const BwdTile& tile = smem.tile;
  const int group = params.args.group;
  const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads);
  if (warpgroup < kFirstCompute) {
    shrink_registers<T::kFirstRegisters>();
    if (threadIdx.x / 32 == 3) return clear_sums<Row>(params.args, smem);
    if (!tile.has_work()) return;
    BwdLoader<Row> loader(params.q, params.k, params.v, params.dout, params.args, smem);
    if (threadIdx.x == 0) {
      loader.begin();
      loader.finish();
    } else if (threadIdx.x == 32 || threadIdx.x == 64) {
      const DqWriter<Row> writer(params.args, smem);
      if (T::kBulkDq || writer.ordered()) writer.add_all(group);
    }
  } else {
    grow_registers<T::kComputeRegisters>();
    const int thread = threadIdx.x - kFirstCompute * kWarpgroupThreads;
    const BwdEpilogue<Row> epilogue(params.args, smem, thread);
    if (tile.has_work()) {
      BwdStep<Row> step(smem, params.args, thread);
      accumulate_tile(step, uniform(tile.walk.range), tile.head_k * group, group);
      epilogue.store(step.dk(), step.dv());
    } else {
      epilogue.store_empty();
    }
  }
}

template <class Row>
FA_DEVICE void bwd_block(const BwdParams<Row>& params) {
  using T = BwdTypes<Row>;
  // Aligned by the linker, so that every address in it is a constant.
  extern __shared__ __align__(kBwdSmemAlign) unsigned char buffer[];
  auto& smem = *reinterpret_cast<BwdSmem<Row>*>(buffer);
  let_next_kernel_begin();
  begin_block<Row>(params.args, smem);
  wait_for_kernel_ahead();

  if constexpr (!T::kShareKeys && !T::kStays) return run_tile(params, smem);
  const int warp = uniform(threadIdx.x / 32);
  if (warp < 4 * kFirstCompute) {
    shrink_registers<T::kFirstRegisters>();
    if constexpr (T::kShareKeys)
      make_dq(params, smem);
    else
      serve(params, smem, warp);
  } else {
    grow_registers<T::kComputeRegisters>();
    const int thread = threadIdx.x - kFirstCompute * kWarpgroupThreads;
    if constexpr (!T::kStays)
      compute_tile(params, smem, thread);
    else
      compute_tiles(params.args, smem, warp, thread);
  }
}

template <class Row>
__global__ void __launch_bounds__(BwdTypes<Row>::kThreads, 1)
    fa_bwd(const __grid_constant__ BwdParams<Row> params) {
  bwd_block<Row>(params);
}

template <class Row>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(BwdTypes<Row>::kThreads, 1)
    fa_bwd_pair(const __grid_constant__ BwdParams<Row> params) {
  bwd_block<Row>(params);
  // The other one's arrivals may still come.
  arrive_in_cluster();
  wait_for_cluster();
}

}  // namespace fa::sm90
