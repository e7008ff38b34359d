// SPDX-License-Identifier: BSD-3-Clause
// How do blocks of keys and values reach shared memory without TMA? By cp.async of two warps; what
// TMA's addresses and its swizzle are worth is seen against it (tools/evolution.py).
#pragma once

#include "kernels_sm90/fwd/smem.h"

namespace fa::sm90 {

// Two warps of the loading warpgroup; Q still comes by TMA. Guarantees zeros in rows behind the
// sequence's keys. Columns must be the row's: no head dim is padded.
template <class Row>
class CopyKv {
  using T = FwdTypes<Row>;

 public:
  static constexpr int kThreads = 64;

  FA_DEVICE CopyKv(const FwdArgs& args, FwdSmem<Row>& smem, int thread)
      : args_(args), smem_(smem), thread_(thread) {}

  FA_DEVICE void load_k(const FwdTile& tile, int n) {
    load<T::kDimQk>(args_.k, smem_.k, smem_.k_slots, k_at_, tile, n);
  }
  FA_DEVICE void load_v(const FwdTile& tile, int n) {
    load<T::kDimV>(args_.v, smem_.v, smem_.v_slots, v_at_, tile, n);
  }

  // The block whose copies are still under way arrives.
  FA_DEVICE void flush() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    arrive();
  }

 private:
  // Copies are generic writes, wgmma reads by the asynchronous proxy: the writer fences between.
  FA_DEVICE void arrive() {
    if (pending_ == nullptr) return;
    fence_async_shared();
    mbarrier_arrive(pending_);
    pending_ = nullptr;
  }

  // A thread copies one chunk of 16 bytes of every eighth row: its place in the swizzle, which is
  // that of rows modulo 8, stays the same.
  template <int kDim>
  FA_DEVICE void load(const TensorArg& tensor, typename T::E* tiles,
                      SlotBarriers<T::kStages>& slots, SlotCursor<T::kStages>& at,
                      const FwdTile& tile, int n) {
    mbarrier_wait(&slots.empty[at.slot()], at.parity());
    const int first = thread_ / 8, chunk = thread_ % 8, key = n * T::kTileN + first;
    const int64_t step = tensor.stride_row * 16;  // bytes of eight rows
    const char* from = static_cast<const char*>(tensor.data) +
                       2 * (tile.seq.k_batch * tensor.stride_batch +
                            (tile.seq.k_begin + int64_t{key}) * tensor.stride_row +
                            tile.head_k * tensor.stride_head) +
                       chunk * 16;
    uint32_t to =
        shared_address(tiles + at.slot() * kDim * T::kTileN) + first * 128 + ((chunk ^ first) * 16);
#pragma unroll 2
    for (int row = 0; row < T::kTileN; row += 8) {
      const int bytes = key + row < tile.seq.k_len ? 16 : 0;
      CUTE_UNROLL
      for (int panel = 0; panel < kDim / T::kPanel; ++panel)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                         to + panel * T::kTileN * 128),
                     "l"(bytes != 0 ? from + panel * 128 : static_cast<const char*>(tensor.data)),
                     "r"(bytes));
      from += step;
      to += 8 * 128;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    arrive();
    pending_ = &slots.full[at.slot()];
    at.advance();
  }

  const FwdArgs& args_;
  FwdSmem<Row>& smem_;
  int thread_;
  uint64_t* pending_ = nullptr;  // full barrier of the block under way
  SlotCursor<T::kStages> k_at_{1}, v_at_{1};
};

}  // namespace fa::sm90
