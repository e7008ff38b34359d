// SPDX-License-Identifier: BSD-3-Clause
// How do blocks of keys and values get into shared memory, and which of their rows are zeroed?
#pragma once

#include "kernels_sm80/common/copy.h"
#include "kernels_sm80/fwd/smem.h"

namespace fa::sm80 {

// Guarantees zeros in rows outside [any_lo, any_hi), the keys that some query row of the tile sees,
// and in columns beyond the real dims. So neither neighbours' bytes nor NaN behind a sequence's end
// reach a product.
template <class Row>
class CpAsyncKv {
  using T = FwdTypes<Row>;
  static constexpr int kRowStep = T::kTeam / 8;

 public:
  FA_DEVICE CpAsyncKv(const FwdArgs& args, const TileState<typename T::Mask>& state,
                      uint32_t smem_k, uint32_t smem_v)
      : args_(args), state_(state), smem_k_(smem_k), smem_v_(smem_v) {}

  // Byte address of key 0 of one sequence and head.
  FA_DEVICE static const char* rows(const TensorArg& t, const SeqInfo& seq, int head_k) {
    return static_cast<const char*>(t.data) +
           2 * (seq.k_batch * t.stride_batch + seq.k_begin * t.stride_row + head_k * t.stride_head);
  }

  // Block n of keys (values) into slot `slot`. Asynchronous; the caller commits the group.
  FA_DEVICE void load_k(int n, int slot) const {
    load<T::kDimQk>(state_.k, args_.k.stride_row * 2, n, args_.dim_qk,
                    smem_k_ + slot * (SwizzledTile<T::kTileN>::size(T::kDimQk) * 2));
  }
  FA_DEVICE void load_v(int n, int slot) const {
    load<T::kDimV>(state_.v, args_.v.stride_row * 2, n, args_.dim_v,
                   smem_v_ + slot * (SwizzledTile<T::kTileN>::size(T::kDimV) * 2));
  }
  FA_DEVICE int first_block() const { return state_.range.begin; }

 private:
  template <int kDim>
  FA_DEVICE void load(const char* base, int64_t row_bytes, int n, int dim, uint32_t smem) const {
    const int thread = thread_in_team<T>(), row = thread / 8, chunk = thread % 8,
              first = n * T::kTileN;
    const char* src = base + int64_t(first + row) * row_bytes + chunk * 16;
    const int lo = state_.range.any_lo - first, hi = state_.range.any_hi - first;
    if (lo > 0 || hi < T::kTileN)  // only the first and the last block
      load_panels<T::kTileN, kDim, T::kTileN, kRowStep, true>(src, row_bytes, row, lo, hi, chunk,
                                                              dim, smem);
    else
      load_panels<T::kTileN, kDim, T::kTileN, kRowStep, false>(src, row_bytes, row, 0, 0, chunk,
                                                               dim, smem);
  }

  const FwdArgs& args_;  // in constant memory: strides and dims cost no registers
  const TileState<typename T::Mask>& state_;  // in shared memory
  uint32_t smem_k_, smem_v_;
};

}  // namespace fa::sm80
