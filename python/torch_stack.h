// SPDX-License-Identifier: BSD-3-Clause
// What stands on the stack of a boxed kernel of fa::_forward, fa::forward_out,
// fa::_backward_kernel?
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

#include "python/torch_c_abi.h"

namespace fa_torch {

// In the order of the schema, which python/fa/_schemas.py writes; _shim.py compares the two.
// T tensor, o Tensor?, i int, I int?, f float, F float?, b bool, B bool?, S ScalarType?
struct Argument {
  char kind;
  const char* name;
};
// clang-format off
constexpr Argument kArguments[] = {
    {'T', "q"}, {'T', "k"}, {'T', "v"}, {'o', "cu_seqlens_q"}, {'o', "cu_seqlens_k"},
    {'o', "seqused_q"}, {'o', "seqused_k"}, {'o', "leftpad_k"}, {'o', "kv_batch_idx"},
    {'I', "max_seqlen_q"}, {'I', "max_seqlen_k"}, {'o', "page_table"}, {'o', "q_descale"},
    {'o', "k_descale"}, {'o', "v_descale"}, {'i', "descale_block_q"}, {'i', "descale_block_k"},
    {'o', "alibi_slopes"}, {'o', "sinks"}, {'F', "softmax_scale"}, {'b', "causal"},
    {'i', "window_left"}, {'i', "window_right"}, {'i', "attention_chunk"}, {'f', "softcap"},
    {'f', "dropout_p"}, {'o', "philox_seed_offset"}, {'i', "num_splits"}, {'b', "batch_invariant"},
    {'B', "deterministic"}, {'S', "out_dtype"}, {'T', "out"}, {'T', "lse"},
    {'T', "dout"}, {'o', "dlse"}, {'S', "grad_dtype"},
};
enum Index {
    kQ, kK, kV, kCuQ, kCuK, kUsedQ, kUsedK, kLeftpadK, kKvBatchIdx, kMaxQ, kMaxK, kPageTable,
    kQDescale, kKDescale, kVDescale, kDescaleBlockQ, kDescaleBlockK, kAlibi, kSinks, kScale,
    kCausal, kLeft, kRight, kChunk, kSoftcap, kDropout, kPhilox, kSplits, kInvariant,
    kDeterministic, kOutDtype, kOut, kLse, kDout, kDlse, kGradDtype, kArgumentCount,
};
// clang-format on
constexpr int kForwardCount = kOut;      // fa::_forward
constexpr int kForwardOutCount = kDout;  // fa::forward_out; fa::_backward_kernel has all of them
static_assert(sizeof(kArguments) / sizeof(kArguments[0]) == kArgumentCount, "one name per index");

inline void require(AOTITorchError error, const char* call) {
  if (error != 0) throw std::runtime_error(std::string("fa: torch's ") + call + " failed.");
}
#define FA_TORCH(call, ...) require(call(__VA_ARGS__), #call)

// The arguments of one call. Owns them until they are handed on.
class Stack {
 public:
  Stack(StableIValue* values, int count) : values_(values), count_(count) {}
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  ~Stack() {
    for (int i = 0; i < count_; ++i) {
      const char kind = kArguments[i].kind;
      if (kind == 'T') aoti_torch_delete_tensor_object(tensor(i));
      if (!is_optional(kind) || values_[i] == 0) continue;
      if (kind == 'o') aoti_torch_delete_tensor_object(tensor(i));
      delete boxed(i);
    }
  }

  bool has(int i) const { return values_[i] != 0; }  // optionals only
  AtenTensorHandle tensor(int i) const {
    if (kArguments[i].kind == 'T') return reinterpret_cast<AtenTensorHandle>(values_[i]);
    return has(i) ? reinterpret_cast<AtenTensorHandle>(*boxed(i)) : nullptr;
  }
  int64_t integer(int i, int64_t none = 0) const {
    const char kind = kArguments[i].kind;
    if (kind == 'i') return static_cast<int64_t>(values_[i]);
    return has(i) ? static_cast<int64_t>(*boxed(i)) : none;
  }
  bool flag(int i) const {
    const bool optional = is_optional(kArguments[i].kind);
    return ((optional ? (has(i) ? *boxed(i) : 0) : values_[i]) & 0xff) != 0;
  }
  double number(int i, double none = 0) const {
    if (kArguments[i].kind == 'F' && !has(i)) return none;
    const StableIValue bits = kArguments[i].kind == 'F' ? *boxed(i) : values_[i];
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  int32_t scalar_type(int i, int32_t none) const {
    return has(i) ? static_cast<int32_t>(*boxed(i)) : none;
  }
  // A second, independent set of the arguments, for a callee that consumes them.
  void copy_to(StableIValue* to) const {
    for (int i = 0; i < count_; ++i) {
      const char kind = kArguments[i].kind;
      to[i] = values_[i];
      if (kind == 'T') to[i] = reference(tensor(i));
      if (is_optional(kind) && values_[i] != 0)
        to[i] = reinterpret_cast<StableIValue>(
            new StableIValue(kind == 'o' ? reference(tensor(i)) : *boxed(i)));
    }
  }
  void release() { count_ = 0; }
  int count() const { return count_; }

 private:
  static bool is_optional(char kind) { return std::strchr("oIFBS", kind) != nullptr; }
  static StableIValue reference(AtenTensorHandle tensor) {
    AtenTensorHandle copy = nullptr;
    FA_TORCH(aoti_torch_new_tensor_handle, tensor, &copy);
    return reinterpret_cast<StableIValue>(copy);
  }
  StableIValue* boxed(int i) const { return reinterpret_cast<StableIValue*>(values_[i]); }

  StableIValue* values_;
  int count_;
};

struct Tensor {
  AtenTensorHandle handle = nullptr;
  int64_t dim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0, device_type = 0, device_index = 0;
  void* data = nullptr;

  Tensor() = default;
  explicit Tensor(AtenTensorHandle tensor) : handle(tensor) {
    if (tensor == nullptr) return;
    FA_TORCH(aoti_torch_get_dim, tensor, &dim);
    FA_TORCH(aoti_torch_get_sizes, tensor, &sizes);
    FA_TORCH(aoti_torch_get_strides, tensor, &strides);
    FA_TORCH(aoti_torch_get_dtype, tensor, &dtype);
    FA_TORCH(aoti_torch_get_device_type, tensor, &device_type);
    FA_TORCH(aoti_torch_get_device_index, tensor, &device_index);
    FA_TORCH(aoti_torch_get_data_ptr, tensor, &data);
  }
  explicit operator bool() const { return handle != nullptr; }
  int64_t size(int64_t d) const { return sizes[d < 0 ? dim + d : d]; }
  int64_t stride(int64_t d) const { return strides[d < 0 ? dim + d : d]; }
  bool with(const Tensor& t) const {
    return device_type == t.device_type && device_index == t.device_index;
  }
};

}  // namespace fa_torch
