// SPDX-License-Identifier: BSD-3-Clause
// The backward kernel: which key tile a thread block works on, its steps, and how dK and dV leave
// the registers.
#pragma once

#include "kernels_common/device/tile_scheduler.h"
#include "kernels_sm80/bwd/step.h"

namespace fa::sm80 {

// Byte address of the first key of the tile in `t`.
FA_DEVICE char* key_rows(const TensorArg& t, const KeyTileInfo& info, int head_k, int bytes) {
  return static_cast<char*>(t.data) +
         bytes * (info.k_batch * t.stride_batch +
                  int64_t(info.k_begin + info.n_first) * t.stride_row + head_k * t.stride_head);
}

// Gradients of keys that no query row sees: zeros, unless they are added to what is there.
FA_DEVICE void store_no_gradient(const BwdArgs& args, const KeyTileInfo& info, int head_k, int keys,
                                 int thread, int threads) {
  if (args.accumulate) return;
  for (int part = 0; part < 2; ++part) {
    const TensorArg& t = part == 0 ? args.dv : args.dk;
    const int bytes = (part == 0 ? args.dv_fp32 : args.dk_fp32) ? 4 : 2;
    const int chunks = (part == 0 ? args.dim_v : args.dim_qk) * bytes / 16;
    char* rows = key_rows(t, info, head_k, bytes);
    for (int i = thread; i < keys * chunks; i += threads) {
      const int row = i / chunks;
      *reinterpret_cast<uint4*>(rows + row * t.stride_row * bytes + (i - row * chunks) * 16) =
          uint4{};
    }
  }
}

// One warp's sums to dV or dK. `smem`: BwdSmem::v or k as an address, which nobody reads any more.
template <class Row>
FA_DEVICE void store_sum(BwdStep<Row>& step, const BwdArgs& args, const BwdState& state,
                         uint32_t smem, int lane) {
  using T = BwdTypes<Row>;
  using Tile = SwizzledTile<T::kTileN>;
  const bool values = step.values();
  const TensorArg& t = values ? args.dv : args.dk;
  const int dim = values ? args.dim_v : args.dim_qk;
  const bool fp32 = values ? args.dv_fp32 : args.dk_fp32;
  const float factor = values ? 1.f : args.scale;
  const int first = step.pair() * T::kPairKeys;  // of this warp, in the tile
  const int keys = min_of(T::kTileN, state.info.k_len - state.info.n_first);
  const int64_t row_bytes = t.stride_row * (fp32 ? 4 : 2);
  char* out = key_rows(t, state.info, state.head_k, fp32 ? 4 : 2);
  auto view = acc_view(step.sum);  // (keys, dims)

  // Calls use(r, c, place in global memory) for each pair of columns that exists.
  const auto for_each_pair = [&](auto element, auto use) __attribute__((always_inline)) {
    CUTE_UNROLL
    for (int r = 0; r < cute::size<0>(view); ++r) {
      const int row = first + lane / 4 + acc_row(r, 16), col = acc_first_col(lane);
      auto* to = reinterpret_cast<decltype(element)*>(out + row * row_bytes) + col;
      int left = row < keys ? dim - col : 0;
      asm volatile("" : "+r"(left));  // compared anew: predicates would take registers
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(view); c += 2)
        if (acc_col(c) < left) use(r, c, to + acc_col(c));
    }
  };
  CUTE_UNROLL
  for (int i = 0; i < cute::size(view); ++i) view(i) *= factor;
  const auto add_before = [&](int r, int c, float2 before) {
    view(r, c) += before.x;
    view(r, c + 1) += before.y;
  };
  if (fp32) {
    if (args.accumulate)
      for_each_pair(0.f, [&](int r, int c, const float* from) {
        add_before(r, c, *reinterpret_cast<const float2*>(from));
      });
    for_each_pair(0.f, [&](int r, int c, float* to) {
      *reinterpret_cast<float2*>(to) = make_float2(view(r, c), view(r, c + 1));
    });
    return;
  }
  if (args.accumulate)
    for_each_pair(uint16_t{}, [&](int r, int c, const uint16_t* from) {
      add_before(r, c, unpack_pair<T::kType>(*reinterpret_cast<const uint32_t*>(from)));
    });

  // Through this warp's own rows of shared memory, so that whole 16-byte chunks leave in order.
  CUTE_UNROLL
  for (int r = 0; r < cute::size<0>(view); ++r) {
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(view); c += 2)
      store_shared(smem + Tile::offset(first + lane / 4 + acc_row(r, 16), c / 2) + lane % 4 * 4,
                   pack_pair<T::kType>(view(r, c), view(r, c + 1)));
  }
  __syncwarp();
  CUTE_UNROLL
  for (int i = 0; i < T::kPairKeys / 4; ++i) {
    const int row = first + i * 4 + lane / 8;
    CUTE_UNROLL
    for (int p = 0; p < Tile::panels(T::kDim); ++p) {
      const int chunk = p * 8 + lane % 8;
      if (row >= keys || chunk * 8 >= dim) continue;
      *reinterpret_cast<uint4*>(out + row * row_bytes + chunk * 16) =
          load_shared_chunk(smem + Tile::offset(row, chunk));
    }
  }
}

