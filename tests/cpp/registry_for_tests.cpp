// SPDX-License-Identifier: BSD-3-Clause
// Which rows does a libfa hold that is built for tests alone? Those of fixture.h: they can be
// planned, not launched.
#include "kernels_common/host/registry.h"
#include "tests/cpp/fixture.h"

namespace fa {

std::span<const KernelEntry* const> kernels() { return test::kTable; }

}  // namespace fa
