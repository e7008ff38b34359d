// SPDX-License-Identifier: BSD-3-Clause
// Why does no row run a call, and which one would? The slow path of select(): text only.
#pragma once

#include <string>

#include "kernels_common/host/select.h"

namespace fa {

// FA_ERROR_DEVICE when no row of the table serves this device, else FA_ERROR_UNSUPPORTED; both with
// a sentence.
fa_status refuse(const Problem& problem, const DeviceInfo& device, Table table);

// "forward bf16, head dims 128 and 128, causal, packed q and k"
std::string describe_call(const Problem& problem);

// "compute capability 9.0"
std::string describe_device(const DeviceInfo& device);

// Rows in order of nearness to the call, each "id: reasons"; at most `limit` of them, one a line
// with `indent`.
std::string nearest_rows(const Problem& problem, const DeviceInfo& device, Table table,
                         size_t limit, const char* separator);

}  // namespace fa