// Steps of a key tile: every query block that sees it, of every query head of the group.
struct StepCursor {
  int in_group, m;
  FA_DEVICE void advance(const QueryRange& range) {
    ++m;
    if (m == range.end) {
      m = range.begin;
      ++in_group;
    }
  }
};

template <class Row>
__global__ void __launch_bounds__(BwdTypes<Row>::kThreads, BwdTypes<Row>::kMinBlocks)
    fa_bwd(const __grid_constant__ BwdArgs args) {
  using T = BwdTypes<Row>;
  extern __shared__ __align__(128) unsigned char raw_smem[];
  auto& smem = *reinterpret_cast<BwdSmem<Row>*>(raw_smem);
  BwdState& state = smem.state;

  for (uint32_t tile = blockIdx.x; tile < uint32_t(args.order.num_tiles); tile += gridDim.x) {
    const int thread = thread_index();
    // In turns the last keys come first: under a causal mask their rows begin at the diagonal,
    // where no other key tile has to add before them.
    const TileCoord at = args.work.turns == nullptr ? key_tile_coord(args.order, tile)
                                                    : tile_coord(args.order, tile);
    const int batch = args.seq.cu_k == nullptr ? at.head / args.heads_k : 0;
    const int head_k = at.head - batch * args.heads_k;
    const KeyTileInfo info = key_tile_info(args.seq, at.m, batch, T::kTileM, T::kTileN);
    if (info.n_first >= info.k_len) continue;
    const int keys = min_of(T::kTileN, info.k_len - info.n_first);

    const Band band = make_band(args.band, info.q_len, info.k_len);
    QueryRange range{};
    if (info.q_len > 0)
      range = query_range(band, info.n_first, T::kTileN, info.q_len, info.k_len, T::kTileM);
    if (range.begin == range.end) {
      store_no_gradient(args, info, head_k, keys, thread, T::kThreads);
      continue;
    }

    __syncthreads();  // nobody reads the previous tile's state and shared memory any more
    const int head_q = head_k * args.group;
    if (thread == 0) {
      state.info = info;
      state.range = range;
      state.band = band;
      state.head_k = head_k;
      state.index = tile;
      state.tile = static_cast<int>(workspace_tile(args, info, head_q, 0));
      state.lse_log2 = args.work.lse_log2 + int64_t(state.tile) * T::kTileM;
      state.delta = args.work.delta + int64_t(state.tile) * T::kTileM;
      state.q = static_cast<const char*>(args.q.data) +
                2 * (info.q_batch * args.q.stride_batch + info.q_begin * args.q.stride_row +
                     head_q * args.q.stride_head);
      state.dout = static_cast<const char*>(args.dout.data) +
                   2 * (info.q_batch * args.dout.stride_batch +
                        info.q_begin * args.dout.stride_row + head_q * args.dout.stride_head);
    }
    __syncthreads();

    const BwdLoader<Row> loader(args, smem);
    const KeyRange seen = key_range(band, 0, info.q_len - 1, info.k_len, T::kTileN);
    loader.load_keys(key_rows(args.k, info, head_k, 2), key_rows(args.v, info, head_k, 2),
                     seen.any_lo - info.n_first, seen.any_hi - info.n_first);
    StepCursor now{0, state.range.begin};
    loader.load_rows(now.in_group, now.m, 0);
    cute::cp_async_fence();

    // Through a shuffle, so that the compiler knows that a warp agrees on it.
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
    BwdStep<Row> step(args, smem, warp);
    int tile_before = -1, ds = 0;
    while (now.in_group < args.group) {
      cute::cp_async_wait<0>();
      __syncthreads();  // Q, dO of this step and dS of the one before are here
      step.run(now.in_group, now.m, T::kStages == 2 ? ds : 0, ds, tile_before,
               [&]() __attribute__((always_inline)) {
                 StepCursor next = now;
                 next.advance(state.range);
                 if (T::kStages == 2 && next.in_group < args.group)
                   loader.load_rows(next.in_group, next.m, ds ^ 1);
                 cute::cp_async_fence();
               });
      tile_before = state.tile + now.in_group * args.rows.tiles_m + now.m;
      now.advance(state.range);  // anew: not kept in registers across the step
      ds ^= 1;
      if (T::kStages == 1 && now.in_group < args.group) {
        __syncthreads();  // nobody reads Q and dO any more
        loader.load_rows(now.in_group, now.m, 0);
        cute::cp_async_fence();
      }
    }
    __syncthreads();
    step.add_dq(ds ^ 1, tile_before);
    tile = state.index;
    __syncthreads();  // nobody reads K any more
    store_sum(step, args, state, cute::cast_smem_ptr_to_uint(step.values() ? smem.v : smem.k),
              thread_index() % 32);
  }
}

}  // namespace fa::sm80
