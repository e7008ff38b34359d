// SPDX-License-Identifier: BSD-3-Clause
// Which grid, tile order and kernel arguments does a call get on a nominal H200 and A100?
#include <string>
#include <vector>

#include "kernels_common/device/query_walk.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fixture.h"

using namespace fa;
using namespace fa::test;

namespace {

struct Golden {
  const char* name;
  Call call;
  const char* id;
  int grid, tiles_m, heads, section;
};

Call packed(Call call, int batch, int total_q, int total_k) {
  call.params.seq.cu_q = call.params.seq.cu_k = some_array();
  call.params.shape.batch = batch;
  call.params.shape.total_q = total_q;
  call.params.shape.total_k = total_k;
  call.params.lse.stride_head = total_q;
  call.params.shape.seqlen_q = call.params.shape.seqlen_k = 0;
  return call;
}

void golden_plans() {
  const Golden table[] = {
      // 32 row tiles x 2 * 16 heads; K and V of a head take 2 MiB: 10 heads in half of 40 MiB. A
      // persistent grid of 132 takes up to 33 key heads whatever their size.
      {"h200", Call(2, 4096, 4096, 16, 16, 128).causal().h200(), "sm90_fwd_bf16_d128_band", 132, 32,
       32, 32},
      // A block per tile, 108 of them at once, which 27 heads keep busy: two equal sections.
      {"a100", Call(2, 4096, 4096, 16, 16, 128).causal().a100(), "sm80_fwd_bf16_d128_band", 1024,
       32, 32, 16},
      {"a100 full", Call(2, 4096, 4096, 16, 16, 128).a100(), "sm80_fwd_bf16_d128_band", 1024, 32,
       32, 8},
      {"a100 gqa", Call(2, 4096, 4096, 32, 8, 128).causal().a100(), "sm80_fwd_bf16_d128_band", 2048,
       32, 64, 64},
      {"a100 1k", Call(16, 1024, 1024, 32, 4, 64).causal().a100(), "sm80_fwd_bf16_d64_band", 4096,
       8, 512, 512},
      {"h200 gqa", Call(2, 4096, 4096, 32, 8, 128).h200(), "sm90_fwd_bf16_d128_none", 132, 32, 64,
       64},
      {"h200 d64", Call(1, 1000, 1000, 4, 4, 64).h200(), "sm90_fwd_bf16_d64_none", 24, 6, 4, 4},
      {"long keys", Call(1, 128, 1 << 20, 8, 2, 128).h200(), "sm90_fwd_bf16_d128_none", 8, 1, 8, 8},
      // 8 row tiles: 33 heads are two pairs of 132; 48 would fit in 24 MiB.
      {"h200 1k", Call(16, 1024, 1024, 16, 16, 128).causal().h200(), "sm90_fwd_bf16_d128_band", 132,
       8, 256, 33},
      // A group of 4 needs 4 * 33 heads to end evenly.
      {"h200 1k gqa", Call(16, 1024, 1024, 32, 8, 128).causal().h200(), "sm90_fwd_bf16_d128_band",
       132, 8, 512, 132},
      {"one row", Call(3, 1, 77, 2, 1, 64).a100(), "sm80_fwd_bf16_d64_band", 6, 1, 6, 6},
      {"no keys", Call(2, 256, 0, 4, 4, 128).h200(), "sm90_fwd_bf16_d128_none", 16, 2, 8, 8},
      {"no rows", Call(2, 0, 256, 4, 4, 128).h200(), "sm90_fwd_bf16_d128_none", 0, 0, 8, 1},
      {"no batch", Call(0, 256, 256, 4, 4, 128).h200(), "sm90_fwd_bf16_d128_none", 0, 2, 0, 1},
      // Packed: total_q / 128 + batch + 1 tiles of each head, whatever the lengths are.
      {"packed", packed(Call(1, 0, 0, 8, 8, 128), 5, 1000, 3000).h200(), "sm90_fwd_bf16_d128_none",
       104, 13, 8, 8},
      {"packed, empty", packed(Call(1, 0, 0, 8, 8, 128), 5, 0, 3000).h200(),
       "sm90_fwd_bf16_d128_none", 0, 6, 8, 1},
  };
  for (const Golden& g : table) {
    const Planned p = plan_call(g.call);
    expect(p.status == FA_OK, std::source_location::current(), "%s: %s", g.name, last_error());
    expect(p.id() == g.id, std::source_location::current(), "%s: row %s", g.name, p.plan.main->id);
    const TileOrder& o = p.plan.order;
    const bool same = p.plan.grid == g.grid && o.tiles_m == g.tiles_m && o.heads == g.heads &&
                      o.section == g.section;
    expect(same, std::source_location::current(), "%s: grid %d, tiles_m %d, heads %d, section %d",
           g.name, p.plan.grid, o.tiles_m, o.heads, o.section);
    expect(p.plan.grid == 0 || o.num_tiles == o.tiles_m * o.heads, "every tile is counted");
    expect(p.plan.workspace_bytes == 0 && p.plan.num_splits == 1, "nothing is split");
  }
}

void grid_follows_the_device() {
  Call call = Call(8, 4096, 4096, 16, 16, 128).h200();
  call.params.options.reserve_sms = 20;
  expect_equal(plan_call(call).plan.grid, 112, "grid with 20 reserved SMs");
  call.params.options.reserve_sms = 1000;
  expect_equal(plan_call(call).plan.grid, 1, "grid with every SM reserved");
  // Shared memory holds one block; without a reserve there is one per tile.
  call = Call(8, 4096, 4096, 16, 16, 128).a100();
  call.params.options.reserve_sms = 8;
  expect_equal(plan_call(call).plan.grid, 100, "grid of an Ampere row with 8 reserved SMs");
  call = Call(70000, 128, 64, 16, 16, 128).h200();
  expect_equal(plan_call(call).plan.order.num_tiles, 1120000, "tiles");
  call = Call(1 << 20, 1 << 15, 64, 16, 16, 128).h200();
  expect_equal(plan_call(call).status, FA_ERROR_UNSUPPORTED, "status of more than 2^31 tiles");
  expect_contains(last_error(), "Split the call along the batch");
}

// Lengths that only the device knows: blocks take tiles from a counter, if there are many.
void counted_tiles() {
  const auto counted = [](Call call) {
    const Planned p = plan_call(call);
    expect(p.status == FA_OK, last_error());
    uint32_t counter = 0;
    const FwdArgs f = bind(p.plan, p.problem, &counter).fwd;
    expect_equal(static_cast<long long>(p.plan.workspace_bytes), p.plan.counted ? 4 : 0, "bytes");
    expect(f.next_tile == (p.plan.counted ? &counter : nullptr), "the counter's place");
    return p.plan.counted;
  };
  expect(counted(packed(Call(1, 0, 0, 8, 8, 128), 5, 5000, 3000).h200()), "44 tiles x 8 heads");
  expect(!counted(packed(Call(1, 0, 0, 8, 8, 128), 5, 1000, 3000).h200()), "13 tiles x 8 heads");
  expect(!counted(packed(Call(1, 0, 0, 8, 8, 128), 5, 5000, 3000).a100()), "one block per tile");
  Call dense = Call(8, 4096, 4096, 16, 16, 128).h200();
  expect(!counted(dense), "the plan knows the lengths");
  dense.params.seq.used_k = some_array();
  expect(counted(dense), "used lengths");
}

void arguments() {
  Call call = Call(2, 300, 1, 8, 2, 72).causal().h200();
  call.params.mask.window_left = 2000000000;
  call.params.k.stride_row = 3;  // of the only row: never taken, so never checked, and replaced
  call.params.out.dtype = FA_FP32;
  call.params.shape.seqlen_q = 300;
  Planned p = plan_call(call);
  expect(p.status == FA_OK, last_error());
  LaunchArgs args = bind(p.plan, p.problem, nullptr);
  const FwdArgs& f = args.fwd;
  expect(f.group == 4 && f.heads_q == 8 && f.heads_k == 2 && f.dim_qk == 72 && f.dim_v == 72,
         "heads and dims");
  expect(f.q.stride_row == 8 * 72 && f.q.stride_head == 72 && f.q.stride_batch == 300 * 8 * 72,
         "strides of q");
  expect(f.k.stride_row % 8 == 0 && f.k.stride_row > 0,
         "the stride of a dimension of size 1 is a legal one");
  expect(f.out_fp32 == 1, "out is fp32");
  expect(f.band.left == -1 && f.band.right == 0, "a window beyond 2^30 is unlimited, causal stays");
  expect(std::fabs(f.scale_log2 - 1.44269504f / std::sqrt(72.0f)) < 1e-7f,
         "the default scale, for exp2");
  expect(args.grid == p.plan.grid, "grid");

  expect(f.score.capped == 0 && f.score.slopes == nullptr, "no softcap, no ALiBi");

  call = Call(2, 300, 300, 8, 8, 64).h200();
  call.params.score.scale = 0;
  p = plan_call(call);
  expect(p.problem.scale > 0 && p.problem.scale < 1e-20f,
         "scale 0 is a tiny scale: uniform weights without 0 * inf");
  call = Call(2, 300, 0, 8, 8, 64).h200();
  call.params.k.data = call.params.v.data = nullptr;
  p = plan_call(call);
  expect(p.status == FA_OK, last_error());
  expect(bind(p.plan, p.problem, nullptr).fwd.k.data != nullptr,
         "without keys a tensor map still gets an address");
}

// ALiBi leaves base-2 scores, a softcap half a tanh; values that overflow fp32 are cut.
void scores() {
  constexpr float kLog2E = 1.44269504f;
  Call call = Call(2, 300, 300, 8, 8, 64).h200();
  const auto args = [&call] {
    Problem p{};
    expect(make_problem(Op::kForward, &call.params, DataCheck::kRequired, &p) == FA_OK,
           last_error());
    return bind(Plan{}, p, nullptr).fwd;
  };
  const auto near = [](float a, float b) { return std::fabs(a - b) <= 1e-6f * std::fabs(b); };
  expect(args().rescale_limit == 8, "a maximum that may stay behind");
  call.params.options.batch_invariant = 1;
  expect(args().rescale_limit == 0, "a batch-invariant call follows every maximum");
  call.params.options.batch_invariant = 0;
  call.params.score.softcap = 30;
  FwdArgs f = args();
  expect(f.score.capped == 1 && near(f.score.inner, 0.125f / 60) && near(f.scale_log2, 60 * kLog2E),
         "a softcap");
  call.params.score.softcap = 1e38f;
  f = args();
  expect(std::isfinite(f.scale_log2) && f.score.inner > 0, "a cap that hides nothing");
  call.params.score.softcap = 1e-38f;
  expect(std::isfinite(args().score.inner), "a cap that leaves signs");
  call.params.score.softcap = 30;
  call.params.score.alibi_slopes = fa_factors{some_array(), 8, 1, 0, FA_FP32, 0};
  f = args();
  expect(near(f.score.outer, 60 * kLog2E) && f.scale_log2 == 1 && f.score.slopes_stride_batch == 8,
         "a softcap and ALiBi");
  call.params.score.softcap = 0;
  f = args();
  expect(f.score.capped == 0 && near(f.score.inner, 0.125f * kLog2E) && f.scale_log2 == 1, "ALiBi");
}

void backward_plans() {
  // 4 row tiles of 64 rows x 2 * 8 heads; 3 key tiles of 128 keys x 2 * 2 heads.
  Call call = Call(2, 256, 300, 8, 2, 128).h200().backward();
  Planned p = plan_backward_call(call);
  expect(p.status == FA_OK, last_error());
  const TileOrder &rows = p.plan.rows, &keys = p.plan.order;
  expect(rows.tiles_m == 4 && rows.heads == 16 && rows.num_tiles == 64, "query tiles");
  expect(keys.tiles_m == 3 && keys.heads == 4 && keys.num_tiles == 12 && keys.section == 4,
         "key tiles");
  expect_equal(p.plan.grid, 12, "blocks");
  const size_t fast = 64 * 64 * (128 + 2) * 4;
  expect_equal(static_cast<long long>(p.plan.workspace_bytes), static_cast<long long>(fast),
               "dQ sums and two statistics of each row");
  float dsinks = 0;
  call.params.options.deterministic = 1;
  call.params.score.sinks = fa_factors{&dsinks, 0, 1, 0, FA_FP32, 0};
  call.params.grad.dsinks = &dsinks;
  p = plan_backward_call(call);
  expect(p.status == FA_OK, last_error());
  expect_equal(static_cast<long long>(p.plan.workspace_bytes), fast + 2 * 256,
               "and a turn and a part of dsinks of each tile");
  char memory[1];
  const LaunchArgs args = bind_backward(p.plan, p.problem, memory);
  const BwdArgs& b = args.bwd;
  const auto at = [&](const void* pointer) { return static_cast<const char*>(pointer) - memory; };
  expect(at(b.work.dq_sum) == 0 && at(b.work.lse_log2) == 64 * 64 * 128 * 4 &&
             at(b.work.delta) == 64 * 64 * 129 * 4 && at(b.work.turns) == long(fast) &&
             at(b.work.dsinks) == long(fast) + 256,
         "the parts of the workspace lie one after the other");
  expect(b.group == 4 && b.deterministic == 1 && b.dq_fp32 == 0 && b.dsinks == &dsinks, "flags");
  expect(convert_jobs(b).tiles == 64 && convert_jobs(b).sinks == 8 && convert_jobs(b).clears == 0,
         "every row of k is a key: nothing to clear");

  call = packed(Call(1, 0, 0, 8, 4, 128).h200().backward(), 5, 1000, 3000);
  p = plan_backward_call(call);
  expect(p.status == FA_OK, last_error());
  expect(p.plan.rows.tiles_m == 1000 / 64 + 6 && p.plan.rows.heads == 8, "packed query tiles");
  expect(p.plan.order.tiles_m == 3000 / 128 + 6 && p.plan.order.heads == 4, "packed key tiles");
  expect(convert_jobs(bind_backward(p.plan, p.problem, memory).bwd).clears == 47,
         "rows of k may be no key");
  call.params.grad.accumulate = 1;
  p = plan_backward_call(call);
  expect(convert_jobs(bind_backward(p.plan, p.problem, memory).bwd).clears == 0,
         "nothing is added to rows that are no key");

  p = plan_backward_call(packed(Call(1, 0, 0, 8, 4, 128).h200().backward(), 5, 0, 3000));
  expect(p.plan.rows.tiles_m == 0 && p.plan.rows.num_tiles == 0 && p.plan.grid > 0,
         "without packed rows there are no parts of dsinks to sum");
  p = plan_backward_call(Call(2, 0, 256, 4, 4, 128).h200().backward());
  expect(p.status == FA_OK, last_error());
  expect(p.plan.rows.num_tiles == 0 && p.plan.grid == 16 && p.plan.workspace_bytes == 0,
         "without query rows dK and dV are written all the same");
  p = plan_backward_call(Call(2, 256, 0, 4, 4, 128).h200().backward());
  expect(p.plan.rows.num_tiles == 32 && p.plan.grid == 0, "without keys dQ is");
  expect(bind_backward(p.plan, p.problem, memory).bwd.k.data != nullptr, "an address for k");
  p = plan_backward_call(Call(0, 256, 256, 4, 4, 128).h200().backward());
  expect(p.status == FA_OK && p.plan.rows.num_tiles == 0 && p.plan.grid == 0, "no batch");
  p = plan_backward_call(Call(1 << 20, 1 << 16, 64, 16, 16, 128).h200().backward());
  expect_equal(p.status, FA_ERROR_UNSUPPORTED, "status of more than 2^31 tiles");
  expect_contains(last_error(), "Split the call along the batch");
}

// Thread blocks of a dynamic row go on to other tiles, where prepare clears the count of those
// taken.
void backward_tiles_dealt() {
  KernelEntry row = kBackwardRows[1];
  row.config.sched = SchedKind::kDynamic;
  const std::array<const KernelEntry*, 1> table{&row};
  const auto plan = [&](const Call& call) {
    const Planned p = plan_backward_call(call, table);
    expect(p.status == FA_OK, last_error());
    return p.plan;
  };
  Call call = Call(2, 512, 512, 8, 8, 128).h200().backward();
  expect(plan(call).grid == 64 && plan(call).cleared_sections == 1, "fewer tiles than blocks");
  call = Call(2, 4096, 4096, 16, 16, 128).h200().backward();
  expect_equal(plan(call).grid, 132, "a block a multiprocessor");
  expect_equal(plan(call).cleared_sections, 8, "sections of four heads");
  call.params.options.deterministic = 1;
  expect_equal(plan(call).grid, 132, "a block a multiprocessor, in turns");
  expect_equal(plan(call).cleared_sections, 6, "main clears in turns, too");
  char memory[1];
  const Planned p = plan_backward_call(call, table);
  expect(bind_backward(p.plan, p.problem, memory).bwd.work.cleared != nullptr, "counted somewhere");
  call = packed(Call(1, 0, 0, 8, 4, 128).h200().backward(), 5, 1000, 30000);
  expect(plan(call).grid == 132 && plan(call).cleared_sections == 1, "packed");
  call = Call(2, 0, 8192, 16, 16, 128).h200().backward();
  expect(plan(call).grid == 2048 && plan(call).cleared_sections == 0,
         "without query rows there is no prepare: a tile a block");
}

// Key heads walked together: as many as fit into L2, in turns at least two. A block waits for
// blocks of its own head that started before it, whatever the number.
void backward_sections() {
  struct Expected {
    int rows, fast, in_turns;
  };
  // 16 heads of 128: Q, dO and the dQ sums of a head take 1 KiB a row, a section at most 24 MiB. If
  // not in turns, the zeros of the next section are among them.
  for (const Expected e : {Expected{1024, 16, 16}, {4096, 4, 6}, {8192, 2, 3}, {16384, 1, 2}}) {
    Call call = Call(1, e.rows, e.rows, 16, 16, 128).causal().h200().backward();
    const Planned fast = plan_backward_call(call);
    call.params.options.deterministic = 1;
    const Planned in_turns = plan_backward_call(call);
    expect(fast.status == FA_OK && in_turns.status == FA_OK, last_error());
    expect_equal(fast.plan.order.section, e.fast, "heads of a section");
    expect_equal(in_turns.plan.order.section, e.in_turns, "heads of a section in turns");
    const int sections = (16 + e.fast - 1) / e.fast;
    expect_equal(fast.plan.cleared_sections, sections > 1 ? sections : 0,
                 "main clears the sums of all sections but the first, where there are more");
    expect_equal(in_turns.plan.cleared_sections, 0, "prepare clears all, in turns");
    // Of each head, the number of the key tile to start next; in the last section they ascend.
    const TileOrder& order = in_turns.plan.order;
    std::vector<int> next(16, -1);
    for (int i = 0; i < order.num_tiles; ++i) {
      const bool last = in_last_section(order, i);
      const TileCoord c = walking_tile_coord(order, i);
      int& number = next[static_cast<size_t>(c.head)];
      if (number < 0) number = last ? 0 : order.tiles_m - 1;
      expect_equal(last, c.head >= (15 / order.section) * order.section, "the last heads");
      expect_equal(c.m, number, "the tiles that are waited for started before");
      number += last ? 1 : -1;
    }
  }
  char memory[1];
  Planned p = plan_backward_call(Call(1, 16384, 16384, 16, 16, 128).h200().backward());
  const BwdArgs args = bind_backward(p.plan, p.problem, memory).bwd;
  expect_equal(reinterpret_cast<char*>(args.work.cleared) - memory,
               reinterpret_cast<char*>(args.work.delta) - memory + 16 * 16384 * 4,
               "counters of the sections behind the statistics");
  p = plan_backward_call(Call(1, 16384, 16384, 16, 16, 128).h200(80).backward());
  expect(p.plan.cleared_sections == 0 &&
             bind_backward(p.plan, p.problem, memory).bwd.work.cleared == nullptr,
         "prepare clears the sums of an Ampere row");
  Call same = Call(1, 16384, 16384, 16, 16, 128).h200().backward();
  same.params.options.deterministic = same.params.options.batch_invariant = 1;
  expect_equal(plan_backward_call(same).plan.order.section, 16, "one order for every batch");
  Call one = Call(1, 16384, 16384, 8, 1, 128).h200().backward();
  one.params.options.deterministic = 1;
  expect_equal(plan_backward_call(one).plan.order.section, 1, "no more than there are");
}

void backward_checks() {
  const auto refused = [](auto change, const char* reason) {
    Call call = Call(2, 256, 256, 4, 4, 128).h200().backward();
    change(call.params);
    expect_equal(plan_backward_call(call).status, FA_ERROR_INVALID, reason);
    expect_contains(last_error(), reason);
  };
  refused([](fa_params& p) { p.grad.dq.dtype = FA_FP16; },
          "dq has dtype fp16 (1), it must be bf16");
  refused([](fa_params& p) { p.grad.dk.data = nullptr; }, "dk: data is NULL");
  refused([](fa_params& p) { p.grad.dv.stride_head = 0; }, "dv: a stride is 0");
  refused([](fa_params& p) { p.grad.dout.stride_row = 3; }, "dout: row stride 3");
  refused([](fa_params& p) { p.lse.data = nullptr; }, "lse: data is NULL");
  refused([](fa_params& p) { p.grad.dsinks = reinterpret_cast<float*>(uintptr_t{16}); },
          "dsinks is given without sinks");
  refused([](fa_params& p) { p.grad.accumulate = 2; }, "grad.accumulate is 2");
  Call fp8 = Call(2, 256, 256, 4, 4, 128, FA_E4M3).h200().backward();
  fp8.params.out.dtype = FA_BF16;
  expect_equal(plan_backward_call(fp8).status, FA_ERROR_INVALID, "status of fp8");
  expect_contains(last_error(), "the backward takes fp16 or bf16");
  // An expanded dout has stride 0; gradients in fp32 are data.
  Call call = Call(2, 256, 256, 4, 4, 128).h200().backward();
  call.params.grad.dout.stride_batch = call.params.grad.dout.stride_row = 0;
  call.params.grad.dk.dtype = call.params.grad.dout.dtype = FA_FP32;
  const Planned p = plan_backward_call(call);
  expect(p.status == FA_OK, last_error());
  char memory[1];
  const BwdArgs b = bind_backward(p.plan, p.problem, memory).bwd;
  expect(b.dk_fp32 == 1 && b.dv_fp32 == 0 && b.dout_fp32 == 1, "dtypes of the gradients");
  // The main kernel reads a rounded copy, dense whatever the strides of dout are.
  expect(b.dout_given.stride_row == 0 && b.dout.stride_row == 4 * 128 &&
             b.dout.stride_batch == 256 * 4 * 128 && b.dout.data == memory + p.plan.work.dout,
         "the rounded dout");
  expect(p.plan.workspace_bytes == p.plan.work.dout + 2 * 2 * 256 * 4 * 128, "its place");
}

void description() {
  Call call = packed(Call(1, 0, 0, 8, 8, 128), 5, 1000, 3000).causal().h200();
  Planned p = plan_call(call);
  std::string text = describe(p.plan, p.problem, p.device, kTable);
  for (const char* part : {"row        sm90_fwd_bf16_d128_band",
                           "forward bf16, head dims 128 and 128, causal, packed q, packed k",
                           "tiles      128 x 128, 13 row tiles x 8 heads = 104",
                           "grid       104 blocks", "sections of 8 heads", "workspace  0 bytes"})
    expect_contains(text, part);
  call = Call(2, 512, 512, 8, 8, 128).causal().h200();
  call.params.k.stride_batch = int64_t{1} << 39;
  p = plan_call(call);
  text = describe(p.plan, p.problem, p.device, kTable);
  for (const char* part :
       {"row        sm80_fwd_bf16_d128_band", "tiles      128 x 64, 4 row tiles x 16 heads = 64",
        "grid       64 blocks", "fallback   a Hopper GPU runs an Ampere row",
        "sm90_fwd_bf16_d128_band: a stride of 2^40 bytes or more does not fit a tensor map"})
    expect_contains(text, part);
  std::vector<const KernelEntry*> ampere;  // a build for 8.0 alone, on a Hopper GPU
  for (const KernelEntry* entry : kTable)
    if (entry->config.arch == 80) ampere.push_back(entry);
  p = plan_call(Call(2, 512, 512, 8, 8, 128).h200(), ampere);
  text = describe(p.plan, p.problem, p.device, ampere);
  for (const char* part : {"fallback   a Hopper GPU runs an Ampere row", "this build has none"})
    expect_contains(text, part);
  call = Call(2, 512, 512, 8, 2, 128).causal().h200().backward();
  call.params.grad.dout.stride_batch = int64_t{1} << 39;
  p = plan_backward_call(call);
  text = describe(p.plan, p.problem, p.device, kBackwardTable);
  for (const char* part :
       {"backward bf16, head dims 128 and 128, causal", "row        sm80_bwd_bf16_d128_band",
        "tiles      64 x 128, 4 key tiles x 4 heads = 16; 8 row tiles x 16 heads = 128",
        "grid       16 blocks", "dQ sums    as the blocks come", "workspace  4259840 bytes",
        "sm90_bwd_bf16_d128_band: a stride of 2^40 bytes or more"})
    expect_contains(text, part);
  p = plan_call(Call(2, 512, 512, 8, 8, 128).h200());
  text = describe(p.plan, p.problem, p.device, kTable);
  expect(text.find("fallback") == std::string::npos, "a Hopper row is no fallback");
  p = plan_call(Call(2, 512, 512, 8, 8, 128).h200(80));
  text = describe(p.plan, p.problem, p.device, kTable);
  expect(text.find("fallback") == std::string::npos, "a forced architecture is no fallback");
}

}  // namespace

int main() {
  golden_plans();
  grid_follows_the_device();
  counted_tiles();
  arguments();
  scores();
  backward_plans();
  backward_tiles_dealt();
  backward_sections();
  backward_checks();
  description();
  return report("plan_test");
}
