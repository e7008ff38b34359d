// SPDX-License-Identifier: BSD-3-Clause
// What does a call of fa::_forward mean in fa_params, and is it one? Shapes, options, results'
// shapes.
#pragma once

#include <cmath>

#include "kernels_common/api/fa.h"
#include "python/torch_stack.h"

namespace fa_torch {

constexpr int64_t kSizeLimit = int64_t{1} << 30;  // kernels count rows in int32
constexpr int64_t kUnlimitedWindow = int64_t{1} << 30;
constexpr int64_t kMaxDim = 256;

struct Dtypes {
  int32_t fp16 = aoti_torch_dtype_float16(), bf16 = aoti_torch_dtype_bfloat16(),
          fp32 = aoti_torch_dtype_float32(), int32 = aoti_torch_dtype_int32(),
          int64 = aoti_torch_dtype_int64(), uint8 = aoti_torch_dtype_uint8(),
          e4m3 = aoti_torch_dtype_float8_e4m3fn();
  int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();
};
inline const Dtypes& torch_constants() {
  static const Dtypes constants;
  return constants;
}

inline int32_t fa_dtype_of(int32_t dtype) {
  const Dtypes& c = torch_constants();
  return dtype == c.fp16   ? FA_FP16
         : dtype == c.bf16 ? FA_BF16
         : dtype == c.fp32 ? FA_FP32
         : dtype == c.e4m3 ? FA_E4M3
                           : 0;
}

// Thrown by a check that fails; what is wrong in words is Python's part.
struct Refused {
  const char* check;
};
inline void check(bool good, const char* what) {
  if (!good) throw Refused{what};
}

inline fa_tensor as_fa(const Tensor& t) {
  fa_tensor f{};
  f.data = t.data;
  if (t.dim == 4) f.stride_batch = t.stride(0);
  f.stride_row = t.stride(-3);
  f.stride_head = t.stride(-2);
  // Of one element there is no stride; torch may say anything.
  f.stride_dim = t.size(-1) > 1 ? t.stride(-1) : 1;
  f.dtype = fa_dtype_of(t.dtype);
  return f;
}

inline const int32_t* index_data(const Stack& s, int i, int64_t count, const Tensor& q) {
  if (!s.has(i)) return nullptr;
  const Tensor t(s.tensor(i));
  check(t.dtype == torch_constants().int32 && t.with(q) && t.dim == 1 && t.size(0) == count &&
            (count <= 1 || t.stride(0) == 1),
        kArguments[i].name);
  return static_cast<const int32_t*>(t.data);
}

struct Call {
  Tensor q, k, v;
  fa_params params;
  bool packed_q;
};

inline int32_t size32(int64_t size) {
  check(size < kSizeLimit, "a size");
  return static_cast<int32_t>(size);
}

// Shapes of q, k and v agree, and their sizes are kept.
inline void read_shape(const Stack& s, Call& c) {
  const bool packed_q = s.has(kCuQ), packed_k = s.has(kCuK);
  const Tensor &q = c.q, &k = c.k, &v = c.v;
  const Dtypes& d = torch_constants();
  check(q.dtype == d.fp16 || q.dtype == d.bf16 || q.dtype == d.e4m3, "q's dtype");
  check(k.dtype == q.dtype && v.dtype == q.dtype, "dtypes");
  check(k.with(q) && v.with(q), "devices");
  check(q.dim == (packed_q ? 3 : 4) && k.dim == (packed_k ? 3 : 4) && v.dim == k.dim, "dims");
  check(v.size(-3) == k.size(-3) && v.size(-2) == k.size(-2) && k.size(-1) == q.size(-1), "sizes");
  check(q.size(-1) > 0 && v.size(-1) > 0 && q.size(-1) <= kMaxDim && v.size(-1) <= kMaxDim, "dim");
  check(k.size(-2) > 0 && q.size(-2) > 0 && q.size(-2) % k.size(-2) == 0, "heads");
  fa_shape& shape = c.params.shape;
  shape.heads_q = size32(q.size(-2));
  shape.heads_k = size32(k.size(-2));
  shape.dim_qk = size32(q.size(-1));
  shape.dim_v = size32(v.size(-1));
  const int64_t max_q = s.integer(kMaxQ), max_k = s.integer(kMaxK);
  check(max_q >= 0 && max_k >= 0, "max_seqlen");
  int64_t batch = q.size(0);
  if (packed_q) {
    const Tensor cu(s.tensor(kCuQ));
    check(cu.dim == 1 && cu.size(0) >= 1, "cu_seqlens_q");
    batch = cu.size(0) - 1;
    shape.total_q = size32(q.size(0));
    shape.seqlen_q = size32(max_q);
  } else {
    shape.seqlen_q = size32(q.size(1));
  }
  shape.batch = size32(batch);
  if (packed_k) {
    check(!s.has(kKvBatchIdx), "kv_batch_idx");
    shape.total_k = size32(k.size(0));
    shape.seqlen_k = size32(max_k);
  } else {
    check(v.size(0) == k.size(0) && (s.has(kKvBatchIdx) || k.size(0) == batch), "batch");
    shape.seqlen_k = size32(k.size(1));
  }
  c.packed_q = packed_q;
  fa_sequences& seq = c.params.seq;
  seq.cu_q = index_data(s, kCuQ, batch + 1, q);
  seq.cu_k = index_data(s, kCuK, batch + 1, q);
  seq.used_q = index_data(s, kUsedQ, batch, q);
  seq.used_k = index_data(s, kUsedK, batch, q);
  seq.leftpad_k = index_data(s, kLeftpadK, batch, q);
  seq.batch_index_k = index_data(s, kKvBatchIdx, batch, q);
}

inline int32_t window(int64_t keys) {
  check(keys >= -1, "window");
  return static_cast<int32_t>(keys < kUnlimitedWindow ? keys : kUnlimitedWindow);
}

// Broadcastable to [B, Hkv]; with blocks [B, H, blocks], where H are the heads of q or of k and v.
inline fa_factors descale(const Stack& s, const Call& c, int i, int64_t block) {
  fa_factors f{};
  if (!s.has(i)) return f;
  const Tensor t(s.tensor(i));
  const Dtypes& d = torch_constants();
  const char* name = kArguments[i].name;
  const int blocks = block > 0 ? 1 : 0;  // the dimension behind the heads
  check(c.q.dtype == d.e4m3 && t.with(c.q) && t.dtype == d.fp32 &&
            (blocks == 1 ? t.dim == 3 : t.dim <= 2),
        name);
  f.data = t.data;
  f.dtype = FA_FP32;
  f.block = size32(block);
  const fa_shape& shape = c.params.shape;
  const bool of_q = i == kQDescale;
  if (blocks == 1) {
    const int64_t rows = of_q ? shape.seqlen_q : shape.seqlen_k;
    const bool packed = (of_q ? c.params.seq.cu_q : c.params.seq.cu_k) != nullptr;
    check(packed || t.size(2) == (rows + block - 1) / block, name);
    f.stride_block = t.size(2) == 1 ? 0 : t.stride(2);
  }
  const int head = t.dim - 1 - blocks;
  if (head >= 0 && t.size(head) != 1) {
    check(t.size(head) == (of_q && blocks == 1 ? shape.heads_q : shape.heads_k), name);
    f.stride_head = t.stride(head);
  }
  if (head == 1 && t.size(0) != 1) {
    check(t.size(0) == shape.batch, name);
    f.stride_batch = t.stride(0);
  }
  return f;
}

// In 256ths, which fp32 holds exactly: rounded to fp32, dropout_p might pass a threshold.
inline void read_dropout(const Stack& s, Call& c) {
  const double p = s.number(kDropout);
  check(p >= 0 && p < 1 && (p == 0 || s.has(kPhilox)), "dropout_p");
  if (!s.has(kPhilox)) return;
  const Tensor t(s.tensor(kPhilox));
  check(t.dtype == torch_constants().int64 && t.with(c.q) && t.dim == 1 && t.size(0) == 2 &&
            t.stride(0) == 1,
        "philox_seed_offset");
  const double largest = 1 - 1.0 / (1 << 24);
  c.params.dropout.p = static_cast<float>(std::fmin(std::floor(256 * p + 0.5) / 256, largest));
  if (p > 0) c.params.dropout.seed_offset = static_cast<const int64_t*>(t.data);
}

inline void read_options(const Stack& s, Call& c) {
  check(!s.has(kPageTable), kArguments[kPageTable].name);
  const int64_t block_q = s.integer(kDescaleBlockQ), block_k = s.integer(kDescaleBlockK);
  check(block_q >= 0 && (block_q == 0 || s.has(kQDescale)), "descale_block_q");
  check(block_k >= 0 && (block_k == 0 || s.has(kKDescale) || s.has(kVDescale)), "descale_block_k");
  fa_params& p = c.params;
  p.descale = {descale(s, c, kQDescale, block_q), descale(s, c, kKDescale, block_k),
               descale(s, c, kVDescale, block_k)};
  read_dropout(s, c);
  if (s.has(kScale)) {
    const double scale = s.number(kScale);
    check(std::isfinite(scale) && scale >= 0, "softmax_scale");
    p.score.scale = static_cast<float>(scale);
  }
  const double softcap = s.number(kSoftcap);
  check(std::isfinite(softcap) && softcap >= 0, "softcap");
  p.score.softcap = static_cast<float>(softcap);
  p.mask.window_left = window(s.integer(kLeft));
  p.mask.window_right = window(s.integer(kRight));
  if (s.flag(kCausal)) {
    check(p.mask.window_right <= 0, "window_right");
    p.mask.window_right = 0;
  }
  check(s.integer(kChunk) >= 0 && s.integer(kSplits) >= 0, "attention_chunk or num_splits");
  p.mask.chunk = window(s.integer(kChunk));
  p.options.num_splits = window(s.integer(kSplits));
  p.options.batch_invariant = s.flag(kInvariant);
  const int64_t heads = c.q.size(-2);
  if (s.has(kSinks)) {
    const Tensor t(s.tensor(kSinks));
    check(t.with(c.q) && t.dim == 1 && t.size(0) == heads, "sinks");
    const Dtypes& d = torch_constants();
    check(t.dtype == d.fp32 || t.dtype == (c.q.dtype == d.e4m3 ? d.bf16 : c.q.dtype), "sinks");
    p.score.sinks = {t.data, 0, t.stride(0), 0, fa_dtype_of(t.dtype), 0};
  }
  if (s.has(kAlibi)) {
    const Tensor t(s.tensor(kAlibi));
    check(t.with(c.q) && t.dtype == torch_constants().fp32, "alibi_slopes");
    check((t.dim == 1 || (t.dim == 2 && t.size(0) == p.shape.batch)) && t.size(-1) == heads,
          "alibi_slopes");
    p.score.alibi_slopes = {t.data, t.dim == 2 ? t.stride(0) : 0, t.stride(-1), 0, FA_FP32, 0};
  }
}

// A dense tensor of q's dimension order: python/fa/_layout.py states the rule.
inline AtenTensorHandle empty_like_order(const Tensor& q, const int64_t* shape, int32_t dtype) {
  const int last = static_cast<int>(q.dim) - 1;
  int64_t keys[4], strides[4];
  int order[4];
  for (int d = last - 1; d >= 0; --d) {
    const bool placeless = q.sizes[d] <= 1 || q.strides[d] == 0;
    keys[d] = !placeless ? q.strides[d] : d + 1 < last ? keys[d + 1] : 0;
  }
  for (int d = 0; d < last; ++d) {  // insertion sort: largest stride first, ties in place
    int at = d;
    for (; at > 0 && keys[order[at - 1]] < keys[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t step = shape[last] != 0 ? shape[last] : 1;
  strides[last] = 1;
  for (int i = last - 1; i >= 0; --i) {
    strides[order[i]] = step;
    step *= shape[order[i]] != 0 ? shape[order[i]] : 1;
  }
  AtenTensorHandle tensor = nullptr;
  FA_TORCH(aoti_torch_empty_strided, q.dim, shape, strides, dtype, q.device_type, q.device_index,
           &tensor);
  return tensor;
}

inline bool can_store(const Call& c, int32_t dtype) {
  const Dtypes& d = torch_constants();
  if (dtype == d.fp32) return true;
  return c.q.dtype == d.e4m3 ? dtype == d.bf16 || dtype == d.fp16 : dtype == c.q.dtype;
}

inline void out_shape(const Call& c, int64_t* shape) {
  for (int d = 0; d < c.q.dim; ++d) shape[d] = c.q.sizes[d];
  shape[c.q.dim - 1] = c.v.size(-1);
}

inline int lse_shape(const Call& c, int64_t* shape) {
  if (c.packed_q) {
    shape[0] = c.q.size(1);
    shape[1] = c.q.size(0);
    return 2;
  }
  shape[0] = c.q.size(0);
  shape[1] = c.q.size(2);
  shape[2] = c.q.size(1);
  return 3;
}

}  // namespace fa_torch
