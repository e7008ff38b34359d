// SPDX-License-Identifier: BSD-3-Clause
// What will run in a backward? Tiles of keys for the main kernel, of query rows for the two around
// it, and the workspace between them.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <limits>

#include "kernels_common/device/tile_scheduler.h"
#include "kernels_common/host/error.h"
#include "kernels_common/host/plan.h"

namespace fa {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
// Heads of a section in turns, at least: key tiles of a head that run side by side add to its rows
// one behind the other, and a second head makes them fewer. More than fit into L2 cost more than
// they save (causal, 16384 tokens, 16 heads, H200, 2026-11-30: 2 heads 392 TFLOP/s, 4 359, 16 308).
constexpr int64_t kOrderedHeads = 2;

// Whether the key tiles of a section of heads clear the dQ sums of the next one (clear_sums.h). The
// sums of a section lie together then: query and key heads are numbered alike.
bool clears_ahead(const KernelEntry& row, const Problem& p) {
  return row.config.arch == 90 && p.packed_q() == p.packed_k() &&
         (!p.deterministic || row.config.sched == SchedKind::kDynamic);
}

// Key heads walked together: Q, dO and the dQ sums of their groups stay in L2 while every key tile
// passes over them, and the zeros of the next ones' sums, where these are cleared meanwhile.
int section_heads(const KernelEntry& row, const Problem& p, const DeviceInfo& device, int heads) {
  // The last section adds in another order (query_walk.h): one section is the last whatever the
  // batch is.
  if (p.deterministic && p.batch_invariant && row.config.arch == 90) return heads;
  const int64_t rows = std::max<int64_t>(1, p.packed_q() ? p.seq.total_q : p.seq.seqlen_q);
  const int64_t sums =
      4 * row.config.head_dim_qk * (clears_ahead(row, p) && !p.deterministic ? 2 : 1);
  const int64_t bytes = rows * (p.heads_q / p.heads_k) * (2 * (p.dim_qk + p.dim_v) + sums);
  const int64_t least = p.deterministic && row.config.arch == 90 ? kOrderedHeads : 1;
  return static_cast<int>(std::min<int64_t>(std::max(section_bytes(device) / bytes, least), heads));
}

// Sections of heads, if the main kernel clears the sums of all but the first; else 0.
int cleared_sections(const KernelEntry& row, const Problem& p, const TileOrder& order) {
  if (!clears_ahead(row, p) || p.empty() || order.num_tiles == 0) return 0;
  const int sections = (order.heads + order.section - 1) / order.section;
  // A dynamic row counts the tiles that its blocks have taken in the place of the first one.
  return sections > 1 || row.config.sched == SchedKind::kDynamic ? sections : 0;
}

// Hands out the workspace in multiples of 256 bytes.
class Offsets {
 public:
  size_t take(int64_t bytes) {
    const size_t at = next_;
    next_ += (static_cast<size_t>(bytes) + 255) / 256 * 256;
    return at;
  }
  size_t total() const { return next_; }

 private:
  size_t next_ = 0;
};

// A dense copy of dout in 16 bits.
struct RoundedDout {
  TensorArg tensor;  // without its address
  int64_t bytes;
};

RoundedDout rounded_dout(const Problem& p) {
  const int64_t rows = p.packed_q() ? p.seq.total_q : p.seq.seqlen_q;
  const int64_t row = int64_t{p.heads_q} * p.dim_v;
  return RoundedDout{TensorArg{nullptr, p.packed_q() ? 0 : rows * row, row, p.dim_v},
                     2 * rows * row * (p.packed_q() ? 1 : p.seq.batch)};
}

void plan_workspace(const Problem& p, Plan* plan) {
  const KernelConfig& row = plan->main->config;
  const int64_t tiles = plan->rows.num_tiles, rows = tiles * row.tile_m;
  Offsets offsets;
  BackwardWorkspace& w = plan->work;
  w.dq_sum = offsets.take(rows * row.head_dim_qk * 4);
  w.lse_log2 = offsets.take(rows * 4);
  w.delta = offsets.take(rows * 4);
  w.cleared = offsets.take(int64_t{plan->cleared_sections} * 4);
  w.turns = offsets.take(p.deterministic ? tiles * row.dq_turns * 4 : 0);
  w.dsinks = offsets.take(p.grad.dsinks != nullptr ? tiles * 4 : 0);
  w.dout = offsets.take(p.grad.dout_dtype == DType::kFp32 ? rounded_dout(p).bytes : 0);
  plan->workspace_bytes = offsets.total();
}

}  // namespace

