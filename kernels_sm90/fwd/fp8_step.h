// SPDX-License-Identifier: BSD-3-Clause
// What does a consumer warpgroup compute for one key block of an e4m3 call? Q·Kᵀ, softmax, P·V one
// after the other; the products of the other warpgroups run meanwhile.
#pragma once

#include "kernels_sm90/common/exact_softmax.h"
#include "kernels_sm90/fwd/epilogue.h"

namespace fa::sm90 {

// e4m3 products keep about 14 bits of their sums, so that a long sum drifts. P·V of a block starts
// at 0 and is added to O in fp32, which costs nothing: the rescaling of O becomes a fused multiply
// and add. Its registers are those that held S; that is why the products of two blocks do not
// overlap in one warpgroup.
template <class Row>
class Fp8Step {
  using T = FwdTypes<Row>;
  using MmaQk = typename T::MmaQk;
  using MmaPart = typename T::MmaPvPart;

 public:
  static constexpr bool kFirstIsNext = true;  // for attend_tile()
  static constexpr bool kFirstMayBeWhole = true;
  static constexpr bool kCarry = false;

  FA_DEVICE Fp8Step(FwdSmem<Row>& smem, const FwdArgs& args, const TensorMap& out_map, int thread)
      : smem_(smem),
        args_(args),
        turns_{__shfl_sync(0xffffffffu, thread / kWarpgroupThreads, 0)},
        epilogue_(args, out_map, thread),
        thread_(thread) {
    turns_.begin();
  }

  // A turn covers P·V of a block and Q·Kᵀ of the next: blocks + 1 turns a tile.
  FA_DEVICE void begin(int tile_slot) {
    tile_slot_ = tile_slot;
    softmax_.reset();
    CUTE_UNROLL
    for (int i = 0; i < cute::size(o_); ++i) o_(i) = 0.f;
    mbarrier_wait(&smem_.q_slots.full[q_at_.slot()], q_at_.parity());
    turns_.wait_turn();
  }

  template <class Edge, class Score>
  FA_DEVICE void next(int n, Edge, Score score) {
    typename T::ScoreAcc s;       // ((2, 2, tile_n / 8), 1, 1)
    typename T::Probabilities p;  // (MMA, 1, MMA_K): e4m3
    issue_qk(s);
    turns_.pass_turn();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(s);
    release(smem_.k_slots, k_at_);
    // The next tile's Q comes while this one ends.
    if (T::kQSlots == 1 && n == tile().own[warpgroup()].begin) release(smem_.q_slots, q_at_);
    auto view = acc_view(s);  // (2, tile_n / 4)
    if constexpr (T::kBlockDescales) scale_scores(view, n);
    transform_scores(view, n, score);
    if constexpr (Edge::kMasked) mask_scores(view, n);
    make_probabilities(view);
    pack_probabilities(s, p);
    const float v_factor = value_factor(n);
    // Before the turn: the compiler moves the turn's barrier up to the last branch, which without
    // this wait would be ahead of the exponentials.
    mbarrier_wait(&smem_.v_slots.full[v_at_.slot()], v_at_.parity());
    turns_.wait_turn();
    multiply_add(p, v_factor);
    release(smem_.v_slots, v_at_);
  }

  FA_DEVICE void last() {
    turns_.pass_turn();
    if constexpr (T::kQSlots > 1) release(smem_.q_slots, q_at_);
    epilogue_.store(o_, softmax_, tile(), smem_.output_rows(0, 0));
    retire(tile_slot_);
  }

