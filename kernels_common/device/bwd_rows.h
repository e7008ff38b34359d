// SPDX-License-Identifier: BSD-3-Clause
// Which query rows belong to one block of the kernels around the backward, and how are eight of
// their values read and written?
#pragma once

#include "kernels_common/api/fa.h"
#include "kernels_common/device/element.h"
#include "kernels_common/device/seq_info.h"

namespace fa {

// One workspace tile: its sequence and head.
struct RowTile {
  int64_t tile;
  int head_q;
  SeqInfo seq;
};

FA_DEVICE RowTile row_tile(const BwdArgs& args, int index, int tile_m) {
  const int head = index / args.rows.tiles_m, m = index - head * args.rows.tiles_m;
  const int batch = args.seq.cu_q == nullptr ? head / args.heads_q : 0;
  return RowTile{index, head - batch * args.heads_q, seq_info(args.seq, m, batch, tile_m)};
}

// Address of (row, column) of the sequence; rows count from its first.
FA_DEVICE char* element_at(const TensorArg& t, int64_t batch, int64_t row, int64_t head, int col,
                           int bytes) {
  const int64_t at = batch * t.stride_batch + row * t.stride_row + head * t.stride_head + col;
  return static_cast<char*>(t.data) + at * bytes;
}

template <DType kType>
FA_DEVICE void load_eight(const char* from, bool fp32, float (&to)[8]) {
  if (fp32) {
    const float4 low = *reinterpret_cast<const float4*>(from);
    const float4 high = *reinterpret_cast<const float4*>(from + 16);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
  } else {
    alignas(16) Element<kType> packed[8];
    *reinterpret_cast<uint4*>(packed) = *reinterpret_cast<const uint4*>(from);
    for (int i = 0; i < 8; ++i) to[i] = float(packed[i]);
  }
}

// kOnce: no kernel here reads it again, so that it leaves L2 first.
template <bool kOnce, class Word>
FA_DEVICE void store_word(Word* to, Word value) {
  if constexpr (kOnce)
    __stcs(to, value);
  else
    *to = value;
}

template <DType kType, bool kOnce = false>
FA_DEVICE void store_eight(char* to, bool fp32, const float (&from)[8]) {
  if (fp32) {
    float4* four = reinterpret_cast<float4*>(to);
    store_word<kOnce>(four, make_float4(from[0], from[1], from[2], from[3]));
    store_word<kOnce>(four + 1, make_float4(from[4], from[5], from[6], from[7]));
  } else {
    store_word<kOnce>(
        reinterpret_cast<uint4*>(to),
        make_uint4(pack_pair<kType>(from[0], from[1]), pack_pair<kType>(from[2], from[3]),
                   pack_pair<kType>(from[4], from[5]), pack_pair<kType>(from[6], from[7])));
  }
}

// Where the statistics of row `r` lie in those of its tile. On Hopper a thread of the main kernel
// reads those of its columns (acc_view.h) in groups of four.
template <int kArch>
FA_HOST_DEVICE constexpr int stat_position(int r) {
  return kArch == 90 ? r / 16 * 16 + r % 8 / 2 * 4 + r % 16 / 8 * 2 + r % 2 : r;
}

}  // namespace fa
