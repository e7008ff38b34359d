// SPDX-License-Identifier: BSD-3-Clause
// Which C functions of torch does libfa_torch.so call? Our own declarations; no torch header.
// tests/cpu/test_shim.py compiles this file beside the installed torch's headers: a prototype that
// differs does not compile.
#pragma once

#include <cstdint>

// A value on the stack of a boxed kernel: an integer, a double, a bool or a handle, in its lowest
// bytes; an optional is null, or the address of such a value made with operator new.
using StableIValue = uint64_t;
using AOTITorchError = int32_t;  // 0: good

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct CUDAGuardOpaque;
using CUDAGuardHandle = CUDAGuardOpaque*;

// Absent from CPU builds of torch: null there.
#define FA_TORCH_CUDA_ONLY __attribute__((weak))

extern "C" {

// Kernels of operators. `fn` gets the stack, the number of arguments and of results; it owns the
// arguments and leaves the results, owned by the caller, at the front.
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* dispatch_key,
                                            const char* file, uint32_t line,
                                            TorchLibraryHandle* library);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*fn)(StableIValue*, uint64_t, uint64_t), uint64_t version);
// Consumes the arguments, leaves the results at the front.
AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack,
                                     uint64_t version);

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_uint8();

// Facts of a tensor; sizes and strides are borrowed.
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index);

// Both return a new reference, to be deleted or handed on.
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* tensor);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* copy);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);

AOTITorchError aoti_torch_get_current_device_index(int32_t* index);
FA_TORCH_CUDA_ONLY AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
FA_TORCH_CUDA_ONLY AOTITorchError aoti_torch_create_cuda_guard(int32_t device,
                                                               CUDAGuardHandle* guard);
FA_TORCH_CUDA_ONLY AOTITorchError aoti_torch_delete_cuda_guard(CUDAGuardHandle guard);
}
