// SPDX-License-Identifier: BSD-3-Clause
// What does a compute warpgroup do for one block of query rows? It owns 64 keys and their dV and
// dK, and makes a part of the block's dQ.
#pragma once

#include "kernels_common/device/dq_turns.h"
#include "kernels_sm90/bwd/compute.h"
#include "kernels_sm90/bwd/dq_writer.h"

namespace fa::sm90 {

// All meet when dS of a block is stored. Then dQ and dV of that block and S of the next one are
// issued, and behind them, without a wait, dP of the next one and dK: the tensor cores have work
// while P and dS are computed. Nothing is in flight between two steps. P is carried in registers,
// dS in shared memory. dQ of two parts is made by both warpgroups, of one by each in turn.
template <class Row>
class BwdStep : public BwdCompute<Row> {
  using T = BwdTypes<Row>;
  using Base = BwdCompute<Row>;
  using Score = typename T::ScoreAcc;
  using DqAcc = typename T::DqAcc;
  using Base::args_, Base::at_, Base::dk_, Base::dv_, Base::scale_log2_, Base::smem_;
  using Base::lane, Base::warpgroup;
  static constexpr auto kZero = cute::GMMA::ScaleOut::Zero, kOne = cute::GMMA::ScaleOut::One;
  static constexpr bool kInTurn = T::kDqParts == 1;
  // Registers hold dP beside P of the block before, so its product need not wait for dV.
  static constexpr bool kEarlyDp = T::kTileM == 64;
  static constexpr int kColumns = T::kTileM / 4;  // of a thread's view of S

 public:
  FA_DEVICE BwdStep(BwdSmem<Row>& smem, const BwdArgs& args, int thread)
      : Base(smem, args, thread), writer_(args, smem) {}

  FA_DEVICE void begin_head(int head_q) { head_q_ = head_q; }

  FA_DEVICE void first(int m) {
    Base::begin();
    mbarrier_wait(&smem_.v_full, 0);
    Score s, dp;
    clear_hidden_rows<Masked>(m, 0);
    issue_dp(dp, 0);
    issue_scores(s, 0);
    cute::warpgroup_wait<0>();
    hide_scores<Masked>(s, m);
    make_probabilities<0, kColumns>(s, 0);
    make_operands<Masked>(s, dp);
    note_block(m);
  }

  template <class Edge>
  FA_DEVICE void next(int m, Edge) {
    meet();
    clear_hidden_rows<Edge>(m, at_ + 1);
    // No barrier of both behind this branch: they may take different sides of it.
    if (makes_dq())
      next<Edge, true>(m);
    else
      next<Edge, false>(m);
  }

  FA_DEVICE void last() {
    meet();
    if (makes_dq()) {
      DqAcc dq;
      issue_dq(dq);
      cute::warpgroup_wait<0>();
      add_dq(dq);
    }
    issue_dv();
    issue_dk();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(dv_);
    cute::warpgroup_fence_operand(dk_);
    if (writer_.ordered()) {
      note_adds();
      sync<T::kComputeThreads>(Barrier::kOperands);
      pass_turn();
    }
  }

 private:
  FA_DEVICE bool makes_dq() const { return !kInTurn || (at_ + warpgroup()) % 2 == 0; }

  template <class Edge, bool kMakesDq>
  FA_DEVICE void next(int m) {
    Score s, dp;
    if constexpr (kMakesDq) {
      DqAcc dq;
      issue_dq(dq);
      issue_scores(s, at_ + 1);
      issue_dv();
      cute::warpgroup_wait<2>();  // dQ is there
      add_dq(dq);
    } else {
      issue_scores(s, at_ + 1);
      issue_dv();
    }
    note_adds();
    note_block(m);
    if constexpr (kEarlyDp) {
      issue_dp(dp, at_ + 1);
      issue_dk();
      cute::warpgroup_wait<3>();  // S is there
      hide_scores<Edge>(s, m);
      make_probabilities<0, kColumns>(s, at_ + 1);
      keep_ahead(s);
    } else {
      cute::warpgroup_wait<1>();  // S is there
      hide_scores<Edge>(s, m);
      make_probabilities<0, kColumns / 2>(s, at_ + 1);
      keep_ahead(s);
      cute::warpgroup_wait<0>();  // dV is there
      cute::warpgroup_fence_operand(s);
      issue_dp(dp, at_ + 1);
      issue_dk();
      make_probabilities<kColumns / 2, kColumns>(s, at_ + 1);
    }
    ++at_;
    cute::warpgroup_wait<1>();  // dV and dP are there
    cute::warpgroup_fence_operand(dv_);
    cute::warpgroup_fence_operand(s);
    Base::release(smem_.do_slots, at_ - 1);
    make_operands<Edge>(s, dp);
    cute::warpgroup_wait<0>();  // dK is there
    cute::warpgroup_fence_operand(dk_);
    Base::release(smem_.q_slots, at_ - 1);
  }

