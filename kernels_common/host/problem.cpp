// SPDX-License-Identifier: BSD-3-Clause
// What does the caller want? Checks every fact of fa_params that the host can see and brings it
// into one form.
#include "kernels_common/host/problem.h"

#include <cinttypes>
#include <cmath>
#include <utility>

#include "kernels_common/device/block_range.h"
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

constexpr int kMaxDim = 256;
constexpr int kAlignBytes = 16;  // TMA and 16-byte cp.async

int element_bytes(int32_t dtype) { return dtype == FA_E4M3 ? 1 : dtype == FA_FP32 ? 4 : 2; }
bool is_half(int32_t dtype) { return dtype == FA_FP16 || dtype == FA_BF16; }
const char* name_of(int32_t dtype) { return dtype_name(static_cast<DType>(dtype)); }

// Sizes as the checks of one tensor need them.
struct Extent {
  int32_t batch, rows, heads, dim;
  bool packed;       // no batch dimension
  bool batch_known;  // false: an index array picks the batch entries, their number is unknown here
  bool empty() const {
    return rows == 0 || heads == 0 || dim == 0 || (!packed && batch_known && batch == 0);
  }
};

fa_status check_size(const char* name, int32_t value) {
  if (value < 0)
    return fail(FA_ERROR_INVALID, "shape.%s is %d, it must not be negative.", name, value);
  if (value >= kUnlimited)
    return fail(FA_ERROR_INVALID, "shape.%s is %d, it must be below 2^30. Split the call.", name,
                value);
  return FA_OK;
}

fa_status check_sizes(const fa_shape& s) {
  FA_TRY(check_size("batch", s.batch));
  FA_TRY(check_size("seqlen_q", s.seqlen_q));
  FA_TRY(check_size("seqlen_k", s.seqlen_k));
  FA_TRY(check_size("heads_q", s.heads_q));
  FA_TRY(check_size("heads_k", s.heads_k));
  FA_TRY(check_size("total_q", s.total_q));
  FA_TRY(check_size("total_k", s.total_k));
  for (const auto& [name, dim] : {std::pair{"dim_qk", s.dim_qk}, std::pair{"dim_v", s.dim_v}}) {
    if (dim < 8 || dim > kMaxDim)
      return fail(FA_ERROR_INVALID, "shape.%s is %d, it must be between 8 and %d.", name, dim,
                  kMaxDim);
    if (dim % 8 != 0)
      return fail(FA_ERROR_INVALID,
                  "shape.%s is %d, it must be a multiple of 8. Pad the head dimension of the "
                  "tensors with zeros.",
                  name, dim);
  }
  if (s.heads_q > 0 && s.heads_k == 0)
    return fail(FA_ERROR_INVALID,
                "shape.heads_k is 0 while heads_q is %d. Give at least one key/value head.",
                s.heads_q);
  if (s.heads_q > 0 && s.heads_q % s.heads_k != 0)
    return fail(FA_ERROR_INVALID,
                "shape.heads_q is %d, it must be a multiple of heads_k, which is %d: every "
                "key/value head serves the "
                "same number of query heads.",
                s.heads_q, s.heads_k);
  return FA_OK;
}

fa_status check_dtypes(const fa_params& p) {
  const int32_t q = p.q.dtype, k = p.k.dtype, v = p.v.dtype, out = p.out.dtype;
  if (!is_half(q) && q != FA_E4M3)
    return fail(FA_ERROR_INVALID, "q has dtype %s (%d), kernels take fp16, bf16 or e4m3.",
                name_of(q), q);
  if (k != q && !(is_half(q) && k == FA_E4M3))
    return fail(FA_ERROR_INVALID, "k has dtype %s (%d), it must be %s like q%s.", name_of(k), k,
                name_of(q), is_half(q) ? " (or e4m3: an fp8 cache)" : "");
  if (v != k)
    return fail(FA_ERROR_INVALID, "v has dtype %s (%d), it must be %s like k.", name_of(v), v,
                name_of(k));
  const bool out_ok = out == FA_FP32 || out == q || (q == FA_E4M3 && is_half(out));
  if (!out_ok || out == FA_E4M3)
    return fail(FA_ERROR_INVALID, "out has dtype %s (%d), it must be %s or fp32.", name_of(out),
                out, q == FA_E4M3 ? "fp16, bf16" : name_of(q));
  return FA_OK;
}

