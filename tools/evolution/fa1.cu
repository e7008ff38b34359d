// SPDX-License-Identifier: BSD-3-Clause
// How does attention run in the order of FlashAttention 1? A small forward for tools/evolution.py.
//
// One block per sequence and head. The outer loop brings a block of keys and values into shared
// memory, the inner loop passes all query rows by it: each pass reads a row's O, m and l of the
// keys before, normalised, and writes those that include the block. What FlashAttention 2 changed
// is visible against it: O crosses the chip's border once per block of keys, and a head has one
// block to work on it.
//
// Not part of the library. tools/evolution_fa1.py compiles it with nvcc alone and holds the same
// schedule in Python.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kRows = 64, kKeys = 128, kWarps = 4, kThreads = 32 * kWarps;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Args {
  const char *q, *k, *v;  // [B, H, S, D], 16 bits
  char* out;              // as q
  float* lse;             // [B, H, S], natural logarithm
  float* sum_o;           // [B, H, S, D]: O so far, normalised
  float *max, *sum;       // [B, H, S]: m (of the scores times scale_log2, base 2) and l so far
  int length;
  float scale_log2;
};

__device__ uint32_t shared(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes past L1, or 16 zero bytes.
__device__ void copy_chunk(uint32_t to, const char* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(wanted ? 16 : 0));
}
__device__ void commit() { asm volatile("cp.async.commit_group;"); }
__device__ void wait_all() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// A tile of kDim columns; chunks of 16 bytes change places within 8 rows, against bank conflicts.
template <int kDim>
__device__ uint32_t place(uint32_t tile, int row, int chunk) {
  return tile + row * (kDim * 2) + (chunk ^ (row & 7)) * 16;
}

// Rows [first, first + kCount) of a tensor into a tile; rows from `length` on become zero.
template <int kDim, int kCount>
__device__ void load(uint32_t tile, const char* rows, int first, int length) {
  constexpr int kChunks = kDim / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kCount * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool wanted = first + row < length;
    copy_chunk(place<kDim>(tile, row, chunk),
               rows + int64_t{wanted ? first + row : 0} * (kDim * 2) + chunk * 16, wanted);
  }
}