  // ptxas would move the exponentials behind the wait for products that run beside them. A test
  // that needs them all stands ahead of it: P is never negative. Where that takes registers which
  // are not there, a branch does, over which ptxas moves little: this barrier's phase has passed.
  FA_DEVICE void keep_ahead(const Score& p) const {
    if constexpr (kEarlyDp) {
      uint32_t signs = 0;
      CUTE_UNROLL
      for (int i = 0; i < cute::size(p); ++i) signs |= __float_as_uint(p(i));
      if (static_cast<int32_t>(signs) < 0) __nanosleep(0);
    } else {
      mbarrier_wait(&smem_.k_full, 0);
    }
  }

  // Block m of the head is the one whose dS is stored last.
  FA_DEVICE void note_block(int m) { m_ = m, tile_ = static_cast<int>(writer_.index(head_q_, m)); }

  // All have stored dS of block at_, and issued the adds of the block before.
  FA_DEVICE void meet() const {
    sync<T::kComputeThreads>(Barrier::kOperands);
    if (writer_.ordered() && at_ > 0) pass_turn();
  }
  // In turns: one thread remembers which block's turn to pass.
  FA_DEVICE void note_adds() const {
    if (writer_.ordered() && Base::thread() == 0) smem_.turn = tile_;
  }
  FA_DEVICE void pass_turn() const {
    if (Base::thread() == 0) count_one(args_.work.turns + smem_.turn);
  }

