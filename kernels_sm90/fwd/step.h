// SPDX-License-Identifier: BSD-3-Clause
// What does a consumer warpgroup compute for one key block? S(n) overlaps P·V(n+1), the softmax of
// S(n) hides behind it.
#pragma once

#include "kernels_sm90/common/exact_softmax.h"
#include "kernels_sm90/fwd/epilogue.h"
#include "kernels_sm90/fwd/scrub.h"
#include "kernels_sm90/fwd/self_loads.h"

namespace fa::sm90 {

// The last P·V of a tile is not waited for: it runs beside the first Q·Kᵀ of the next tile, and O
// is stored while the other warpgroups compute. A row whose O reuses Q's buffer cannot do that and
// finishes each tile by itself.
template <class Row>
class FwdStep {
  using T = FwdTypes<Row>;
  using E = typename T::E;
  using MmaQk = typename T::MmaQk;
  using MmaPv = typename T::MmaPv;
  static constexpr bool kExact = T::kExact;
  static constexpr bool kFollow = kExact && !T::kWideOutput;
  // A wide O is rescaled just before its next product, behind Q·Kᵀ: dim_v / 2 multiplications a
  // thread.
  static constexpr bool kRescaleLate = T::kWideOutput && !kExact;
  // P·V that runs on while the softmax of the next block begins; none in an ablation's row.
  static constexpr int kBeside = T::kConfig.step == StepKind::kOverlap ? 1 : 0;

 public:
  static constexpr bool kCarry = T::kCarry;

  FA_DEVICE FwdStep(FwdSmem<Row>& smem, const FwdArgs& args, const TensorMap& out_map, int thread)
      : smem_(smem),
        args_(args),
        turns_{__shfl_sync(0xffffffffu, thread / kWarpgroupThreads, 0)},
        epilogue_(args, out_map, thread),
        scale_log2_(args.scale_log2),
        thread_(thread) {
    turns_.begin();
  }

  FA_DEVICE void begin(int tile_slot) {
    tile_slot_ = tile_slot;
    if constexpr (T::kSelfLoad) {
      if (thread_.index() == 0) SelfLoads<Row>{smem_}.begin_tile(tile());
      __syncwarp();
    }
  }

  FA_DEVICE void bring(const TensorMap& q, const TensorMap& k, const TensorMap& v) {
    if (thread_.index() == 0) SelfLoads<Row>{smem_}.bring(q, k, v);
  }

  template <class Score>
  FA_DEVICE void first(int n, Score score) {
    mbarrier_wait(&smem_.q_slots.full[q_at_.slot()], q_at_.parity());
    if (kCarry && pending_slot_ >= 0)
      first_behind(n, score);
    else
      first_alone(n, score);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(o_); ++i) o_(i) = 0.f;
    if constexpr (!T::kIntegerFirst) pack_probabilities();
    if constexpr (kFollow) look_at_signs();
    load_after(n);
    if (tile().scrub_first) scrub(n);
  }

  template <class Edge, class Score>
  FA_DEVICE void next(int n, Edge, Score score) {
    turns_.wait_turn();
    issue_qk();  // S  = Q · K(n)ᵀ
    if constexpr (kRescaleLate) rescale_output();
    issue_pv();  // O += P · V(n+1)
    turns_.pass_turn();
    wait_products<kBeside>();  // S is there
    cute::warpgroup_fence_operand(s_);
    if constexpr (!kFollow) release(smem_.k_slots, k_at_);
    transform_scores(n, score);
    if constexpr (Edge::kMasked) mask_scores(n);
    if constexpr (kFollow) {
      if (positive_)
        follow<true>();
      else
        follow<false>();
    } else {
      int top[2];
      if constexpr (kExact)
        find_max(top);
      else
        update();
      wait_output();
      if constexpr (kExact) {
        update_exact<false>(top);
      } else {
        if constexpr (!kRescaleLate) rescale_output();
        pack_probabilities();
      }
    }
    load_after(n);
  }

  FA_DEVICE void last() {
    if constexpr (!T::kOutputOverQ) release(smem_.q_slots, q_at_);
    if constexpr (T::Mask::kNeeded)
      if (tile().scrub_last) scrub(tile().range.begin);
    if constexpr (kCarry) {
      pending_slot_ = tile_slot_;
    } else {
      turns_.wait_turn();
      finish();
    }
  }

  // Takes one turn and, in it, finishes the tile whose last product is still owed, if there is one.
  FA_DEVICE void settle() {
    turns_.wait_turn();
    if (kCarry && pending_slot_ >= 0)
      finish();
    else
      turns_.pass_turn();
  }