fa_status plan_backward(const Problem& p, const DeviceInfo& device, Plan* plan) {
  const KernelEntry& row = *plan->main;
  const int64_t tiles_m = row_tiles(row, p), tiles_n = key_tiles(row, p);
  const int64_t heads_q = p.packed_q() ? p.heads_q : int64_t{p.heads_q} * p.seq.batch;
  const int64_t heads_k = p.packed_k() ? p.heads_k : int64_t{p.heads_k} * p.seq.batch;
  const int64_t rows_k = p.packed_k() ? p.seq.total_k : int64_t{p.seq.seqlen_k} * p.seq.batch;
  const bool no_key = heads_k == 0 || rows_k == 0;
  if (heads_q > kInt32Max || heads_q * tiles_m + p.heads_q + rows_k / kClearRows >= kInt32Max ||
      heads_k * tiles_n * row.config.cluster >= kInt32Max)
    return fail(FA_ERROR_UNSUPPORTED,
                "fa: not supported: %" PRId64 " row tiles of each of %" PRId64
                " heads (batch * heads_q) and %" PRId64 " key tiles of each of %" PRId64
                " heads (batch * heads_k) exceed 2^31 - 1 tiles in one call. Split the call along "
                "the batch.",
                tiles_m, heads_q, tiles_n, heads_k);
  const auto num_rows = static_cast<int32_t>(p.empty() ? 0 : tiles_m * heads_q);
  const auto num_keys = static_cast<int32_t>(no_key ? 0 : tiles_n * heads_k);
  const int heads = static_cast<int>(heads_k);
  plan->num_splits = 1;
  plan->rows = TileOrder{static_cast<int32_t>(p.empty() ? 0 : tiles_m),
                         static_cast<int32_t>(heads_q), 1, num_rows};
  plan->order = TileOrder{static_cast<int32_t>(tiles_n), heads,
                          no_key ? 1 : section_heads(row, p, device, heads), num_keys};
  plan->cleared_sections = cleared_sections(row, p, plan->order);
  // The keys of a tile stay in a block; the next block starts wherever one ends. Rows whose blocks
  // go on to another tile: all of Ampere, where multiprocessors are reserved, and dynamic ones.
  const bool stays =
      row.config.sched == SchedKind::kDynamic ? plan->cleared_sections > 0 : p.reserve_sms > 0;
  plan->grid = stays ? std::min(num_keys, device.sm_count * blocks_per_sm(row, device)) : num_keys;
  plan_workspace(p, plan);
  return FA_OK;
}

