// SPDX-License-Identifier: BSD-3-Clause
// Which row runs a call? A linear scan over the table: bits say what does not fit, a cost picks
// among the rest.
#include "kernels_common/host/select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels_common/device/tile_scheduler.h"
#include "kernels_common/host/error.h"
#include "kernels_common/host/refusal.h"
#include "kernels_common/host/splits.h"
#include "kernels_common/host/tensor_map.h"

namespace fa {
namespace {

bool fits_tensor_map(const TensorArg& t, int element_bytes) {
  const int64_t largest = std::max({t.stride_batch, t.stride_row, t.stride_head});
  return largest < kTensorMapStrideLimit / element_bytes;
}

// The products of a backward read their operands from shared memory, the less often the larger the
// tile.
float traffic(const KernelConfig& row) {
  return 1 + 64.0f / static_cast<float>(row.tile_m) + 64.0f / static_cast<float>(row.tile_n);
}

// Ampere rows hide latencies behind the other warps of a multiprocessor: four alone leave a third
// of its time unused, and blocks of eight wait for each other (64 rows against 128 at D 256 on an
// H200, where two of the smaller blocks fit: +7 to 13 %).
float residency(const KernelEntry& entry, const DeviceInfo& device) {
  if (entry.config.arch == 90) return 1.0f;
  const int warps = blocks_per_sm(entry, device) * entry.threads / 32;
  const float narrow = entry.config.tile_n < 64 ? 1.12f : 1.0f;  // D 128, 32 keys against 64
  if (warps < 8) return 1.3f * narrow;
  return (entry.threads > 128 ? 1.06f : 1.0f) * narrow;
}

int group_of(const Problem& p) { return p.heads_k > 0 ? p.heads_q / p.heads_k : 1; }

// Rows of a sequence in the tiles of one head, of a row with `pack` of one key head.
int64_t rows_of_sequence(const KernelConfig& row, const Problem& p) {
  return query_positions(p) * (row.pack ? group_of(p) : 1);
}

// Row tiles of one head that are not empty: packed, sequences of the average length.
float worked_tiles(const KernelConfig& row, const Problem& p) {
  const int rows = row.pack ? group_of(p) : 1;
  if (!p.packed_q()) return static_cast<float>(ceil_div(p.seq.seqlen_q * rows, row.tile_m));
  const auto whole =
      static_cast<float>(p.seq.total_q) * static_cast<float>(rows) / static_cast<float>(row.tile_m);
  return std::max(whole + 0.5f * static_cast<float>(p.seq.batch),
                  static_cast<float>(std::min(p.seq.batch, p.seq.total_q)));
}

// Keys of the blocks that an average row tile works on. Every edge of the band that passes through
// the tile adds about half of its rows and half of a block.
float worked_keys(const KernelConfig& row, const Problem& p) {
  const int64_t keys = p.packed_k() ? p.seq.total_k / std::max(1, p.seq.batch) : p.seq.seqlen_k;
  const auto most = static_cast<float>(keys);
  // Ampere tiles of fewer rows are compared as if all had 128, or windows would always take them.
  // Warpgroups of a Hopper forward pass the blocks that their own 64 rows do not see; the constants
  // of e4m3 rows are fitted without that.
  const bool own_blocks = row.op == Op::kForward && row.dtype != DType::kE4m3;
  const int rows = row.arch != 90 ? std::max(128, row.tile_m) : own_blocks ? 64 : row.tile_m;
  const int columns = row.arch == 90 ? row.tile_n : std::max(64, row.tile_n);
  const auto edge = 0.5f * static_cast<float>(rows + columns);
  const bool right = p.band.right >= 0, left = p.band.left >= 0;
  float seen = most;
  if (left && right)
    seen = std::min(most,
                    static_cast<float>(p.band.left) + static_cast<float>(p.band.right) + 2 * edge);
  else if (left || right)
    seen = 0.5f * most + edge;
  if (p.band.chunk > 0) seen = std::min(seen, 0.5f * static_cast<float>(p.band.chunk) + edge);
  return seen;
}

bool forward_on_hopper(const KernelConfig& row) { return row.arch == 90 && row.op == Op::kForward; }

// Time of a score beside that of a row with three consumer warpgroups, which head dim 64 has as
// well, and 128 in e4m3, whose products take half the time: two leave the tensor cores waiting for
// more exponentials. Fitted to causal calls of 16 bits on an H200, 16384 tokens, 32 heads over 8,
// S 256 / 512 / 1k / 2k / 4k: tiles of 128 rows reach 139 / 224 / 307 / 378 / 412 TFLOP/s, tiles of
// 192 rows 115 / 242 / 342 / 443 / 477; 2 x 4 heads of 4k and 8k: 391 / 447 and 341 / 483.
float time_per_score(const KernelConfig& row) {
  const int widest = row.dtype == DType::kE4m3 ? 128 : 64;
  const float two = row.dtype == DType::kE4m3 ? 1.1f : 1.13f;
  return forward_on_hopper(row) && row.head_dim_v <= widest && row.tile_m < 192 ? two : 1.0f;
}

// Prologue and epilogue of a tile, in scores.
float tile_time(const KernelConfig& row) {
  return forward_on_hopper(row) ? 20000.0f : 128.0f * static_cast<float>(row.tile_m);
}

// A warpgroup without rows leaves its share of the tensor cores to the others: tiles of 64 rows
// take 34 us where full ones of 128 take 49 (4096 keys, H200). Calls of several tiles fill them.
float filled(const KernelConfig& row, const Problem& p) {
  if (!forward_on_hopper(row)) return 1.0f;
  const auto share =
      static_cast<float>(
          ceil_div(static_cast<int>(std::min<int64_t>(rows_of_sequence(row, p), row.tile_m)), 64)) *
      64 / static_cast<float>(row.tile_m);
  return 0.5f + 0.5f * std::min(1.0f, share);
}

// Every query position belongs to one tile per group, so that K and V are read once for all its
// heads. On Hopper cost() decides, and a TMA box holds whole groups. A batch-invariant call must
// not run otherwise because of its length.
bool packs(const KernelConfig& row, const Problem& p) {
  const int group = group_of(p);
  const int64_t all = int64_t{p.packed_q() ? p.seq.total_q : p.seq.seqlen_q} * group;
  if (p.batch_invariant || all > std::numeric_limits<int32_t>::max()) return false;
  if (row.arch != 90) return query_positions(p) <= kMostPackedPositions;
  return group > 1 && group <= row.tile_m && std::has_single_bit(static_cast<unsigned>(group));
}

// An Ampere tile of packed rows: for each key the time of 51 rows of an unpacked Ampere tile (9.1
// of 22.5 ns at D 128, H200). Hopper rows wait for the same L2 as it does, 8 ns for a key of 64
// rows; on Hopper GPUs their unit counts. Splits spread a long tile over several multiprocessors.
float packed_cost(const KernelEntry& entry, const Problem& p, const DeviceInfo& device) {
  const KernelConfig& row = entry.config;
  const float unit = device.hopper() ? 1.75f : 4.0f;
  const float keys = worked_keys(row, p);
  const float tile =
      unit * static_cast<float>(row.head_dim_qk + row.head_dim_v) * (keys * 51.0f + 10000.0f);
  const float tiles = worked_tiles(row, p) * static_cast<float>(p.heads_k) *
                      (p.packed_q() ? 1.0f : static_cast<float>(p.seq.batch));
  const float least = std::clamp(512.0f / std::max(1.0f, keys), 0.25f, 1.0f);
  return tile * std::max(least, tiles / static_cast<float>(device.sm_count));
}

// e4m3 rows that transpose V themselves do so for every tile, beside products that read the same
// shared memory. With transposition_ahead() fitted to both ways on an H200, 16384 tokens, full and
// causal: equal at S 2k to 4k; with 8 key heads for 32 of queries at 1k.
float own_transposition(const KernelConfig& row) {
  return row.v_rows > 0 ? 1.009f + 0.0003f * static_cast<float>(row.head_dim_v) : 1.0f;
}

// In scores of one multiprocessor: the kernel that transposes V ahead of other e4m3 rows, once for
// all query heads of a group. It moves every byte twice, and has to be launched.
float transposition_ahead(const KernelConfig& row, const Problem& p, const DeviceInfo& device) {
  if (row.dtype != DType::kE4m3 || row.v_rows > 0) return 0.0f;
  const auto keys =
      static_cast<float>(p.packed_k() ? p.seq.total_k : int64_t{p.seq.seqlen_k} * p.seq.batch);
  const float each = 75.0f + static_cast<float>(row.head_dim_v) / 5.0f;
  return 30000.0f +
         each * keys * static_cast<float>(p.heads_k) / static_cast<float>(device.sm_count);
}

bool runs_on(const KernelConfig& row, const DeviceInfo& device) {
  return row.arch == 90 ? device.hopper() : device.capability >= row.arch;
}

}  // namespace

bool whole_key_blocks(const Problem& p, int tile_n) {
  const int block_k = p.k_descale.block, block_v = p.v_descale.block;
  if (block_k == 0 && block_v == 0) return true;
  return block_k % tile_n == 0 && block_v % tile_n == 0 && p.seq.leftpad_k == nullptr;
}

uint32_t misfits(const KernelEntry& entry, const Problem& p, const DeviceInfo& device) {
  const KernelConfig& row = entry.config;
  uint32_t bits = 0;
  const auto require = [&bits](bool fits, Misfit bit) {
    if (!fits) bits |= bit;
  };
  require(row.op == p.op, kMisfitOp);
  require(row.dtype == p.dtype && row.kv_dtype == p.kv_dtype, kMisfitDType);
  require(p.force_arch == 0 || row.arch == p.force_arch, kMisfitForcedArch);
  require(runs_on(row, device), kMisfitDevice);
  require(row.head_dim_qk >= p.dim_qk, kMisfitDimQk);
  require(row.head_dim_v >= p.dim_v, kMisfitDimV);
  require(row.mask == MaskKind::kBand || !p.banded(), kMisfitMask);
  require(entry.smem_bytes <= device.smem_per_block, kMisfitSharedMemory);
  require(row.score == ScoreKind::kAny || p.softcap == 0, kMisfitSoftcap);
  require(row.score == ScoreKind::kAny || !p.alibi(), kMisfitAlibi);
  require((row.kv == LoadKind::kPaged) == p.paged, kMisfitPages);
  require(
      row.dtype == DType::kE4m3 ? !p.descale_blocks() || takes_block_descales(row) : !p.descale(),
      kMisfitDescale);
  require(row.dtype != DType::kE4m3 || whole_key_blocks(p, row.tile_n), kMisfitDescaleBlock);
  require(p.dropout_p == 0 || row.dropout, kMisfitDropout);
  require(row.v_rows == 0 || p.v_stride_dim == 1, kMisfitValueKeys);
  require(!row.pack || packs(row, p), kMisfitPack);
  require(p.num_splits <= 1 || row.op != Op::kForward || row.arch == 80 || row.pack, kMisfitSplits);
  if (row.arch == 90) {
    const int bytes = p.dtype == DType::kE4m3 ? 1 : 2;
    require(fits_tensor_map(p.q, bytes) && fits_tensor_map(p.k, bytes) &&
                fits_tensor_map(p.v, bytes) && fits_tensor_map(p.out, 4),
            kMisfitStride);
    if (p.op == Op::kBackward)
      require(fits_tensor_map(p.grad.dout, 4) && fits_tensor_map(p.grad.dk, 4) &&
                  fits_tensor_map(p.grad.dv, 4),
              kMisfitStride);
  }
  // Several batch entries may read the same keys: their gradients would have to be summed.
  require(p.op != Op::kBackward || p.seq.batch_index_k == nullptr, kMisfitBatchIndex);
  // A block of a Hopper backward works on one tile: fewer blocks would leave tiles out.
  require(p.reserve_sms == 0 || row.op != Op::kBackward || row.arch != 90, kMisfitReserve);
  return bits;
}

int64_t query_positions(const Problem& p) {
  if (!p.packed_q() || p.seq.seqlen_q > 0 || p.seq.batch == 0) return p.seq.seqlen_q;
  return (int64_t{p.seq.total_q} + p.seq.batch - 1) / p.seq.batch;
}

int64_t row_tiles(const KernelEntry& entry, const Problem& p) {
  const int tile_m = entry.config.tile_m, rows = entry.config.pack ? group_of(p) : 1;
  return p.packed_q() ? packed_tiles(p.seq.total_q * rows, p.seq.batch, tile_m)
                      : ceil_div(p.seq.seqlen_q * rows, tile_m);
}

int64_t row_heads(const KernelEntry& entry, const Problem& p) {
  const int64_t heads = entry.config.pack ? p.heads_k : p.heads_q;
  return p.packed_q() ? heads : heads * p.seq.batch;
}

int64_t forward_tiles(const KernelEntry& entry, const Problem& p) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  return std::min(row_tiles(entry, p), kLimit) * std::min(row_heads(entry, p), kLimit);
}

