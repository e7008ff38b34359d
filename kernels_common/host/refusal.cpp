// SPDX-License-Identifier: BSD-3-Clause
// Why does no row run a call, and which one would? Names the nearest rows and the line of the table
// that is missing.
#include "kernels_common/host/refusal.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels_common/host/error.h"

namespace fa {
namespace {

// Appends "; reason" to a buffer of fixed size.
class Reasons {
 public:
  Reasons(char* text, size_t capacity) : text_(text), capacity_(capacity) {
    if (capacity_ > 0) text_[0] = '\0';
  }
  template <class... Values>
  void add(const char* format, Values... values) {
    if (used_ > 0) put("%s", "; ");
    put(format, values...);
  }

 private:
  template <class... Values>
  void put(const char* format, Values... values) {
    if (used_ >= capacity_) return;
    const int n = std::snprintf(text_ + used_, capacity_ - used_, format, values...);
    if (n > 0) used_ += static_cast<size_t>(n);
  }
  char* text_;
  size_t capacity_, used_ = 0;
};

const char* loader_name(LoadKind kind) {
  return kind == LoadKind::kTma ? "tma" : kind == LoadKind::kCpAsync ? "cpasync" : "paged";
}

const char* short_op(Op op) {
  return op == Op::kForward ? "fwd" : op == Op::kBackward ? "bwd" : op_name(op);
}

// How far a row is from a call: a row of another op or dtype says little to the reader; among
// equals the one with the least padding comes first.
int distance(const KernelEntry& entry, const Problem& p, const DeviceInfo& device) {
  const uint32_t bits = misfits(entry, p, device);
  int weight = 400 * std::popcount(bits);
  if (bits & kMisfitOp) weight += 100000;
  if (bits & kMisfitDType) weight += 10000;
  if (bits & (kMisfitDevice | kMisfitForcedArch)) weight += 3000;
  if (bits & (kMisfitDimQk | kMisfitDimV)) weight += 1000;
  const KernelConfig& row = entry.config;
  return weight + (std::abs(row.head_dim_qk - p.dim_qk) + std::abs(row.head_dim_v - p.dim_v)) / 8;
}

std::vector<const KernelEntry*> by_nearness(const Problem& p, const DeviceInfo& device,
                                            Table table) {
  std::vector<const KernelEntry*> rows(table.begin(), table.end());
  std::stable_sort(rows.begin(), rows.end(), [&](const KernelEntry* a, const KernelEntry* b) {
    return distance(*a, p, device) < distance(*b, p, device);
  });
  return rows;
}

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
  if (dqk == 64) return FirstTile{128, 128, 12, 3, "stages_ds=2 dq=vector"};
  return FirstTile{64, 128, 12, 2, "stages_ds=2 dq=bulk"};
}

FirstTile first_forward_tile(bool hopper, bool e4m3, bool pack) {
  if (!hopper) return FirstTile{128, 64, 4, 1, ""};
  return FirstTile{128, 64, 12, 2, e4m3 ? "o_buf=1" : pack ? "pack=1" : ""};
}

bool any_score(const Problem& p) {
  return p.softcap > 0 || p.alibi() || p.dropout_p > 0 || p.descale_blocks();
}

// Split keys on Hopper. Rows that pack query heads do that, for 16-bit calls with the score `scale`
// and groups that a tile can hold.
bool hopper_splits(const Problem& p) {
  return p.op == Op::kForward && p.num_splits > 1 && p.force_arch == 90;
}
bool packed_splits(const Problem& p) {
  const int group = p.heads_k > 0 ? p.heads_q / p.heads_k : 1;
  return hopper_splits(p) && p.dtype != DType::kE4m3 && !any_score(p) && !p.batch_invariant &&
         group > 1 && group <= 128 && std::has_single_bit(static_cast<unsigned>(group));
}
bool unbuilt_splits(const Problem& p) { return hopper_splits(p) && !packed_splits(p); }

// Blocks of a Hopper backward do not go on to another tile.
bool hopper_reserve(const Problem& p) {
  return p.op == Op::kBackward && p.reserve_sms > 0 && p.force_arch == 90;
}

// tile_n of an e4m3 row is a multiple of this.
constexpr int kLeastE4m3Keys = 32;

// What has to be written before a row can serve the call.
std::string missing_parts(const Problem& p, Table table) {
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
  add(p.kv_dtype == DType::kE4m3 && p.dtype != DType::kE4m3, "16-bit queries on e4m3 keys");
  add((p.softcap > 0 || p.alibi()) &&
          none([](const KernelConfig& c) { return c.score == ScoreKind::kAny; }),
      "the score policy `any`");
  add(p.paged, "a paged loader");
  add(p.descale_blocks() && none([](const KernelConfig& c) { return takes_block_descales(c); }),
      "descales per block of rows");
  add(p.dropout_p > 0 && none([](const KernelConfig& c) { return c.dropout != 0; }), "dropout");
  add(unbuilt_splits(p), "splitting the keys");
  return parts;
}

// Options that no column of the table can state yet.
bool beyond_the_table(const Problem& p) {
  return (p.op == Op::kBackward && p.seq.batch_index_k) || !whole_key_blocks(p, kLeastE4m3Keys) ||
         (p.descale_blocks() && p.dim_v > 128) || unbuilt_splits(p) || hopper_reserve(p);
}

// The line of tools/variants.csv that would cover the call. Its tile is a starting point: that of
// the nearest row, if that is of the same family.
std::string needed_line(const Problem& p, const DeviceInfo& device, const KernelEntry* nearest) {
  const bool hopper = p.force_arch == 90 || (p.force_arch == 0 && device.hopper());
  const int arch = hopper ? 90 : 80;
  const bool e4m3 = p.dtype == DType::kE4m3, backward = p.op == Op::kBackward;
  const bool any = any_score(p), pack = packed_splits(p);
  const bool shares_keys = hopper && backward && (any || p.dim_qk > 128 || p.dim_v > 128);
  const bool can_be_96 = !e4m3 && !shares_keys;
  const int dqk = row_dim(p.dim_qk, can_be_96), dv = row_dim(p.dim_v, can_be_96);
  FirstTile tile = backward ? first_backward_tile(hopper, shares_keys, dqk)
                            : first_forward_tile(hopper, e4m3, pack);
  if (nearest != nullptr && nearest->config.arch == arch && nearest->config.op == p.op &&
      nearest->config.dtype == p.dtype && !(hopper && backward) && !pack) {
    const KernelConfig& row = nearest->config;
    tile = FirstTile{row.tile_m, row.tile_n, row.warps, row.stages, tile.knobs};
  }
  std::string knobs = tile.knobs;
  if (p.dropout_p > 0) knobs += knobs.empty() ? "dropout=1" : " dropout=1";
  while (e4m3 && tile.tile_n > kLeastE4m3Keys && !whole_key_blocks(p, tile.tile_n))
    tile.tile_n -= kLeastE4m3Keys;
  const char* dtype = dtype_name(p.dtype);
  const char* kv_dtype = dtype_name(p.kv_dtype);
  char dims[32];
  if (dqk == dv)
    std::snprintf(dims, sizeof(dims), "d%d", dqk);
  else
    std::snprintf(dims, sizeof(dims), "d%dx%d", dqk, dv);
  const LoadKind plain = hopper ? LoadKind::kTma : LoadKind::kCpAsync;
  char line[512];
  std::snprintf(
      line, sizeof(line),
      "sm%d_%s_%s_%s_band%s%s%s,%d,%s,%s,%s,%d,%d,band,%s,%s,%s,%d,%d,%d,%d,1,static,%s,%s,"
      "release,30,\"why\"",
      arch, short_op(p.op), dtype, dims, any ? "_any" : "", p.paged ? "_paged" : "",
      pack ? "_gqa" : "", arch, short_op(p.op), dtype, kv_dtype, dqk, dv, any ? "any" : "scale",
      loader_name(p.paged ? LoadKind::kPaged : plain), loader_name(plain), tile.tile_m, tile.tile_n,
      tile.warps, tile.stages, hopper && !e4m3 ? "overlap" : "serial", knobs.c_str());
  return line;
}

std::string held_rows(Table table) {
  if (table.empty()) return "no rows";
  bool ampere = false, hopper = false;
  for (const KernelEntry* entry : table) (entry->config.arch == 90 ? hopper : ampere) = true;
  std::string text = std::to_string(table.size()) + (table.size() == 1 ? " row" : " rows");
  if (ampere) text += " for 8.0 and newer (Ampere)";
  if (hopper) text += ampere ? " and for 9.x (Hopper)" : " for 9.x (Hopper)";
  return text;
}

fa_status refuse_device(const DeviceInfo& device, Table table) {
  const char* archs = device.hopper() ? "80;90a" : "80";
  if (device.capability < 80)
    return fail(FA_ERROR_DEVICE,
                "the GPU has %s; libfa needs 8.0 or newer (Ampere, Ada, Hopper, and later through "
                "PTX). Use the CPU backend "
                "or another GPU.",
                describe_device(device).c_str());
  return fail(FA_ERROR_DEVICE,
              "no kernel of this build runs on a GPU of %s: it holds %s. Rebuild with "
              "FA_ARCHS=\"%s\" pip install .",
              describe_device(device).c_str(), held_rows(table).c_str(), archs);
}

}  // namespace

