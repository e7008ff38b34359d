// SPDX-License-Identifier: BSD-3-Clause
// Where do the rows of a tile go in O and LSE, what is a sink's logit, and what do rows without a
// key get?
#pragma once

#include "kernels_common/api/fa.h"
#include "kernels_common/device/element.h"
#include "kernels_common/device/seq_info.h"

namespace fa {

// Logit that only enters the denominators of head `head_q`; −inf where there are no sinks.
template <class Args>
FA_DEVICE float sink_of(const Args& args, int head_q) {
  if (args.sinks == nullptr) return -INFINITY;
  const int64_t at = head_q * args.sinks_stride;
  if (args.sinks_dtype == FA_FP32) return static_cast<const float*>(args.sinks)[at];
  if (args.sinks_dtype == FA_BF16)
    return float(static_cast<const cutlass::bfloat16_t*>(args.sinks)[at]);
  return float(static_cast<const cutlass::half_t*>(args.sinks)[at]);
}

// First element of row 0 of the sequence in O; `split`: which part of the keys.
FA_DEVICE char* out_rows(const FwdArgs& args, const SeqInfo& seq, int head_q, int split = 0) {
  const int64_t at = seq.q_batch * args.out.stride_batch + seq.q_begin * args.out.stride_row +
                     head_q * args.out.stride_head + split * args.splits.stride_out;
  return static_cast<char*>(args.out.data) + at * (args.out_fp32 ? 4 : 2);
}

// LSE of row 0 of the sequence; null: not wanted.
FA_DEVICE float* lse_rows(const FwdArgs& args, const SeqInfo& seq, int head_q, int split = 0) {
  if (args.lse == nullptr) return nullptr;
  return args.lse + seq.q_batch * args.lse_stride_batch + head_q * args.lse_stride_head +
         seq.q_begin + split * args.splits.stride_lse;
}

// A sink is part of one split.
FA_DEVICE float sink_of_split(const FwdArgs& args, int head_q, int split) {
  return split == 0 ? sink_of(args, head_q) : -INFINITY;
}

// A tile none of whose rows sees a key: O = 0 and LSE = −inf, or the sink for rows that take part.
FA_DEVICE void store_empty(const FwdArgs& args, const SeqInfo& seq, int head_q, int tile_m,
                           int thread, int threads, int split = 0) {
  const int end = min_of(seq.q_slot, seq.m_first + tile_m);
  const int chunks = args.dim_v * (args.out_fp32 ? 4 : 2) / 16;  // 16 bytes each
  const int64_t row_bytes = args.out.stride_row * (args.out_fp32 ? 4 : 2);
  char* out = out_rows(args, seq, head_q, split);
  for (int i = thread; i < (end - seq.m_first) * chunks; i += threads) {
    const int row = i / chunks;
    *reinterpret_cast<uint4*>(out + (seq.m_first + row) * row_bytes + (i - row * chunks) * 16) =
        uint4{};
  }
  if (float* lse = lse_rows(args, seq, head_q, split)) {
    const float sink = sink_of_split(args, head_q, split);
    for (int row = seq.m_first + thread; row < end; row += threads)
      lse[row] = row < seq.q_len ? sink : -INFINITY;
  }
}

// The same for packed query heads; `first_head`: of the group.
FA_DEVICE void store_empty_packed(const FwdArgs& args, const SeqInfo& seq, int first_head,
                                  int tile_m, int thread, int threads, int split = 0) {
  const int end = min_of(seq.q_slot * args.group, seq.m_first + tile_m);
  const int size = args.out_fp32 ? 4 : 2, chunks = args.dim_v * size / 16;
  for (int i = thread; i < (end - seq.m_first) * chunks; i += threads) {
    const int row = i / chunks;
    const PackedRow at = packed_row(seq.m_first + row, args.group);
    char* out =
        out_rows(args, seq, first_head + at.head, split) + at.position * args.out.stride_row * size;
    *reinterpret_cast<uint4*>(out + (i - row * chunks) * 16) = uint4{};
  }
  if (args.lse == nullptr) return;
  for (int row = seq.m_first + thread; row < end; row += threads) {
    const PackedRow at = packed_row(row, args.group);
    const int head = first_head + at.head;
    lse_rows(args, seq, head, split)[at.position] =
        at.position < seq.q_len ? sink_of_split(args, head, split) : -INFINITY;
  }
}

}  // namespace fa
