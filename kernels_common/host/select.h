// SPDX-License-Identifier: BSD-3-Clause
// Which row runs a call? The cheapest one that can; or why none can. Pure: the device and the table
// are arguments.
#pragma once

#include <cstdint>
#include <span>

#include "kernels_common/host/device_info.h"
#include "kernels_common/host/problem.h"
#include "kernels_common/host/registry.h"

namespace fa {

using Table = std::span<const KernelEntry* const>;

// One bit per reason for which a row cannot serve a call; 0: it can.
enum Misfit : uint32_t {
  kMisfitOp = 1 << 0,
  kMisfitDType = 1 << 1,
  kMisfitForcedArch = 1 << 2,  // options.force_arch names another architecture
  kMisfitDevice = 1 << 3,      // the device cannot run the row's code
  kMisfitDimQk = 1 << 4,
  kMisfitDimV = 1 << 5,
  kMisfitMask = 1 << 6,
  kMisfitSharedMemory = 1 << 7,
  kMisfitSoftcap = 1 << 8,
  kMisfitAlibi = 1 << 9,
  kMisfitPages = 1 << 10,
  kMisfitDescale = 1 << 11,
  kMisfitDropout = 1 << 12,
  kMisfitSplits = 1 << 13,
  kMisfitStride = 1 << 14,  // beyond what a tensor map can hold
  kMisfitBatchIndex = 1 << 15,
  kMisfitReserve = 1 << 16,  // the row needs a block per tile, on every multiprocessor
  kMisfitPack = 1 << 17,     // the row packs query heads, and the call has too many rows for that
  kMisfitDescaleBlock = 1 << 18,  // blocks of keys have more than one descale
  kMisfitValueKeys = 1 << 19,     // the row transposes V, whose keys are contiguous already
};

// Whether blocks of tile_n keys have one descale each. Left padding moves the blocks of a sequence,
// by a number of keys that only the device knows.
bool whole_key_blocks(const Problem& problem, int tile_n);

uint32_t misfits(const KernelEntry& entry, const Problem& problem, const DeviceInfo& device);

// Every reason as text, "" when the row can run; returns `text`.
const char* why_not(const KernelEntry& entry, const Problem& problem, const DeviceInfo& device,
                    char* text, size_t capacity);

// Expected time in arbitrary units; comparable between the rows of one call. With batch_invariant
// it depends on dtype, dims, options and architecture alone.
float cost(const KernelEntry& entry, const Problem& problem, const DeviceInfo& device);

// FA_ERROR_UNSUPPORTED with the nearest rows when none can; FA_ERROR_DEVICE when no row serves the
// device at all.
fa_status select(const Problem& problem, const DeviceInfo& device, Table table,
                 const KernelEntry** entry);

// Blocks of this row that one multiprocessor surely holds at a time, should a thread need every
// register.
int blocks_per_sm(const KernelEntry& entry, const DeviceInfo& device);

// Key tiles of one key head (packed: the bound of all sequences together).
int64_t key_tiles(const KernelEntry& entry, const Problem& problem);

// Query positions of a sequence; packed q: by the hint, else of an average one.
int64_t query_positions(const Problem& problem);

// Ampere rows pack query heads into tiles of 16 rows, which take 0.4 of the time of a tile of 128:
// three of them would take longer than one.
inline constexpr int64_t kMostPackedPositions = 32;

// Row tiles of one head, of a row with `pack` of one key head (packed: the bound of all sequences
// together).
int64_t row_tiles(const KernelEntry& entry, const Problem& problem);

// Heads that have these row tiles: of every batch entry, unless q is packed.
int64_t row_heads(const KernelEntry& entry, const Problem& problem);

// Their product, by which a forward is planned and its number of parts chosen.
int64_t forward_tiles(const KernelEntry& entry, const Problem& problem);

}  // namespace fa