  // A block or a tile without anything for this warpgroup: its slots go back unread. They must be
  // full first, or two rounds of a slot would be released in one.
  FA_DEVICE void pass_block() {
    mbarrier_wait(&smem_.k_slots.full[k_at_.slot()], k_at_.parity());
    __syncwarp();  // one lane speaks for its warp: all of it must have seen the slot full
    release(smem_.k_slots, k_at_);
    mbarrier_wait(&smem_.v_slots.full[v_at_.slot()], v_at_.parity());
    __syncwarp();
    release(smem_.v_slots, v_at_);
  }
  FA_DEVICE void pass_query() {
    mbarrier_wait(&smem_.q_slots.full[q_at_.slot()], q_at_.parity());
    __syncwarp();
    release(smem_.q_slots, q_at_);
  }

  // Every lane of the warp has read the tile's description.
  FA_DEVICE void retire(int tile_slot) const {
    __syncwarp();
    if (thread_.leader()) mbarrier_arrive(&smem_.tile_slots.empty[tile_slot]);
  }

  FA_DEVICE int warpgroup() const { return turns_.warpgroup; }

  FA_DEVICE void end() const {
    turns_.end();
    epilogue_.drain();
  }

 private:
  FA_DEVICE const FwdTile& tile() const { return smem_.tiles[tile_slot_]; }

  template <class Score>
  FA_DEVICE void first_alone(int n, Score score) {
    turns_.wait_turn();
    issue_qk();
    turns_.pass_turn();
    wait_products<0>();
    cute::warpgroup_fence_operand(s_);
    release(smem_.k_slots, k_at_);
    softmax_.reset();
    transform_scores(n, score);
    mask_scores(n);
    if constexpr (T::kIntegerFirst) {
      int top[2];
      find_max(top);
      update_exact<true>(top);
    } else {
      update();
    }
  }

  template <class Score>
  FA_DEVICE void first_behind(int n, Score score) {
    turns_.wait_turn();
    issue_qk();  // S  = Q · K(n)ᵀ of this tile
    if constexpr (kRescaleLate) rescale_output();
    issue_pv();  // O += P · V of the tile before
    turns_.pass_turn();
    wait_products<kBeside>();
    cute::warpgroup_fence_operand(s_);
    release(smem_.k_slots, k_at_);
    OnlineSoftmax<2> done = softmax_;
    softmax_.reset();
    transform_scores(n, score);
    mask_scores(n);
    int top[2];
    if constexpr (T::kIntegerFirst)
      find_max(top);
    else
      update();
    wait_output();
    if constexpr (T::kIntegerFirst) update_exact<true>(top);  // O is still that of the tile before
    store_pending(done);
  }

  // The last product of a tile by itself. The turn is held, and passed on.
  FA_DEVICE void finish() {
    if constexpr (kRescaleLate) rescale_output();
    issue_pv();
    turns_.pass_turn();
    wait_output();
    store_pending(softmax_);
  }

  FA_DEVICE void store_pending(OnlineSoftmax<2>& softmax) {
    const int slot = kCarry ? pending_slot_ : tile_slot_;
    if constexpr (T::kSumsInShared) softmax.sum[0] = row_sum(0), softmax.sum[1] = row_sum(1);
    epilogue_.store(o_, softmax, smem_.tiles[slot], smem_.output_rows(q_at_.slot(), 0));
    if constexpr (T::kOutputOverQ) {
      epilogue_.drain();
      __syncwarp();
      release(smem_.q_slots, q_at_);
    }
    retire(slot);
    pending_slot_ = -1;
  }

  FA_DEVICE void load_after(int n) {
    if constexpr (T::kSelfLoad) {
      if (thread_.index() == 0) SelfLoads<Row>{smem_}.after(tile(), n);
      __syncwarp();
    }
  }

  // Row of the tile that belongs to view row 0 of this thread.
  FA_DEVICE static int first_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

  template <int kPending>
  FA_DEVICE static void wait_products() {
    cute::warpgroup_wait<kPending>();
  }

  // O is there; its product has read P's registers and its slot of V.
  FA_DEVICE void wait_output() {
    wait_products<0>();
    cute::warpgroup_fence_operand(o_);
    release(smem_.v_slots, v_at_);
  }

  // Not before x, which must not be 3e38, is known: the compiler keeps the order of an arrival and
  // a wait for products, but moves arithmetic behind either.
  template <int kSlots, class Cursor>
  FA_DEVICE void release_after(SlotBarriers<kSlots>& slots, Cursor& at, float x) {
    if (thread_.leader() && x != 3e38f) mbarrier_arrive(&slots.empty[at.slot()]);
    at.advance();
  }