fa_status check_stride(const char* name, const char* which, int64_t stride, int32_t dtype) {
  if (stride < 0)
    return fail(FA_ERROR_INVALID,
                "%s: %s stride is %" PRId64 ", it must not be negative. Pass a contiguous tensor.",
                name, which, stride);
  const int unit = kAlignBytes / element_bytes(dtype);
  if (stride % unit != 0)
    return fail(FA_ERROR_INVALID,
                "%s: %s stride %" PRId64
                " is not a multiple of %d elements (16 bytes for %s). Pass a contiguous tensor "
                "or pad the head dimension.",
                name, which, stride, unit, name_of(dtype));
  return FA_OK;
}

fa_status check_tensor(const char* name, const fa_tensor& t, const Extent& e, DataCheck data) {
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  if (address == 0 && data == DataCheck::kRequired && !e.empty())
    return fail(FA_ERROR_INVALID,
                "%s: data is NULL, but its shape has elements. Pass a device pointer.", name);
  if (address % kAlignBytes != 0)
    return fail(FA_ERROR_INVALID,
                "%s: data %p is not aligned to 16 bytes. Copy the tensor, or start the view at an "
                "aligned element.",
                name, t.data);
  if (e.empty()) return FA_OK;
  const bool transposed = t.dtype == FA_E4M3 && name[0] == 'v' && t.stride_row == 1;
  if (t.stride_dim != 1 && !transposed)
    return fail(FA_ERROR_INVALID,
                "%s: the stride of the last dimension is %" PRId64
                ", it must be 1. Pass a tensor whose head dimension is "
                "contiguous.",
                name, t.stride_dim);
  if (e.rows > 1 && !transposed) FA_TRY(check_stride(name, "row", t.stride_row, t.dtype));
  if (e.heads > 1) FA_TRY(check_stride(name, "head", t.stride_head, t.dtype));
  if (!e.packed && (e.batch > 1 || !e.batch_known))
    FA_TRY(check_stride(name, "batch", t.stride_batch, t.dtype));
  return FA_OK;
}

// Two rows of an output in one place would be a race.
fa_status check_output(const char* name, const fa_tensor& t, const Extent& e) {
  if (e.empty()) return FA_OK;
  const bool overlaps = (e.rows > 1 && t.stride_row == 0) || (e.heads > 1 && t.stride_head == 0) ||
                        (!e.packed && e.batch > 1 && t.stride_batch == 0);
  if (overlaps)
    return fail(FA_ERROR_INVALID,
                "%s: a stride is 0 (an expanded tensor), an output needs memory of its own.", name);
  return FA_OK;
}

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

fa_status check_sequences(const fa_params& p) {
  const fa_sequences& s = p.seq;
  if (s.cu_q == nullptr && p.shape.total_q != 0)
    return fail(FA_ERROR_INVALID,
                "shape.total_q is %d without cu_q. Give cu_q (packed q) or leave total_q 0.",
                p.shape.total_q);
  if (s.cu_k == nullptr && p.shape.total_k != 0)
    return fail(FA_ERROR_INVALID,
                "shape.total_k is %d without cu_k. Give cu_k (packed k and v) or leave total_k 0.",
                p.shape.total_k);
  if (s.cu_k != nullptr && s.batch_index_k != nullptr)
    return fail(FA_ERROR_INVALID,
                "batch_index_k is given with cu_k: a packed k has no batch dimension to index. "
                "Leave one of them NULL.");
  return FA_OK;
}

fa_status check_pages(const fa_params& p) {
  if (p.pages.table == nullptr) return FA_OK;
  if (p.pages.page_size <= 0 || p.pages.num_pages <= 0)
    return fail(FA_ERROR_INVALID,
                "pages: page_size is %d and num_pages is %d, both must be positive.",
                p.pages.page_size, p.pages.num_pages);
  if (p.seq.cu_k != nullptr)
    return fail(
        FA_ERROR_INVALID,
        "a page table is given with cu_k: k is either packed or paged. Leave one of them NULL.");
  if (p.seq.used_k == nullptr)
    return fail(
        FA_ERROR_INVALID,
        "a page table is given without used_k: the lengths of the sequences in the cache are "
        "needed. Pass used_k.");
  return FA_OK;
}

