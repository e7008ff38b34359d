// SPDX-License-Identifier: BSD-3-Clause
// Why does no row run a call? Names the nearest rows, and each one's reasons.
#include "kernels_common/host/refusal.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels_common/host/advice.h"
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
  return fail(FA_ERROR_UNSUPPORTED, "fa: not supported: %s on %s. Nearest of %zu rows: %s. %s",
              describe_call(p).c_str(), describe_device(device).c_str(), table.size(),
              nearest_rows(p, device, table, 3, " | ").c_str(),
              advice(p, device, table, *by_nearness(p, device, table).front()).c_str());
}

}  // namespace fa
