// SPDX-License-Identifier: BSD-3-Clause
// How do the thread blocks of a cluster reach each other's shared memory?
#pragma once

#include "kernels_sm90/common/barriers.h"
#include "kernels_sm90/common/pipeline.h"

namespace fa::sm90 {

// Of this thread block, and of the other one of a cluster of two.
FA_DEVICE int cluster_rank() { return static_cast<int>(blockIdx.x % 2); }
FA_DEVICE int other_rank() { return cluster_rank() ^ 1; }

// The address in thread block `rank` of the cluster of what is at `shared` in this one.
FA_DEVICE uint32_t in_block(const void* shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(shared)), "r"(rank));
  return address;
}

// Without a scope: that of the cluster would wait for every reduce of dQ in flight.
FA_DEVICE void mbarrier_arrive_in(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Bytes of this block to an address of another, whose barrier counts them.
FA_DEVICE void bulk_send(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(shared_address(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

// By all threads of both blocks.
FA_DEVICE void arrive_in_cluster() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
FA_DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

}  // namespace fa::sm90
