// SPDX-License-Identifier: BSD-3-Clause
// How does one thread move a box between global and shared memory? The TMA instructions, four
// dimensions.
#pragma once

#include "kernels_sm90/common/pipeline.h"

namespace fa::sm90 {

// Bytes of a CUtensorMap; filled by encode_tensor_map().
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// (dim, row, head, batch)
struct BoxCoord {
  int dim, row, head, batch;
};

// L2 policies as the hardware encodes them: stream through, or keep as long as possible.
enum class L2Policy : uint64_t {
  kEvictFirst = 0x12F0000000000000ull,
  kEvictLast = 0x14F0000000000000ull
};

FA_DEVICE void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

template <L2Policy kPolicy>
FA_DEVICE void tma_load(const TensorMap& map, void* shared, uint64_t* barrier, BoxCoord at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(at.dim), "r"(at.row), "r"(at.head),
      "r"(at.batch), "l"(static_cast<uint64_t>(kPolicy))
      : "memory");
}

// Contiguous bytes, a multiple of 16 at addresses that are.
FA_DEVICE void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

FA_DEVICE void tma_store(const TensorMap& map, const void* shared, BoxCoord at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared_address(shared)), "r"(at.dim), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// Adds floats in shared memory to floats in global memory; bytes and addresses are multiples of 16.
FA_DEVICE void bulk_reduce(float* global, const float* shared, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}

FA_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// This thread's stores but the last kPending have read shared memory.
template <int kPending = 0>
FA_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// This thread's stores and reduces have been performed.
FA_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace fa::sm90
