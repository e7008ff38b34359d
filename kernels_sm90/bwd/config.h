// SPDX-License-Identifier: BSD-3-Clause
// Which types, roles and register budgets follow from one row of the table?
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "kernels_common/device/element.h"
#include "kernels_sm90/common/barriers.h"
#include "kernels_sm90/common/pipeline.h"

namespace fa::sm90 {

// One lane of warpgroup 0 brings the operands, two of its warps add dQ where that is kBulkDq; the
// others make S, dP, dV, dK and dQ, but where these share their keys, warpgroup 0 makes and adds
// dQ.
inline constexpr int kFirstCompute = 1;

template <class Row>
struct BwdTypes {
  static constexpr KernelConfig kConfig = Row::kConfig;
  // Two thread blocks of a cluster have neighbouring key tiles, walk side by side and send each
  // other dS: each makes half of the columns of dQ over the keys of both.
  static constexpr bool kPair = kConfig.cluster == 2;
  // Keys of a thread block, and those that walk together.
  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.tile_n / kConfig.cluster,
                       kWalkN = kConfig.tile_n;
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimV = kConfig.head_dim_v;
  // false: every compute warpgroup owns 64 keys; true: all share the 64 keys of the tile, because
  // dV and dK of 64 keys, or they and the slopes of a softcap, are more than one warpgroup can
  // hold.
  static constexpr bool kShareKeys = kTileN == 64;
  // Own keys and 128 rows a block: products of two blocks overlap, and dS goes to dK through shared
  // memory, as it does where keys are shared.
  static constexpr bool kTall = !kShareKeys && kTileM == 128;
  static constexpr bool kCarryDs = !kShareKeys && !kTall;  // in registers
  // One slot of dO, which every compute warpgroup refills with its columns behind dV.
  static constexpr bool kRefillDo = kPair && kDimV == 256;
  // kTall: a block of dO goes back half a block before that of Q does.
  static constexpr int kSlots = kConfig.stages, kDoSlots = kRefillDo ? 1
                                                           : kTall   ? kSlots - 1
                                                                     : kSlots;
  static constexpr int kDsSlots = kConfig.stages_ds;
  static constexpr int kDqSlots = kTall ? 1 : 2;  // as many as there is room for
  static constexpr int kThreads = kConfig.warps * 32;
  static constexpr int kComputes = kThreads / kWarpgroupThreads - kFirstCompute;
  static constexpr int kComputeThreads = kComputes * kWarpgroupThreads;
  static constexpr int kComputeWarps = 4 * kComputes;
  // Warps that release a slot of dS, where the keys are shared: all compute warps meet once a block
  // anyway, which is soon enough for the second of two slots.
  static constexpr bool kComputesReleaseDs = kDsSlots == 1;
  static constexpr int kDsReaderWarps =
      4 * kConfig.cluster + (kComputesReleaseDs ? kComputeWarps : 0);
  // dQ is multiplied and added in parts of 64 rows and 64 columns, or all 96, or half of 192.
  static constexpr int kDqColumns = kDimQk == 96 || (kPair && kDimQk == 192) ? 96 : 64;
  static constexpr int kDqFloats = 64 * kDqColumns, kDqParts = kTileM * kDimQk / kDqFloats;
  // Columns of a swizzled panel: 96 of a warpgroup are three panels of 64 bytes.
  static constexpr int panel(int cols) { return cols % (kShareKeys ? 128 : 64) != 0 ? 32 : 64; }
  static constexpr int kPanelQk = panel(kDimQk), kPanelV = panel(kDimV);