  template <int kSlots, class Cursor>
  FA_DEVICE void release(SlotBarriers<kSlots>& slots, Cursor& at) {
    if (thread_.leader()) mbarrier_arrive(&slots.empty[at.slot()]);
    at.advance();
  }

  // Beside a wide O the compiler would keep the descriptors of all steps of Q ahead of the loop, in
  // registers that it does not have.
  FA_DEVICE static int opaque_zero() {
    int zero = 0;
    if constexpr (T::kWideOutput && kExact) asm volatile("mov.u32 %0, 0;" : "=r"(zero));
    return zero;
  }

  FA_DEVICE void issue_qk() {
    mbarrier_wait(&smem_.k_slots.full[k_at_.slot()], k_at_.parity());
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q + opaque_zero()),
                               typename T::LayoutQ{});  // (tile_m, dim_qk, slot)
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k),
                               typename T::LayoutK{});  // (tile_n, dim_qk, stage)
    int warpgroup = turns_.warpgroup;
    // Else the descriptors of a single Q slot, constants, stay in registers that scores need.
    if constexpr (T::kConfig.score == ScoreKind::kAny && T::kQSlots == 1)
      asm volatile("" : "+r"(warpgroup));
    auto slice = MmaQk{}.get_slice(warpgroup * kWarpgroupThreads);
    auto a = slice.partition_fragment_A(q);  // (MMA, 1, MMA_K, slot)
    auto b = slice.partition_fragment_B(k);  // (MMA, 1, MMA_K, stage)
    cute::warpgroup_fence_operand(s_);
    cute::warpgroup_arrive();
    MmaQk mma;
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(a); ++i) {
      cute::gemm(mma, a(cute::_, cute::_, i, q_at_.slot()), b(cute::_, cute::_, i, k_at_.slot()),
                 s_);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  FA_DEVICE void issue_pv() {
    mbarrier_wait(&smem_.v_slots.full[v_at_.slot()], v_at_.parity());
    auto v = cute::make_tensor(cute::make_smem_ptr(smem_.v),
                               typename T::LayoutVt{});  // (dim_v, tile_n, stage)
    auto slice = MmaPv{}.get_slice(turns_.warpgroup * kWarpgroupThreads);
    auto b = slice.partition_fragment_B(v);  // (MMA, 1, MMA_K, stage)
    cute::warpgroup_fence_operand(o_);
    cute::warpgroup_fence_operand(p_);
    cute::warpgroup_arrive();
    MmaPv mma;
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(p_); ++i)
      cute::gemm(mma, p_(cute::_, cute::_, i), b(cute::_, cute::_, i, v_at_.slot()), o_);
    cute::warpgroup_commit_batch();
  }

  FA_DEVICE typename T::Mask mask() const {
    if constexpr (T::Mask::kNeeded)
      return BandBits{{tile().band, tile().seq.k_len}};
    else
      return NoMask{tile().seq.k_len};
  }

  template <class Score>
  FA_DEVICE void transform_scores(int n, Score) {
    if constexpr (Score::kPlain) return;
    auto view = acc_view(s_);  // (2, tile_n / 4)
    const int thread = thread_.index();
    Score::template apply<64>(view, args_.score, tile().score,
                              tile().seq.m_first + first_row(thread),
                              n * T::kTileN + acc_first_col(thread % 32));
  }

  FA_DEVICE void mask_scores(int n) {
    auto view = acc_view(s_);  // (2, tile_n / 4)
    const int thread = thread_.index();
    if constexpr (T::kPacked) {
      for_each_row(view, [&](auto& one, int r) {
        const int row = tile().seq.m_first + first_row(thread) + 8 * r;
        mask().template apply<64>(one, packed_row_by_shift(row, args_.group).position,
                                  n * T::kTileN + acc_first_col(thread % 32));
      });
      return;
    }
    mask().template apply<64>(view, tile().seq.m_first + first_row(thread),
                              n * T::kTileN + acc_first_col(thread % 32));
  }

  FA_DEVICE void update() {
    auto view = acc_view(s_);
    softmax_.update(view, scale_log2_);
  }

  FA_DEVICE void find_max(int (&top)[2]) {
    auto view = acc_view(s_);
    ExactSoftmax::find(softmax_, view, top);
  }

  // Scores to packed probabilities with the maximum of every block. kFirst: there is no sum and no
  // O of this tile yet.
  template <bool kFirst>
  FA_DEVICE void update_exact(const int (&top)[2]) {
    auto view = acc_view(s_);
    if (ExactSoftmax::adopt(softmax_, view, top, scale_log2_) && !kFirst) rescale();
    auto packed = cute::recast<uint32_t>(p_);
    float sums[2];
    ExactSoftmax::probabilities<T::kConfig.dtype>(softmax_, s_, packed, scale_log2_, sums);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) row_sum(r) = kFirst ? sums[r] : row_sum(r) + sums[r];
  }

  // Every maximum of a narrow O. In one run of instructions, so that multiplications of O stand
  // between exponentials: branches, and exponentials that all stand ahead of the wait, cost more
  // than blocks without a larger maximum save.
  template <bool kPositive>
  FA_DEVICE void follow() {
    // Measured: tiles of 192 rows are faster without, those of 128 rows with them.
    constexpr bool kGuarded = !kPositive || !T::kTallUnmasked;
    auto view = acc_view(s_);
    if constexpr (kPositive) {
      int top[2];
      ExactSoftmax::find(softmax_, view, top);
      ExactSoftmax::adopt_positive<kGuarded>(softmax_, top, scale_log2_);
    } else {
      ExactSoftmax::adopt_any(softmax_, view, scale_log2_);
    }
    release_after(smem_.k_slots, k_at_, softmax_.alpha[0] + softmax_.alpha[1]);  // at most 2
    float sums[2] = {0.f, 0.f}, shift[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r)
      shift[r] = kGuarded ? softmax_.shift(r, scale_log2_) : softmax_.max[r] * scale_log2_;
    ExactSoftmax::in_place(s_, scale_log2_, shift, sums);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) softmax_.sum[r] = fmaf(softmax_.sum[r], softmax_.alpha[r], sums[r]);
    wait_output();
    rescale_output();
    pack_probabilities();
    if constexpr (!kPositive) look_at_signs();
  }

  // All warps of a warpgroup must reach the same wait for products, so they go the same way. The
  // vote tells the compiler that a warp does.
  FA_DEVICE void look_at_signs() {
    const bool mine = softmax_.max[0] > 0.f && softmax_.max[1] > 0.f;
    positive_ = __all_sync(0xffffffffu,
                           sync_all<kWarpgroupThreads>(Barrier::kSigns, turns_.warpgroup, mine));
  }

  FA_DEVICE float& row_sum(int r) {
    if constexpr (T::kSumsInShared)
      return smem_.row_sums[r][thread_.index()];
    else
      return softmax_.sum[r];
  }

  // O and the row sums to a new maximum.
  FA_DEVICE void rescale() {
    rescale_output();
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) row_sum(r) *= softmax_.alpha[r];
  }

  FA_DEVICE void rescale_output() {
    auto view = acc_view(o_);  // (2, dim_v / 4)
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) view(r, c) *= softmax_.alpha[r];
    }
  }

  // The accumulator's order of pairs is the A operand's order: no exchange between threads.
  FA_DEVICE void pack_probabilities() {
    auto packed = cute::recast<uint32_t>(p_);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(s_) / 2; ++i)
      packed.data()[i] = pack_pair<T::kConfig.dtype>(s_.data()[2 * i], s_.data()[2 * i + 1]);
  }

  // Nothing is in flight here and no turn is held.
  FA_DEVICE void scrub(int n) {
    mbarrier_wait(&smem_.v_slots.full[v_at_.slot()], v_at_.parity());
    scrub_rows<Row>(smem_.v + v_at_.slot() * T::kTileN * T::kDimV, tile().keys_lo - n * T::kTileN,
                    tile().keys_hi - n * T::kTileN, thread_.index());
    fence_async_shared();
    sync<T::kConsumers * kWarpgroupThreads>(Barrier::kScrub);
  }

  FwdSmem<Row>& smem_;
  const FwdArgs& args_;
  typename T::Turns turns_;
  FwdEpilogue<Row> epilogue_;
  float scale_log2_;
  typename T::Thread thread_;
  int tile_slot_ = 0,
      pending_slot_ = -1;  // pending: the tile whose last P·V and store are still owed
  OnlineSoftmax<2> softmax_;
  bool positive_ = false;  // every row of this warpgroup has a maximum above 0: 0 has two signs
  SlotCursor<T::kQSlots> q_at_{0};
  typename T::template Cursor<T::kWideOutput || T::kConfig.score == ScoreKind::kAny, T::kStages>
      k_at_{0}, v_at_{0};
  typename T::ScoreAcc s_;       // ((2, 2, tile_n / 8), 1, 1)
  typename T::OutputAcc o_;      // ((2, 2, dim_v / 8), 1, 1)
  typename T::Probabilities p_;  // (MMA, 1, MMA_K): 16-bit
};

}  // namespace fa::sm90
