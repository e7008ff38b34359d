// SPDX-License-Identifier: BSD-3-Clause
// Does convert find every element of a dQ tile where the main kernel put it?
#include "kernels_common/device/dq_order.h"

#include <algorithm>
#include <vector>

#include "tests/cpp/check.h"

using namespace fa;
using fa::test::expect;

namespace {

constexpr auto here = [](std::source_location at = std::source_location::current()) { return at; };

// (row, column) of value i of a thread's accumulator of a product of 64 rows, as the PTX manual
// draws it: a warp has 16 rows, a thread two neighbours in each group of eight columns, in the rows
// lane / 4 and lane / 4 + 8.
struct Place {
  int row, col;
};
Place accumulator(int thread, int i) {
  const int lane = thread % 32;
  return Place{thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

// The main kernel multiplies a tile in parts of 64 rows and `columns` columns and adds each
// thread's four values at `at(part, thread, four, columns)`.
template <class Order, class At>
void check_order(int tile_m, int dim, int columns, At at) {
  std::vector<int> seen(static_cast<size_t>(tile_m * dim), 0);
  const int panels = dim / columns;
  for (int part = 0; part < tile_m / 64 * panels; ++part)
    for (int thread = 0; thread < 128; ++thread)
      for (int i = 0; i < columns / 2; ++i) {
        const Place p = accumulator(thread, i);
        const int row = part / panels * 64 + p.row, col = part % panels * columns + p.col;
        const int put = at(part, thread, i / 4, columns) + i % 4;
        expect(put == Order::offset(row, col), here(), "(%d, %d) lies at %d, convert reads %d", row,
               col, put, Order::offset(row, col));
        ++seen[static_cast<size_t>(put)];
      }
  expect(std::ranges::count(seen, 1) == tile_m * dim, "every place holds one element");
  // What convert reads: float lane * 4 + i of a block of 16 rows and 8 columns.
  for (int row = 0; row < tile_m; row += 16)
    for (int col = 0; col < dim; col += 8)
      for (int thread = 0; thread < 32; ++thread)
        for (int i = 0; i < 4; ++i) {
          const Place p = accumulator(thread, i);
          const int block = Order::offset(row, col);
          expect(Order::offset(row + p.row, col + p.col) == block + thread * 4 + i, here(),
                 "a lane's four values of the block at row %d, column %d lie together", row, col);
        }
}

// The values of each warp after each other, 128 of them of one reduce.
int by_warp(int part, int thread, int four, int columns) {
  return (part * 4 + thread / 32) * 16 * columns + four * 128 + thread % 32 * 4;
}

template <int kDim, int kColumns = 64>
void check_dim() {
  for (int tile_m : {64, 128, 192})
    check_order<AccumulatorOrder<kDim, kColumns>>(tile_m, kDim, kColumns, by_warp);
}

}  // namespace

int main() {
  check_dim<64>();
  check_dim<96, 96>();
  check_dim<128>();
  check_dim<192>();
  check_dim<256>();
  return fa::test::report("dq_order_test");
}
