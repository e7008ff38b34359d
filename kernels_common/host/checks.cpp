// SPDX-License-Identifier: BSD-3-Clause
// Is what the caller says one that fa.h allows? One function per group of fa_params.
#include "kernels_common/host/checks.h"

#include <cinttypes>
#include <cmath>
#include <utility>

#include "kernels_common/device/block_range.h"
#include "kernels_common/host/error.h"

namespace fa {
namespace {

constexpr int kMaxDim = 256;
constexpr int kAlignBytes = 16;  // TMA and 16-byte cp.async

int element_bytes(int32_t dtype) { return dtype == FA_E4M3 ? 1 : dtype == FA_FP32 ? 4 : 2; }
bool is_half(int32_t dtype) { return dtype == FA_FP16 || dtype == FA_BF16; }
const char* name_of(int32_t dtype) { return dtype_name(static_cast<DType>(dtype)); }

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

// `transposable`: the tensor may come with contiguous rows instead of a contiguous last dimension.
fa_status check_tensor(const char* name, const fa_tensor& t, const Extent& e, DataCheck data,
                       bool transposable) {
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
  const bool transposed = transposable && t.stride_row == 1;
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
  const int32_t sinks = p.q.dtype == FA_E4M3 ? FA_BF16 : p.q.dtype;
  if (s.sinks.data != nullptr && s.sinks.dtype != FA_FP32 && s.sinks.dtype != sinks)
    return fail(FA_ERROR_INVALID, "sinks have dtype %s (%d), they must be fp32 or %s%s.",
                name_of(s.sinks.dtype), s.sinks.dtype, name_of(sinks),
                sinks == p.q.dtype ? " like q" : "");
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

}  // namespace

Extents extents_of(const fa_params& p) {
  const fa_shape& s = p.shape;
  const bool packed_q = p.seq.cu_q != nullptr, packed_k = p.seq.cu_k != nullptr;
  const bool paged = p.pages.table != nullptr;
  const int rows_q = packed_q ? s.total_q : s.seqlen_q;
  const int rows_k = packed_k ? s.total_k : paged ? p.pages.page_size : s.seqlen_k;
  const int batch_k = paged ? p.pages.num_pages : s.batch;
  const bool known = p.seq.batch_index_k == nullptr;
  return Extents{.q = {s.batch, rows_q, s.heads_q, s.dim_qk, packed_q, true},
                 .k = {batch_k, rows_k, s.heads_k, s.dim_qk, packed_k, known},
                 .v = {batch_k, rows_k, s.heads_k, s.dim_v, packed_k, known},
                 .out = {s.batch, rows_q, s.heads_q, s.dim_v, packed_q, true}};
}

fa_status check_values(const fa_params& p) {
  FA_TRY(check_sizes(p.shape));
  FA_TRY(check_dtypes(p));
  FA_TRY(check_sequences(p));
  FA_TRY(check_pages(p));
  FA_TRY(check_mask(p.mask));
  FA_TRY(check_score(p));
  return check_options(p.options);
}

namespace {

// The LSE of two rows in one place would be a race as well.
fa_status check_lse(const fa_lse& lse, const Extent& out) {
  if (lse.data == nullptr || out.empty()) return FA_OK;
  if (reinterpret_cast<uintptr_t>(lse.data) % sizeof(float) != 0)
    return fail(FA_ERROR_INVALID, "lse: data %p is not aligned to 4 bytes. Pass a tensor of fp32.",
                static_cast<void*>(lse.data));
  const bool overlaps = (out.heads > 1 && lse.stride_head == 0) ||
                        (!out.packed && out.batch > 1 && lse.stride_batch == 0);
  if (overlaps)
    return fail(FA_ERROR_INVALID,
                "lse: a stride is 0 (head %" PRId64 ", batch %" PRId64
                "), an output needs memory of its own. Pass a contiguous [B, Hq, Sq] tensor, or "
                "NULL data if no LSE is wanted.",
                lse.stride_head, lse.stride_batch);
  return FA_OK;
}

}  // namespace

fa_status check_tensors(const fa_params& p, const Extents& e, DataCheck data) {
  FA_TRY(check_tensor("q", p.q, e.q, data, false));
  FA_TRY(check_tensor("k", p.k, e.k, data, false));
  FA_TRY(check_tensor("v", p.v, e.v, data, p.v.dtype == FA_E4M3));
  FA_TRY(check_tensor("out", p.out, e.out, data, false));
  FA_TRY(check_output("out", p.out, e.out));
  return check_lse(p.lse, e.out);
}

fa_status check_gradients(const fa_params& p, const Extents& e, DataCheck data) {
  const fa_gradients& g = p.grad;
  if (!is_half(p.q.dtype) || p.k.dtype != p.q.dtype)
    return fail(FA_ERROR_INVALID,
                "q has dtype %s and k %s, the backward takes fp16 or bf16, the same in both.",
                name_of(p.q.dtype), name_of(p.k.dtype));
  const struct {
    const char* name;
    const fa_tensor& tensor;
    const Extent& extent;
    bool output;
  } tensors[] = {{"dout", g.dout, e.out, false},
                 {"dq", g.dq, e.q, true},
                 {"dk", g.dk, e.k, true},
                 {"dv", g.dv, e.v, true}};
  for (const auto& [name, tensor, extent, output] : tensors) {
    if (tensor.dtype != p.q.dtype && tensor.dtype != FA_FP32)
      return fail(FA_ERROR_INVALID, "%s has dtype %s (%d), it must be %s like q, or fp32.", name,
                  name_of(tensor.dtype), tensor.dtype, name_of(p.q.dtype));
    FA_TRY(check_tensor(name, tensor, extent, data, false));
    if (output) FA_TRY(check_output(name, tensor, extent));
  }
  if (p.lse.data == nullptr && data == DataCheck::kRequired && !e.out.empty())
    return fail(FA_ERROR_INVALID,
                "lse: data is NULL. The backward needs the LSE that the forward returned.");
  if (g.dsinks != nullptr && p.score.sinks.data == nullptr)
    return fail(FA_ERROR_INVALID,
                "dsinks is given without sinks. Pass score.sinks, or NULL for dsinks.");
  if (g.accumulate != 0 && g.accumulate != 1)
    return fail(FA_ERROR_INVALID,
                "grad.accumulate is %d, allowed are 0 (overwrite) and 1 (add to what the buffers "
                "hold).",
                g.accumulate);
  return FA_OK;
}

fa_status check_apart(Op op, const fa_params& p, const Extents& e) {
  const fa_gradients& g = p.grad;
  const bool backward = op == Op::kBackward;
  struct Named {
    const char* name;
    const void* data;
    bool written;
  };
  // Slices of one larger tensor begin apart, so that only whole ones are found; which is what a
  // caller gets wrong.
  const Named tensors[] = {
      {"q", e.q.empty() ? nullptr : p.q.data, false},
      {"k", e.k.empty() ? nullptr : p.k.data, false},
      {"v", e.v.empty() ? nullptr : p.v.data, false},
      {"out", e.out.empty() ? nullptr : p.out.data, !backward},
      {"dout", backward && !e.out.empty() ? g.dout.data : nullptr, false},
      {"dq", backward && !e.q.empty() ? g.dq.data : nullptr, true},
      {"dk", backward && !e.k.empty() ? g.dk.data : nullptr, true},
      {"dv", backward && !e.v.empty() ? g.dv.data : nullptr, true},
  };
  for (const Named& written : tensors)
    for (const Named& other : tensors)
      if (written.written && &written != &other && written.data != nullptr &&
          written.data == other.data)
        return fail(FA_ERROR_INVALID,
                    "%s: begins at the address of %s, %p, and would be written while that is in "
                    "use. Pass memory of its own.",
                    written.name, other.name, written.data);
  return FA_OK;
}

}  // namespace fa
