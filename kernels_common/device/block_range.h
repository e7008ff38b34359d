// SPDX-License-Identifier: BSD-3-Clause
// Which key blocks does a query tile see, which of them need masking, and the transpose. Pure; host
// and device.
#pragma once

#include "kernels_common/device/launch_args.h"

namespace fa {

FA_HOST_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
FA_HOST_DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }
FA_HOST_DEVICE constexpr int clamp_to(int x, int lo, int hi) { return min_of(max_of(x, lo), hi); }
FA_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }  // a >= 0
FA_HOST_DEVICE constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

inline constexpr int kUnlimited = 1 << 30;

// Keys visible to query row i of one sequence are [first_key(i), last_key(i)] cut to [0, k_len).
// Both grow with i.
struct Band {
  int left, right;  // kUnlimited: no bound
  int chunk;        // 0: none
  int shift;  // position of row 0 on the key axis: k_len - q_len, or 0 for a top-left diagonal

  FA_HOST_DEVICE constexpr int first_key(int i) const {
    const int pos = i + shift;
    int first = left >= kUnlimited ? -kUnlimited : pos - left;
    if (chunk > 0) first = max_of(first, floor_div(pos, chunk) * chunk);
    return first;
  }
  FA_HOST_DEVICE constexpr int last_key(int i) const {
    const int pos = i + shift;
    int last = right >= kUnlimited ? kUnlimited : pos + right;
    if (chunk > 0) last = min_of(last, floor_div(pos, chunk) * chunk + chunk - 1);
    return last;
  }

  // The transpose: query rows that see key j are [first_row(j), last_row(j)] cut to [0, q_len).
  // Both grow with j.
  FA_HOST_DEVICE constexpr int first_row(int j) const {
    if (right >= kUnlimited && chunk == 0) return -kUnlimited;
    int pos = right >= kUnlimited ? -kUnlimited : j - right;
    if (chunk > 0) pos = max_of(pos, floor_div(j, chunk) * chunk);
    return pos - shift;
  }
  FA_HOST_DEVICE constexpr int last_row(int j) const {
    if (left >= kUnlimited && chunk == 0) return kUnlimited;
    int pos = left >= kUnlimited ? kUnlimited : j + left;
    if (chunk > 0) pos = min_of(pos, floor_div(j, chunk) * chunk + chunk - 1);
    return pos - shift;
  }
};

FA_HOST_DEVICE constexpr Band make_band(const BandArgs& args, int q_len, int k_len) {
  return Band{args.left < 0 ? kUnlimited : args.left, args.right < 0 ? kUnlimited : args.right,
              args.chunk, args.top_left ? 0 : k_len - q_len};
}

// Blocks of tile_n keys; all bounds are block indices, ends exclusive. Blocks in [full_begin,
// full_end) are visible to every row of the tile and need no mask. [any_lo, any_hi) are the keys
// visible to at least one row.
struct KeyRange {
  int begin, full_begin, full_end, end;
  int any_lo, any_hi;
};

// Blocks of part `part` of `parts` equal ones: begin == end where there are fewer blocks than
// parts. Depends on the tile's own range alone.
FA_HOST_DEVICE constexpr KeyRange part_of(const KeyRange& range, int part, int parts) {
  const int each = (range.end - range.begin) / parts;
  const int longer = (range.end - range.begin) % parts;  // the first ones have one block more
  KeyRange r = range;
  r.begin = range.begin + part * each + min_of(part, longer);
  r.end = r.begin + each + (part < longer ? 1 : 0);
  r.full_begin = clamp_to(range.full_begin, r.begin, r.end);
  r.full_end = clamp_to(range.full_end, r.full_begin, r.end);
  return r;
}

// Rows [q_first, q_last] of one sequence, q_first <= q_last < q_len.
FA_HOST_DEVICE constexpr KeyRange key_range(const Band& band, int q_first, int q_last, int k_len,
                                            int tile_n) {
  const int any_lo = max_of(0, band.first_key(q_first));
  const int any_hi =
      min_of(k_len, band.last_key(q_last) == kUnlimited ? k_len : band.last_key(q_last) + 1);
  if (any_lo >= any_hi) return KeyRange{0, 0, 0, 0, 0, 0};
  const int all_lo = max_of(0, band.first_key(q_last));
  const int all_hi =
      min_of(k_len, band.last_key(q_first) == kUnlimited ? k_len : band.last_key(q_first) + 1);
  const int begin = any_lo / tile_n, end = ceil_div(any_hi, tile_n);
  const int full_begin = clamp_to(ceil_div(all_lo, tile_n), begin, end);
  return KeyRange{begin, full_begin, clamp_to(max_of(all_hi, 0) / tile_n, full_begin, end),
                  end,   any_lo,     any_hi};
}

// The blocks of `whole`, the range of a tile that is not empty, which rows [q_first, q_last] of the
// tile see. At least one, which then is masked: a row without a key has a result too.
FA_HOST_DEVICE constexpr KeyRange range_within(const KeyRange& whole, const Band& band, int q_first,
                                               int q_last, int k_len, int tile_n) {
  KeyRange r = key_range(band, q_first, q_last, k_len, tile_n);
  r.end = clamp_to(r.end, whole.begin + 1, whole.end);
  r.begin = clamp_to(r.begin, whole.begin, r.end - 1);
  r.full_begin = clamp_to(r.full_begin, r.begin, r.end);
  r.full_end = clamp_to(r.full_end, r.full_begin, r.end);
  return r;
}

// Blocks of tile_m query rows that see a tile of keys, as KeyRange. Blocks in [full_begin,
// full_end) see every key of the tile and need no mask: none does where the tile reaches behind
// k_len. [any_lo, any_hi) are the rows that see at least one of its keys.
struct QueryRange {
  int begin, full_begin, full_end, end;
  int any_lo, any_hi;
};

// Keys [k_first, k_first + tile_n) of one sequence, k_first < k_len.
FA_HOST_DEVICE constexpr QueryRange query_range(const Band& band, int k_first, int tile_n,
                                                int q_len, int k_len, int tile_m) {
  const int k_last = min_of(k_first + tile_n, k_len) - 1;
  const int any_lo = max_of(0, band.first_row(k_first));
  const int any_hi = min_of(q_len, min_of(band.last_row(k_last), kUnlimited - 1) + 1);
  if (any_lo >= any_hi) return QueryRange{0, 0, 0, 0, 0, 0};
  const int begin = any_lo / tile_m, end = ceil_div(any_hi, tile_m);
  if (k_first + tile_n > k_len) return QueryRange{begin, end, end, end, any_lo, any_hi};
  const int all_lo = max_of(0, band.first_row(k_last));
  const int all_hi = min_of(q_len, min_of(band.last_row(k_first), kUnlimited - 1) + 1);
  const int full_begin = clamp_to(ceil_div(all_lo, tile_m), begin, end);
  return QueryRange{begin, full_begin, clamp_to(max_of(all_hi, 0) / tile_m, full_begin, end),
                    end,   any_lo,     any_hi};
}

// Keys [begin, end) between the first and the last that some row of a sequence sees.
struct KeySpan {
  int begin, end;
};
FA_HOST_DEVICE constexpr KeySpan seen_keys(const Band& band, int q_len, int k_len) {
  return KeySpan{max_of(0, band.first_key(0)),
                 min_of(k_len, min_of(band.last_key(q_len - 1), kUnlimited - 1) + 1)};
}

}  // namespace fa
