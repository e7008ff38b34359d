// SPDX-License-Identifier: BSD-3-Clause
// How do the keys and values of a tile, and the query rows of each step, get into shared memory?
#pragma once

#include "kernels_sm80/bwd/smem.h"
#include "kernels_sm80/common/copy.h"

namespace fa::sm80 {

// Guarantees zeros in query rows that see none of the tile's keys, in keys that no query row sees,
// and in columns beyond the real dims: their bytes reach no product, not even times zero.
template <class Row>
class BwdLoader {
  using T = BwdTypes<Row>;
  using Smem = BwdSmem<Row>;
  static constexpr int kRowStep = T::kThreads / 8;

 public:
  FA_DEVICE BwdLoader(const BwdArgs& args, Smem& smem) : args_(args), smem_(smem) {}

  // Keys [lo, hi) of the tile, counted from its first one; the others become zero. Asynchronous;
  // the caller commits the group.
  FA_DEVICE void load_keys(const char* k, const char* v, int lo, int hi) const {
    const int thread = thread_index(), row = thread / 8, chunk = thread % 8;
    load_panels<T::kTileN, T::kDim, T::kTileN, kRowStep, true>(
        k + row * args_.k.stride_row * 2 + chunk * 16, args_.k.stride_row * 2, row, lo, hi, chunk,
        args_.dim_qk, cute::cast_smem_ptr_to_uint(smem_.k));
    load_panels<T::kTileN, T::kDim, T::kTileN, kRowStep, true>(
        v + row * args_.v.stride_row * 2 + chunk * 16, args_.v.stride_row * 2, row, lo, hi, chunk,
        args_.dim_v, cute::cast_smem_ptr_to_uint(smem_.v));
  }

  // Query block m of head `in_group` of the group: Q, dO and their row statistics, into `slot`.
  FA_DEVICE void load_rows(int in_group, int m, int slot) const {
    const BwdState& state = smem_.state;
    const int first = m * T::kTileM;
    const int lo = state.range.any_lo - first, hi = state.range.any_hi - first;
    load_tile(state.q + in_group * args_.q.stride_head * 2, args_.q.stride_row * 2, first, lo, hi,
              args_.dim_qk, cute::cast_smem_ptr_to_uint(smem_.q[slot]));
    load_tile(state.dout + in_group * args_.dout.stride_head * 2, args_.dout.stride_row * 2, first,
              lo, hi, args_.dim_v, cute::cast_smem_ptr_to_uint(smem_.dout[slot]));
    constexpr int kChunks = T::kTileM / 4;
    const int thread = thread_index();
    if (thread < 2 * kChunks) {
      const int64_t tile = int64_t(in_group) * args_.rows.tiles_m + m;
      const bool second = thread >= kChunks;
      const int at = (second ? thread - kChunks : thread) * 4;
      copy_chunk(
          cute::cast_smem_ptr_to_uint(second ? smem_.delta[slot] : smem_.lse_log2[slot]) + at * 4,
          reinterpret_cast<const char*>((second ? state.delta : state.lse_log2) + tile * T::kTileM +
                                        at),
          true);
    }
  }

 private:
  FA_DEVICE static void load_tile(const char* rows, int64_t row_bytes, int first, int lo, int hi,
                                  int dim, uint32_t smem) {
    const int thread = thread_index(), row = thread / 8, chunk = thread % 8;
    const char* src = rows + int64_t(first + row) * row_bytes + chunk * 16;
    if (lo > 0 || hi < T::kTileM)  // only the first and the last block
      load_panels<T::kTileM, T::kDim, T::kTileM, kRowStep, true>(src, row_bytes, row, lo, hi, chunk,
                                                                 dim, smem);
    else
      load_panels<T::kTileM, T::kDim, T::kTileM, kRowStep, false>(src, row_bytes, row, 0, 0, chunk,
                                                                  dim, smem);
  }

  const BwdArgs& args_;  // in constant memory
  Smem& smem_;
};

}  // namespace fa::sm80
