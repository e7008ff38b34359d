// SPDX-License-Identifier: BSD-3-Clause
// How a failure travels: a status code, and one sentence kept per thread.
#pragma once

#include "kernels_common/api/fa.h"

namespace fa {

// Stores the formatted sentence as this thread's last error and returns `code`. The only way to
// fail.
fa_status fail(fa_status code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Text of this thread's last failure; valid until its next one.
const char* last_error();

}  // namespace fa

#define FA_TRY(expression)                                              \
  do {                                                                  \
    if (fa_status fa_try_status_ = (expression)) return fa_try_status_; \
  } while (0)
