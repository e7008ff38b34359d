// SPDX-License-Identifier: BSD-3-Clause
// How many clocks does a WGMMA take, by operand source and width, and what do exponentials beside
// it cost?
//
//   python3 tools/microbench/run.py wgmma
//
// Every multiprocessor runs the same loop on random operands, so that the clock is the one the
// power limit leaves. `ideal` is n / 2 clocks for 64 x n x 16, what the tensor cores need.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cuda_runtime.h>

#include <cstdio>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "device.h"

namespace {

using E = cutlass::bfloat16_t;
using cute::GMMA::Major;

constexpr int kDepth = 64;  // elements of k per tile: 4 instructions
constexpr int kTiles = 4;   // tiles of B in shared memory
constexpr int kBatch = 16;  // instructions per commit
constexpr int kSmemBytes = 200 << 10;

enum class Source { kShared, kRegisters };
enum class Exp { kNone, kMufu, kPolynomial };

template <int kN, Source kA, Major kB>
struct Product {
  using Shape = cute::Shape<cute::Int<64>, cute::Int<kN>, cute::Int<kDepth>>;
  template <int kRows>
  using Tile = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<E>{},
      cute::Shape<cute::Int<kRows>, cute::Int<kDepth>, cute::Int<kTiles>>{}));
  // n x k with n contiguous: what P·V reads.
  template <int kCols>
  using TileMn = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<E>{},
      cute::Shape<cute::Int<kCols>, cute::Int<kDepth>, cute::Int<kTiles>>{}));
  static auto op() {
    if constexpr (kA == Source::kShared)
      return cute::GMMA::ss_op_selector<E, E, float, Shape, Major::K, kB>();
    else
      return cute::GMMA::rs_op_selector<E, E, float, Shape, Major::K, kB>();
  }
  using Mma = decltype(cute::make_tiled_mma(op()));
};

__device__ float exp_mufu(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x for x <= 0: nearest integer by a magic addend, cubic remainder, exponent by an integer add.
__device__ float exp_polynomial(float x) {
  const float t = fmaxf(x, -126.f) + 12582912.f;
  const float f = fmaxf(x, -126.f) - (t - 12582912.f);
  float p = fmaf(f, 0.05550410866f, 0.2402264923f);
  p = fmaf(p, f, 0.6931471825f);
  p = fmaf(p, f, 1.f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(t) << 23));
}

// kMath warpgroups multiply, kOthers compute exponentials until those are done.
template <int kN, Source kA, Major kB, int kMath, Exp kExp, int kOthers>
__global__ void __launch_bounds__(128 * (kMath + kOthers), 1)
    loop(int rounds, long long* clocks, unsigned long long* exps, float* sink) {
  using P = Product<kN, kA, kB>;
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
    using namespace cute;
    auto a_tiles = make_tensor(make_smem_ptr(elements + warpgroup * 64 * kDepth * kTiles),
                               typename P::template Tile<64>{});
    auto b_start = elements + kMath * 64 * kDepth * kTiles;
    auto b_tiles = [&] {
      if constexpr (kB == Major::K)
        return make_tensor(make_smem_ptr(b_start), typename P::template Tile<kN>{});
      else
        return make_tensor(make_smem_ptr(b_start), typename P::template TileMn<kN>{});
    }();
    typename P::Mma mma;
    auto slice = mma.get_slice(0);
    auto b = slice.partition_fragment_B(b_tiles);
    auto c = partition_fragment_C(mma, Shape<Int<64>, Int<kN>>{});
    auto a = [&] {
      if constexpr (kA == Source::kShared)
        return slice.partition_fragment_A(a_tiles);
      else
        return make_tensor<E>(partition_shape_A(mma, Shape<Int<64>, Int<kDepth * kTiles>>{}));
    }();
    if constexpr (kA == Source::kRegisters)
      for (int i = 0; i < size(a); ++i) a(i) = elements[threadIdx.x * 64 + i];
    for (int i = 0; i < size(c); ++i) c(i) = 0.f;
    for (int round = 0; round < rounds; ++round) {
      warpgroup_fence_operand(c);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if constexpr (kA == Source::kShared)
          gemm(mma, a(_, _, i % 4, i / 4), b(_, _, i % 4, i / 4), c);
        else
          gemm(mma, a(_, _, i), b(_, _, i % 4, i / 4), c);
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(c);
    const long long end = clock64();
    if (threadIdx.x % 128 == 0) {
      atomicMax(reinterpret_cast<unsigned long long*>(clocks),
                static_cast<unsigned long long>(end - begin));
      atomicSub(&running, 1);
    }
    float sum = 0.f;
    for (int i = 0; i < size(c); ++i) sum += c(i);
    if (sum == 1.2345f) *sink = sum;
  } else if constexpr (kExp != Exp::kNone) {
    float x[16];
    for (int i = 0; i < 16; ++i) x[i] = -0.01f * (threadIdx.x + i);
    unsigned long long done = 0;
    while (*static_cast<volatile int*>(&running) > 0) {
      for (int k = 0; k < 16; ++k) {
        CUTE_UNROLL
        for (int i = 0; i < 16; ++i)
          x[i] = kExp == Exp::kMufu ? exp_mufu(x[i]) : exp_polynomial(-x[i]);
      }
      done += 256;
    }
    float sum = 0.f;
    for (int i = 0; i < 16; ++i) sum += x[i];
    if (sum == 1.2345f) *sink = sum;
    if (threadIdx.x % 32 == 0) atomicAdd(exps, 32 * done);
  }
}

