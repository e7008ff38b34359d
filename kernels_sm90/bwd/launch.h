// SPDX-License-Identifier: BSD-3-Clause
// How is a Hopper backward row launched? Tensor maps, then the three kernels; and its table entry.
#pragma once

#include "kernels_common/device/bwd_convert_kernel.h"
#include "kernels_common/device/bwd_prepare_kernel.h"
#include "kernels_common/host/launch_backward.h"
#include "kernels_common/host/registry.h"
#include "kernels_common/host/tensor_map.h"
#include "kernels_sm90/bwd/kernel.h"

namespace fa::sm90 {

// A [B, S, H, D] tensor seen in boxes of `rows` x `columns` of one head.
inline fa_status encode_bwd_rows(const char* name, const TensorArg& tensor, DType dtype,
                                 int64_t dim, int64_t rows, int64_t heads, int64_t batch,
                                 int box_rows, int box_columns, TensorMap* map) {
  const TensorMapSpec spec{
      .name = name,
      .data = tensor.data,
      .dtype = dtype,
      .extent = {dim, rows, heads, batch},
      .stride_bytes = {tensor.stride_row * 2, tensor.stride_head * 2, tensor.stride_batch * 2},
      .box = {box_columns, box_rows, 1, 1},
      .swizzle_128 = box_columns == 64,
      .swizzle_64 = box_columns == 32};
  return encode_tensor_map(spec, map);
}

template <class Row>
fa_status encode_bwd_maps(const BwdArgs& args, BwdParams<Row>* params) {
  using T = BwdTypes<Row>;
  constexpr DType kType = T::kConfig.dtype;
  const SeqArgs& seq = args.seq;
  const bool packed_q = seq.cu_q != nullptr, packed_k = seq.cu_k != nullptr;
  const int64_t q_rows = packed_q ? seq.total_q : seq.seqlen_q,
                k_rows = packed_k ? seq.total_k : seq.seqlen_k;
  const int64_t q_batch = packed_q ? 1 : seq.batch, k_batch = packed_k ? 1 : seq.batch;
  FA_TRY(encode_bwd_rows("k", args.k, kType, args.dim_qk, k_rows, args.heads_k, k_batch, T::kTileN,
                         T::kPanelQk, &params->k));
  FA_TRY(encode_bwd_rows("v", args.v, kType, args.dim_v, k_rows, args.heads_k, k_batch, T::kTileN,
                         T::kPanelV, &params->v));
  if (q_rows == 0) return FA_OK;  // no block is ever loaded
  FA_TRY(encode_bwd_rows("q", args.q, kType, args.dim_qk, q_rows, args.heads_q, q_batch, T::kTileM,
                         T::kPanelQk, &params->q));
  return encode_bwd_rows("dout", args.dout, kType, args.dim_v, q_rows, args.heads_q, q_batch,
                         T::kTileM, T::kPanelV, &params->dout);
}

template <class Row>
using DqOrder = AccumulatorOrder<BwdTypes<Row>::kDimQk, BwdTypes<Row>::kDqColumns>;

template <class Row>
const void* function() {
  if constexpr (BwdTypes<Row>::kPair)
    return reinterpret_cast<const void*>(&fa_bwd_pair<Row>);
  else
    return reinterpret_cast<const void*>(&fa_bwd<Row>);
}

template <class Row>
fa_status launch(const LaunchArgs& args, void* stream) {
  BwdParams<Row> params{};
  params.args = args.bwd;
  if (args.grid > 0) FA_TRY(encode_bwd_maps<Row>(args.bwd, &params));
  const BackwardKernels kernels{
      .prepare = reinterpret_cast<const void*>(&fa_bwd_prepare<Row>),
      .main = function<Row>(),
      .convert = reinterpret_cast<const void*>(&fa_bwd_convert<Row, DqOrder<Row>>),
      .threads = BwdTypes<Row>::kThreads,
      .smem_bytes = kBwdSmemBytes<Row>,
      .main_parameter = &params};
  return launch_backward<Row>(args.bwd, args.grid * Row::kConfig.cluster, kernels, stream);
}

template <class Row>
constexpr KernelEntry make_entry(const char* id) {
  static_assert(kBwdSmemBytes<Row> <= kBwdSmemLimit,
                "tile_m, tile_n, stages and stages_ds of this row need more shared "
                "memory than a block may use");
  return KernelEntry{id,           Row::kConfig,  BwdTypes<Row>::kThreads, kBwdSmemBytes<Row>,
                     &launch<Row>, &function<Row>};
}

}  // namespace fa::sm90
