// SPDX-License-Identifier: BSD-3-Clause
// Are the bits of dropout those of docs/numerics.md, and does each lane of a quad get its own?
#include "kernels_common/device/philox.h"

#include <random>

#include "tests/cpp/check.h"

using namespace fa;
using namespace fa::test;

namespace {

// The worked example of the page.
void worked_example() {
  const int64_t seed_offset[2] = {20261129, 5};
  const DropoutPlace place = dropout_place(seed_offset, 1, 4, 3);
  expect_equal(place.head, 7u, "b * Hq + h");
  const PhiloxWords words = dropout_words(place, 3, 2);
  const uint32_t expected[4] = {0x57d93027u, 0x40ed725bu, 0x5b548fb4u, 0xf97e35b6u};
  for (int i = 0; i < 4; ++i) expect_equal(words.w[i], expected[i], "a word of the example");
}

// Zero counter and key, all ones: the vectors of the generator's authors.
void known_vectors() {
  const PhiloxWords zero = philox4x32(PhiloxWords{{0, 0, 0, 0}}, 0, 0);
  const uint32_t of_zero[4] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  const PhiloxWords ones = philox4x32(PhiloxWords{{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u);
  const uint32_t of_ones[4] = {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu};
  for (int i = 0; i < 4; ++i) {
    expect_equal(zero.w[i], of_zero[i], "a word of zeros");
    expect_equal(ones.w[i], of_ones[i], "a word of ones");
  }
}

// A negative seed and a large offset keep their low and high words.
void seeds_of_any_sign() {
  const int64_t seed_offset[2] = {-2, (int64_t{1} << 32) + 9};
  const DropoutPlace place = dropout_place(seed_offset, 0, 1, 0);
  expect(place.key0 == 0xFFFFFFFEu && place.key1 == 0xFFFFFFFFu && place.offset == 9,
         "seed and offset are taken as bits");
}

// Lane t of a quad holds keys 2t, 2t + 1, 2t + 8, 2t + 9 of 16.
void bytes_of_a_quad() {
  const PhiloxWords words{{0x03020100u, 0x07060504u, 0x0B0A0908u, 0x0F0E0D0Cu}};
  for (int t = 0; t < 4; ++t)
    for (int e = 0; e < 4; ++e) {
      const int key = e / 2 * 8 + 2 * t + e % 2;
      const uint32_t bytes = quad_bytes(words, t);
      expect_equal(int(bytes >> (8 * e) & 0xFF), key, "byte of a lane");
      expect(!is_dropped(bytes, e, key) && is_dropped(bytes, e, key + 1),
             "dropped iff below the threshold");
    }
}

// Several calls with the keys of a tile are single calls.
void calls_of_a_tile() {
  std::mt19937 random(7);
  for (int trial = 0; trial < 1000; ++trial) {
    const int64_t seed_offset[2] = {int64_t(uint64_t(random()) << 32 | random()),
                                    int64_t(uint64_t(random()))};
    const DropoutPlace place = dropout_place(seed_offset, int(random() % 100), 8, 3);
    DropoutTile tile;
    fill_dropout_tile(place, tile);
    const auto words4 = [&tile](int i) {
      const uint32_t* from = i == 0 ? tile.first : tile.keys + 4 * (i - 1);
      return PhiloxWords{{from[0], from[1], from[2], from[3]}};
    };
    const auto word = [&random] { return static_cast<uint32_t>(random()); };
    const uint32_t rows[2] = {word(), word()}, blocks[2] = {word(), word()};
    PhiloxWords got[2];
    dropout_calls(words4, rows, blocks, got);
    for (int c = 0; c < 2; ++c) {
      const PhiloxWords wanted = dropout_words(place, int(rows[c]), int(blocks[c]));
      for (int i = 0; i < 4; ++i) expect_equal(got[c].w[i], wanted.w[i], "a word of a tile's call");
    }
  }
}

// Four comparisons at once are four comparisons.
void bytes_at_once() {
  for (int threshold = 0; threshold < 256; ++threshold)
    for (int byte = 0; byte < 256; ++byte) {
      const uint32_t bytes = uint32_t(byte) | uint32_t(255 - byte) << 8 |
                             uint32_t(byte ^ 0x80) << 16 | uint32_t(threshold) << 24;
      const uint32_t kept = kept_bytes(bytes, threshold);
      for (int e = 0; e < 4; ++e)
        expect_equal(kept >> (8 * e + 7) & 1, !is_dropped(bytes, e, threshold), "a byte is kept");
    }
}

void thresholds() {
  expect_equal(dropout_threshold(0.1f), 26, "p = 0.1");
  expect_equal(dropout_threshold(0.25f), 64, "p = 0.25");
  expect_equal(dropout_threshold(0.001f), 0, "p = 0.001");
  expect_equal(dropout_threshold(1.f / 512), 1, "half up");
  expect_equal(dropout_threshold(511.f / 512), 256, "everything");
  expect_equal(dropout_threshold(0.9999999f), 256, "just below 1");
}

}  // namespace

int main() {
  worked_example();
  known_vectors();
  seeds_of_any_sign();
  bytes_of_a_quad();
  calls_of_a_tile();
  bytes_at_once();
  thresholds();
  return report("philox_test");
}
