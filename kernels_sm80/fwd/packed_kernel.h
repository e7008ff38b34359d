// SPDX-License-Identifier: BSD-3-Clause
// The forward kernel for few query rows and many keys: all query heads of a key head in one tile,
// whose warps divide the keys.
#pragma once

#include "kernels_common/device/fwd_epilogue.h"
#include "kernels_sm80/fwd/step.h"

namespace fa::sm80 {

// Row r of a sequence and key head is position r / group and query head r % group of the group.
// Every warp runs through a part of the tile's keys by itself, with slots and a softmax of its own;
// the parts meet in shared memory at the end.
template <class Row>
struct PackedSmem {
  using T = FwdTypes<Row>;
  using E = typename T::Element;
  using Keys = SwizzledTile<T::kTileN>;
  struct Slots {
    alignas(128) E k[T::kStages][Keys::size(T::kDimQk)];
    alignas(128) E v[T::kStages][Keys::size(T::kDimV)];
  };
  struct Statistics {
    float max, sum;  // as OnlineSoftmax, of all lanes
  };

  alignas(128) E q[SwizzledTile<T::kTileM>::size(T::kDimQk)];
  Slots slots[T::kWarps];  // afterwards the warp's part of O, fp32 [tile_m, dim_v]
  TileState<typename T::Mask> state[T::kWarps];
  Statistics statistics[T::kWarps][T::kTileM];
  static_assert(sizeof(Slots) >= T::kTileM * T::kDimV * sizeof(float),
                "a warp's part of O does not fit into its slots");
};

// Index of a float in a part of O: groups of 8 columns lie at group ^ (row % 4), so that the four
// rows that a half-warp writes meet different banks.
template <int kDimV>
FA_DEVICE int part_index(int row, int col) {
  return row * kDimV + (((col / 8) ^ (row % 4)) * 8) + col % 8;
}

// Rows of Q at and after the sequence's end and columns beyond dim_qk become zeros.
template <class Row>
FA_DEVICE void load_packed_q(const FwdArgs& args, const SeqInfo& seq, int first_head,
                             uint32_t smem_q, int thread) {
  using T = FwdTypes<Row>;
  using Tile = SwizzledTile<T::kTileM>;
  const char* base = static_cast<const char*>(args.q.data) +
                     2 * (seq.q_batch * args.q.stride_batch + seq.q_begin * args.q.stride_row +
                          first_head * args.q.stride_head);
  CUTE_UNROLL
  for (int row = thread / 8; row < T::kTileM; row += T::kThreads / 8) {
    const PackedRow at = packed_row(seq.m_first + row, args.group);
    const bool there = at.position < seq.q_len;
    const char* src =
        there ? base + 2 * (at.position * args.q.stride_row + at.head * args.q.stride_head) : base;
    CUTE_UNROLL
    for (int p = 0; p < Tile::panels(T::kDimQk); ++p) {
      const int chunk = p * 8 + thread % 8;
      const bool wanted = there && chunk * 8 < args.dim_qk;
      copy_chunk(smem_q + Tile::offset(row, chunk), src + (wanted ? chunk * 16 : 0), wanted);
    }
  }
}

// The softmax of a warp's part becomes that of the tile: max the LSE, sum the factor that brings
// the warp's accumulators to their share of O.
template <class Row>
FA_DEVICE void merge_softmax(FwdStep<Row>& step, PackedSmem<Row>& smem, const FwdArgs& args,
                             int warp, int lane) {
  using T = FwdTypes<Row>;
  const TileState<typename T::Mask>& state = smem.state[warp];
  auto& softmax = step.softmax;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) smem.statistics[warp][lane / 4 + 8 * r] = {softmax.max[r], sum};
  }
  __syncthreads();  // every warp has also read its last keys and values
  float share[2], sinks[2];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float top = -INFINITY, total = 0.f;
    CUTE_UNROLL
    for (int w = 0; w < T::kWarps; ++w) top = max_or_nan(top, smem.statistics[w][row].max);
    const auto weight = [&](float max) {
      return max == -INFINITY ? 0.f : exp2_approx((max - top) * args.scale_log2);
    };
    CUTE_UNROLL
    for (int w = 0; w < T::kWarps; ++w)
      total += smem.statistics[w][row].sum * weight(smem.statistics[w][row].max);
    share[r] = weight(softmax.max[r]);
    softmax.max[r] = top;
    softmax.sum[r] = lane % 4 == 0 ? total : 0.f;
    const PackedRow at = packed_row(state.seq.m_first + row, args.group);
    sinks[r] = sink_of_split(args, state.head_q + at.head, state.split);
  }
  softmax.finish(args.scale_log2, sinks);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) softmax.sum[r] *= share[r];
}

