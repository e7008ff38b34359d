// SPDX-License-Identifier: BSD-3-Clause
// What would make a refused call run? Whatever is named was asked first whether it does.
#include "kernels_common/host/advice.h"

#include <algorithm>
#include <bit>
#include <cstdio>

namespace fa {
namespace {

const char* loader_name(LoadKind kind) { return kind == LoadKind::kTma ? "tma" : "cpasync"; }

const char* short_op(Op op) { return op == Op::kForward ? "fwd" : "bwd"; }

// The head dim of the row that would be needed. Sizes in use are multiples of 64, and 96 where the
// kernels can have it: e4m3 panels are 64 columns wide, and Hopper backward rows that share their
// keys split a head dim in halves of whole panels.
int row_dim(int dim, bool can_be_96) {
  return can_be_96 && dim > 64 && dim <= 96 ? 96 : (dim + 63) / 64 * 64;
}

// What a family of kernels starts from, in the columns of the table; its config.h says why.
struct FirstTile {
  int tile_m, tile_n, warps, stages;
  const char* knobs;
};

FirstTile first_backward_tile(bool hopper, bool shares_keys, int dqk) {
  if (!hopper) return FirstTile{64, 64, 8, 1, "dq=atomic dq_turns=8"};
  if (shares_keys) return FirstTile{64, 64, 12, 2, "stages_ds=2 dq=vector"};
  if (dqk == 64) return FirstTile{128, 128, 12, 3, "stages_ds=2 dq=vector dq_turns=2"};
  return FirstTile{64, 128, 12, 2,
                   dqk == 96 ? "stages_ds=2 dq=bulk" : "stages_ds=2 dq=bulk dq_turns=2"};
}

// An O that is wider than Q cannot leave through Q's buffer.
FirstTile first_forward_tile(bool hopper, bool own_output, bool pack) {
  if (!hopper) return FirstTile{128, 64, 4, 1, ""};
  const char* knobs = own_output ? (pack ? "o_buf=1 pack=1" : "o_buf=1") : pack ? "pack=1" : "";
  return FirstTile{128, 64, 12, 2, knobs};
}

bool any_score(const Problem& p) {
  return p.softcap > 0 || p.alibi() || p.dropout_p > 0 || p.descale_blocks();
}

bool e4m3(const Problem& p) { return p.dtype == DType::kE4m3; }

// Rows that would be for Hopper. No others read e4m3.
bool for_hopper(const Problem& p, const DeviceInfo& device) {
  return e4m3(p) || p.force_arch == 90 || (p.force_arch == 0 && device.hopper());
}

bool splits(const Problem& p) { return p.op == Op::kForward && p.num_splits > 1; }

// On Hopper, rows that pack query heads split the keys: for 16-bit calls with the score `scale` and
// groups that a tile can hold.
bool packed_splits(const Problem& p) {
  const int group = p.heads_k > 0 ? p.heads_q / p.heads_k : 1;
  return splits(p) && !e4m3(p) && !any_score(p) && !p.batch_invariant && group > 1 &&
         group <= 128 && std::has_single_bit(static_cast<unsigned>(group));
}

// What a row of the call's family would be.
struct Candidate {
  KernelConfig config{};
  std::string knobs;
};

// tile_n of an e4m3 row is a multiple of this.
constexpr int kLeastE4m3Keys = 32;

// The head dims that the families' config.h allow.
void set_dims(const Problem& p, bool hopper, bool shares_keys, KernelConfig* row) {
  const bool can_be_96 = !e4m3(p) && !shares_keys;
  row->head_dim_qk = row_dim(p.dim_qk, can_be_96);
  row->head_dim_v = row_dim(p.dim_v, can_be_96);
  if (p.op == Op::kBackward && !hopper)
    row->head_dim_qk = row->head_dim_v = std::max(row->head_dim_qk, row->head_dim_v);
}

// A row for the call, as far as its family of kernels goes: options that no row of the family has
// are left out, so that misfits() finds them. Its tile is a starting point: that of the nearest
// row, if that is of the same family.
Candidate candidate(const Problem& p, const DeviceInfo& device, const KernelEntry& nearest) {
  const bool hopper = for_hopper(p, device), backward = p.op == Op::kBackward;
  const bool any = any_score(p), pack = hopper && packed_splits(p);
  const bool shares_keys = hopper && backward && (any || p.dim_qk > 128 || p.dim_v > 128);
  Candidate c;
  KernelConfig& row = c.config;
  row.arch = hopper ? 90 : 80;
  row.op = p.op;
  row.dtype = row.kv_dtype = p.dtype;
  set_dims(p, hopper, shares_keys, &row);
  const bool own_output = e4m3(p) || row.head_dim_v > row.head_dim_qk;
  FirstTile tile = backward ? first_backward_tile(hopper, shares_keys, row.head_dim_qk)
                            : first_forward_tile(hopper, own_output, pack);
  const KernelConfig& near = nearest.config;
  if (near.arch == row.arch && near.op == p.op && near.dtype == p.dtype && !(hopper && backward) &&
      !pack && !near.pack)
    tile = FirstTile{near.tile_m, near.tile_n, near.warps, near.stages, tile.knobs};
  while (e4m3(p) && tile.tile_n > kLeastE4m3Keys && !whole_key_blocks(p, tile.tile_n))
    tile.tile_n -= kLeastE4m3Keys;
  row.mask = MaskKind::kBand;
  row.score = any ? ScoreKind::kAny : ScoreKind::kScale;
  row.kv = row.q = hopper ? LoadKind::kTma : LoadKind::kCpAsync;
  row.tile_m = tile.tile_m, row.tile_n = tile.tile_n, row.warps = tile.warps;
  row.stages = tile.stages;
  row.pack = pack;
  row.sched = hopper && backward && !shares_keys && row.head_dim_qk < 128 ? SchedKind::kDynamic
                                                                          : SchedKind::kStatic;
  row.dropout = p.dropout_p > 0 && !hopper;
  c.knobs = tile.knobs;
  if (row.dropout) c.knobs += c.knobs.empty() ? "dropout=1" : " dropout=1";
  return c;
}

bool holds(Table table, const std::string& id) {
  return std::any_of(table.begin(), table.end(), [&](const KernelEntry* e) { return id == e->id; });
}

// The line of tools/variants.csv that the candidate is.
std::string line_of(const Candidate& c, Table table) {
  const KernelConfig& row = c.config;
  const char* dtype = dtype_name(row.dtype);
  std::string id = "sm";
  id += std::to_string(row.arch) + "_" + short_op(row.op) + "_" + dtype + "_d" +
        std::to_string(row.head_dim_qk);
  if (row.head_dim_v != row.head_dim_qk) id.append("x").append(std::to_string(row.head_dim_v));
  id += row.score == ScoreKind::kAny ? "_band_any" : "_band";
  if (row.pack) id += "_gqa";
  if (holds(table, id)) id += row.pack ? "2" : "_b";
  char line[512];
  std::snprintf(line, sizeof(line),
                "%s,%d,%s,%s,%s,%d,%d,band,%s,%s,%s,%d,%d,%d,%d,1,%s,%s,%s,release,30,\"why\"",
                id.c_str(), row.arch, short_op(row.op), dtype, dtype, row.head_dim_qk,
                row.head_dim_v, row.score == ScoreKind::kAny ? "any" : "scale", loader_name(row.kv),
                loader_name(row.q), row.tile_m, row.tile_n, row.warps, row.stages,
                row.sched == SchedKind::kDynamic ? "dynamic" : "static",
                row.arch == 90 && row.dtype != DType::kE4m3 ? "overlap" : "serial",
                c.knobs.c_str());
  return line;
}

// What has to be written, or built, before any row can serve the call.
std::string missing_parts(const Problem& p, const DeviceInfo& device, Table table) {
  std::string parts;
  const auto add = [&parts](bool missing, const char* name) {
    if (missing) parts += std::string(parts.empty() ? "" : ", ") + name;
  };
  // Whether no row of the call's operation has a property: else its rows' own reasons say more.
  const auto none = [&](auto has) {
    return std::none_of(table.begin(), table.end(), [&](const KernelEntry* e) {
      return e->config.op == p.op && has(e->config);
    });
  };
  add(none([](const KernelConfig&) { return true; }),
      p.op == Op::kBackward ? "a backward kernel" : "a kernel for this operation");
  add(p.kv_dtype == DType::kE4m3 && !e4m3(p), "16-bit queries on e4m3 keys");
  add(e4m3(p) && (p.force_arch == 80 || !device.hopper()), "e4m3 for other GPUs than Hopper");
  add((p.softcap > 0 || p.alibi()) &&
          none([](const KernelConfig& c) { return c.score == ScoreKind::kAny; }),
      "the score policy `any`");
  add(p.paged, "a paged loader");
  add(p.descale_blocks() && none([](const KernelConfig& c) { return takes_block_descales(c); }),
      "descales per block of rows");
  add(p.dropout_p > 0 && none([](const KernelConfig& c) { return c.dropout != 0; }), "dropout");
  add(splits(p) && for_hopper(p, device) && !packed_splits(p), "splitting the keys");
  return parts;
}

// Options that say how a call runs and not what it computes; the first set of them without which
// the table has a row for it, in the words of fa.h and of the Python package.
std::string runs_without(const Problem& p, const DeviceInfo& device, Table table) {
  const struct {
    bool arch, splits, reserve;
    const char* text;
  } sets[] = {
      {false, true, false, "num_splits 0"},
      {true, false, false, "force_arch 0 (fa.backend(\"auto\"))"},
      {false, false, true, "reserve_sms 0"},
      {true, true, false, "force_arch 0 (fa.backend(\"auto\")) and num_splits 0"},
      {true, false, true, "force_arch 0 (fa.backend(\"auto\")) and reserve_sms 0"},
  };
  for (const auto& set : sets) {
    Problem without = p;
    if (set.arch) without.force_arch = 0;
    if (set.splits) without.num_splits = 0;
    if (set.reserve) without.reserve_sms = 0;
    const auto runs = [&](const KernelEntry* e) { return misfits(*e, without, device) == 0; };
    if (std::any_of(table.begin(), table.end(), runs))
      return std::string("It runs with ") + set.text + ".";
  }
  return "";
}

}  // namespace

std::string advice(const Problem& p, const DeviceInfo& device, Table table,
                   const KernelEntry& nearest) {
  const std::string parts = missing_parts(p, device, table);
  std::string text = parts.empty() ? "" : "Not built yet: " + parts + ". ";
  const std::string without = runs_without(p, device, table);
  if (!without.empty()) text += without + " ";
  if (misfits(nearest, p, device) == kMisfitSharedMemory)
    return text + "A row of smaller tiles is needed in tools/variants.csv.";
  const Candidate c = candidate(p, device, nearest);
  const KernelEntry entry{"", c.config, c.config.warps * 32, 0, nullptr, nullptr};
  if (misfits(entry, p, device) == 0)
    return text + "The row needed in tools/variants.csv: " + line_of(c, table);
  char reasons[512];
  return text + "No line of tools/variants.csv would serve it: " +
         why_not(entry, p, device, reasons, sizeof(reasons)) + ".";
}

}  // namespace fa