const char* why_not(const KernelEntry& entry, const Problem& p, const DeviceInfo& device,
                    char* text, size_t capacity) {
  const KernelConfig& row = entry.config;
  const uint32_t bits = misfits(entry, p, device);
  Reasons reasons(text, capacity);
  if (bits & kMisfitOp)
    reasons.add("the row is a %s, the call a %s", op_name(row.op), op_name(p.op));
  if (bits & kMisfitDType)
    reasons.add("dtype %s (k and v %s) where the call has %s (%s)", dtype_name(row.dtype),
                dtype_name(row.kv_dtype), dtype_name(p.dtype), dtype_name(p.kv_dtype));
  if (bits & kMisfitForcedArch)
    reasons.add("architecture %d, but %d is forced", row.arch, p.force_arch);
  if (bits & kMisfitDevice)
    reasons.add("needs compute capability %s, the device has %d.%d",
                row.arch == 90 ? "9.x" : "8.0 or newer", device.capability / 10,
                device.capability % 10);
  if (bits & kMisfitDimQk) reasons.add("head dim of q and k %d < %d", row.head_dim_qk, p.dim_qk);
  if (bits & kMisfitDimV) reasons.add("head dim of v %d < %d", row.head_dim_v, p.dim_v);
  if (bits & kMisfitMask) reasons.add("the row has no mask, the call has one");
  if (bits & kMisfitSharedMemory)
    reasons.add("needs %d bytes of shared memory, a block of the device may have %d",
                entry.smem_bytes, device.smem_per_block);
  if (bits & kMisfitSoftcap) reasons.add("score is `scale`: no softcap");
  if (bits & kMisfitAlibi) reasons.add("score is `scale`: no ALiBi");
  if (bits & kMisfitPages)
    reasons.add(p.paged ? "no page table"
                        : "reads k and v through a page table, the call has none");
  if (bits & kMisfitDescale)
    reasons.add(row.dtype != DType::kE4m3        ? "no descales"
                : row.score == ScoreKind::kScale ? "score is `scale`: no descales per block of rows"
                                                 : "no descales per block of rows");
  if (bits & kMisfitDescaleBlock && p.seq.leftpad_k != nullptr)
    reasons.add("no descales per block of keys with left padding, which moves the blocks");
  else if (bits & kMisfitDescaleBlock)
    reasons.add("descales per %d keys, which must be a multiple of %d",
                p.k_descale.block % row.tile_n != 0 ? p.k_descale.block : p.v_descale.block,
                row.tile_n);
  if (bits & kMisfitValueKeys)
    reasons.add("transposes v itself: its keys must not be contiguous already");
  if (bits & kMisfitDropout) reasons.add("no dropout");
  if (bits & kMisfitPack) {
    if (p.batch_invariant)
      reasons.add("packs the query heads of a group, which depends on the length of a call");
    else if (row.arch == 90)
      reasons.add("packs the query heads of a group, a power of two from 2 to %d, the call has %d",
                  row.tile_m, p.heads_k > 0 ? p.heads_q / p.heads_k : 1);
    else
      reasons.add(
          "packs the query heads of a group: for at most %lld query positions, the call has %lld",
          static_cast<long long>(kMostPackedPositions), static_cast<long long>(query_positions(p)));
  }
  if (bits & kMisfitSplits) reasons.add("cannot split the keys (num_splits %d)", p.num_splits);
  if (bits & kMisfitBatchIndex)
    reasons.add(
        "a batch index of k and v: gradients of keys that several entries read are not "
        "summed");
  if (bits & kMisfitReserve)
    reasons.add("works on every multiprocessor (reserve_sms %d)", p.reserve_sms);
  if (bits & kMisfitStride) reasons.add("a stride of 2^40 bytes or more does not fit a tensor map");
  return text;
}

