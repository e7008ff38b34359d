// SPDX-License-Identifier: BSD-3-Clause
// How does a row of the table become a kernel that the host can launch?
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string_view>

#include "kernels_common/host/error.h"
#include "kernels_common/host/registry.h"
#include "kernels_sm80/fwd/kernel.h"

namespace fa::sm80 {

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
cudaError_t allow_shared_memory() {
  static std::atomic<uint64_t> ready{0};
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (ready.load(std::memory_order_acquire) & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(&fa_fwd<Row>),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(FwdSmem<Row>));
  if (error == cudaSuccess) ready.fetch_or(bit, std::memory_order_release);
  return error;
}

template <class Row>
fa_status launch(const LaunchArgs& args, void* stream) {
  if (args.fwd.order.num_tiles == 0) return FA_OK;
  using T = FwdTypes<Row>;
  cudaError_t error = allow_shared_memory<Row>();
  if (error == cudaSuccess) {
    void* parameters[] = {const_cast<FwdArgs*>(&args.fwd)};
    error = cudaLaunchKernel(reinterpret_cast<const void*>(&fa_fwd<Row>), dim3(args.grid),
                             dim3(T::kThreads), parameters, sizeof(FwdSmem<Row>),
                             static_cast<cudaStream_t>(stream));
  }
  if (error == cudaSuccess) return FA_OK;
  cudaGetLastError();  // reported here; the caller's next call must not meet it again
  constexpr std::string_view name = row_name<Row>();
  return fail(FA_ERROR_CUDA, "launch of %.*s (grid %d, %d threads, %d bytes of shared memory): %s.",
              int(name.size()), name.data(), args.grid, T::kThreads, int(sizeof(FwdSmem<Row>)),
              cudaGetErrorString(error));
}

template <class Row>
const void* function() {
  return reinterpret_cast<const void*>(&fa_fwd<Row>);
}

template <class Row>
constexpr KernelEntry make_entry(const char* id) {
  return KernelEntry{
      id,           Row::kConfig,  FwdTypes<Row>::kThreads, int(sizeof(FwdSmem<Row>)),
      &launch<Row>, &function<Row>};
}

}  // namespace fa::sm80
