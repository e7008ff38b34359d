// SPDX-License-Identifier: BSD-3-Clause
// What does ordinary arithmetic cost the tensor cores that run beside it?
//
//   python3 tools/microbench/run.py beside
//
// Two warpgroups issue WGMMA without a pause, one or two others one kind of instruction. `lost` is
// what one of those, issued on every scheduler, takes from the products, in clocks.
#include <cuda_runtime.h>

#include <cstdio>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "device.h"

namespace {

using E = cutlass::bfloat16_t;
constexpr int kMath = 2, kBatch = 16, kSmemBytes = 96 << 10, kWidth = 128;

enum class Kind { kNothing, kMufu, kMul, kAdd, kFma, kFmaConstant, kMax, kPack, kShuffle };
const char* const kNames[] = {"nothing",         "ex2",         "mul 1 register",
                              "add 2 registers", "fma 3 regs",  "fma 1 reg",
                              "max 2 regs",      "pack 2 regs", "shuffle"};

template <Kind kKind>
__device__ void step(float (&x)[16], float a, float b) {
  CUTE_UNROLL
  for (int i = 0; i < 16; ++i) {
    if constexpr (kKind == Kind::kMufu)
      asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
    else if constexpr (kKind == Kind::kMul)
      asm volatile("mul.ftz.f32 %0, %0, 0f3F7FF000;" : "+f"(x[i]));
    else if constexpr (kKind == Kind::kAdd)
      asm volatile("add.ftz.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(x[(i + 5) % 16]));
    else if constexpr (kKind == Kind::kFma)
      asm volatile("fma.rn.ftz.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(a), "f"(x[(i + 5) % 16]));
    else if constexpr (kKind == Kind::kFmaConstant)
      asm volatile("fma.rn.ftz.f32 %0, %0, 0f3F7FF000, 0f3F000000;" : "+f"(x[i]));
    else if constexpr (kKind == Kind::kMax)
      asm volatile("max.NaN.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(x[(i + 5) % 16]));
    else if constexpr (kKind == Kind::kPack)
      asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;"
                   : "=r"(reinterpret_cast<uint32_t&>(x[i]))
                   : "f"(x[i]), "f"(x[(i + 5) % 16]));
    else if constexpr (kKind == Kind::kShuffle)
      asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, 0xffffffff;"
                   : "+r"(reinterpret_cast<uint32_t&>(x[i])));
  }
}

template <Kind kKind, int kOthers>
__global__ void __launch_bounds__(128 * (kMath + kOthers), 1)
    loop(int rounds, unsigned long long* clocks, unsigned long long* count, float* sink) {
  using namespace cute;
  using Tile = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<E>{},
                                      Shape<Int<kWidth>, Int<64>, Int<4>>{}));
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<E, E, float, Shape<Int<64>, Int<kWidth>, Int<64>>>()));
  extern __shared__ __align__(1024) unsigned char buffer[];
  __shared__ int running;
  E* elements = reinterpret_cast<E*>(buffer);
  uint32_t state = threadIdx.x * 2654435761u + blockIdx.x;
  for (int i = threadIdx.x; i < kSmemBytes / 2; i += blockDim.x) {
    state = state * 1664525u + 1013904223u;
    elements[i] = E(static_cast<float>(static_cast<int>(state >> 16) - 32768) / 16384.f);
  }
  if (threadIdx.x == 0) running = kMath;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const long long begin = clock64();
  if (warpgroup < kMath) {
    auto tiles = make_tensor(make_smem_ptr(elements), Tile{});
    Mma mma;
    auto slice = mma.get_slice(0);
    auto a =
        slice.partition_fragment_A(local_tile(tiles, Shape<_64, _64, _4>{}, make_coord(0, 0, 0)));
    auto b = slice.partition_fragment_B(tiles);
    auto c = partition_fragment_C(mma, Shape<_64, Int<kWidth>>{});
    for (int i = 0; i < size(c); ++i) c(i) = 0.f;
    for (int round = 0; round < rounds; ++round) {
      warpgroup_fence_operand(c);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) gemm(mma, a(_, _, i % 4, i / 4), b(_, _, i % 4, i / 4), c);
      warpgroup_commit_batch();
      warpgroup_wait<1>();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(c);
    if (threadIdx.x % 128 == 0) {
      atomicMax(clocks, static_cast<unsigned long long>(clock64() - begin));
      atomicSub(&running, 1);
    }
    float sum = 0.f;
    for (int i = 0; i < size(c); ++i) sum += c(i);
    if (sum == 1.2345f) *sink = sum;
  } else {
    float x[16];
    for (int i = 0; i < 16; ++i) x[i] = 1.f + 0.001f * (threadIdx.x + i);
    unsigned long long done = 0;
    while (*static_cast<volatile int*>(&running) > 0) {
      for (int k = 0; k < 32; ++k) step<kKind>(x, 0.999f, 0.001f);
      done += kKind == Kind::kNothing ? 0 : 512;
    }
    float sum = 0.f;
    for (int i = 0; i < 16; ++i) sum += x[i];
    if (sum == 1.2345f) *sink = sum;
    if (threadIdx.x % 32 == 0) atomicAdd(count, done);
  }
}

template <Kind kKind, int kOthers>
void measure(unsigned long long* device) {
  auto* kernel = &loop<kKind, kOthers>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  int blocks = 0;
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
  const int rounds = 2000;
  for (int repeat = 0; repeat < 2; ++repeat) {
    cudaMemset(device, 0, 16);
    kernel<<<blocks, 128 * (kMath + kOthers), kSmemBytes>>>(rounds, device, device + 1,
                                                            reinterpret_cast<float*>(device + 2));
    cudaDeviceSynchronize();
  }
  unsigned long long got[2];
  cudaMemcpy(got, device, 16, cudaMemcpyDeviceToHost);
  const double ideal = double(rounds) * kBatch * kMath * kWidth / 2;
  const double per_scheduler = double(got[1]) / blocks / 4;  // warp instructions
  std::printf(
      "%-16s x %d: products at %.3f of their rate, %.3f others/clk/scheduler, lost %.2f %s\n",
      kNames[int(kKind)], kOthers, ideal / double(got[0]), per_scheduler / double(got[0]),
      per_scheduler > 0 ? (double(got[0]) - ideal) / per_scheduler : 0.0,
      cudaGetErrorString(cudaGetLastError()));
  std::fflush(stdout);
}

template <Kind kKind>
void both(unsigned long long* device) {
  measure<kKind, 1>(device);
  measure<kKind, 2>(device);
}

}  // namespace

int main() {
  if (const int status = no_hopper("beside")) return status;
  unsigned long long* device = nullptr;
  cudaMalloc(&device, 32);
  both<Kind::kNothing>(device);
  both<Kind::kMufu>(device);
  both<Kind::kMul>(device);
  both<Kind::kAdd>(device);
  both<Kind::kFmaConstant>(device);
  both<Kind::kFma>(device);
  both<Kind::kMax>(device);
  both<Kind::kPack>(device);
  both<Kind::kShuffle>(device);
  return 0;
}
