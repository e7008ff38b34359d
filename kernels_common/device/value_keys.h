// SPDX-License-Identifier: BSD-3-Clause
// Where does key j of a sequence stand in the transposed V of an e4m3 call, and which keys hold
// zeros there? Pure; host and device.
#pragma once

#include "kernels_common/device/seq_info.h"

namespace fa {

inline constexpr int kValueTile = 128;  // keys that one block of the transposing kernel writes
inline constexpr int kKeyGroup = 16;    // keys change places inside groups of this many

// The accumulator of Q·Kᵀ gives a thread of a quad the columns 2q, 2q + 1, 8 + 2q, 9 + 2q of 16; as
// operand of P·V it must hold 4q .. 4q + 3. So V stands in that order: 0 1 8 9 2 3 10 11 4 5 12 13
// 6 7 14 15.
FA_HOST_DEVICE constexpr int key_at(int position) {
  return position / 4 % 4 * 2 + position % 2 + position / 2 % 2 * 8 + position / kKeyGroup * 16;
}

// First position of sequence b's keys in a head of the transposed V, in units of kValueTile.
FA_HOST_DEVICE int value_tile_begin(const SeqArgs& args, int b) {
  return args.cu_k == nullptr ? 0 : packed_offset(args.cu_k[b], b, kValueTile);
}

// Tiles of one head; every batch entry of a dense k has its own.
FA_HOST_DEVICE constexpr int64_t value_tiles(const SeqArgs& args) {
  return args.cu_k == nullptr
             ? ceil_div(args.seqlen_k, kValueTile)
             : int64_t{args.total_k} / kValueTile + args.batch + 1;  // packed_tiles()
}

// What one tile of the transposed V holds: keys [first, first + kValueTile) of a sequence. Those
// outside of `seen` are zeros there: no row sees them, and they may be NaN.
struct ValueTile {
  SeqInfo seq;
  int first;
  KeySpan seen;

  // Blocks of keys reach by less than kLargestBlock beyond the seen ones, and beyond the end of a
  // packed sequence into the next: what they bring from there meets weights of 0, but must not be
  // NaN.
  static constexpr int kLargestBlock = 256;
  FA_HOST_DEVICE constexpr bool read() const {
    return first < kLargestBlock ||
           (first + kValueTile + kLargestBlock > seen.begin && first < seen.end + kLargestBlock);
  }
};

// `tile` in [0, value_tiles()); `batch` for a dense k.
FA_HOST_DEVICE ValueTile value_tile(const SeqArgs& args, const BandArgs& band, int tile,
                                    int batch) {
  ValueTile t{};
  int b = batch;
  if (args.cu_k != nullptr) b = find_sequence(args.cu_k, args.batch, kValueTile, tile);
  t.first = (tile - value_tile_begin(args, b)) * kValueTile;
  if (b == args.batch) return t;  // behind the last packed sequence: zeros
  t.seq = sequence_info(args, b);
  t.seen = seen_keys(make_band(band, t.seq.q_len, t.seq.k_len), t.seq.q_len, t.seq.k_len);
  return t;
}

}  // namespace fa
