// SPDX-License-Identifier: BSD-3-Clause
// Does every key of every sequence have one place in the transposed V, and is all that blocks of
// keys read from there written?
#include "kernels_common/device/value_keys.h"

#include <vector>

#include "tests/cpp/check.h"

using namespace fa;
using fa::test::expect;

namespace {

constexpr auto here = [](std::source_location at = std::source_location::current()) { return at; };

// The MMA's k index of a thread's operand bytes, and the columns its accumulator holds.
void check_order() {
  for (int quad = 0; quad < 4; ++quad)
    for (int byte = 0; byte < 4; ++byte) {
      const int column = byte < 2 ? 2 * quad + byte : 8 + 2 * quad + byte - 2;
      for (int group = 0; group < 3; ++group)
        expect(key_at(16 * group + 4 * quad + byte) == 16 * group + column, here(),
               "quad %d byte %d", quad, byte);
    }
}

// Positions of one head: which (sequence, key) stands there, or zero (-1), or nobody wrote (-2).
struct Place {
  int sequence = -2, key = -2;
};

std::vector<Place> write(const SeqArgs& args, const BandArgs& band, int batch) {
  std::vector<Place> places(static_cast<size_t>(value_tiles(args)) * kValueTile);
  for (int tile = 0; tile < value_tiles(args); ++tile) {
    const ValueTile t = value_tile(args, band, tile, batch);
    if (!t.read()) continue;
    for (int i = 0; i < kValueTile; ++i) {
      const int key = t.first + key_at(i);
      const bool seen = key >= t.seen.begin && key < t.seen.end;
      places[static_cast<size_t>(tile * kValueTile + i)] =
          seen ? Place{t.seq.index, key} : Place{-1, -1};
    }
  }
  return places;
}

// What blocks of tile_n keys of sequence b bring: its own seen keys in order, zeros or another
// sequence's keys where its own end, never what nobody wrote.
void check_reads(const SeqArgs& args, const BandArgs& band, int b, int tile_n) {
  const std::vector<Place> places = write(args, band, b);
  const SeqInfo s = sequence_info(args, b);
  if (s.q_len == 0 || s.k_len == 0) return;
  const Band seen = make_band(band, s.q_len, s.k_len);
  const KeySpan span = seen_keys(seen, s.q_len, s.k_len);
  const KeyRange range = key_range(seen, 0, s.q_len - 1, s.k_len, tile_n);
  const int begin = value_tile_begin(args, b) * kValueTile;
  for (int n = range.begin; n < range.end; ++n)
    for (int i = 0; i < tile_n; ++i) {
      const size_t at = static_cast<size_t>(begin + n * tile_n + i);
      const int key = n * tile_n + key_at(i);
      if (at >= places.size()) {
        expect(key >= span.end, here(), "key %d of sequence %d lies behind the end", key, b);
        continue;
      }
      const Place& p = places[at];
      expect(p.sequence != -2, here(), "sequence %d reads position %zu, which nobody wrote", b, at);
      if (key >= span.begin && key < span.end)
        expect(p.sequence == b && p.key == key, here(), "key %d of sequence %d is %d of %d", key, b,
               p.key, p.sequence);
      else
        expect(p.sequence != b, here(), "key %d of sequence %d is not seen", key, b);
    }
}

void check_sequences() {
  constexpr BandArgs kBands[] = {{-1, -1, 0, 0}, {-1, 0, 0, 0},   {40, 0, 0, 0},
                                 {7, 300, 0, 0}, {-1, 0, 200, 0}, {30, 5, 0, 1}};
  const int32_t cu_q[] = {0, 100, 100, 333, 650, 651}, cu_k[] = {0, 7, 7, 1300, 1301, 2100};
  const int32_t used[] = {7, 0, 900, 1, 333}, pad[] = {0, 0, 5, 0, 127};
  const int32_t dense_used[] = {900, 0, 1, 256, 511}, row[] = {4, 3, 3, 0, 1};
  for (const BandArgs& band : kBands)
    for (int tile_n : {32, 96, 128, 160, 224, 256})
      for (int b = 0; b < 5; ++b) {
        SeqArgs args{};
        args.batch = 5;
        args.seqlen_q = 200;
        args.seqlen_k = 900;
        check_reads(args, band, b, tile_n);
        args.used_k = dense_used;
        args.batch_index_k = row;
        check_reads(args, band, b, tile_n);
        args = SeqArgs{};
        args.batch = 5;
        args.cu_q = cu_q;
        args.cu_k = cu_k;
        args.total_q = 700;
        args.total_k = 2222;
        check_reads(args, band, b, tile_n);
        args.used_k = used;
        args.leftpad_k = pad;
        check_reads(args, band, b, tile_n);
      }
}

}  // namespace

int main() {
  check_order();
  check_sequences();
  return fa::test::report("value_keys_test");
}
