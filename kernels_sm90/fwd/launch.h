// SPDX-License-Identifier: BSD-3-Clause
// How is a Hopper forward row launched? Tensor maps, attributes once per device, one launch; and
// its table entry.
#pragma once

#include "kernels_common/host/launch_row.h"
#include "kernels_common/host/registry.h"
#include "kernels_common/host/tensor_map.h"
#include "kernels_sm90/fwd/kernel.h"

namespace fa::sm90 {

// A [B, S, H, D] tensor seen in boxes of `rows` x 64 columns of one head.
inline fa_status encode_rows(const char* name, const TensorArg& tensor, DType dtype, int64_t dim,
                             int64_t rows, int64_t heads, int64_t batch, int box_rows,
                             TensorMap* map) {
  const TensorMapSpec spec{
      .name = name,
      .data = tensor.data,
      .dtype = dtype,
      .extent = {dim, rows, heads, batch},
      .stride_bytes = {tensor.stride_row * 2, tensor.stride_head * 2, tensor.stride_batch * 2},
      .box = {64, box_rows, 1, 1},
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
  FA_TRY(encode_rows("q", args.q, kType, args.dim_qk, q_rows, args.heads_q, q_batch, T::kTileM,
                     &params->q));
  if (k_rows > 0) {  // otherwise no block is ever loaded
    FA_TRY(encode_rows("k", args.k, kType, args.dim_qk, k_rows, args.heads_k, k_batch, T::kTileN,
                       &params->k));
    FA_TRY(encode_rows("v", args.v, kType, args.dim_v, k_rows, args.heads_k, k_batch, T::kTileN,
                       &params->v));
  }
  if (args.out_fp32 == 0)
    FA_TRY(encode_rows("out", args.out, kType, args.dim_v, q_rows, args.heads_q, q_batch, 16,
                       &params->out));
  return FA_OK;
}

template <class Row>
const void* function() {
  return reinterpret_cast<const void*>(&fa_fwd<Row>);
}

template <class Row>
fa_status launch(const LaunchArgs& args, void* stream) {
  KernelParams<Row> params{};
  params.args = args.fwd;
  FA_TRY(encode_maps<Row>(args.fwd, &params));
  return launch_row<Row>(function<Row>(), args.grid, FwdTypes<Row>::kThreads, kFwdSmemBytes<Row>,
                         &params, stream);
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
