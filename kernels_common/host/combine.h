// SPDX-License-Identifier: BSD-3-Clause
// How are partial results merged: by a caller's fa_combine, or after a forward that split its keys?
#pragma once

#include "kernels_common/api/fa.h"
#include "kernels_common/device/launch_args.h"

namespace fa {

// Checks of fa_combine; FA_ERROR_INVALID or FA_ERROR_ABI with a sentence.
fa_status bind_combine(const fa_combine_params* params, CombineArgs* args);

// Launches on `stream` (a cudaStream_t). A build without kernels refuses.
fa_status launch_combine(const CombineArgs& args, void* stream);

}  // namespace fa
