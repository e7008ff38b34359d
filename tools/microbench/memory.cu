// SPDX-License-Identifier: BSD-3-Clause
// How fast do bulk copies fill shared memory out of L2 and out of DRAM?
//
//   python3 tools/microbench/run.py memory
//
// One thread per block keeps kSlots copies of kBytes in flight; one block per multiprocessor.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "device.h"

namespace {

constexpr int kBytes = 16384, kSlots = 8, kSmemBytes = kBytes * kSlots;

__device__ uint32_t address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\nbra again;\nready:\n}" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
}

__global__ void __launch_bounds__(32, 1) copy(const char* source, size_t footprint, int rounds) {
  extern __shared__ __align__(1024) unsigned char buffer[];
  __shared__ uint64_t full[kSlots];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kSlots; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&full[i])));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  for (int i = 0; i < rounds + kSlots; ++i) {
    const int slot = i % kSlots;
    if (i >= kSlots) wait(&full[slot], (i / kSlots & 1) ^ 1);
    if (i >= rounds) continue;
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&full[slot])),
        "r"(kBytes)
        : "memory");
    const size_t at = (size_t{blockIdx.x} * 7919 + i) * kBytes % footprint;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(address(buffer + slot * kBytes)),
        "l"(source + at), "r"(kBytes), "r"(address(&full[slot]))
        : "memory");
  }
}

void measure(const char* source, size_t footprint) {
  int blocks = 0;
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
  cudaFuncSetAttribute(copy, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  const int rounds = 4096;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float ms = 0.f;
  for (int repeat = 0; repeat < 3; ++repeat) {
    cudaEventRecord(begin);
    copy<<<blocks, 32, kSmemBytes>>>(source, footprint, rounds);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
  }
  const double bytes = double(rounds) * kBytes * blocks;
  std::printf("footprint %4zu MB: %5.2f TB/s (%s)\n", footprint >> 20, bytes / ms / 1e9,
              cudaGetErrorString(cudaGetLastError()));
}

}  // namespace

int main() {
  if (const int status = no_hopper("memory")) return status;
  const size_t most = size_t{512} << 20;
  char* source = nullptr;
  cudaMalloc(&source, most);
  cudaMemset(source, 0x3c, most);
  for (size_t footprint : {size_t{4} << 20, size_t{24} << 20, most}) measure(source, footprint);
  return 0;
}
