// SPDX-License-Identifier: BSD-3-Clause
// Where do a finished tile's O and LSE go? O by one TMA store per warp, or by predicated stores
// where a box would not fit.
#pragma once

#include "kernels_common/device/fwd_epilogue.h"
#include "kernels_common/device/online_softmax.h"
#include "kernels_sm90/common/stmatrix.h"
#include "kernels_sm90/common/tma.h"
#include "kernels_sm90/fwd/smem.h"

namespace fa::sm90 {

template <class Row>
class FwdEpilogue {
  using T = FwdTypes<Row>;
  using Output = typename T::OutputAcc;

 public:
  FA_DEVICE FwdEpilogue(const FwdArgs& args, const TensorMap& map, int thread)
      : args_(args), map_(map), thread_(thread) {}

  // O := O / row sum and LSE, for a tile that saw keys. `rows`: FwdSmem::output_rows of warp 0.
  FA_DEVICE void store(Output& o, OnlineSoftmax<2>& softmax, const FwdTile& tile,
                       uint16_t* rows) const {
    if constexpr (T::kTransposes) {  // transpose_blocks.h: every second pair of columns is swapped
      CUTE_UNROLL
      for (int i = 0; i < cute::size(o); i += 2)
        if (i / 4 % 2 != 0) {
          const float first = o.data()[i];
          o.data()[i] = o.data()[i + 1];
          o.data()[i + 1] = first;
        }
    }
    const float sink = T::kPacked ? 0.f : sink_of(args_, tile.head_q);
    float sinks[2] = {sink, sink};
    if constexpr (T::kPacked) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) sinks[r] = sink_of_split(args_, place(tile, r).head, tile.split);
    }
    softmax.finish(scale_log2<Row>(args_, tile), sinks, T::kProbabilityShift);
    if constexpr (T::kFp8) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) softmax.sum[r] *= tile.v_descale;
    }
    if (tile.seq.m_first + T::kTileM > tile.seq.q_len * rows_of_position())
      clear_rows(softmax, tile.seq);
    auto view = acc_view(o);  // (2, dim_v / 4)
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); ++c) view(r, c) *= softmax.sum[r];
    }
    // A row without keys is 0 by definition: 0 · inf of another row's V must not show. Few tiles
    // have such rows.
    if (__any_sync(0xffffffffu, softmax.sum[0] == 0.f || softmax.sum[1] == 0.f)) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(view); ++c)
          if (softmax.sum[r] == 0.f) view(r, c) = 0.f;
      }
    }
    store_lse(softmax, tile);
    if constexpr (!T::kOwnOutput && !T::kOutputOverQ) {
      if (args_.out_fp32 == 0)
        store_sectors(o, tile);
      else
        store_rows(view, tile);
    } else {
      // A box clips only at the end of the tensor: packed sequences end before it.
      const bool fits = args_.seq.cu_q == nullptr ||
                        tile.seq.m_first + T::kTileM <= tile.seq.q_slot * rows_of_position();
      if (fits && args_.out_fp32 == 0)
        store_box(o, tile, rows + thread_.warp() * 16 * T::kOutPanel);
      else
        store_rows(view, tile);
    }
  }

  // Shared memory must outlive the last store's reads.
  FA_DEVICE void drain() const {
    if (lane() == 0) tma_store_wait_read();
  }

 private:
  // Two columns of a 16-bit O.
  FA_DEVICE uint32_t pack(float low, float high) const {
    if constexpr (T::kFp8) {
      if (args_.out_fp16 != 0) return pack_pair<DType::kFp16>(low, high);
      return pack_pair<DType::kBf16>(low, high);
    } else {
      return pack_pair<T::kConfig.dtype>(low, high);
    }
  }

  // Where the box of a warp's rows goes. The map of packed rows has the heads before the positions.
  FA_DEVICE BoxCoord box_of(const FwdTile& tile, int row, int dim) const {
    if constexpr (T::kPacked) {
      const PackedRow at = packed_row_by_shift(row, args_.group);
      return BoxCoord{dim, tile.head_q + at.head, tile.seq.q_begin + at.position, tile.seq.q_batch};
    } else {
      return BoxCoord{dim, tile.seq.q_begin + row, tile.head_q, tile.seq.q_batch};
    }
  }
  FA_DEVICE int rows_of_position() const { return T::kPacked ? args_.group : 1; }
  // Position and query head of view row r.
  FA_DEVICE PackedRow place(const FwdTile& tile, int r) const {
    const int row = tile.seq.m_first + first_row() + 8 * r;
    if constexpr (!T::kPacked) return PackedRow{row, tile.head_q};
    const PackedRow at = packed_row_by_shift(row, args_.group);
    return PackedRow{at.position, tile.head_q + at.head};
  }

  FA_DEVICE int lane() const { return thread_.index() % 32; }
  // Of view row 0; row 1 is eight further.
  FA_DEVICE int first_row() const { return thread_.warp_of_lane() * 16 + lane() / 4; }

  // Rows at and after q_len are defined as empty, whatever q held there.
  FA_DEVICE void clear_rows(OnlineSoftmax<2>& softmax, const SeqInfo& seq) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (seq.m_first + first_row() + 8 * r < seq.q_len * rows_of_position()) continue;
      softmax.max[r] = -INFINITY;
      softmax.sum[r] = 0.f;
    }
  }

  FA_DEVICE void store_lse(const OnlineSoftmax<2>& softmax, const FwdTile& tile) const {
    if constexpr (T::kPacked) {
      if (args_.lse == nullptr || lane() % 4 != 0) return;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const PackedRow at = place(tile, r);
        if (at.position < tile.seq.q_slot)
          lse_rows(args_, tile.seq, at.head, tile.split)[at.position] = softmax.max[r];
      }
      return;
    }
    float* lse = lse_rows(args_, tile.seq, tile.head_q);
    if (lse == nullptr || lane() % 4 != 0) return;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = tile.seq.m_first + first_row() + 8 * r;
      if (row < tile.seq.q_slot) lse[row] = softmax.max[r];
    }
  }

  // The wait for the previous tile's store stands here, a whole tile later.
  FA_DEVICE void store_box(const Output& o, const FwdTile& tile, uint16_t* rows) const {
    if constexpr (T::kOwnOutput) {
      if (lane() == 0) tma_store_wait_read();
      __syncwarp();
    } else {
      sync<kWarpgroupThreads>(
          Barrier::kSlab,
          thread_.warp() / 4);  // the warpgroup's products have read these rows of Q
    }
    // Lane l addresses row l % 16 of the 16 x 16 block, column half l / 16. The swizzle is chunk ^
    // row % 8, in panels of 64 bytes chunk ^ row / 2 % 4.
    if constexpr (T::kOwnOutput && T::kOutPanels * T::kOutPanel < T::kDimV)
      return store_panels(o, tile, rows);
    constexpr int kRowBytes = T::kOutPanel * 2, kBlocks = T::kOutPanel / 16;
    const int row = lane() % 16, half = lane() / 16;
    const int swizzle = kRowBytes == 128 ? row % 8 : row / 2 % 4;
    const uint32_t base = shared_address(rows) + row * kRowBytes;
    CUTE_UNROLL
    for (int i = 0; i < T::kDimV / 16; ++i) {
      const uint32_t address = base + i / kBlocks * (T::kTileM * kRowBytes) +
                               (((i % kBlocks * 2 + half) ^ swizzle) * 16);
      const float* f = o.data() + 8 * i;
      store_matrices(address, pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]),
                     pack(f[6], f[7]));
    }
    fence_async_shared();
    __syncwarp();
    const int q_row = tile.seq.m_first + 16 * thread_.warp();
    if (lane() == 0 && q_row < tile.seq.q_slot * rows_of_position()) {
      CUTE_UNROLL
      for (int panel = 0; panel < T::kDimV / T::kOutPanel; ++panel)
        if (panel * T::kOutPanel < args_.dim_v)
          tma_store(map_, rows + panel * T::kTileM * T::kOutPanel,
                    box_of(tile, q_row, panel * T::kOutPanel));
      tma_store_commit();
    }
  }

  // The same panel after panel, through a buffer of two.
  FA_DEVICE void store_panels(const Output& o, const FwdTile& tile, uint16_t* rows) const {
    static_assert(T::kOutPanel == 64);
    const int row = lane() % 16, half = lane() / 16, swizzle = row % 8;
    const int q_row = tile.seq.m_first + 16 * thread_.warp();
    CUTE_UNROLL
    for (int panel = 0; panel < T::kDimV / 64; ++panel) {
      uint16_t* box = rows + panel % 2 * (T::kTileM * 64);
      if (lane() == 0) tma_store_wait_read<1>();  // the panel before may wait, not the one here
      __syncwarp();
      const uint32_t base = shared_address(box) + row * 128;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* f = o.data() + 32 * panel + 8 * i;
        store_matrices(base + (((2 * i + half) ^ swizzle) * 16), pack(f[0], f[1]), pack(f[2], f[3]),
                       pack(f[4], f[5]), pack(f[6], f[7]));
      }
      fence_async_shared();
      __syncwarp();
      if (lane() == 0 && q_row < tile.seq.q_slot * rows_of_position()) {
        if (panel * 64 < args_.dim_v) tma_store(map_, box, box_of(tile, q_row, panel * 64));
        tma_store_commit();
      }
    }
  }

  // From registers: two lanes exchange words, so that the four lanes of a row write 32 bytes that
  // lie together.
  FA_DEVICE void store_sectors(const Output& o, const FwdTile& tile) const {
    const bool odd = lane() % 2 != 0;
    char* out = out_rows(args_, tile.seq, tile.head_q);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = tile.seq.m_first + first_row() + 8 * r;
      char* at = out + 2 * (row * args_.out.stride_row + 8 * odd + 2 * (lane() % 4 & 2));
      CUTE_UNROLL
      for (int j = 0; j < T::kDimV / 8; j += 2) {  // groups of 8 columns
        const float* f = o.data() + 4 * j + 2 * r;
        const uint32_t low = pack(f[0], f[1]), high = pack(f[4], f[5]);
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
        if (row < tile.seq.q_slot && 8 * (j + odd) < args_.dim_v)
          *reinterpret_cast<uint2*>(at + 16 * j) = odd ? uint2{got, high} : uint2{low, got};
      }
    }
  }

  // fp32 output, and the last rows of a packed sequence: one pair of columns per store.
  template <class View>
  FA_DEVICE void store_rows(const View& view, const FwdTile& tile) const {
    char* out = out_rows(args_, tile.seq, tile.head_q);
    const int size = args_.out_fp32 != 0 ? 4 : 2;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int row = tile.seq.m_first + first_row() + 8 * r;
      if constexpr (T::kPacked) {
        const PackedRow packed = place(tile, r);
        row = packed.position;
        out = out_rows(args_, tile.seq, packed.head, tile.split);
      }
      if (row >= tile.seq.q_slot) continue;
      char* at = out + (row * args_.out.stride_row + 2 * (lane() % 4)) * size;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); c += 2) {
        if (4 * c >= args_.dim_v) continue;
        if (args_.out_fp32 != 0)
          *reinterpret_cast<float2*>(at + 16 * c) = float2{view(r, c), view(r, c + 1)};
        else
          *reinterpret_cast<uint32_t*>(at + 8 * c) = pack(view(r, c), view(r, c + 1));
      }
    }
  }

  const FwdArgs& args_;
  const TensorMap& map_;
  typename T::Thread thread_;
};

}  // namespace fa::sm90
