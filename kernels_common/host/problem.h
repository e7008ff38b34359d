// SPDX-License-Identifier: BSD-3-Clause
// What does the caller want? fa_params, validated and normalised; nothing downstream looks at
// fa_params again.
#pragma once

#include <cstdint>

#include "kernels_common/api/fa.h"
#include "kernels_common/device/launch_args.h"
#include "kernels_common/host/kernel_config.h"

namespace fa {

// What only a backward has.
struct Gradients {
  TensorArg dout, dq, dk, dv;
  DType dout_dtype, dq_dtype, dk_dtype, dv_dtype;
  const float* dlse;  // strides of lse; null: zero
  float* dsinks;      // null: not wanted
  bool accumulate;
};

struct Problem {
  Op op;
  DType dtype, kv_dtype, out_dtype;  // of q, of k and v, of out
  TensorArg q, k, v, out;            // legal strides: that of a dimension of size <= 1 is replaced
  float* lse;                        // null: not wanted
  int64_t lse_stride_batch, lse_stride_head;
  SeqArgs seq;
  int32_t heads_q, heads_k, dim_qk, dim_v;
  BandArgs band;  // unlimited windows are -1; a window or chunk that hides nothing is gone
  float scale;    // > 0: the softmax scale, its default filled in
  const void* sinks;
  int64_t sinks_stride;
  int32_t sinks_dtype;        // fa_dtype
  float softcap;              // 0: none
  const float* alibi_slopes;  // null: none
  int64_t alibi_stride_batch, alibi_stride_head;

  DescaleArg q_descale, k_descale, v_descale;
  int64_t v_stride_dim;  // 1, or v is transposed: its rows are contiguous

  float dropout_p;             // 0: none, also where every weight would be kept
  const int64_t* seed_offset;  // [2] on the device

  // Facts that no field above carries; a row that cannot serve one is refused by why_not().
  bool paged;
  int32_t num_splits;

  Gradients grad;
  bool deterministic;  // of a backward

  bool batch_invariant;
  int32_t force_arch, reserve_sms, sm_count, smem_limit;  // 0: the device's

  bool packed_q() const { return seq.cu_q != nullptr; }
  bool packed_k() const { return seq.cu_k != nullptr; }
  bool descale() const { return q_descale.data || k_descale.data || v_descale.data; }
  bool descale_blocks() const { return q_descale.block || k_descale.block || v_descale.block; }
  bool alibi() const { return alibi_slopes != nullptr; }
  bool banded() const { return band.left >= 0 || band.right >= 0 || band.chunk > 0; }
  // No query row at all: nothing is written, nothing is launched.
  bool empty() const {
    return heads_q == 0 || (packed_q() ? seq.total_q == 0 : seq.batch == 0 || seq.seqlen_q == 0);
  }
};

// Planning needs shapes and strides only, so that a caller without memory (or without a GPU) can
// ask for a plan.
enum class DataCheck { kRequired, kOptional };

// Fails with FA_ERROR_INVALID or FA_ERROR_ABI and a sentence.
fa_status make_problem(Op op, const fa_params* params, DataCheck data, Problem* problem);

const char* dtype_name(DType dtype);  // "bf16"
const char* op_name(Op op);           // "forward"

}  // namespace fa
