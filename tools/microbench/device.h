// SPDX-License-Identifier: BSD-3-Clause
// Is there a Hopper GPU for these programs? One sentence where there is none.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>

// 0, or the exit status that main returns: 2, as of every tool that needs a GPU.
inline int no_hopper(const char* program) {
  int count = 0, major = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::fprintf(stderr, "%s needs a Hopper GPU, and CUDA finds none here: %s.\n", program,
                 error == cudaSuccess ? "it counts no device" : cudaGetErrorString(error));
    return 2;
  }
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  if (major == 9) return 0;
  std::fprintf(stderr, "%s needs a Hopper GPU (9.0), and device 0 is of compute capability %d.\n",
               program, major);
  return 2;
}
