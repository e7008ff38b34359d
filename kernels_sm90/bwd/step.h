// SPDX-License-Identifier: BSD-3-Clause
// What does a compute warpgroup do for one block of query rows? It owns 64 keys and their dV and
// dK.
#pragma once

#include "kernels_common/device/split_bf16.h"
#include "kernels_sm90/bwd/compute.h"

namespace fa::sm90 {

// One step issues, for the block before, dV and dK, and between them the scores of its own block:
// the exponentials of a block run beside the dK of the one before. Nothing is in flight between two
// steps; P is carried in registers, dS in shared memory. The warpgroups wait for each other nowhere
// but in a ragged block, so that one's products fill the tensor cores while another computes.
template <class Row>
class BwdStep : public BwdCompute<Row> {
  using T = BwdTypes<Row>;
  using Base = BwdCompute<Row>;
  using Score = typename T::ScoreAcc;
  using Base::args_, Base::at_, Base::dk_, Base::dv_, Base::scale_log2_, Base::smem_;
  using Base::lane, Base::warpgroup;

 public:
  FA_DEVICE BwdStep(BwdSmem<Row>& smem, const BwdArgs& args, int thread)
      : Base(smem, args, thread) {}

  FA_DEVICE void begin_head(int) {}

  FA_DEVICE void first(int m) {
    Base::begin();
    Score s;
    issue_scores(s, 0);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(s);
    make_probabilities<Masked>(s, m);
    mbarrier_wait(&smem_.v_full, 0);
    make_ds<Masked>(m);
  }

  template <class Edge>
  FA_DEVICE void next(int m, Edge) {
    Score s;
    issue_dv();
    issue_scores(s, at_ + 1);
    issue_dk();
    cute::warpgroup_wait<1>();  // dV and S are there
    cute::warpgroup_fence_operand(dv_);
    Base::release(smem_.do_slots, at_);
    cute::warpgroup_fence_operand(s);
    ++at_;
    make_probabilities<Edge>(s, m);
    cute::warpgroup_wait<0>();  // dK is there
    cute::warpgroup_fence_operand(dk_);
    Base::release(smem_.q_slots, at_ - 1);
    Base::release(smem_.ds_slots, at_ - 1);
    make_ds<Edge>(m);
  }

  FA_DEVICE void last() {
    issue_dv();
    issue_dk();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(dv_);
    cute::warpgroup_fence_operand(dk_);
  }

