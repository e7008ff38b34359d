// SPDX-License-Identifier: BSD-3-Clause
// What does a compute warpgroup do for one block of 128 query rows? It owns 64 keys and their dV
// and dK, and makes 64 rows of the block's dQ.
#pragma once

#include "kernels_sm90/bwd/own_keys.h"

namespace fa::sm90 {

// All meet when dS of a block is stored. Then dQ and dV of that block and S of the next one are
// issued, and behind them dP of the next one and dK: the tensor cores have work while P and dS are
// computed. Nothing is in flight between two steps. P is carried in registers, dS in shared memory.
template <class Row>
class BwdTallStep : public BwdOwnKeys<Row> {
  using T = BwdTypes<Row>;
  using Base = BwdOwnKeys<Row>;
  using Base::at_, Base::dk_, Base::dv_, Base::head_q_, Base::smem_, Base::writer_;
  using Base::lane, Base::kColumns;
  using typename Base::Score, typename Base::DqAcc;
  static_assert(!Base::kInTurn && T::kStays);

 public:
  FA_DEVICE BwdTallStep(BwdSmem<Row>& smem, const BwdArgs& args, int thread)
      : Base(smem, args, thread) {}

  FA_DEVICE void first(int i) {
    Base::begin();
    mbarrier_wait(&smem_.v_full, Base::keys_parity());
    Score s, dp;
    Base::template clear_hidden_rows<Masked>(i, at_);
    issue_dp(dp, at_);
    Base::issue_scores(s, at_);
    cute::warpgroup_wait<0>();
    Base::template hide_scores<Masked>(s, i);
    make_probabilities<0, kColumns>(s, at_);
    make_operands<Masked>(s, dp);
    note_block(i);
  }

  template <class Edge>
  FA_DEVICE void next(int i, Edge) {
    Base::meet();
    Base::template clear_hidden_rows<Edge>(i, at_ + 1);
    Score s, dp;
    DqAcc dq;
    Base::issue_dq(dq, at_);
    Base::issue_scores(s, at_ + 1);
    issue_dv();
    cute::warpgroup_wait<2>();  // dQ is there
    add_dq(dq);
    note_block(i);
    cute::warpgroup_wait<1>();  // S is there
    Base::template hide_scores<Edge>(s, i);
    make_probabilities<0, kColumns / 2>(s, at_ + 1);
    Base::keep_ahead();
    cute::warpgroup_wait<0>();  // dV is there
    cute::warpgroup_fence_operand(s);
    issue_dp(dp, at_ + 1);
    issue_dk();
    make_probabilities<kColumns / 2, kColumns>(s, at_ + 1);
    ++at_;
    cute::warpgroup_wait<1>();  // dP is there
    cute::warpgroup_fence_operand(dv_);
    cute::warpgroup_fence_operand(s);
    Base::release(smem_.do_slots, at_ - 1);
    make_operands<Edge>(s, dp);
    cute::warpgroup_wait<0>();  // dK is there
    cute::warpgroup_fence_operand(dk_);
    Base::release(smem_.q_slots, at_ - 1);
  }

  FA_DEVICE void last() {
    Base::meet();
    Base::release_keys(&smem_.v_empty);
    DqAcc dq;
    Base::issue_dq(dq, at_);
    cute::warpgroup_wait<0>();
    Base::release_keys(&smem_.k_empty);
    add_dq(dq);
    issue_dv();
    issue_dk();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(dv_);
    cute::warpgroup_fence_operand(dk_);
    Base::release(smem_.do_slots, at_);
    Base::release(smem_.q_slots, at_);
    ++at_;
    Base::meet();  // nobody reads dS any more
  }

 private:
  // The block at place i of the walk is the one whose dS is stored last; for adds out of turns,
  // where the walk is in the order of the rows.
  FA_DEVICE void note_block(int i) { tile_ = static_cast<int>(writer_.index(head_q_, i)); }

  FA_DEVICE void add_dq(DqAcc& dq) const {
    cute::warpgroup_fence_operand(dq);
    if (writer_.ordered())
      return writer_.hand_over(dq, Base::warpgroup(), Base::thread() % kWarpgroupThreads, at_);
    writer_.add(dq, writer_.sum(tile_), Base::part());
  }

  template <int kBegin, int kEnd>
  FA_DEVICE void make_probabilities(Score& s, uint32_t at) const {
    Base::template make_probabilities<kBegin, kEnd>(
        s, Base::statistics(smem_.lse_log2[Base::template slot<T::kSlots>(at)]));
  }

  // What the products subtract dP from. Each value straight into its register, twice: it belongs to
  // a row of Q, of which a thread holds two keys.
  FA_DEVICE void begin_with_delta(Score& dp, const float* delta) const {
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

  // delta − dPᵀ of block `at`.
  FA_DEVICE void issue_dp(Score& dp, uint32_t at) const {
    const int slot = Base::template slot<T::kDoSlots>(at);
    Base::wait_for_do(at);
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDo{});
    auto v = cute::make_tensor(cute::make_smem_ptr(smem_.v), typename T::LayoutV{});
    begin_with_delta(dp, smem_.delta[slot]);
    Base::template issue_ss<Base::kOne>(typename T::MmaDp{}, v, 0, dout, slot, dp);
  }
  // dV += Pᵀ · dO and dK += dSᵀ · Q of block at_.
  FA_DEVICE void issue_dv() {
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDoT{});
    Base::issue_rs(typename T::MmaDv{}, p_, dout, Base::template slot<T::kDoSlots>(at_), dv_);
  }
  FA_DEVICE void issue_dk() {
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQt{});
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDsT{});
    Base::template issue_ss<Base::kOne>(typename T::MmaDk{}, ds,
                                        Base::template slot<T::kDsSlots>(at_), q,
                                        Base::template slot<T::kSlots>(at_), dk_);
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
    auto packed = cute::recast<uint32_t>(p_);
    uint32_t ds[4];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int c = 4 * i + 2 * half;
        float x = p(r, c) * -dp(r, c), y = p(r, c + 1) * -dp(r, c + 1);
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

  typename T::Operand p_;  // (MMA, 1, MMA_K): 16-bit
  int tile_ = 0;           // workspace tile of the block whose dS is stored last
};

}  // namespace fa::sm90
