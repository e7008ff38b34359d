// SPDX-License-Identifier: BSD-3-Clause
// The arithmetic of one key block on mma.sync, and when its loads, products and softmax happen.
#pragma once

#include "kernels_common/device/attend_tile.h"
#include "kernels_common/device/online_softmax.h"
#include "kernels_common/device/philox.h"
#include "kernels_common/device/score.h"
#include "kernels_sm80/common/mma.h"
#include "kernels_sm80/fwd/q_loader.h"

namespace fa::sm80 {

// All threads of the block; warps may come from different places in the program.
FA_DEVICE void block_barrier() { asm volatile("barrier.sync 0;" ::: "memory"); }

// One block at a time: S = Q·Kᵀ, its softmax, O += P·V. The loads of later blocks are in flight
// behind the products; other warps fill the gaps that one warp leaves between the units.
// Measured on the H200: a step that takes the exponentials of 32 keys between the products of the
// next 32 reads Q twice as often from shared memory and is 5 % slower at D 128, 15 % at D 64.
template <class Row>
class FwdStep {
  using T = FwdTypes<Row>;
  static constexpr int kRows = 2 * T::kSlabs;  // of this thread
  static constexpr int kKSteps = T::kDimQk / 16;
  static constexpr int kBlocks = T::kTileN / 16;  // of keys, each one operand of P · V
  // Registers of scores and O that leave room for two ways of a tanh.
  static constexpr bool kVoted = kRows * (T::kTileN + T::kDimV) / 4 < 192;
  static constexpr int kAhead = 1;  // operands of K and V loaded ahead of the product in progress
  using Scores = Accumulator<T::kSlabs, T::kTileN>;
  using Output = Accumulator<T::kSlabs, T::kDimV>;
  using Weights = uint32_t[kBlocks][T::kSlabs][4];  // packed: operands of P · V

 public:
  static constexpr bool kFirstIsNext = true;  // for attend_tile()

  // `smem_*`: addresses of the FwdSmem members.
  FA_DEVICE FwdStep(const FwdArgs& args, const CpAsyncKv<Row>& loader,
                    const TileState<typename T::Mask>& state, uint32_t smem_q, uint32_t smem_k,
                    uint32_t smem_v)
      : args_(args),
        loader_(loader),
        state_(state),
        scale_log2_(args.scale_log2),
        rescale_limit_(args.rescale_limit),
        smem_q_(smem_q),
        smem_k_(smem_k),
        smem_v_(smem_v) {
    softmax.reset();
    cute::clear(output);
  }

  // The loads that the first next() waits for; Q's are the caller's, issued before.
  FA_DEVICE void prologue(int n) {
    loader_.load_k(n, slot(n));
    cute::cp_async_fence();
    if constexpr (T::kStages == 2) {
      loader_.load_v(n, slot(n));
      cute::cp_async_fence();
    }
  }

