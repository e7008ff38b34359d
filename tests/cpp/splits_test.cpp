// SPDX-License-Identifier: BSD-3-Clause
// When are the keys of a call split, where do the parts lie, and which calls of fa_combine are
// legal?
#include "kernels_common/host/splits.h"

#include "kernels_common/host/combine.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fixture.h"

using namespace fa;
using namespace fa::test;

namespace {

int parts_of(const Call& call) {
  const Planned p = plan_call(call);
  expect(p.status == FA_OK, last_error());
  return p.plan.num_splits;
}

void chosen_parts() {
  // 8 tiles of 256 key blocks on 108 places: 13 parts of 20 blocks fill them once.
  const int parts = parts_of(Call(1, 1, 16384, 8, 8, 128).a100());
  expect_equal(parts, 13, "parts of a long cache and few heads");
  expect_equal(parts_of(Call(1, 1, 512, 8, 8, 128).a100()), 1, "parts of few keys");
  expect_equal(parts_of(Call(4, 1, 16384, 32, 32, 128).a100()), 1, "parts of many heads");
  expect_equal(parts_of(Call(2, 4096, 4096, 16, 16, 128).a100()), 1, "parts of long queries");
  expect_equal(parts_of(Call(1, 0, 16384, 8, 8, 128).a100()), 1, "parts without queries");
  Call call = Call(1, 1, 16384, 8, 8, 128).a100();
  call.params.mask.window_left = 100;
  call.params.mask.window_right = 0;
  expect_equal(parts_of(call), 1, "parts of a short window");
  call = Call(1, 1, 16384, 8, 8, 128).a100();
  call.params.options.batch_invariant = 1;
  expect_equal(parts_of(call), 1, "parts of a batch-invariant call");
  for (int asked : {1, 3, 1000}) {
    call.params.options.num_splits = asked;
    expect_equal(parts_of(call), asked, "parts that the caller asked for");
  }
  expect_equal(parts_of(Call(1, 1, 16384, 8, 8, 128).h200()), 1, "parts of a Hopper row");
}

// No two values of all parts share memory, and the workspace holds them.
void memory() {
  for (const bool is_packed : {false, true}) {
    Call call = Call(2, 3, 5000, 4, 2, 64).a100();
    if (is_packed) {
      call.params.seq.cu_q = some_array();
      call.params.shape.total_q = 7;
    }
    call.params.options.num_splits = 3;
    const Planned p = plan_call(call);
    expect(p.status == FA_OK, last_error());
    const size_t rows = is_packed ? 7 : 6, heads = 4, dim = 64;
    expect_equal(static_cast<long long>(p.plan.workspace_bytes),
                 static_cast<long long>(3 * rows * heads * (dim + 1) * 4), "workspace");
    auto* const base = reinterpret_cast<char*>(uintptr_t{0x100000});
    const FwdArgs f = bind(p.plan, p.problem, base).fwd;
    const CombineArgs c = merge_parts(p.problem, 3, base);
    expect(f.splits.count == 3 && f.out_fp32 == 1 && f.rescale_limit == 8.f, "parts are fp32");
    expect(f.out.data == base && c.out_partial.data == base && c.lse_partial == f.lse,
           "the parts that are written are read");
    expect_equal(reinterpret_cast<char*>(f.lse) - base,
                 static_cast<long long>(3 * rows * heads * dim * 4), "LSE lies behind O");
    expect(f.splits.stride_out == c.out_partial_stride_part &&
               f.splits.stride_lse == c.lse_partial_stride_part &&
               f.splits.stride_out == static_cast<int64_t>(rows * heads * dim) &&
               f.splits.stride_lse == static_cast<int64_t>(rows * heads),
           "strides of parts");
    expect(f.out.stride_row == 256 && f.out.stride_head == 64 &&
               f.out.stride_batch == (is_packed ? 0 : 3 * 256) &&
               f.lse_stride_head == (is_packed ? 7 : 3) &&
               f.lse_stride_batch == (is_packed ? 0 : 12),
           "strides of a part");
    expect(c.count == 3 && c.batch == (is_packed ? 1 : 2) && c.rows == (is_packed ? 7 : 3) &&
               c.heads == 4 && c.dim_v == 64 && c.out.data == call.params.out.data,
           "sizes of the merge");
  }
}

fa_combine_params combine_params() {
  fa_combine_params p{};
  p.struct_size = sizeof(p);
  p.abi_version = FA_ABI_VERSION;
  p.count = 2;
  p.batch = 1;
  p.seqlen_q = 4;
  p.heads_q = 2;
  p.dim_v = 64;
  p.out_partial = Call::tensor(0x10000, 4, 2, 64, FA_FP32);
  p.out = Call::tensor(0x20000, 4, 2, 64, FA_BF16);
  p.lse_partial = fa_lse{reinterpret_cast<float*>(uintptr_t{0x30000}), 8, 4};
  return p;
}

void legal_merges() {
  CombineArgs args;
  fa_combine_params p = combine_params();
  expect(bind_combine(&p, &args) == FA_OK, last_error());
  expect(args.lse == nullptr && args.count == 2 && args.out_dtype == FA_BF16, "a legal call");
  const auto refused = [&args](auto change, const char* part) {
    fa_combine_params bad = combine_params();
    change(bad);
    expect(bind_combine(&bad, &args) == FA_ERROR_INVALID, "an illegal call is refused");
    expect_contains(last_error(), part);
  };
  refused([](fa_combine_params& c) { c.count = 0; }, "count is 0 partial results");
  refused([](fa_combine_params& c) { c.batch = -1; }, "batch is -1");
  refused([](fa_combine_params& c) { c.dim_v = 264; }, "dim_v is 264");
  refused([](fa_combine_params& c) { c.out.dtype = FA_E4M3; }, "out has dtype e4m3");
  refused([](fa_combine_params& c) { c.out.stride_dim = 2; }, "out: the stride of the last");
  refused([](fa_combine_params& c) { c.out_partial.data = nullptr; }, "out_partial: data is NULL");
  refused([](fa_combine_params& c) { c.lse_partial.data = nullptr; }, "lse_partial: data is NULL");
  expect(launch_combine(args, nullptr) == FA_ERROR_UNSUPPORTED, "a build without kernels");
}

}  // namespace

int main() {
  chosen_parts();
  memory();
  legal_merges();
  return report("splits_test");
}
