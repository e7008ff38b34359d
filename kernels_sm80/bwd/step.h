// SPDX-License-Identifier: BSD-3-Clause
// The arithmetic of one query block on mma.sync: five products, and who waits for whom.
#pragma once

#include "kernels_common/device/band_mask.h"
#include "kernels_common/device/online_softmax.h"
#include "kernels_common/device/philox.h"
#include "kernels_common/device/score.h"
#include "kernels_sm80/bwd/dq_writer.h"
#include "kernels_sm80/bwd/loader.h"
#include "kernels_sm80/common/mma.h"

namespace fa::sm80 {

// A pair of warps: the first one hands Pᵀ to the second one.
FA_DEVICE void pair_arrive(int pair) {
  asm volatile("barrier.arrive %0, 64;" ::"r"(pair + 1) : "memory");
}
FA_DEVICE void pair_wait(int pair) {
  asm volatile("barrier.sync %0, 64;" ::"r"(pair + 1) : "memory");
}

// One block of query rows: Sᵀ = K·Qᵀ beside dPᵀ = V·dOᵀ, then dV += Pᵀ·dO beside dK += dSᵀ·Q with
// Pᵀ and dSᵀ from registers, and dQ = dS·K of the block before, which needs the dS of every warp.
// So the block meets at one barrier a step; a warp that waits for nobody fills the tensor cores.
template <class Row>
class BwdStep {
  using T = BwdTypes<Row>;
  using Smem = BwdSmem<Row>;
  using Keys = SwizzledTile<T::kTileN>;
  using Rows = SwizzledTile<T::kTileM>;
  static constexpr int kRowBlocks = T::kTileM / 8;
  static constexpr int kUnits = kRowBlocks / 2 * T::kSlabs;  // of half of the query rows
  static constexpr int kHalfSteps = T::kTileM / 32 * (T::kDim / 16);
  static constexpr int kAhead = T::kSlabs == 1 ? 3 : 1;  // operands loaded ahead of the products
  static constexpr uint32_t kKeyBytes = sizeof(Smem::k), kRowBytes = sizeof(Smem::q[0]),
                            kDsBytes = sizeof(Smem::ds[0]);

 public:
  FA_DEVICE BwdStep(const BwdArgs& args, const Smem& smem, int warp)
      : args_(args),
        state_(smem.state),
        smem_(cute::cast_smem_ptr_to_uint(&smem)),
        part_(warp / T::kPairs),
        pair_(warp % T::kPairs) {
    cute::clear(sum);
  }

  FA_DEVICE bool values() const { return part_ == int(Part::kValues); }
  FA_DEVICE int pair() const { return pair_; }

