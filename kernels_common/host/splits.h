// SPDX-License-Identifier: BSD-3-Clause
// In how many parts are the keys of a tile worked on, and where do the partial results lie? Pure.
#pragma once

#include "kernels_common/host/select.h"

namespace fa {

// What the caller asked for; else as many parts as shorten a call whose tiles leave the GPU idle. A
// batch-invariant call is not split unless the caller says so: the number of tiles is that of the
// batch.
int choose_splits(const KernelEntry& row, const Problem& problem, const DeviceInfo& device,
                  int64_t tiles);

// The time of the call in that many parts beside that in one, both as the model has them.
float split_share(const KernelEntry& row, const Problem& problem, const DeviceInfo& device,
                  int64_t tiles);

// Bytes of partial O and LSE; 0 for one part.
size_t split_bytes(const Problem& problem, int splits);

// Lets a forward write its parts into the workspace.
void bind_parts(const Problem& problem, int splits, void* workspace, FwdArgs* args);

// What merges them into the call's out and lse.
CombineArgs merge_parts(const Problem& problem, int splits, void* workspace);

}  // namespace fa
