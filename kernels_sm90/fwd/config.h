// SPDX-License-Identifier: BSD-3-Clause
// Which types and constants follow from one row of the table?
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "kernels_common/device/element.h"
#include "kernels_sm90/common/band_bits.h"
#include "kernels_sm90/common/pipeline.h"
#include "kernels_sm90/common/roles.h"
#include "kernels_sm90/common/turns.h"

namespace fa::sm90 {

template <class Row>
struct FwdTypes {
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.tile_n;
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.stages, kQSlots = kConfig.q_slots;
  static constexpr bool kOwnOutput =
      kConfig.o_buf == 1;  // false: O overwrites the Q rows of its own tile
  static constexpr int kThreads = kConfig.warps * 32;
  static constexpr int kConsumers = kThreads / kWarpgroupThreads - 1;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kPanel = 64;  // columns of one 128-byte swizzled panel

  // A wide O, or a third warpgroup to share with, leaves a thread no register: what it keeps
  // besides costs time or a stack frame.
  static constexpr bool kWideOutput = kDimV > 128;
  static constexpr bool kTight = kWideOutput || kConsumers == 3;

  static_assert(kConfig.arch == 90 && kConfig.op == Op::kForward);
  static_assert(kConfig.dtype == kConfig.kv_dtype,
                "16-bit forward rows have one dtype for q, k and v");
  static_assert(kTileM == 64 * kConsumers,
                "each consumer warpgroup owns 64 query rows: tile_m = 16 * (warps - 4)");
  static_assert(kDimQk % kPanel == 0 && kDimV % kPanel == 0,
                "head dims of a row are multiples of 64");
  static_assert(kTileN % 16 == 0 && kTileN <= 256, "tile_n is a multiple of 16, at most 256");
  static_assert(kConfig.kv == LoadKind::kTma && kConfig.q == LoadKind::kTma,
                "only TMA loaders exist on Hopper");
  static_assert(kConfig.cluster == 1 && kConfig.sched == SchedKind::kStatic);
  static_assert(kConfig.step == StepKind::kOverlap);
  static_assert(kConfig.rescale == Rescale::kAlways);
  static_assert(kOwnOutput || kDimV <= kDimQk, "O can reuse Q's buffer only if it is no wider");

  using E = Element<kConfig.dtype>;
  using Turns = typename TurnsOf<kConfig.turns, kConsumers>::type;
  using Thread = ConsumerThread<kTight>;
  template <bool kPacked, int kSlots>
  using Cursor = std::conditional_t<kPacked, PackedCursor<kSlots>, SlotCursor<kSlots>>;
  using Mask = std::conditional_t<kConfig.mask == MaskKind::kNone, NoMask, BandBits>;

  // All tiles: rows of 128 bytes inside a panel of 64 columns, panels one after the other, slots
  // last.
  template <int kRows, int kCols, int kSlots>
  using Tile = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<E>{},
      cute::Shape<cute::Int<kRows>, cute::Int<kCols>, cute::Int<kSlots>>{}));
  using LayoutQ = Tile<kTileM, kDimQk, kQSlots>;  // (tile_m, dim_qk, slot)
  using LayoutK = Tile<kTileN, kDimQk, kStages>;  // (tile_n, dim_qk, stage)
  using LayoutV = Tile<kTileN, kDimV, kStages>;   // (tile_n, dim_v, stage)
  // The same V as the B operand of P·V: (dim_v, tile_n, stage)
  using LayoutVt = decltype(cute::composition(
      LayoutV{},
      cute::make_layout(
          cute::Shape<cute::Int<kDimV>, cute::Int<kTileN>, cute::Int<kStages>>{},
          cute::make_stride(cute::Int<kTileN>{}, cute::_1{}, cute::Int<kTileN * kDimV>{}))));

  template <int kM, int kN>
  using Extent = cute::Shape<cute::Int<kM>, cute::Int<kN>>;
  template <int kM, int kN, int kK>
  using Shape = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;
  using Warpgroups = cute::Layout<cute::Shape<cute::Int<kConsumers>, cute::_1, cute::_1>>;
  using MmaQk = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<E, E, float, Shape<kTileM, kTileN, kDimQk>>(), Warpgroups{}));
  using MmaPv = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<E, E, float, Shape<kTileM, kDimV, kTileN>, cute::GMMA::Major::K,
                                 cute::GMMA::Major::MN>(),
      Warpgroups{}));

  using ScoreAcc = decltype(cute::partition_fragment_C(MmaQk{}, Extent<kTileM, kTileN>{}));
  using OutputAcc = decltype(cute::partition_fragment_C(MmaPv{}, Extent<kTileM, kDimV>{}));
  using Probabilities =
      decltype(cute::make_tensor<E>(cute::partition_shape_A(MmaPv{}, Extent<kTileM, kTileN>{})));

  static constexpr int kQBytes = kTileM * kDimQk * 2, kKBytes = kTileN * kDimQk * 2,
                       kVBytes = kTileN * kDimV * 2;
};

}  // namespace fa::sm90
