// SPDX-License-Identifier: BSD-3-Clause
// What follows from the values of a backward row: types, tile shapes, and which warp computes what.
#pragma once

#include "kernels_common/device/acc_view.h"
#include "kernels_common/device/element.h"
#include "kernels_common/host/kernel_config.h"

namespace fa::sm80 {

// Warps work in pairs. A pair owns kPairKeys keys of the tile: its first warp computes
// Pᵀ = exp2(K Qᵀ − LSE) and sums dV, its second one dPᵀ = V dOᵀ, dSᵀ = Pᵀ(dPᵀ − delta) and sums
// dK. So a warp holds one sum of twice the keys instead of two, and every operand that it reads
// from shared memory meets twice as many products.
enum class Part : int { kValues = 0, kKeys = 1 };

template <class Row>
struct BwdTypes {
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr DType kType = kConfig.dtype;
  using Element = fa::Element<kType>;

  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.tile_n;
  static constexpr int kDim = kConfig.head_dim_qk;
  static constexpr int kWarps = kConfig.warps, kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = kWarps <= 4 ? 2 : 1;  // per SM, what registers allow
  static constexpr int kStages = kConfig.stages;          // slots of Q and dO
  static constexpr int kSlotsDs = 2;                      // dS of this step and of the one before
  static constexpr int kPairs = kWarps / 2;
  static constexpr int kPairKeys = kTileN / kPairs;  // consecutive keys
  static constexpr int kSlabs = kPairKeys / 16;      // 16-row operands of mma.sync among them

  // Softcap, ALiBi and dropout, each a run-time value.
  static constexpr bool kAny = kConfig.score == ScoreKind::kAny;

  // dQ = dS·K of a step: kDqWarpsM x kDqWarpsN warps, each with kDqSlabs slabs of 16 rows and
  // kDqBlocks blocks of 16 columns, kDqWarpsN blocks apart.
  static constexpr int kDqWarpsM =
      kDim / 16 % (kWarps / (kTileM / 32)) == 0 ? kTileM / 32 : kTileM / 16;
  static constexpr int kDqWarpsN = kWarps / kDqWarpsM;
  static constexpr int kDqSlabs = kTileM / kDqWarpsM / 16;
  static constexpr int kDqBlocks = kDim / 16 / kDqWarpsN;

  static_assert(kConfig.arch == 80 && kConfig.op == Op::kBackward,
                "this row is not an Ampere backward row");
  static_assert(kType == DType::kFp16 || kType == DType::kBf16, "dtype must be fp16 or bf16");
  static_assert(kConfig.kv_dtype == kType, "kv_dtype must equal dtype");
  static_assert(kConfig.mask == MaskKind::kBand, "mask must be band");
  static_assert(kConfig.kv == LoadKind::kCpAsync && kConfig.q == LoadKind::kCpAsync,
                "kv and q must be cpasync");
  static_assert(kConfig.sched == SchedKind::kStatic && kConfig.cluster == 1,
                "sched must be static and cluster 1");
  static_assert(kConfig.step == StepKind::kSerial, "step must be serial");
  static_assert(kDim == kConfig.head_dim_v, "d_v must equal d_qk; smaller dims are padded");
  static_assert(kDim % 32 == 0, "head dims must be multiples of 32");
  static_assert(kWarps % 2 == 0 && kTileN == kPairs * kSlabs * 16,
                "tile_n must be a multiple of 8 x warps and warps of 2");
  static_assert(kTileM % 32 == 0 && kTileM == kDqWarpsM * kDqSlabs * 16,
                "tile_m must be a multiple of 32 and of 16 x the warps of a dQ column");
  static_assert(kDim == kDqWarpsN * kDqBlocks * 16, "dQ columns must divide among the warps");
  static_assert(kTileM % (kThreads / 8) == 0 && kTileN % (kThreads / 8) == 0,
                "tile_m and tile_n must be multiples of 4 x warps");
  static_assert(kConfig.dq == DqAdd::kAtomic && kConfig.dq_turns >= kWarps,
                "dq must be atomic and dq_turns at least the number of warps that add");
  static_assert(kStages == 1 || kStages == 2, "stages must be 1 or 2");
};

}  // namespace fa::sm80
