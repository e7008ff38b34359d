// SPDX-License-Identifier: BSD-3-Clause
// How does a kernel begin before the one ahead of it in the stream has ended? Programmatic
// dependent launch; nothing happens where the hardware or the launch does not know it.
#pragma once

#include "kernels_common/device/launch_args.h"

namespace fa {

// The next kernel may begin once every block of this one has said so. It waits for the end of this
// one before it reads what this one writes.
FA_DEVICE void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The kernel ahead has ended, and what it wrote is visible.
FA_DEVICE void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fa
