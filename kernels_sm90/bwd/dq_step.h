// SPDX-License-Identifier: BSD-3-Clause
// What does the warpgroup that makes dQ do for a block of query rows, where keys are shared?
#pragma once

#include "kernels_sm90/bwd/dq_writer.h"

namespace fa::sm90 {

// Where the keys are shared: dQ for every block, by one warpgroup. Its first lane also refills the
// slots of Q and dO: the compute warps release a block without needing anything of the next one.
template <class Row>
class DqStep {
  using T = BwdTypes<Row>;

 public:
  FA_DEVICE DqStep(BwdSmem<Row>& smem, const BwdArgs& args, BwdLoader<Row> loader)
      : smem_(smem), writer_(args, smem), loader_(loader) {
    if (writer_.thread() == 0) loader_.begin();
    __syncwarp();
    mbarrier_wait(&smem.k_full, 0);
    if constexpr (T::kPair) {
      if (writer_.thread() == 0)
        for (uint64_t& full : smem.ds_in_full) mbarrier_expect(&full, T::kDsBytes);
      __syncwarp();
      mbarrier_wait(smem.other_k_full, 0);
    }
  }

  // The block at place i of the walk. `first`: no block came before it.
  FA_DEVICE void next(int head_q, int i, bool first) {
    const QueryWalk& walk = smem_.tile.walk;
    if (writer_.ordered() && !first) {  // while dS is still made
      const bool begins = i == walk.range.begin;
      writer_.pass_turn(begins ? head_q - 1 : head_q,
                        walk.block(begins ? walk.range.end - 1 : i - 1), head_q, walk.block(i));
    }
    const int slot = at_.slot();
    mbarrier_wait(&smem_.ds_slots.full[slot], at_.parity());
    if constexpr (T::kPair)
      add_half(head_q, walk.block(i), slot);
    else if constexpr (T::kTwoParts)
      add_overlapped(head_q, walk.block(i), slot);
    else
      add_parts(head_q, walk.block(i), slot);
    at_.advance();
    if (writer_.thread() == 0) loader_.next();
    __syncwarp();
  }

  // `head_q`: the last one.
  FA_DEVICE void finish(int head_q) const {
    const QueryWalk& walk = smem_.tile.walk;
    if (writer_.ordered()) writer_.pass_last_turn(head_q, walk.block(walk.range.end - 1));
  }

 private:
  FA_DEVICE void add_parts(int head_q, int m, int slot) {
    float* sum = writer_.sum(writer_.index(head_q, m));
    // Unrolled, ptxas would move the products of one part before the reduces of another.
#pragma unroll 1
    for (int part = 0; part < T::kDqParts; ++part) {
      typename T::DqAcc dq;
      multiply(dq, slot, part);
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(dq);
      if (part == T::kDqParts - 1 && writer_.thread() % 32 == 0)
        mbarrier_arrive(&smem_.ds_slots.empty[slot]);
      if (part == 0 && writer_.ordered()) writer_.wait_turn(head_q, m);
      writer_.add(dq, sum, part);
    }
  }

  // This block's half of the columns, over the keys of both blocks.
  FA_DEVICE void add_half(int head_q, int m, int slot) {
    constexpr int kParts = T::kDqParts / 2;
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDs{});
    auto ds_in = cute::make_tensor(cute::make_smem_ptr(smem_.ds_in), typename T::LayoutDs{});
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename T::LayoutKt{});
    auto other_k =
        cute::make_tensor(cute::make_smem_ptr(smem_.other_k), typename T::LayoutOtherKt{});
    const int first = kParts * cluster_rank();
    typename T::DqAcc dq[kParts];
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) multiply_dq<T>(dq[part], ds, slot, k, first + part);
    mbarrier_wait(&smem_.ds_in_full[slot], at_.parity());
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part)
      multiply_dq<T, cute::GMMA::ScaleOut::One>(dq[part], ds_in, slot, other_k, part);
    if (writer_.thread() == 0) mbarrier_expect(&smem_.ds_in_full[slot], T::kDsBytes);
    __syncwarp();
    if (writer_.ordered()) {
      cute::warpgroup_wait<0>();
      release_both(slot);
      writer_.wait_turn(head_q, m);
    }
    float* sum = writer_.sum(writer_.index(head_q, m));
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      if (part + 1 < kParts) {
        cute::warpgroup_wait<1>();
      } else {
        cute::warpgroup_wait<0>();
        if (!writer_.ordered()) release_both(slot);
      }
      cute::warpgroup_fence_operand(dq[part]);
      writer_.add(dq[part], sum, first + part);
    }
  }

  // dS of this block, and what came from the other, to which it is the place of what was sent.
  FA_DEVICE void release_both(int slot) const {
    if (writer_.thread() % 32 == 0) {
      mbarrier_arrive(&smem_.ds_slots.empty[slot]);
      mbarrier_arrive_in(in_block(&smem_.ds_slots.empty[slot], other_rank()));
    }
    __syncwarp();
  }

  // The product of a part runs beside the reduces of the one before.
  FA_DEVICE void add_overlapped(int head_q, int m, int slot) {
    typename T::DqAcc dq[2];
    multiply(dq[0], slot, 0);
    if (writer_.ordered()) {
      cute::warpgroup_wait<0>();
      writer_.wait_turn(head_q, m);
    }
    float* sum = writer_.sum(writer_.index(head_q, m));
    CUTE_UNROLL
    for (int part = 0; part < T::kDqParts; ++part) {
      if (part + 1 < T::kDqParts) {
        multiply(dq[(part + 1) % 2], slot, part + 1);
        cute::warpgroup_wait<1>();
      } else {
        cute::warpgroup_wait<0>();
        if (writer_.thread() % 32 == 0) mbarrier_arrive(&smem_.ds_slots.empty[slot]);
      }
      cute::warpgroup_fence_operand(dq[part % 2]);
      writer_.add(dq[part % 2], sum, part);
    }
  }

  FA_DEVICE void multiply(typename T::DqAcc& dq, int slot, int part) const {
    auto ds = cute::make_tensor(cute::make_smem_ptr(smem_.ds), typename T::LayoutDs{});
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename T::LayoutKt{});
    multiply_dq<T>(dq, ds, slot, k, part);
  }

  BwdSmem<Row>& smem_;
  DqWriter<Row> writer_;
  BwdLoader<Row> loader_;
  PackedCursor<T::kDsSlots> at_{0};
};

}  // namespace fa::sm90
