// SPDX-License-Identifier: BSD-3-Clause
// When do the query heads of a key head share tiles, and does every row of every head get one?
#include <random>
#include <vector>

#include "kernels_common/device/seq_info.h"
#include "kernels_common/host/splits.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fixture.h"

using namespace fa;
using namespace fa::test;

namespace {

constexpr KernelConfig packed_row(int dim) {
  KernelConfig row = ampere_row(kBf16, dim);
  row.score = ScoreKind::kAny;
  row.tile_m = 16;
  row.tile_n = 4096 / dim;
  row.stages = 1;
  row.pack = 1;
  return row;
}

constexpr KernelConfig any_row(int dim) {
  KernelConfig row = ampere_row(kBf16, dim);
  row.score = ScoreKind::kAny;
  row.tile_n = 32;
  row.dropout = 1;
  return row;
}

constexpr KernelConfig hopper_packed(int dim) {
  KernelConfig row = hopper_row(kBf16, dim, MaskKind::kBand);
  row.tile_m = 128;
  row.warps = 12;
  row.pack = 1;
  return row;
}

constexpr std::array kPackRows = {
    entry("sm90_fwd_bf16_d128_band", hopper_row(kBf16, 128, MaskKind::kBand), 230400),
    entry("sm90_fwd_bf16_d128_none", hopper_row(kBf16, 128, MaskKind::kNone), 230400),
    entry("sm80_fwd_bf16_d128_band", ampere_row(kBf16, 128), 98816),
    entry("sm80_fwd_bf16_d128_band_any", any_row(128), 98816),
    entry("sm80_fwd_bf16_d128_band_any_gqa", packed_row(128), 73000),
    entry("sm80_fwd_bf16_d64_band", ampere_row(kBf16, 64), 49664),
    entry("sm80_fwd_bf16_d64_band_any_gqa", packed_row(64), 71000),
};
constexpr std::array<const KernelEntry*, 7> kPackTable = {
    &kPackRows[0], &kPackRows[1], &kPackRows[2], &kPackRows[3],
    &kPackRows[4], &kPackRows[5], &kPackRows[6]};

constexpr KernelEntry kHopperPacked =
    entry("sm90_fwd_bf16_d128_band_gqa", hopper_packed(128), 230400);
constexpr std::array<const KernelEntry*, 4> kHopperTable = {&kPackRows[0], &kPackRows[1],
                                                            &kPackRows[4], &kHopperPacked};

Planned plan_of(const Call& call) {
  const Planned p = plan_call(call, kPackTable);
  expect(p.status == FA_OK, last_error());
  return p;
}

bool packs(const Call& call) { return plan_of(call).plan.main->config.pack == 1; }

void short_calls_are_packed() {
  for (int batch : {1, 8, 64}) {
    for (int keys : {64, 1000, 65536}) {
      expect(packs(Call(batch, 1, keys, 32, 8, 128).a100()), "one query, groups of 4, A100");
      expect(packs(Call(batch, 1, keys, 32, 8, 128).h200()), "one query, groups of 4, H200");
      expect(packs(Call(batch, 4, keys, 8, 1, 64).causal().a100()), "4 queries, groups of 8");
    }
    expect(packs(Call(batch, 1, 4096, 16, 16, 128).a100()), "one query, no groups, A100");
  }
  expect(!packs(Call(1, 33, 4096, 32, 8, 128).a100()), "33 positions");
  expect(packs(Call(1, 32, 4096, 32, 8, 128).a100()), "32 positions, groups of 4");
  expect(packs(Call(8, 32, 64, 16, 16, 128).a100()), "32 positions, no groups, few keys");
  expect(!packs(Call(2, 4096, 4096, 32, 8, 128).h200()), "long queries");
  Call call = Call(1, 1, 4096, 32, 8, 128).h200();
  call.params.options.batch_invariant = 1;
  expect(!packs(call), "a batch-invariant call");
  call = Call(1, 1, 4096, 32, 8, 128).a100();
  call.params.dropout.p = 0.5f;
  call.params.dropout.seed_offset = reinterpret_cast<const int64_t*>(uintptr_t{0x50000});
  expect(!packs(call), "dropout");
  call = Call(1, 1, 4096, 32, 8, 128).a100();
  call.params.score.softcap = 20;
  expect(packs(call), "a softcap");
}

void reasons() {
  char text[512];
  Planned p = plan_of(Call(1, 33, 4096, 32, 8, 128).a100());
  expect_contains(why_not(kPackRows[4], p.problem, p.device, text, sizeof(text)),
                  "at most 32 query positions, the call has 33");
  Call call = Call(1, 1, 4096, 32, 8, 128).a100();
  call.params.options.batch_invariant = 1;
  p = plan_of(call);
  expect_contains(why_not(kPackRows[4], p.problem, p.device, text, sizeof(text)),
                  "depends on the length of a call");
}

void plans() {
  // 20 rows of each of 8 key heads: two tiles of 16. 64 blocks of 128 keys each.
  Planned p = plan_of(Call(3, 5, 8192, 32, 8, 128).a100());
  expect_equal(p.plan.order.tiles_m, 2, "row tiles of a key head");
  expect_equal(p.plan.order.heads, 24, "key heads");
  expect_equal(p.plan.order.num_tiles, 48 * p.plan.num_splits, "tiles");
  expect(p.plan.num_splits > 1, "48 tiles on 216 places are split");
  expect_contains(describe(p.plan, p.problem, p.device, kPackTable).c_str(),
                  "the query heads of a key head share its row tiles");
  p = plan_of(Call(3, 5, 8192, 32, 8, 128).h200());
  expect(describe(p.plan, p.problem, p.device, kPackTable).find("fallback") == std::string::npos,
         "a packed row is no fallback");
  Call call = Call(1, 0, 0, 32, 8, 128).a100();
  call.params.seq.cu_q = call.params.seq.cu_k = some_array();
  call.params.shape.batch = 5;
  call.params.shape.total_q = 12;
  call.params.shape.total_k = 3000;
  call.params.lse.stride_head = 12;
  p = plan_of(call);
  expect(p.plan.main->config.pack == 1, "12 queries of 5 sequences");
  expect_equal(p.plan.order.tiles_m, 12 * 4 / 16 + 5 + 1, "padded list of row tiles");
  expect_equal(p.plan.order.heads, 8, "key heads");
  call.params.shape.seqlen_q = 33;  // the longest of them, by the caller's hint
  expect(plan_of(call).plan.main->config.pack == 0, "a long sequence among them");
}

// The fastest of three kinds of rows for short calls on an H200, as measured (microseconds).
void hopper() {
  const auto id = [](const Call& call) {
    const Planned p = plan_call(call, kHopperTable);
    expect(p.status == FA_OK, last_error());
    return std::string(p.plan.main->id);
  };
  const std::string hopper = kHopperTable[0]->id, none = kHopperTable[1]->id,
                    ampere = kHopperTable[2]->id, packed = kHopperPacked.id;
  const auto causal = [](int batch, int queries, int keys, int heads_q, int heads_k) {
    return Call(batch, queries, keys, heads_q, heads_k, 128).causal().h200();
  };
  for (int batch : {1, 8, 64})
    expect(id(Call(batch, 1, 4096, 32, 8, 128).h200()) == ampere,
           "15, 37, 257 us beside 36 to 518");
  expect(id(causal(16, 4, 4096, 32, 8)) == ampere, "67 beside 136 us");
  expect(id(Call(16, 1, 4096, 32, 32, 128).h200()) == ampere, "256 beside 264 us");
  expect(id(causal(16, 16, 4096, 32, 8)) == packed, "144, 136, 74 us");
  expect(id(causal(16, 32, 4096, 32, 8)) == packed, "74 beside 138 us");
  expect(id(causal(16, 16, 4096, 64, 8)) == packed, "75 beside 270 us");
  expect(id(causal(16, 64, 4096, 64, 8)) == packed, "197 beside 274 us");
  expect(id(causal(64, 16, 2048, 32, 8)) == packed, "139 beside 284 us");
  // In parts: this many, microseconds beside the faster of the others.
  const auto split = [&](const Call& call, int parts, const char* times) {
    const Planned p = plan_call(call, kHopperTable);
    expect(p.status == FA_OK, last_error());
    expect(p.plan.main->id == packed, times);
    expect_equal(p.plan.num_splits, parts, times);
    expect(!p.plan.counted, "the workspace holds parts");
  };
  split(causal(4, 32, 16384, 32, 8), 3, "86 beside 139 us");
  split(causal(1, 32, 16384, 32, 8), 10, "37 beside 75 us");
  split(causal(1, 16, 65536, 32, 8), 9, "80 beside 126 us");
  split(causal(4, 64, 16384, 32, 8), 2, "122 beside 140 us");
  split(causal(2, 128, 8192, 32, 8), 2, "66 beside 91 us");
  split(causal(1, 256, 16384, 32, 8), 2, "108 beside 170 us");
  split(causal(4, 16, 4096, 64, 8), 3, "36 beside 50 us");
  split(causal(1, 8, 16384, 64, 8), 10, "31 beside 44 us");
  split(causal(8, 16, 4096, 32, 8), 1, "44 beside 52 us in two parts");
  expect(id(causal(4, 8, 8192, 32, 8)) == ampere, "49 beside 47 us in four parts");
  expect(id(causal(64, 64, 64, 16, 16)) == hopper, "27 beside 61 us");
  expect(id(causal(16, 64, 4096, 16, 16)) == hopper, "no groups");
  expect(id(causal(16, 32, 4096, 16, 16)) == hopper, "two tiles of 16 rows in place of one");
  expect(id(causal(2, 4096, 4096, 32, 8)) == hopper, "full tiles");
  expect(id(Call(16, 48, 8192, 36, 4, 128).h200()) == none, "groups of 9");
  const Planned p = plan_call(Call(16, 40, 8192, 32, 8, 128).causal().h200(), kHopperTable);
  expect_equal(p.plan.order.tiles_m, 2, "160 rows of a key head");
  expect_equal(p.plan.order.heads, 128, "key heads");
  char text[512];
  const Planned nine = plan_call(Call(16, 48, 8192, 36, 4, 128).h200(), kHopperTable);
  expect_contains(why_not(kHopperPacked, nine.problem, nine.device, text, sizeof(text)),
                  "a power of two from 2 to 128, the call has 9");
}

// Calls of many short sequences: a row that packs heads wins by its parts only where it gets them.
void sequences_in_parts() {
  int in_parts = 0, whole = 0;
  for (int batch = 1; batch <= 40; ++batch) {
    Call call = Call(batch, 0, 0, 32, 2, 128).causal().h200(90);
    call.params.seq.cu_q = call.params.seq.cu_k = some_array();
    call.params.shape.total_q = 16 * batch;
    call.params.shape.total_k = 16384 * batch;
    call.params.lse.stride_head = 16 * batch;
    const Planned p = plan_call(call, kHopperTable);
    expect(p.status == FA_OK, last_error());
    if (p.plan.main->config.pack == 0) continue;
    const float beside = cost(kHopperPacked, p.problem, p.device);
    Problem one = p.problem;
    one.num_splits = 1;
    const float alone = cost(kHopperPacked, one, p.device);
    expect(p.plan.num_splits > 1 ? beside < alone : beside == alone,
           "the cost has the parts of the plan");
    ++(p.plan.num_splits > 1 ? in_parts : whole);
  }
  expect(in_parts > 0 && whole > 0, "calls in parts and calls in one");
}

// Parts of packed calls with few keys (microseconds on an H200: 13.0 in one part, 10.3 in 8).
void parts() {
  const auto of = [](int keys) {
    return plan_of(Call(1, 1, keys, 32, 8, 128).h200()).plan.num_splits;
  };
  expect_equal(of(512), 1, "parts of 512 keys");
  expect_equal(of(1024), 8, "parts of 1024 keys");
  expect_equal(of(16384), 32, "parts of 16384 keys");
}

// Every (sequence, position, head of the group) is a row of exactly one tile.
void every_row_has_a_tile() {
  std::mt19937 random(5);
  const auto below = [&random](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  for (int trial = 0; trial < 400; ++trial) {
    const int batch = 1 + below(5), group = 1 + below(9), tile_m = 16;
    std::vector<int32_t> cu(1, 0);
    for (int b = 0; b < batch; ++b) cu.push_back(cu.back() + below(3) * below(12));
    SeqArgs args{};
    args.cu_q = cu.data();
    args.batch = batch;
    args.total_q = cu.back() + below(7);  // rows of no sequence behind the last
    args.seqlen_k = 10;
    std::vector<int> hits(static_cast<size_t>(args.total_q * group));
    const int tiles = packed_tiles(args.total_q * group, batch, tile_m);
    for (int m = 0; m < tiles; ++m) {
      const SeqInfo s = seq_info(args, m, 0, tile_m, group);
      for (int r = s.m_first; r < s.m_first + tile_m && r < s.q_slot * group; ++r)
        ++hits[static_cast<size_t>((s.q_begin + r / group) * group + r % group)];
    }
    for (int hit : hits) expect_equal(hit, 1, "tiles of a row");
  }
}

// The warps' parts of the splits of a range are the range.
void parts_cover_a_range() {
  for (int end = 1; end < 40; ++end) {
    for (int splits : {1, 2, 3, 7, 50}) {
      KeyRange range{2, 3, end, end + 2, 0, 0};
      range.full_begin = min_of(range.full_begin, range.end);
      range.full_end = max_of(range.full_begin, range.full_end);
      int next = range.begin;
      for (int split = 0; split < splits; ++split) {
        const KeyRange whole = part_of(range, split, splits);
        for (int warp = 0; warp < 4; ++warp) {
          const KeyRange part = part_of(whole, warp, 4);
          expect_equal(part.begin, next, "begin of a warp's part");
          for (int n = part.full_begin; n < part.full_end; ++n)
            expect(n >= range.full_begin && n < range.full_end, "unmasked blocks stay unmasked");
          next = part.end;
        }
      }
      expect_equal(next, range.end, "end of the last part");
    }
  }
}

}  // namespace

int main() {
  short_calls_are_packed();
  reasons();
  plans();
  hopper();
  sequences_in_parts();
  parts();
  every_row_has_a_tile();
  parts_cover_a_range();
  return report("pack_test");
}
