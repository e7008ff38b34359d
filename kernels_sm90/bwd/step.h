// SPDX-License-Identifier: BSD-3-Clause
// What does a compute warpgroup do for one block of query rows? It owns 64 keys and their dV and
// dK.
#pragma once

#include "kernels_common/device/acc_view.h"
#include "kernels_common/device/attend_tile.h"
#include "kernels_common/device/online_softmax.h"
#include "kernels_sm90/bwd/smem.h"
#include "kernels_sm90/common/stmatrix.h"

namespace fa::sm90 {

// One step issues, for the block before, dV and dK, and between them the scores of its own block:
// the exponentials of a block run beside the dK of the one before. Nothing
// is in flight between two steps; P and dS are carried in registers. The warpgroups wait for each
// other nowhere but in a ragged block, so that one's products fill the tensor cores while another
// computes.
template <class Row>
class BwdStep {
  using T = BwdTypes<Row>;
  using E = typename T::E;
  using Score = typename T::ScoreAcc;

 public:
  FA_DEVICE BwdStep(BwdSmem<Row>& smem, const BwdArgs& args, int thread)
      : smem_(smem), scale_log2_(args.scale_log2), group_(args.group) {
    write_visible_rows(thread);
  }

  FA_DEVICE void first(int m) {
    mbarrier_wait(&smem_.k_full, 0);
    if (smem_.tile.scrub_keys) scrub_keys();
    CUTE_UNROLL
    for (int i = 0; i < cute::size(dv_); ++i) dv_(i) = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(dk_); ++i) dk_(i) = 0.f;
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
    issue_scores(s, at_ + 1);  // of this block
    issue_dk();
    cute::warpgroup_wait<1>();  // dV and S are there
    cute::warpgroup_fence_operand(dv_);
    release(smem_.do_slots, at_);
    cute::warpgroup_fence_operand(s);
    ++at_;
    make_probabilities<Edge>(s, m);
    cute::warpgroup_wait<0>();  // dK is there
    cute::warpgroup_fence_operand(dk_);
    release(smem_.q_slots, at_ - 1);
    release(smem_.ds_slots, at_ - 1);
    make_ds<Edge>(m);
  }

  FA_DEVICE void last() {
    issue_dv();
    issue_dk();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(dv_);
    cute::warpgroup_fence_operand(dk_);
  }

  FA_DEVICE typename T::DvAcc& dv() { return dv_; }
  FA_DEVICE typename T::DkAcc& dk() { return dk_; }

