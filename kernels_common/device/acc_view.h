// SPDX-License-Identifier: BSD-3-Clause
// How does an fp32 accumulator fragment map to (row, column)? The same view for mma.sync and wgmma.
#pragma once

#include <cute/tensor.hpp>

#include "kernels_common/device/launch_args.h"

namespace fa {

// mma.sync: ((2, 2), MMA_M, MMA_N); wgmma: ((2, 2, N/8), MMA_M, MMA_N). Result: (rows, columns) of
// this thread. Row (i, m) of the view is row lane/4 + 8·i of the thread's 16-row slab, plus m
// slabs; column c is 8·(c/2) + 2·(lane%4) + c%2 of the tile.
template <class Tensor>
FA_DEVICE auto acc_view(Tensor& acc) {
  using namespace cute;
  auto layout = acc.layout();
  if constexpr (decltype(rank<0>(layout))::value == 3)
    return make_tensor(
        acc.data(), make_layout(make_layout(get<0, 1>(layout), get<1>(layout)),
                                make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout))));
  else
    return make_tensor(acc.data(), make_layout(make_layout(get<0, 1>(layout), get<1>(layout)),
                                               make_layout(get<0, 0>(layout), get<2>(layout))));
}

// Calls run(one, r) for every row r of a view, with a view of that row alone.
template <class View, class Run>
FA_DEVICE void for_each_row(View& view, Run run) {
  CUTE_UNROLL
  for (int r = 0; r < cute::size<0>(view); ++r) {
    auto one = cute::make_tensor(
        &view(r, 0), cute::make_layout(cute::make_shape(cute::_1{}, cute::shape<1>(view)),
                                       cute::make_stride(cute::_0{}, cute::stride<1>(view))));
    run(one, r);
  }
}

// First column of the tile that belongs to this thread, and the tile column of view column c
// relative to it.
FA_DEVICE int acc_first_col(int lane) { return 2 * (lane % 4); }
FA_HOST_DEVICE constexpr int acc_col(int c) { return 8 * (c / 2) + c % 2; }
// Row of view row r relative to the thread's first row (slab row lane/4); slabs are `slab_rows`
// apart.
FA_HOST_DEVICE constexpr int acc_row(int r, int slab_rows) {
  return 8 * (r % 2) + slab_rows * (r / 2);
}

}  // namespace fa