fa_status check_mask(const fa_mask& m) {
  for (const auto& [name, window] :
       {std::pair{"left", m.window_left}, std::pair{"right", m.window_right}})
    if (window < -1)
      return fail(FA_ERROR_INVALID,
                  "mask.window_%s is %d, allowed are -1 (unlimited) and values >= 0.", name,
                  window);
  if (m.chunk < 0)
    return fail(FA_ERROR_INVALID, "mask.chunk is %d, allowed are 0 (none) and positive lengths.",
                m.chunk);
  if (m.align != 0 && m.align != 1)
    return fail(FA_ERROR_INVALID,
                "mask.align is %d, allowed are 0 (bottom-right) and 1 (top-left).", m.align);
  return FA_OK;
}

fa_status check_score(const fa_params& p) {
  const fa_score& s = p.score;
  if (!std::isnan(s.scale) && !(std::isfinite(s.scale) && s.scale >= 0))
    return fail(FA_ERROR_INVALID,
                "score.scale is %g, it must be finite and >= 0 (NaN: 1/sqrt(dim_qk)).", s.scale);
  if (!(std::isfinite(s.softcap) && s.softcap >= 0))
    return fail(FA_ERROR_INVALID, "score.softcap is %g, it must be finite and >= 0 (0: off).",
                s.softcap);
  if (s.sinks.data != nullptr && s.sinks.dtype != FA_FP32 && s.sinks.dtype != p.q.dtype)
    return fail(FA_ERROR_INVALID, "sinks have dtype %s (%d), they must be fp32 or %s like q.",
                name_of(s.sinks.dtype), s.sinks.dtype, name_of(p.q.dtype));
  if (s.sinks.data != nullptr && (s.sinks.block != 0 || s.sinks.stride_batch != 0))
    return fail(FA_ERROR_INVALID,
                "sinks have block %d and batch stride %" PRId64
                ", both must be 0: there is one sink per query head.",
                s.sinks.block, s.sinks.stride_batch);
  if (s.alibi_slopes.data != nullptr &&
      (s.alibi_slopes.dtype != FA_FP32 || s.alibi_slopes.block != 0))
    return fail(FA_ERROR_INVALID,
                "alibi_slopes have dtype %s (%d) and block %d, they must be fp32 with block 0.",
                name_of(s.alibi_slopes.dtype), s.alibi_slopes.dtype, s.alibi_slopes.block);
  const fa_factors* descales[] = {&p.descale.q, &p.descale.k, &p.descale.v};
  for (int i = 0; i < 3; ++i)
    if (descales[i]->data != nullptr && (descales[i]->dtype != FA_FP32 || descales[i]->block < 0))
      return fail(FA_ERROR_INVALID,
                  "%c_descale has dtype %s (%d) and block %d, it must be fp32 with block >= 0.",
                  "qkv"[i], name_of(descales[i]->dtype), descales[i]->dtype, descales[i]->block);
  if (!(p.dropout.p >= 0 && p.dropout.p < 1))
    return fail(FA_ERROR_INVALID, "dropout.p is %g, it must be in [0, 1).", p.dropout.p);
  if (p.dropout.p > 0 && p.dropout.seed_offset == nullptr)
    return fail(
        FA_ERROR_INVALID,
        "dropout.p is %g without seed_offset. Pass a device array of two int64: seed, offset.",
        p.dropout.p);
  return FA_OK;
}

fa_status check_options(const fa_options& o) {
  if (o.force_arch != 0 && o.force_arch != 80 && o.force_arch != 90)
    return fail(FA_ERROR_INVALID,
                "options.force_arch is %d, allowed are 0 (the device's), 80 and 90.", o.force_arch);
  if (o.num_splits < 0)
    return fail(FA_ERROR_INVALID,
                "options.num_splits is %d, allowed are 0 (choose) and positive numbers.",
                o.num_splits);
  if (o.reserve_sms < 0 || o.sm_count < 0 || o.smem_limit < 0)
    return fail(FA_ERROR_INVALID,
                "options: reserve_sms %d, sm_count %d and smem_limit %d must not be negative.",
                o.reserve_sms, o.sm_count, o.smem_limit);
  return FA_OK;
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

}  // namespace