__device__ void ldmatrix(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
__device__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

// d[16 x 8] += a[16 x 16] · b[16 x 8]
template <class E>
__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (sizeof(E) == 2 && __is_same(E, __half))
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class E>
__device__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (__is_same(E, __half))
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Scores of this warp's 16 rows with the block's keys: s[key / 8] = (2 keys of row r, of row r +
// 8).
template <class E, int kDim>
__device__ void scores(float (&s)[kKeys / 8][4], uint32_t q, uint32_t k, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 0.f;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4];
    ldmatrix(a, place<kDim>(q, warp * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[4];  // keys 0–7: dims 0–7, 8–15; keys 8–15: dims 0–7, 8–15
      ldmatrix(b, place<kDim>(k, n * 16 + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
      multiply<E>(s[2 * n], a, b[0], b[1]);
      multiply<E>(s[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// o = P · V: the accumulators of the scores are the operand's registers, pair by pair.
template <class E, int kDim>
__device__ void weighted(float (&o)[kDim / 8][4], const float (&p)[kKeys / 8][4], uint32_t v,
                         int lane) {
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] = 0.f;
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    const auto &low = p[2 * step], &high = p[2 * step + 1];
    const uint32_t a[4] = {pack<E>(low[0], low[1]), pack<E>(low[2], low[3]),
                           pack<E>(high[0], high[1]), pack<E>(high[2], high[3])};
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];  // dims 0–7: keys 0–7, 8–15; dims 8–15: keys 0–7, 8–15
      ldmatrix_transposed(b, place<kDim>(v, step * 16 + lane % 16, 2 * n + lane / 16));
      multiply<E>(o[2 * n], a, b[0], b[1]);
      multiply<E>(o[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// The block's maximum and sum of one row, scores to probabilities in place. `half`: row r or r + 8.
__device__ void softmax_of_block(float (&s)[kKeys / 8][4], int half, int row, int first_key,
                                 int last_key, float scale_log2, float& max, float& sum) {
  max = -INFINITY;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      const int key = first_key + n * 8 + e % 2;
      s[n][e] = key <= last_key ? s[n][e] * scale_log2 : -INFINITY;
      max = fmaxf(max, s[n][e]);
    }
  max = quad_max(max);
  sum = 0.f;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      s[n][e] = exp2f(s[n][e] - max);
      sum += s[n][e];
    }
  sum = quad_sum(sum);
}

template <class E, int kDim, bool kCausal>
__global__ void __launch_bounds__(kThreads) fa1_forward(const Args args) {
  extern __shared__ __align__(128) unsigned char buffer[];
  constexpr int kKeyBytes = kKeys * kDim * 2, kRowBytes = kRows * kDim * 2;
  const uint32_t smem_k = shared(buffer), smem_v = smem_k + kKeyBytes, smem_q = smem_v + kKeyBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int length = args.length;
  constexpr int64_t kRowSize = kDim * 2;
  const int64_t rows = int64_t{blockIdx.x} * length, begin = rows * kRowSize;
  const char *q = args.q + begin, *k = args.k + begin, *v = args.v + begin;
  const int blocks = (length + kKeys - 1) / kKeys, tiles = (length + kRows - 1) / kRows;

  int turn = 0;  // which of the two buffers of Q
  for (int j = 0; j < blocks; ++j) {
    const int first_key = j * kKeys, first_tile = kCausal ? first_key / kRows : 0;
    __syncthreads();  // nobody reads the block before any more
    load<kDim, kKeys>(smem_k, k, first_key, length);
    load<kDim, kKeys>(smem_v, v, first_key, length);
    load<kDim, kRows>(smem_q + turn * kRowBytes, q, first_tile * kRows, length);
    commit();
    for (int i = first_tile; i < tiles; ++i, turn ^= 1) {
      wait_all();
      __syncthreads();  // the tile is there, and the other buffer is free
      if (i + 1 < tiles)
        load<kDim, kRows>(smem_q + (turn ^ 1) * kRowBytes, q, (i + 1) * kRows, length);
      commit();

      // The last block of keys that this tile sees completes its rows.
      const int last_row = (i + 1) * kRows - 1;
      const bool done = j + 1 == blocks || (kCausal && (j + 1) * kKeys > last_row);
      float s[kKeys / 8][4], o[kDim / 8][4], new_share[2], old_share[2], log_sum[2];
      scores<E, kDim>(s, smem_q + turn * kRowBytes, smem_k, warp, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * kRows + warp * 16 + lane / 4 + 8 * half;
        const int last_key = kCausal ? min(row, length - 1) : length - 1;
        float max, sum, max_old = -INFINITY, sum_old = 0.f;
        softmax_of_block(s, half, row, first_key + lane % 4 * 2, last_key, args.scale_log2, max,
                         sum);
        if (j > 0 && row < length) {
          max_old = __ldcg(args.max + rows + row);
          sum_old = __ldcg(args.sum + rows + row);
        }
        const float max_new = fmaxf(max_old, max);
        const float old_part = sum_old * exp2f(max_old - max_new),
                    new_part = sum * exp2f(max - max_new);
        const float total = old_part + new_part;
        old_share[half] = old_part / total;
        new_share[half] = exp2f(max - max_new) / total;
        log_sum[half] = (max_new + log2f(total)) * kLn2;
        __syncwarp();  // the four lanes of the row have read what the first one replaces
        if (!done && row < length && lane % 4 == 0) {
          __stcg(args.max + rows + row, max_new);
          __stcg(args.sum + rows + row, total);
        }
      }
      weighted<E, kDim>(o, s, smem_v, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * kRows + warp * 16 + lane / 4 + 8 * half;
        if (row >= length) continue;
        float2* so_far = reinterpret_cast<float2*>(args.sum_o + (rows + row) * kDim) + lane % 4;
        char* out = args.out + begin + row * kRowSize + lane % 4 * 4;
        float2 old[kDim / 8];
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
          old[n] = j > 0 ? __ldcg(so_far + n * 4) : make_float2(0.f, 0.f);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          const float2 now = {old[n].x * old_share[half] + o[n][2 * half] * new_share[half],
                              old[n].y * old_share[half] + o[n][2 * half + 1] * new_share[half]};
          if (done)
            *reinterpret_cast<uint32_t*>(out + n * 16) = pack<E>(now.x, now.y);
          else
            __stcg(so_far + n * 4, now);
        }
        if (done && lane % 4 == 0) args.lse[rows + row] = log_sum[half];
      }
    }
  }
  wait_all();
}

template <class E, int kDim, bool kCausal>
cudaError_t launch(const Args& args, int heads, cudaStream_t stream) {
  constexpr int kBytes = (2 * kKeys + 2 * kRows) * kDim * 2;
  auto* kernel = fa1_forward<E, kDim, kCausal>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  kernel<<<heads, kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class E, int kDim>
cudaError_t launch(const Args& args, int heads, bool causal, cudaStream_t stream) {
  return causal ? launch<E, kDim, true>(args, heads, stream)
                : launch<E, kDim, false>(args, heads, stream);
}

}  // namespace

// q, k, v, out: contiguous [batch, heads, length, dim], dtype 1: fp16, 2: bf16; dim 64 or 128. The
// caller owns the fp32 buffers: lse, max and sum [batch, heads, length], sum_o [..., length, dim].
// Returns a cudaError_t, -1 for a dtype or dim that does not exist here.
extern "C" __attribute__((visibility("default"))) int fa1_forward(
    const void* q, const void* k, const void* v, void* out, float* lse, float* sum_o, float* max,
    float* sum, int batch, int length, int heads, int dim, int dtype, int causal, float scale,
    void* stream) {
  const Args args{static_cast<const char*>(q),
                  static_cast<const char*>(k),
                  static_cast<const char*>(v),
                  static_cast<char*>(out),
                  lse,
                  sum_o,
                  max,
                  sum,
                  length,
                  scale * kLog2e};
  auto* on = static_cast<cudaStream_t>(stream);
  if (dtype == 1 && dim == 64) return launch<__half, 64>(args, batch * heads, causal != 0, on);
  if (dtype == 1 && dim == 128) return launch<__half, 128>(args, batch * heads, causal != 0, on);
  if (dtype == 2 && dim == 64)
    return launch<__nv_bfloat16, 64>(args, batch * heads, causal != 0, on);
  if (dtype == 2 && dim == 128)
    return launch<__nv_bfloat16, 128>(args, batch * heads, causal != 0, on);
  return -1;
}

extern "C" __attribute__((visibility("default"))) const char* fa1_error(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}
