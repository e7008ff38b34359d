// SPDX-License-Identifier: BSD-3-Clause
// How does a row of the table become a kernel that the host can launch?
#pragma once

#include "kernels_common/host/launch_row.h"
#include "kernels_common/host/registry.h"
#include "kernels_sm80/fwd/kernel.h"
#include "kernels_sm80/fwd/packed_kernel.h"

namespace fa::sm80 {

template <class Row>
using SmemOf = std::conditional_t<FwdTypes<Row>::kPacked, PackedSmem<Row>, FwdSmem<Row>>;

template <class Row>
const void* function() {
  if constexpr (FwdTypes<Row>::kPacked)
    return reinterpret_cast<const void*>(&fa_fwd_packed<Row>);
  else
    return reinterpret_cast<const void*>(&fa_fwd<Row>);
}

template <class Row>
fa_status launch(const LaunchArgs& args, void* stream) {
  if (args.fwd.order.num_tiles == 0) return FA_OK;
  constexpr int kMost = sizeof(SmemOf<Row>);
  const bool drops = args.fwd.dropout.seed_offset != nullptr;
  const int bytes = Row::kConfig.dropout == 0 || drops ? kMost : int(sizeof(FwdBuffers<Row>));
  return launch_row<Row>(function<Row>(), args.grid, FwdTypes<Row>::kThreads, bytes,
                         const_cast<FwdArgs*>(&args.fwd), stream, false, kMost);
}

template <class Row>
constexpr KernelEntry make_entry(const char* id) {
  return KernelEntry{id,           Row::kConfig,  FwdTypes<Row>::kThreads, int(sizeof(SmemOf<Row>)),
                     &launch<Row>, &function<Row>};
}

}  // namespace fa::sm80
