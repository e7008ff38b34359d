// SPDX-License-Identifier: BSD-3-Clause
// How does one thread block run? Role split, then tile after tile: one warp describes them, one
// loads, the consumer warpgroups compute.
#pragma once

#include "kernels_common/device/attend_tile.h"
#include "kernels_sm90/fwd/fp8_step.h"
#include "kernels_sm90/fwd/producer.h"
#include "kernels_sm90/fwd/step.h"
#include "kernels_sm90/fwd/transpose_blocks.h"

namespace fa::sm90 {

template <class Row>
struct KernelParams {
  TensorMap q, k, v, out;
  FwdArgs args;
};

template <class Row>
FA_DEVICE void init_barriers(FwdSmem<Row>& smem) {
  using T = FwdTypes<Row>;
  if (threadIdx.x == 0) {
    smem.q_slots.init(T::kConsumerWarps);
    constexpr int kWriters = T::kCopied ? CopyKv<Row>::kThreads : 1;
    smem.k_slots.init(T::kConsumerWarps, kWriters);
    smem.v_slots.init(T::kConsumerWarps, T::kTransposes ? T::kTransposers : kWriters);
    if constexpr (T::kTransposes) smem.row_slots.init(T::kTransposers);
    constexpr int kLoaders = T::kTransposes ? 1 + T::kTransposers
                             : T::kCopied   ? 3
                             : T::kSelfLoad ? 0
                                            : 1;  // that read descriptions
    smem.tile_slots.init(T::kConsumerWarps + kLoaders);
    if constexpr (T::kSelfLoad) smem.self = {};
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_shared();
  }
  __syncthreads();
}

// One copy of it all per policy of the scores: chosen per tile, what the copies share would be kept
// in registers beside the loops.
template <class Row, class Score>
FA_DEVICE void consume(const KernelParams<Row>& params, FwdSmem<Row>& smem, int thread,
                       Score score) {
  using T = FwdTypes<Row>;
  using Step = std::conditional_t<T::kFp8, Fp8Step<Row>, FwdStep<Row>>;
  Step step(smem, params.args, params.out, thread);
  if constexpr (T::kSelfLoad) step.bring(params.q, params.k, params.v);
  for (typename T::template Cursor<T::kTight, kTileSlots> at{0};; at.advance()) {
    const int slot = at.slot();
    mbarrier_wait(&smem.tile_slots.full[slot], at.parity());
    const FwdTile& tile = smem.tiles[slot];
    const bool work = tile.has_work();
    OwnBlocks own;
    int before = 0, passed = 0;
    if constexpr (T::Mask::kNeeded) {
      own = tile.own[step.warpgroup()];
      before = tile.passes[step.warpgroup()];
      passed = work ? tile.range.end - own.end : 0;
    } else {  // the same in fewer registers
      const KeyRange whole = tile.range;
      passed = work ? tile.passes[step.warpgroup()] : 0;
      own = OwnBlocks{whole.begin, whole.full_begin, min_of(whole.full_end, whole.end - passed),
                      whole.end - passed};
    }
    // Every warpgroup takes one turn per block, passed or not, and one for the last product of a
    // tile that is not carried into the next.
    const int alone = Step::kCarry && !work ? 1 : 0;
#pragma unroll 1
    for (int i = 0; i < before + alone + passed; ++i) {
      step.settle();
      if (alone == 0 || i < before) step.pass_block();
    }
    if (tile.last) break;
    if (work && own.begin < own.end) {
      step.begin(slot);
      const KeyRange range{own.begin, own.full_begin, own.full_end, own.end, 0, 0};
      attend_tile<typename T::Mask>(step, range, score);
      continue;  // the step retires the tile
    }
    if (work) {
      step.pass_query();
      if constexpr (!Step::kCarry) step.settle();
    } else {
      if constexpr (T::kPacked)
        store_empty_packed(params.args, tile.seq, tile.head_q, T::kTileM, thread,
                           32 * T::kConsumerWarps, tile.split);
      else
        store_empty(params.args, tile.seq, tile.head_q, T::kTileM, thread, 32 * T::kConsumerWarps);
    }
    step.retire(slot);
  }
  step.end();
}

template <class Row>
__global__ void __launch_bounds__(FwdTypes<Row>::kThreads, 1)
    fa_fwd(const __grid_constant__ KernelParams<Row> params) {
  using T = FwdTypes<Row>;
  using Budget = RegisterBudget<T::kThreads>;
  // Aligned by the linker, so that every address in it is a constant.
  extern __shared__ __align__(kSmemAlign) unsigned char buffer[];
  auto& smem = *reinterpret_cast<FwdSmem<Row>*>(buffer);
  init_barriers(smem);

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (role_of(warpgroup) == Role::kProducer) {
    shrink_registers<Budget::kProducer>();
    if constexpr (T::kCopied) {
      if (threadIdx.x == 0)
        produce_q<Row>(smem, TmaQ<Row>{params.q, smem});
      else if (threadIdx.x == 32)
        schedule<Row>(params.args, smem);
      else if (threadIdx.x >= 64)
        copy_kv<Row>(params.args, smem, threadIdx.x - 64);
    } else if constexpr (T::kSelfLoad) {
      if (threadIdx.x == 32) schedule<Row>(params.args, smem);
    } else if (threadIdx.x == 0) {
      tma_prefetch_map(params.q);
      tma_prefetch_map(params.k);
      tma_prefetch_map(params.v);
      produce<Row>(smem, TmaQ<Row>{.map = params.q, .smem = smem, .group = params.args.group},
                   TmaKv<Row>{params.k, params.v, smem});
    } else if (threadIdx.x == 32) {
      schedule<Row>(params.args, smem);
    } else if constexpr (T::kTransposes) {
      if (threadIdx.x >= 64) transpose_blocks<Row>(smem, threadIdx.x - 64);
    }
  } else {
    grow_registers<Budget::kConsumer>();
    with_score<T::kConfig.score>(params.args.score, [&](auto score) __attribute__((always_inline)) {
      consume<Row>(params, smem, threadIdx.x - kWarpgroupThreads, score);
    });
  }
}

}  // namespace fa::sm90
