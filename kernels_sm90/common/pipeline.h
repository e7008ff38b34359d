// SPDX-License-Identifier: BSD-3-Clause
// How do producer and consumers hand slots of shared memory to each other? Full and empty
// mbarriers, and a cursor.
#pragma once

#include <cstdint>

#include "kernels_common/device/launch_args.h"

namespace fa::sm90 {

FA_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

FA_DEVICE void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

FA_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// One arrival, and the bytes that TMA will deliver.
FA_DEVICE void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Returns once the phase with this parity is complete. One asm block: no branch of the surrounding
// code stands between the issue and the wait of a WGMMA.
FA_DEVICE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
#ifdef FA_BOUNDED_WAITS
  // A protocol that would hang ends the kernel with an error instead, after about a second.
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      ".reg .u32 tries;\n"
      "mov.u32 tries, 0;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "add.u32 tries, tries, 1;\n"
      "setp.lt.u32 done, tries, 1000000;\n"
      "@done bra again;\n"
      "trap;\n"
      "ready:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// `full`: one arrival (the producer's lane) plus the bytes of the load, or one of every thread that
// copies or warp that writes; readers wait.
// `empty`: one arrival per reading warp; the producer waits.
template <int kSlots>
struct SlotBarriers {
  uint64_t full[kSlots];
  uint64_t empty[kSlots];

  FA_DEVICE void init(int readers, int writers = 1) {
    for (int i = 0; i < kSlots; ++i) {
      mbarrier_init(&full[i], writers);
      mbarrier_init(&empty[i], readers);
    }
  }
};

// Position in a ring of slots. Lives across tiles: both sides must advance equally often. Consumers
// start with parity 0; the producer with 1, so that its first round of waits for empty slots
// passes.
template <int kSlots>
class SlotCursor {
 public:
  FA_DEVICE explicit SlotCursor(uint32_t first_parity) : parity_(first_parity) {}

  FA_DEVICE int slot() const { return slot_; }
  FA_DEVICE uint32_t parity() const { return parity_; }
  FA_DEVICE void advance() {
    if constexpr (kSlots == 1) {
      parity_ ^= 1;
    } else if constexpr (kSlots == 2) {
      slot_ ^= 1;
      parity_ ^= slot_ == 0;
    } else {
      slot_ = slot_ + 1 == kSlots ? 0 : slot_ + 1;
      parity_ ^= slot_ == 0;
    }
  }

 private:
  int slot_ = 0;
  uint32_t parity_;
};

// The same in one register and some more instructions: for a ring that is asked rarely, or where
// registers are what is short.
template <int kSlots>
class PackedCursor {
  static_assert((kSlots & (kSlots - 1)) == 0, "slots of a packed cursor are a power of two");

 public:
  FA_DEVICE explicit PackedCursor(uint32_t first_parity) : count_(first_parity * kSlots) {}

  FA_DEVICE int slot() const { return static_cast<int>(count_ % kSlots); }
  FA_DEVICE uint32_t parity() const { return count_ / kSlots & 1; }
  FA_DEVICE void advance() { ++count_; }

 private:
  uint32_t count_;
};

}  // namespace fa::sm90
