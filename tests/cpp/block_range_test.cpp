// SPDX-License-Identifier: BSD-3-Clause
// Do key ranges, tile orders and the enumeration of packed tiles equal brute force on every small
// size?
#include "kernels_common/device/block_range.h"

#include <vector>

#include "kernels_common/device/query_walk.h"
#include "kernels_common/device/seq_info.h"
#include "kernels_common/device/tile_scheduler.h"
#include "tests/cpp/check.h"

using namespace fa;
using fa::test::expect;

namespace {

constexpr auto here = [](std::source_location at = std::source_location::current()) { return at; };

int floor_of(int a, int b) {
  int n = 0;
  while (n * b > a) --n;
  while ((n + 1) * b <= a) ++n;
  return n;
}

// The definition of the mask, word by word.
bool visible(const BandArgs& m, int q_len, int k_len, int i, int j) {
  if (j < 0 || j >= k_len) return false;
  const int pos = m.top_left ? i : i + k_len - q_len;
  if (m.left >= 0 && j < pos - m.left) return false;
  if (m.right >= 0 && j > pos + m.right) return false;
  return m.chunk == 0 || floor_of(pos, m.chunk) == floor_of(j, m.chunk);
}

// Of block n of a tile: whether some row sees some key of it, and every row every key; the keys
// seen.
struct Seen {
  bool any = false, all = true;
  int lo, hi = 0;
};

Seen look(const BandArgs& m, int q_len, int k_len, int first, int last, int tile_n, int n) {
  Seen seen{.lo = k_len};
  for (int i = first; i <= last; ++i)
    for (int j = n * tile_n; j < (n + 1) * tile_n; ++j) {
      const bool one = visible(m, q_len, k_len, i, j);
      seen.any |= one;
      seen.all &= one;
      if (one) seen.lo = min_of(seen.lo, j), seen.hi = max_of(seen.hi, j + 1);
    }
  return seen;
}

void check_tile(const BandArgs& m, int q_len, int k_len, int first, int last, int tile_n) {
  const KeyRange r = key_range(make_band(m, q_len, k_len), first, last, k_len, tile_n);
  int lo = k_len, hi = 0;
  const int blocks = ceil_div(k_len, tile_n);
  for (int n = 0; n < blocks; ++n) {
    const Seen seen = look(m, q_len, k_len, first, last, tile_n, n);
    lo = min_of(lo, seen.lo), hi = max_of(hi, seen.hi);
    const bool in = n >= r.begin && n < r.end, full = n >= r.full_begin && n < r.full_end;
    const auto text =
        "%s: block %d of %d keys, rows %d..%d, q_len %d, k_len %d, left %d, right %d, chunk %d, "
        "top_left %d";
    const auto say = [&](bool holds, const char* what, std::source_location at) {
      expect(holds, at, text, what, n, tile_n, first, last, q_len, k_len, m.left, m.right, m.chunk,
             m.top_left);
    };
    say(in == seen.any, "range and visibility disagree", here());
    say(full == seen.all, "unmasked blocks and full visibility disagree", here());
  }
  expect(r.begin <= r.full_begin && r.full_begin <= r.full_end && r.full_end <= r.end,
         "the bounds are ordered");
  if (lo < hi) {
    fa::test::expect_equal(r.any_lo, lo, "any_lo");
    fa::test::expect_equal(r.any_hi, hi, "any_hi");
  } else {
    expect(r.begin == r.end && r.any_lo == r.any_hi, "a tile that sees nothing has an empty range");
  }
}

// Some rows of a tile, in every part of its range.
void check_within(const BandArgs& m, int q_len, int k_len, const KeyRange& whole, int first,
                  int last, int tile_n) {
  const KeyRange r = range_within(whole, make_band(m, q_len, k_len), first, last, k_len, tile_n);
  expect(whole.begin <= r.begin && r.begin < r.end && r.end <= whole.end &&
             r.begin <= r.full_begin && r.full_begin <= r.full_end && r.full_end <= r.end,
         "rows of a tile have a block of it, and the bounds are ordered");
  for (int n = whole.begin; n < whole.end; ++n) {
    const Seen seen = look(m, q_len, k_len, first, last, tile_n, n);
    const bool in = n >= r.begin && n < r.end, full = n >= r.full_begin && n < r.full_end;
    expect((in == seen.any || r.end - r.begin == 1) && (in || !seen.any) && full == seen.all,
           here(),
           "block %d of %d keys in %d..%d, rows %d..%d, q_len %d, k_len %d, left %d, right %d, "
           "chunk %d, top_left %d: visited %d, whole %d",
           n, tile_n, whole.begin, whole.end, first, last, q_len, k_len, m.left, m.right, m.chunk,
           m.top_left, in, full);
  }
}

void check_rows_within(const BandArgs& m, int q_len, int k_len, int first, int last, int tile_n) {
  const KeyRange tile = key_range(make_band(m, q_len, k_len), first, last, k_len, tile_n);
  for (int parts = 1; parts <= 2; ++parts)
    for (int part = 0; part < parts; ++part) {
      const KeyRange whole = part_of(tile, part, parts);
      if (whole.begin == whole.end) continue;
      for (int i = first; i <= last; ++i)
        check_within(m, q_len, k_len, whole, i, min_of(i + 1, last), tile_n);
    }
}

// The transpose, for one tile of keys against every query row.
void check_key_tile(const BandArgs& m, int q_len, int k_len, int k_first, int tile_m, int tile_n) {
  const Band band = make_band(m, q_len, k_len);
  const QueryRange r = query_range(band, k_first, tile_n, q_len, k_len, tile_m);
  const auto say = [&](bool holds, const char* what, int block, std::source_location at) {
    expect(holds, at,
           "%s: query block %d of %d rows, keys from %d, tile_n %d, q_len %d, k_len %d, left %d, "
           "right %d, chunk %d, top_left %d",
           what, block, tile_m, k_first, tile_n, q_len, k_len, m.left, m.right, m.chunk,
           m.top_left);
  };
  int lo = q_len, hi = 0;
  for (int block = 0; block < ceil_div(q_len, tile_m); ++block) {
    bool any = false, all = true;
    for (int i = block * tile_m; i < (block + 1) * tile_m; ++i)
      for (int j = k_first; j < k_first + tile_n; ++j) {
        const bool seen = i < q_len && visible(m, q_len, k_len, i, j);
        any |= seen;
        all &= seen;
        if (seen) lo = min_of(lo, i), hi = max_of(hi, i + 1);
      }
    const bool in = block >= r.begin && block < r.end;
    const bool full = block >= r.full_begin && block < r.full_end;
    say(in == any, "range and visibility disagree", block, here());
    say(full == all, "unmasked blocks and full visibility disagree", block, here());
    // Both passes agree on the pairs of tiles: the turns of a deterministic backward count on it.
    const int first = block * tile_m, last = min_of(first + tile_m, q_len) - 1;
    const KeyRange keys = key_range(band, first, last, k_len, tile_n);
    say(in == (k_first / tile_n >= keys.begin && k_first / tile_n < keys.end),
        "query range and key range disagree", block, here());
    if (!in) continue;
    KeyTileInfo tile{};
    tile.q_len = q_len, tile.k_len = k_len, tile.n_first = k_first;
    say(key_tiles_before(band, tile, block, tile_m, tile_n, false) ==
            keys.end - 1 - k_first / tile_n,
        "turn of a key tile", block, here());
    say(key_tiles_before(band, tile, block, tile_m, tile_n, true) == k_first / tile_n - keys.begin,
        "turn of a key tile, reversed", block, here());
  }
  for (const bool reversed : {false, true}) {
    const QueryWalk walk = query_walk(r, reversed);
    say(walk.reversed() == reversed && walk.range.begin == r.begin && walk.range.end == r.end,
        "places of a walk", r.begin, here());
    for (int place = r.begin; place < r.end; ++place) {
      const int block = walk.block(place);
      say(block == (reversed ? r.end - 1 - (place - r.begin) : place), "block at a place", block,
          here());
      say((place >= walk.range.full_begin && place < walk.range.full_end) ==
              (block >= r.full_begin && block < r.full_end),
          "unmasked places of a walk", block, here());
    }
    say(walk.range.full_begin <= walk.range.full_end, "the bounds of a walk", r.begin, here());
  }
  say(r.begin <= r.full_begin && r.full_begin <= r.full_end && r.full_end <= r.end,
      "the bounds are ordered", r.begin, here());
  say(lo < hi ? r.any_lo == lo && r.any_hi == hi : r.begin == r.end && r.any_lo == r.any_hi,
      "rows that see a key of the tile", r.any_lo, here());
  for (int j = k_first; j < min_of(k_first + tile_n, k_len); ++j)
    for (int i = 0; i < q_len; ++i)
      say(visible(m, q_len, k_len, i, j) == (i >= band.first_row(j) && i <= band.last_row(j)),
          "first_row and last_row", i, here());
}

void check_query_ranges() {
  for (int q_len = 0; q_len <= 7; ++q_len)
    for (int k_len = 1; k_len <= 7; ++k_len)
      for (int left : {-1, 0, 1, 2, 5, 20})
        for (int right : {-1, 0, 1, 3, 20})
          for (int chunk : {0, 1, 3, 4, 16})
            for (int top_left : {0, 1})
              for (int tile_m = 1; tile_m <= 3; ++tile_m)
                for (int tile_n = 1; tile_n <= 3; ++tile_n)
                  for (int first = 0; first < k_len; first += tile_n)
                    check_key_tile(BandArgs{left, right, chunk, top_left}, q_len, k_len, first,
                                   tile_m, tile_n);
}

void check_ranges() {
  for (int q_len = 1; q_len <= 7; ++q_len)
    for (int k_len = 0; k_len <= 9; ++k_len)
      for (int left : {-1, 0, 1, 2, 5, 20})
        for (int right : {-1, 0, 1, 3, 20})
          for (int chunk : {0, 1, 3, 4, 16})
            for (int top_left : {0, 1})
              for (int tile_m = 1; tile_m <= 3; ++tile_m)
                for (int tile_n = 1; tile_n <= 4; ++tile_n)
                  for (int first = 0; first < q_len; first += tile_m) {
                    const BandArgs mask{left, right, chunk, top_left};
                    const int last = min_of(first + tile_m, q_len) - 1;
                    check_tile(mask, q_len, k_len, first, last, tile_n);
                    check_rows_within(mask, q_len, k_len, first, last, tile_n);
                  }
}

// Sums of positions near 2^30 stay within an int (the constant evaluation would refuse an
// overflow).
constexpr bool extremes_hold() {
  constexpr int big = kUnlimited - 1;
  const KeyRange causal = key_range(make_band(BandArgs{big, 0, 0, 0}, big, 1), 0, big - 1, 1, 128);
  const KeyRange wide =
      key_range(make_band(BandArgs{big, big, kUnlimited, 0}, big, big), 0, big - 1, big, 128);
  const KeyRange chunk =
      key_range(make_band(BandArgs{-1, -1, kUnlimited, 0}, big, 8), 0, big - 1, 8, 128);
  const QueryRange rows =
      query_range(make_band(BandArgs{0, big, 0, 0}, big, 1), 0, 128, big, 1, 128);
  const QueryRange all =
      query_range(make_band(BandArgs{big, big, kUnlimited, 0}, big, big), 0, 128, big, big, 128);
  return causal.end == 1 && wide.any_hi == big && chunk.end == 1 && rows.any_lo == 0 &&
         all.any_hi == big;
}
static_assert(extremes_hold());

void check_tile_order() {
  for (int tiles_m = 1; tiles_m <= 6; ++tiles_m)
    for (int heads = 1; heads <= 9; ++heads)
      for (int section = 1; section <= heads + 2; ++section) {
        const TileOrder order{tiles_m, heads, section, tiles_m * heads};
        std::vector<int> seen(static_cast<size_t>(order.num_tiles), 0);
        int last_section = 0, last_m = tiles_m;
        for (int index = 0; index < order.num_tiles; ++index) {
          const TileCoord c = tile_coord(order, index);
          expect(c.m >= 0 && c.m < tiles_m && c.head >= 0 && c.head < heads,
                 "coordinates lie inside the call");
          ++seen[static_cast<size_t>(c.head * tiles_m + c.m)];
          const int current = c.head / section;
          if (current != last_section) last_m = tiles_m;
          expect(current >= last_section && c.m <= last_m,
                 "sections in order, the longest tiles of one first");
          last_section = current;
          last_m = c.m;
        }
        for (int count : seen) fa::test::expect_equal(count, 1, "visits of a tile");
      }
}

void check_packed(const std::vector<int32_t>& cu, int total_q, int tile_m) {
  const int batch = static_cast<int>(cu.size()) - 1;
  SeqArgs args{};
  args.cu_q = cu.data();
  args.batch = batch;
  args.total_q = total_q;
  args.seqlen_k = 5;
  std::vector<int> seen(static_cast<size_t>(total_q), 0);
  const int tiles = packed_tiles(total_q, batch, tile_m);
  for (int m = 0; m < tiles; ++m) {
    const int b = find_sequence(cu.data(), batch, tile_m, m);
    int wanted = 0;
    for (int i = 0; i <= batch; ++i)
      if (packed_offset(cu[static_cast<size_t>(i)], i, tile_m) <= m) wanted = i;
    fa::test::expect_equal(b, wanted, "sequence of a packed tile");
    const SeqInfo s = seq_info(args, m, 0, tile_m);
    expect(s.m_first >= 0, "a tile starts inside its sequence");
    const int begin = cu[static_cast<size_t>(b)];
    const int end = b == batch ? total_q : cu[static_cast<size_t>(b) + 1];
    fa::test::expect_equal(s.q_begin, begin, "q_begin");
    fa::test::expect_equal(s.q_slot, end - begin, "q_slot");
    fa::test::expect_equal(s.q_len, b == batch ? 0 : end - begin, "q_len");
    fa::test::expect_equal(s.k_len, b == batch ? 0 : 5, "k_len");
    for (int row = s.m_first; row < min_of(s.m_first + tile_m, s.q_slot); ++row)
      ++seen[static_cast<size_t>(s.q_begin + row)];
  }
  for (int count : seen) fa::test::expect_equal(count, 1, "visits of a packed row");
}

void check_packed_tiles() {
  for (int tile_m = 1; tile_m <= 4; ++tile_m)
    for (int tail = 0; tail <= 5; ++tail) {
      check_packed({0}, tail, tile_m);
      for (int a = 0; a <= 5; ++a)
        for (int b = 0; b <= 5; ++b)
          for (int c = 0; c <= 5; ++c) {
            check_packed({0, a}, a + tail, tile_m);
            check_packed({0, a, a + b}, a + b + tail, tile_m);
            check_packed({0, a, a + b, a + b + c}, a + b + c + tail, tile_m);
          }
    }
}

// Every real key has exactly one tile, and the workspace tile of its queries is the one that the
// query side enumerates.
void check_packed_keys(const std::vector<int32_t>& cu_k, const std::vector<int32_t>& cu_q, int tail,
                       int tile_m, int tile_n) {
  const int batch = static_cast<int>(cu_k.size()) - 1;
  BwdArgs args{};
  args.heads_q = 1;
  SeqArgs& seq = args.seq;
  seq.cu_k = cu_k.data();
  seq.cu_q = cu_q.data();
  seq.batch = batch;
  seq.total_k = cu_k.back() + tail;
  seq.total_q = cu_q.back() + tail;
  args.rows.tiles_m = packed_tiles(seq.total_q, batch, tile_m);
  std::vector<int> seen(static_cast<size_t>(seq.total_k), 0);
  const TileOrder order{packed_tiles(seq.total_k, batch, tile_n), 1, 1,
                        packed_tiles(seq.total_k, batch, tile_n)};
  int last = -1;
  for (int index = 0; index < order.num_tiles; ++index) {
    const TileCoord at = key_tile_coord(order, index);
    expect(at.m == last + 1, "key tiles in ascending order");
    last = at.m;
    const KeyTileInfo t = key_tile_info(seq, at.m, 0, tile_m, tile_n);
    for (int j = t.n_first; j < min_of(t.n_first + tile_n, t.k_len); ++j)
      ++seen[static_cast<size_t>(t.k_begin + j)];
    for (int m = 0; t.n_first < t.k_len && m < ceil_div(t.q_len, tile_m); ++m) {
      const SeqInfo s = seq_info(seq, static_cast<int>(workspace_tile(args, t, 0, m)), 0, tile_m);
      expect(s.q_begin == t.q_begin && s.m_first == m * tile_m && s.k_begin == t.k_begin &&
                 s.k_len == t.k_len && s.q_len == t.q_len,
             "the workspace tile of a key tile's queries");
    }
  }
  for (int j = 0; j < seq.total_k; ++j)
    fa::test::expect_equal(seen[static_cast<size_t>(j)], j < cu_k.back() ? 1 : 0,
                           "visits of a packed key");
}

void check_key_tiles() {
  for (int tile_m = 1; tile_m <= 3; ++tile_m)
    for (int tile_n = 1; tile_n <= 3; ++tile_n)
      for (int tail = 0; tail <= 3; ++tail)
        for (int a = 0; a <= 4; ++a)
          for (int b = 0; b <= 4; ++b)
            for (int c = 0; c <= 4; ++c)
              check_packed_keys({0, a, a + b, a + b + c}, {0, c, c + a, a + b + c}, tail, tile_m,
                                tile_n);
}

// Parts of a range: in order, without a gap, of nearly equal length, with the same masked blocks.
void check_parts() {
  for (int blocks = 0; blocks <= 9; ++blocks)
    for (int full_begin = 0; full_begin <= blocks; ++full_begin)
      for (int full_end = full_begin; full_end <= blocks; ++full_end)
        for (int parts = 1; parts <= 12; ++parts) {
          const KeyRange whole{5, 5 + full_begin, 5 + full_end, 5 + blocks, 7, 90};
          int next = whole.begin, shortest = blocks, longest = 0;
          for (int part = 0; part < parts; ++part) {
            const KeyRange r = part_of(whole, part, parts);
            expect(r.begin == next && r.end >= r.begin, "parts follow each other");
            for (int n = r.begin; n < r.end; ++n)
              expect((n >= r.full_begin && n < r.full_end) ==
                         (n >= whole.full_begin && n < whole.full_end),
                     "a block needs a mask in a part iff it does in the whole");
            expect(r.any_lo == 7 && r.any_hi == 90, "keys that some row sees");
            shortest = min_of(shortest, r.end - r.begin);
            longest = max_of(longest, r.end - r.begin);
            next = r.end;
          }
          expect(next == whole.end && longest - shortest <= 1, "parts are the whole, and equal");
        }
}

void check_lengths() {
  const int32_t cu_k[] = {0, 4, 9}, used_q[] = {9, 2}, used_k[] = {3, 7}, pad[] = {1, 9},
                index[] = {5, 6};
  SeqArgs args{};
  args.batch = 2;
  args.seqlen_q = 6;
  args.seqlen_k = 8;
  args.used_q = used_q;
  args.used_k = used_k;
  args.batch_index_k = index;
  SeqInfo s = seq_info(args, 1, 0, 4);
  expect(s.q_len == 6 && s.q_slot == 6 && s.m_first == 4 && s.q_batch == 0,
         "used_q is cut to the tensor");
  expect(s.k_len == 3 && s.k_begin == 0 && s.k_batch == 5, "used_k and batch_index_k of a dense k");
  s = seq_info(args, 0, 1, 4);
  expect(s.q_len == 2 && s.q_slot == 6 && s.k_len == 7 && s.k_batch == 6,
         "lengths of the second entry");
  args.batch_index_k = nullptr;
  args.cu_k = cu_k;
  args.leftpad_k = pad;
  s = seq_info(args, 0, 0, 4);
  expect(s.k_begin == 1 && s.k_len == 2 && s.k_batch == 0,
         "left padding is skipped, used_k includes it");
  s = seq_info(args, 0, 1, 4);
  expect(s.k_len == 0 && s.k_begin == 13, "padding beyond the length leaves no key");
}

}  // namespace

int main() {
  check_ranges();
  check_query_ranges();
  check_tile_order();
  check_packed_tiles();
  check_key_tiles();
  check_parts();
  check_lengths();
  return fa::test::report("block_range_test");
}
