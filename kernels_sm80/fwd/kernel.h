// SPDX-License-Identifier: BSD-3-Clause
// The forward kernel: which tiles a thread block works on, and how the result of one leaves the
// registers.
#pragma once

#include "kernels_common/device/fwd_epilogue.h"
#include "kernels_sm80/fwd/step.h"

namespace fa::sm80 {

// Normalises the accumulators and writes O and LSE of one warp's rows. `smem_o`: FwdSmem::q as an
// address.
template <class Row>
FA_DEVICE void store_tile(FwdStep<Row>& step, const FwdArgs& args, const SeqInfo& seq, int head_q,
                          int split, uint32_t smem_o, int warp, int lane) {
  using T = FwdTypes<Row>;
  constexpr int kRows = 2 * T::kSlabs;
  const int first = seq.m_first + warp * T::kWarpRows;  // of this warp
  float sinks[kRows];
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) sinks[r] = sink_of_split(args, head_q, split);
  step.softmax.finish(args.scale_log2, sinks);

  float* lse = lse_rows(args, seq, head_q, split);
  char* out = out_rows(args, seq, head_q, split);
  auto view = acc_view(step.output);  // (rows, columns)
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int row = first + lane / 4 + acc_row(r, 16);
    const bool taking_part = row < seq.q_len;
    if (lse != nullptr && lane % 4 == 0 && row < seq.q_slot)
      lse[row] = taking_part ? step.softmax.max[r] : -INFINITY;
    float factor = taking_part ? step.softmax.sum[r] : 0.f;
    if constexpr (T::kConfig.dropout) factor *= args.dropout.keep_scale;
    // Selected, not multiplied: a row without a key is 0 even if a neighbour's key brought NaN into
    // the accumulators.
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(view); ++c)
      view(r, c) = factor == 0.f ? 0.f : view(r, c) * factor;
  }

  if (args.out_fp32) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int row = first + lane / 4 + acc_row(r, 16);
      float* to = reinterpret_cast<float*>(out) + row * args.out.stride_row + acc_first_col(lane);
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); c += 2)
        if (row < seq.q_slot && acc_col(c) + acc_first_col(lane) < args.dim_v)
          *reinterpret_cast<float2*>(to + acc_col(c)) = make_float2(view(r, c), view(r, c + 1));
    }
    return;
  }

  // Through this warp's own rows of shared memory, so that whole 16-byte chunks leave in order.
  using Tile = SwizzledTile<T::kTileM>;
  __syncwarp();
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(view); c += 2) {
      const uint32_t at = smem_o +
                          Tile::offset(warp * T::kWarpRows + lane / 4 + acc_row(r, 16), c / 2) +
                          lane % 4 * 4;
      store_shared(at, pack_pair<T::kType>(view(r, c), view(r, c + 1)));
    }
  }
  __syncwarp();
  const int64_t row_bytes = args.out.stride_row * 2;
  CUTE_UNROLL
  for (int i = 0; i < T::kWarpRows / 4; ++i) {
    const int in_warp = i * 4 + lane / 8, row = first + in_warp;
    CUTE_UNROLL
    for (int p = 0; p < Tile::panels(T::kDimV); ++p) {
      const int chunk = p * 8 + lane % 8;
      if (row >= seq.q_slot || chunk * 8 >= args.dim_v) continue;
      *reinterpret_cast<uint4*>(out + row * row_bytes + chunk * 16) =
          load_shared_chunk(smem_o + Tile::offset(warp * T::kWarpRows + in_warp, chunk));
    }
  }
  __syncwarp();  // the next tile's Q overwrites these rows
}

