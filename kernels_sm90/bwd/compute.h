// SPDX-License-Identifier: BSD-3-Clause
// What have all compute warpgroups of the backward in common? Who a thread is, its slots, what its
// keys may see, and the rows that are nobody's.
#pragma once

#include "kernels_common/device/acc_view.h"
#include "kernels_common/device/attend_tile.h"
#include "kernels_common/device/online_softmax.h"
#include "kernels_sm90/bwd/smem.h"
#include "kernels_sm90/common/stmatrix.h"

namespace fa::sm90 {

template <class Row>
class BwdCompute {
  using T = BwdTypes<Row>;
  using E = typename T::E;
  // Two registers for who a thread is are left.
  static constexpr bool kHoldThread = T::kCarryDs;

 public:
  FA_DEVICE typename T::DvAcc& dv() { return dv_; }
  FA_DEVICE typename T::DkAcc& dk() { return dk_; }

 protected:
  FA_DEVICE BwdCompute(BwdSmem<Row>& smem, const BwdArgs& args, int thread)
      : smem_(smem),
        args_(args),
        scale_log2_(args.scale_log2),
        thread_(thread),
        warpgroup_(uniform(thread / kWarpgroupThreads)) {
    if constexpr (!T::kStays) write_visible_rows(thread);
  }

  // A tile.
  FA_DEVICE void begin() {
    if constexpr (T::kStays) write_visible_rows(this->thread());
    mbarrier_wait(&smem_.k_full, keys_parity());
    if (smem_.tile.scrub_keys) scrub_keys();
    CUTE_UNROLL
    for (int i = 0; i < cute::size(dv_); ++i) dv_(i) = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(dk_); ++i) dk_(i) = 0.f;
  }

  FA_DEVICE uint32_t keys_parity() const { return T::kStays ? smem_.tile.loads & 1 : 0; }

  // What follows from these is computed where it is needed: registers are what is short.
  FA_DEVICE int thread() const {
    int index;
    if constexpr (kHoldThread) {
      index = anew(thread_);
    } else {
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
      index -= kFirstCompute * kWarpgroupThreads;
    }
    __builtin_assume(index >= 0 && index < T::kComputeThreads);  // no sign in divisions
    return index;
  }
  FA_DEVICE int lane() const { return thread() % 32; }
  FA_DEVICE int warpgroup() const {
    const int index = uniform(kHoldThread ? anew(warpgroup_) : thread() / kWarpgroupThreads);
    __builtin_assume(index >= 0 && index < T::kComputes);
    return index;
  }
  template <class Int>
  FA_DEVICE static Int anew(Int x) {
    asm volatile("" : "+r"(x));
    return x;
  }
  // First key of the warp, and of the thread, in the tile.
  FA_DEVICE int warp_key() const {
    return (T::kShareKeys ? thread() % kWarpgroupThreads : thread()) / 32 * 16;
  }
  FA_DEVICE int first_key() const { return warp_key() + lane() / 4; }

  // Block number `at` of this thread block, counted over all heads, lies in slot at % kSlots.
  template <int kSlots>
  FA_DEVICE static int slot(uint32_t at) {
    return static_cast<int>(at % kSlots);
  }
  template <int kSlots>
  FA_DEVICE static uint32_t parity(uint32_t at) {
    return at / kSlots & 1;
  }