std::string describe_device(const DeviceInfo& device) {
  char text[96];
  std::snprintf(text, sizeof(text), "compute capability %d.%d%s", device.capability / 10,
                device.capability % 10, device.nominal ? " (nominal)" : "");
  return text;
}

std::string describe_call(const Problem& p) {
  char text[256];
  std::snprintf(text, sizeof(text), "%s %s, head dims %d and %d", op_name(p.op),
                dtype_name(p.dtype), p.dim_qk, p.dim_v);
  std::string call = text;
  if (p.kv_dtype != p.dtype) call += std::string(", k and v ") + dtype_name(p.kv_dtype);
  const BandArgs& b = p.band;
  if (b.right == 0 && b.left < 0)
    call += ", causal";
  else if (b.left >= 0 || b.right >= 0) {
    std::snprintf(text, sizeof(text), ", window (%d, %d)", b.left, b.right);
    call += text;
  }
  if (b.chunk > 0) call += ", chunk " + std::to_string(b.chunk);
  if (p.packed_q()) call += ", packed q";
  if (p.packed_k()) call += ", packed k";
  if (p.seq.used_q || p.seq.used_k) call += ", used lengths";
  if (p.seq.leftpad_k) call += ", left padding";
  if (p.seq.batch_index_k) call += ", batch index";
  if (p.softcap > 0) {
    std::snprintf(text, sizeof(text), ", softcap %g", p.softcap);
    call += text;
  }
  if (p.alibi()) call += ", ALiBi";
  if (p.sinks) call += ", sinks";
  if (p.paged) call += ", pages";
  if (p.descale()) call += p.descale_blocks() ? ", descales per block" : ", descales";
  if (p.dropout_p > 0) {
    std::snprintf(text, sizeof(text), ", dropout %g", p.dropout_p);
    call += text;
  }
  if (p.num_splits > 1) call += ", num_splits " + std::to_string(p.num_splits);
  return call;
}