// O and LSE of the tile, all threads of the block together.
template <class Row>
FA_DEVICE void store_packed(FwdStep<Row>& step, PackedSmem<Row>& smem, const FwdArgs& args,
                            int thread) {
  using T = FwdTypes<Row>;
  const int warp = thread / 32, lane = thread % 32;
  merge_softmax(step, smem, args, warp, lane);
  const TileState<typename T::Mask>& state = smem.state[warp];
  const SeqInfo& seq = state.seq;
  float* part = reinterpret_cast<float*>(&smem.slots[warp]);
  auto view = acc_view(step.output);  // (2, dim_v / 4)
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    const PackedRow at = packed_row(seq.m_first + row, args.group);
    const bool taking_part = at.position < seq.q_len;
    if (args.lse != nullptr && warp == 0 && lane % 4 == 0 && at.position < seq.q_slot)
      lse_rows(args, seq, state.head_q + at.head, state.split)[at.position] =
          taking_part ? step.softmax.max[r] : -INFINITY;
    const float factor = taking_part ? step.softmax.sum[r] : 0.f;
    // Selected, not multiplied, as in store_tile().
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(view); c += 2) {
      const float2 pair = factor == 0.f ? make_float2(0.f, 0.f)
                                        : make_float2(view(r, c) * factor, view(r, c + 1) * factor);
      *reinterpret_cast<float2*>(
          part + part_index<T::kDimV>(row, acc_col(c) + acc_first_col(lane))) = pair;
    }
  }
  __syncthreads();
  constexpr int kQuads = T::kDimV / 4;  // of columns
  const int size = args.out_fp32 ? 4 : 2;
#pragma unroll 2
  for (int i = thread; i < T::kTileM * kQuads; i += T::kThreads) {
    const int row = i / kQuads, col = i % kQuads * 4;
    const PackedRow at = packed_row(seq.m_first + row, args.group);
    if (at.position >= seq.q_slot || col >= args.dim_v) continue;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    CUTE_UNROLL
    for (int w = 0; w < T::kWarps; ++w) {
      const float4 x = *reinterpret_cast<const float4*>(
          reinterpret_cast<const float*>(&smem.slots[w]) + part_index<T::kDimV>(row, col));
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    char* out = out_rows(args, seq, state.head_q + at.head, state.split) +
                (at.position * args.out.stride_row + col) * size;
    if (args.out_fp32)
      *reinterpret_cast<float4*>(out) = sum;
    else
      *reinterpret_cast<uint2*>(out) =
          make_uint2(pack_pair<T::kType>(sum.x, sum.y), pack_pair<T::kType>(sum.z, sum.w));
  }
}

template <class Row>
__global__ void __launch_bounds__(FwdTypes<Row>::kThreads, FwdTypes<Row>::kMinBlocks)
    fa_fwd_packed(const __grid_constant__ FwdArgs args) {
  using T = FwdTypes<Row>;
  extern __shared__ __align__(128) unsigned char raw_smem[];
  auto& smem = *reinterpret_cast<PackedSmem<Row>*>(raw_smem);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const uint32_t smem_q = cute::cast_smem_ptr_to_uint(smem.q),
                 smem_k = cute::cast_smem_ptr_to_uint(smem.slots[warp].k),
                 smem_v = cute::cast_smem_ptr_to_uint(smem.slots[warp].v);
  const int splits = args.splits.count, group = args.group;

  for (uint32_t tile = blockIdx.x; tile < uint32_t(args.order.num_tiles); tile += gridDim.x) {
    const int thread = thread_again();
    const int split = int(tile % splits);
    const TileCoord at = tile_coord(args.order, tile / splits);
    const int batch = args.seq.cu_q == nullptr ? at.head / args.heads_k : 0;
    const int head_k = at.head - batch * args.heads_k, first_head = head_k * group;
    const SeqInfo seq = seq_info(args.seq, at.m, batch, T::kTileM, group);
    if (seq.m_first >= seq.q_slot * group) continue;

    const Band band = make_band(args.band, seq.q_len, seq.k_len);
    const int rows = seq.q_len * group;
    KeyRange range{};
    if (seq.m_first < rows)
      range = key_range(band, seq.m_first / group,
                        (min_of(seq.m_first + T::kTileM, rows) - 1) / group, seq.k_len, T::kTileN);
    if (splits > 1) range = part_of(range, split, splits);
    if (range.begin == range.end) {
      store_empty_packed(args, seq, first_head, T::kTileM, thread, T::kThreads, split);
      continue;
    }
    range = part_of(range, warp, T::kWarps);

    __syncthreads();  // nobody reads the previous tile's Q and parts any more
    auto& state = smem.state[warp];
    if (thread % 32 == 0) {
      state.k = CpAsyncKv<Row>::rows(args.k, seq, head_k);
      state.v = CpAsyncKv<Row>::rows(args.v, seq, head_k);
      state.seq = seq;
      state.range = range;
      state.head_q = first_head;
      state.split = split;
      state.mask.k_len = seq.k_len;
      state.mask.band = band;
    }
    __syncwarp();
    const CpAsyncKv<Row> loader(args, state, smem_k, smem_v);
    FwdStep<Row> step(args, loader, state, smem_q, smem_k, smem_v);
    load_packed_q<Row>(args, seq, first_head, smem_q, thread);
    const bool has_keys = range.begin < range.end;
    if (has_keys) step.prologue(range.end - 1);
    cute::cp_async_fence();
    cute::cp_async_wait<0>();
    __syncthreads();  // Q is here
    if (has_keys) attend_tile<typename T::Mask>(step, state.range, PlainScore{});
    store_packed(step, smem, args, thread_again());
  }
}

}  // namespace fa::sm80