  // dQ of block at_ over all keys, 64 rows.
  FA_DEVICE void issue_dq(DqAcc& dq) const {
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDs{});
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename T::LayoutKt{});
    multiply_dq<T>(dq, ds, Base::template slot<T::kDsSlots>(at_), k, part());
  }
  FA_DEVICE void add_dq(DqAcc& dq) const {
    cute::warpgroup_fence_operand(dq);
    if (writer_.ordered()) {
      if (Base::thread() % kWarpgroupThreads == 0)
        wait_for_count(args_.work.turns + tile_,
                       key_tiles_behind(smem_.tile.band, smem_.tile.seq, m_, T::kTileM, T::kTileN));
      sync<kWarpgroupThreads>(Barrier::kSlab, warpgroup());
    }
    writer_.add(dq, writer_.sum(tile_), part());
  }
  FA_DEVICE static int part() { return kInTurn ? 0 : warpgroup(); }

  // Sᵀ of block `at`.
  FA_DEVICE void issue_scores(Score& s, uint32_t at) const {
    const int slot = Base::template slot<T::kSlots>(at);
    wait_for_q(at);
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQ{});
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename T::LayoutK{});
    Base::template issue_ss<kZero>(typename T::MmaS{}, k, 0, q, slot, s);
  }

  FA_DEVICE void wait_for_q(uint32_t at) const {
    mbarrier_wait(&smem_.q_slots.full[Base::template slot<T::kSlots>(at)],
                  Base::template parity<T::kSlots>(at));
  }
  FA_DEVICE void wait_for_do(uint32_t at) const {
    mbarrier_wait(&smem_.do_slots.full[Base::template slot<T::kDoSlots>(at)],
                  Base::template parity<T::kDoSlots>(at));
  }
  // In Q and dO of block `at`, which is block m of its head, before a product reads them.
  template <class Edge>
  FA_DEVICE void clear_hidden_rows(int m, uint32_t at) const {
    if constexpr (Edge::kMasked) {
      if (!smem_.tile.ragged(m, T::kTileM)) return;
      wait_for_q(at);
      wait_for_do(at);
      Base::scrub_rows(m, at);
    }
  }

  // What the products subtract dP from. Each value straight into its register, twice: it belongs to
  // a row of Q, of which a thread holds two keys.
  FA_DEVICE static void begin_with_delta(Score& dp, const float* delta) {
    const uint32_t from = shared_address(Base::statistics(delta));
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 2) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r)
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(dp(2 * c + 2 * r)), "=f"(dp(2 * c + 2 * r + 1))
                     : "r"(from + c / 4 * 64 + c % 4 * 4));
    }
  }

  // dPᵀ of block `at`, or delta − dPᵀ.
  FA_DEVICE void issue_dp(Score& dp, uint32_t at) const {
    const int slot = Base::template slot<T::kDoSlots>(at);
    wait_for_do(at);
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDo{});
    auto v = cute::make_tensor(cute::make_smem_ptr(smem_.v), typename T::LayoutV{});
    if constexpr (T::kBeginsWithDelta) begin_with_delta(dp, smem_.delta[slot]);
    Base::template issue_ss<T::kBeginsWithDelta ? kOne : kZero>(typename T::MmaDp{}, v, 0, dout,
                                                                slot, dp);
  }

  // dV += Pᵀ · dO of block at_.
  FA_DEVICE void issue_dv() {
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDoT{});
    typename T::MmaDv mma;
    auto b = mma.get_slice(warpgroup() * kWarpgroupThreads).partition_fragment_B(dout);
    cute::warpgroup_fence_operand(dv_);
    cute::warpgroup_fence_operand(p_);
    cute::warpgroup_arrive();
    mma.accumulate_ = kOne;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(p_); ++i)
      cute::gemm(mma, p_(cute::_, cute::_, i),
                 b(cute::_, cute::_, i, Base::template slot<T::kDoSlots>(at_)), dv_);
    cute::warpgroup_commit_batch();
  }

  // dK += dSᵀ · Q of block at_.
  FA_DEVICE void issue_dk() {
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQt{});
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDsT{});
    Base::template issue_ss<kOne>(typename T::MmaDk{}, ds, Base::template slot<T::kDsSlots>(at_), q,
                                  Base::template slot<T::kSlots>(at_), dk_);
  }

  template <class Edge>
  FA_DEVICE void hide_scores(Score& s, int m) const {
    cute::warpgroup_fence_operand(s);
    auto view = acc_view(s);  // (2 keys, kColumns rows)
    if constexpr (Edge::kMasked) Base::hide(view, m * T::kTileM + acc_first_col(lane()));
  }

  // P = 2^(score · scale_log2 − LSE) of block `at`, in place of the scores, view columns [kBegin,
  // kEnd). The LSE of a row that is not the sequence's is +inf.
  template <int kBegin, int kEnd>
  FA_DEVICE void make_probabilities(Score& s, uint32_t at) const {
    auto view = acc_view(s);  // (2 keys, kColumns rows)
    const float4* lse = Base::statistics(smem_.lse_log2[Base::template slot<T::kSlots>(at)]);
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

  // P and dS = P · (dP − delta), 16-bit, of block at_; dS is 0 where P was masked, whatever dP is
  // there. Who stored dS into this slot before has read it: all met since.
  template <class Edge>
  FA_DEVICE void make_operands(const Score& p, Score& dp) {
    cute::warpgroup_fence_operand(dp);
    CUTE_UNROLL
    for (int i = 0; i < T::kTileM / 16; ++i) make_operands_of<Edge>(p, dp, i);
    fence_async_shared();
  }

  // Of 16 rows. dSᵀ goes to shared memory, for the products that make dQ and dK: lane l addresses
  // row l % 16 of a 16 x 16 block, column half l / 16; the swizzle is chunk ^ row % 8.
  template <class Edge>
  FA_DEVICE void make_operands_of(const Score& probabilities, const Score& products, int i) {
    const auto p = acc_view(probabilities), dp = acc_view(products);  // (2 keys, kColumns rows)
    float4 delta{};
    if constexpr (!T::kBeginsWithDelta)
      delta = Base::statistics(smem_.delta[Base::template slot<T::kDoSlots>(at_)])[4 * i];
    auto packed = cute::recast<uint32_t>(p_);
    uint32_t ds[4];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 d = half == 0 ? float2{delta.x, delta.y} : float2{delta.z, delta.w};
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int c = 4 * i + 2 * half;
        float x = p(r, c), y = p(r, c + 1);
        if constexpr (T::kBeginsWithDelta)
          x *= -dp(r, c), y *= -dp(r, c + 1);
        else
          x *= dp(r, c) - d.x, y *= dp(r, c + 1) - d.y;
        if constexpr (Edge::kMasked) {
          x = p(r, c) == 0.f ? 0.f : x;
          y = p(r, c + 1) == 0.f ? 0.f : y;
        }
        ds[2 * half + r] = pack_pair<T::kConfig.dtype>(x, y);
        packed.data()[c + r] = pack_pair<T::kConfig.dtype>(p(r, c), p(r, c + 1));
      }
    }
    const int row = Base::warp_key() + lane() % 16, half = lane() / 16;
    const int at = Base::template slot<T::kDsSlots>(at_) * T::kTileM + i / 4 * 64;
    store_matrices(shared_address(smem_.ds + at * T::kTileN) + row * 128 +
                       (((i % 4 * 2 + half) ^ (row % 8)) * 16),
                   ds[0], ds[1], ds[2], ds[3]);
  }

  DqWriter<Row> writer_;
  typename T::Operand p_;              // (MMA, 1, MMA_K): 16-bit
  int head_q_ = 0, m_ = 0, tile_ = 0;  // the block whose dS is stored last; its workspace tile
};

}  // namespace fa::sm90
