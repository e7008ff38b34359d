// SPDX-License-Identifier: BSD-3-Clause
// How do fa::_forward and fa::forward_out reach libfa.so for CUDA tensors, in a few microseconds?
//
// Reads the arguments from the stack of a boxed kernel, fills fa_params, allocates the results and
// calls fa_forward. Whatever looks wrong is only noticed here; the sentence about it comes from
// fa::_refusal, which is Python (python/fa/_validate.py), so that every message exists once.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels_common/api/fa.h"
#include "python/torch_c_abi.h"
#include "python/torch_stack.h"

namespace {

using namespace fa_torch;

constexpr uint64_t kTorchVersion = 0x020a000000000000;  // 2.10, the oldest this works with
constexpr int64_t kSizeLimit = int64_t{1} << 30;        // kernels count rows in int32
constexpr int64_t kUnlimitedWindow = int64_t{1} << 30;
constexpr int64_t kMaxDim = 256;

// What fa.backend chose: 0 nothing, 1 the torch implementation, 80 or 90.
constexpr int kUnset = -1, kTorchBackend = 1;
int default_backend = 0;
thread_local int thread_backend = kUnset;
thread_local fa_params last_params;  // of a dry run

struct Dtypes {
  int32_t fp16 = aoti_torch_dtype_float16(), bf16 = aoti_torch_dtype_bfloat16(),
          fp32 = aoti_torch_dtype_float32(), int32 = aoti_torch_dtype_int32(),
          uint8 = aoti_torch_dtype_uint8();
  int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();
};
const Dtypes& torch_constants() {
  static const Dtypes constants;
  return constants;
}

int32_t fa_dtype_of(int32_t dtype) {
  const Dtypes& c = torch_constants();
  return dtype == c.fp16 ? FA_FP16 : dtype == c.bf16 ? FA_BF16 : dtype == c.fp32 ? FA_FP32 : 0;
}

// Thrown by a check that fails; what is wrong in words is Python's part.
struct Refused {
  const char* check;
};
void check(bool good, const char* what) {
  if (!good) throw Refused{what};
}

fa_tensor as_fa(const Tensor& t) {
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

const int32_t* index_data(const Stack& s, int i, int64_t count, const Tensor& q) {
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

int32_t size32(int64_t size) {
  check(size < kSizeLimit, "a size");
  return static_cast<int32_t>(size);
}

// Shapes of q, k and v agree, and their sizes are kept.
void read_shape(const Stack& s, Call& c) {
  const bool packed_q = s.has(kCuQ), packed_k = s.has(kCuK);
  const Tensor &q = c.q, &k = c.k, &v = c.v;
  const Dtypes& d = torch_constants();
  check(q.dtype == d.fp16 || q.dtype == d.bf16, "q's dtype");
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

int32_t window(int64_t keys) {
  check(keys >= -1, "window");
  return static_cast<int32_t>(keys < kUnlimitedWindow ? keys : kUnlimitedWindow);
}

void read_options(const Stack& s, Call& c) {
  for (int unbuilt : {kPageTable, kQDescale, kKDescale, kVDescale, kPhilox})
    check(!s.has(unbuilt), kArguments[unbuilt].name);
  check(s.integer(kDescaleBlockQ) == 0 && s.integer(kDescaleBlockK) == 0, "descale_block");
  check(s.number(kDropout) == 0, "dropout_p");
  fa_params& p = c.params;
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
    check(t.dtype == c.q.dtype || t.dtype == torch_constants().fp32, "sinks");
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
AtenTensorHandle empty_like_order(const Tensor& q, const int64_t* shape, int32_t dtype) {
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

void out_shape(const Call& c, int64_t* shape) {
  for (int d = 0; d < c.q.dim; ++d) shape[d] = c.q.sizes[d];
  shape[c.q.dim - 1] = c.v.size(-1);
}

int lse_shape(const Call& c, int64_t* shape) {
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

struct Results {
  AtenTensorHandle out = nullptr, lse = nullptr;
  ~Results() {
    if (out != nullptr) aoti_torch_delete_tensor_object(out);
    if (lse != nullptr) aoti_torch_delete_tensor_object(lse);
  }
};

void allocate(const Stack& s, const Call& c, Results& results) {
  const int32_t dtype = s.scalar_type(kOutDtype, c.q.dtype);
  check(dtype == c.q.dtype || dtype == torch_constants().fp32, "out_dtype");
  int64_t shape[4], strides[3] = {1, 1, 1};
  out_shape(c, shape);
  results.out = empty_like_order(c.q, shape, dtype);
  const int dim = lse_shape(c, shape);
  for (int d = dim - 2; d >= 0; --d)
    strides[d] = strides[d + 1] * (shape[d + 1] != 0 ? shape[d + 1] : 1);
  FA_TORCH(aoti_torch_empty_strided, dim, shape, strides, torch_constants().fp32, c.q.device_type,
           c.q.device_index, &results.lse);
}

void check_buffers(const Stack& s, const Call& c, const Tensor& out, const Tensor& lse) {
  int64_t shape[4];
  const int32_t fp32 = torch_constants().fp32;
  out_shape(c, shape);
  check(out.with(c.q) && out.dim == c.q.dim && (out.dtype == c.q.dtype || out.dtype == fp32),
        "out");
  for (int d = 0; d < out.dim; ++d) check(out.sizes[d] == shape[d], "out");
  check(s.scalar_type(kOutDtype, out.dtype) == out.dtype, "out_dtype");
  const int dim = lse_shape(c, shape);
  check(lse.with(c.q) && lse.dim == dim && lse.dtype == fp32, "lse");
  for (int d = 0; d < dim; ++d) check(lse.sizes[d] == shape[d], "lse");
  check(lse.size(-1) <= 1 || lse.stride(-1) == 1, "lse");
}

void set_results(Call& c, const Tensor& out, const Tensor& lse) {
  c.params.out = as_fa(out);
  c.params.lse = {static_cast<float*>(lse.data), c.packed_q ? 0 : lse.stride(0), lse.stride(-2)};
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    int32_t current = -1;
    FA_TORCH(aoti_torch_get_current_device_index, &current);
    if (current != device) FA_TORCH(aoti_torch_create_cuda_guard, device, &guard_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (guard_ != nullptr) aoti_torch_delete_cuda_guard(guard_);
  }

 private:
  CUDAGuardHandle guard_ = nullptr;
};

[[noreturn]] void throw_status(fa_status status) {
  const std::string text = fa_last_error(), prefix = "fa: not supported: ";
  if (status == FA_ERROR_INVALID) throw std::invalid_argument(text);
  if (status == FA_ERROR_UNSUPPORTED && text.compare(0, prefix.size(), prefix) != 0)
    throw std::runtime_error(prefix + text);
  throw std::runtime_error(text);
}

int backend() { return thread_backend == kUnset ? default_backend : thread_backend; }

// On the current stream of q's device. The workspace is torch's, and lives as long as the stream
// needs it: torch's allocator orders reuse by stream.
void launch(const Call& c) {
  if (aoti_torch_get_current_cuda_stream == nullptr)
    throw std::runtime_error("fa: this build of torch has no CUDA, so no stream to launch on.");
  const DeviceGuard guard(c.q.device_index);
  void* stream = nullptr;
  FA_TORCH(aoti_torch_get_current_cuda_stream, c.q.device_index, &stream);
  size_t needed = 0;
  fa_status status = fa_forward(&c.params, nullptr, 0, &needed, stream);
  if (status == FA_ERROR_WORKSPACE) {
    const int64_t bytes = static_cast<int64_t>(needed), one = 1;
    Results workspace;
    FA_TORCH(aoti_torch_empty_strided, 1, &bytes, &one, torch_constants().uint8, c.q.device_type,
             c.q.device_index, &workspace.out);
    void* data = nullptr;
    FA_TORCH(aoti_torch_get_data_ptr, workspace.out, &data);
    status = fa_forward(&c.params, data, needed, &needed, stream);
  }
  if (status != FA_OK) throw_status(status);
}

// Everything but the launch, on CPU tensors, planned for an H200: how tests reach this file without
// a GPU. fa_torch_last_params gives what would have been passed on.
void dry_launch(const Call& c) {
  fa_params params = c.params;
  last_params = params;
  params.options.sm_count = 132;
  params.options.smem_limit = 232448;
  size_t bytes = 0;
  const fa_status status = fa_workspace_size(FA_FORWARD, &params, &bytes);
  if (status != FA_OK) throw_status(status);
}

// Why Python refuses a call: empty, or V (ValueError) or N (NotImplementedError) and the sentence.
std::string refusal(const Stack& s) {
  StableIValue stack[kArgumentCount] = {};
  s.copy_to(stack);
  for (int i = kForwardCount; i < s.count(); ++i)  // Tensor there, Tensor? here
    stack[i] = reinterpret_cast<StableIValue>(new StableIValue(stack[i]));
  FA_TORCH(torch_call_dispatcher, "fa::_refusal", "", stack, kTorchVersion);
  const auto answer = reinterpret_cast<AtenTensorHandle>(stack[0]);
  void* data = nullptr;
  int64_t length = 0;
  aoti_torch_get_data_ptr(answer, &data);
  aoti_torch_get_numel(answer, &length);
  std::string text(static_cast<const char*>(data), static_cast<size_t>(length));
  aoti_torch_delete_tensor_object(answer);
  return text;
}

[[noreturn]] void refuse(const std::string& refusal) {
  if (refusal[0] == 'V') throw std::invalid_argument(refusal.substr(1));
  throw std::runtime_error("fa: not supported: " + refusal.substr(1));
}

[[noreturn]] void refuse(const Stack& s, const Refused& refused) {
  const std::string text = refusal(s);
  if (!text.empty()) refuse(text);
  throw std::runtime_error(std::string("fa: internal error: the check of ") + refused.check +
                           " refused a call that _validate.py accepts.");
}

void check_padding(const Call& c) {
  const int64_t dim_qk = c.q.size(-1), dim_v = c.v.size(-1);
  if (dim_qk % 8 == 0 && dim_v % 8 == 0) return;
  throw std::runtime_error("fa: pad: head dims " + std::to_string(dim_qk) + " and " +
                           std::to_string(dim_v) +
                           " must be multiples of 8 for a kernel. torch.ops.fa.forward and "
                           "fa.attention pad them; this operator does not.");
}

void read_call(const Stack& s, Call& c, bool dry) {
  fa_params_init(&c.params, sizeof(c.params));
  c.q = Tensor(s.tensor(kQ));
  c.k = Tensor(s.tensor(kK));
  c.v = Tensor(s.tensor(kV));
  check(c.q.device_type == (dry ? torch_constants().cpu : torch_constants().cuda), "q's device");
  read_shape(s, c);
  read_options(s, c);
  c.params.q = as_fa(c.q);
  c.params.k = as_fa(c.k);
  c.params.v = as_fa(c.v);
  c.params.options.force_arch = backend() == kTorchBackend ? 0 : backend();
  c.params.options.deterministic = s.flag(kDeterministic);
}

// fa.backend("cpu") with tensors on a GPU: the same arguments to an operator in Python. What it
// would refuse is found before, for its exceptions would not come through with their type.
bool run_in_torch(Stack& s, StableIValue* values, const char* op) {
  if (backend() != kTorchBackend) return false;
  const std::string text = refusal(s);
  if (!text.empty()) refuse(text);
  s.release();
  FA_TORCH(torch_call_dispatcher, op, "", values, kTorchVersion);
  return true;
}

template <bool kDry>
void forward(StableIValue* values, uint64_t, uint64_t) {
  Results results;
  {
    Stack s(values, kForwardCount);
    if (run_in_torch(s, values, "fa::_forward_torch")) return;
    try {
      Call c;
      read_call(s, c, kDry);
      check_padding(c);
      allocate(s, c, results);
      set_results(c, Tensor(results.out), Tensor(results.lse));
      kDry ? dry_launch(c) : launch(c);
    } catch (const Refused& refused) {
      refuse(s, refused);
    }
  }
  values[0] = reinterpret_cast<StableIValue>(results.out);
  values[1] = reinterpret_cast<StableIValue>(results.lse);
  results.out = results.lse = nullptr;
}

// fa::_forward_dense: fa::_forward with every other option at its default.
template <bool kDry>
void forward_dense(StableIValue* values, uint64_t arguments, uint64_t results) {
  StableIValue all[kForwardCount] = {};
  constexpr int kPlaces[] = {kQ, kK, kV, kScale, kCausal, kLeft, kRight};
  for (int i = 0; i < 7; ++i) all[kPlaces[i]] = values[i];
  forward<kDry>(all, arguments, results);
  values[0] = all[0];
  values[1] = all[1];
}

template <bool kDry>
void forward_out(StableIValue* values, uint64_t, uint64_t) {
  Stack s(values, kArgumentCount);
  if (run_in_torch(s, values, "fa::_forward_out_torch")) return;
  try {
    Call c;
    read_call(s, c, kDry);
    check_padding(c);
    const Tensor out(s.tensor(kOut)), lse(s.tensor(kLse));
    check_buffers(s, c, out, lse);
    set_results(c, out, lse);
    kDry ? dry_launch(c) : launch(c);
  } catch (const Refused& refused) {
    refuse(s, refused);
  }
}

}  // namespace

// What _shim.py calls, by ctypes.
extern "C" {

FA_API int fa_torch_abi_version() { return FA_ABI_VERSION; }

// "T q,T k,...": the arguments of fa::forward_out as this file reads them.
FA_API const char* fa_torch_arguments() {
  static const std::string text = [] {
    std::string all;
    for (const Argument& a : kArguments)
      all += std::string(all.empty() ? "" : ",") + a.kind + ' ' + a.name;
    return all;
  }();
  return text.c_str();
}

FA_API void fa_torch_set_backend(int code) { thread_backend = code; }
FA_API void fa_torch_set_default_backend(int code) { default_backend = code; }

// Kernels for namespace `ns`, which must have the schemas already. dry = 0: at key CUDA; 1: at key
// CPU, without launching. 0 is good.
FA_API int fa_torch_register(const char* ns, int dry) {
  TorchLibraryHandle library = nullptr;
  AOTITorchError error =
      aoti_torch_library_init_impl(ns, dry ? "CPU" : "CUDA", __FILE__, __LINE__, &library);
  if (error == 0)
    error = torch_library_impl(library, "_forward", dry ? forward<true> : forward<false>,
                               kTorchVersion);
  if (error == 0)
    error = torch_library_impl(library, "_forward_dense",
                               dry ? forward_dense<true> : forward_dense<false>, kTorchVersion);
  if (error == 0)
    error = torch_library_impl(library, "forward_out", dry ? forward_out<true> : forward_out<false>,
                               kTorchVersion);
  return error;  // the library object lives as long as the process: its end would unregister
}

// The fa_params of this thread's last dry run.
FA_API void fa_torch_last_params(void* to, size_t bytes) {
  std::memcpy(to, &last_params, bytes < sizeof(last_params) ? bytes : sizeof(last_params));
}
}
