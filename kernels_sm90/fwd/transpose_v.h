// SPDX-License-Identifier: BSD-3-Clause
// How does V become the operand that e4m3 products need? A kernel ahead of the attention writes it
// with contiguous keys.
#pragma once

#include "kernels_common/device/grid_order.h"
#include "kernels_common/device/value_keys.h"
#include "kernels_sm90/fwd/config.h"

namespace fa::sm90 {

// Columns of V in one block, beside kValueTile keys; two threads a column.
template <class Row>
inline constexpr int kTransposeDims = FwdTypes<Row>::kDimV < 128 ? 64 : 128;

// Keys of a group lie together; groups are set apart by 4 banks, so that a warp that
// reads 4 columns of the same key of all groups meets every bank once.
template <int kDims>
struct TransposeSmem {
  static constexpr int kGroups = kValueTile / kKeyGroup;
  uint32_t words[kGroups][kKeyGroup * kDims / 4 + 4];
};

struct TransposeBlock {
  ValueTile tile;
  int tile_index, first_dim;
  const uint8_t* source;  // key 0 of the sequence, column 0 of the head
  uint8_t* target;        // column 0 of the head, first key of the tile
};

template <int kDims>
FA_DEVICE TransposeBlock transpose_block(const FwdArgs& args) {
  TransposeBlock block;
  const int parts = ceil_div(args.dim_v, kDims);
  int rest = static_cast<int>(blockIdx.x);
  block.first_dim = rest % parts * kDims;
  rest /= parts;
  block.tile_index = rest % args.v_keys.tiles;
  rest /= args.v_keys.tiles;
  const int head = rest % args.heads_k, batch = rest / args.heads_k;
  block.tile = value_tile(args.seq, args.band, block.tile_index, batch);
  const SeqInfo& seq = block.tile.seq;
  block.source = static_cast<const uint8_t*>(args.v.data) + seq.k_batch * args.v.stride_batch +
                 seq.k_begin * args.v.stride_row + head * args.v.stride_head;
  const int64_t plane = int64_t{batch} * args.heads_k + head;
  block.target = static_cast<uint8_t*>(args.v_keys.data) +
                 plane * args.dim_v * args.v_keys.tiles * kValueTile +
                 block.tile_index * kValueTile;
  return block;
}

// Sixteen columns of one key; zeros behind dim_v, where memory may end.
FA_DEVICE uint4 load_columns(const uint8_t* row, int dim, int dim_v) {
  uint4 value{};
  if (dim + 16 <= dim_v) {
    value = __ldg(reinterpret_cast<const uint4*>(row + dim));
  } else if (dim + 8 <= dim_v) {
    const uint2 half = __ldg(reinterpret_cast<const uint2*>(row + dim));
    value.x = half.x;
    value.y = half.y;
  }
  return value;
}

// V as usual: columns contiguous.
template <int kDims>
FA_DEVICE void transpose_rows(const FwdArgs& args, const TransposeBlock& block,
                              TransposeSmem<kDims>& smem) {
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kThreads = 2 * kDims, kChunks = kDims / 16;
  constexpr int kLoads = kValueTile * kChunks / kThreads;
  const int chunk = thread % kChunks;
  uint4 value[kLoads];  // all on their way before the first is waited for
  CUTE_UNROLL
  for (int i = 0; i < kLoads; ++i) {
    const int key = block.tile.first + (i * kThreads + thread) / kChunks;
    value[i] = uint4{};
    if (key >= block.tile.seen.begin && key < block.tile.seen.end)
      value[i] = load_columns(block.source + key * args.v.stride_row, block.first_dim + 16 * chunk,
                              args.dim_v);
  }
  CUTE_UNROLL
  for (int i = 0; i < kLoads; ++i) {
    const int local = (i * kThreads + thread) / kChunks;
    *reinterpret_cast<uint4*>(
        &smem.words[local / kKeyGroup][local % kKeyGroup * (kDims / 4) + 4 * chunk]) = value[i];
  }
  __syncthreads();
  constexpr int kGroups = TransposeSmem<kDims>::kGroups;
  const int group = thread % kGroups, quad = thread / kGroups;
  uint32_t out[4][4];  // [column][four keys]
  CUTE_UNROLL
  for (int four = 0; four < 4; ++four) {
    uint32_t key[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      key[i] = smem.words[group][key_at(4 * four + i) * (kDims / 4) + quad];
    const uint32_t a = __byte_perm(key[0], key[1], 0x5140), b = __byte_perm(key[0], key[1], 0x7362);
    const uint32_t c = __byte_perm(key[2], key[3], 0x5140), d = __byte_perm(key[2], key[3], 0x7362);
    out[0][four] = __byte_perm(a, c, 0x5410);
    out[1][four] = __byte_perm(a, c, 0x7632);
    out[2][four] = __byte_perm(b, d, 0x5410);
    out[3][four] = __byte_perm(b, d, 0x7632);
  }
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int dim = block.first_dim + 4 * quad + i;
    if (dim < args.dim_v)
      *reinterpret_cast<uint4*>(block.target + int64_t{dim} * args.v_keys.tiles * kValueTile +
                                group * kKeyGroup) =
          uint4{out[i][0], out[i][1], out[i][2], out[i][3]};
  }
}

// V with contiguous keys already: they only change places inside groups of 16.
template <int kDims>
FA_DEVICE void reorder_keys(const FwdArgs& args, const TransposeBlock& block) {
  constexpr int kGroups = TransposeSmem<kDims>::kGroups;
  for (int i = static_cast<int>(threadIdx.x); i < kDims * kGroups; i += 2 * kDims) {
    const int dim = block.first_dim + i / kGroups, group = i % kGroups;
    if (dim >= args.dim_v) return;
    const int key = block.tile.first + group * kKeyGroup;
    const uint8_t* from = block.source + dim * args.v_keys.stride_dim + key;
    uint32_t in[4] = {0, 0, 0, 0};
    const bool whole = key >= block.tile.seen.begin && key + kKeyGroup <= block.tile.seen.end;
    if (whole && reinterpret_cast<uint64_t>(from) % 16 == 0) {
      const uint4 value = *reinterpret_cast<const uint4*>(from);
      in[0] = value.x, in[1] = value.y, in[2] = value.z, in[3] = value.w;
    } else {
      CUTE_UNROLL
      for (int j = 0; j < kKeyGroup; ++j)
        if (key + j >= block.tile.seen.begin && key + j < block.tile.seen.end)
          in[j / 4] |= uint32_t{from[j]} << (j % 4 * 8);
    }
    *reinterpret_cast<uint4*>(block.target + int64_t{dim} * args.v_keys.tiles * kValueTile +
                              group * kKeyGroup) =
        uint4{__byte_perm(in[0], in[2], 0x5410), __byte_perm(in[0], in[2], 0x7632),
              __byte_perm(in[1], in[3], 0x5410), __byte_perm(in[1], in[3], 0x7632)};
  }
}

// Each row of the table has its own copy, so that the objects of rows share no symbol.
template <class Row>
__global__ void __launch_bounds__(2 * kTransposeDims<Row>)
    fa_transpose_v(const __grid_constant__ FwdArgs args) {
  constexpr int kDims = kTransposeDims<Row>;
  __shared__ TransposeSmem<kDims> smem;
  __shared__ TransposeBlock block;  // found by one thread: it is half of the instructions
  let_next_kernel_begin();
  if (threadIdx.x == 0) block = transpose_block<kDims>(args);
  __syncthreads();
  if (!block.tile.read()) return;
  if (args.v_keys.stride_dim == 1)
    transpose_rows<kDims>(args, block, smem);
  else
    reorder_keys<kDims>(args, block);
}

template <class Row>
int64_t transpose_blocks(const FwdArgs& args) {
  const int64_t planes = int64_t{args.heads_k} * (args.seq.cu_k == nullptr ? args.seq.batch : 1);
  return planes * args.v_keys.tiles * ceil_div(args.dim_v, kTransposeDims<Row>);
}

}  // namespace fa::sm90