struct Buffers {
  long long* clocks;
  unsigned long long* exps;
  float* sink;
};

template <int kN, Source kA, Major kB, int kMath, Exp kExp = Exp::kNone, int kOthers = 0>
void measure(const Buffers& to) {
  auto* kernel = &loop<kN, kA, kB, kMath, kExp, kOthers>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  int blocks = 0;
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  const double ideal = kN / 2.0;
  const int rounds = static_cast<int>(12e6 / (ideal * kBatch * kMath));
  float ms = 0.f;
  for (int repeat = 0; repeat < 2; ++repeat) {
    cudaMemset(to.clocks, 0, 8);
    cudaMemset(to.exps, 0, 8);
    cudaEventRecord(begin);
    kernel<<<blocks, 128 * (kMath + kOthers), kSmemBytes>>>(rounds, to.clocks, to.exps, to.sink);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
  }
  long long clocks = 0;
  unsigned long long exps = 0;
  cudaMemcpy(&clocks, to.clocks, 8, cudaMemcpyDeviceToHost);
  cudaMemcpy(&exps, to.exps, 8, cudaMemcpyDeviceToHost);
  const double instructions = static_cast<double>(rounds) * kBatch * kMath;
  std::printf("n %3d  a %-9s b %-2s  %d warpgroups", kN,
              kA == Source::kShared ? "shared" : "registers", kB == Major::K ? "k" : "mn", kMath);
  if (kExp != Exp::kNone)
    std::printf(" + %d of %s exp", kOthers, kExp == Exp::kMufu ? "mufu" : "poly");
  std::printf(":  %6.1f clk, ideal %5.1f, %4.2f  %5.0f TFLOP/s at %4.0f MHz", clocks / instructions,
              ideal, instructions * ideal / clocks,
              instructions * blocks * 2.0 * 64 * kN * 16 / ms / 1e9, clocks / ms / 1e3);
  if (kExp != Exp::kNone) std::printf("  %5.2f exp/clk/SM", double(exps) / blocks / clocks);
  const cudaError_t error = cudaGetLastError();
  std::printf("%s%s\n", error == cudaSuccess ? "" : "  FAILED ",
              error == cudaSuccess ? "" : cudaGetErrorString(error));
  std::fflush(stdout);
}

template <Source kA, Major kB, int kMath>
void widths(const Buffers& to) {
  measure<64, kA, kB, kMath>(to);
  measure<128, kA, kB, kMath>(to);
  measure<256, kA, kB, kMath>(to);
  if constexpr (kB == Major::K) {
    measure<80, kA, kB, kMath>(to);
    measure<176, kA, kB, kMath>(to);
  }
}

}  // namespace

int main() {
  if (const int status = no_hopper("wgmma")) return status;
  Buffers to{};
  cudaMalloc(&to.clocks, 8);
  cudaMalloc(&to.exps, 8);
  cudaMalloc(&to.sink, 8);
  std::printf("64 x n x 16, bf16, clocks of one instruction per multiprocessor\n");
  widths<Source::kShared, Major::K, 2>(to);
  widths<Source::kRegisters, Major::MN, 2>(to);
  measure<64, Source::kRegisters, Major::K, 2>(to);
  measure<64, Source::kRegisters, Major::MN, 3>(to);
  measure<128, Source::kShared, Major::K, 3>(to);
  measure<128, Source::kShared, Major::K, 1>(to);
  measure<64, Source::kRegisters, Major::MN, 1>(to);
  measure<128, Source::kRegisters, Major::MN, 1>(to);
  measure<128, Source::kShared, Major::K, 2, Exp::kMufu, 1>(to);
  measure<128, Source::kShared, Major::K, 2, Exp::kPolynomial, 1>(to);
  measure<64, Source::kRegisters, Major::MN, 2, Exp::kMufu, 1>(to);
  measure<64, Source::kRegisters, Major::MN, 2, Exp::kPolynomial, 1>(to);
  measure<128, Source::kRegisters, Major::MN, 2, Exp::kMufu, 1>(to);
  measure<128, Source::kRegisters, Major::MN, 2, Exp::kPolynomial, 1>(to);
  return 0;
}
