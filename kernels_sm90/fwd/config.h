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

// All tiles: rows of 128 (or 64) bytes inside a panel, panels one after the other, slots last.
template <class Atom, int kRows, int kCols, int kSlots>
using SlotTiles = decltype(cute::tile_to_shape(
    Atom{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>, cute::Int<kSlots>>{}));

template <class E>
using WideAtom = cute::GMMA::Layout_K_SW128_Atom<E>;

// V as the B operand of P·V, (dim_v, keys, stage): it lies as (keys, dim_v), or transposed.
template <class Atom, bool kTransposed, int kKeys, int kDim, int kSlots>
struct ValueTiles {
  using type = SlotTiles<Atom, kDim, kKeys, kSlots>;
};
template <class Atom, int kKeys, int kDim, int kSlots>
struct ValueTiles<Atom, false, kKeys, kDim, kSlots> {
  using type = decltype(cute::composition(
      SlotTiles<Atom, kKeys, kDim, kSlots>{},
      cute::make_layout(
          cute::Shape<cute::Int<kDim>, cute::Int<kKeys>, cute::Int<kSlots>>{},
          cute::make_stride(cute::Int<kKeys>{}, cute::_1{}, cute::Int<kKeys * kDim>{}))));
};

template <class Row>
struct FwdTypes {
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.tile_n;
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.stages, kQSlots = kConfig.q_slots;
  static constexpr bool kOwnOutput = kConfig.o_buf == 1;
  static constexpr bool kOutputOverQ = kConfig.o_buf == 0;  // O overwrites the Q rows of its tile
  static constexpr int kThreads = kConfig.warps * 32;
  static constexpr int kConsumers = kThreads / kWarpgroupThreads - 1;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr bool kFp8 = kConfig.dtype == DType::kE4m3;
  static constexpr bool kPacked = kConfig.pack == 1;  // rows are (position, head of a group)
  // e4m3: V comes as it lies in memory, to be transposed here by two warps beside the loader's and
  // the scheduler's.
  static constexpr int kRowSlots = kConfig.v_rows;
  static constexpr bool kTransposes = kRowSlots > 0;
  static constexpr int kTransposers = 2;
  static constexpr int kRowKeys = kConfig.tile_n / 2;  // of a slot: half a block
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  // Columns of one swizzled panel of Q and K (16 bits: of V too): 128 bytes, or 64 where the head
  // dims are no multiple of that.
  static constexpr bool kWholePanels = kDimQk * kElementBytes % 128 == 0 && kDimV % 64 == 0;
  static constexpr int kPanel = (kWholePanels ? 128 : 64) / kElementBytes;
  static constexpr int kOutPanel = kFp8 ? 64 : kPanel;  // of O: 16-bit numbers
  // Panels in O's own buffer: rows of V leave a wide O room for two, used in turn.
  static constexpr int kOutPanels = kTransposes && kDimV > 128 ? 2 : kDimV / kOutPanel;
  // Probabilities reach 2^8 in e4m3, whose largest number is 448: never saturated, for the maximum
  // is taken over in every block, and small ones keep their bits down to 2^-14.
  static constexpr float kProbabilityShift = kFp8 ? 8.f : 0.f;

  // A wide O, a third warpgroup to share with, or a softcap's intermediate values leave a thread no
  // register: what it keeps besides costs time or a stack frame.
  static constexpr bool kWideOutput = kDimV > 128;
  static constexpr bool kTight =
      kWideOutput || kConsumers == 3 || kConfig.score == ScoreKind::kAny || kPacked;
  static constexpr bool kBlockDescales = takes_block_descales(kConfig);
  // The last P·V of a tile runs beside the first Q·Kᵀ of the next. Needs Q's buffer free, and
  // registers.
  static constexpr bool kCarry = !kOutputOverQ && !kWideOutput;

  static constexpr bool kExact = kConfig.rescale == Rescale::kExact;
  // Unmasked tiles of 192 rows: few a head. The first block of a tile counts, and so does which
  // blocks get a head's short last tile.
  static constexpr bool kTallUnmasked = kConsumers == 3 && !kFp8 && kConfig.mask == MaskKind::kNone;
  // The first block of a tile, or every one, has its maximum found as integers.
  static constexpr bool kIntegerFirst = kExact || kTallUnmasked;
  // Row sums are touched once a block: beside a wide O their registers are worth more.
  static constexpr bool kSumsInShared = kExact && kWideOutput;

  static_assert(kConfig.arch == 90 && kConfig.op == Op::kForward);
  static_assert(kConfig.dtype == kConfig.kv_dtype,
                "Hopper forward rows have one dtype for q, k and v");
  static_assert(kTileM == 64 * kConsumers,
                "each consumer warpgroup owns 64 query rows: tile_m = 16 * (warps - 4)");
  static_assert(kDimQk % kPanel == 0 && kDimV % kOutPanel == 0,
                "head dims of a row are multiples of 32 (e4m3: 64)");
  static_assert(kTileN % (kFp8 ? 32 : 16) == 0 && kTileN <= 256,
                "tile_n is a multiple of 16 (e4m3: 32), at most 256");
  // Loaders of an ablation's rows: K and V by cp.async of two warps; no warp loads for the others.
  static constexpr bool kCopied = kConfig.kv == LoadKind::kCpAsync;
  static constexpr bool kSelfLoad = kConfig.kv == LoadKind::kSelfTma;
  static_assert((kConfig.kv == LoadKind::kTma || kCopied || kSelfLoad) &&
                    kConfig.q == LoadKind::kTma,
                "kv is tma, or in an ablation's row cpasync or selftma; q is tma");
  static_assert(!kSelfLoad ||
                    (!kFp8 && kStages == 2 && kQSlots == 2 && kConfig.mask == MaskKind::kNone),
                "kv=selftma serves unmasked 16-bit rows of two stages and two slots of Q");
  static_assert(!kCopied || (!kFp8 && kWholePanels && kConfig.mask == MaskKind::kNone),
                "kv=cpasync serves unmasked 16-bit rows of whole panels");
  static_assert(
      !kPacked || (!kFp8 && !kCopied && !kSelfLoad && kConfig.o_buf != 2 &&
                   kConfig.score == ScoreKind::kScale),
      "pack=1 is for 16-bit rows by TMA with the score `scale` whose O leaves through memory");
  static_assert(!kTransposes || (kFp8 && kRowKeys % 32 == 0),
                "v_rows is for e4m3 rows, tile_n then a multiple of 64");
  static_assert(kConfig.cluster == 1 && kConfig.sched == SchedKind::kStatic);
  static_assert(!kFp8 || kConfig.step == StepKind::kSerial,
                "e4m3 rows do not overlap the products of two key blocks");
  static_assert(kConfig.rescale == Rescale::kAlways || (kExact && !kFp8),
                "rescale is always or, in 16-bit rows, exact");
  static_assert(!kOutputOverQ || (kDimV <= kDimQk && !kFp8),
                "O can reuse Q's buffer only if it is no wider");

  using E = Element<kConfig.dtype>;
  using Turns = typename TurnsOf<kConfig.turns, kConsumers>::type;
  using Thread = ConsumerThread<kTight>;
  template <bool kPacked, int kSlots>
  using Cursor = std::conditional_t<kPacked, PackedCursor<kSlots>, SlotCursor<kSlots>>;
  using Mask = std::conditional_t<kConfig.mask == MaskKind::kNone, NoMask, BandBits>;

  using Atom = std::conditional_t<kPanel * kElementBytes == 128, WideAtom<E>,
                                  cute::GMMA::Layout_K_SW64_Atom<E>>;
  using LayoutQ = SlotTiles<Atom, kTileM, kDimQk, kQSlots>;  // (tile_m, dim_qk, slot)
  using LayoutK = SlotTiles<Atom, kTileN, kDimQk, kStages>;  // (tile_n, dim_qk, stage)
  // e4m3: V is transposed, in panels of 128 keys, of which the last may hold more than a block.
  static constexpr int kLoadedKeys = kFp8 ? (kTileN + 127) / 128 * 128 : kTileN;
  using LayoutVt = typename ValueTiles<std::conditional_t<kFp8, WideAtom<E>, Atom>, kFp8,
                                       kLoadedKeys, kDimV, kStages>::type;

  template <int kM, int kN>
  using Extent = cute::Shape<cute::Int<kM>, cute::Int<kN>>;
  template <int kM, int kN, int kK>
  using Shape = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;
  using Warpgroups = cute::Layout<cute::Shape<cute::Int<kConsumers>, cute::_1, cute::_1>>;
  using MmaQk = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<E, E, float, Shape<kTileM, kTileN, kDimQk>>(), Warpgroups{}));
  using MmaPv = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<E, E, float, Shape<kTileM, kDimV, kTileN>, cute::GMMA::Major::K,
                                 kFp8 ? cute::GMMA::Major::K : cute::GMMA::Major::MN>(),
      Warpgroups{}));

  // e4m3: P·V by parts of 64 columns, of which one is added to O while the next is computed.
  static constexpr int kPvDim = kFp8 ? 64 : kDimV, kPvParts = kDimV / kPvDim;
  using MmaPvPart = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<E, E, float, Shape<kTileM, kPvDim, kTileN>, cute::GMMA::Major::K,
                                 kFp8 ? cute::GMMA::Major::K : cute::GMMA::Major::MN>(),
      Warpgroups{}));
  using PartAcc = decltype(cute::partition_fragment_C(MmaPvPart{}, Extent<kTileM, kPvDim>{}));

  using ScoreAcc = decltype(cute::partition_fragment_C(MmaQk{}, Extent<kTileM, kTileN>{}));
  using OutputAcc = decltype(cute::partition_fragment_C(MmaPv{}, Extent<kTileM, kDimV>{}));
  using Probabilities =
      decltype(cute::make_tensor<E>(cute::partition_shape_A(MmaPv{}, Extent<kTileM, kTileN>{})));

  static constexpr int kQBytes = kTileM * kDimQk * kElementBytes,
                       kKBytes = kTileN * kDimQk * kElementBytes,
                       kVBytes = (kTransposes ? kRowKeys : kLoadedKeys) * kDimV * kElementBytes;
};

}  // namespace fa::sm90
