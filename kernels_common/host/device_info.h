// SPDX-License-Identifier: BSD-3-Clause
// For which GPU is a call planned? Asked of the driver once per device, or stated by the caller.
#pragma once

#include <cstdint>

#include "kernels_common/api/fa.h"
#include "kernels_common/host/problem.h"

namespace fa {

inline constexpr int kReservedSmem = 1024;  // what the system takes of a multiprocessor per block

struct DeviceInfo {
  int capability;  // 10 * major + minor: 80, 86, 89, 90, 100, ...
  int sm_count;
  int smem_per_block;  // bytes one block may opt in to
  int smem_per_sm;     // bytes of one multiprocessor
  int threads_per_sm;
  int64_t l2_bytes;
  bool nominal;  // stated by options, not found

  bool hopper() const { return capability / 10 == 9; }
};

// A launch happens on the current device; planning may be for one that is not here.
enum class Purpose { kLaunch, kPlan };

// With Purpose::kPlan and both options.sm_count and options.smem_limit set, no GPU is asked: the
// device is the nominal one with those sizes, of force_arch's architecture, or, without force_arch,
// the one whose shared memory this is. Otherwise the current device; sm_count and smem_limit then
// only lower what it has. FA_ERROR_DEVICE without one.
fa_status device_info(const Problem& problem, Purpose purpose, DeviceInfo* device);

// Registers and local memory of a kernel; false where no device can answer.
bool function_resources(const void* function, int* registers, int* local_bytes);

}  // namespace fa
