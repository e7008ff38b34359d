// SPDX-License-Identifier: BSD-3-Clause
// In how many parts are the keys of a tile worked on? A model of waves, in units of one key block.
#include "kernels_common/host/splits.h"

#include <algorithm>

#include "kernels_common/device/block_range.h"

namespace fa {
namespace {

constexpr int kMostParts = 128;
constexpr int kFewestKeys = 1024;    // of a tile; fewer are not worth a second kernel
constexpr float kTileBlocks = 2;     // what starting and ending a tile costs
constexpr float kMergeBlocks = 3.5;  // launch of the merging kernel, about 5 microseconds
constexpr float kBlockBytes = 6e6f;  // of partial results written and read in the time of one block
constexpr float kStreamBytes = 4.5e6f;  // of K and V that a Hopper GPU reads in that time

int64_t query_rows(const Problem& p) {
  return p.packed_q() ? p.seq.total_q : int64_t{p.seq.batch} * p.seq.seqlen_q;
}

// Keys that a row tile sees, as far as the host knows.
int64_t keys_of_tile(const KernelConfig& row, const Problem& p) {
  int64_t keys = p.packed_k() ? p.seq.total_k / std::max(1, p.seq.batch) : p.seq.seqlen_k;
  if (p.band.left >= 0 && p.band.right >= 0)
    keys = std::min<int64_t>(keys, int64_t{p.band.left} + p.band.right + row.tile_m);
  else if (p.band.left >= 0 && p.band.top_left == 0 && !p.packed_q())
    keys = std::min<int64_t>(keys, int64_t{p.band.left} + p.seq.seqlen_q);
  if (p.band.chunk > 0) keys = std::min<int64_t>(keys, int64_t{p.band.chunk} + row.tile_m);
  return keys;
}

// Of all sequences, once.
float key_bytes(const Problem& p, int64_t keys) {
  const auto element = p.kv_dtype == DType::kE4m3 ? 1.0f : 2.0f;
  return static_cast<float>(keys) * static_cast<float>(p.seq.batch) *
         static_cast<float>(p.heads_k) * static_cast<float>(p.dim_qk + p.dim_v) * element;
}

size_t part_elements(const Problem& p) {
  return static_cast<size_t>(query_rows(p)) * static_cast<size_t>(p.heads_q) *
         static_cast<size_t>(p.dim_v);
}

float* lse_of_parts(const Problem& p, int splits, void* workspace) {
  return static_cast<float*>(workspace) + static_cast<size_t>(splits) * part_elements(p);
}

// [B, Sq, Hq, Dv] or packed [total_q, Hq, Dv], fp32 and dense.
TensorArg part_tensor(const Problem& p, void* workspace) {
  const int64_t row = int64_t{p.heads_q} * p.dim_v;
  return TensorArg{workspace, p.packed_q() ? 0 : row * p.seq.seqlen_q, row, p.dim_v};
}

int64_t lse_rows(const Problem& p) { return p.packed_q() ? p.seq.total_q : p.seq.seqlen_q; }

int64_t lse_stride_batch(const Problem& p) {
  return p.packed_q() ? 0 : int64_t{p.heads_q} * p.seq.seqlen_q;
}

// What a call in `parts` parts takes, and what in one.
struct SplitTimes {
  int parts;
  float split, whole;
};

SplitTimes split_times(const KernelEntry& row, const Problem& p, const DeviceInfo& device,
                       int64_t tiles) {
  const int64_t keys = keys_of_tile(row.config, p);
  // The warps of a packed Ampere tile divide its keys.
  const bool by_warps = row.config.pack && row.config.arch != 90;
  const int at_once = by_warps ? row.config.tile_n * row.config.warps : row.config.tile_n;
  const int64_t blocks = (keys + at_once - 1) / at_once;
  const int64_t slots = int64_t{device.sm_count} * blocks_per_sm(row, device);
  if (tiles == 0 || blocks == 0) return SplitTimes{std::max(1, p.num_splits), 1, 1};
  const float traffic = static_cast<float>(part_elements(p)) * 8 / kBlockBytes;
  const auto waves = [&](int64_t n) { return static_cast<float>((tiles * n + slots - 1) / slots); };
  // More parts than the memory keeps up with gain nothing (8 sequences of 4k keys, 16 queries: 44
  // us in one part, 52 in two; H200).
  const float least = row.config.arch == 90 ? key_bytes(p, keys) / kStreamBytes : 0;
  const auto time = [&](int64_t n) {
    const auto longest = static_cast<float>((blocks + n - 1) / n);
    const float merging = n > 1 ? kMergeBlocks + static_cast<float>(n) * traffic : 0;
    return std::max(least, waves(n) * (longest + kTileBlocks)) + merging;
  };
  SplitTimes best{1, time(1), time(1)};
  if (p.num_splits > 0) return SplitTimes{p.num_splits, time(p.num_splits), best.whole};
  if (p.batch_invariant || (row.config.arch == 90 && !row.config.pack)) return best;
  if (2 * tiles > slots || keys < kFewestKeys) return best;
  for (int n = 2; n <= std::min<int64_t>(blocks, kMostParts); ++n)
    if (time(n) < std::min(best.split, 0.9f * best.whole))
      best = SplitTimes{n, time(n), best.whole};
  return best;
}

}  // namespace

int choose_splits(const KernelEntry& row, const Problem& p, const DeviceInfo& device,
                  int64_t tiles) {
  return split_times(row, p, device, tiles).parts;
}

float split_share(const KernelEntry& row, const Problem& p, const DeviceInfo& device,
                  int64_t tiles) {
  const SplitTimes times = split_times(row, p, device, tiles);
  return times.split / times.whole;
}

size_t split_bytes(const Problem& p, int splits) {
  if (splits <= 1) return 0;
  const size_t lse = static_cast<size_t>(query_rows(p)) * static_cast<size_t>(p.heads_q);
  return static_cast<size_t>(splits) * (part_elements(p) + lse) * sizeof(float);
}

void bind_parts(const Problem& p, int splits, void* workspace, FwdArgs* args) {
  args->out = part_tensor(p, workspace);
  args->out_fp32 = 1;
  args->lse = lse_of_parts(p, splits, workspace);
  args->lse_stride_batch = lse_stride_batch(p);
  args->lse_stride_head = lse_rows(p);
  args->splits =
      SplitArgs{splits, static_cast<int64_t>(part_elements(p)), query_rows(p) * int64_t{p.heads_q}};
}

CombineArgs merge_parts(const Problem& p, int splits, void* workspace) {
  return CombineArgs{.out_partial = part_tensor(p, workspace),
                     .out = p.out,
                     .out_partial_stride_part = static_cast<int64_t>(part_elements(p)),
                     .lse_partial = lse_of_parts(p, splits, workspace),
                     .lse_partial_stride_part = query_rows(p) * int64_t{p.heads_q},
                     .lse_partial_stride_batch = lse_stride_batch(p),
                     .lse_partial_stride_head = lse_rows(p),
                     .lse = p.lse,
                     .lse_stride_batch = p.lse_stride_batch,
                     .lse_stride_head = p.lse_stride_head,
                     .count = splits,
                     .batch = p.packed_q() ? 1 : p.seq.batch,
                     .rows = static_cast<int32_t>(lse_rows(p)),
                     .heads = p.heads_q,
                     .dim_v = p.dim_v,
                     .partial_dtype = FA_FP32,
                     .out_dtype = static_cast<int32_t>(p.out_dtype)};
}

}  // namespace fa
