// SPDX-License-Identifier: BSD-3-Clause
// Where do the dK and dV of a key tile go? Every real key once; other rows belong to nobody.
#pragma once

#include "kernels_common/device/acc_view.h"
#include "kernels_sm90/bwd/smem.h"

namespace fa::sm90 {

template <class Row>
class BwdEpilogue {
  using T = BwdTypes<Row>;

 public:
  FA_DEVICE BwdEpilogue(const BwdArgs& args, const BwdTile& tile, int thread)
      : args_(args), tile_(tile), thread_(thread) {}

  FA_DEVICE void store(typename T::DkAcc& dk, typename T::DvAcc& dv) const {
    store_rows(dv, args_.dv, args_.dv_fp32, args_.dim_v, 1.f);
    store_rows(dk, args_.dk, args_.dk_fp32, args_.dim_qk, args_.scale);
  }

  // No row sees these keys: their gradients are zero, or stay as they are where they are added to.
  FA_DEVICE void store_empty() const {
    if (args_.accumulate != 0) return;
    clear(args_.dv, args_.dv_fp32, args_.dim_v);
    clear(args_.dk, args_.dk_fp32, args_.dim_qk);
  }

 private:
  // Byte address of key 0 of the sequence.
  FA_DEVICE char* rows_of(const TensorArg& to, int size) const {
    const KeyTileInfo& s = tile_.seq;
    return static_cast<char*>(to.data) + (s.k_batch * to.stride_batch + s.k_begin * to.stride_row +
                                          tile_.head_k * to.stride_head) *
                                             size;
  }

  // One pair of columns per store.
  template <class Acc>
  FA_DEVICE void store_rows(Acc& acc, const TensorArg& to, int fp32, int dim, float scale) const {
    auto view = acc_view(acc);  // (2, dim / 4)
    const int size = fp32 != 0 ? 4 : 2;
    char* base = rows_of(to, size);
    const int first = tile_.seq.n_first + thread_ / 32 * 16 + thread_ % 32 / 4;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int key = first + 8 * r;
      if (key >= tile_.seq.k_len) continue;
      char* at = base + (key * to.stride_row + acc_first_col(thread_ % 32)) * size;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); c += 2) {
        if (acc_col(c) >= dim) continue;
        float2 x{view(r, c) * scale, view(r, c + 1) * scale};
        if (fp32 != 0) {
          float2* pair = reinterpret_cast<float2*>(at + acc_col(c) * 4);
          if (args_.accumulate != 0) x.x += pair->x, x.y += pair->y;
          *pair = x;
        } else {
          uint32_t* pair = reinterpret_cast<uint32_t*>(at + acc_col(c) * 2);
          if (args_.accumulate != 0) {
            const float2 old = unpack_pair<T::kConfig.dtype>(*pair);
            x.x += old.x, x.y += old.y;
          }
          *pair = pack_pair<T::kConfig.dtype>(x.x, x.y);
        }
      }
    }
  }

  FA_DEVICE void clear(const TensorArg& to, int fp32, int dim) const {
    const int size = fp32 != 0 ? 4 : 2;
    char* base = rows_of(to, size);
    const int end = min_of(tile_.seq.k_len, tile_.seq.n_first + T::kTileN);
    const int chunks = dim * size / 16;  // 16 bytes each
    for (int i = thread_; i < (end - tile_.seq.n_first) * chunks; i += T::kComputeThreads) {
      const int row = i / chunks;
      *reinterpret_cast<uint4*>(base + (tile_.seq.n_first + row) * to.stride_row * size +
                                (i - row * chunks) * 16) = uint4{};
    }
  }

  const BwdArgs& args_;
  const BwdTile& tile_;
  int thread_;
};

}  // namespace fa::sm90
