// SPDX-License-Identifier: BSD-3-Clause
// How does a row of the table become kernels that the host can launch?
#pragma once

#include "kernels_common/device/bwd_convert_kernel.h"
#include "kernels_common/device/bwd_prepare_kernel.h"
#include "kernels_common/host/launch_backward.h"
#include "kernels_common/host/registry.h"
#include "kernels_sm80/bwd/kernel.h"

namespace fa::sm80 {

template <class Row>
const void* function() {
  return reinterpret_cast<const void*>(&fa_bwd<Row>);
}

template <class Row>
fa_status launch(const LaunchArgs& args, void* stream) {
  using T = BwdTypes<Row>;
  const BackwardKernels kernels{
      .prepare = reinterpret_cast<const void*>(&fa_bwd_prepare<Row>),
      .main = function<Row>(),
      .convert = reinterpret_cast<const void*>(&fa_bwd_convert<Row, DqOrder<T::kDim>>),
      .threads = T::kThreads,
      .smem_bytes = int(sizeof(BwdSmem<Row>)),
      .main_parameter = const_cast<BwdArgs*>(&args.bwd)};
  return launch_backward<Row>(args.bwd, args.grid, kernels, stream);
}

template <class Row>
constexpr KernelEntry make_entry(const char* id) {
  return KernelEntry{
      id,           Row::kConfig,  BwdTypes<Row>::kThreads, int(sizeof(BwdSmem<Row>)),
      &launch<Row>, &function<Row>};
}

}  // namespace fa::sm80