  // Query block m of head `in_group` of the group, whose rows lie in `slot`; dS goes to slot `ds`.
  // `tile_before`: workspace tile of the block before, whose dS is complete; -1: there is none.
  // load_next() starts the loads of the next step.
  //
  // Each half of Pᵀ is handed over as soon as it is there. The second half is made beside the
  // products with the first one, so that exponentials and tensor cores work at the same time.
  template <class LoadNext>
  FA_DEVICE void run(int in_group, int m, int slot, int ds, int tile_before, LoadNext load_next) {
    load_next();
    if (!values() && tile_before >= 0) add_dq(ds ^ 1, tile_before);
    product_of_rows(slot);
    if constexpr (T::kAny)
      if (values()) apply_score(in_group, m);
    if (m < state_.range.full_begin || m >= state_.range.full_end) hide(m);
    const int lane = thread_index() % 32;
    const uint32_t first = pair_address(ds, lane);
    const uint32_t statistics = smem_ + uint32_t(offsetof(Smem, lse_log2)) +
                                part_ * uint32_t(sizeof(Smem::lse_log2)) + slot * (T::kTileM * 4) +
                                acc_first_col(lane) * 4;
    if (values()) {
      if constexpr (T::kAny) {
        weights(in_group, m, statistics, first);
        pair_arrive(pair_);
        product_into_sum<0>(slot, [](int) {});
      } else {
        load_statistics(0, statistics);
        CUTE_UNROLL
        for (int u = 0; u < kUnits; ++u) probabilities(u, first);
        pair_arrive(pair_);
        load_statistics(1, statistics);
        product_into_sum<0>(slot, [&](int t) {
          units_at(t, 0, [&](int u) { probabilities(kUnits + u, first); });
          if (t == kHalfSteps / 2 - 1) pair_arrive(pair_ + T::kPairs);
        });
      }
      if (tile_before >= 0) add_dq(ds ^ 1, tile_before);
    } else {
      load_statistics(0, statistics);
      pair_wait(pair_);
      load_weights(0, first);
      CUTE_UNROLL
      for (int u = 0; u < kUnits; ++u) derivatives(u, first);
      product_into_sum<0>(slot, [&](int t) {
        if (t == kHalfSteps / 2 - 1) {
          if (!T::kAny) pair_wait(pair_ + T::kPairs);
          load_weights(1, first);
          load_statistics(1, statistics);
        }
        units_at(t, kHalfSteps / 2, [&](int u) { derivatives(kUnits + u, first); });
      });
    }
    product_into_sum<1>(slot, [](int) {});
  }

  // dQ of the block whose dS lies in slot `ds`, added to the sums of workspace tile `tile`.
  FA_DEVICE void add_dq(int ds, int tile) { DqWriter<Row>(args_, state_, smem_).add(ds, tile); }

  Accumulator<T::kSlabs, T::kDim> sum;  // dV or dK, ((2, 2), slab, n8 tile)

 private:
  // scores_ = K·Qᵀ or V·dOᵀ
  FA_DEVICE void product_of_rows(int slot) {
    constexpr int kSteps = T::kDim / 16, kTiles = T::kTileM / 16, kTotal = kSteps * kTiles;
    const int lane = thread_index() % 32;
    const uint32_t keys = smem_ + uint32_t(offsetof(Smem, k)) + part_ * kKeyBytes +
                          lane_offset_rows<T::kTileN>(lane) + pair_ * (T::kPairKeys * 128);
    const uint32_t rows = smem_ + uint32_t(offsetof(Smem, q)) +
                          (part_ * T::kStages + slot) * kRowBytes +
                          lane_offset_keys<T::kTileM>(lane);
    cute::clear(scores_);
    uint32_t a[2][T::kSlabs][4], b[kAhead + 1][4];
    auto load_a = [&](int j) {
      CUTE_UNROLL
      for (int s = 0; s < T::kSlabs; ++s)
        load_matrix(Keys::step_columns(keys, dim_step<kSteps>(j)) + s * 16 * 128, a[j % 2][s]);
    };
    auto load_b = [&](int t) {
      load_matrix(Rows::step_columns(rows, dim_step<kSteps>(t / kTiles)) + t % kTiles * 16 * 128,
                  b[t % (kAhead + 1)]);
    };
    load_a(0);
    CUTE_UNROLL
    for (int t = 0; t < kAhead; ++t) load_b(t);
    CUTE_UNROLL
    for (int t = 0; t < kTotal; ++t) {
      const int j = t / kTiles, i = t % kTiles;
      if (t + kAhead < kTotal) load_b(t + kAhead);
      if (i == 0 && j + 1 < kSteps) load_a(j + 1);
      CUTE_UNROLL
      for (int s = 0; s < T::kSlabs; ++s)
        multiply_pair<T::kType>(scores_, s, i, a[j % 2][s], b[t % (kAhead + 1)]);
    }
  }