  template <class Edge, class Score>
  FA_DEVICE void next(int n, Edge, Score) {
    cute::cp_async_wait<0>();
    // K(n), with two slots V(n) too, is here; nobody reads block n + 1 any more.
    if constexpr (T::kPacked)
      __syncwarp();
    else
      __syncthreads();
    if constexpr (T::kStages == 1) {
      loader_.load_v(n, 0);
    } else if (n > loader_.first_block()) {
      loader_.load_k(n - 1, slot(n - 1));
      loader_.load_v(n - 1, slot(n - 1));
    }
    cute::cp_async_fence();
    if constexpr (Edge::kMasked && T::Mask::kNeeded && T::kSkipUnseen) {
      if (!warp_sees(n)) {  // this warp only helps to load
        between_products(n);
        return;
      }
    }
    products_qk(n);
    between_products(n);
    if constexpr (T::kConfig.score == ScoreKind::kAny) score(n);
    if constexpr (Edge::kMasked) mask(n);
    softmax_of_block();
    if constexpr (T::kConfig.dropout) {
      Weights weights;
      pack_and_drop(n, weights);
      products_pv(n, [&](int key_step, uint32_t (&a)[T::kSlabs][4]) {
        CUTE_UNROLL
        for (int m = 0; m < T::kSlabs; ++m) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) a[m][i] = weights[key_step][m][i];
        }
      });
    } else {
      products_pv(n, [&](int key_step, uint32_t (&a)[T::kSlabs][4]) { pack(key_step, a); });
    }
  }

  FA_DEVICE void last() {}

  Output output;  // ((2, 2), MMA_M, MMA_N)
  OnlineSoftmax<kRows> softmax;
  uint32_t dropout_memory;  // address of the warp's DropoutMemory

 private:
  FA_DEVICE static int slot(int n) { return T::kStages == 1 ? 0 : n & 1; }

  // Between the products of block n.
  FA_DEVICE void between_products(int n) {
    if constexpr (T::kStages == 1) {
      cute::cp_async_wait<0>();
      // V(n) is here; nobody reads K(n) any more.
      if constexpr (T::kPacked)
        __syncwarp();
      else
        block_barrier();
      if (n > loader_.first_block()) loader_.load_k(n - 1, 0);
      cute::cp_async_fence();
    }
  }

  // Uniform in the warp: does one of its rows that take part see a key of block n?
  FA_DEVICE bool warp_sees(int n) const {
    const SeqInfo& seq = state_.seq;
    const Band band = state_.mask.band;
    const int first = seq.m_first + thread_again() / 32 * T::kWarpRows;
    const int last = min_of(first + T::kWarpRows, seq.q_len) - 1;
    return __any_sync(0xffffffffu, first <= last && n * T::kTileN <= band.last_key(last) &&
                                       band.first_key(first) < (n + 1) * T::kTileN);
  }

  // Products to scores. Which policy is the same for every block: one branch each costs little
  // here, where no product is in flight.
  FA_DEVICE void score(int n) {
    auto view = acc_view(scores_);  // (rows, columns)
    const int thread = thread_in_team<T>(), lane = thread % 32;
    const int row = first_row(thread) + lane / 4, col = n * T::kTileN + acc_first_col(lane);
    with_score<T::kConfig.score>(args_.score, [&](auto policy) {
      if constexpr (T::kPacked && !policy.kPlain) {
        for_each_packed_row(view, row, [&](auto& one, int position, int head) {
          const SeqInfo& seq = state_.seq;
          const ScoreTile tile = score_tile(args_.score, seq.index, head, seq.q_len, seq.k_len);
          policy.template apply<16, kVoted>(one, args_.score, tile, position, col);
        });
      } else {
        policy.template apply<16, kVoted>(view, args_.score, state_.score, row, col);
      }
    });
  }

  // After the softmax: its sums, and so LSE, are those of all weights. A weight that is dropped is
  // cleared where two lie packed.
  FA_DEVICE void pack_and_drop(int n, Weights& weights) {
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) pack(b, weights[b]);
    if (args_.dropout.seed_offset == nullptr) return;
    const int thread = thread_in_team<T>(), lane = thread % 32;
    uint32_t kept[kRows * kBlocks];
    kept_weights<kRows, kBlocks, 16>(dropout_memory, args_.dropout.threshold, first_row(thread),
                                     n * T::kTileN, lane, kept);
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      CUTE_UNROLL
      for (int m = 0; m < T::kSlabs; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {  // see pack()
          const uint32_t word = kept[(2 * m + i % 2) * kBlocks + b];
          weights[b][m][i] &= i / 2 == 0 ? kept_pair<0>(word) : kept_pair<1>(word);
        }
      }
    }
  }

  // Calls run(one, position, head) for each row of a view: a view of that row alone, its position
  // and query head. `row`: the packed row of the view's row 0.
  template <class View, class Run>
  FA_DEVICE void for_each_packed_row(View& view, int row, Run run) const {
    for_each_row(view, [&](auto& one, int r) {
      const PackedRow at = packed_row(row + acc_row(r, 16), args_.group);
      run(one, at.position, state_.head_q + at.head);
    });
  }

  // Of the warp, counted from the sequence's first.
  FA_DEVICE int first_row(int thread) const {
    return state_.seq.m_first + thread / 32 * T::kWarpRows;
  }

  FA_DEVICE void mask(int n) {
    auto view = acc_view(scores_);  // (rows, columns)
    const int thread = thread_in_team<T>(), lane = thread % 32;
    const int row = first_row(thread) + lane / 4;
    const int col = n * T::kTileN + acc_first_col(lane);
    if constexpr (T::kPacked)
      for_each_packed_row(view, row, [&](auto& one, int position, int) {
        state_.mask.template apply<16>(one, position, col);
      });
    else
      state_.mask.template apply<16>(view, row, col);
  }

  // Scores to probabilities, in place; O and the sums to the new maxima.
  FA_DEVICE void softmax_of_block() {
    auto view = acc_view(scores_);  // (rows, columns)
    const bool grown =
        softmax.template update_max<T::kLazyRescale>(view, scale_log2_, rescale_limit_);
    if constexpr (T::kRescaleFirst) rescale_output_if(grown);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      softmax.sum[r] *= softmax.alpha[r];
      const float shift = softmax.shift(r, scale_log2_);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) {
        view(r, c) = exp2_approx(view(r, c) * scale_log2_ - shift);
        softmax.sum[r] += view(r, c);
      }
    }
    if constexpr (!T::kRescaleFirst) rescale_output_if(grown);
  }

  // Most blocks raise no maximum (by much): one vote then saves a multiplication per output.
  FA_DEVICE void rescale_output_if(bool grown) {
    if (T::kLazyRescale && !__any_sync(0xffffffffu, grown)) return;
    auto view = acc_view(output);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) view(r, c) *= softmax.alpha[r];
    }
  }

  // Lane addresses of the ldmatrix operands; made anew for each product.
  FA_DEVICE uint32_t q_lane() const {
    const int thread = thread_in_team<T>();
    return smem_q_ + lane_offset_rows<T::kTileM>(thread % 32) + thread / 32 * (T::kWarpRows * 128);
  }
  FA_DEVICE void load_q_operand(uint32_t rows, int j, uint32_t (&a)[T::kSlabs][4]) const {
    CUTE_UNROLL
    for (int m = 0; m < T::kSlabs; ++m)
      load_matrix(SwizzledTile<T::kTileM>::step_columns(rows, dim_step<kKSteps>(j)) + m * 16 * 128,
                  a[m]);
  }

  // scores = Q · K(n)ᵀ
  FA_DEVICE void products_qk(int n) {
    constexpr int kTiles = T::kTileN / 16;
    const uint32_t rows = q_lane();
    const uint32_t keys = smem_k_ + lane_offset_keys<T::kTileN>(thread_again() % 32) +
                          slot(n) * (SwizzledTile<T::kTileN>::size(T::kDimQk) * 2);
    cute::clear(scores_);
    uint32_t a[2][T::kSlabs][4], b[kAhead + 1][4];
    auto load_b = [&](int t) {
      load_matrix(SwizzledTile<T::kTileN>::step_columns(keys, dim_step<kKSteps>(t / kTiles)) +
                      t % kTiles * 16 * 128,
                  b[t % (kAhead + 1)]);
    };
    load_q_operand(rows, 0, a[0]);
    CUTE_UNROLL
    for (int t = 0; t < kAhead; ++t) load_b(t);
    CUTE_UNROLL
    for (int j = 0; j < kKSteps; ++j) {
      if (j + 1 < kKSteps) load_q_operand(rows, j + 1, a[(j + 1) % 2]);
      CUTE_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        const int t = j * kTiles + i;
        if (t + kAhead < kKSteps * kTiles) load_b(t + kAhead);
        CUTE_UNROLL
        for (int m = 0; m < T::kSlabs; ++m)
          multiply_pair<T::kType>(scores_, m, i, a[j % 2][m], b[t % (kAhead + 1)]);
      }
    }
  }

  // output += P · V(n). weights_of(key_step, a): the operand of 16 keys.
  template <class WeightsOf>
  FA_DEVICE void products_pv(int n, WeightsOf weights_of) {
    constexpr int kTiles = T::kDimV / 16, kTotal = T::kTileN / 16 * kTiles;
    const uint32_t values = smem_v_ + lane_offset_rows<T::kTileN>(thread_again() % 32) +
                            slot(n) * (SwizzledTile<T::kTileN>::size(T::kDimV) * 2);
    uint32_t b[kAhead + 1][4], a[T::kSlabs][4];
    auto load_b = [&](int t) {
      load_matrix_transposed(
          SwizzledTile<T::kTileN>::step_columns(values, t % kTiles) + t / kTiles * 16 * 128,
          b[t % (kAhead + 1)]);
    };
    CUTE_UNROLL
    for (int t = 0; t < kAhead; ++t) load_b(t);
    CUTE_UNROLL
    for (int t = 0; t < kTotal; ++t) {
      if (t + kAhead < kTotal) load_b(t + kAhead);
      if (t % kTiles == 0) weights_of(t / kTiles, a);
      CUTE_UNROLL
      for (int m = 0; m < T::kSlabs; ++m)
        multiply_pair<T::kType>(output, m, t % kTiles, a[m], b[t % (kAhead + 1)]);
    }
  }

  // Accumulator layout to A operand: 16 keys are two n8 tiles, whose pairs are already in the right
  // lanes.
  FA_DEVICE void pack(int key_step, uint32_t (&a)[T::kSlabs][4]) {
    CUTE_UNROLL
    for (int m = 0; m < T::kSlabs; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i)  // rows 0–7, 8–15 of keys 0–7, then of keys 8–15
        a[m][i] = pack_pair<T::kType>(scores_(cute::make_coord(0, i % 2), m, 2 * key_step + i / 2),
                                      scores_(cute::make_coord(1, i % 2), m, 2 * key_step + i / 2));
    }
  }

  const FwdArgs& args_;  // in constant memory
  CpAsyncKv<Row> loader_;
  const TileState<typename T::Mask>& state_;  // in shared memory
  float scale_log2_, rescale_limit_;
  uint32_t smem_q_, smem_k_, smem_v_;
  Scores scores_;  // ((2, 2), MMA_M, MMA_N)
};

}  // namespace fa::sm80
