// SPDX-License-Identifier: BSD-3-Clause
// In which order do the three kernels of a backward row run? The same on every architecture.
#pragma once

#include "kernels_common/device/tile_scheduler.h"
#include "kernels_common/host/launch_row.h"

namespace fa {

struct BackwardKernels {
  const void* prepare;  // fa_bwd_prepare<Row>
  const void* main;
  const void* convert;   // fa_bwd_convert<Row, Order>
  int threads;           // of main
  int smem_bytes;        // of main
  void* main_parameter;  // its only argument
};

// `grid`: blocks of main. A call without query rows has no tiles to prepare, one without keys none
// to work on.
template <class Row>
fa_status launch_backward(const BwdArgs& args, int grid, const BackwardKernels& kernels,
                          void* stream) {
  void* parameter = const_cast<BwdArgs*>(&args);
  if (args.rows.num_tiles > 0)
    FA_TRY(launch_row<Row>(kernels.prepare, args.rows.num_tiles, kBwdRowThreads, 0, parameter,
                           stream));
  // A kernel of ours is ahead, which lets the next one begin.
  const bool overlapped = Row::kConfig.arch == 90 && args.rows.num_tiles > 0;
  if (grid > 0)
    FA_TRY(launch_row<Row>(kernels.main, grid, kernels.threads, kernels.smem_bytes,
                           kernels.main_parameter, stream, overlapped));
  const int blocks = convert_jobs(args).total();
  if (blocks == 0) return FA_OK;
  return launch_row<Row>(kernels.convert, blocks, kBwdRowThreads, 0, parameter, stream, overlapped);
}

}  // namespace fa