LaunchArgs bind_backward(const Plan& plan, const Problem& p, void* workspace) {
  LaunchArgs args{};
  args.bwd = BwdArgs{};
  BwdArgs& b = args.bwd;
  b.q = p.q;
  b.k = p.k;
  b.v = p.v;
  b.out = p.out;
  b.dout = b.dout_given = p.grad.dout;
  b.dq = p.grad.dq;
  b.dk = p.grad.dk;
  b.dv = p.grad.dv;
  // Tensor maps need an address, also of a tensor without elements.
  void* some = p.k.data != nullptr ? p.k.data : p.q.data;
  for (TensorArg* t : {&b.q, &b.k, &b.v, &b.out, &b.dout, &b.dout_given, &b.dq, &b.dk, &b.dv})
    if (t->data == nullptr) t->data = some;
  b.lse = p.lse;
  b.dlse = p.grad.dlse;
  b.lse_stride_batch = b.dlse_stride_batch = p.lse_stride_batch;
  b.lse_stride_head = b.dlse_stride_head = p.lse_stride_head;
  b.seq = p.seq;
  b.band = p.band;
  b.rows = plan.rows;
  b.order = plan.order;
  char* base = static_cast<char*>(workspace);
  if (p.grad.dout_dtype == DType::kFp32) {
    b.dout = rounded_dout(p).tensor;
    b.dout.data = base + plan.work.dout;
  }
  const auto floats = [base](size_t offset) { return reinterpret_cast<float*>(base + offset); };
  b.work = BwdWorkspace{
      .lse_log2 = floats(plan.work.lse_log2),
      .delta = floats(plan.work.delta),
      .dq_sum = floats(plan.work.dq_sum),
      .cleared = plan.cleared_sections > 0 ? reinterpret_cast<int32_t*>(base + plan.work.cleared)
                                           : nullptr,
      .turns = p.deterministic ? reinterpret_cast<int32_t*>(base + plan.work.turns) : nullptr,
      .dsinks = p.grad.dsinks ? floats(plan.work.dsinks) : nullptr};
  b.heads_q = p.heads_q;
  b.heads_k = p.heads_k;
  b.group = p.heads_k > 0 ? p.heads_q / p.heads_k : 1;
  b.dim_qk = p.dim_qk;
  b.dim_v = p.dim_v;
  const auto fp32 = [](DType dtype) { return dtype == DType::kFp32 ? 1 : 0; };
  b.out_fp32 = fp32(p.out_dtype);
  b.dout_fp32 = fp32(p.grad.dout_dtype);
  b.dq_fp32 = fp32(p.grad.dq_dtype);
  b.dk_fp32 = fp32(p.grad.dk_dtype);
  b.dv_fp32 = fp32(p.grad.dv_dtype);
  b.accumulate = p.grad.accumulate ? 1 : 0;
  b.deterministic = p.deterministic ? 1 : 0;
  b.scale = p.scale;
  b.scale_log2 = softmax_factor(p);
  b.score = score_args(p);
  b.dropout = dropout_args(p);
  b.sinks = p.sinks;
  b.sinks_stride = p.sinks_stride;
  b.sinks_dtype = p.sinks_dtype;
  b.dsinks = p.grad.dsinks;
  args.grid = plan.grid;
  return args;
}

std::string describe_backward(const Plan& plan, const Problem& p) {
  const KernelConfig& row = plan.main->config;
  const char* first = row.arch == 90    ? "last keys first, in the last section first keys,"
                      : p.deterministic ? "last keys first,"
                                        : "first keys first,";
  char text[512];
  std::snprintf(text, sizeof(text),
                "tiles      %d x %d, %d key tiles x %d heads = %d; %d row tiles x %d heads = %d\n"
                "grid       %d blocks, %s\n"
                "tile order %s sections of %d heads\n"
                "dQ sums    %s\n"
                "workspace  %zu bytes, of which dQ sums in fp32 %zu\n",
                row.tile_m, row.tile_n, plan.order.tiles_m, plan.order.heads, plan.order.num_tiles,
                plan.rows.tiles_m, plan.rows.heads, plan.rows.num_tiles, plan.grid * row.cluster,
                plan.grid < plan.order.num_tiles ? "each works through several tiles"
                : row.cluster == 2               ? "a cluster of two per tile"
                                                 : "one per tile",
                first, plan.order.section,
                p.deterministic ? "descending (deterministic)" : "as the blocks come",
                plan.workspace_bytes, plan.work.lse_log2 - plan.work.dq_sum);
  return text;
}

}  // namespace fa
