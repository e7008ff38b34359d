// SPDX-License-Identifier: BSD-3-Clause
// Where do the dK and dV of a key tile go? Every real key once; other rows belong to nobody.
#pragma once

#include "kernels_common/device/acc_view.h"
#include "kernels_sm90/bwd/smem.h"
#include "kernels_sm90/common/stmatrix.h"

namespace fa::sm90 {

template <class Row>
class BwdEpilogue {
  using T = BwdTypes<Row>;

 public:
  FA_DEVICE BwdEpilogue(const BwdArgs& args, BwdSmem<Row>& smem, int thread)
      : args_(args), smem_(smem), tile_(smem.tile), thread_(thread) {}

  // Every product that reads staging() has run, in all compute warpgroups that share its rows.
  FA_DEVICE void store(typename T::DkAcc& dk, typename T::DvAcc& dv) const {
    store(dv, args_.dv, args_.dv_fp32, args_.dim_v, 1.f);
    store(dk, args_.dk, args_.dk_fp32, args_.dim_qk, args_.scale);
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

  // First key of the warp in the tile; warpgroups that share keys hold columns one after the other.
  FA_DEVICE int warp_key() const {
    return (T::kShareKeys ? thread_ % kWarpgroupThreads : thread_) / 32 * 16;
  }
  template <class Acc>
  FA_DEVICE int first_column() const {
    return T::kShareKeys ? thread_ / kWarpgroupThreads * kColumns<Acc> : 0;
  }
  template <class Acc>
  static constexpr int kColumns = 2 * decltype(cute::size(Acc{}))::value;

  template <class Acc>
  FA_DEVICE void store(Acc& acc, const TensorArg& to, int fp32, int dim, float scale) const {
    // No chunks where dK is wider than V, whose rows it would leave by.
    constexpr bool kFits = kColumns<Acc> <= 2 * decltype(cute::size(typename T::DvAcc{}))::value;
    if (!kFits || fp32 != 0 || args_.accumulate != 0)
      store_pairs(acc, to, fp32, dim, scale);
    else
      store_chunks(acc, to, dim, scale);
  }

  // 16 bytes per lane and store, by way of the warp's rows of staging().
  template <class Acc>
  FA_DEVICE void store_chunks(const Acc& acc, const TensorArg& to, int dim, float scale) const {
    constexpr DType kType = T::kConfig.dtype;
    constexpr int kChunks = kColumns<Acc> / 8;
    const int left = first_column<Acc>();
    const unsigned lane = static_cast<unsigned>(thread_) % 32;
    // Panels of 64 columns, however V lay there, or of 32. Rows of 64 bytes in pairs: 8 keys fill
    // all banks.
    constexpr int kPanel = T::kDimV % 64 == 0 ? 64 : 32, kOf = kPanel / 8;
    const auto address = [&](int key, int chunk) {
      chunk += left / 8;
      return reinterpret_cast<char*>(smem_.staging()) +
             (chunk / kOf * T::kTileN + key) * kPanel * 2 + ((chunk ^ key * kOf / 8) % kOf * 16);
    };
    CUTE_UNROLL
    for (int i = 0; i < kColumns<Acc> / 16; ++i) {
      const float* f = acc.data() + 8 * i;
      store_matrices(shared_address(address(warp_key() + lane % 16, 2 * i + lane / 16)),
                     pack_pair<kType>(f[0] * scale, f[1] * scale),
                     pack_pair<kType>(f[2] * scale, f[3] * scale),
                     pack_pair<kType>(f[4] * scale, f[5] * scale),
                     pack_pair<kType>(f[6] * scale, f[7] * scale));
    }
    __syncwarp();
    // A lane keeps its chunk and goes down the keys; kStep keys side by side.
    constexpr int kStep = 32 / kChunks, kStores = 16 / kStep;
    const int chunk = lane % kChunks, key = warp_key() + lane / kChunks % kStep;
    const bool stores = lane < kStep * kChunks && left + 8 * chunk < dim;
    const int keys = stores ? tile_.seq.k_len - tile_.seq.n_first - key : 0;  // that are there
    uint4 rows[kStores];
    CUTE_UNROLL
    for (int i = 0; i < kStores; ++i)
      rows[i] = *reinterpret_cast<const uint4*>(address(key + kStep * i, chunk));
    const int64_t first = (tile_.seq.n_first + key) * to.stride_row + left + 8 * chunk;
    char* row = rows_of(to, 2) + first * 2;
    CUTE_UNROLL
    for (int i = 0; i < kStores; ++i) {
      if (kStep * i < keys) *reinterpret_cast<uint4*>(row) = rows[i];
      row += kStep * 2 * to.stride_row;
    }
    __syncwarp();
  }

  // One pair of columns per store: fp32, and sums.
  template <class Acc>
  FA_DEVICE void store_pairs(Acc& acc, const TensorArg& to, int fp32, int dim, float scale) const {
    auto view = acc_view(acc);  // (2, dim / 4)
    const int size = fp32 != 0 ? 4 : 2;
    char* base = rows_of(to, size);
    const int left = first_column<Acc>();
    const int first = tile_.seq.n_first + warp_key() + thread_ % 32 / 4;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int key = first + 8 * r;
      if (key >= tile_.seq.k_len) continue;
      char* at = base + (key * to.stride_row + left + acc_first_col(thread_ % 32)) * size;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); c += 2) {
        if (left + acc_col(c) >= dim) continue;
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
  BwdSmem<Row>& smem_;
  const BwdTile& tile_;
  int thread_;
};

}  // namespace fa::sm90
