// SPDX-License-Identifier: BSD-3-Clause
// For which GPU is a call planned? The only file of the host side, beside tensor_map.cpp, that asks
// CUDA anything.
#include "kernels_common/host/device_info.h"

#include <algorithm>
#include <atomic>

#include "kernels_common/host/error.h"

#if defined(FA_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace fa {
namespace {

constexpr int kHopperSmem = 200 * 1024;  // no 8.x GPU gives one block that much
constexpr int64_t kMiB = 1024 * 1024;

// What a GPU of that family has, as far as the caller did not say.
DeviceInfo nominal_device(const Problem& p) {
  const int arch = p.force_arch != 0 ? p.force_arch : p.smem_limit >= kHopperSmem ? 90 : 80;
  return DeviceInfo{arch,         p.sm_count,
                    p.smem_limit, p.smem_limit + kReservedSmem,
                    2048,         (arch == 90 ? 50 : 40) * kMiB,
                    true};
}

#if defined(FA_WITH_CUDA)

constexpr int kMaxDevices = 64;
DeviceInfo cache[kMaxDevices];
std::atomic<bool> cached[kMaxDevices];

fa_status no_device(const char* call, cudaError_t error) {
  cudaGetLastError();  // the failure is reported here; leave nothing behind for the caller's next
                       // check
  return fail(FA_ERROR_DEVICE,
              "%s: %s. A CUDA GPU is needed to run; to plan without one set options.force_arch, "
              "sm_count and smem_limit "
              "(H200: 90, 132, 232448; A100: 80, 108, 166912).",
              call, cudaGetErrorString(error));
}

fa_status ask(int ordinal, DeviceInfo* device) {
  int major = 0, minor = 0, l2 = 0;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } wanted[] = {{cudaDevAttrComputeCapabilityMajor, &major},
                {cudaDevAttrComputeCapabilityMinor, &minor},
                {cudaDevAttrMultiProcessorCount, &device->sm_count},
                {cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->smem_per_block},
                {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &device->smem_per_sm},
                {cudaDevAttrMaxThreadsPerMultiProcessor, &device->threads_per_sm},
                {cudaDevAttrL2CacheSize, &l2}};
  for (const auto& w : wanted)
    if (cudaError_t error = cudaDeviceGetAttribute(w.value, w.attribute, ordinal);
        error != cudaSuccess)
      return no_device("cudaDeviceGetAttribute", error);
  device->capability = 10 * major + minor;
  device->l2_bytes = l2;
  device->nominal = false;
  return FA_OK;
}

fa_status current_device(DeviceInfo* device) {
  int ordinal = 0;
  if (cudaError_t error = cudaGetDevice(&ordinal); error != cudaSuccess)
    return no_device("cudaGetDevice", error);
  if (ordinal >= kMaxDevices) return ask(ordinal, device);
  if (!cached[ordinal].load(std::memory_order_acquire)) {
    // Two threads may both ask; they get the same answers, so only the write needs an order.
    DeviceInfo found;
    FA_TRY(ask(ordinal, &found));
    static std::atomic_flag writing = ATOMIC_FLAG_INIT;
    while (writing.test_and_set(std::memory_order_acquire)) {
    }
    if (!cached[ordinal].load(std::memory_order_relaxed)) cache[ordinal] = found;
    cached[ordinal].store(true, std::memory_order_release);
    writing.clear(std::memory_order_release);
  }
  *device = cache[ordinal];
  return FA_OK;
}

#else

fa_status current_device(DeviceInfo*) {
  return fail(FA_ERROR_DEVICE,
              "this build of libfa holds no kernels and cannot ask for a GPU. Rebuild with "
              "kernels: FA_ARCHS=\"80;90a\" pip "
              "install . ; to plan without a GPU set options.force_arch, sm_count and smem_limit "
              "(H200: 90, 132, 232448; "
              "A100: 80, 108, 166912).");
}

#endif

}  // namespace

fa_status device_info(const Problem& p, Purpose purpose, DeviceInfo* device) {
  if (purpose == Purpose::kPlan && p.sm_count > 0 && p.smem_limit > 0) {
    *device = nominal_device(p);
  } else {
    FA_TRY(current_device(device));
    if (p.sm_count > 0) device->sm_count = std::min(device->sm_count, p.sm_count);
    if (p.smem_limit > 0) device->smem_per_block = std::min(device->smem_per_block, p.smem_limit);
  }
  device->sm_count = std::max(1, device->sm_count - p.reserve_sms);
  return FA_OK;
}

#if defined(FA_WITH_CUDA)
bool function_resources(const void* function, int* registers, int* local_bytes) {
  cudaFuncAttributes attributes;
  if (function == nullptr || cudaFuncGetAttributes(&attributes, function) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  *registers = attributes.numRegs;
  *local_bytes = static_cast<int>(attributes.localSizeBytes);
  return true;
}
#else
bool function_resources(const void*, int*, int*) { return false; }
#endif

}  // namespace fa
