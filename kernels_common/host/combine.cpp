// SPDX-License-Identifier: BSD-3-Clause
// Is a call of fa_combine legal, and what does its kernel read?
#include "kernels_common/host/combine.h"

#include <cinttypes>
#include <utility>

#include "kernels_common/host/error.h"
#include "kernels_common/host/params_version.h"
#include "kernels_common/host/problem.h"

namespace fa {
namespace {

constexpr int kMaxDim = 256;  // what the kernel's registers hold

fa_status check_sizes(const fa_combine_params& p) {
  if (p.count < 1)
    return fail(FA_ERROR_INVALID, "count is %d partial results. Pass at least one.", p.count);
  for (const auto& [name, value] : {std::pair{"batch", p.batch}, std::pair{"seqlen_q", p.seqlen_q},
                                    std::pair{"heads_q", p.heads_q}})
    if (value < 0) return fail(FA_ERROR_INVALID, "%s is %d, it must not be negative.", name, value);
  if (p.dim_v < 1 || p.dim_v > kMaxDim)
    return fail(FA_ERROR_INVALID, "dim_v is %d, it must be between 1 and %d.", p.dim_v, kMaxDim);
  return FA_OK;
}

fa_status check_tensor(const char* name, const fa_tensor& t, bool empty) {
  if (t.dtype != FA_FP32 && t.dtype != FA_BF16 && t.dtype != FA_FP16)
    return fail(FA_ERROR_INVALID, "%s has dtype %s (%d), it must be fp32, bf16 or fp16.", name,
                dtype_name(static_cast<DType>(t.dtype)), t.dtype);
  if (empty) return FA_OK;
  if (t.data == nullptr)
    return fail(FA_ERROR_INVALID, "%s: data is NULL. Pass a device pointer.", name);
  if (t.stride_dim != 1)
    return fail(FA_ERROR_INVALID,
                "%s: the stride of the last dimension is %" PRId64
                ", it must be 1. Pass a tensor whose head dimension is contiguous.",
                name, t.stride_dim);
  return FA_OK;
}

TensorArg tensor_arg(const fa_tensor& t) {
  return TensorArg{t.data, t.stride_batch, t.stride_row, t.stride_head};
}

}  // namespace

fa_status bind_combine(const fa_combine_params* params, CombineArgs* args) {
  FA_TRY(check_combine_params(params));
  const fa_combine_params& p = *params;
  FA_TRY(check_sizes(p));
  const bool empty = p.batch == 0 || p.seqlen_q == 0 || p.heads_q == 0;
  FA_TRY(check_tensor("out_partial", p.out_partial, empty));
  FA_TRY(check_tensor("out", p.out, empty));
  if (!empty && p.lse_partial.data == nullptr)
    return fail(FA_ERROR_INVALID,
                "lse_partial: data is NULL. The parts are weighted by their LSE: pass a device "
                "pointer.");
  *args = CombineArgs{.out_partial = tensor_arg(p.out_partial),
                      .out = tensor_arg(p.out),
                      .out_partial_stride_part = p.out_stride_part,
                      .lse_partial = p.lse_partial.data,
                      .lse_partial_stride_part = p.lse_stride_part,
                      .lse_partial_stride_batch = p.lse_partial.stride_batch,
                      .lse_partial_stride_head = p.lse_partial.stride_head,
                      .lse = p.lse.data,
                      .lse_stride_batch = p.lse.stride_batch,
                      .lse_stride_head = p.lse.stride_head,
                      .count = p.count,
                      .batch = p.batch,
                      .rows = p.seqlen_q,
                      .heads = p.heads_q,
                      .dim_v = p.dim_v,
                      .partial_dtype = p.out_partial.dtype,
                      .out_dtype = p.out.dtype};
  return FA_OK;
}

#if !defined(FA_WITH_CUDA)
fa_status launch_combine(const CombineArgs&, void*) {
  return fail(FA_ERROR_UNSUPPORTED,
              "fa: not supported: combine, this build of libfa holds no kernels. Rebuild with "
              "FA_ARCHS=\"80;90a\" pip install . , or merge the parts with torch operations.");
}
#endif

}  // namespace fa
