// SPDX-License-Identifier: BSD-3-Clause
// Does a normalised problem mean the same as the params it came from, whatever lengths the device
// turns out to hold?
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "kernels_common/device/block_range.h"
#include "kernels_common/host/plan_log.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fixture.h"

using namespace fa;
using namespace fa::test;

namespace {

bool visible(const BandArgs& m, int q_len, int k_len, int i, int j) {
  const Band band = make_band(m, q_len, k_len);
  return j >= band.first_key(i) && j <= band.last_key(i);
}

// `lengths`: whether the device may hold shorter sequences than the tensors have rows.
void check_band(const Call& call, bool lengths) {
  Problem p;
  expect(make_problem(Op::kForward, &call.params, DataCheck::kRequired, &p) == FA_OK, last_error());
  const fa_mask& m = call.params.mask;
  const BandArgs given{m.window_left, m.window_right, m.chunk, m.align};
  const int q_max = p.packed_q() ? p.seq.total_q : p.seq.seqlen_q;
  const int k_max = p.packed_k() ? p.seq.total_k : p.seq.seqlen_k;
  for (int q_len = lengths ? 0 : q_max; q_len <= q_max; ++q_len)
    for (int k_len = lengths ? 0 : k_max; k_len <= k_max; ++k_len)
      for (int i = 0; i < q_len; ++i)
        for (int j = 0; j < k_len; ++j)
          expect(visible(given, q_len, k_len, i, j) == visible(p.band, q_len, k_len, i, j),
                 std::source_location::current(),
                 "q_len %d of %d, k_len %d of %d, left %d, right %d, chunk %d, align %d: (%d, %d) "
                 "changed",
                 q_len, q_max, k_len, k_max, m.window_left, m.window_right, m.chunk, m.align, i, j);
}

void masks_keep_their_meaning() {
  int unmasked = 0;
  for (int q : {1, 2, 3, 5})
    for (int k : {0, 1, 2, 4, 5})
      for (int left : {-1, 0, 1, 2, 3, 4, 5})
        for (int right : {-1, 0, 1, 2, 3, 4, 5})
          for (int chunk : {0, 1, 2, 4, 5, 6, 1 << 30})
            for (int align : {0, 1}) {
              Call call(1, q, k, 1, 1, 64);
              call.params.mask = fa_mask{left, right, chunk, align};
              check_band(call, false);
              Problem p;
              make_problem(Op::kForward, &call.params, DataCheck::kRequired, &p);
              unmasked += !p.banded();
              call.params.seq.used_q = call.params.seq.used_k = some_array();
              check_band(call, true);
              call.params.seq =
                  fa_sequences{some_array(), some_array(), nullptr, nullptr, nullptr, nullptr};
              call.params.shape.total_q = q;
              call.params.shape.total_k = k;
              check_band(call, true);
            }
  expect(unmasked > 100, "some of these masks hide nothing and are dropped");
}

// FA_LOG=plan prints a plan once; another plan once more.
void plans_are_logged_once() {
  setenv("FA_LOG", "plan", 1);
  std::FILE* file = std::tmpfile();
  const int saved = dup(2);
  expect(file != nullptr && saved >= 0, "a temporary file");
  std::fflush(stderr);
  dup2(fileno(file), 2);
  const Planned first = plan_call(Call(2, 512, 512, 8, 8, 128).h200());
  const Planned second = plan_call(Call(2, 512, 512, 8, 8, 128).causal().h200());
  for (int i = 0; i < 3; ++i) log_plan(first.plan, first.problem, first.device, kTable);
  log_plan(second.plan, second.problem, second.device, kTable);
  std::fflush(stderr);
  dup2(saved, 2);
  close(saved);
  std::rewind(file);
  std::string text;
  for (int c; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(c);
  std::fclose(file);
  int plans = 0;
  for (char c : text) plans += c == '\n';
  expect_equal(plans, 2, "plans printed, a line each");
  expect_contains(text, "fa plan: call forward bf16, head dims 128 and 128; batch 2, ");
  expect_contains(text, "; row sm90_fwd_bf16_d128_none (arch 90, ");
  expect_contains(text, "; splits 1; workspace 0 bytes\n");
  expect_contains(text, "sm90_fwd_bf16_d128_none");
  expect_contains(text, "sm90_fwd_bf16_d128_band");
}

// What a call writes has memory of its own; inputs may share theirs, and slices of one tensor begin
// apart.
void outputs_begin_apart() {
  const auto check = [](const Call& call, Op op, const char* sentence) {
    Problem problem;
    const fa_status status = make_problem(op, &call.params, DataCheck::kRequired, &problem);
    expect_equal(status, sentence == nullptr ? FA_OK : FA_ERROR_INVALID, "status");
    if (sentence != nullptr) expect_contains(last_error(), sentence);
  };
  Call forward = Call(2, 512, 512, 8, 8, 128).h200();
  forward.params.v.data = forward.params.k.data;
  check(forward, Op::kForward, nullptr);
  forward.params.out.data = forward.params.q.data;
  check(forward, Op::kForward, "out: begins at the address of q, 0x10000, and would be written");
  forward.params.shape.seqlen_q = 0;
  check(forward, Op::kForward, nullptr);
  const Call good = Call(2, 512, 512, 8, 8, 128).h200().backward();
  Call backward = good;
  backward.params.grad.dout.data = backward.params.out.data;
  check(backward, Op::kBackward, nullptr);
  backward.params.grad.dk.data = backward.params.grad.dv.data;
  check(backward, Op::kBackward, "dk: begins at the address of dv");
  backward = good;
  backward.params.grad.dq.data = backward.params.grad.dout.data;
  check(backward, Op::kBackward, "dq: begins at the address of dout");
}

}  // namespace

int main() {
  masks_keep_their_meaning();
  outputs_begin_apart();
  plans_are_logged_once();
  return report("problem_test");
}
