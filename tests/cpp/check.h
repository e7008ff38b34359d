// SPDX-License-Identifier: BSD-3-Clause
// How does a C++ test fail? With the line and the values, also in a release build, where assert()
// is empty.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <string>

namespace fa::test {

inline long checks = 0;

[[noreturn]] inline void fail_test(const std::source_location& at, const std::string& text) {
  std::fprintf(stderr, "%s:%u: %s\n", at.file_name(), static_cast<unsigned>(at.line()),
               text.c_str());
  std::exit(1);
}

// Ends the test at the first false statement. Formatting happens only then, so it may stand in
// inner loops.
template <class... Values>
void expect(bool holds, const std::source_location& at, const char* format, Values... values) {
  ++checks;
  if (holds) return;
  char text[1024];
  std::snprintf(text, sizeof(text), format, values...);
  fail_test(at, text);
}

inline void expect(bool holds, const char* what,
                   const std::source_location& at = std::source_location::current()) {
  expect(holds, at, "%s", what);
}

inline void expect_equal(long long got, long long wanted, const char* what,
                         const std::source_location& at = std::source_location::current()) {
  expect(got == wanted, at, "%s is %lld, expected %lld", what, got, wanted);
}

inline void expect_contains(const std::string& text, const char* part,
                            const std::source_location& at = std::source_location::current()) {
  ++checks;
  if (text.find(part) == std::string::npos)
    fail_test(at, "\"" + text + "\" does not contain \"" + part + "\"");
}

inline int report(const char* name) {
  std::printf("%s: %ld checks hold\n", name, checks);
  return 0;
}

}  // namespace fa::test
