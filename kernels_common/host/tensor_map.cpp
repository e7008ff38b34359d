// SPDX-License-Identifier: BSD-3-Clause
// Describes a strided tensor to the TMA unit. The driver's encoder is looked up at run time:
// libcuda is never linked.
#include "kernels_common/host/tensor_map.h"

#include "kernels_common/host/error.h"

#if defined(FA_WITH_CUDA)

#include <cuda.h>  // types only
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cinttypes>

#include "kernels_common/host/problem.h"

namespace fa {
namespace {

constexpr int64_t kExtentLimit = int64_t{1} << 32;  // elements
constexpr const char* kDimNames[] = {"dim", "row", "head", "batch"};

using Encode = decltype(&cuTensorMapEncodeTiled);

struct Encoder {
  Encode function = nullptr;
  cudaError_t error = cudaSuccess;
};

Encoder find_encoder() {
  Encoder encoder;
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  encoder.error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000,
                                                   cudaEnableDefault, &found);
  if (encoder.error == cudaSuccess && found == cudaDriverEntryPointSuccess)
    encoder.function = reinterpret_cast<Encode>(address);
  return encoder;
}

fa_status check(const TensorMapSpec& spec) {
  for (int i = 0; i < 4; ++i)
    if (spec.extent[i] > kExtentLimit)
      return fail(FA_ERROR_INVALID,
                  "%s: the %s dimension has %" PRId64 " elements, a tensor map holds at most 2^32.",
                  spec.name, kDimNames[i], spec.extent[i]);
  for (int i = 0; i < 3; ++i) {
    const int64_t stride = spec.stride_bytes[i];
    if (spec.extent[i + 1] > 1 &&
        (stride < 0 || stride % 16 != 0 || stride >= kTensorMapStrideLimit))
      return fail(FA_ERROR_INVALID,
                  "%s: the %s stride is %" PRId64
                  " bytes, a tensor map takes multiples of 16 from 0 to below 2^40. Pass a "
                  "contiguous tensor.",
                  spec.name, kDimNames[i + 1], stride);
  }
  return FA_OK;
}

}  // namespace

fa_status encode_tensor_map(const TensorMapSpec& spec, void* map) {
  static const Encoder encoder = find_encoder();
  if (encoder.function == nullptr)
    return fail(FA_ERROR_CUDA,
                "%s: the driver has no cuTensorMapEncodeTiled (%s). Hopper rows need a driver for "
                "CUDA 12.0 "
                "or newer.",
                spec.name, cudaGetErrorString(encoder.error));
  FA_TRY(check(spec));
  const bool byte = spec.dtype == DType::kE4m3;
  const CUtensorMapDataType type = byte                         ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : spec.dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : spec.dtype == DType::kFp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  cuuint64_t extent[4], stride[3];
  cuuint32_t box[4], step[4];
  for (int i = 0; i < 4; ++i) {
    extent[i] = static_cast<cuuint64_t>(std::max<int64_t>(1, spec.extent[i]));
    box[i] = static_cast<cuuint32_t>(spec.box[i]);
    step[i] = 1;
  }
  // The stride of a dimension of size <= 1 is never taken, but the encoder checks it.
  for (int i = 0; i < 3; ++i)
    stride[i] = spec.extent[i + 1] > 1 ? static_cast<cuuint64_t>(spec.stride_bytes[i]) : 16;
  const auto encode = [&] {
    return encoder.function(static_cast<CUtensorMap*>(map), type, 4, const_cast<void*>(spec.data),
                            extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            spec.swizzle_128  ? CU_TENSOR_MAP_SWIZZLE_128B
                            : spec.swizzle_64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                              : CU_TENSOR_MAP_SWIZZLE_NONE,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  // The encoder is a driver call: in a thread that made no run-time call yet (autograd's, a pool's)
  // there is no current context. Naming the device makes its context current.
  int device = 0;
  if (result == CUDA_ERROR_INVALID_CONTEXT && cudaGetDevice(&device) == cudaSuccess &&
      cudaSetDevice(device) == cudaSuccess)
    result = encode();
  if (result == CUDA_SUCCESS) return FA_OK;
  return fail(FA_ERROR_CUDA,
              "%s: cuTensorMapEncodeTiled failed with CUresult %d (%s, data %p, extents %" PRIu64
              " %" PRIu64 " %" PRIu64 " %" PRIu64 ", strides %" PRIu64 " %" PRIu64 " %" PRIu64
              " bytes, box %u %u %u %u).",
              spec.name, static_cast<int>(result), dtype_name(spec.dtype), spec.data, extent[0],
              extent[1], extent[2], extent[3], stride[0], stride[1], stride[2], box[0], box[1],
              box[2], box[3]);
}

}  // namespace fa

#else

namespace fa {

fa_status encode_tensor_map(const TensorMapSpec& spec, void*) {
  return fail(FA_ERROR_DEVICE,
              "%s: this build of libfa has no CUDA. Rebuild with FA_ARCHS=\"80;90a\" pip install .",
              spec.name);
}

}  // namespace fa

#endif
