// SPDX-License-Identifier: BSD-3-Clause
// What will run? The row, its grid and tile order, and the workspace; and how the plan becomes a
// kernel's arguments.
#pragma once

#include <string>

#include "kernels_common/host/select.h"

namespace fa {

// Byte offsets into the workspace of a backward; each a multiple of 256.
struct BackwardWorkspace {
  size_t lse_log2, delta, dq_sum, cleared, turns, dsinks, dout;
};

struct Plan {
  const KernelEntry* main;
  int num_splits;        // 1: the keys are not split
  int grid;              // thread blocks; 0: nothing to write, nothing is launched
  bool counted;          // blocks take tiles from a counter in the workspace, else in rounds
  TileOrder order;       // of the main kernel: query tiles, in a backward key tiles
  TileOrder rows;        // backward: query tiles
  int cleared_sections;  // backward: of BwdWorkspace::cleared; 0: prepare clears all sums
  BackwardWorkspace work;
  size_t workspace_bytes;
};

// Pure. Fails as select() does, or with FA_ERROR_UNSUPPORTED when the tiles do not fit an int32.
fa_status make_plan(const Problem& problem, const DeviceInfo& device, Table table, Plan* plan);

// Several lines for people: row, tiles, grid, order, workspace; says when a Hopper GPU runs an
// Ampere row, and why.
std::string describe(const Plan& plan, const Problem& problem, const DeviceInfo& device,
                     Table table);

// Kernel arguments; no field has an optional meaning left beyond what launch_args.h says.
LaunchArgs bind(const Plan& plan, const Problem& problem, void* workspace);
LaunchArgs bind_backward(const Plan& plan, const Problem& problem, void* workspace);

// What heads that are walked together may keep in L2: half of it, for the rest of their tensors and
// the next section pass through.
int64_t section_bytes(const DeviceInfo& device);

// Score options in the form of score.h, and what the softmax multiplies its scores by.
ScoreArgs score_args(const Problem& problem);
float softmax_factor(const Problem& problem);
DropoutArgs dropout_args(const Problem& problem);

// The parts of make_plan() and describe() that a backward has alone.
fa_status plan_backward(const Problem& problem, const DeviceInfo& device, Plan* plan);
std::string describe_backward(const Plan& plan, const Problem& problem);

}  // namespace fa
