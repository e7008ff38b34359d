// SPDX-License-Identifier: BSD-3-Clause
// How does one thread block run? One key tile of one key head: a warpgroup loads and may add dQ,
// two more multiply, over all query blocks of all heads of the group.
#pragma once

#include "kernels_common/device/grid_order.h"
#include "kernels_sm90/bwd/clear_sums.h"
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

template <class Row>
FA_DEVICE void begin_block(const BwdArgs& args, BwdSmem<Row>& smem) {
  using T = BwdTypes<Row>;
  if (threadIdx.x == 0) {
    smem.q_slots.init(T::kComputeWarps);
    smem.do_slots.init(T::kComputeWarps);
    for (int i = 0; i < T::kDsSlots; ++i) {
      mbarrier_init(&smem.ds_slots.full[i], T::kComputeWarps);
      mbarrier_init(&smem.ds_slots.empty[i], T::kDsReaderWarps);
    }
    for (auto& slots : smem.dq_slots) slots.init(1, kWarpgroupThreads / 32);
    mbarrier_init(&smem.k_full, 1);
    mbarrier_init(&smem.v_full, 1);
    mbarrier_init(&smem.sums_clear, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_shared();
    bwd_tile<Row>(args, blockIdx.x, smem.tile);
  }
  __syncthreads();
}

// Blocks in the order of the walk for every head of the group: one edge, interior, the other edge.
// The first block of all is masked by first(); both edges run through one loop.
template <class Step>
FA_DEVICE void accumulate_tile(Step& step, const QueryRange& of_tile, int head_q, int group) {
  const QueryRange range = uniform(of_tile);
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
    wait_for_clear(args, blockIdx.x);
    mbarrier_arrive(&smem.sums_clear);
  }
  __syncwarp();
  if (smem.tile.has_work()) mbarrier_wait(&smem.v_full, 0);
  clear_share<Row, 32>(args, blockIdx.x, lane, [] { __syncwarp(); });
}

// The same of the warpgroup that makes dQ, where keys are shared.
template <class Row>
FA_DEVICE void clear_shared_sums(const BwdArgs& args) {
  clear_share<Row, kWarpgroupThreads>(args, blockIdx.x, threadIdx.x,
                                      [] { sync<kWarpgroupThreads>(Barrier::kDq); });
}

template <class Row>
__global__ void __launch_bounds__(BwdTypes<Row>::kThreads, 1)
    fa_bwd(const __grid_constant__ BwdParams<Row> params) {
  using T = BwdTypes<Row>;
  // Aligned by the linker, so that every address in it is a constant.
  extern __shared__ __align__(kBwdSmemAlign) unsigned char buffer[];
  auto& smem = *reinterpret_cast<BwdSmem<Row>*>(buffer);
  let_next_kernel_begin();
  begin_block<Row>(params.args, smem);
  wait_for_kernel_ahead();

  const BwdTile& tile = smem.tile;
  const int group = params.args.group;
  const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads);
  if (warpgroup < kFirstCompute) {
    shrink_registers<T::kFirstRegisters>();
    if (!T::kShareKeys && threadIdx.x / 32 == 3) return clear_sums<Row>(params.args, smem);
    if (!tile.has_work()) {
      if (T::kShareKeys) clear_shared_sums<Row>(params.args);
      return;
    }
    BwdLoader<Row> loader(params.q, params.k, params.v, params.dout, params.args, smem);
    if constexpr (T::kShareKeys) {
      DqStep<Row> step(smem, params.args, loader);
      clear_shared_sums<Row>(params.args);
      wait_for_clear(params.args, blockIdx.x);
      const QueryRange range = uniform(tile.walk.range);
#pragma unroll 1
      for (int g = 0; g < group; ++g)
#pragma unroll 1
        for (int i = range.begin; i < range.end; ++i)
          step.next(tile.head_k * group + g, i, g == 0 && i == range.begin);
      step.finish((tile.head_k + 1) * group - 1);
    } else if (threadIdx.x == 0) {
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
      with_score<T::kConfig.score>(
          params.args.score, [&](auto score) __attribute__((always_inline)) {
            using Wide = BwdWideStep<Row, decltype(score)>;
            using Own = std::conditional_t<T::kTall, BwdTallStep<Row>, BwdStep<Row>>;
            using Step = std::conditional_t<T::kShareKeys, Wide, Own>;
            Step step(smem, params.args, thread);
            accumulate_tile(step, tile.walk.range, tile.head_k * group, group);
            epilogue.store(step.dk(), step.dv());
          });
    } else {
      epilogue.store_empty();
    }
  }
}

}  // namespace fa::sm90