template <class Row>
__global__ void __launch_bounds__(FwdTypes<Row>::kThreads, FwdTypes<Row>::kMinBlocks)
    fa_fwd(const __grid_constant__ FwdArgs args) {
  using T = FwdTypes<Row>;
  extern __shared__ __align__(128) unsigned char raw_smem[];
  auto& smem = *reinterpret_cast<FwdSmem<Row>*>(raw_smem);
  const uint32_t smem_q = cute::cast_smem_ptr_to_uint(smem.q),
                 smem_k = cute::cast_smem_ptr_to_uint(smem.k),
                 smem_v = cute::cast_smem_ptr_to_uint(smem.v);

  uint32_t tile = blockIdx.x;
  for (; tile < uint32_t(args.order.num_tiles); tile += gridDim.x) {
    const int thread = thread_again();
    // Opaque per tile: else reciprocals that are the same for every tile occupy registers in the
    // key loop.
    int heads_q = args.heads_q, group = args.group, splits = args.splits.count;
    TileOrder order = args.order;
    asm volatile("" : "+r"(heads_q), "+r"(group), "+r"(order.tiles_m), "+r"(order.section));
    asm volatile("" : "+r"(splits));
    // Through a shuffle, so that the compiler knows that a warp agrees on it.
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
    // The parts of a tile's keys are neighbours in the order.
    const int split = splits == 1 ? 0 : int(tile % splits);
    const TileCoord at = tile_coord(order, splits == 1 ? tile : tile / splits);
    const int batch = args.seq.cu_q == nullptr ? at.head / heads_q : 0;
    const int head_q = at.head - batch * heads_q;
    const SeqInfo seq = seq_info(args.seq, at.m, batch, T::kTileM);
    if (seq.m_first >= seq.q_slot) continue;

    Band band{kUnlimited, kUnlimited, 0, 0};
    if constexpr (T::Mask::kNeeded) band = make_band(args.band, seq.q_len, seq.k_len);
    KeyRange range{};
    if (seq.m_first < seq.q_len)
      range = key_range(band, seq.m_first, min_of(seq.m_first + T::kTileM, seq.q_len) - 1,
                        seq.k_len, T::kTileN);
    if (splits > 1) range = part_of(range, split, splits);
    if (range.begin == range.end) {
      store_empty(args, seq, head_q, T::kTileM, thread, T::kThreads, split);
      continue;
    }

    __syncthreads();  // nobody reads the previous tile's state, K and V any more
    auto& state = smem.state[warp];
    if (lane == 0) {
      state.k = CpAsyncKv<Row>::rows(args.k, seq, head_q / group);
      state.v = CpAsyncKv<Row>::rows(args.v, seq, head_q / group);
      state.seq = seq;
      state.range = range;
      state.head_q = head_q;
      state.split = split;
      state.tile = tile;
      state.mask.k_len = seq.k_len;
      if constexpr (T::Mask::kNeeded) state.mask.band = band;
      if constexpr (T::kConfig.score == ScoreKind::kAny)
        state.score = score_tile(args.score, seq.index, head_q, seq.q_len, seq.k_len);
      if constexpr (T::kConfig.dropout)
        if (args.dropout.seed_offset != nullptr)
          fill_dropout_tile(dropout_place(args.dropout.seed_offset, seq.index, heads_q, head_q),
                            smem.dropout[warp].tile);
    }
    __syncwarp();
    const CpAsyncKv<Row> loader(args, state, smem_k, smem_v);
    FwdStep<Row> step(args, loader, state, smem_q, smem_k, smem_v);
    if constexpr (T::kConfig.dropout)
      step.dropout_memory = cute::cast_smem_ptr_to_uint(&smem.dropout[warp]);
    PlainQ<Row>::load(static_cast<const char*>(args.q.data) +
                          2 * (seq.q_batch * args.q.stride_batch +
                               int64_t(seq.q_begin + seq.m_first) * args.q.stride_row +
                               head_q * args.q.stride_head),
                      args.q.stride_row * 2, min_of(T::kTileM, seq.q_len - seq.m_first),
                      args.dim_qk, smem_q, warp, lane);
    step.prologue(range.end - 1);
    attend_tile<typename T::Mask>(step, state.range, PlainScore{});
    tile = state.tile;
    const int again = thread_again();
    store_tile(step, args, state.seq, state.head_q, state.split, smem_q, again / 32, again % 32);
  }
  cute::cp_async_wait<0>();
}

}  // namespace fa::sm80
