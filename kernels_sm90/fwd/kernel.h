// SPDX-License-Identifier: BSD-3-Clause
// How does one thread block run? Role split, then every tile of the block in the same order on both
// sides.
#pragma once

#include "kernels_common/device/attend_tile.h"
#include "kernels_sm90/fwd/epilogue.h"
#include "kernels_sm90/fwd/producer.h"

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
    smem.k_slots.init(T::kConsumerWarps);
    smem.v_slots.init(T::kConsumerWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_shared();
  }
  __syncthreads();
}

template <class Row>
FA_DEVICE void consume(const KernelParams<Row>& params, FwdSmem<Row>& smem, int thread) {
  FwdStep<Row> step(smem, params.args.scale_log2, thread);
  FwdEpilogue<Row> epilogue(smem, params.args, params.out, thread);
  step.turns.begin();
  for (StaticTiles tiles(params.args.order); tiles.valid(); tiles.next()) {
    const FwdTile tile = fwd_tile<Row>(params.args, tiles.index());
    if (!tile.has_rows()) continue;
    step.begin(tile);
    const bool computed = tile.has_keys();
    if (computed) {
      step.set_scrub(tile, params.args.seq);
      attend_tile<typename FwdTypes<Row>::Mask>(step, tile.range);
    }
    epilogue.store(step, tile, computed);
  }
  step.turns.end();
  epilogue.drain();
}

template <class Row>
__global__ void __launch_bounds__(FwdTypes<Row>::kThreads, 1)
    fa_fwd(const __grid_constant__ KernelParams<Row> params) {
  using T = FwdTypes<Row>;
  using Budget = RegisterBudget<T::kThreads>;
  extern __shared__ unsigned char buffer[];
  const uint32_t offset = shared_address(buffer) % kSmemAlign;
  auto& smem = *reinterpret_cast<FwdSmem<Row>*>(buffer + (offset == 0 ? 0 : kSmemAlign - offset));
  init_barriers(smem);

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (role_of(warpgroup) == Role::kProducer) {
    shrink_registers<Budget::kProducer>();
    if (threadIdx.x == 0) {
      tma_prefetch_map(params.q);
      tma_prefetch_map(params.k);
      tma_prefetch_map(params.v);
      produce<Row>(params.args, TmaQ<Row>{params.q, smem}, TmaKv<Row>{params.k, params.v, smem});
    }
  } else {
    grow_registers<Budget::kConsumer>();
    consume<Row>(params, smem, threadIdx.x - kWarpgroupThreads);
  }
}

}  // namespace fa::sm90
