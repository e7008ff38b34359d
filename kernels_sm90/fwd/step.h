// SPDX-License-Identifier: BSD-3-Clause
// What does a consumer warpgroup compute for one key block? S(n) overlaps P·V(n+1), the softmax of
// S(n) hides behind it.
#pragma once

#include "kernels_common/device/online_softmax.h"
#include "kernels_sm90/fwd/smem.h"
#include "kernels_sm90/fwd/tile.h"

namespace fa::sm90 {

template <class Row>
class FwdStep {
  using T = FwdTypes<Row>;
  using E = typename T::E;
  using MmaQk = typename T::MmaQk;
  using MmaPv = typename T::MmaPv;
  template <int kM, int kN>
  using Extent = cute::Shape<cute::Int<kM>, cute::Int<kN>>;

 public:
  FA_DEVICE FwdStep(FwdSmem<Row>& smem, float scale_log2, int thread)
      : turns{__shfl_sync(0xffffffffu, thread / kWarpgroupThreads, 0)},
        smem_(smem),
        scale_log2_(scale_log2),
        thread_(thread) {}

  // Row of the tile that belongs to view row 0 of this thread.
  FA_DEVICE int first_row() const { return thread_ / 32 * 16 + thread_ % 32 / 4; }

  FA_DEVICE void begin(const FwdTile& tile) {
    m_first_ = tile.seq.m_first;
    if constexpr (T::Mask::kNeeded)
      mask_ = BandMask{tile.band, tile.seq.k_len};
    else
      mask_ = NoMask{tile.seq.k_len};
    softmax.reset();
    CUTE_UNROLL
    for (int i = 0; i < cute::size(o); ++i) o(i) = 0.f;
  }

  // Which V rows does no row of the sequence see? They may hold NaN, and 0 · NaN is NaN.
  // Only the first and the last block of a tile can hold such rows.
  FA_DEVICE void set_scrub(const FwdTile& tile, const SeqArgs& args) {
    const SeqInfo& s = tile.seq;
    keys_hi_ = s.k_len;
    if constexpr (T::Mask::kNeeded) {
      keys_lo_ = max_of(0, tile.band.first_key(0));
      keys_hi_ = min_of(s.k_len, min_of(tile.band.last_key(s.q_len - 1), kUnlimited - 1) + 1);
      scrub_last_ = tile.range.begin * T::kTileN < keys_lo_;
      last_block_ = tile.range.begin;
    }
    const int end_of_tensor =
        (args.cu_k == nullptr ? args.seqlen_k : args.total_k) - s.k_begin;  // TMA zeros follow
    scrub_first_ = tile.range.end * T::kTileN > keys_hi_ && keys_hi_ < end_of_tensor;
  }

  FA_DEVICE void first(int n) {
    mbarrier_wait(&smem_.q_slots.full[q_at.slot], q_at.parity);
    issue_qk();
    wait_products<0>();
    cute::warpgroup_fence_operand(s_);
    release(smem_.k_slots, k_at_);
    mask_scores(n);
    update();
    pack_probabilities();
    if (scrub_first_) scrub(n);
  }

  template <class Edge>
  FA_DEVICE void next(int n, Edge) {
    turns.wait_turn();
    issue_qk();  // S  = Q · K(n)ᵀ
    issue_pv();  // O += P · V(n+1)
    turns.pass_turn();
    wait_products<1>();  // S is there
    cute::warpgroup_fence_operand(s_);
    release(smem_.k_slots, k_at_);
    if constexpr (Edge::kMasked) mask_scores(n);
    update();
    cute::warpgroup_fence_operand(s_);  // keeps the exponentials before the wait
    wait_products<0>();                 // O is there, P's registers are free
    cute::warpgroup_fence_operand(o);
    release(smem_.v_slots, v_at_);
    rescale_output();
    pack_probabilities();
  }

  FA_DEVICE void last() {
    if constexpr (T::kOwnOutput) release_q();
    if constexpr (T::Mask::kNeeded)
      if (scrub_last_) scrub(last_block_);
    issue_pv();
    wait_products<0>();
    cute::warpgroup_fence_operand(o);
    release(smem_.v_slots, v_at_);
  }

  // All reads of Q and, where O reuses its slot, of O are done.
  FA_DEVICE void release_q() { release(smem_.q_slots, q_at); }

  using OutputAcc = decltype(cute::partition_fragment_C(MmaPv{}, Extent<T::kTileM, T::kDimV>{}));
  OutputAcc o;  // ((2, 2, dim_v / 8), 1, 1)
  OnlineSoftmax<2> softmax;
  typename T::Turns turns;
  SlotCursor<T::kQSlots> q_at{0};

 private:
  template <int kPending>
  FA_DEVICE static void wait_products() {
    cute::warpgroup_wait<kPending>();
  }

