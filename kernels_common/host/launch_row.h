// SPDX-License-Identifier: BSD-3-Clause
// How is a row's kernel launched, and what is said when that fails? The same on every architecture.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string_view>

#include "kernels_common/host/error.h"

namespace fa {

// The id of a row, for messages: the name of its type.
template <class Row>
constexpr std::string_view row_name() {
  std::string_view name = __PRETTY_FUNCTION__;  // "… row_name() [with Row = fa::rows::<id>; …]"
  name.remove_prefix(name.find("Row = ") + 6);
  name = name.substr(0, name.find_first_of(";]"));
  return name.substr(name.rfind(':') + 1);
}

// Allows the kernel its shared memory, once per device. Racing threads set the same value.
template <class Row>
cudaError_t allow_shared_memory(const void* function, int bytes) {
  static std::atomic<uint64_t> ready{0};
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (ready.load(std::memory_order_acquire) & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) ready.fetch_or(bit, std::memory_order_release);
  return error;
}

// A counter of FwdArgs::next_tile, before its kernel.
inline fa_status clear_counter(uint32_t* counter, void* stream) {
  const cudaError_t error =
      cudaMemsetAsync(counter, 0, sizeof(*counter), static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return FA_OK;
  cudaGetLastError();
  return fail(FA_ERROR_CUDA, "clearing the tile counter in the workspace: %s.",
              cudaGetErrorString(error));
}

// With `overlapped`, the kernel may begin before the one ahead of it in the stream has ended: it
// waits itself (device/grid_order.h).
inline cudaError_t launch_kernel(const void* function, int grid, int threads, int smem_bytes,
                                 void** parameters, cudaStream_t stream, bool overlapped) {
  if (!overlapped)
    return cudaLaunchKernel(function, dim3(grid), dim3(threads), parameters, smem_bytes, stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, function, parameters);
}

// `parameter`: the kernel's only argument. `smem_bytes`: dynamic shared memory, in any call at most
// `smem_most`; 0 leaves the kernel's attributes alone. One kernel of a row may have some.
template <class Row>
fa_status launch_row(const void* function, int grid, int threads, int smem_bytes, void* parameter,
                     void* stream, bool overlapped = false, int smem_most = 0) {
  cudaError_t error =
      smem_bytes == 0 ? cudaSuccess
                      : allow_shared_memory<Row>(function, smem_most > 0 ? smem_most : smem_bytes);
  if (error == cudaSuccess) {
    void* parameters[] = {parameter};
    error = launch_kernel(function, grid, threads, smem_bytes, parameters,
                          static_cast<cudaStream_t>(stream), overlapped);
  }
  if (error == cudaSuccess) return FA_OK;
  cudaGetLastError();  // reported here; the caller's next call must not meet it again
  constexpr std::string_view name = row_name<Row>();
  return fail(FA_ERROR_CUDA, "launch of %.*s (grid %d, %d threads, %d bytes of shared memory): %s.",
              int(name.size()), name.data(), grid, threads, smem_bytes, cudaGetErrorString(error));
}

}  // namespace fa