std::string nearest_rows(const Problem& p, const DeviceInfo& device, Table table, size_t limit,
                         const char* separator) {
  std::string text;
  for (const KernelEntry* entry : by_nearness(p, device, table)) {
    if (limit-- == 0) break;
    char reasons[512];
    why_not(*entry, p, device, reasons, sizeof(reasons));
    if (!text.empty()) text += separator;
    text += std::string(entry->id) + ": " + (reasons[0] ? reasons : "can run");
  }
  return text;
}

fa_status refuse(const Problem& p, const DeviceInfo& device, Table table) {
  const auto serves = [&](const KernelEntry* e) {
    return (misfits(*e, p, device) & kMisfitDevice) == 0;
  };
  if (std::none_of(table.begin(), table.end(), serves)) return refuse_device(device, table);
  const auto rows = by_nearness(p, device, table);
  const std::string parts = missing_parts(p, table);
  const std::string remedy = beyond_the_table(p) ? "No column of tools/variants.csv states that."
                                                 : "The row needed in tools/variants.csv: " +
                                                       needed_line(p, device, rows.front());
  return fail(FA_ERROR_UNSUPPORTED,
              "fa: not supported: %s on %s. Nearest of %zu rows: %s. %s%s%s%s",
              describe_call(p).c_str(), describe_device(device).c_str(), table.size(),
              nearest_rows(p, device, table, 3, " | ").c_str(),
              parts.empty() ? "" : "Not built yet: ", parts.c_str(), parts.empty() ? "" : ". ",
              remedy.c_str());
}

}  // namespace fa
