// SPDX-License-Identifier: BSD-3-Clause
// What ran? FA_LOG is read once; without it a call pays one predictable branch.
#include "kernels_common/host/plan_log.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace fa {
namespace {

bool wanted() {
  static const bool value = [] {
    const char* text = std::getenv("FA_LOG");
    if (text == nullptr || text[0] == '\0') return false;
    if (std::strcmp(text, "plan") == 0) return true;
    std::fprintf(stderr, "fa: FA_LOG is \"%s\", the only value known is \"plan\".\n", text);
    return false;
  }();
  return value;
}

// "call forward …; device …; row …": the lines of `describe` as one, so that it can be searched.
std::string in_one_line(const std::string& lines) {
  std::string text;
  bool space = false;
  for (char c : lines) {
    if (c == '\n') {
      text += "; ";
      space = true;
    } else if (c != ' ' || !space) {
      text += c;
      space = c == ' ';
    }
  }
  while (!text.empty() && (text.back() == ' ' || text.back() == ';')) text.pop_back();
  return text;
}

}  // namespace

void log_plan(const Plan& plan, const Problem& problem, const DeviceInfo& device, Table table) {
  if (!wanted()) [[likely]]
    return;
  static std::mutex mutex;
  static std::set<std::string> seen;
  constexpr size_t kLimit =
      1024;  // a long-running process with ragged shapes must not grow without bound
  const std::string text = in_one_line(describe(plan, problem, device, table));
  const std::lock_guard lock(mutex);
  if (seen.size() < kLimit && seen.insert(text).second)
    std::fprintf(stderr, "fa plan: %s\n", text.c_str());
}

}  // namespace fa