  template <int kSlots>
  FA_DEVICE void release(SlotBarriers<kSlots>& slots, uint32_t at) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(&slots.empty[slot<kSlots>(at)]);
  }

  // `from`: the statistics of the row of view column 0. [c], c a multiple of 4: those of view
  // columns c to c + 3.
  FA_DEVICE const float4* statistics(const float* from) const {
    return reinterpret_cast<const float4*>(from) + lane() % 4;
  }

  // Every warp for its own keys.
  FA_DEVICE void write_visible_rows(int thread) {
    const BwdTile& tile = smem_.tile;
    const int key = warp_key() + thread % 16, j = tile.seq.n_first + key;
    const int lo = max_of(0, tile.band.first_row(j));
    const int hi = j >= tile.seq.k_len
                       ? lo
                       : min_of(tile.seq.q_len, min_of(tile.band.last_row(j), kUnlimited - 1) + 1);
    if (thread % 32 < 16) smem_.visible_rows[key] = int2{lo, hi};
    __syncwarp();
  }

  // The same pointer, computed anew: descriptors of many products must not be kept from one block
  // to the next.
  template <class Pointer>
  FA_DEVICE static Pointer* anew(Pointer* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
  }

  // acc (+)= A · B, from shared memory.
  template <cute::GMMA::ScaleOut kScale, class Mma, class A, class B, class Acc>
  FA_DEVICE void issue_ss(Mma mma, const A& a_tile, int a_slot, const B& b_tile, int b_slot,
                          Acc& acc) const {
    // Own rows by an offset of descriptors, 16 bytes a unit, which uniform registers can hold.
    auto slice = mma.get_slice(T::kShareKeys ? warpgroup() * kWarpgroupThreads : 0);
    auto rows = slice.partition_fragment_A(a_tile);
    const int own = T::kShareKeys ? 0 : warpgroup() * (a_tile.layout()(64, 0, 0) / 8);
    auto a = cute::make_tensor(rows.data() + own, rows.layout());  // (MMA, 1, MMA_K, slot)
    auto b = slice.partition_fragment_B(b_tile);                   // (MMA, 1, MMA_K, slot)
    cute::warpgroup_fence_operand(acc);
    cute::warpgroup_arrive();
    mma.accumulate_ = kScale;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(a); ++i) {
      cute::gemm(mma, a(cute::_, cute::_, i, a_slot), b(cute::_, cute::_, i, b_slot), acc);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  // `row`: of view column 0.
  template <class View>
  FA_DEVICE void hide(View& view, int row) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int2 seen = smem_.visible_rows[first_key() + 8 * r];
      const int begin = seen.x - row, end = seen.y - row;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c)
        if (acc_col(c) < begin || acc_col(c) >= end) view(r, c) = -INFINITY;
    }
  }

  // Zeros the rows of a tile outside [first, end); a row is 128 or 64 bytes of each panel, whatever
  // the swizzle.
  template <int kRows, int kDim, int kPanel>
  FA_DEVICE void clear_rows(E* tile, int first, int end) const {
    constexpr int kChunks = kPanel / 8;
    for (int row = thread() / kChunks; row < kRows; row += T::kComputeThreads / kChunks) {
      if (row >= first && row < end) continue;
      for (int panel = 0; panel < kDim / kPanel; ++panel)
        reinterpret_cast<uint4*>(tile + (panel * kRows + row) * kPanel)[thread() % kChunks] =
            uint4{0, 0, 0, 0};
    }
  }
  // Nothing is in flight here, in any compute warpgroup, that reads these keys.
  FA_DEVICE void scrub_keys() const {
    const BwdTile& tile = smem_.tile;
    clear_rows<T::kTileN, T::kDimQk, T::kPanelQk>(smem_.k, tile.keys_lo - tile.seq.n_first,
                                                  tile.keys_hi - tile.seq.n_first);
    fence_async_shared();
    sync<T::kComputeThreads>(Barrier::kScrub);
  }
  // The other block's, of a pair.
  FA_DEVICE void scrub_other_keys() const {
    const BwdTile& tile = smem_.tile;
    const int first = other_first_key<Row>(tile);
    if (tile.keys_lo <= first && tile.keys_hi >= first + T::kTileN) return;
    mbarrier_wait(smem_.other_k_full, 0);
    clear_rows<T::kTileN, T::kDimQk / 2, T::kPanelQk>(smem_.other_k, tile.keys_lo - first,
                                                      tile.keys_hi - first);
    fence_async_shared();
    sync<T::kComputeThreads>(Barrier::kScrub);
  }
  // Where keys are shared, S and dP of the same block may be in flight and read rows that are
  // zeroed here. Such a row is one column of Sᵀ and dPᵀ, and blocks with such rows are masked: what
  // it gives is replaced by −inf and 0, by selection. No other product in flight reads these rows.
  FA_DEVICE void scrub_rows(int m, uint32_t at) const {
    const int first = smem_.tile.rows_lo - m * T::kTileM, end = smem_.tile.rows_hi - m * T::kTileM;
    clear_rows<T::kTileM, T::kDimQk, T::kPanelQk>(
        smem_.q + slot<T::kSlots>(at) * T::kTileM * T::kDimQk, first, end);
    clear_rows<T::kTileM, T::kDimV, T::kPanelV>(
        smem_.dout + slot<T::kDoSlots>(at) * T::kTileM * T::kDimV, first, end);
    fence_async_shared();
    sync<T::kComputeThreads>(Barrier::kScrub);
  }

  BwdSmem<Row>& smem_;
  const BwdArgs& args_;
  float scale_log2_;
  int thread_, warpgroup_;
  uint32_t at_ = 0;       // blocks, of all tiles, before the one whose P and dS are held
  typename T::DvAcc dv_;  // ((2, 2, columns / 8), 1, 1)
  typename T::DkAcc dk_;  // ((2, 2, columns / 8), 1, 1)
};

}  // namespace fa::sm90
