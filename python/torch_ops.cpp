// SPDX-License-Identifier: BSD-3-Clause
// How do the forward and the backward reach libfa.so for CUDA tensors, in a few microseconds?
//
// Reads the arguments from the stack of a boxed kernel, fills fa_params, allocates the results and
// calls fa_forward or fa_backward. Whatever looks wrong is only noticed here; the sentence about it
// comes from fa::_refusal, which is Python (python/fa/_validate.py), so that every message exists
// once. A backward that looks wrong, or unusual, is left to python/fa/_cuda.py.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels_common/api/fa.h"
#include "python/torch_c_abi.h"
#include "python/torch_call.h"
#include "python/torch_stack.h"

namespace {

using namespace fa_torch;

constexpr uint64_t kTorchVersion = 0x020a000000000000;  // 2.10, the oldest this works with

// What fa.backend chose: 0 nothing, 1 the torch implementation, 80 or 90.
constexpr int kUnset = -1, kTorchBackend = 1;
int default_backend = 0;
thread_local int thread_backend = kUnset;
thread_local fa_params last_params;  // of a dry run

struct Results {
  AtenTensorHandle out = nullptr, lse = nullptr;
  ~Results() {
    if (out != nullptr) aoti_torch_delete_tensor_object(out);
    if (lse != nullptr) aoti_torch_delete_tensor_object(lse);
  }
};

void allocate(const Stack& s, const Call& c, Results& results) {
  const Dtypes& d = torch_constants();
  const int32_t dtype = s.scalar_type(kOutDtype, c.q.dtype == d.e4m3 ? d.bf16 : c.q.dtype);
  check(can_store(c, dtype), "out_dtype");
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
  check(out.with(c.q) && out.dim == c.q.dim && can_store(c, out.dtype), "out");
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
using Entry = fa_status (*)(const fa_params*, void*, size_t, size_t*, void*);

void launch(const Call& c, Entry entry) {
  if (aoti_torch_get_current_cuda_stream == nullptr)
    throw std::runtime_error("fa: this build of torch has no CUDA, so no stream to launch on.");
  const DeviceGuard guard(c.q.device_index);
  void* stream = nullptr;
  FA_TORCH(aoti_torch_get_current_cuda_stream, c.q.device_index, &stream);
  size_t needed = 0;
  fa_status status = entry(&c.params, nullptr, 0, &needed, stream);
  if (status == FA_ERROR_WORKSPACE) {
    const int64_t bytes = static_cast<int64_t>(needed), one = 1;
    Results workspace;
    FA_TORCH(aoti_torch_empty_strided, 1, &bytes, &one, torch_constants().uint8, c.q.device_type,
             c.q.device_index, &workspace.out);
    void* data = nullptr;
    FA_TORCH(aoti_torch_get_data_ptr, workspace.out, &data);
    status = entry(&c.params, data, needed, &needed, stream);
  }
  if (status != FA_OK) throw_status(status);
}

// Everything but the launch, on CPU tensors, planned for an H200: how tests reach this file without
// a GPU. fa_torch_last_params gives what would have been passed on.
void dry_launch(const Call& c, fa_op op) {
  fa_params params = c.params;
  last_params = params;
  params.options.sm_count = 132;
  params.options.smem_limit = 232448;
  size_t bytes = 0;
  const fa_status status = fa_workspace_size(op, &params, &bytes);
  if (status != FA_OK) throw_status(status);
}

// Why Python refuses a call: empty, or V (ValueError) or N (NotImplementedError) and the sentence.
std::string refusal(const Stack& s) {
  StableIValue stack[kForwardOutCount] = {};
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
      kDry ? dry_launch(c, FA_FORWARD) : launch(c, fa_forward);
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
  Stack s(values, kForwardOutCount);
  if (run_in_torch(s, values, "fa::_forward_out_torch")) return;
  try {
    Call c;
    read_call(s, c, kDry);
    check_padding(c);
    const Tensor out(s.tensor(kOut)), lse(s.tensor(kLse));
    check_buffers(s, c, out, lse);
    set_results(c, out, lse);
    kDry ? dry_launch(c, FA_FORWARD) : launch(c, fa_forward);
  } catch (const Refused& refused) {
    refuse(s, refused);
  }
}

struct Gradients {
  AtenTensorHandle all[4] = {};  // dq, dk, dv, dsinks
  ~Gradients() {
    for (AtenTensorHandle handle : all)
      if (handle != nullptr) aoti_torch_delete_tensor_object(handle);
  }
};

// As kernels read it: rows of contiguous elements, all of them at multiples of 16 bytes.
bool readable(const Tensor& t) {
  const int64_t unit = t.dtype == torch_constants().fp32 ? 4 : 8;
  for (int d = 0; d + 1 < t.dim; ++d)
    if (t.sizes[d] > 1 && t.strides[d] % unit != 0) return false;
  return t.stride(-1) == 1 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

bool same_shape(const Tensor& t, int64_t dim, const int64_t* shape) {
  return t.dim == dim && std::equal(shape, shape + dim, t.sizes);
}

void read_backward(const Stack& s, Call& c) {
  const Dtypes& d = torch_constants();
  const Tensor out(s.tensor(kOut)), lse(s.tensor(kLse)), dout(s.tensor(kDout));
  check(c.q.dtype != d.e4m3 && c.q.size(-1) % 8 == 0 && c.v.size(-1) % 8 == 0, "q");
  check(!s.has(kKvBatchIdx), "kv_batch_idx");
  int64_t shape[4];
  out_shape(c, shape);
  for (const Tensor* t : {&out, &dout})
    check(t->with(c.q) && can_store(c, t->dtype) && same_shape(*t, c.q.dim, shape), "out or dout");
  check(readable(dout), "dout");
  const int dim = lse_shape(c, shape);
  check(lse.with(c.q) && lse.dtype == d.fp32 && same_shape(lse, dim, shape), "lse");
  check(lse.size(-1) <= 1 || lse.stride(-1) == 1, "lse");
  set_results(c, out, lse);
  c.params.grad.dout = as_fa(dout);
  if (!s.has(kDlse)) return;
  const Tensor dlse(s.tensor(kDlse));
  check(dlse.with(c.q) && dlse.dtype == d.fp32 && same_shape(dlse, dim, shape) &&
            std::equal(lse.strides, lse.strides + dim, dlse.strides),
        "dlse");
  c.params.grad.dlse = static_cast<const float*>(dlse.data);
}

void allocate(const Stack& s, Call& c, Gradients& results) {
  const int32_t fp32 = torch_constants().fp32;
  const int32_t dtype = s.scalar_type(kGradDtype, c.q.dtype);
  check(can_store(c, dtype), "grad_dtype");
  const Tensor* like[] = {&c.q, &c.k, &c.v};
  fa_tensor* to[] = {&c.params.grad.dq, &c.params.grad.dk, &c.params.grad.dv};
  for (int i = 0; i < 3; ++i) {
    results.all[i] = empty_like_order(*like[i], like[i]->sizes, dtype);
    *to[i] = as_fa(Tensor(results.all[i]));
  }
  const int64_t heads = s.has(kSinks) ? c.q.size(-2) : 0, one = 1;
  FA_TORCH(aoti_torch_empty_strided, 1, &heads, &one, s.has(kSinks) ? fp32 : c.q.dtype,
           c.q.device_type, c.q.device_index, &results.all[3]);
  if (s.has(kSinks)) c.params.grad.dsinks = static_cast<float*>(Tensor(results.all[3]).data);
}

// What this does not take is left to Python: wrong calls, and those that need a copy first.
template <bool kDry>
void backward(StableIValue* values, uint64_t, uint64_t) {
  Gradients results;
  {
    Stack s(values, kArgumentCount);
    try {
      Call c;
      read_call(s, c, kDry);
      read_backward(s, c);
      allocate(s, c, results);
      kDry ? dry_launch(c, FA_BACKWARD) : launch(c, fa_backward);
    } catch (const Refused& refused) {
      throw std::runtime_error(std::string("fa: left to Python: ") + refused.check);
    }
  }
  for (int i = 0; i < 4; ++i) {
    values[i] = reinterpret_cast<StableIValue>(results.all[i]);
    results.all[i] = nullptr;
  }
}

}  // namespace

// What _shim.py calls, by ctypes.
extern "C" {

FA_API int fa_torch_abi_version() { return FA_ABI_VERSION; }

// "T q,T k,...": the arguments of fa::_backward_kernel as this file reads them.
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
  if (error == 0)
    error = torch_library_impl(library, "_backward_kernel", dry ? backward<true> : backward<false>,
                               kTorchVersion);
  return error;  // the library object lives as long as the process: its end would unregister
}

// The fa_params of this thread's last dry run.
FA_API void fa_torch_last_params(void* to, size_t bytes) {
  std::memcpy(to, &last_params, bytes < sizeof(last_params) ? bytes : sizeof(last_params));
}
}