 private:
  // Sᵀ of block `at`.
  FA_DEVICE void issue_scores(Score& s, uint32_t at) {
    const int q_slot = Base::template slot<T::kSlots>(at);
    mbarrier_wait(&smem_.q_slots.full[q_slot], Base::template parity<T::kSlots>(at));
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename T::LayoutK{});
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQ{});
    Base::template issue_ss<cute::GMMA::ScaleOut::Zero>(typename T::MmaS{}, k, 0, q, q_slot, s);
  }

  // acc += A · B, A from registers.
  template <class Mma, class B, class Acc>
  FA_DEVICE void issue_rs(Mma mma, typename T::Operand& a, const B& b_tile, int slot,
                          Acc& acc) const {
    auto b = mma.get_slice(warpgroup() * kWarpgroupThreads).partition_fragment_B(b_tile);
    cute::warpgroup_fence_operand(acc);
    cute::warpgroup_fence_operand(a);
    cute::warpgroup_arrive();
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(a); ++i)
      cute::gemm(mma, a(cute::_, cute::_, i), b(cute::_, cute::_, i, slot), acc);
    cute::warpgroup_commit_batch();
  }

  FA_DEVICE void issue_dv() {
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDoT{});
    issue_rs(typename T::MmaDv{}, p_, dout, Base::template slot<T::kSlots>(at_), dv_);
  }
  FA_DEVICE void issue_dk() {
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQt{});
    sync<kWarpgroupThreads>(Barrier::kSlab, warpgroup());  // all four warps have stored dS
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDsT{});
    Base::template issue_ss<cute::GMMA::ScaleOut::One>(typename T::MmaDk{}, ds,
                                                       Base::template slot<T::kDsSlots>(at_), q,
                                                       Base::template slot<T::kSlots>(at_), dk_);
  }

  // P = 2^(score · scale_log2 − LSE), 16-bit. The LSE of a row that is not the sequence's is +inf.
  template <class Edge>
  FA_DEVICE void make_probabilities(Score& s, int m) {
    auto view = acc_view(s);  // (2 keys, tile_m / 4 rows)
    if constexpr (Edge::kMasked) Base::hide(view, m * T::kTileM + acc_first_col(lane()));
    const float* lse = smem_.lse_log2[Base::template slot<T::kSlots>(at_)] + acc_first_col(lane());
    CUTE_UNROLL
    for (int c = 0; c < T::kTileM / 4; c += 2) {
      const float2 l = *reinterpret_cast<const float2*>(lse + acc_col(c));
      float p[2][2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        p[r][0] = exp2_approx(view(r, c) * scale_log2_ - l.x);
        p[r][1] = exp2_approx(view(r, c + 1) * scale_log2_ - l.y);
      }
      pack(p, c);
    }
  }

  // Columns c and c + 1: dV's operand, and for dS 8 more bits than bf16 has. P rounded to bf16
  // would show in dS = P · (…) as three times the error of dK.
  FA_DEVICE void pack(const float (&p)[2][2], int c) {
    auto packed = cute::recast<uint32_t>(p_);
    if constexpr (T::kKeepRest) {
      const uint32_t x0 = bits(p[0][0]), y0 = bits(p[0][1]), x1 = bits(p[1][0]), y1 = bits(p[1][1]);
      packed.data()[c] = bf16_pair(x0, y0);
      packed.data()[c + 1] = bf16_pair(x1, y1);
      rest_[c / 2] = rest_of_four(x0, y0, x1, y1);
    } else {
      packed.data()[c] = pack_pair<T::kConfig.dtype>(p[0][0], p[0][1]);
      packed.data()[c + 1] = pack_pair<T::kConfig.dtype>(p[1][0], p[1][1]);
    }
  }
  FA_DEVICE static uint32_t bits(float p) { return raised(__float_as_uint(p)); }

  // Two values again; `rest`: of their columns, `r`: which row.
  FA_DEVICE static float2 unpack(uint32_t packed, uint32_t rest, int r) {
    if constexpr (!T::kKeepRest) return unpack_pair<T::kConfig.dtype>(packed);
    const BitPair pair = with_rest(packed, rest, r);
    return float2{__uint_as_float(pair.x), __uint_as_float(pair.y)};
  }

  // dS = P · (dP − delta), 16-bit; 0 where P was masked, whatever dP is there.
  template <class Edge>
  FA_DEVICE void make_ds(int m) {
    const int do_slot = Base::template slot<T::kSlots>(at_);
    mbarrier_wait(&smem_.do_slots.full[do_slot], Base::template parity<T::kSlots>(at_));
    if constexpr (Edge::kMasked)
      if (smem_.tile.ragged(m, T::kTileM)) Base::scrub_rows(m);
    const int ds_slot = Base::template slot<T::kDsSlots>(at_);
    mbarrier_wait(&smem_.ds_slots.empty[ds_slot], Base::template parity<T::kDsSlots>(at_) ^ 1);
    Score dp;
    auto v = cute::make_tensor(cute::make_smem_ptr(smem_.v), typename T::LayoutV{});
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDo{});
    Base::template issue_ss<cute::GMMA::ScaleOut::Zero>(typename T::MmaDp{}, v, 0, dout, do_slot,
                                                        dp);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(dp);
    // Always 0, which the compiler cannot know: what is computed from it waits for dP. It would
    // else keep all of P in fp32 beside dP, for which there are no registers.
    const uint32_t zero = (__float_as_uint(dp.data()[0]) & args_.group) >> 31;
    CUTE_UNROLL
    for (int i = 0; i < T::kTileM / 16; ++i) store_ds<Edge>(dp, i, zero);
    fence_async_shared();
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(&smem_.ds_slots.full[ds_slot]);
  }

  // dSᵀ of 16 rows to shared memory, for the products that make dQ and dK. Lane l addresses row
  // l % 16 of a 16 x 16 block, column half l / 16; the swizzle is chunk ^ row % 8.
  template <class Edge>
  FA_DEVICE void store_ds(const Score& dp, int i, uint32_t zero) {
    const auto view = acc_view(dp);  // (2 keys, tile_m / 4 rows)
    const float* delta =
        smem_.delta[Base::template slot<T::kSlots>(at_)] + acc_first_col(lane()) + 16 * i;
    const auto p = cute::recast<uint32_t>(p_);
    uint32_t ds[4];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * half);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int c = 4 * i + 2 * half;
        const float2 prob = unpack(p.data()[c + r], T::kKeepRest ? rest_[c / 2] + zero : 0, r);
        float x = prob.x * (view(r, c) - d.x), y = prob.y * (view(r, c + 1) - d.y);
        if constexpr (Edge::kMasked) {
          x = prob.x == 0.f ? 0.f : x;
          y = prob.y == 0.f ? 0.f : y;
        }
        ds[2 * half + r] = pack_pair<T::kConfig.dtype>(x, y);
      }
    }
    const int row = Base::warp_key() + lane() % 16, half = lane() / 16;
    const int at = Base::template slot<T::kDsSlots>(at_) * T::kTileM + i / 4 * 64;
    store_matrices(shared_address(smem_.ds + at * T::kTileN) + row * 128 +
                       (((i % 4 * 2 + half) ^ (row % 8)) * 16),
                   ds[0], ds[1], ds[2], ds[3]);
  }

  typename T::Operand p_;                            // (MMA, 1, MMA_K): 16-bit
  uint32_t rest_[T::kKeepRest ? T::kTileM / 8 : 1];  // of P: 8 more bits of four values each
};

}  // namespace fa::sm90
