// SPDX-License-Identifier: BSD-3-Clause
// How does a tile of dQ reach its fp32 sum in global memory? By bulk reduces out of shared memory
// or vector reduces out of the accumulator, in turns where the call is deterministic.
#pragma once

#include "kernels_common/device/dq_turns.h"
#include "kernels_sm90/bwd/cluster.h"
#include "kernels_sm90/bwd/producer.h"

namespace fa::sm90 {

FA_DEVICE void reduce_add(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Writes of TMA to global memory that this thread waited for, and generic ones, are ordered before
// what follows in the other proxy.
FA_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// This thread's reduces but the last have been performed.
FA_DEVICE void wait_for_all_but_last() { asm volatile("cp.async.bulk.wait_group 1;" ::: "memory"); }

FA_DEVICE int look_at_count(const int32_t* turn) {
  int seen;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
  return seen;
}

// Whether the phase with this parity is complete.
FA_DEVICE bool mbarrier_test(uint64_t* barrier, uint32_t parity) {
  int done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.s32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// dq = dS · K, 64 rows and kDqColumns: part number `part` of the tile, panels of columns inside
// blocks of rows.
template <class T, cute::GMMA::ScaleOut kScale = cute::GMMA::ScaleOut::Zero, class Ds, class K>
FA_DEVICE void multiply_dq(typename T::DqAcc& dq, const Ds& ds, int slot, const K& k, int part) {
  constexpr int kPanels = decltype(cute::size<2>(k))::value;
  typename T::MmaDq mma;
  auto slice = mma.get_slice(0);
  auto a = slice.partition_fragment_A(ds);  // (MMA, tile_m / 64, MMA_K, slot)
  auto b = slice.partition_fragment_B(k);   // (MMA, 1, MMA_K, panel)
  cute::warpgroup_fence_operand(dq);
  cute::warpgroup_arrive();
  mma.accumulate_ = kScale;
  CUTE_UNROLL
  for (int i = 0; i < cute::size<2>(a); ++i) {
    cute::gemm(mma, a(cute::_, part / kPanels, i, slot), b(cute::_, 0, i, part % kPanels),
               dq(cute::_, 0, 0));
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
}

// Adds parts of 64 rows and kDqColumns columns, each warp its 16 rows of them.
template <class Row>
class DqWriter {
  using T = BwdTypes<Row>;
  static constexpr int kWarpFloats = T::kDqFloats / 4;  // of a part
  static constexpr bool kInTurn = T::kDqParts == 1;

 public:
  FA_DEVICE DqWriter(const BwdArgs& args, BwdSmem<Row>& smem) : args_(args), smem_(smem) {}

  // Read where it is needed: registers are what is short.
  FA_DEVICE static int thread() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    __builtin_assume(index >= 0 && index < T::kThreads);  // no sign in divisions
    return index;
  }

  // Part number `part` of the tile.
  FA_DEVICE void add(const typename T::DqAcc& dq, float* tile, int part) const {
    const int in_group = thread() % kWarpgroupThreads;
    const int at = in_group / 32 * kWarpFloats + in_group % 32 * 4;  // of the thread in a part
    float* to = tile + part * T::kDqFloats;
    CUTE_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      const float* f = dq.data() + 4 * i;
      reduce_add(to + at + i * 128, f[0], f[1], f[2], f[3]);
    }
  }

  // Leaves a part to the lane that adds it. A compute thread's, and its number in its warpgroup;
  // `own`: parts that the warpgroup left before.
  FA_DEVICE void hand_over(const typename T::DqAcc& dq, int warpgroup, int in_group,
                           uint32_t own) const {
    const int slot = own % T::kDqSlots;
    SlotBarriers<T::kDqSlots>& slots = smem_.dq_slots[warpgroup];
    mbarrier_wait(&slots.empty[slot], parity(own) ^ 1);
    float4* to =
        reinterpret_cast<float4*>(smem_.dq[warpgroup][slot] + in_group / 32 * kWarpFloats) +
        in_group % 32;
    CUTE_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      const float* f = dq.data() + 4 * i;
      to[32 * i] = float4{f[0], f[1], f[2], f[3]};
    }
    fence_async_shared();
    __syncwarp();
    if (in_group % 32 == 0) mbarrier_arrive(&slots.full[slot]);
  }

  // One lane of a spare warp: adds every part of the tile that a compute warpgroup leaves to it.
  FA_DEVICE void add_all(int group) const {
    mbarrier_wait(&smem_.sums_clear, 0);
    add_tile(smem_.tile, group, 0);
  }
  // The warp, kStays: of tile after tile.
  FA_DEVICE void add_tiles(int group) const {
    int at = 0;
    while (true) {
      BwdTile& tile = smem_.adding[thread() / 32 - 1];
      mbarrier_wait(&smem_.ready, (tile.round & 1) ^ 1);
      __syncwarp();
      copy_tile(tile, smem_.ahead, thread() % 32);
      if (thread() % 32 == 0) {
        mbarrier_arrive(&smem_.taken);
        if (tile.has_work()) at = add_tile(tile, group, at);
      }
      __syncwarp();
      if (!tile.exists()) break;
    }
    tma_store_wait();
  }

  // One lane: those of a tile, of all heads of the group; `at`: blocks of the tiles before, returns
  // it with this one's. In turns, the next key tile's may come as soon as this one is in memory;
  // what is there and may be added is, while the one before it is still on its way.
  FA_DEVICE int add_tile(const BwdTile& t, int group, int at) const {
    fence_async_global();
    int tile = -1;  // of the workspace, whose part is added
#pragma unroll 1
    for (int head = t.head_k * group; head != (t.head_k + 1) * group; ++head) {
#pragma unroll 1
      for (int i = t.walk.range.begin; i < t.walk.range.end; ++i, ++at) {
        if (kInTurn && !makes_dq(at, thread() / 32 - 1)) continue;
        int unpassed = -1;
        if (ordered()) {
          const int before = key_tiles_before(t.band, t.seq, t.walk.block(i), T::kTileM, T::kWalkN,
                                              t.walk.reversed());
          unpassed = tile;
          tile = static_cast<int>(workspace_tile(args_, t.seq, head, t.walk.block(i)));
          const int seen = unpassed < 0 ? -1 : look_at_count(part_turn(tile));
          if (unpassed >= 0 && (seen != before || !mbarrier_test(full(at), parity(own(at))))) {
            tma_store_wait();
            pass_part(unpassed);
            unpassed = -1;
          }
          if (seen != before) wait_for_count(part_turn(tile), before);
          fence_async_global();
        } else {
          tile = static_cast<int>(workspace_tile(args_, t.seq, head, t.walk.block(i)));
        }
        mbarrier_wait(full(at), parity(own(at)));
        add_part(tile, own(at) % T::kDqSlots);
        if (unpassed >= 0) {
          wait_for_all_but_last();
          pass_part(unpassed);
        }
        tma_store_wait_read();
        mbarrier_arrive(&smem_.dq_slots[thread() / 32 - 1].empty[own(at) % T::kDqSlots]);
      }
    }
    const bool passes = ordered() && tile >= 0;
    if (!T::kStays || passes) tma_store_wait();  // else add_tiles() does
    if (passes) pass_part(tile);
    return at;
  }

  // dQ of one part: which warpgroup makes that of block `at`, counted over all heads.
  FA_DEVICE static bool makes_dq(int at, int warpgroup) { return (at + warpgroup) % 2 == 0; }

  FA_DEVICE int64_t index(int head_q, int m) const {
    return workspace_tile(args_, smem_.tile.seq, head_q, m);
  }
  // `tile`: as index() counts.
  FA_DEVICE float* sum(int64_t tile) const {
    return args_.work.dq_sum + tile * (T::kTileM * T::kDimQk);
  }
  FA_DEVICE bool ordered() const { return args_.work.turns != nullptr; }

  // In turns, where keys are shared. After all adds of block (head_q, m) have been issued; looks
  // already for the turn of the next block.
  FA_DEVICE void pass_turn(int head_q, int m, int next_head_q, int next_m) {
    sync<kWarpgroupThreads>(Barrier::kDq);
    if (thread() == 0) seen_ = count_one_and_look(counter(head_q, m), counter(next_head_q, next_m));
    __syncwarp();
  }
  FA_DEVICE void pass_last_turn(int head_q, int m) const {
    sync<kWarpgroupThreads>(Barrier::kDq);
    if (thread() == 0) count_one(counter(head_q, m));
  }
  FA_DEVICE void wait_turn(int head_q, int m) const {
    if (thread() == 0) {
      const BwdTile& t = smem_.tile;
      const int before =
          key_tiles_before(t.band, t.seq, m, T::kTileM, T::kWalkN, t.walk.reversed());
      if (seen_ != before) wait_for_count(counter(head_q, m), before);
    }
    sync<kWarpgroupThreads>(Barrier::kDq);
  }

 private:
  static constexpr int kChunks = kWarpFloats / 128;

  FA_DEVICE static uint32_t parity(uint32_t own) { return own / T::kDqSlots & 1; }

  // Computed where they are needed: the lane that adds has few registers. Parts of a warpgroup
  // ahead of block `at`; the barrier of its part.
  FA_DEVICE static uint32_t own(int at) {
    asm volatile("" : "+r"(at));
    return kInTurn ? at / 2 : at;
  }
  FA_DEVICE uint64_t* full(int at) const {
    return &smem_.dq_slots[thread() / 32 - 1].full[own(at) % T::kDqSlots];
  }
  FA_DEVICE void add_part(int tile, int slot) const {
    const int warpgroup = thread() / 32 - 1;
    bulk_reduce(sum(tile) + (kInTurn ? 0 : warpgroup) * T::kDqFloats, smem_.dq[warpgroup][slot],
                T::kDqFloats * sizeof(float));
    tma_store_commit();
  }

  // In turns: of the part of workspace tile `tile` that this lane adds.
  FA_DEVICE int32_t* part_turn(int tile) const {
    return args_.work.turns + int64_t(tile) * T::kConfig.dq_turns +
           (T::kDqParts == 1 ? 0 : thread() / 32 - 1);
  }
  // Its reduce is complete.
  FA_DEVICE void pass_part(int tile) const {
    fence_async_global();
    count_one(part_turn(tile));
  }

  FA_DEVICE int* counter(int head_q, int m) const {
    return args_.work.turns + index(head_q, m) * T::kConfig.dq_turns +
           (T::kPair ? cluster_rank() : 0);
  }

  const BwdArgs& args_;
  BwdSmem<Row>& smem_;
  int seen_ = -1;  // turns of the next block that are over, if looked at
};

}  // namespace fa::sm90
