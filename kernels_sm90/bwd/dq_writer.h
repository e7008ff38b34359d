// SPDX-License-Identifier: BSD-3-Clause
// How does a tile of dQ reach its fp32 sum in global memory? Vector reduces out of the accumulator,
// in order of the key tiles where the call is deterministic.
#pragma once

#include "kernels_common/device/dq_turns.h"
#include "kernels_sm90/bwd/producer.h"

namespace fa::sm90 {

FA_DEVICE void reduce_add(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

template <class Row>
class DqWriter {
  using T = BwdTypes<Row>;

 public:
  FA_DEVICE DqWriter(const BwdArgs& args, const BwdTile& tile, int thread)
      : args_(args), tile_(tile), thread_(thread) {}

  // The 64 rows and 64 columns number `part` of the tile: panels inside blocks of 64 rows.
  FA_DEVICE void add(const typename T::DqAcc& dq, float* tile, int part) const {
    constexpr int kChunks = 64 * T::kPanel / (4 * kWarpgroupThreads);
    float* to = tile + part * (64 * T::kPanel) + thread_ * 4;
    CUTE_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      const float* f = dq.data() + 4 * i;
      reduce_add(to + i * (4 * kWarpgroupThreads), f[0], f[1], f[2], f[3]);
    }
  }

  FA_DEVICE int64_t index(int head_q, int m) const {
    return workspace_tile(args_, tile_.seq, head_q, m);
  }
  FA_DEVICE float* sum(int64_t index) const {
    return args_.work.dq_sum + index * (T::kTileM * T::kDimQk);
  }
  FA_DEVICE bool ordered() const { return args_.work.turns != nullptr; }

  FA_DEVICE void wait_turn(int64_t index, int m) const {
    const int before = key_tiles_before(tile_.band, tile_.seq, m, T::kTileM, T::kTileN);
    if (thread_ == 0) wait_for_count(args_.work.turns + index, before);
    sync<kWarpgroupThreads>(Barrier::kDq);
  }
  FA_DEVICE void pass_turn(int64_t index) const {
    __threadfence();
    sync<kWarpgroupThreads>(Barrier::kDq);
    if (thread_ == 0) count_one(args_.work.turns + index);
  }

 private:
  const BwdArgs& args_;
  const BwdTile& tile_;
  int thread_;
};

// dQ = dS · K for every block, by one warpgroup. Its first lane also refills the slots of Q and dO:
// once every compute warp has stored dS of a block, all have released the block before.
template <class Row>
class DqStep {
  using T = BwdTypes<Row>;

 public:
  FA_DEVICE DqStep(BwdSmem<Row>& smem, const BwdArgs& args, BwdLoader<Row> loader, int thread)
      : smem_(smem), writer_(args, smem.tile, thread), loader_(loader), thread_(thread) {
    if (thread == 0) loader_.begin();
    __syncwarp();
    mbarrier_wait(&smem.k_full, 0);
  }

  FA_DEVICE void next(int head_q, int m) {
    const int slot = at_.slot();
    const int64_t index = writer_.index(head_q, m);
    float* sum = writer_.sum(index);
    if (writer_.ordered()) writer_.wait_turn(index, m);
    mbarrier_wait(&smem_.ds_slots.full[slot], at_.parity());
    if (thread_ == 0 && started_) loader_.next();
    __syncwarp();
    started_ = true;
    // Unrolled, ptxas would move the products of one part before the reduces of another.
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      typename T::DqAcc dq;
      multiply(dq, slot, part);
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(dq);
      if (part == kParts - 1 && thread_ % 32 == 0) mbarrier_arrive(&smem_.ds_slots.empty[slot]);
      writer_.add(dq, sum, part);
    }
    at_.advance();
    if (writer_.ordered()) writer_.pass_turn(index);
  }

 private:
  static constexpr int kPanels = T::kDimQk / T::kPanel, kParts = T::kTileM / 64 * kPanels;

  FA_DEVICE void multiply(typename T::DqAcc& dq, int slot, int part) const {
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDs{});
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename T::LayoutKt{});
    typename T::MmaDq mma;
    auto slice = mma.get_slice(0);
    auto a = slice.partition_fragment_A(ds);  // (MMA, tile_m / 64, MMA_K, slot)
    auto b = slice.partition_fragment_B(k);   // (MMA, 1, MMA_K, panel)
    cute::warpgroup_fence_operand(dq);
    cute::warpgroup_arrive();
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(a); ++i) {
      cute::gemm(mma, a(cute::_, part / kPanels, i, slot), b(cute::_, 0, i, part % kPanels),
                 dq(cute::_, 0, 0));
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  BwdSmem<Row>& smem_;
  DqWriter<Row> writer_;
  BwdLoader<Row> loader_;
  int thread_;
  bool started_ = false;
  SlotCursor<T::kDsSlots> at_{0};
};

}  // namespace fa::sm90