  // Address of this thread's pair of query rows of block 0 in the first slab's row lane/4.
  FA_DEVICE uint32_t pair_address(int ds, int lane) const {
    return smem_ + uint32_t(offsetof(Smem, ds)) + ds * kDsBytes +
           Keys::offset(pair_ * T::kPairKeys + lane / 4, 0) + lane % 4 * 4;
  }
  // … of row block n, slab s, row half h.
  FA_DEVICE static uint32_t pair_address(uint32_t first, int n, int s, int h) {
    return (first ^ uint32_t(n % 8 * 16)) + n / 8 * Keys::kPanelBytes + (s * 16 + h * 8) * 128;
  }

  // Hides what the band does: from Pᵀ as a score of −inf; from dSᵀ, where Pᵀ is 0, as a dPᵀ of 0,
  // for it may be NaN.
  FA_DEVICE void hide(int m) {
    const int lane = thread_index() % 32;
    auto view = acc_view(scores_);  // (keys, query rows)
    const TransposedBandMask mask{state_.band, state_.info.q_len, state_.info.k_len};
    mask.template apply<16>(view, state_.info.n_first + pair_ * T::kPairKeys + lane / 4,
                            m * T::kTileM + acc_first_col(lane), values() ? -INFINITY : 0.f);
  }

  // What the units of half of the query rows read, at once: one by one, each would wait for it.
  // `statistics`: address of LSE or delta of this lane's first row.
  FA_DEVICE void load_statistics(int half, uint32_t statistics) {
    CUTE_UNROLL
    for (int i = 0; i < kRowBlocks / 2; ++i)
      rows_[i] = load_shared_pair(statistics + (half * (kRowBlocks / 2) + i) * 32);
  }
  // Pᵀ of the other warp, into the place of dSᵀ.
  FA_DEVICE void load_weights(int half, uint32_t first) {
    CUTE_UNROLL
    for (int u = half * kUnits; u < (half + 1) * kUnits; ++u) {
      const int n = u / T::kSlabs, s = u % T::kSlabs;
      operand_[s][n][0] = load_shared(pair_address(first, n, s, 0));
      operand_[s][n][1] = load_shared(pair_address(first, n, s, 1));
    }
  }

  // Units of 16 keys x 8 query rows: number u is row block u / kSlabs, slab u % kSlabs.

  // Pᵀ from Sᵀ, to registers and to shared memory.
  FA_DEVICE void probabilities(int u, uint32_t first) {
    const int n = u / T::kSlabs, s = u % T::kSlabs;
    const float2 rows = rows_[n % (kRowBlocks / 2)];
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float p0 =
          exp2_approx(scores_(cute::make_coord(0, h), s, n) * args_.scale_log2 - rows.x);
      const float p1 =
          exp2_approx(scores_(cute::make_coord(1, h), s, n) * args_.scale_log2 - rows.y);
      operand_[s][n][h] = pack_pair<T::kType>(p0, p1);
      store_shared(pair_address(first, n, s, h), operand_[s][n][h]);
    }
  }

  // Softcap and ALiBi, on the scores in place.
  FA_DEVICE void apply_score(int in_group, int m) {
    const int lane = thread_index() % 32;
    auto view = acc_view(scores_);  // (keys, query rows)
    const KeyTileInfo& info = state_.info;
    ScoreTile tile = score_tile(args_.score, info.batch, head(in_group), info.q_len, info.k_len);
    tile.shift = -tile.shift;  // the distance of a key from a row is that of the row from the key
    with_score<ScoreKind::kAny>(args_.score, [&](auto score) __attribute__((always_inline)) {
      // Two ways side by side would take registers that are not there.
      score.template apply<16, false>(view, args_.score, tile,
                                      info.n_first + pair_ * T::kPairKeys + lane / 4,
                                      m * T::kTileM + acc_first_col(lane));
    });
  }
  FA_DEVICE int head(int in_group) const { return state_.head_k * args_.group + in_group; }

