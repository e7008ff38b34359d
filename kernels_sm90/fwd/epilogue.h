// SPDX-License-Identifier: BSD-3-Clause
// Where do a finished tile's O and LSE go? O by one TMA store per warp, or by predicated stores
// where a box would not fit.
#pragma once

#include "kernels_sm90/common/tma.h"
#include "kernels_sm90/fwd/step.h"

namespace fa::sm90 {

FA_DEVICE float load_sink(const FwdArgs& args, int head) {
  if (args.sinks == nullptr) return -INFINITY;
  const int64_t at = head * args.sinks_stride;
  if (args.sinks_dtype == static_cast<int>(DType::kFp32))
    return static_cast<const float*>(args.sinks)[at];
  if (args.sinks_dtype == static_cast<int>(DType::kBf16))
    return static_cast<float>(static_cast<const cutlass::bfloat16_t*>(args.sinks)[at]);
  return static_cast<float>(static_cast<const cutlass::half_t*>(args.sinks)[at]);
}

// Four 8 x 8 matrices: (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15) of a 16 x 16
// block.
FA_DEVICE void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

template <class Row>
class FwdEpilogue {
  using T = FwdTypes<Row>;
  using E = typename T::E;

 public:
  FA_DEVICE FwdEpilogue(FwdSmem<Row>& smem, const FwdArgs& args, const TensorMap& map, int thread)
      : smem_(smem),
        args_(args),
        map_(map),
        warp_(__shfl_sync(0xffffffffu, thread / 32, 0)),
        lane_(thread % 32) {}

  // O := O / row sum and LSE. `computed`: the tile had keys, so the step holds a slot of Q.
  FA_DEVICE void store(FwdStep<Row>& step, const FwdTile& tile, bool computed) {
    const float sink = load_sink(args_, tile.head_q);
    const float sinks[2] = {sink, sink};
    step.softmax.finish(args_.scale_log2, sinks);
    auto o = acc_view(step.o);  // (2, dim_v / 4)
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(o); ++c) o(r, c) *= step.softmax.sum[r];
    }
    if (tile.seq.m_first + T::kTileM > tile.seq.q_len) clear_rows(step, o, tile);
    store_lse(step, tile);
    // A box clips only at the end of the tensor: packed sequences end before it.
    const bool fits = args_.seq.cu_q == nullptr || tile.seq.m_first + T::kTileM <= tile.seq.q_slot;
    if (fits && args_.out_fp32 == 0 && (T::kOwnOutput || computed))
      store_box(step, tile);
    else
      store_rows(step, o, tile);
    if constexpr (!T::kOwnOutput)
      if (computed) {
        if (lane_ == 0) tma_store_wait_read();
        __syncwarp();
        step.release_q();
      }
  }

  // Shared memory must outlive the last store's reads.
  FA_DEVICE void drain() const {
    if (lane_ == 0) tma_store_wait_read();
  }

 private:
  FA_DEVICE int first_row() const {
    return warp_ * 16 + lane_ / 4;
  }  // of view row 0; row 1 is eight further

  // Rows at and after q_len are defined as empty, whatever q held there.
  template <class View>
  FA_DEVICE void clear_rows(FwdStep<Row>& step, View& o, const FwdTile& tile) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (tile.seq.m_first + first_row() + 8 * r < tile.seq.q_len) continue;
      step.softmax.max[r] = -INFINITY;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(o); ++c) o(r, c) = 0.f;
    }
  }

  FA_DEVICE void store_lse(const FwdStep<Row>& step, const FwdTile& tile) const {
    if (args_.lse == nullptr || lane_ % 4 != 0) return;
    const SeqInfo& s = tile.seq;
    float* lse = args_.lse + s.q_batch * args_.lse_stride_batch +
                 tile.head_q * args_.lse_stride_head + s.q_begin;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = s.m_first + first_row() + 8 * r;
      if (row < s.q_slot) lse[row] = step.softmax.max[r];
    }
  }

  // The wait for the previous tile's store stands here, a whole tile later.
  FA_DEVICE void store_box(FwdStep<Row>& step, const FwdTile& tile) const {
    E* rows = smem_.output_rows(step.q_at.slot, warp_);
    if constexpr (T::kOwnOutput) {
      if (lane_ == 0) tma_store_wait_read();
      __syncwarp();
    } else {
      sync<kWarpgroupThreads>(Barrier::kSlab,
                              warp_ / 4);  // the warpgroup's products have read these rows of Q
    }
    // Lane l addresses row l % 16 of the 16 x 16 block, column half l / 16; the swizzle is chunk ^
    // row % 8.
    const int row = lane_ % 16, half = lane_ / 16;
    const uint32_t base = shared_address(rows) + row * 128;
    CUTE_UNROLL
    for (int i = 0; i < T::kDimV / 16; ++i) {
      const uint32_t address =
          base + i / 4 * (T::kTileM * 128) + (((i % 4 * 2 + half) ^ (row % 8)) * 16);
      const float* f = step.o.data() + 8 * i;
      constexpr DType kType = T::kConfig.dtype;
      store_matrices(address, pack_pair<kType>(f[0], f[1]), pack_pair<kType>(f[2], f[3]),
                     pack_pair<kType>(f[4], f[5]), pack_pair<kType>(f[6], f[7]));
    }
    fence_async_shared();
    __syncwarp();
    const int q_row = tile.seq.m_first + 16 * warp_;
    if (lane_ == 0 && q_row < tile.seq.q_slot) {
      CUTE_UNROLL
      for (int panel = 0; panel < T::kDimV / T::kPanel; ++panel)
        if (panel * T::kPanel < args_.dim_v)
          tma_store(
              map_, rows + panel * T::kTileM * T::kPanel,
              BoxCoord{panel * T::kPanel, tile.seq.q_begin + q_row, tile.head_q, tile.seq.q_batch});
      tma_store_commit();
    }
  }

  // fp32 output, and the last rows of a packed sequence: one pair of columns per store.
  template <class View>
  FA_DEVICE void store_rows(FwdStep<Row>&, View& o, const FwdTile& tile) const {
    const SeqInfo& s = tile.seq;
    const TensorArg& out = args_.out;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = s.m_first + first_row() + 8 * r;
      if (row >= s.q_slot) continue;
      const int64_t at = s.q_batch * out.stride_batch +
                         (int64_t(s.q_begin) + row) * out.stride_row +
                         tile.head_q * out.stride_head + 2 * (lane_ % 4);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(o); c += 2) {
        if (4 * c >= args_.dim_v) continue;
        if (args_.out_fp32 != 0)
          *reinterpret_cast<float2*>(static_cast<float*>(out.data) + at + 4 * c) =
              float2{o(r, c), o(r, c + 1)};
        else
          *reinterpret_cast<uint32_t*>(static_cast<E*>(out.data) + at + 4 * c) =
              pack_pair<T::kConfig.dtype>(o(r, c), o(r, c + 1));
      }
    }
  }

  FwdSmem<Row>& smem_;
  const FwdArgs& args_;
  const TensorMap& map_;
  int warp_, lane_;  // warp among the consumers
};

}  // namespace fa::sm90
