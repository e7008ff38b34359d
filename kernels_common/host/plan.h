// SPDX-License-Identifier: BSD-3-Clause
// What will run? The row, its grid and tile order, and the workspace; and how the plan becomes a
// kernel's arguments.
#pragma once

#include <string>

#include "kernels_common/host/select.h"

namespace fa {

struct Plan {
  const KernelEntry* main;
  int num_splits;  // 1: the keys are not split
  int grid;        // thread blocks; 0: nothing to write, nothing is launched
  TileOrder order;
  size_t workspace_bytes;
};

// Pure. Fails as select() does, or with FA_ERROR_UNSUPPORTED when the tiles do not fit an int32.
fa_status make_plan(const Problem& problem, const DeviceInfo& device, Table table, Plan* plan);

// Several lines for people: row, tiles, grid, order, workspace; says when a Hopper GPU runs an
// Ampere row, and why.
std::string describe(const Plan& plan, const Problem& problem, const DeviceInfo& device,
                     Table table);

// Kernel arguments; no field has an optional meaning left beyond what launch_args.h says.
LaunchArgs bind(const Plan& plan, const Problem& problem);

}  // namespace fa
