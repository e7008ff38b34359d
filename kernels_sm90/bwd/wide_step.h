// SPDX-License-Identifier: BSD-3-Clause
// What does a compute warpgroup do for one block of query rows where one cannot hold dV and dK of
// 64 keys, because a head is wide or scores need registers?
#pragma once

#include "kernels_common/device/score.h"
#include "kernels_sm90/bwd/cluster.h"
#include "kernels_sm90/bwd/compute.h"
#include "kernels_sm90/common/tma.h"

namespace fa::sm90 {

// All warpgroups share the keys of the tile. Each makes the scores of its part of the rows, and dV
// and dK of its part of the columns; P and dS go from one to the other through shared memory, where
// all meet once a block. The scores of a block are issued behind dV and dK of the one before.
// `Policy`: of score.h.
template <class Row, class Policy>
class BwdWideStep : public BwdCompute<Row> {
  using T = BwdTypes<Row>;
  using Base = BwdCompute<Row>;
  using Score = typename T::ScoreAcc;
  using Base::args_, Base::at_, Base::dk_, Base::dv_, Base::smem_;
  using Base::lane, Base::warpgroup;
  static constexpr auto kZero = cute::GMMA::ScaleOut::Zero, kOne = cute::GMMA::ScaleOut::One;
  static constexpr int kRows = T::kTileM / T::kComputes;  // of one warpgroup

 public:
  FA_DEVICE BwdWideStep(BwdSmem<Row>& smem, const BwdArgs& args, int thread)
      : Base(smem, args, thread) {}

  FA_DEVICE void begin_head(int head_q) {
    if constexpr (T::kRefillDo) head_q_ = head_q;
    if constexpr (Policy::kPlain) return;
    const KeyTileInfo& s = smem_.tile.seq;
    score_tile_ = score_tile(args_.score, s.batch, head_q, s.q_len, s.k_len);
    // The distance of a key from a row is that of the row from the key.
    score_tile_.shift = -score_tile_.shift;
  }

  FA_DEVICE void bring_dout_by(const TensorMap& map) { do_map_ = &map; }

  FA_DEVICE void first(int i) {
    if constexpr (T::kRefillDo) refill_dout(i);
    Base::begin();
    if constexpr (T::kPair) Base::scrub_other_keys();
    mbarrier_wait(&smem_.v_full, 0);
    Score s, dp;
    issue_scores(s, 0);
    if constexpr (!T::kRefillDo) issue_dp(dp, 0);
    make_operands<Masked, true>(s, dp, smem_.tile.walk.block(i));
  }

  template <class Edge>
  FA_DEVICE void next(int i, Edge) {
    Score s, dp;
    issue_dv();
    if constexpr (T::kRefillDo) {
      issue_scores(s, at_ + 1);
      issue_dk();
      cute::warpgroup_wait<2>();  // dV is there
      cute::warpgroup_fence_operand(dv_);
      refill_dout(i);
    } else {
      issue_dk();
      issue_scores(s, at_ + 1);
      issue_dp(dp, at_ + 1);
      cute::warpgroup_wait<2>();  // dV and dK are there
      cute::warpgroup_fence_operand(dv_);
      cute::warpgroup_fence_operand(dk_);
      Base::release(smem_.q_slots, at_);
      Base::release(smem_.do_slots, at_);
      if constexpr (T::kComputesReleaseDs) Base::release(smem_.ds_slots, at_);
    }
    ++at_;
    make_operands<Edge>(s, dp, smem_.tile.walk.block(i));
  }

  FA_DEVICE void last() {
    issue_dv();
    issue_dk();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(dv_);
    cute::warpgroup_fence_operand(dk_);
  }

