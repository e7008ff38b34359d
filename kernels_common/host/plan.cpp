// SPDX-License-Identifier: BSD-3-Clause
// What will run? Row, grid, order of tiles, workspace; every size comes from the row's entry, never
// from a second formula.
#include "kernels_common/host/plan.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <limits>
#include <numeric>

#include "kernels_common/device/philox.h"
#include "kernels_common/device/value_keys.h"
#include "kernels_common/host/error.h"
#include "kernels_common/host/refusal.h"
#include "kernels_common/host/splits.h"

namespace fa {
namespace {

// Key heads whose K and V stay in L2 together.
int64_t cached_key_heads(const Problem& p, const DeviceInfo& device) {
  const int64_t keys = std::max<int64_t>(1, p.packed_k() ? p.seq.total_k : p.seq.seqlen_k);
  const int element = p.kv_dtype == DType::kE4m3 ? 1 : 2;
  return std::max<int64_t>(1, section_bytes(device) / (keys * (p.dim_qk + p.dim_v) * element));
}

// Query heads walked together while every row tile of them is worked on; whole groups, which share
// K and V. A persistent row hands its tiles out in rounds, every second one backwards: the blocks
// get equal work if a section is a whole number of pairs of rounds, or the only one. (Causal, 16384
// tokens, 16 heads: one section of 16 gives 662 TFLOP/s, sections of 4 give 537; H200, 2026-11-29.)
// Four blocks on the same head stream its K and V together, so a quarter of the grid need not be
// cached. Other rows' blocks take tiles as they end. A small last section would end with few long
// tiles, so that all are of one size, and under a mask, which makes tiles unequal, larger than the
// cache asks for (causal, D 128, S 1k / 4k / 16k: 267 / 857 / 3208 to 244 / 746 / 2808 us; H200).
int section_heads(const KernelEntry& row, const Problem& p, const DeviceInfo& device, int grid,
                  int64_t tiles_m, int heads) {
  const int64_t group = row.config.pack ? 1 : p.heads_q / p.heads_k;
  int64_t most = cached_key_heads(p, device) * group;
  const bool persistent = row.config.arch == 90;
  const int64_t at_once = persistent ? grid : int64_t{device.sm_count} * blocks_per_sm(row, device);
  if (persistent || p.banded()) most = std::max(most, at_once / 4 * group);
  if (heads <= most) return heads;
  if (!persistent) {
    const int64_t groups = heads / group, sections = (heads + most - 1) / most;
    return static_cast<int>((groups + sections - 1) / sections * group);
  }
  const int64_t pairs = 2 * grid / std::gcd(int64_t{2} * grid, tiles_m);  // heads that fill them
  const int64_t balanced = std::lcm(pairs, group);
  return static_cast<int>(balanced <= most ? most / balanced * balanced : most);
}

// Hopper rows are persistent: one block per multiprocessor works through its tiles while the next
// ones are loading. Ampere rows gain nothing from that, and how many of their blocks fit on a
// multiprocessor depends on registers, which only the device knows: one block per tile lets it
// start the next block of the order wherever one ends. Reserved multiprocessors bound both.
int grid_of(const KernelEntry& row, const Problem& p, const DeviceInfo& device, int num_tiles) {
  if (row.config.arch != 90 && p.reserve_sms == 0) return num_tiles;
  return static_cast<int>(
      std::min<int64_t>(num_tiles, int64_t{device.sm_count} * blocks_per_sm(row, device)));
}

constexpr float kLog2E = 1.4426950408889634f;

// Beyond 1e30 a cap hides nothing, and its products with log2(e) and 2 stay finite.
float cap_of(const Problem& p) { return std::min(p.softcap, 1e30f); }

// The transposed V of an e4m3 call; 0 for other rows.
size_t transposed_bytes(const KernelEntry& row, const Problem& p) {
  if (row.config.dtype != DType::kE4m3 || row.config.v_rows > 0) return 0;
  const int64_t planes = int64_t{p.heads_k} * (p.packed_k() ? 1 : p.seq.batch);
  return static_cast<size_t>(planes * p.dim_v * value_tiles(p.seq) * kValueTile);
}

// Lengths that only the device knows leave persistent blocks with unequal shares of tiles dealt in
// rounds. The counter costs a memset ahead of the kernel.
bool counts_tiles(const KernelEntry& row, const Problem& p, int grid, int num_tiles) {
  const bool unknown =
      p.packed_q() || p.packed_k() || p.seq.used_q != nullptr || p.seq.used_k != nullptr;
  return row.config.arch == 90 && row.config.dtype != DType::kE4m3 && unknown &&
         num_tiles > 2 * grid;
}

bool falls_back(const Plan& plan, const Problem& p, const DeviceInfo& device) {
  const KernelConfig& row = plan.main->config;
  return device.hopper() && row.arch == 80 && row.pack == 0 && p.force_arch != 80;
}

}  // namespace

int64_t section_bytes(const DeviceInfo& device) {
  return std::clamp<int64_t>(device.l2_bytes / 2, 1 << 20, 24 << 20);
}

// 0 · inf would be NaN where a tiny cap meets a product of 0.
ScoreArgs score_args(const Problem& p) {
  const bool capped = p.softcap > 0;
  return ScoreArgs{.capped = capped ? 1 : 0,
                   .inner = capped ? std::min(p.scale / cap_of(p) / 2, 1e30f) : p.scale * kLog2E,
                   .outer = capped ? 2 * cap_of(p) * kLog2E : 1.0f,
                   .slopes = p.alibi_slopes,
                   .slopes_stride_batch = p.alibi_stride_batch,
                   .slopes_stride_head = p.alibi_stride_head};
}

float softmax_factor(const Problem& p) {
  if (p.alibi()) return 1.0f;
  return p.softcap > 0 ? 2 * cap_of(p) * kLog2E : p.scale * kLog2E;
}

// Everything dropped: 0 stands for 1 / 0.
DropoutArgs dropout_args(const Problem& p) {
  if (p.dropout_p == 0) return DropoutArgs{nullptr, 0, 1.0f};
  const int threshold = dropout_threshold(p.dropout_p);
  return DropoutArgs{p.seed_offset, threshold,
                     threshold == 256 ? 0.0f : 256.0f / static_cast<float>(256 - threshold)};
}

fa_status make_plan(const Problem& p, const DeviceInfo& device, Table table, Plan* plan) {
  *plan = Plan{};
  FA_TRY(select(p, device, table, &plan->main));
  if (p.op == Op::kBackward) return plan_backward(p, device, plan);
  const KernelEntry& row = *plan->main;
  const int64_t tiles_m = row_tiles(row, p);
  const int64_t heads = row_heads(row, p);
  const int64_t limit = std::numeric_limits<int32_t>::max();
  plan->num_splits = heads > limit ? 1 : choose_splits(row, p, device, forward_tiles(row, p));
  if (heads > limit || (heads > 0 && tiles_m > limit / heads / plan->num_splits))
    return fail(FA_ERROR_UNSUPPORTED,
                "fa: not supported: %" PRId64 " row tiles of each of %" PRId64
                " heads (batch * heads), in %d parts, exceed 2^31 - 1 "
                "tiles in one call. Split the call along the batch.",
                tiles_m, heads, plan->num_splits);
  const auto num_tiles = static_cast<int32_t>(p.empty() ? 0 : tiles_m * heads * plan->num_splits);
  plan->grid = grid_of(row, p, device, num_tiles);
  plan->counted = plan->num_splits == 1 && counts_tiles(row, p, plan->grid, num_tiles);
  // A row needs one of the three at most.
  if (!p.empty())
    plan->workspace_bytes = transposed_bytes(row, p) + split_bytes(p, plan->num_splits) +
                            (plan->counted ? sizeof(uint32_t) : 0);
  const int section =
      p.empty() ? 1 : section_heads(row, p, device, plan->grid, tiles_m, static_cast<int>(heads));
  // tile_coord() multiplies tiles_m by the section, which is at most num_tiles and therefore fits.
  plan->order =
      TileOrder{static_cast<int32_t>(tiles_m), static_cast<int32_t>(heads), section, num_tiles};
  return FA_OK;
}

LaunchArgs bind(const Plan& plan, const Problem& p, void* workspace) {
  LaunchArgs args{};
  FwdArgs& f = args.fwd;
  f.q = p.q;
  f.k = p.k;
  f.v = p.v;
  f.out = p.out;
  // A call without keys may pass no k and v; tensor maps need an address all the same, which
  // nothing reads.
  if (f.k.data == nullptr) f.k.data = f.q.data;
  if (f.v.data == nullptr) f.v.data = f.q.data;
  f.lse = p.lse;
  f.lse_stride_batch = p.lse_stride_batch;
  f.lse_stride_head = p.lse_stride_head;
  f.seq = p.seq;
  f.band = p.band;
  f.order = plan.order;
  f.next_tile = plan.counted ? static_cast<uint32_t*>(workspace) : nullptr;
  f.heads_q = p.heads_q;
  f.heads_k = p.heads_k;
  f.group = p.heads_k > 0 ? p.heads_q / p.heads_k : 1;
  f.dim_qk = p.dim_qk;
  f.dim_v = p.dim_v;
  f.out_fp32 = p.out_dtype == DType::kFp32 ? 1 : 0;
  f.score = score_args(p);
  f.scale_log2 = softmax_factor(p);
  f.dropout = dropout_args(p);
  // fp32 results show the rounding of the largest probability, which 16-bit results hide. And
  // whether a maximum is taken over is decided for several rows at once: a row whose bits must not
  // depend on its neighbours follows every maximum.
  f.rescale_limit = f.out_fp32 || p.batch_invariant ? 0.f : 8.f;
  f.out_fp16 = p.out_dtype == DType::kFp16 ? 1 : 0;
  f.q_descale = p.q_descale;
  f.k_descale = p.k_descale;
  f.v_descale = p.v_descale;
  f.v_keys = TransposedV{workspace, static_cast<int32_t>(value_tiles(p.seq)), p.v_stride_dim};
  f.sinks = p.sinks;
  f.sinks_stride = p.sinks_stride;
  f.sinks_dtype = p.sinks_dtype;
  f.splits.count = 1;
  if (plan.num_splits > 1) bind_parts(p, plan.num_splits, workspace, &f);
  args.grid = plan.grid;
  return args;
}

namespace {

std::string describe_row(const Plan& plan, const Problem& p, const DeviceInfo& device) {
  const KernelEntry& row = *plan.main;
  char text[1024];
  std::snprintf(text, sizeof(text),
                "call       %s; batch %d, seqlen %d x %d, heads %d / %d\n"
                "device     %s, %d SMs, %d bytes of shared memory per block\n"
                "row        %s (arch %d, %d threads, %d bytes of shared memory)\n",
                describe_call(p).c_str(), p.seq.batch,
                p.packed_q() ? p.seq.total_q : p.seq.seqlen_q,
                p.packed_k() ? p.seq.total_k : p.seq.seqlen_k, p.heads_q, p.heads_k,
                describe_device(device).c_str(), device.sm_count, device.smem_per_block, row.id,
                row.config.arch, row.threads, row.smem_bytes);
  return text;
}

std::string describe_forward(const Plan& plan) {
  const KernelEntry& row = *plan.main;
  char text[1024];
  std::snprintf(
      text, sizeof(text),
      "tiles      %d x %d, %d row tiles x %d heads = %d\n"
      "grid       %d blocks, %s\n"
      "tile order longest first, sections of %d heads\n"
      "splits     %d\n"
      "workspace  %zu bytes\n"
      "%s",
      row.config.tile_m, row.config.tile_n, plan.order.tiles_m, plan.order.heads,
      plan.order.num_tiles, plan.grid,
      plan.counted                       ? "each takes the next tile that is left"
      : plan.grid < plan.order.num_tiles ? "each works through several tiles"
                                         : "one per tile",
      plan.order.section, plan.num_splits, plan.workspace_bytes,
      row.config.pack ? "packed     the query heads of a key head share its row tiles\n" : "");
  return text;
}

}  // namespace

std::string describe(const Plan& plan, const Problem& p, const DeviceInfo& device, Table table) {
  std::string lines = describe_row(plan, p, device);
  lines += p.op == Op::kBackward ? describe_backward(plan, p) : describe_forward(plan);
  if (plan.grid == 0 && plan.rows.num_tiles == 0)
    lines += p.op == Op::kBackward ? "note       no row and no key: no gradient is written\n"
                                   : "note       no query row: nothing is launched\n";
  if (falls_back(plan, p, device)) {
    lines += "fallback   a Hopper GPU runs an Ampere row, because no Hopper row fits:\n";
    const size_t before = lines.size();
    for (const KernelEntry* entry : table) {
      const uint32_t bits = misfits(*entry, p, device);
      // Rows of other dtypes or sizes are no answer to "why not"; every build has several of them.
      if (entry->config.arch != 90 ||
          (bits & (kMisfitOp | kMisfitDType | kMisfitDimQk | kMisfitDimV)))
        continue;
      char reasons[512];
      lines += std::string("           ") + entry->id + ": " +
               why_not(*entry, p, device, reasons, sizeof(reasons)) + "\n";
    }
    if (lines.size() == before)
      lines += "           this build has none of this dtype and these head dims\n";
  }
  return lines;
}

}  // namespace fa