  static_assert(kConfig.arch == 90 && kConfig.op == Op::kBackward);
  static_assert(kConfig.dtype == kConfig.kv_dtype,
                "16-bit backward rows have one dtype for q, k and v");
  static_assert(
      kComputes == 2 && (kShareKeys || kTileN == 128),
      "two compute warpgroups own 64 keys each, or share them: warps is 12, tile_n 128 or "
      "64");
  static_assert(kShareKeys || (kTileM == (kDimQk == 64 ? 128 : 64) && kDsSlots == 2),
                "own keys: stages_ds is 2, and tile_m 128 at head dim 64, 64 above");
  static_assert(
      !kTall || kSlots >= 3,
      "tile_m 128: stages is 3 or more, since dP of a block is issued while dO of the one "
      "before is held, and dO has one slot less");
  static_assert(kShareKeys || kConfig.score == ScoreKind::kScale,
                "score any needs the registers that tiles of 64 keys leave: tile_n 64");
  static_assert(!kShareKeys ||
                    (kTileM == 64 && kDimQk % (2 * kPanelQk) == 0 && kDimV % (2 * kPanelV) == 0),
                "shared keys: one panel of rows, whole panels of columns for each warpgroup");
  static_assert(kTileM % 64 == 0, "dQ is multiplied 64 query rows at a time");
  static_assert(kDimQk % kDqColumns == 0 && kDimV % kPanelV == 0,
                "head dims of a row are 96 or multiples of 64");
  static_assert(kConfig.kv == LoadKind::kTma && kConfig.q == LoadKind::kTma);
  // Thread blocks stay: they take one tile after the other from a counter.
  static constexpr bool kStays = kConfig.sched == SchedKind::kDynamic;
  static_assert(kStays ? !kShareKeys : !kTall,
                "sched is dynamic with own keys alone, and always where tile_m is 128");
  static_assert(kConfig.cluster == 1 || (kPair && kShareKeys && kDsSlots == 2 && kDimQk >= 128),
                "a cluster is two tiles of 64 keys at head dim 128 or more with two slots of dS");
  // Spare warps add dQ out of shared memory; in turns they do wherever keys are owned.
  static constexpr bool kBulkDq = kConfig.dq == DqAdd::kBulk;
  static_assert(kBulkDq == kCarryDs && (kBulkDq || kConfig.dq == DqAdd::kVector),
                "dq is bulk where compute warpgroups own their keys and tile_m is 64, else vector");
  static_assert(
      kConfig.dq_turns == (kShareKeys ? kConfig.cluster : kDqParts),
      "dq_turns: one for each part of dQ that a warpgroup of its own keys makes, or for each "
      "thread block of the cluster");

  // Registers per thread after setmaxnreg; a block starts with an equal share, 168. A compute
  // thread holds dV and dK, S and dP, or P, dS and dQ. Where the keys are shared it has half of P,
  // S and dP, so that the dQ warpgroup can have two parts at hand; the softcap takes that room at
  // head dim 256.
  static constexpr bool kTwoParts =
      kShareKeys && (kConfig.score == ScoreKind::kScale || kDimV <= 128);
  static constexpr int kFirstRegisters = !kShareKeys ? 24 : kTwoParts ? 104 : 72;
  static constexpr int kComputeRegisters = !kShareKeys ? 240 : kTwoParts ? 200 : 216;
  static_assert(kFirstRegisters + kComputes * kComputeRegisters == 504);

  using E = Element<kConfig.dtype>;

  // All tiles: rows of 128 or 64 bytes inside a panel of columns, panels one after the other, slots
  // last.
  template <int kRows, int kCols, int kSlots, int kPanel = 64>
  using Tile = decltype(cute::tile_to_shape(
      std::conditional_t<kPanel == 64, cute::GMMA::Layout_K_SW128_Atom<E>,
                         cute::GMMA::Layout_K_SW64_Atom<E>>{},
      cute::Shape<cute::Int<kRows>, cute::Int<kCols>, cute::Int<kSlots>>{}));
  // The same bytes with rows and columns exchanged: (cols, rows, slot).
  template <int kRows, int kCols, int kSlots, int kPanel = 64>
  using Transposed = decltype(cute::composition(
      Tile<kRows, kCols, kSlots, kPanel>{},
      cute::make_layout(
          cute::Shape<cute::Int<kCols>, cute::Int<kRows>, cute::Int<kSlots>>{},
          cute::make_stride(cute::Int<kRows>{}, cute::_1{}, cute::Int<kRows * kCols>{}))));