  // probabilities() with what softcap and dropout make of them: dV's operand is what dropout
  // leaves, times its scale; the other warp gets Pᵀ times the softcap's derivative
  // 1 − tanh², as a negative number where dropout takes the weight.
  FA_DEVICE void weights(int in_group, int m, uint32_t statistics, uint32_t first) {
    const int lane = thread_index() % 32;
    const KeyTileInfo& info = state_.info;
    const int key = info.n_first + pair_ * T::kPairKeys, row = m * T::kTileM;
    const bool capped = args_.score.capped != 0, drops = args_.dropout.seed_offset != nullptr;
    const float slope =
        score_tile(args_.score, info.batch, head(in_group), info.q_len, info.k_len).slope;
    DropoutPlace place{};
    if (drops)
      place = dropout_place(args_.dropout.seed_offset, info.batch, args_.heads_q, head(in_group));
    CUTE_UNROLL
    for (int g = 0; g < kRowBlocks / 4; ++g) {
      CUTE_UNROLL
      for (int s = 0; s < T::kSlabs; ++s) {
        PhiloxWords words{};  // of row `lane` of the 32, for the slab's keys
        if (drops) words = dropout_words(place, row + g * 32 + lane, key / 16 + s);
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int n = g * 4 + i;
          const float2 lse = load_shared_pair(statistics + n * 32);
          uint32_t taken[2] = {0, 0};  // sign bit of the pair's rows, by key half
          if (drops) taken_by_dropout(words, i * 8 + acc_first_col(lane), lane, taken);
          CUTE_UNROLL
          for (int h = 0; h < 2; ++h) {
            float p[2], w[2];
            CUTE_UNROLL
            for (int e = 0; e < 2; ++e) {
              const float x = scores_(cute::make_coord(e, h), s, n);
              p[e] = exp2_approx(x * args_.scale_log2 - (e == 0 ? lse.x : lse.y));
              w[e] = p[e];
              if (capped && p[e] != 0.f) w[e] *= cap_derivative(x, slope, m, s, n, h, e, lane);
              if (taken[h] >> (16 * e + 15) & 1u)
                p[e] = 0.f;
              else
                p[e] *= args_.dropout.keep_scale;
            }
            operand_[s][n][h] = pack_pair<T::kType>(p[0], p[1]);
            store_shared(pair_address(first, n, s, h), pack_pair<T::kType>(w[0], w[1]) | taken[h]);
          }
        }
      }
    }
  }

  // 1 − tanh² at the score that apply() made into x.
  FA_DEVICE float cap_derivative(float x, float slope, int m, int s, int n, int h, int e,
                                 int lane) const {
    float half_tanh = x;
    if (args_.score.slopes != nullptr) {
      const KeyTileInfo& info = state_.info;
      const int key = info.n_first + pair_ * T::kPairKeys + s * 16 + h * 8 + lane / 4;
      const int row = m * T::kTileM + n * 8 + acc_first_col(lane) + e;
      const float distance = fabsf(static_cast<float>(row + info.k_len - info.q_len - key));
      half_tanh = __fdividef(x + slope * distance, args_.score.outer);
    }
    return fmaxf(1.f - 4.f * half_tanh * half_tanh, 0.f);  // its sign has another meaning
  }

  // Of the rows `from` and `from` + 1, whose words lie in the lanes of that number, and of this
  // lane's two keys: bits 15 and 31 of taken[key half] say that dropout takes the weight.
  FA_DEVICE void taken_by_dropout(const PhiloxWords& words, int from, int lane,
                                  uint32_t (&taken)[2]) const {
    const int byte = lane / 4;  // key lane/4 of the slab, and 8 more
    CUTE_UNROLL
    for (int e = 0; e < 2; ++e) {
      uint32_t w[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) w[i] = __shfl_sync(0xffffffffu, words.w[i], from + e);
      CUTE_UNROLL
      for (int h = 0; h < 2; ++h) {
        const uint32_t four = byte < 4 ? w[2 * h] : w[2 * h + 1];
        if (is_dropped(four, byte % 4, args_.dropout.threshold)) taken[h] |= 0x8000u << (16 * e);
      }
    }
  }

  // dSᵀ from dPᵀ and the other warp's Pᵀ, to registers and over Pᵀ.
  FA_DEVICE void derivatives(int u, uint32_t first) {
    const int n = u / T::kSlabs, s = u % T::kSlabs;
    const float2 rows = rows_[n % (kRowBlocks / 2)];
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const uint32_t at = pair_address(first, n, s, h);
      const uint32_t packed = operand_[s][n][h];
      float2 p = unpack_pair<T::kType>(packed);
      float dp0 = scores_(cute::make_coord(0, h), s, n),
            dp1 = scores_(cute::make_coord(1, h), s, n);
      if constexpr (T::kAny) {  // the sign says what dropout takes
        dp0 = packed & 0x8000u ? 0.f : dp0 * args_.dropout.keep_scale;
        dp1 = packed & 0x80000000u ? 0.f : dp1 * args_.dropout.keep_scale;
        p = make_float2(fabsf(p.x), fabsf(p.y));
      }
      operand_[s][n][h] = pack_pair<T::kType>(p.x * (dp0 - rows.x), p.y * (dp1 - rows.y));
      store_shared(at, operand_[s][n][h]);
    }
  }

  // Calls run(u) for those of the second half's units that go beside step t of a product: in equal
  // parts to the kHalfSteps / 2 steps from `from` on.
  template <class Run>
  FA_DEVICE static void units_at(int t, int from, Run run) {
    constexpr int kSpread = kHalfSteps / 2;
    if (t < from || t >= from + kSpread) return;
    CUTE_UNROLL
    for (int u = 0; u < kUnits; ++u)
      if (u * kSpread / kUnits == t - from) run(u);
  }

  // dV += Pᵀ·dO or dK += dSᵀ·Q, with one half of the query rows; beside(t) runs after step t of
  // kHalfSteps.
  template <int kHalf, class Beside>
  FA_DEVICE void product_into_sum(int slot, Beside beside) {
    constexpr int kTiles = T::kDim / 16;
    const uint32_t rows =
        smem_ + uint32_t(offsetof(Smem, q)) + ((part_ ^ 1) * T::kStages + slot) * kRowBytes +
        kHalf * (T::kTileM / 2 * 128) + lane_offset_rows<T::kTileM>(thread_index() % 32);
    uint32_t b[kAhead + 1][4];
    auto load_b = [&](int t) {
      load_matrix_transposed(Rows::step_columns(rows, t % kTiles) + t / kTiles * 16 * 128,
                             b[t % (kAhead + 1)]);
    };
    CUTE_UNROLL
    for (int t = 0; t < kAhead; ++t) load_b(t);
    CUTE_UNROLL
    for (int t = 0; t < kHalfSteps; ++t) {
      if (t + kAhead < kHalfSteps) load_b(t + kAhead);
      const int j = kHalf * (T::kTileM / 32) + t / kTiles;
      CUTE_UNROLL
      for (int s = 0; s < T::kSlabs; ++s) {
        const uint32_t a[4] = {operand_[s][2 * j][0], operand_[s][2 * j][1],
                               operand_[s][2 * j + 1][0], operand_[s][2 * j + 1][1]};
        multiply_pair<T::kType>(sum, s, t % kTiles, a, b[t % (kAhead + 1)]);
      }
      beside(t);
    }
  }

  const BwdArgs& args_;    // in constant memory
  const BwdState& state_;  // in shared memory
  uint32_t smem_;          // address of BwdSmem
  int part_, pair_;
  Accumulator<T::kSlabs, T::kTileM> scores_;    // Sᵀ or dPᵀ
  uint32_t operand_[T::kSlabs][kRowBlocks][2];  // Pᵀ or dSᵀ, 16-bit pairs
  float2 rows_[kRowBlocks / 2];                 // LSE or delta of half of them
};

}  // namespace fa::sm80
