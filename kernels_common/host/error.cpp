// SPDX-License-Identifier: BSD-3-Clause
// Where is the sentence of a failure kept? In a buffer of the thread that failed.
#include "kernels_common/host/error.h"

#include <cstdarg>
#include <cstdio>

namespace fa {
namespace {

// Long enough for the refusal that lists the nearest rows; a fixed buffer keeps failing free of
// allocations.
constexpr size_t kTextBytes = 4096;
thread_local char text[kTextBytes] = "";

}  // namespace

fa_status fail(fa_status code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  // The arguments may point into `text` (a sentence that is being extended), so it is written last.
  char next[kTextBytes];
  std::vsnprintf(next, sizeof(next), format, arguments);
  va_end(arguments);
  std::snprintf(text, sizeof(text), "%s", next);
  return code;
}

const char* last_error() { return text; }

}  // namespace fa