  template <int kSlots>
  FA_DEVICE void release(SlotBarriers<kSlots>& slots, SlotCursor<kSlots>& at) {
    if (thread_ % 32 == 0) mbarrier_arrive(&slots.empty[at.slot]);
    at.advance();
  }

  FA_DEVICE void issue_qk() {
    mbarrier_wait(&smem_.k_slots.full[k_at_.slot], k_at_.parity);
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q),
                               typename T::LayoutQ{});  // (tile_m, dim_qk, slot)
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k),
                               typename T::LayoutK{});  // (tile_n, dim_qk, stage)
    auto slice = MmaQk{}.get_slice(turns.warpgroup * kWarpgroupThreads);
    auto a = slice.partition_fragment_A(q);  // (MMA, 1, MMA_K, slot)
    auto b = slice.partition_fragment_B(k);  // (MMA, 1, MMA_K, stage)
    cute::warpgroup_fence_operand(s_);
    cute::warpgroup_arrive();
    MmaQk mma;
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(a); ++i) {
      cute::gemm(mma, a(cute::_, cute::_, i, q_at.slot), b(cute::_, cute::_, i, k_at_.slot), s_);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  FA_DEVICE void issue_pv() {
    mbarrier_wait(&smem_.v_slots.full[v_at_.slot], v_at_.parity);
    auto v = cute::make_tensor(cute::make_smem_ptr(smem_.v),
                               typename T::LayoutVt{});  // (dim_v, tile_n, stage)
    auto slice = MmaPv{}.get_slice(turns.warpgroup * kWarpgroupThreads);
    auto b = slice.partition_fragment_B(v);  // (MMA, 1, MMA_K, stage)
    cute::warpgroup_fence_operand(o);
    cute::warpgroup_fence_operand(p_);
    cute::warpgroup_arrive();
    MmaPv mma;
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(p_); ++i)
      cute::gemm(mma, p_(cute::_, cute::_, i), b(cute::_, cute::_, i, v_at_.slot), o);
    cute::warpgroup_commit_batch();
  }

  FA_DEVICE void mask_scores(int n) {
    auto view = acc_view(s_);  // (2, tile_n / 4)
    mask_.template apply<64>(view, m_first_ + first_row(),
                             n * T::kTileN + acc_first_col(thread_ % 32));
  }

  FA_DEVICE void update() {
    auto view = acc_view(s_);
    softmax.update(view, scale_log2_);
  }

  FA_DEVICE void rescale_output() {
    auto view = acc_view(o);  // (2, dim_v / 4)
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) view(r, c) *= softmax.alpha[r];
    }
  }

  // The accumulator's order of pairs is the A operand's order: no exchange between threads.
  FA_DEVICE void pack_probabilities() {
    auto packed = cute::recast<uint32_t>(p_);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(s_) / 2; ++i)
      packed.data()[i] = pack_pair<T::kConfig.dtype>(s_.data()[2 * i], s_.data()[2 * i + 1]);
  }

  // Zeros V's rows outside [keys_lo, keys_hi) in shared memory; a row is 128 bytes of each panel,
  // whatever the swizzle. Nothing is in flight here and no turn is held.
  FA_DEVICE static void scrub_rows(E* tile, int first, int end, int thread) {
    for (int row = thread / 8; row < T::kTileN; row += T::kConsumers * 16) {
      if (row >= first && row < end) continue;
      for (int panel = 0; panel < T::kDimV / T::kPanel; ++panel)
        reinterpret_cast<uint4*>(tile + (panel * T::kTileN + row) * T::kPanel)[thread % 8] =
            uint4{0, 0, 0, 0};
    }
  }
  FA_DEVICE void scrub(int n) {
    mbarrier_wait(&smem_.v_slots.full[v_at_.slot], v_at_.parity);
    scrub_rows(smem_.v + v_at_.slot * T::kTileN * T::kDimV, keys_lo_ - n * T::kTileN,
               keys_hi_ - n * T::kTileN, thread_);
    fence_async_shared();
    sync<T::kConsumers * kWarpgroupThreads>(Barrier::kScrub);
  }

  FwdSmem<Row>& smem_;
  float scale_log2_;
  int thread_;  // among the consumers
  int m_first_ = 0, keys_lo_ = 0, keys_hi_ = 0, last_block_ = 0;
  bool scrub_first_ = false, scrub_last_ = false;
  typename T::Mask mask_{};
  SlotCursor<T::kStages> k_at_{0}, v_at_{0};
  decltype(cute::partition_fragment_C(
      MmaQk{}, Extent<T::kTileM, T::kTileN>{})) s_;  // ((2, 2, tile_n / 8), 1, 1)
  decltype(cute::make_tensor<E>(
      cute::partition_shape_A(MmaPv{}, Extent<T::kTileM, T::kTileN>{}))) p_;  // (MMA, 1, MMA_K)
};

}  // namespace fa::sm90
