// SPDX-License-Identifier: BSD-3-Clause
// What would make a refused call run? Text only.
#pragma once

#include <string>

#include "kernels_common/host/select.h"

namespace fa {

// Sentences: parts that no kernel has, options that change no result and without which the table
// has a row, and the line of the table that would serve the call, or why no line would.
std::string advice(const Problem& problem, const DeviceInfo& device, Table table,
                   const KernelEntry& nearest);

}  // namespace fa
