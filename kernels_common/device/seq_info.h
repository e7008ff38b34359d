// SPDX-License-Identifier: BSD-3-Clause
// How long is the sequence of a tile and where do its rows lie? All global reads of lengths happen
// here, once per tile.
#pragma once

#include "kernels_common/device/tile_scheduler.h"

namespace fa {

struct SeqInfo {
  int index;             // of the sequence in the call
  int q_batch, k_batch;  // index into the batch stride (0 when packed)
  int q_begin;           // first row of the sequence in q, out and lse
  int q_slot;  // rows of q that belong to the slot of this sequence; [q_len, q_slot) are written as
               // empty rows
  int q_len;   // rows that take part
  int k_begin;  // first real key row (left padding skipped)
  int k_len;    // real keys
  int m_first;  // first row of this tile, counted from q_begin; >= q_slot: nothing to do
};

// Largest b in [0, batch] with packed_offset(cu[b] * rows, b) <= tile, where a position has `rows`
// rows. Binary search: log2(B) reads that stay in cache.
FA_HOST_DEVICE int find_sequence(const int32_t* cu, int batch, int tile_m, int tile, int rows = 1) {
  int lo = 0, hi = batch;
  while (lo < hi) {
    const int mid = (lo + hi + 1) >> 1;
    if (packed_offset(cu[mid] * rows, mid, tile_m) <= tile)
      lo = mid;
    else
      hi = mid - 1;
  }
  return lo;
}

// Sequence b, m_first left 0. "Sequence" B of a packed q are the rows that belong to none: q_len =
// k_len = 0, all empty.
FA_HOST_DEVICE SeqInfo sequence_info(const SeqArgs& args, int b) {
  SeqInfo s{};
  s.index = b;
  if (args.cu_q != nullptr) {
    s.q_begin = args.cu_q[b];
    s.q_slot = (b == args.batch ? args.total_q : args.cu_q[b + 1]) - s.q_begin;
    if (b == args.batch) return s;
  } else {
    s.q_batch = b;
    s.q_slot = args.seqlen_q;
  }
  s.q_len = args.used_q == nullptr ? s.q_slot : clamp_to(args.used_q[b], 0, s.q_slot);
  int slot_k = args.seqlen_k;
  if (args.cu_k != nullptr) {
    s.k_begin = args.cu_k[b];
    slot_k = args.cu_k[b + 1] - s.k_begin;
  } else {
    s.k_batch = args.batch_index_k == nullptr ? b : args.batch_index_k[b];
  }
  const int used = args.used_k == nullptr ? slot_k : clamp_to(args.used_k[b], 0, slot_k);
  const int pad = args.leftpad_k == nullptr ? 0 : max_of(args.leftpad_k[b], 0);
  s.k_len = max_of(used - pad, 0);
  s.k_begin += pad;
  return s;
}

// `m` and `batch` come from tile_coord (packed q: batch is ignored, m runs over the padded list of
// tiles). `rows`: those of a position; m_first counts them, everything else counts positions.
FA_HOST_DEVICE SeqInfo seq_info(const SeqArgs& args, int m, int batch, int tile_m, int rows = 1) {
  if (args.cu_q == nullptr) {
    SeqInfo s = sequence_info(args, batch);
    s.m_first = m * tile_m;
    return s;
  }
  const int b = find_sequence(args.cu_q, args.batch, tile_m, m, rows);
  SeqInfo s = sequence_info(args, b);
  s.m_first = (m - packed_offset(s.q_begin * rows, b, tile_m)) * tile_m;
  return s;
}

// Row of packed query heads: a position, and a head counted from the group's first.
struct PackedRow {
  int position, head;
};
FA_HOST_DEVICE PackedRow packed_row(int row, int group) {
  const int position = row / group;
  return PackedRow{position, row - position * group};
}

// The same for a tile of keys: which query rows can see it, and which of its rows are real keys.
struct KeyTileInfo {
  int batch;             // of the slopes and of dropout
  int q_batch, k_batch;  // index into the batch stride (0 when packed)
  int q_begin, q_len;    // rows of q, out, dout, lse that take part
  int q_tile;            // workspace tile of the sequence's first rows, inside its head
  int k_begin, k_len;    // first real key row (left padding skipped), real keys
  int n_first;           // first key of this tile, counted from k_begin; >= k_len: nothing to do
};

// `n` and `batch` come from key_tile_coord (packed k: batch is ignored, n runs over the padded list
// of tiles). Tiles start at the first real key; rows of k that are no key have no tile.
FA_HOST_DEVICE KeyTileInfo key_tile_info(const SeqArgs& args, int n, int batch, int tile_m,
                                         int tile_n) {
  KeyTileInfo t{};
  int b = batch, slot_k = args.seqlen_k;
  if (args.cu_k != nullptr) {
    b = find_sequence(args.cu_k, args.batch, tile_n, n);
    if (b == args.batch) return t;  // rows of no sequence: n_first = k_len = 0
    t.k_begin = args.cu_k[b];
    slot_k = args.cu_k[b + 1] - t.k_begin;
    t.n_first = (n - packed_offset(t.k_begin, b, tile_n)) * tile_n;
  } else {
    t.k_batch = b;
    t.n_first = n * tile_n;
  }
  t.batch = b;
  const int used = args.used_k == nullptr ? slot_k : clamp_to(args.used_k[b], 0, slot_k);
  const int pad = args.leftpad_k == nullptr ? 0 : max_of(args.leftpad_k[b], 0);
  t.k_len = max_of(used - pad, 0);
  t.k_begin += pad;
  int slot_q = args.seqlen_q;
  if (args.cu_q != nullptr) {
    t.q_begin = args.cu_q[b];
    slot_q = args.cu_q[b + 1] - t.q_begin;
    t.q_tile = packed_offset(t.q_begin, b, tile_m);
  } else {
    t.q_batch = b;
  }
  t.q_len = args.used_q == nullptr ? slot_q : clamp_to(args.used_q[b], 0, slot_q);
  return t;
}

// Number of the workspace tile of query block m of a sequence; rows and sums of a tile lie together
// (launch_args.h, BwdWorkspace). Packed: q_batch is 0.
FA_HOST_DEVICE int64_t workspace_tile(const BwdArgs& args, const KeyTileInfo& t, int head_q,
                                      int m) {
  return int64_t(t.q_batch * args.heads_q + head_q) * args.rows.tiles_m + t.q_tile + m;
}

}  // namespace fa
