// SPDX-License-Identifier: BSD-3-Clause
// The arithmetic of one key block on mma.sync, and when its loads, products and softmax happen.
#pragma once

#include "kernels_common/device/attend_tile.h"
#include "kernels_common/device/online_softmax.h"
#include "kernels_sm80/fwd/q_loader.h"

namespace fa::sm80 {

FA_DEVICE void load_matrix(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
FA_DEVICE void load_matrix_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Both steps keep the loads of later blocks in flight behind the products.
// serial: S of the whole block, its softmax, its P·V; other warps fill the gaps between the units.
// overlap: scores come in sets of 32 keys. While the tensor cores make the next set's S, this warp
// takes the exponentials of the current one; while they add P·V of the current set, it takes the
// maxima of the next.
template <class Row>
class FwdStep {
  using T = FwdTypes<Row>;
  using Mma = typename T::MmaAtom;
  static constexpr int kRows = 2 * T::kSlabs;  // of this thread
  static constexpr int kSets = T::kTileN / T::kStepKeys;
  static constexpr int kKSteps = T::kDimQk / 16;
  static constexpr int kAhead =
      1;  // operands of K and V that are loaded ahead of the product in progress
  using Scores = typename T::template Accumulator<T::kStepKeys>;
  using Output = typename T::template Accumulator<T::kDimV>;

 public:
  // `smem_*`: addresses of the FwdSmem members.
  FA_DEVICE FwdStep(const CpAsyncKv<Row>& loader, const TileState<typename T::Mask>& state,
                    float scale_log2, int warp, int lane, uint32_t smem_q, uint32_t smem_k,
                    uint32_t smem_v)
      : loader_(loader),
        state_(state),
        scale_log2_(scale_log2),
        q_(smem_q + lane_offset_rows<T::kTileM>(lane) + warp * T::kWarpRows * 128),
        k_(smem_k + lane_offset_keys<T::kTileN>(lane)),
        v_(smem_v + lane_offset_rows<T::kTileN>(lane)) {
    softmax.reset();
    cute::clear(output);
  }

  // The loads that first() expects to be on their way; Q's are the caller's, issued before.
  FA_DEVICE void prologue(int n) {
    loader_.load_k(n, slot(n));
    cute::cp_async_fence();
    if constexpr (T::kStages == 2) {
      loader_.load_v(n, slot(n));
      cute::cp_async_fence();
    }
  }

  FA_DEVICE void first(int n) {
    if constexpr (T::kStages == 1)
      cute::cp_async_wait<0>();
    else
      cute::cp_async_wait<1>();
    __syncthreads();  // Q and K(n) are here
    if constexpr (T::kQInRegisters) load_q();
    if constexpr (!T::kOverlap) {
      serial<true>(n, Masked{});
    } else {
      prefetch_k(n);
      products_qk<false>(scores0_, n, 0, scores1_);
      mask(scores0_, n, 0);
      take_maxima(scores0_);
      swap_v(n);
      overlap_sets(n, Masked{});
    }
  }

  template <class Edge>
  FA_DEVICE void next(int n, Edge edge) {
    if constexpr (!T::kOverlap) {
      cute::cp_async_wait<0>();
      __syncthreads();  // K(n), with two slots V(n) too, is here; nobody reads block n + 1 any more
      serial<false>(n, edge);
    } else {
      cute::cp_async_wait<1>();
      __syncthreads();  // K(n) is here; nobody reads K(n + 1) any more
      prefetch_k(n);
      overlap_set(scores1_, scores0_, n + 1, kSets - 1, n, 0, edge);
      swap_v(n);
      overlap_sets(n, edge);
    }
  }

  FA_DEVICE void last() {
    if constexpr (T::kOverlap) {
      constexpr int kCols = T::kStepKeys / 4;
      float partial[kRows] = {};
      exponentials(scores1_, 0, kCols, partial);
      add_sums(partial);
      rescale_output();
      products_pv<false>(scores1_, last_block_, kSets - 1, scores0_);
    }
  }

  Output output;  // ((2, 2), MMA_M, MMA_N)
  OnlineSoftmax<kRows> softmax;

 private:
  FA_DEVICE static int slot(int n) { return T::kStages == 1 ? 0 : n & 1; }

  // ---- serial ----
  template <bool kFirst, class Edge>
  FA_DEVICE void serial(int n, Edge) {
    if constexpr (T::kStages == 1) {
      loader_.load_v(n, 0);
    } else if (n > loader_.first_block()) {
      loader_.load_k(n - 1, slot(n - 1));
      loader_.load_v(n - 1, slot(n - 1));
    }
    cute::cp_async_fence();
    products_qk<false>(scores0_, n, 0, scores0_);
    if constexpr (T::kStages == 1) {
      cute::cp_async_wait<0>();
      __syncthreads();  // V(n) is here; nobody reads K(n) any more
      if (n > loader_.first_block()) loader_.load_k(n - 1, 0);
      cute::cp_async_fence();
    } else if constexpr (kFirst) {
      cute::cp_async_wait<1>();
      __syncthreads();  // V(n) is here
    }
    if constexpr (Edge::kMasked) mask(scores0_, n, 0);
    take_maxima(scores0_);
    float partial[kRows] = {};
    exponentials(scores0_, 0, T::kStepKeys / 4, partial);
    add_sums(partial);
    rescale_output();
    products_pv<false>(scores0_, n, 0, scores0_);
  }

  // ---- overlap ----
  FA_DEVICE void prefetch_k(int n) {
    if (n > loader_.first_block()) loader_.load_k(n - 1, slot(n - 1));
    cute::cp_async_fence();
  }
  // V(n) is here, nobody reads V(n + 1) any more: its slot takes V(n − 1).
  FA_DEVICE void swap_v(int n) {
    cute::cp_async_wait<1>();
    __syncthreads();
    if (n > loader_.first_block()) loader_.load_v(n - 1, slot(n - 1));
    cute::cp_async_fence();
    last_block_ = n;
  }
  // Sets 1 … of block n; the last set is left with its maxima taken, in scores1_.
  template <class Edge>
  FA_DEVICE void overlap_sets(int n, Edge edge) {
    CUTE_UNROLL
    for (int u = 1; u < kSets; ++u) {
      if (u % 2 == 1)
        overlap_set(scores0_, scores1_, n, u - 1, n, u, edge);
      else
        overlap_set(scores1_, scores0_, n, u - 1, n, u, edge);
    }
  }
  // P·V of set (n, u), whose scores are in `current`, and the scores of set (n_next, u_next).
  template <class Edge>
  FA_DEVICE void overlap_set(Scores& current, Scores& next, int n, int u, int n_next, int u_next,
                             Edge) {
    products_qk<true>(next, n_next, u_next, current);
    if constexpr (Edge::kMasked) mask(next, n_next, u_next);
    rescale_output();
    products_pv<true>(current, n, u, next);
  }

  // ---- parts ----
  FA_DEVICE void mask(Scores& scores, int n, int u) {
    auto view = acc_view(scores);  // (rows, columns)
    const int thread = thread_again(), lane = thread % 32;
    const int row = state_.seq.m_first + thread / 32 * T::kWarpRows + lane / 4;
    state_.mask.template apply<16>(view, row,
                                   n * T::kTileN + u * T::kStepKeys + acc_first_col(lane));
  }

  FA_DEVICE void take_maxima(Scores& scores) {
    auto view = acc_view(scores);
    grown_ = softmax.template update_max<T::kLazyRescale>(view, scale_log2_);
  }

  // Scores of columns [begin, end) to probabilities, in place.
  FA_DEVICE void exponentials(Scores& scores, int begin, int end, float (&partial)[kRows]) {
    auto view = acc_view(scores);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float shift = softmax.shift(r, scale_log2_);
      CUTE_UNROLL
      for (int c = begin; c < end; ++c) {
        view(r, c) = exp2_approx(view(r, c) * scale_log2_ - shift);
        partial[r] += view(r, c);
      }
    }
  }

  FA_DEVICE void add_sums(const float (&partial)[kRows]) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) softmax.sum[r] = softmax.sum[r] * softmax.alpha[r] + partial[r];
  }

  FA_DEVICE void rescale_output() {
    // Most blocks raise no maximum (by much): one vote then saves a multiplication per output.
    if (T::kLazyRescale && !__any_sync(0xffffffffu, grown_)) return;
    auto view = acc_view(output);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) view(r, c) *= softmax.alpha[r];
    }
  }

  FA_DEVICE void load_q() {
    CUTE_UNROLL
    for (int j = 0; j < kKSteps; ++j) load_q_operand(j, q_registers_[j]);
  }
  FA_DEVICE void load_q_operand(int j, uint32_t (&a)[T::kSlabs][4]) const {
    CUTE_UNROLL
    for (int m = 0; m < T::kSlabs; ++m)
      load_matrix(SwizzledTile<T::kTileM>::step_columns(q_, j) + m * 16 * 128, a[m]);
  }

  FA_DEVICE const auto& q_operand(int j, const uint32_t (&a)[2][T::kSlabs][4]) const {
    if constexpr (T::kQInRegisters)
      return q_registers_[j];
    else
      return a[j % 2];
  }

  template <class Acc>
  FA_DEVICE static void multiply(Acc& acc, int m, int n8, const uint32_t (&a)[4], uint32_t b0,
                                 uint32_t b1) {
    float &d0 = acc(cute::make_coord(0, 0), m, n8), &d1 = acc(cute::make_coord(1, 0), m, n8),
          &d2 = acc(cute::make_coord(0, 1), m, n8), &d3 = acc(cute::make_coord(1, 1), m, n8);
    Mma::fma(d0, d1, d2, d3, a[0], a[1], a[2], a[3], b0, b1, d0, d1, d2, d3);
  }

  // scores = Q · K(n)ᵀ for the keys of set u. With kExp the exponentials of `current` go between
  // the products.
  template <bool kExp>
  FA_DEVICE void products_qk(Scores& scores, int n, int u, Scores& current) {
    constexpr int kTiles = T::kStepKeys / 16, kColumns = T::kStepKeys / 4;
    const uint32_t keys = k_ + slot(n) * (T::kTileN * T::kDimQk * 2) + u * T::kStepKeys * 128;
    cute::clear(scores);
    uint32_t a[2][T::kSlabs][4], b[kAhead + 1][4];
    float partial[kRows] = {};
    auto load_b = [&](int t) {
      load_matrix(SwizzledTile<T::kTileN>::step_columns(keys, t / kTiles) + t % kTiles * 16 * 128,
                  b[t % (kAhead + 1)]);
    };
    if constexpr (!T::kQInRegisters) load_q_operand(0, a[0]);
    CUTE_UNROLL
    for (int t = 0; t < kAhead; ++t) load_b(t);
    CUTE_UNROLL
    for (int j = 0; j < kKSteps; ++j) {
      if constexpr (!T::kQInRegisters)
        if (j + 1 < kKSteps) load_q_operand(j + 1, a[(j + 1) % 2]);
      const auto& q = q_operand(j, a);
      CUTE_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        const int t = j * kTiles + i;
        if (t + kAhead < kKSteps * kTiles) load_b(t + kAhead);
        CUTE_UNROLL
        for (int m = 0; m < T::kSlabs; ++m) {
          multiply(scores, m, 2 * i, q[m], b[t % (kAhead + 1)][0], b[t % (kAhead + 1)][1]);
          multiply(scores, m, 2 * i + 1, q[m], b[t % (kAhead + 1)][2], b[t % (kAhead + 1)][3]);
        }
      }
      if constexpr (kExp)
        exponentials(current, j * kColumns / kKSteps, (j + 1) * kColumns / kKSteps, partial);
    }
    if constexpr (kExp) add_sums(partial);
  }

  // output += P · V(n) for the keys of set u. With kMax the maxima of `next` are taken between the
  // products.
  template <bool kMax>
  FA_DEVICE void products_pv(Scores& probabilities, int n, int u, Scores& next) {
    constexpr int kTiles = T::kDimV / 16, kTotal = T::kStepKeys / 16 * kTiles,
                  kColumns = T::kStepKeys / 4;
    const uint32_t values = v_ + slot(n) * (T::kTileN * T::kDimV * 2) + u * T::kStepKeys * 128;
    uint32_t b[kAhead + 1][4], a[T::kSlabs][4];
    float top[kRows];
    auto view = acc_view(next);
    auto load_b = [&](int t) {
      load_matrix_transposed(
          SwizzledTile<T::kTileN>::step_columns(values, t % kTiles) + t / kTiles * 16 * 128,
          b[t % (kAhead + 1)]);
    };
    CUTE_UNROLL
    for (int t = 0; t < kAhead; ++t) load_b(t);
    CUTE_UNROLL
    for (int t = 0; t < kTotal; ++t) {
      const int i = t % kTiles;
      if (t + kAhead < kTotal) load_b(t + kAhead);
      if (i == 0) pack(probabilities, t / kTiles, a);
      CUTE_UNROLL
      for (int m = 0; m < T::kSlabs; ++m) {
        multiply(output, m, 2 * i, a[m], b[t % (kAhead + 1)][0], b[t % (kAhead + 1)][1]);
        multiply(output, m, 2 * i + 1, a[m], b[t % (kAhead + 1)][2], b[t % (kAhead + 1)][3]);
      }
      if constexpr (kMax) {
        static_assert(kTotal >= kColumns);
        if (t < kColumns) {
          CUTE_UNROLL
          for (int r = 0; r < kRows; ++r) top[r] = t == 0 ? view(r, 0) : fmaxf(top[r], view(r, t));
        }
        if (t == kColumns - 1)
          grown_ = softmax.template adopt_max<T::kLazyRescale>(top, scale_log2_);
      }
    }
  }

  // Accumulator layout to A operand: 16 keys are two n8 tiles, whose pairs are already in the right
  // lanes.
  FA_DEVICE static void pack(Scores& p, int key_step, uint32_t (&a)[T::kSlabs][4]) {
    CUTE_UNROLL
    for (int m = 0; m < T::kSlabs; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i)  // rows 0–7, 8–15 of keys 0–7, then of keys 8–15
        a[m][i] = pack_pair<T::kType>(p(cute::make_coord(0, i % 2), m, 2 * key_step + i / 2),
                                      p(cute::make_coord(1, i % 2), m, 2 * key_step + i / 2));
    }
  }

  CpAsyncKv<Row> loader_;
  const TileState<typename T::Mask>& state_;  // in shared memory
  float scale_log2_;
  uint32_t q_, k_, v_;  // lane addresses of the ldmatrix operands
  int last_block_ = 0;
  bool grown_ = false;
  Scores scores0_, scores1_;  // ((2, 2), MMA_M, MMA_N)
  uint32_t q_registers_[T::kQInRegisters ? kKSteps : 1][T::kSlabs][4];
};

}  // namespace fa::sm80
