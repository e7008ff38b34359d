// SPDX-License-Identifier: BSD-3-Clause
// How is a Hopper forward row launched? Tensor maps, attributes once per device, one launch; and
// its table entry.
#pragma once

#include "kernels_common/host/launch_row.h"
#include "kernels_common/host/registry.h"
#include "kernels_common/host/tensor_map.h"
#include "kernels_sm90/fwd/kernel.h"
#include "kernels_sm90/fwd/transpose_v.h"

namespace fa::sm90 {

// A [B, S, H, D] tensor seen in boxes of `rows` x `columns` of one head.
inline fa_status encode_rows(const char* name, const TensorArg& tensor, DType dtype, int64_t dim,
                             int64_t rows, int64_t heads, int64_t batch, int box_rows,
                             TensorMap* map, int columns) {
  const int bytes = dtype == DType::kE4m3 ? 1 : 2;
  const TensorMapSpec spec{.name = name,
                           .data = tensor.data,
                           .dtype = dtype,
                           .extent = {dim, rows, heads, batch},
                           .stride_bytes = {tensor.stride_row * bytes, tensor.stride_head * bytes,
                                            tensor.stride_batch * bytes},
                           .box = {columns, box_rows, 1, 1},
                           .swizzle_128 = columns * bytes == 128,
                           .swizzle_64 = columns * bytes == 64};
  return encode_tensor_map(spec, map);
}

// The same with the query heads of a group packed: boxes of all heads of a position, or of
// `box_rows` of them, before the next position.
inline fa_status encode_packed_rows(const char* name, const TensorArg& tensor, DType dtype,
                                    int64_t dim, int64_t rows, int64_t heads, int64_t batch,
                                    int group, int box_rows, TensorMap* map, int columns) {
  const int box_heads = group < box_rows ? group : box_rows;
  const TensorMapSpec spec{
      .name = name,
      .data = tensor.data,
      .dtype = dtype,
      .extent = {dim, heads, rows, batch},
      .stride_bytes = {tensor.stride_head * 2, tensor.stride_row * 2, tensor.stride_batch * 2},
      .box = {columns, box_heads, box_rows / box_heads, 1},
      .swizzle_128 = columns == 64,
      .swizzle_64 = columns == 32};
  return encode_tensor_map(spec, map);
}

// The transposed V in boxes of 128 keys x all columns of the row.
inline fa_status encode_value_keys(const FwdArgs& args, int dim, TensorMap* map) {
  const int64_t keys = int64_t{args.v_keys.tiles} * kValueTile;
  const TensorMapSpec spec{
      .name = "v transposed",
      .data = args.v_keys.data,
      .dtype = DType::kE4m3,
      .extent = {keys, args.dim_v, args.heads_k, args.seq.cu_k == nullptr ? args.seq.batch : 1},
      .stride_bytes = {keys, keys * args.dim_v, keys * args.dim_v * args.heads_k},
      .box = {128, dim, 1, 1},
      .swizzle_128 = true};
  return encode_tensor_map(spec, map);
}

template <class Row>
fa_status encode_maps(const FwdArgs& args, KernelParams<Row>* params) {
  using T = FwdTypes<Row>;
  constexpr DType kType = T::kConfig.dtype;
  const SeqArgs& seq = args.seq;
  const bool packed_q = seq.cu_q != nullptr, packed_k = seq.cu_k != nullptr;
  const int64_t q_rows = packed_q ? seq.total_q : seq.seqlen_q,
                k_rows = packed_k ? seq.total_k : seq.seqlen_k;
  const int64_t q_batch = packed_q ? 1 : seq.batch;
  // The rows that batch_index_k may name are only known on the device: no bound to clip at.
  const int64_t k_batch = packed_k                       ? 1
                          : seq.batch_index_k != nullptr ? int64_t{1} << 30
                                                         : seq.batch;
  if constexpr (T::kPacked)
    FA_TRY(encode_packed_rows("q", args.q, kType, args.dim_qk, q_rows, args.heads_q, q_batch,
                              args.group, T::kTileM, &params->q, T::kPanel));
  else
    FA_TRY(encode_rows("q", args.q, kType, args.dim_qk, q_rows, args.heads_q, q_batch, T::kTileM,
                       &params->q, T::kPanel));
  if (k_rows > 0) {  // otherwise no block is ever loaded
    FA_TRY(encode_rows("k", args.k, kType, args.dim_qk, k_rows, args.heads_k, k_batch, T::kTileN,
                       &params->k, T::kPanel));
    if constexpr (T::kFp8 && !T::kTransposes)
      FA_TRY(encode_value_keys(args, T::kDimV, &params->v));
    else
      FA_TRY(encode_rows("v", args.v, kType, args.dim_v, k_rows, args.heads_k, k_batch,
                         T::kTransposes ? T::kRowKeys : T::kTileN, &params->v, T::kPanel));
  }
  constexpr DType kOutType = T::kFp8 ? DType::kBf16 : kType;  // TMA only moves 16 bits
  if (args.out_fp32 != 0) return FA_OK;
  if constexpr (T::kPacked)
    FA_TRY(encode_packed_rows("out", args.out, kOutType, args.dim_v, q_rows, args.heads_q, q_batch,
                              args.group, 16, &params->out, T::kOutPanel));
  else
    FA_TRY(encode_rows("out", args.out, kOutType, args.dim_v, q_rows, args.heads_q, q_batch, 16,
                       &params->out, T::kOutPanel));
  return FA_OK;
}

template <class Row>
const void* function() {
  return reinterpret_cast<const void*>(&fa_fwd<Row>);
}

// Writes V as the row wants it into the workspace. `launched`: the next kernel may begin while that
// one ends.
template <class Row>
fa_status transpose_values(FwdArgs& args, void* stream, bool* launched) {
  const int64_t blocks = transpose_blocks<Row>(args);
  *launched = blocks > 0;
  if (blocks == 0) return FA_OK;
  return launch_row<Row>(reinterpret_cast<const void*>(&fa_transpose_v<Row>),
                         static_cast<int>(blocks), 2 * kTransposeDims<Row>, 0, &args, stream);
}

template <class Row>
fa_status launch(const LaunchArgs& args, void* stream) {
  KernelParams<Row> params{};
  params.args = args.fwd;
  FA_TRY(encode_maps<Row>(params.args, &params));
  if (params.args.next_tile != nullptr) FA_TRY(clear_counter(params.args.next_tile, stream));
  bool overlapped = false;
  if constexpr (FwdTypes<Row>::kFp8 && !FwdTypes<Row>::kTransposes)
    FA_TRY(transpose_values<Row>(params.args, stream, &overlapped));
  return launch_row<Row>(function<Row>(), args.grid, FwdTypes<Row>::kThreads, kFwdSmemBytes<Row>,
                         &params, stream, overlapped);
}

template <class Row>
constexpr KernelEntry make_entry(const char* id) {
  static_assert(kFwdSmemBytes<Row> <= kSmemLimit,
                "tile_m, tile_n, stages, q_slots and o_buf of this row need more shared memory "
                "than a block may use");
  return KernelEntry{id,           Row::kConfig,  FwdTypes<Row>::kThreads, kFwdSmemBytes<Row>,
                     &launch<Row>, &function<Row>};
}

}  // namespace fa::sm90
