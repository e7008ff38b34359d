// SPDX-License-Identifier: BSD-3-Clause
// What does the caller want? Brings checked params into one form: defaults filled in, masks that
// hide nothing gone.
#include "kernels_common/host/problem.h"

#include <cmath>

#include "kernels_common/device/block_range.h"
#include "kernels_common/device/philox.h"
#include "kernels_common/host/checks.h"
#include "kernels_common/host/error.h"
#include "kernels_common/host/params_version.h"

namespace fa {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
      return "fp16";
    case DType::kBf16:
      return "bf16";
    case DType::kE4m3:
      return "e4m3";
    case DType::kFp32:
      return "fp32";
  }
  return "unknown dtype";
}

const char* op_name(Op op) {
  switch (op) {
    case Op::kForward:
      return "forward";
    case Op::kBackward:
      return "backward";
    case Op::kCombine:
      return "combine";
    case Op::kAppendKv:
      return "append_kv";
  }
  return "unknown op";
}

namespace {

// The stride of a dimension of size <= 1 is never used as a step, but tensor maps need a legal
// value there.
TensorArg tensor_arg(const fa_tensor& t, const Extent& e) {
  TensorArg arg{t.data, t.stride_batch, t.stride_row, t.stride_head};
  const int64_t legal = (e.dim + 15) / 16 * 16;
  if (e.rows <= 1) arg.stride_row = legal;
  if (e.heads <= 1) arg.stride_head = legal;
  if (e.packed)
    arg.stride_batch = 0;
  else if (e.batch <= 1 && e.batch_known)
    arg.stride_batch = legal;
  return arg;
}

// Windows and chunks that hide no key are dropped, so that a row without a mask can run. Lengths
// that only the device knows are bounded by the sizes of the tensors, and both statements below are
// monotone in them.
BandArgs normalise_band(const fa_params& p) {
  const fa_mask& m = p.mask;
  BandArgs band{m.window_left >= kUnlimited ? -1 : m.window_left,
                m.window_right >= kUnlimited ? -1 : m.window_right, min_of(m.chunk, kUnlimited),
                m.align};
  // The row of a batch-invariant call must not depend on lengths; the length of pages is not known
  // here.
  if (p.options.batch_invariant != 0 || p.pages.table != nullptr) return band;
  const int q = p.seq.cu_q != nullptr ? p.shape.total_q : p.shape.seqlen_q;
  const int k = p.seq.cu_k != nullptr ? p.shape.total_k : p.shape.seqlen_k;
  // Bottom-right: row i sits at i + k_len - q_len, in [k_len - q_len, k_len); top-left: at i.
  const int left_bound = band.top_left ? q - 1 : k - 1;
  const int right_bound = band.top_left ? k - 1 : q - 1;
  if (band.left >= left_bound) band.left = -1;
  if (band.right >= right_bound) band.right = -1;
  const fa_sequences& s = p.seq;
  const bool exact = !s.cu_q && !s.cu_k && !s.used_q && !s.used_k && !s.leftpad_k;
  if (exact && band.chunk >= max_of(q, k) && (band.top_left || q <= k)) band.chunk = 0;
  return band;
}

float softmax_scale(const fa_params& p) {
  const float scale = std::isnan(p.score.scale)
                          ? 1.0f / std::sqrt(static_cast<float>(p.shape.dim_qk))
                          : p.score.scale;
  // Scale 0 means uniform weights; a tiny one gives them without the 0 * -inf of a masked score.
  return scale > 0 ? scale : 1e-30f;
}

void fill_tensors(const fa_params& p, const Extents& e, Problem& r) {
  r.dtype = static_cast<DType>(p.q.dtype);
  r.kv_dtype = static_cast<DType>(p.k.dtype);
  r.out_dtype = static_cast<DType>(p.out.dtype);
  r.q = tensor_arg(p.q, e.q);
  r.k = tensor_arg(p.k, e.k);
  r.v = tensor_arg(p.v, e.v);
  r.v_stride_dim = e.v.rows > 1 && p.v.stride_row == 1 ? p.v.stride_dim : 1;
  if (r.v_stride_dim != 1) r.v.stride_row = 1;
  r.out = tensor_arg(p.out, e.out);
  r.lse = p.lse.data;
  r.lse_stride_batch = e.q.packed ? 0 : p.lse.stride_batch;
  r.lse_stride_head = p.lse.stride_head;
}

DescaleArg descale_arg(const fa_factors& f) {
  const auto* data = static_cast<const float*>(f.data);
  if (data == nullptr) return DescaleArg{};
  return DescaleArg{data, f.stride_batch, f.stride_head, f.stride_block, f.block};
}

void fill_meaning(const fa_params& p, Problem& r) {
  const fa_shape& s = p.shape;
  r.seq = SeqArgs{.cu_q = p.seq.cu_q,
                  .cu_k = p.seq.cu_k,
                  .used_q = p.seq.used_q,
                  .used_k = p.seq.used_k,
                  .leftpad_k = p.seq.leftpad_k,
                  .batch_index_k = p.seq.batch_index_k,
                  .batch = s.batch,
                  .seqlen_q = s.seqlen_q,
                  .seqlen_k = s.seqlen_k,
                  .total_q = s.total_q,
                  .total_k = s.total_k};
  r.heads_q = s.heads_q;
  r.heads_k = s.heads_k;
  r.dim_qk = s.dim_qk;
  r.dim_v = s.dim_v;
  r.band = normalise_band(p);
  r.scale = softmax_scale(p);
  r.sinks = p.score.sinks.data;
  r.sinks_stride = p.score.sinks.stride_head;
  r.sinks_dtype = p.score.sinks.dtype;
  r.softcap = p.score.softcap;
  r.alibi_slopes = static_cast<const float*>(p.score.alibi_slopes.data);
  r.alibi_stride_batch = p.score.alibi_slopes.stride_batch;
  r.alibi_stride_head = p.score.alibi_slopes.stride_head;
  r.dropout_p = dropout_threshold(p.dropout.p) == 0 ? 0 : p.dropout.p;
  r.seed_offset = p.dropout.seed_offset;
  r.paged = p.pages.table != nullptr;
  r.q_descale = descale_arg(p.descale.q);
  r.k_descale = descale_arg(p.descale.k);
  r.v_descale = descale_arg(p.descale.v);
}

void fill_gradients(const fa_params& p, const Extents& e, Problem& r) {
  const fa_gradients& g = p.grad;
  r.grad = Gradients{.dout = tensor_arg(g.dout, e.out),
                     .dq = tensor_arg(g.dq, e.q),
                     .dk = tensor_arg(g.dk, e.k),
                     .dv = tensor_arg(g.dv, e.v),
                     .dout_dtype = static_cast<DType>(g.dout.dtype),
                     .dq_dtype = static_cast<DType>(g.dq.dtype),
                     .dk_dtype = static_cast<DType>(g.dk.dtype),
                     .dv_dtype = static_cast<DType>(g.dv.dtype),
                     .dlse = g.dlse,
                     .dsinks = g.dsinks,
                     .accumulate = g.accumulate != 0};
  r.num_splits = 1;  // a choice of the forward
}

void fill_options(const fa_options& o, Problem& r) {
  r.num_splits = o.num_splits;
  r.deterministic = o.deterministic != 0;
  r.batch_invariant = o.batch_invariant != 0;
  r.force_arch = o.force_arch;
  r.reserve_sms = o.reserve_sms;
  r.sm_count = o.sm_count;
  r.smem_limit = o.smem_limit;
}

}  // namespace

fa_status make_problem(Op op, const fa_params* params, DataCheck data, Problem* problem) {
  fa_params copy;
  const fa_params* current = nullptr;
  FA_TRY(current_params(params, &copy, &current));
  const fa_params& p = *current;
  FA_TRY(check_values(p));
  const Extents extents = extents_of(p);
  FA_TRY(check_tensors(p, extents, data));
  if (op == Op::kBackward) FA_TRY(check_gradients(p, extents, data));
  if (data == DataCheck::kRequired) FA_TRY(check_apart(op, p, extents));
  problem->op = op;
  fill_tensors(p, extents, *problem);
  fill_meaning(p, *problem);
  fill_options(p.options, *problem);
  problem->grad = Gradients{};
  if (op == Op::kBackward) fill_gradients(p, extents, *problem);
  return FA_OK;
}

}  // namespace fa