  using LayoutQ = Tile<kTileM, kDimQk, kSlots, kPanelQk>;          // (tile_m, dim_qk, slot)
  using LayoutQt = Transposed<kTileM, kDimQk, kSlots, kPanelQk>;   // (dim_qk, tile_m, slot)
  using LayoutDo = Tile<kTileM, kDimV, kDoSlots, kPanelV>;         // (tile_m, dim_v, slot)
  using LayoutDoT = Transposed<kTileM, kDimV, kDoSlots, kPanelV>;  // (dim_v, tile_m, slot)
  using LayoutK = Tile<kTileN, kDimQk, 1, kPanelQk>;               // (tile_n, dim_qk, 1)
  using LayoutKt =
      Transposed<kTileN, kDqColumns, kDimQk / kDqColumns, kPanelQk>;  // (part, tile_n, number)
  using LayoutOtherKt = Transposed<kTileN, kDqColumns, kDimQk / kDqColumns / 2, kPanelQk>;  // half
  using LayoutV = Tile<kTileN, kDimV, 1, kPanelV>;   // (tile_n, dim_v, 1)
  using LayoutDsT = Tile<kTileN, kTileM, kDsSlots>;  // (tile_n, tile_m, slot), else
  // (tile_m, tile_n, slot): as stored where only dQ reads it there.
  using LayoutDs = std::conditional_t<kCarryDs, Tile<kTileM, kTileN, kDsSlots>,
                                      Transposed<kTileN, kTileM, kDsSlots>>;

  template <int kM, int kN>
  using Extent = cute::Shape<cute::Int<kM>, cute::Int<kN>>;
  template <int kM, int kN, int kK>
  using Shape = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;
  template <int kCount>
  using Warpgroups = cute::Layout<cute::Shape<cute::Int<kCount>, cute::_1, cute::_1>>;
  static constexpr auto kMn = cute::GMMA::Major::MN;
  static constexpr auto kK = cute::GMMA::Major::K;

  // Warpgroups side by side in the rows of a product, or, sharing its rows, in the columns.
  using Split =
      std::conditional_t<kShareKeys,
                         cute::Layout<cute::Shape<cute::_1, cute::Int<kComputes>, cute::_1>>,
                         Warpgroups<kComputes>>;
  static constexpr int kParts = kShareKeys ? kComputes : 1;  // of the columns
  template <class Extents, bool kFromRegisters>
  static constexpr auto product() {
    if constexpr (kFromRegisters)
      return cute::GMMA::rs_op_selector<E, E, float, Extents, kK, kMn>();
    else
      return cute::GMMA::ss_op_selector<E, E, float, Extents, kK, kMn>();
  }

  using MmaS = decltype(cute::make_tiled_mma(  // Sᵀ = K · Qᵀ
      cute::GMMA::ss_op_selector<E, E, float, Shape<kTileN, kTileM / kParts, kDimQk>>(), Split{}));
  using MmaDp = decltype(cute::make_tiled_mma(  // dPᵀ = V · dOᵀ; kTall: delta − dPᵀ
      cute::GMMA::ss_op_selector<E, E, float, Shape<kTileN, kTileM / kParts, kDimV>, kK, kK,
                                 kTall ? cute::GMMA::ScaleIn::Neg : cute::GMMA::ScaleIn::One>(),
      Split{}));
  using MmaDv = decltype(cute::make_tiled_mma(  // dV += Pᵀ · dO
      product<Shape<kTileN, kDimV / kParts, kTileM>, !kShareKeys>(), Split{}));
  using MmaDk = decltype(cute::make_tiled_mma(  // dK += dSᵀ · Q
      product<Shape<kTileN, kDimQk / kParts, kTileM>, kCarryDs>(), Split{}));
  using MmaDq = decltype(cute::make_tiled_mma(  // dQ = dS · K, one part at a time
      cute::GMMA::ss_op_selector<E, E, float, Shape<64, kDqColumns, kTileN>, kCarryDs ? kK : kMn,
                                 kMn>(),
      Warpgroups<1>{}));

  using ScoreAcc = decltype(cute::partition_fragment_C(MmaS{}, Extent<kTileN, kTileM>{}));
  using DvAcc = decltype(cute::partition_fragment_C(MmaDv{}, Extent<kTileN, kDimV>{}));
  using DkAcc = decltype(cute::partition_fragment_C(MmaDk{}, Extent<kTileN, kDimQk>{}));
  using DqAcc = decltype(cute::partition_fragment_C(MmaDq{}, Extent<64, kDqColumns>{}));
  using Operand =
      decltype(cute::make_tensor<E>(cute::partition_shape_A(MmaDv{}, Extent<kTileN, kTileM>{})));

  static constexpr int kQBytes = kTileM * kDimQk * 2, kDoBytes = kTileM * kDimV * 2,
                       kKBytes = kTileN * kDimQk * 2, kVBytes = kTileN * kDimV * 2,
                       kStatBytes = kTileM * 4, kDsBytes = kTileM * kTileN * 2;
};

}  // namespace fa::sm90