 private:
  // Read where they are needed: registers are what is short.
  FA_DEVICE static int thread() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index - kFirstCompute * kWarpgroupThreads;
  }
  FA_DEVICE static int lane() { return thread() % 32; }
  FA_DEVICE static int warpgroup() {
    return __shfl_sync(0xffffffffu, thread() / kWarpgroupThreads, 0);
  }
  // First key of the thread in its tile.
  FA_DEVICE static int first_key() { return thread() / 32 * 16 + lane() / 4; }

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

  // Every warp for its own keys.
  FA_DEVICE void write_visible_rows(int thread) {
    const BwdTile& tile = smem_.tile;
    const int key = thread / 32 * 16 + thread % 16, j = tile.seq.n_first + key;
    const int lo = max_of(0, tile.band.first_row(j));
    const int hi = j >= tile.seq.k_len
                       ? lo
                       : min_of(tile.seq.q_len, min_of(tile.band.last_row(j), kUnlimited - 1) + 1);
    if (thread % 32 < 16) smem_.visible_rows[key] = int2{lo, hi};
    __syncwarp();
  }

  // Sᵀ of block `at`.
  FA_DEVICE void issue_scores(Score& s, uint32_t at) {
    const int q_slot = slot<T::kSlots>(at);
    mbarrier_wait(&smem_.q_slots.full[q_slot], parity<T::kSlots>(at));
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename T::LayoutK{});
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQ{});
    issue_ss<cute::GMMA::ScaleOut::Zero>(typename T::MmaS{}, k, 0, q, q_slot, s);
  }

  // acc (+)= A · B, from shared memory.
  template <cute::GMMA::ScaleOut kScale, class Mma, class A, class B, class Acc>
  FA_DEVICE void issue_ss(Mma mma, const A& a_tile, int a_slot, const B& b_tile, int b_slot,
                          Acc& acc) const {
    auto slice = mma.get_slice(warpgroup() * kWarpgroupThreads);
    auto a = slice.partition_fragment_A(a_tile);  // (MMA, 1, MMA_K, slot)
    auto b = slice.partition_fragment_B(b_tile);  // (MMA, 1, MMA_K, slot)
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
    issue_rs(typename T::MmaDv{}, p_, dout, slot<T::kSlots>(at_), dv_);
  }
  FA_DEVICE void issue_dk() {
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename T::LayoutQt{});
    sync<kWarpgroupThreads>(Barrier::kSlab, warpgroup());  // all four warps have stored dS
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDsT{});
    issue_ss<cute::GMMA::ScaleOut::One>(typename T::MmaDk{}, ds, slot<T::kDsSlots>(at_), q,
                                        slot<T::kSlots>(at_), dk_);
  }

  // P = 2^(score · scale_log2 − LSE), 16-bit. The LSE of a row that is not the sequence's is +inf.
  template <class Edge>
  FA_DEVICE void make_probabilities(Score& s, int m) {
    auto view = acc_view(s);  // (2 keys, tile_m / 4 rows)
    if constexpr (Edge::kMasked) hide(view, m * T::kTileM + acc_first_col(lane()));
    const float* lse = smem_.lse_log2[slot<T::kSlots>(at_)] + acc_first_col(lane());
    auto packed = cute::recast<uint32_t>(p_);
    CUTE_UNROLL
    for (int c = 0; c < T::kTileM / 4; c += 2) {
      const float2 l = *reinterpret_cast<const float2*>(lse + acc_col(c));
      uint32_t rest[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float x = exp2_approx(view(r, c) * scale_log2_ - l.x);
        const float y = exp2_approx(view(r, c + 1) * scale_log2_ - l.y);
        packed.data()[c + r] = pack_pair<T::kConfig.dtype>(x, y);
        if constexpr (T::kKeepRest) rest[r] = rest_of(packed.data()[c + r], x, y);
      }
      if constexpr (T::kKeepRest) rest_[c / 2] = __byte_perm(rest[0], rest[1], 0x5410);
    }
  }

  // Rounding P to bf16 would show in dS = P · (…) as three times the error of dK. The next 8 bits
  // of every value are kept aside: a signed number to add to the bits of the fp32 value, above its
  // last byte. Result: in bytes 0 and 1.
  FA_DEVICE static uint32_t rest_of(uint32_t packed, float x, float y) {
    const uint32_t low = __float_as_uint(x) - (packed << 16);
    const uint32_t high = __float_as_uint(y) - (packed & 0xffff0000u);
    return __byte_perm(low, high, 0x0051);
  }
  // Bytes by number; 4 to 7: zero; 8 + b: the sign of byte b. __byte_perm knows no signs.
  FA_DEVICE static uint32_t bytes(uint32_t x, uint32_t selector) {
    uint32_t y;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(selector));
    return y;
  }
  // The two values again; `r`: which half of `rest`.
  FA_DEVICE static float2 with_rest(uint32_t packed, uint32_t rest, int r, uint32_t zero) {
    const uint32_t low = bytes(rest, (r == 0 ? 0x8804 : 0xaa24) + zero);
    const uint32_t high = bytes(rest, (r == 0 ? 0x9914 : 0xbb34) + zero);
    return float2{__uint_as_float((packed << 16) + low),
                  __uint_as_float(bytes(packed, 0x3244 + zero) + high)};
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

  // dS = P · (dP − delta), 16-bit; 0 where P was masked, whatever dP is there.
  template <class Edge>
  FA_DEVICE void make_ds(int m) {
    const int do_slot = slot<T::kSlots>(at_);
    mbarrier_wait(&smem_.do_slots.full[do_slot], parity<T::kSlots>(at_));
    if constexpr (Edge::kMasked)
      if (smem_.tile.ragged(m, T::kTileM)) scrub_rows(m);
    const int ds_slot = slot<T::kDsSlots>(at_);
    mbarrier_wait(&smem_.ds_slots.empty[ds_slot], parity<T::kDsSlots>(at_) ^ 1);
    Score dp;
    auto v = cute::make_tensor(cute::make_smem_ptr(smem_.v), typename T::LayoutV{});
    auto dout = cute::make_tensor(cute::make_smem_ptr(smem_.dout), typename T::LayoutDo{});
    issue_ss<cute::GMMA::ScaleOut::Zero>(typename T::MmaDp{}, v, 0, dout, do_slot, dp);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(dp);
    // Always 0, which the compiler cannot know: what is computed from it waits for dP. It would
    // else keep all of P in fp32 beside dP, for which there are no registers.
    const uint32_t zero = (__float_as_uint(dp.data()[0]) & group_) >> 31;
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
    const float* delta = smem_.delta[slot<T::kSlots>(at_)] + acc_first_col(lane()) + 16 * i;
    const auto p = cute::recast<uint32_t>(p_);
    uint32_t ds[4];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * half);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int c = 4 * i + 2 * half;
        const float2 prob = T::kKeepRest ? with_rest(p.data()[c + r], rest_[c / 2], r, zero)
                                         : unpack_pair<T::kConfig.dtype>(p.data()[c + r]);
        float x = prob.x * (view(r, c) - d.x), y = prob.y * (view(r, c + 1) - d.y);
        if constexpr (Edge::kMasked) {
          x = prob.x == 0.f ? 0.f : x;
          y = prob.y == 0.f ? 0.f : y;
        }
        ds[2 * half + r] = pack_pair<T::kConfig.dtype>(x, y);
      }
    }
    const int row = thread() / 32 * 16 + lane() % 16, half = lane() / 16;
    const int at = slot<T::kDsSlots>(at_) * T::kTileM + i / 4 * 64;
    store_matrices(shared_address(smem_.ds + at * T::kTileN) + row * 128 +
                       (((i % 4 * 2 + half) ^ (row % 8)) * 16),
                   ds[0], ds[1], ds[2], ds[3]);
  }

  // Zeros the rows of a tile outside [first, end); a row is 128 bytes of each panel, whatever the
  // swizzle.
  template <int kRows, int kDim>
  FA_DEVICE void clear_rows(E* tile, int first, int end) const {
    for (int row = thread() / 8; row < kRows; row += T::kComputeThreads / 8) {
      if (row >= first && row < end) continue;
      for (int panel = 0; panel < kDim / T::kPanel; ++panel)
        reinterpret_cast<uint4*>(tile + (panel * kRows + row) * T::kPanel)[thread() % 8] =
            uint4{0, 0, 0, 0};
    }
  }
  // Nothing is in flight here, in any compute warpgroup, that reads these rows.
  FA_DEVICE void scrub_keys() const {
    const BwdTile& tile = smem_.tile;
    clear_rows<T::kTileN, T::kDimQk>(smem_.k, tile.keys_lo - tile.seq.n_first,
                                     tile.keys_hi - tile.seq.n_first);
    fence_async_shared();
    sync<T::kComputeThreads>(Barrier::kScrub);
  }
  FA_DEVICE void scrub_rows(int m) const {
    const int first = smem_.tile.rows_lo - m * T::kTileM, end = smem_.tile.rows_hi - m * T::kTileM;
    clear_rows<T::kTileM, T::kDimQk>(smem_.q + slot<T::kSlots>(at_) * T::kTileM * T::kDimQk, first,
                                     end);
    clear_rows<T::kTileM, T::kDimV>(smem_.dout + slot<T::kSlots>(at_) * T::kTileM * T::kDimV, first,
                                    end);
    fence_async_shared();
    sync<T::kComputeThreads>(Barrier::kScrub);
  }

  BwdSmem<Row>& smem_;
  float scale_log2_;
  int group_;
  uint32_t at_ = 0;        // blocks before the one whose P and dS are held
  typename T::DvAcc dv_;   // ((2, 2, dim_v / 8), 1, 1)
  typename T::DkAcc dk_;   // ((2, 2, dim_qk / 8), 1, 1)
  typename T::Operand p_;  // (MMA, 1, MMA_K): 16-bit
  uint32_t rest_[T::kKeepRest ? T::kTileM / 8 : 1];  // of P: 8 more bits of four values each
};

}  // namespace fa::sm90
