// SPDX-License-Identifier: BSD-3-Clause
// What have the compute warpgroups in common that own 64 keys each, whatever the order of their
// products?
#pragma once

#include "kernels_common/device/dq_turns.h"
#include "kernels_sm90/bwd/compute.h"
#include "kernels_sm90/bwd/dq_writer.h"

namespace fa::sm90 {

// P of the own keys is carried in registers to dV, dS goes through shared memory to dQ, of which
// each warpgroup makes a part, or, where there is one, one warpgroup and the other for every second
// block.
template <class Row>
class BwdOwnKeys : public BwdCompute<Row> {
  using T = BwdTypes<Row>;
  using Base = BwdCompute<Row>;

 public:
  FA_DEVICE void begin_head(int head_q) { head_q_ = head_q; }

 protected:
  using Score = typename T::ScoreAcc;
  using DqAcc = typename T::DqAcc;
  using Base::args_, Base::scale_log2_, Base::smem_;
  using Base::lane, Base::warpgroup;
  static constexpr auto kZero = cute::GMMA::ScaleOut::Zero, kOne = cute::GMMA::ScaleOut::One;
  static constexpr bool kInTurn = T::kDqParts == 1;
  static constexpr int kColumns = T::kTileM / 4;  // of a thread's view of S

  FA_DEVICE BwdOwnKeys(BwdSmem<Row>& smem, const BwdArgs& args, int thread)
      : Base(smem, args, thread), writer_(args, smem) {}

  FA_DEVICE void wait_for_q(uint32_t at) const {
    mbarrier_wait(&smem_.q_slots.full[Base::template slot<T::kSlots>(at)],
                  Base::template parity<T::kSlots>(at));
  }
  FA_DEVICE void wait_for_do(uint32_t at) const {
    mbarrier_wait(&smem_.do_slots.full[Base::template slot<T::kDoSlots>(at)],
                  Base::template parity<T::kDoSlots>(at));
  }
  // The query block at place i of the walk.
  FA_DEVICE int block(int i) const { return Base::anew(&smem_.tile.walk)->block(i); }
  // In Q and dO of block `at`, which is at place i of the walk, before a product reads them.
  template <class Edge>
  FA_DEVICE void clear_hidden_rows(int i, uint32_t at) const {
    if constexpr (Edge::kMasked) {
      const int m = block(i);
      if (!smem_.tile.ragged(m, T::kTileM)) return;
      wait_for_q(at);
      wait_for_do(at);
      Base::scrub_rows(m, at);
    }
  }

  // Sᵀ of block `at`.
  FA_DEVICE void issue_scores(Score& s, uint32_t at) const {
    wait_for_q(at);
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQ{});
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename T::LayoutK{});
    Base::template issue_ss<kZero>(typename T::MmaS{}, k, 0, q, Base::template slot<T::kSlots>(at),
                                   s);
  }

  template <class Edge>
  FA_DEVICE void hide_scores(Score& s, int i) const {
    cute::warpgroup_fence_operand(s);
    auto view = acc_view(s);  // (2 keys, kColumns rows)
    if constexpr (Edge::kMasked) Base::hide(view, block(i) * T::kTileM + acc_first_col(lane()));
  }

  // Statistics of a thread's rows in registers; [c] as of statistics().
  struct HeldStatistics {
    float4 of[kColumns / 4];
    FA_DEVICE const float4& operator[](int c) const { return of[c / 4]; }
  };
  // Those of view columns [kBegin, kEnd). `from`: of the block.
  template <int kBegin, int kEnd>
  FA_DEVICE void hold(HeldStatistics& held, const float* from) const {
    const float4* of_row = Base::statistics(from);
    CUTE_UNROLL
    for (int c = kBegin; c < kEnd; c += 4) held.of[c / 4] = of_row[c];
  }

  // ptxas would move exponentials behind the wait for products that run beside them. It moves
  // little over a branch: this barrier's phase has passed.
  FA_DEVICE void keep_ahead() const {
    mbarrier_wait(T::kStays ? &smem_.passed : &smem_.k_full, T::kStays);
  }

  // P = 2^(score · scale_log2 − LSE), in place of the scores, view columns [kBegin, kEnd). `lse`:
  // [c] as of statistics(). That of a row that is not the sequence's is +inf.
  template <int kBegin, int kEnd, class Statistics>
  FA_DEVICE void make_probabilities(Score& s, const Statistics& lse) const {
    auto view = acc_view(s);  // (2 keys, kColumns rows)
    CUTE_UNROLL
    for (int c = kBegin; c < kEnd; c += 4) {
      const float4 l = lse[c];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        view(r, c) = exp2_approx(view(r, c) * scale_log2_ - l.x);
        view(r, c + 1) = exp2_approx(view(r, c + 1) * scale_log2_ - l.y);
        view(r, c + 2) = exp2_approx(view(r, c + 2) * scale_log2_ - l.z);
        view(r, c + 3) = exp2_approx(view(r, c + 3) * scale_log2_ - l.w);
      }
    }
  }

  // dQ of block `at` over all keys, 64 rows.
  FA_DEVICE void issue_dq(DqAcc& dq, uint32_t at) const {
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDs{});
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename T::LayoutKt{});
    multiply_dq<T>(dq, ds, Base::template slot<T::kDsSlots>(at), k, part());
  }
  FA_DEVICE int part() const { return kInTurn ? 0 : warpgroup(); }

  // acc += A · B, A from registers.
  template <class Mma, class A, class B, class Acc>
  FA_DEVICE void issue_rs(Mma mma, A& a, const B& b_tile, int slot, Acc& acc) const {
    auto b = mma.get_slice(warpgroup() * kWarpgroupThreads).partition_fragment_B(b_tile);
    cute::warpgroup_fence_operand(acc);
    cute::warpgroup_fence_operand(a);
    cute::warpgroup_arrive();
    mma.accumulate_ = kOne;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(a); ++i)
      cute::gemm(mma, a(cute::_, cute::_, i), b(cute::_, cute::_, i, slot), acc);
    cute::warpgroup_commit_batch();
  }

  // No product is left that reads K or V of the tile.
  FA_DEVICE void release_keys(uint64_t* empty) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(empty);
  }

  // All have stored dS of a block.
  FA_DEVICE void meet() const { sync<T::kComputeThreads>(Barrier::kOperands); }

  DqWriter<Row> writer_;
  int head_q_ = 0;
};

}  // namespace fa::sm90
