// SPDX-License-Identifier: BSD-3-Clause
// What follows from the values of a forward row: types, tile shapes, matrix instruction, occupancy.
#pragma once

#include <type_traits>

#include "kernels_common/device/acc_view.h"
#include "kernels_common/device/band_mask.h"
#include "kernels_common/device/element.h"
#include "kernels_common/host/kernel_config.h"

namespace fa::sm80 {

template <class Row>
struct FwdTypes {
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr DType kType = kConfig.dtype;
  using Element = fa::Element<kType>;

  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.tile_n;
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimV = kConfig.head_dim_v;
  static constexpr int kWarps = kConfig.warps, kThreads = 32 * kWarps;
  static constexpr int kStages = kConfig.stages;
  // Packed rows: every warp has all rows of the tile and a part of its keys of its own, tile_n at a
  // time. Else the warps divide the rows and share the keys.
  static constexpr bool kPacked = kConfig.pack == 1;
  static constexpr int kTeam = kPacked ? 32 : kThreads;    // threads that load and read a key block
  static constexpr int kWarpRows = kTileM / (kTeam / 32);  // consecutive rows that one warp owns
  static constexpr int kSlabs = kWarpRows / 16;            // 16-row operands of mma.sync among them
  static constexpr bool kLazyRescale = kConfig.rescale == Rescale::kVoted;
  // Whether warps pass over blocks that none of their rows sees. Gains were measured at D 64; at
  // D 128 the path leaves no register free.
  static constexpr bool kSkipUnseen = kDimV <= 64 && !kPacked;
  // Whether O is rescaled before the exponentials: +5 % (H200). At D 192, 168 registers are enough
  // for three blocks only the other way round.
  static constexpr bool kRescaleFirst = kDimV != 192;

  static_assert(kConfig.arch == 80 && kConfig.op == Op::kForward,
                "this row is not an Ampere forward row");
  static_assert(kType == DType::kFp16 || kType == DType::kBf16, "dtype must be fp16 or bf16");
  static_assert(kConfig.kv_dtype == kType, "kv_dtype must equal dtype");
  static_assert(kConfig.dropout == 0 || kConfig.score == ScoreKind::kAny,
                "dropout needs the score `any`");
  static_assert(!kPacked || (kConfig.dropout == 0 && kSlabs == 1),
                "pack=1 has tiles of 16 rows and no dropout");
  static_assert(kConfig.kv == LoadKind::kCpAsync && kConfig.q == LoadKind::kCpAsync,
                "kv and q must be cpasync");
  static_assert(kConfig.sched == SchedKind::kStatic && kConfig.cluster == 1,
                "sched must be static and cluster 1");
  static_assert(kDimQk % 32 == 0 && kDimV % 32 == 0, "head dims must be multiples of 32");
  static_assert(kTileM == kTeam / 32 * kSlabs * 16,
                "tile_m must be a multiple of 16 x warps, with pack=1 of 16");
  static_assert(kTileN % 16 == 0, "tile_n must be a multiple of 16");
  static_assert(kConfig.step == StepKind::kSerial, "step must be serial");
  static_assert(kTileN % (kTeam / 8) == 0, "tile_n must be a multiple of 4 x warps");
  static_assert(kStages == 1 || kStages == 2, "stages must be 1 or 2");

  using Mask = std::conditional_t<kConfig.mask == MaskKind::kNone, NoMask, BandMask>;

  // Blocks per SM that the registers are budgeted for: accumulators and about 40 for the rest. At
  // D 64 a third block gains more (+5 % at 4k, H200) than Q kept in registers.
  static constexpr int kRegisters =
      kSlabs * (kDimV + kTileN) / 2 + (kConfig.score == ScoreKind::kScale ? 40 : 60);
  static constexpr int kMinBlocks =
      kRegisters <= 168 && kThreads == 128 ? 3 : (kThreads <= 128 ? 2 : 1);
};

}  // namespace fa::sm80