fa_status make_problem(Op op, const fa_params* params, DataCheck data, Problem* problem) {
  fa_params copy;
  const fa_params* current = nullptr;
  FA_TRY(current_params(params, &copy, &current));
  const fa_params& p = *current;
  FA_TRY(check_sizes(p.shape));
  FA_TRY(check_dtypes(p));
  FA_TRY(check_sequences(p));
  FA_TRY(check_pages(p));
  FA_TRY(check_mask(p.mask));
  FA_TRY(check_score(p));
  FA_TRY(check_options(p.options));

  const fa_shape& s = p.shape;
  const bool packed_q = p.seq.cu_q != nullptr, packed_k = p.seq.cu_k != nullptr,
             paged = p.pages.table != nullptr;
  const int rows_q = packed_q ? s.total_q : s.seqlen_q;
  const int rows_k = packed_k ? s.total_k : paged ? p.pages.page_size : s.seqlen_k;
  const int batch_k = paged ? p.pages.num_pages : s.batch;
  const bool batch_k_known = p.seq.batch_index_k == nullptr;
  const Extent q{s.batch, rows_q, s.heads_q, s.dim_qk, packed_q, true};
  const Extent o{s.batch, rows_q, s.heads_q, s.dim_v, packed_q, true};
  const Extent k{batch_k, rows_k, s.heads_k, s.dim_qk, packed_k, batch_k_known};
  const Extent v{batch_k, rows_k, s.heads_k, s.dim_v, packed_k, batch_k_known};
  FA_TRY(check_tensor("q", p.q, q, data));
  FA_TRY(check_tensor("k", p.k, k, data));
  FA_TRY(check_tensor("v", p.v, v, data));
  FA_TRY(check_tensor("out", p.out, o, data));
  FA_TRY(check_output("out", p.out, o));

  Problem& r = *problem;
  r.op = op;
  r.dtype = static_cast<DType>(p.q.dtype);
  r.kv_dtype = static_cast<DType>(p.k.dtype);
  r.out_dtype = static_cast<DType>(p.out.dtype);
  r.q = tensor_arg(p.q, q);
  r.k = tensor_arg(p.k, k);
  r.v = tensor_arg(p.v, v);
  r.out = tensor_arg(p.out, o);
  r.lse = p.lse.data;
  r.lse_stride_batch = packed_q ? 0 : p.lse.stride_batch;
  r.lse_stride_head = p.lse.stride_head;
  r.seq = SeqArgs{p.seq.cu_q,      p.seq.cu_k,          p.seq.used_q, p.seq.used_k,
                  p.seq.leftpad_k, p.seq.batch_index_k, s.batch,      s.seqlen_q,
                  s.seqlen_k,      s.total_q,           s.total_k};
  r.heads_q = s.heads_q;
  r.heads_k = s.heads_k;
  r.dim_qk = s.dim_qk;
  r.dim_v = s.dim_v;
  r.band = normalise_band(p);
  // Scale 0 means uniform weights; a tiny one gives them without the 0 * -inf of a masked score.
  const float scale =
      std::isnan(p.score.scale) ? 1.0f / std::sqrt(static_cast<float>(s.dim_qk)) : p.score.scale;
  r.scale = scale > 0 ? scale : 1e-30f;
  r.sinks = p.score.sinks.data;
  r.sinks_stride = p.score.sinks.stride_head;
  r.sinks_dtype = p.score.sinks.dtype;
  r.softcap = p.score.softcap;
  r.dropout_p = p.dropout.p;
  r.alibi = p.score.alibi_slopes.data != nullptr;
  r.paged = paged;
  r.descale = p.descale.q.data || p.descale.k.data || p.descale.v.data;
  r.num_splits = p.options.num_splits;
  r.batch_invariant = p.options.batch_invariant != 0;
  r.force_arch = p.options.force_arch;
  r.reserve_sms = p.options.reserve_sms;
  r.sm_count = p.options.sm_count;
  r.smem_limit = p.options.smem_limit;
  return FA_OK;
}

}  // namespace fa