int64_t key_tiles(const KernelEntry& entry, const Problem& p) {
  const int tile_n = entry.config.tile_n;
  return p.packed_k() ? packed_tiles(p.seq.total_k, p.seq.batch, tile_n)
                      : ceil_div(p.seq.seqlen_k, tile_n);
}

int blocks_per_sm(const KernelEntry& entry, const DeviceInfo& device) {
  if (entry.config.arch == 90) return 1;  // its register budget fills the multiprocessor
  constexpr int kRegisters = 65536, kMostPerThread = 256;
  const int by_smem = device.smem_per_sm / (entry.smem_bytes + kReservedSmem);
  const int by_threads = device.threads_per_sm / entry.threads;
  const int by_registers = kRegisters / (kMostPerThread * entry.threads);
  return std::max(1, std::min({by_smem, by_threads, by_registers}));
}

float cost(const KernelEntry& entry, const Problem& p, const DeviceInfo& device) {
  const KernelConfig& row = entry.config;
  if (row.pack && row.arch != 90) return packed_cost(entry, p, device);
  // wgmma does about twice the work of mma.sync per cycle; the rest of the margin keeps an Ampere
  // row from winning on a Hopper GPU by rounding of waves alone.
  const float architecture = row.arch == 90 ? 1.0f : 4.0f;
  const float mask = row.mask == MaskKind::kNone ? 0.95f : 1.0f;
  const float policies = row.dtype == DType::kE4m3 ? 1.8f : 1.5f;  // 1.07 ms beside 0.58 (H200)
  const float score = row.score == ScoreKind::kScale ? 1.0f : policies;
  const float tile_shape = row.op == Op::kBackward ? traffic(row) : residency(entry, device);
  const float per_score = architecture * mask * score * tile_shape * own_transposition(row) *
                          static_cast<float>(row.head_dim_qk + row.head_dim_v);
  if (p.batch_invariant) return per_score * time_per_score(row);
  // Rows of the Hopper backward are compared as if all tiles had 128 rows, or the smaller tiles of
  // a wider head dim would take short calls.
  KernelConfig block = row;
  if (row.op == Op::kBackward && row.arch == 90) block.tile_m = 128;
  const float tile = per_score * (worked_keys(row, p) * static_cast<float>(block.tile_m) *
                                      filled(row, p) * time_per_score(row) +
                                  tile_time(block));
  const float tiles = worked_tiles(block, p) *
                      static_cast<float>(row.pack ? p.heads_k : p.heads_q) *
                      (p.packed_q() ? 1.0f : static_cast<float>(p.seq.batch));
  // Tiles on one multiprocessor share it; fewer tiles than multiprocessors leave some idle. A
  // Hopper block works on its tiles one after the other. An Ampere tile of fewer rows than 128 is
  // no sooner done: its warps load the same keys.
  const float each = tiles / static_cast<float>(device.sm_count);
  const float division = row.pack ? 1.05f : 1.0f;  // of packed rows by the group
  if (forward_on_hopper(row)) {
    const float share = row.pack ? split_share(entry, p, device, forward_tiles(entry, p)) : 1.0f;
    return tile * division * share * std::max(1.0f, std::ceil(each)) +
           per_score * transposition_ahead(row, p, device);
  }
  const float least = row.arch == 90 ? 1.0f : 128.0f / static_cast<float>(row.tile_m);
  return tile * std::max({1.0f, least, each});
}

fa_status select(const Problem& p, const DeviceInfo& device, Table table,
                 const KernelEntry** entry) {
  const KernelEntry* best = nullptr;
  float best_cost = std::numeric_limits<float>::infinity();
  for (const KernelEntry* candidate : table) {
    if (misfits(*candidate, p, device) != 0) continue;
    const float candidate_cost = cost(*candidate, p, device);
    if (best == nullptr || candidate_cost < best_cost) {
      best = candidate;
      best_cost = candidate_cost;
    }
  }
  if (best == nullptr) return refuse(p, device, table);
  *entry = best;
  return FA_OK;
}

}  // namespace fa