 private:
  FA_DEVICE void issue_scores(Score& s, uint32_t at) {
    const int slot = Base::template slot<T::kSlots>(at);
    mbarrier_wait(&smem_.q_slots.full[slot], Base::template parity<T::kSlots>(at));
    auto k = cute::make_tensor(cute::make_smem_ptr(Base::anew(smem_.k)), typename T::LayoutK{});
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQ{});
    Base::template issue_ss<kZero>(typename T::MmaS{}, k, 0, q, slot, s);
  }
  FA_DEVICE void issue_dp(Score& dp, uint32_t at) {
    const int slot = Base::template slot<T::kDoSlots>(at);
    mbarrier_wait(&smem_.do_slots.full[slot], Base::template parity<T::kDoSlots>(at));
    auto v = cute::make_tensor(cute::make_smem_ptr(Base::anew(smem_.v)), typename T::LayoutV{});
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDo{});
    Base::template issue_ss<kZero>(typename T::MmaDp{}, v, 0, dout, slot, dp);
  }

  // dV += Pᵀ · dO and dK += dSᵀ · Q of block at_, this warpgroup's columns.
  FA_DEVICE void issue_dv() {
    auto p = cute::make_tensor(cute::make_smem_ptr(smem_.p), typename T::LayoutDsT{});
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDoT{});
    Base::template issue_ss<kOne>(typename T::MmaDv{}, p, Base::template slot<T::kDsSlots>(at_),
                                  dout, Base::template slot<T::kDoSlots>(at_), dv_);
  }
  FA_DEVICE void issue_dk() {
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDsT{});
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQt{});
    Base::template issue_ss<kOne>(typename T::MmaDk{}, ds, Base::template slot<T::kDsSlots>(at_), q,
                                  Base::template slot<T::kSlots>(at_), dk_);
  }

  // P and dS of block at_ from its scores and dP, which are in flight; with dO refilled dK of the
  // block before, if any, and the scores are, and dP is issued behind the exponentials. P =
  // 2^(score · scale_log2 − LSE), dS = P · (dP − delta), 0 where P was masked, whatever dP is
  // there.
  template <class Edge, bool kFirst = false>
  FA_DEVICE void make_operands(Score& s, Score& dp, int m) {
    const int slot = Base::template slot<T::kSlots>(at_);
    const int ds_slot = Base::template slot<T::kDsSlots>(at_);
    mbarrier_wait(&smem_.ds_slots.empty[ds_slot], Base::template parity<T::kDsSlots>(at_) ^ 1);
    const int first = warpgroup() * kRows + acc_first_col(lane());  // row of view column 0
    cute::warpgroup_wait<T::kRefillDo && kFirst ? 0 : 1>();
    cute::warpgroup_fence_operand(s);
    auto scores = acc_view(s);  // (2 keys, rows / 4)
    const int key = smem_.tile.seq.n_first + Base::first_key(), row = m * T::kTileM + first;
    Policy::template apply<16, false>(scores, args_.score, score_tile_, key, row);
    Score slopes;  // of the softcap
    if constexpr (Policy::kHasCap) cap_derivatives(scores, acc_view(slopes), key - row);
    if constexpr (Edge::kMasked) Base::hide(scores, m * T::kTileM + first);
    const float4* lse = Base::statistics(smem_.lse_log2[slot] + warpgroup() * kRows);
    CUTE_UNROLL
    for (int c = 0; c < kRows / 4; c += 4) {
      const float4 l = lse[c];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        scores(r, c) = exp2_approx(scores(r, c) * args_.scale_log2 - l.x);
        scores(r, c + 1) = exp2_approx(scores(r, c + 1) * args_.scale_log2 - l.y);
        scores(r, c + 2) = exp2_approx(scores(r, c + 2) * args_.scale_log2 - l.z);
        scores(r, c + 3) = exp2_approx(scores(r, c + 3) * args_.scale_log2 - l.w);
      }
    }
    store(s, smem_.p);
    if constexpr (Policy::kHasCap) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(s); ++i) s(i) = times<Edge>(s(i), slopes(i));
    }
    if constexpr (T::kRefillDo) {
      issue_dp(dp, at_);
      if constexpr (!kFirst) {
        cute::warpgroup_wait<1>();  // dK is there
        cute::warpgroup_fence_operand(dk_);
        Base::release(smem_.q_slots, at_ - 1);
      }
    }
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(dp);
    auto view = acc_view(dp);
    const float4* delta =
        Base::statistics(smem_.delta[Base::template slot<T::kDoSlots>(at_)] + warpgroup() * kRows);
    CUTE_UNROLL
    for (int c = 0; c < kRows / 4; c += 4) {
      const float4 d = delta[c];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        view(r, c) = times<Edge>(scores(r, c), view(r, c) - d.x);
        view(r, c + 1) = times<Edge>(scores(r, c + 1), view(r, c + 1) - d.y);
        view(r, c + 2) = times<Edge>(scores(r, c + 2), view(r, c + 2) - d.z);
        view(r, c + 3) = times<Edge>(scores(r, c + 3), view(r, c + 3) - d.w);
      }
    }
    store(dp, smem_.ds);
    if constexpr (Edge::kMasked)
      if (smem_.tile.ragged(m, T::kTileM)) Base::scrub_rows(m, at_);
    fence_async_shared();
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(&smem_.ds_slots.full[ds_slot]);
    sync<T::kComputeThreads>(Barrier::kOperands);
    if constexpr (T::kPair) send(ds_slot);
  }

  // dS of a block, which all have stored, to the other thread block. Its place there is free where
  // the one here was.
  FA_DEVICE void send(int slot) const {
    if (Base::thread() == kWarpgroupThreads) {
      const int at = slot * T::kTileN * T::kTileM;
      bulk_send(in_block(smem_.ds_in + at, other_rank()), smem_.ds + at, T::kDsBytes,
                in_block(&smem_.ds_in_full[slot], other_rank()));
    }
    __syncwarp();
  }

  // This warpgroup's columns of dO of the block at place i, and by the first one delta: its dV has
  // read the former ones, and all have their dP.
  FA_DEVICE void refill_dout(int i) {
    const int group = warpgroup();  // by the whole warp
    sync<kWarpgroupThreads>(Barrier::kSlab, group);
    if (Base::thread() % kWarpgroupThreads == 0) {
      const KeyTileInfo& s = smem_.tile.seq;
      const int m = smem_.tile.walk.block(i);
      uint64_t* full = &smem_.do_slots.full[0];
      const bool leads = group == 0;
      mbarrier_expect(full, T::kDoBytes / T::kComputes + (leads ? T::kStatBytes : 0));
      constexpr int kPanels = T::kDimV / T::kComputes / T::kPanelV;
      CUTE_UNROLL
      for (int p = 0; p < kPanels; ++p) {
        const int panel = group * kPanels + p;
        tma_load<L2Policy::kEvictLast>(
            *do_map_, smem_.dout + panel * T::kPanelV * T::kTileM, full,
            BoxCoord{panel * T::kPanelV, s.q_begin + m * T::kTileM, head_q_, s.q_batch});
      }
      if (leads)
        bulk_load(smem_.delta[0],
                  args_.work.delta + workspace_tile(args_, s, head_q_, m) * T::kTileM,
                  T::kStatBytes, full);
    }
    __syncwarp();
  }

  // `ahead`: positions of the thread's first key, on the axis of the keys, before its first row.
  template <class View>
  FA_DEVICE void cap_derivatives(const View& scores, View slopes, int ahead) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < kRows / 4; ++c) {
        const int distance = ahead + 8 * r + score_tile_.shift - acc_col(c);
        const float penalty = score_tile_.slope * fabsf(static_cast<float>(distance));
        slopes(r, c) = Policy::cap_derivative(scores(r, c), penalty, args_.score);
      }
    }
  }

  // 0 where P was masked, whatever x is there.
  template <class Edge>
  FA_DEVICE static float times(float p, float x) {
    return Edge::kMasked && p == 0.f ? 0.f : p * x;
  }

  // A 16-bit operand of dV, dK and dQ, this warpgroup's rows of Q. Lane l addresses key l % 16 of a
  // 16 x 16 block, column half l / 16; the swizzle is chunk ^ key % 8.
  FA_DEVICE void store(const Score& x, typename T::E* operands) const {
    const int key = Base::warp_key() + lane() % 16, half = lane() / 16;
    const int operand = Base::template slot<T::kDsSlots>(at_);
    const uint32_t base = shared_address(operands + operand * T::kTileN * T::kTileM) + key * 128;
    CUTE_UNROLL
    for (int i = 0; i < kRows / 16; ++i) {
      const int chunk = warpgroup() * (kRows / 8) + 2 * i + half;
      const float* f = x.data() + 8 * i;
      constexpr DType kType = T::kConfig.dtype;
      store_matrices(base + ((chunk ^ (key % 8)) * 16), pack_pair<kType>(f[0], f[1]),
                     pack_pair<kType>(f[2], f[3]), pack_pair<kType>(f[4], f[5]),
                     pack_pair<kType>(f[6], f[7]));
    }
  }

  ScoreTile score_tile_{};  // of the head
  const TensorMap* do_map_ = nullptr;
  int head_q_ = 0;
};

}  // namespace fa::sm90
