// SPDX-License-Identifier: BSD-3-Clause
// What does a compute warpgroup do for one block of 64 query rows? It owns 64 keys and their dV and
// dK, and makes a part of the block's dQ, or all of it for every second block.
#pragma once

#include "kernels_sm90/bwd/own_keys.h"

namespace fa::sm90 {

// A block at a time: nothing is in flight between two of them. All meet once in it, when dS is
// stored, which dQ needs from everyone. Exponentials run beside the arithmetic that makes dS.
template <class Row>
class BwdStep : public BwdOwnKeys<Row> {
  using T = BwdTypes<Row>;
  using Base = BwdOwnKeys<Row>;
  using Base::at_, Base::dk_, Base::dv_, Base::smem_, Base::writer_;
  using Base::lane, Base::warpgroup, Base::kColumns, Base::kInTurn;
  using typename Base::Score, typename Base::DqAcc, typename Base::HeldStatistics;

 public:
  FA_DEVICE BwdStep(BwdSmem<Row>& smem, const BwdArgs& args, int thread)
      : Base(smem, args, thread) {}

  FA_DEVICE void first(int i) {
    Base::begin();
    mbarrier_wait(&smem_.v_full, Base::keys_parity());
    block<Masked>(i);
  }

  template <class Edge>
  FA_DEVICE void next(int i, Edge) {
    ++at_;
    block<Edge>(i);
  }

  FA_DEVICE void last() {
    if constexpr (!T::kStays) return;
    Base::release_keys(&smem_.k_empty);
    Base::release_keys(&smem_.v_empty);
    ++at_;
    Base::meet();  // nobody reads dS any more
  }

 private:
  template <class Edge>
  FA_DEVICE void block(int i) {
    Score s, dp;
    Base::template clear_hidden_rows<Edge>(i, at_);
    HeldStatistics lse, delta;
    Base::issue_scores(s, at());
    Base::template hold<0, kColumns>(lse, smem_.lse_log2[slot()]);
    issue_dp(dp);
    cute::warpgroup_wait<1>();  // S is there
    Base::template hide_scores<Edge>(s, i);
    Base::template make_probabilities<0, kColumns / 2>(s, lse);
    Base::keep_ahead();
    Base::template make_probabilities<kColumns / 2, kColumns>(s, lse);
    Base::template hold<0, kColumns / 2>(delta, smem_.delta[slot()]);
    cute::warpgroup_wait<0>();  // dP is there
    Base::template hold<kColumns / 2, kColumns>(delta, smem_.delta[slot()]);
    make_operands<Edge>(s, dp, delta);
    issue_dv();
    fence_async_shared();  // dS, for dQ
    Base::meet();
    if constexpr (kInTurn) {
      // Products in flight across a branch would be serialised.
      cute::warpgroup_wait<0>();  // dV is there
      release_dout();
      if (writer_.makes_dq(at_, warpgroup()))
        multiply_ds<true>();
      else
        multiply_ds<false>();
    } else {
      multiply_ds<true>();
    }
    Base::release(smem_.q_slots, at_);
  }

  // dQ, if made here, and dK of block at_.
  template <bool kMakesDq>
  FA_DEVICE void multiply_ds() {
    DqAcc dq;
    if constexpr (kMakesDq) Base::issue_dq(dq, at());
    if constexpr (!kInTurn) {
      cute::warpgroup_wait<1>();  // dV is there
      release_dout();
    }
    issue_dk();
    if constexpr (kMakesDq) {
      cute::warpgroup_wait<1>();  // dQ is there
      add_dq(dq);
    }
    cute::warpgroup_wait<0>();  // dK is there
    cute::warpgroup_fence_operand(dk_);
  }

  // So that addresses of a slot are not kept for all slots.
  FA_DEVICE uint32_t at() const { return uniform(Base::anew(at_)); }
  FA_DEVICE int slot() const { return Base::template slot<T::kSlots>(at()); }

  FA_DEVICE void release_dout() {
    cute::warpgroup_fence_operand(dv_);
    Base::release(smem_.do_slots, at_);
  }

  FA_DEVICE void add_dq(DqAcc& dq) const {
    cute::warpgroup_fence_operand(dq);
    writer_.hand_over(dq, warpgroup(), Base::thread() % kWarpgroupThreads,
                      kInTurn ? at() / 2 : at());
  }

  // dPᵀ of block at_.
  FA_DEVICE void issue_dp(Score& dp) const {
    Base::wait_for_do(at());
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDo{});
    auto v = cute::make_tensor(cute::make_smem_ptr(smem_.v), typename T::LayoutV{});
    Base::template issue_ss<Base::kZero>(typename T::MmaDp{}, v, 0, dout, slot(), dp);
  }
  // dV += Pᵀ · dO and dK += dSᵀ · Q of block at_.
  FA_DEVICE void issue_dv() {
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDoT{});
    Base::issue_rs(typename T::MmaDv{}, p_, dout, slot(), dv_);
  }
  FA_DEVICE void issue_dk() {
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQt{});
    Base::issue_rs(typename T::MmaDk{}, ds_, q, slot(), dk_);
  }

  // P and dS = P · (dP − delta), 16-bit, of block at_; dS is 0 where P was masked, whatever dP is
  // there. Who reads this slot of dS for the block before last has met here since.
  template <class Edge>
  FA_DEVICE void make_operands(const Score& p, Score& dp, const HeldStatistics& delta) {
    cute::warpgroup_fence_operand(dp);
    CUTE_UNROLL
    for (int i = 0; i < T::kTileM / 16; ++i) make_operands_of<Edge>(p, dp, delta[4 * i], i);
  }

  // Of 16 rows. dS also goes to shared memory for dQ, a row's keys one after the other, 64 of a
  // warpgroup in a panel: lane l addresses row l % 8 + l / 16 * 8 of a 16 x 16 block and its keys
  // from l / 8 % 2 * 8 on; the swizzle is chunk ^ row % 8.
  template <class Edge>
  FA_DEVICE void make_operands_of(const Score& probabilities, const Score& products, float4 delta,
                                  int i) {
    const auto p = acc_view(probabilities), dp = acc_view(products);  // (2 keys, kColumns rows)
    auto packed_p = cute::recast<uint32_t>(p_), packed_ds = cute::recast<uint32_t>(ds_);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 d = half == 0 ? float2{delta.x, delta.y} : float2{delta.z, delta.w};
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int c = 4 * i + 2 * half;
        float x = p(r, c) * (dp(r, c) - d.x), y = p(r, c + 1) * (dp(r, c + 1) - d.y);
        if constexpr (Edge::kMasked) {
          x = p(r, c) == 0.f ? 0.f : x;
          y = p(r, c + 1) == 0.f ? 0.f : y;
        }
        packed_ds.data()[c + r] = pack_pair<T::kConfig.dtype>(x, y);
        packed_p.data()[c + r] = pack_pair<T::kConfig.dtype>(p(r, c), p(r, c + 1));
      }
    }
    const int row = 16 * i + lane() / 16 * 8 + lane() % 8;
    const int chunk = Base::warp_key() % 64 / 8 + lane() / 8 % 2;
    const int panel = Base::template slot<T::kDsSlots>(at_) * T::kTileN / 64 + warpgroup();
    const uint32_t* ds = packed_ds.data() + 4 * i;
    store_transposed(
        shared_address(smem_.ds + panel * 64 * T::kTileM) + row * 128 + ((chunk ^ (row % 8)) * 16),
        ds[0], ds[1], ds[2], ds[3]);
  }

  typename T::Operand p_, ds_;  // (MMA, 1, MMA_K): 16-bit
};

}  // namespace fa::sm90
