// SPDX-License-Identifier: BSD-3-Clause
// The table of compiled kernels: one constant-initialised entry per row of tools/variants.csv.
#pragma once

#include <span>

#include "kernels_common/api/fa.h"
#include "kernels_common/device/launch_args.h"
#include "kernels_common/host/kernel_config.h"

namespace fa {

struct KernelEntry {
  const char* id;
  KernelConfig config;
  int threads;
  int smem_bytes;  // dynamic shared memory, sizeof the kernel's own struct (+ alignment)
  // Launches on `stream` (a cudaStream_t). Sets kernel attributes once per device. Errors through
  // fail().
  fa_status (*launch)(const LaunchArgs& args, void* stream);
  const void* (*function)();  // for cudaFuncGetAttributes
};

// Every row of this build, in table order; generated.
std::span<const KernelEntry* const> kernels();

}  // namespace fa
