// SPDX-License-Identifier: BSD-3-Clause
// Does every fp32 number >= 0 come back from its bf16 and eight more bits, to 16 bits?
#include "kernels_common/device/split_bf16.h"

#include <cstring>

#include "tests/cpp/check.h"

using namespace fa;
using fa::test::expect;

namespace {

constexpr uint32_t kInfinity = 0x7f800000u, kQuietNan = 0x7fc00000u;
constexpr auto here = [](std::source_location at = std::source_location::current()) { return at; };

bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > kInfinity; }
uint32_t distance(uint32_t a, uint32_t b) { return a > b ? a - b : b - a; }

// Is `half` the bf16 next to the number? Both neighbours are where it lies in the middle.
bool is_nearest(uint32_t half, uint32_t bits) {
  if (bits > kInfinity) return is_nan(half << 16) || (bits < kQuietNan && half << 16 == kInfinity);
  return distance(half << 16, bits) <= 0x8000u;
}

bool comes_back(uint32_t got, uint32_t bits) {
  if (bits >= kInfinity) return is_nan(got) || (bits < kQuietNan && got >= kInfinity);
  if (bits == 0) return got == 0;
  return got < kInfinity && distance(got, bits) < 256;
}

void check(uint32_t x0, uint32_t y0, uint32_t x1, uint32_t y1) {
  const uint32_t a = raised(x0), b = raised(y0), c = raised(x1), d = raised(y1);
  const uint32_t one = bf16_pair(a, b), two = bf16_pair(c, d), rest = rest_of_four(a, b, c, d);
  const BitPair first = with_rest(one, rest, 0), second = with_rest(two, rest, 1);
  const bool nearest = is_nearest(one & 0xffffu, x0) && is_nearest(one >> 16, y0) &&
                       is_nearest(two & 0xffffu, x1) && is_nearest(two >> 16, y1);
  const bool back = comes_back(first.x, x0) && comes_back(first.y, y0) &&
                    comes_back(second.x, x1) && comes_back(second.y, y1);
  if (!nearest || !back)
    expect(false, here(), "%08x, %08x, %08x, %08x: bf16 %08x, %08x, back as %08x, %08x, %08x, %08x",
           x0, y0, x1, y1, one, two, first.x, first.y, second.x, second.y);
}

// Numbers without a sign, four at a time; some of them in every one of the four places. An odd
// `stride` takes every pattern of the bits that are rounded, with many exponents each.
void check_numbers(uint32_t stride) {
  constexpr uint32_t kQuarter = 1u << 29;
  for (uint32_t i = 0; i < kQuarter / stride; ++i) {
    const uint32_t x = i * stride, y = x | kQuarter, z = x | 2 * kQuarter, w = x | 3 * kQuarter;
    check(x, y, z, w);
    if (i % 1021 != 0) continue;
    check(y, z, w, x);
    check(z, w, x, y);
    check(w, x, y, z);
  }
  fa::test::checks += int64_t{4} * (kQuarter / stride);
}

// Around every exponent: 0, the smallest and largest numbers, infinity and NaN are among them.
void check_ends() {
  for (uint32_t exponent = 0; exponent < 256; ++exponent)
    for (uint32_t i = 0; i < 0x20000; i += 37) {
      const uint32_t first = exponent << 23 | i, last = (exponent << 23 | 0x7fffffu) - i;
      check(first, last, 0, kInfinity);
    }
}

}  // namespace

// `split_bf16_test all`: every number, half a minute.
int main(int count, char** words) {
  check_ends();
  check_numbers(count > 1 && std::strcmp(words[1], "all") == 0 ? 1 : 31);
  return fa::test::report("split_bf16_test");
}