  FA_DEVICE void settle() {
    turns_.wait_turn();
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

  template <int kSlots, class Cursor>
  FA_DEVICE void release(SlotBarriers<kSlots>& slots, Cursor& at) {
    if (thread_.leader()) mbarrier_arrive(&slots.empty[at.slot()]);
    at.advance();
  }

  template <class Scores>
  FA_DEVICE void issue_qk(Scores& s) {
    mbarrier_wait(&smem_.k_slots.full[k_at_.slot()], k_at_.parity());
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q),
                               typename T::LayoutQ{});  // (tile_m, dim_qk, slot)
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k),
                               typename T::LayoutK{});  // (tile_n, dim_qk, stage)
    auto slice = MmaQk{}.get_slice(turns_.warpgroup * kWarpgroupThreads);
    auto a = slice.partition_fragment_A(q);  // (MMA, 1, MMA_K, slot)
    auto b = slice.partition_fragment_B(k);  // (MMA, 1, MMA_K, stage)
    cute::warpgroup_fence_operand(s);
    cute::warpgroup_arrive();
    MmaQk mma;
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(a); ++i) {
      cute::gemm(mma, a(cute::_, cute::_, i, q_at_.slot()), b(cute::_, cute::_, i, k_at_.slot()),
                 s);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  // Scores to probabilities, in place: 2^kProbabilityShift where a row has its maximum.
  template <class View>
  FA_DEVICE void make_probabilities(View& view) {
    const float scale_log2 = tile().scale_log2;
    int top[2];
    ExactSoftmax::find(softmax_, view, top);
    float m[2];
    ExactSoftmax::look_again(softmax_, view, top, m);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      softmax_.alpha[r] =
          softmax_.max[r] == -INFINITY ? 0.f : exp2_approx((softmax_.max[r] - m[r]) * scale_log2);
      softmax_.max[r] = m[r];
    }
    float shift[2], sums[2] = {0.f, 0.f};
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) shift[r] = softmax_.shift(r, scale_log2) - T::kProbabilityShift;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(view) / 2; ++i) {  // pairs of columns, rows in alternation
      float &a = view.data()[2 * i], &b = view.data()[2 * i + 1];
      a = exp2_approx(a * scale_log2 - shift[i % 2]);
      b = exp2_approx(b * scale_log2 - shift[i % 2]);
      sums[i % 2] += a + b;
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) softmax_.sum[r] = softmax_.sum[r] * softmax_.alpha[r] + sums[r];
  }

  // O = alpha · O + v_factor · P · V, part after part; one is added while the next is computed.
  template <class Packed>
  FA_DEVICE void multiply_add(Packed& p, float v_factor) {
    constexpr int kParts = T::kPvParts;
    typename T::PartAcc sums[kParts > 1 ? 2 : 1];  // ((2, 2, kPvDim / 8), 1, 1)
    cute::warpgroup_fence_operand(p);
    issue_pv(p, sums[0], 0);
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      if (part + 1 < kParts) {
        issue_pv(p, sums[(part + 1) % 2], part + 1);
        cute::warpgroup_wait<1>();
      } else {
        cute::warpgroup_wait<0>();
      }
      add_part(sums[part % 2], part, v_factor);
    }
  }

  // sum = P · V for columns [part, part + 1) * kPvDim.
  template <class Packed, class Sum>
  FA_DEVICE void issue_pv(const Packed& p, Sum& sum, int part) {
    auto v = cute::make_tensor(cute::make_smem_ptr(smem_.v),
                               typename T::LayoutVt{});  // (dim_v, keys, stage)
    auto columns = cute::local_tile(
        v, cute::Shape<cute::Int<T::kPvDim>, cute::Int<T::kLoadedKeys>, cute::Int<T::kStages>>{},
        cute::make_coord(part, 0, 0));
    auto slice = MmaPart{}.get_slice(turns_.warpgroup * kWarpgroupThreads);
    auto b = slice.partition_fragment_B(columns);  // (MMA, 1, MMA_K, stage)
    cute::warpgroup_fence_operand(sum);
    cute::warpgroup_arrive();
    MmaPart mma;
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(p); ++i) {
      cute::gemm(mma, p(cute::_, cute::_, i), b(cute::_, cute::_, i, v_at_.slot()), sum);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  template <class Sum>
  FA_DEVICE void add_part(Sum& sum, int part, float v_factor) {
    cute::warpgroup_fence_operand(sum);
    constexpr int kSize = T::kPvDim / 2;
    if (T::kBlockDescales && v_factor != 1.f) {
      CUTE_UNROLL
      for (int i = 0; i < kSize; ++i) sum.data()[i] *= v_factor;
    }
    CUTE_UNROLL
    for (int i = 0; i < kSize; ++i) {  // element i is of row i / 2 % 2
      float& o = o_.data()[part * kSize + i];
      o = o * softmax_.alpha[i / 2 % 2] + sum.data()[i];
    }
  }

  FA_DEVICE typename T::Mask mask() const {
    if constexpr (T::Mask::kNeeded)
      return BandBits{{tile().band, tile().seq.k_len}};
    else
      return NoMask{tile().seq.k_len};
  }

  // Row of the tile that belongs to view row 0 of this thread.
  FA_DEVICE int first_row() const {
    const int thread = thread_.index();
    return tile().seq.m_first + thread / 32 * 16 + thread % 32 / 4;
  }
  FA_DEVICE int first_key(int n) const {
    return n * T::kTileN + acc_first_col(thread_.index() % 32);
  }

  // Descales per block. One factor of k and v serves a tile's keys: no other calls come here.
  template <class View>
  FA_DEVICE void scale_scores(View& view, int n) const {
    if (args_.q_descale.block == 0 && args_.k_descale.block == 0) return;
    const FwdTile& t = tile();
    const int b = t.seq.index;
    const float k = block_descale_of(args_.k_descale, b, t.head_k, n * T::kTileN);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = min_of(first_row() + 8 * r, t.seq.q_len - 1);
      const float factor = k * block_descale_of(args_.q_descale, b, t.head_q, row);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) view(r, c) *= factor;
    }
  }

  FA_DEVICE float value_factor(int n) const {
    if constexpr (!T::kBlockDescales) return 1.f;
    const FwdTile& t = tile();
    return block_descale_of(args_.v_descale, t.seq.index, t.head_k, n * T::kTileN);
  }

  template <class View, class Score>
  FA_DEVICE void transform_scores(View& view, int n, Score) {
    if constexpr (Score::kPlain) return;
    ScoreArgs score = args_.score;
    score.inner *= tile().qk_descale;
    Score::template apply<64>(view, score, tile().score, first_row(), first_key(n));
  }

  template <class View>
  FA_DEVICE void mask_scores(View& view, int n) {
    mask().template apply<64>(view, first_row(), first_key(n));
  }

  // A thread's columns of 32 keys, in the order in which V's keys stand (value_keys.h): no exchange
  // between threads. Element 4 j + 2 r + c of the accumulator is row r, column c of 8 keys j.
  template <class Scores, class Packed>
  FA_DEVICE static void pack_probabilities(const Scores& s, Packed& p) {
    auto words = cute::recast<uint32_t>(p);
    CUTE_UNROLL
    for (int half = 0; half < cute::size(s) / 8; ++half) {  // 16 keys
      const float* f = s.data() + 8 * half;
      words.data()[2 * half] = pack_e4m3(f[0], f[1], f[4], f[5]);      // row 0
      words.data()[2 * half + 1] = pack_e4m3(f[2], f[3], f[6], f[7]);  // row 8
    }
  }

  FwdSmem<Row>& smem_;
  const FwdArgs& args_;
  typename T::Turns turns_;
  FwdEpilogue<Row> epilogue_;
  typename T::Thread thread_;
  int tile_slot_ = 0;
  OnlineSoftmax<2> softmax_;
  SlotCursor<T::kQSlots> q_at_{0};
  typename T::template Cursor<T::kWideOutput, T::kStages> k_at_{0}, v_at_{0};
  typename T::OutputAcc o_;  // ((2, 2, dim_v / 8), 1, 1)
};

}  // namespace fa::sm90
