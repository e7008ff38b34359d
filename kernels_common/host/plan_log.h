// SPDX-License-Identifier: BSD-3-Clause
// What ran? With FA_LOG=plan every distinct plan is printed once to stderr, in one line.
#pragma once

#include "kernels_common/host/plan.h"

namespace fa {

void log_plan(const Plan& plan, const Problem& problem, const DeviceInfo& device, Table table);

}  // namespace fa
