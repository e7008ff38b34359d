// SPDX-License-Identifier: BSD-3-Clause
// Does each call get the row it should, and does a refusal say why and what would be needed?
#include <array>
#include <string>
#include <vector>

#include "tests/cpp/check.h"
#include "tests/cpp/fixture.h"

using namespace fa;
using namespace fa::test;

namespace {

void expect_row(const Call& call, const char* id, Table table = kTable,
                std::source_location at = std::source_location::current()) {
  const Planned p = plan_call(call, table);
  expect(p.id() == id, at, "row is \"%s\", expected \"%s\"", p.id().c_str(), id);
}

void expect_refused(const Call& call, fa_status status, const char* part, Table table = kTable,
                    std::source_location at = std::source_location::current()) {
  const Planned p = plan_call(call, table);
  expect(p.status == status, at, "status is %d, expected %d (%s)", p.status, status, last_error());
  expect_contains(last_error(), part, at);
}

void rows_by_mask() {
  expect_row(Call(2, 512, 512, 8, 8, 128).h200(), "sm90_fwd_bf16_d128_none");
  expect_row(Call(2, 512, 512, 8, 8, 128).causal().h200(), "sm90_fwd_bf16_d128_band");
  expect_row(Call(2, 512, 512, 8, 8, 64).causal().h200(), "sm90_fwd_bf16_d64_band");
  expect_row(Call(2, 512, 512, 8, 8, 128, FA_FP16).h200(), "sm90_fwd_fp16_d128_band");
  // Masks that hide nothing: one query row, windows as wide as the keys, a chunk around all of
  // them.
  expect_row(Call(2, 1, 512, 8, 8, 128).causal().h200(), "sm90_fwd_bf16_d128_none");
  Call window = Call(1, 256, 512, 8, 8, 128).h200();
  window.params.mask.window_left = 511;
  window.params.mask.window_right = 255;
  expect_row(window, "sm90_fwd_bf16_d128_none");
  window.params.mask.window_right = 254;
  expect_row(window, "sm90_fwd_bf16_d128_band");
  window.params.mask.window_right = -1;
  window.params.mask.window_left = 510;
  expect_row(window, "sm90_fwd_bf16_d128_band");
  window.params.mask.window_left = 255;
  window.params.mask.window_right = 511;
  window.params.mask.align = 1;
  expect_row(window, "sm90_fwd_bf16_d128_none");
  window.params.mask.window_right = 510;
  expect_row(window, "sm90_fwd_bf16_d128_band");
  Call chunk = Call(1, 256, 512, 8, 8, 128).h200();
  chunk.params.mask.chunk = 512;
  expect_row(chunk, "sm90_fwd_bf16_d128_none");
  chunk.params.mask.chunk = 511;
  expect_row(chunk, "sm90_fwd_bf16_d128_band");
  // More queries than keys: the first rows lie in the chunk before key 0 and see nothing.
  Call before = Call(1, 512, 256, 8, 8, 128).h200();
  before.params.mask.chunk = 1024;
  expect_row(before, "sm90_fwd_bf16_d128_band");
}

void rows_by_dim() {
  Call between = Call(2, 512, 512, 8, 8, 72).h200();
  expect_row(between, "sm90_fwd_bf16_d128_none");
  Call mixed = Call(2, 512, 512, 8, 8, 64).h200();
  mixed.params.shape.dim_v = 128;
  expect_row(mixed, "sm90_fwd_bf16_d128_none");
  expect_refused(Call(1, 64, 64, 1, 1, 192).h200(), FA_ERROR_UNSUPPORTED,
                 "head dim of q and k 128 < 192");
  expect_refused(Call(1, 64, 64, 1, 1, 192).h200(), FA_ERROR_UNSUPPORTED,
                 "sm90_fwd_bf16_d192_band,90,fwd,bf16,bf16,192,192,band,scale,tma,tma,");
}

// Beside rows for wider heads, a call takes the narrowest that holds it.
void rows_of_wide_heads() {
  constexpr auto wide = [](MaskKind mask, int dim_v, int tile_n) {
    KernelConfig row = hopper_row(kBf16, dim_v == 256 ? 256 : 192, mask);
    row.head_dim_v = dim_v;
    row.tile_n = tile_n;
    return row;
  };
  static constexpr std::array kWide = {
      entry("d256_band", wide(MaskKind::kBand, 256, 64), 198000),
      entry("d256_none", wide(MaskKind::kNone, 256, 64), 198000),
      entry("d192x128_band", wide(MaskKind::kBand, 128, 128), 214000),
      entry("d192x128_none", wide(MaskKind::kNone, 128, 128), 214000),
  };
  std::vector<const KernelEntry*> table;
  for (const KernelEntry& row : kWide) table.push_back(&row);
  table.insert(table.end(), kTable.begin(), kTable.end());
  const auto row_of = [](int dim, int dim_v) {
    return dim_v > 128 || dim > 192 ? "d256"
           : dim > 128              ? "d192x128"
           : dim_v > 64 || dim > 64 ? "sm90_fwd_bf16_d128"
                                    : "sm90_fwd_bf16_d64";
  };
  for (int dim : {8, 64, 72, 128, 136, 192, 200, 256})
    for (int dim_v : {8, 64, 72, 128, 136, 192, 200, 256})
      for (bool causal : {false, true})
        for (bool invariant : {false, true})
          for (int length : {1, 64, 128, 200, 1024, 16384}) {
            Call call(2, length, length, 8, 8, dim);
            call.params.shape.dim_v = dim_v;
            call.params.options.batch_invariant = invariant;
            if (causal) call.causal();
            const std::string mask = causal && (length > 1 || invariant) ? "_band" : "_none";
            expect_row(call.h200(), (row_of(dim, dim_v) + mask).c_str(), Table(table));
          }
  expect_refused(Call(2, 512, 512, 8, 8, 256).a100(), FA_ERROR_UNSUPPORTED,
                 "needs compute capability 9.x", Table(table));
}

// Head dim 256 on Ampere: blocks of four warps where a multiprocessor holds two of them or shared
// memory is small, one of eight on a GPU of 8.0. No narrower call goes to the lower tiles.
void ampere_tiles_by_device() {
  constexpr auto row = [](int dim, int dim_v, int tile_m, int warps, int tile_n = 64,
                          ScoreKind score = ScoreKind::kScale) {
    KernelConfig r = ampere_row(kBf16, dim);
    r.score = score;
    r.head_dim_v = dim_v;
    r.tile_m = tile_m;
    r.tile_n = tile_n;
    r.warps = warps;
    return r;
  };
  static constexpr std::array kLow = {
      entry("d192", row(192, 192, 64, 4), 74496),
      entry("d192x128", row(192, 128, 128, 4), 90880),
      entry("d256", row(256, 256, 64, 4), 99072),
      entry("d256_m128", row(256, 256, 128, 8), 132608),
      entry("d128", row(128, 128, 128, 4), 98816),
      entry("d128_n32", row(128, 128, 128, 4, 32), 66048),
      entry("d128_any", row(128, 128, 128, 4, 64, ScoreKind::kAny), 103424),
      entry("d128_any_n32", row(128, 128, 128, 4, 32, ScoreKind::kAny), 70656),
  };
  std::vector<const KernelEntry*> table;
  for (const KernelEntry& r : kLow) table.push_back(&r);
  table.insert(table.end(), kTable.begin(), kTable.end());
  const struct {
    const char* name;
    int sms, smem;  // of 8.0, 8.6 or 8.9, and 9.0
    const char *wide, *latent, *d128, *capped;
  } devices[] = {{"A100", 108, 166912, "d256_m128", "d192", "d128_n32", "d128_any_n32"},
                 {"RTX 4090", 128, 101376, "d256", "d192x128", "d128", "d128_any_n32"},
                 {"H200", 132, 232448, "d256", "d192x128", "d128", "d128_any"}};
  for (const auto& d : devices)
    for (int length : {1, 64, 200, 513, 1024, 16384})
      for (int left : {-1, 0, 100})
        for (bool invariant : {false, true}) {
          const auto call = [&](int dim, int dim_v) {
            Call c(2, length, length, 8, 8, dim);
            c.params.shape.dim_v = dim_v;
            c.params.options.batch_invariant = invariant;
            c.params.mask.window_left = left;
            return c.causal().device(d.sms, d.smem, 80);
          };
          expect_row(call(256, 256), d.wide, Table(table));
          expect_row(call(200, 64), d.wide, Table(table));
          expect_row(call(192, 192), "d192", Table(table));
          expect_row(call(192, 128), d.latent, Table(table));
          expect_row(call(128, 128), d.d128, Table(table));
          Call capped = call(128, 128);
          capped.params.score.softcap = 5;
          expect_row(capped, d.capped, Table(table));
          expect_row(call(64, 64), "sm80_fwd_bf16_d64_band", Table(table));
        }
}

// Backward: the largest tiles that shared memory holds, the score `any` only where it is asked for
// or where nothing else fits; whatever the order of the table.
void backward_tiles_by_device() {
  constexpr auto row = [](int dim, int tile_m, int tile_n, int warps,
                          ScoreKind score = ScoreKind::kScale) {
    KernelConfig r = backward_row(80, kBf16, dim);
    r.tile_m = tile_m;
    r.tile_n = tile_n;
    r.warps = warps;
    r.score = score;
    return r;
  };
  static constexpr std::array kRows80 = {
      entry("d128", row(128, 64, 128, 8), 165000),
      entry("d128_any", row(128, 64, 128, 8, ScoreKind::kAny), 165000),
      entry("d128_k100", row(128, 64, 64, 8), 82700),
      entry("d128_any_k100", row(128, 64, 64, 8, ScoreKind::kAny), 84800),
      entry("d256", row(256, 64, 64, 8), 214000),
      entry("d256_any", row(256, 64, 64, 8, ScoreKind::kAny), 148200),
      entry("d256_k100", row(256, 32, 32, 4), 74100),
  };
  std::vector<const KernelEntry*> table;
  for (const KernelEntry& r : kRows80) table.push_back(&r);
  const std::vector<const KernelEntry*> backwards(table.rbegin(), table.rend());
  const struct {
    int sms, smem;
    const char *d128, *d128_capped, *d256;
  } devices[] = {{108, 166912, "d128", "d128_any", "d256_any"},
                 {128, 101376, "d128_k100", "d128_any_k100", "d256_k100"},
                 {132, 232448, "d128", "d128_any", "d256"}};
  for (const auto& d : devices)
    for (int length : {64, 200, 1024, 16384})
      for (const auto& rows : {table, backwards}) {
        const auto expect_backward = [&](int dim, float softcap, const char* id) {
          Call call = Call(2, length, length, 8, 8, dim).device(d.sms, d.smem, 80).backward();
          call.params.score.softcap = softcap;
          const Planned p = plan_backward_call(call, Table(rows));
          const std::string got = p.status == FA_OK ? p.id() : "";
          expect(got == id, std::source_location::current(), "row is \"%s\", expected \"%s\"",
                 got.c_str(), id);
        };
        expect_backward(128, 0, d.d128);
        expect_backward(128, 30, d.d128_capped);
        expect_backward(256, 0, d.d256);
      }
}

// Backward on a Hopper GPU: its own rows, the narrowest that holds both head dims, however short
// the call and whatever the tiles.
void narrowest_backward() {
  constexpr auto hopper = [](int dim, int dim_v) {
    KernelConfig r = backward_row(90, kBf16, dim);
    r.head_dim_v = dim_v;
    r.tile_m = dim > 64 ? 64 : 128;
    r.tile_n = dim > 128 ? 64 : 128;
    return r;
  };
  constexpr auto ampere = [](int dim) {
    KernelConfig r = backward_row(80, kBf16, dim);
    r.tile_n = 64;
    return r;
  };
  static constexpr std::array kRowsOfBoth = {
      entry("sm80_d192", ampere(192), 180000),      entry("sm80_d256", ampere(256), 214000),
      entry("sm90_d128", hopper(128, 128), 229000), entry("sm90_d192", hopper(192, 192), 227000),
      entry("sm90_pair", hopper(192, 128), 194000), entry("sm90_d256", hopper(256, 256), 230000),
      entry("sm90_d64", hopper(64, 64), 217000),    entry("sm90_d96", hopper(96, 96), 200000)};
  std::vector<const KernelEntry*> both;
  for (const KernelEntry& r : kRowsOfBoth) both.push_back(&r);
  const auto expect_narrowest = [&](int dim, int dim_v, const char* id) {
    for (const auto& [batch, length] :
         {std::pair{1, 64}, {1, 300}, {8, 64}, {8, 200}, {8, 1024}, {8, 16384}}) {
      Call call(batch, length, length, 8, 8, dim);
      call.params.shape.dim_v = dim_v;
      const Planned p = plan_backward_call(call.h200().backward(), Table(both));
      expect(p.id() == id, std::source_location::current(), "row is \"%s\", expected \"%s\"",
             p.id().c_str(), id);
    }
  };
  expect_narrowest(256, 256, "sm90_d256");
  expect_narrowest(200, 200, "sm90_d256");
  expect_narrowest(192, 256, "sm90_d256");
  expect_narrowest(192, 192, "sm90_d192");
  expect_narrowest(128, 192, "sm90_d192");
  expect_narrowest(192, 128, "sm90_pair");
  expect_narrowest(136, 128, "sm90_pair");
  expect_narrowest(128, 128, "sm90_d128");
  expect_narrowest(96, 96, "sm90_d96");
  expect_narrowest(64, 96, "sm90_d96");
  expect_narrowest(64, 64, "sm90_d64");
}

// Tiles of fewer rows for short sequences and few heads, tiles of more for long ones.
void rows_by_length() {
  constexpr auto narrow = [](MaskKind mask, ScoreKind score) {
    KernelConfig row = hopper_row(kBf16, 64, mask);
    row.tile_m = 128;
    row.warps = 12;
    row.score = score;
    return row;
  };
  static constexpr std::array kMore = {
      entry("m128", narrow(MaskKind::kBand, ScoreKind::kScale), 115712),
      entry("any", narrow(MaskKind::kBand, ScoreKind::kAny), 115712),
  };
  std::vector<const KernelEntry*> table(kTable.begin(), kTable.end());
  for (const KernelEntry& row : kMore) table.push_back(&row);
  const Table rows(table);
  const char* wide = "sm90_fwd_bf16_d64_band";
  for (int length : {64, 128, 256})
    expect_row(Call(16, length, length, 32, 32, 64).causal().h200(), "m128", rows);
  for (int length : {512, 1024, 4096, 8192, 16384, 100000})
    expect_row(Call(16, length, length, 32, 32, 64).causal().h200(), wide, rows);
  // The order of the rows in the table decides nothing.
  std::vector<const KernelEntry*> backwards(table.rbegin(), table.rend());
  expect_row(Call(16, 256, 256, 32, 32, 64).causal().h200(), "m128", Table(backwards));
  expect_row(Call(1, 16384, 16384, 32, 32, 64).causal().h200(), wide, Table(backwards));
  // Measured on an H200: many tiles, and fewer than two rounds of them.
  expect_row(Call(64, 1024, 1024, 9, 3, 64).causal().h200(), wide, rows);
  expect_row(Call(2, 8192, 8192, 4, 4, 64).causal().h200(), wide, rows);
  expect_row(Call(2, 4096, 4096, 4, 4, 64).causal().h200(), "m128", rows);
  // Fewer tiles than multiprocessors: the smaller ones end sooner.
  expect_row(Call(1, 2048, 2048, 4, 4, 64).causal().h200(), "m128", rows);
  // Packed: by the average length, never by the hint of the longest.
  for (int hint : {0, 128, 16384})
    for (int batch : {1, 256}) {
      Call packed = Call(batch, 0, 0, 32, 32, 64).causal().h200();
      packed.params.seq.cu_q = packed.params.seq.cu_k = some_array();
      packed.params.shape.total_q = packed.params.shape.total_k = 16384;
      packed.params.shape.seqlen_q = packed.params.shape.seqlen_k = hint;
      packed.params.lse.stride_head = 16384;
      expect_row(packed, batch == 1 ? wide : "m128", rows);
    }
  // What the lengths would decide is decided without them; scores by what they need.
  for (int length : {64, 1024, 16384}) {
    Call call = Call(1, length, length, 2, 2, 64).causal().h200();
    call.params.score.softcap = 3;
    expect_row(call, "any", rows);
    call.params.options.batch_invariant = 1;
    expect_row(call, "any", rows);
    call.params.score.softcap = 0;
    expect_row(call, wide, rows);
    expect_row(call, wide, Table(backwards));
  }
}

void rows_by_device() {
  expect_row(Call(2, 512, 512, 8, 8, 128).a100(), "sm80_fwd_bf16_d128_band");
  expect_row(Call(2, 512, 512, 8, 8, 128).h200(80), "sm80_fwd_bf16_d128_band");
  expect_row(Call(2, 512, 512, 8, 8, 128).h200(90), "sm90_fwd_bf16_d128_none");
  // A GPU with little shared memory loses the rows that need more, and is told so.
  expect_row(Call(2, 512, 512, 8, 8, 64).device(20, 50000), "sm80_fwd_bf16_d64_band");
  expect_refused(Call(2, 512, 512, 8, 8, 128).device(20, 50000), FA_ERROR_UNSUPPORTED,
                 "needs 98816 bytes of shared memory, a block of the device may have 50000");
}

void hopper_takes_device_lengths() {
  for (auto member : {&fa_sequences::used_q, &fa_sequences::used_k, &fa_sequences::leftpad_k,
                      &fa_sequences::batch_index_k}) {
    Call call = Call(2, 512, 512, 8, 8, 128).h200();
    call.params.seq.*member = some_array();
    expect_row(call, "sm90_fwd_bf16_d128_none");
  }
  Call packed = Call(2, 0, 0, 8, 8, 128).h200();
  packed.params.seq.cu_q = packed.params.seq.cu_k = some_array();
  packed.params.shape.total_q = packed.params.shape.total_k = 1000;
  expect_row(packed, "sm90_fwd_bf16_d128_none");
}

void hopper_falls_back() {
  Call strided = Call(2, 512, 512, 8, 8, 128).h200();
  strided.params.k.stride_batch = int64_t{1} << 39;
  expect_row(strided, "sm80_fwd_bf16_d128_band");
  strided.params.options.force_arch = 90;
  expect_refused(strided, FA_ERROR_UNSUPPORTED, "does not fit a tensor map");
}

// Ampere rows split the keys, as do Hopper rows that pack query heads; those that can drop weights
// say so.
void options_of_ampere_rows() {
  Call call = Call(2, 512, 512, 8, 8, 128).h200();
  call.params.options.num_splits = 4;
  expect_row(call, "sm80_fwd_bf16_d128_band");
  call.params.options.force_arch = 90;
  expect_refused(call, FA_ERROR_UNSUPPORTED, "cannot split the keys (num_splits 4)");
  constexpr auto dropping = [] {
    KernelConfig row = ampere_row(kBf16, 128);
    row.score = ScoreKind::kAny;
    row.dropout = 1;
    return row;
  };
  static constexpr KernelEntry kDropping = entry("any", dropping(), 65536);
  std::vector<const KernelEntry*> table(kTable.begin(), kTable.end());
  table.push_back(&kDropping);
  call = Call(2, 512, 512, 8, 8, 128).h200();
  call.params.dropout = {0.5f, reinterpret_cast<const int64_t*>(some_array())};
  expect_row(call, "any", Table(table));
  call.params.dropout.p = 0.001f;  // a threshold of 0 keeps everything
  expect_row(call, "sm90_fwd_bf16_d128_none", Table(table));
  // The table has such a row, on the other architecture: it is not missing.
  call.params.dropout.p = 0.5f;
  call.params.options.force_arch = 90;
  expect_refused(call, FA_ERROR_UNSUPPORTED, "no dropout", Table(table));
  expect(std::string(last_error()).find("Not built yet") == std::string::npos, last_error());
}

void options_without_rows() {
  const auto refused = [](auto change, const char* part) {
    Call call = Call(2, 512, 512, 8, 8, 128).h200();
    change(call.params);
    expect_refused(call, FA_ERROR_UNSUPPORTED, part);
    expect_contains(last_error(), "fa: not supported: ");
    expect_contains(last_error(), "Nearest of 9 rows: ");
  };
  const fa_factors factors{some_array(), 0, 0, 0, FA_FP32, 0};
  refused([](fa_params& p) { p.score.softcap = 30; }, "no softcap");
  refused([](fa_params& p) { p.score.softcap = 30; },
          "sm90_fwd_bf16_d128_band_any,90,fwd,bf16,bf16,128,128,band,any,");
  refused([&](fa_params& p) { p.score.alibi_slopes = factors; }, "no ALiBi");
  refused([&](fa_params& p) { p.descale.k = factors; }, "no descales");
  refused([](fa_params& p) { p.dropout = {0.5f, reinterpret_cast<const int64_t*>(some_array())}; },
          "no dropout");
  refused(
      [](fa_params& p) {
        p.pages = {some_array(), 8, 64, 100};
        p.seq.used_k = some_array();
      },
      "no page table");
  refused([](fa_params& p) { p.k.dtype = p.v.dtype = FA_E4M3; }, "16-bit queries on e4m3 keys");
  // The rows of the call's own size come first; what no column can state gets no line.
  Call small = Call(2, 512, 512, 8, 8, 64).h200();
  small.params.score.softcap = 30;
  expect_refused(small, FA_ERROR_UNSUPPORTED, "Nearest of 9 rows: sm90_fwd_bf16_d64_band: ");
  small.params.options.num_splits = 2;
  small.params.options.force_arch = 90;
  expect_refused(small, FA_ERROR_UNSUPPORTED, "No line of tools/variants.csv would serve it: ");
}

void backward_rows() {
  const auto chosen = [](const Call& call, const char* id) {
    const Planned p = plan_backward_call(call);
    expect(p.id() == id, std::source_location::current(), "%s", p.id().c_str());
  };
  const auto refused = [](const Call& call, Table table, const char* reason) {
    expect_equal(plan_backward_call(call, table).status, FA_ERROR_UNSUPPORTED, reason);
    expect_contains(last_error(), reason);
  };
  refused(Call(2, 512, 512, 8, 8, 128).h200().backward(), kTable,
          "the row is a forward, the call a backward");
  expect_contains(last_error(), "Not built yet: a backward kernel");
  chosen(Call(2, 512, 512, 8, 8, 128).h200().backward(), "sm90_bwd_bf16_d128_band");
  chosen(Call(2, 512, 512, 8, 8, 128).h200(80).backward(), "sm80_bwd_bf16_d128_band");
  chosen(Call(2, 512, 512, 8, 2, 64).a100().backward(), "sm80_bwd_bf16_d64_band");
  // A stride that no tensor map holds, in a tensor that only the backward has.
  Call wide = Call(2, 512, 512, 8, 8, 128).h200().backward();
  wide.params.grad.dout.stride_batch = int64_t{1} << 39;
  chosen(wide, "sm80_bwd_bf16_d128_band");
  // The forward's number of splits means nothing here.
  Call split = Call(2, 512, 512, 8, 8, 128).h200().backward();
  split.params.options.num_splits = 4;
  chosen(split, "sm90_bwd_bf16_d128_band");
  // A block of a Hopper row works on one tile: fewer blocks than tiles would leave some out.
  Call reserved = Call(8, 4096, 4096, 16, 16, 128).h200().backward();
  reserved.params.options.reserve_sms = 20;
  chosen(reserved, "sm80_bwd_bf16_d128_band");
  reserved.params.options.force_arch = 90;
  refused(reserved, kBackwardTable, "works on every multiprocessor (reserve_sms 20)");
  Call indexed = Call(2, 512, 512, 8, 8, 128).h200().backward();
  indexed.params.seq.batch_index_k = some_array();
  refused(indexed, kBackwardTable, "a batch index of k and v");
  expect_contains(last_error(), "No line of tools/variants.csv would serve it: ");
}

// Values and knobs that config.h of the family asks for, and a head dim that it can have.
void lines_of_missing_rows() {
  const auto needed = [](const Call& call, Op op, const char* line) {
    expect_equal(plan_call(call, kTable, op).status, FA_ERROR_UNSUPPORTED, line);
    expect_contains(last_error(), "The row needed in tools/variants.csv: ");
    expect_contains(last_error(), line);
  };
  needed(Call(2, 512, 512, 8, 8, 80).h200().backward(), Op::kBackward,
         "sm90_bwd_bf16_d96_band,90,bwd,bf16,bf16,96,96,band,scale,tma,tma,64,128,12,2,1,dynamic,"
         "overlap,stages_ds=2 dq=bulk,release,30,");
  needed(Call(2, 512, 512, 8, 8, 64).h200().backward(), Op::kBackward,
         "sm90_bwd_bf16_d64_band,90,bwd,bf16,bf16,64,64,band,scale,tma,tma,128,128,12,3,1,dynamic,"
         "overlap,stages_ds=2 dq=vector dq_turns=2,release,30,");
  expect_equal(plan_backward_call(Call(2, 512, 512, 8, 8, 64, FA_FP16).h200(90).backward()).status,
               FA_ERROR_UNSUPPORTED, "a dtype without rows");
  expect_contains(last_error(),
                  "sm90_bwd_fp16_d64_band,90,bwd,fp16,fp16,64,64,band,scale,tma,tma,"
                  "128,128,12,3,1,dynamic,");
  needed(Call(2, 512, 512, 8, 8, 80).a100().backward(), Op::kBackward,
         "sm80_bwd_bf16_d96_band,80,bwd,bf16,bf16,96,96,band,scale,cpasync,cpasync,64,64,8,1,1,"
         "static,serial,dq=atomic dq_turns=8,release,30,");
  needed(Call(2, 512, 512, 8, 8, 160).h200().backward(), Op::kBackward,
         "sm90_bwd_bf16_d192_band,90,bwd,bf16,bf16,192,192,band,scale,tma,tma,64,64,12,2,1,static,"
         "overlap,stages_ds=2 dq=vector,release,30,");
  Call capped_backward = Call(2, 512, 512, 8, 8, 80).h200().backward();
  capped_backward.params.score.softcap = 30;
  needed(capped_backward, Op::kBackward,
         "sm90_bwd_bf16_d128_band_any,90,bwd,bf16,bf16,128,128,band,any,tma,tma,64,64,12,2,1,"
         "static,overlap,stages_ds=2 dq=vector,release,30,");
  Call capped = Call(2, 512, 512, 8, 8, 80).h200();
  capped.params.score.softcap = 30;
  needed(capped, Op::kForward,
         "sm90_fwd_bf16_d96_band_any,90,fwd,bf16,bf16,96,96,band,any,tma,tma,128,128,12,2,1,static,"
         "overlap,,release,30,");
  Call split = Call(2, 512, 512, 8, 2, 64, FA_FP16).h200(90);
  split.params.options.num_splits = 4;
  needed(split, Op::kForward,
         "sm90_fwd_fp16_d64_band_gqa,90,fwd,fp16,fp16,64,64,band,scale,tma,tma,128,64,12,2,1,"
         "static,overlap,pack=1,release,30,");
  expect(std::string(last_error()).find("Not built yet") == std::string::npos, last_error());
  split.params.score.softcap = 30;
  expect_refused(split, FA_ERROR_UNSUPPORTED, "splitting the keys. No line of");
  Call bytes = Call(2, 512, 512, 8, 8, 80, FA_E4M3).h200();
  bytes.params.out.dtype = FA_BF16;
  needed(
      bytes, Op::kForward,
      "sm90_fwd_e4m3_d128_band,90,fwd,e4m3,e4m3,128,128,band,scale,tma,tma,192,128,16,2,1,static,"
      "serial,o_buf=1,release,30,");
}

// Head dim 128 in e4m3: two warpgroups where an unmasked call is short, else three, which transpose
// V themselves up to 2048 keys; the row with score policies for no plain call, however few rows of
// a window it would waste.
void rows_of_e4m3() {
  KernelConfig config = hopper_row(DType::kE4m3, 128, MaskKind::kBand);
  config.tile_m = 192, config.warps = 16;
  const KernelEntry tall = entry("tall", config, 200000);
  config.v_rows = 4;
  const KernelEntry own = entry("own", config, 200000);
  config = hopper_row(DType::kE4m3, 128, MaskKind::kNone);
  config.tile_n = 256;
  config.v_rows = 2;
  const KernelEntry wide = entry("wide", config, 200000);
  config = hopper_row(DType::kE4m3, 128, MaskKind::kBand);
  config.score = ScoreKind::kAny;
  const KernelEntry any = entry("any", config, 200000);
  const std::array<const KernelEntry*, 4> rows = {&tall, &own, &wide, &any};
  for (int length : {256, 1024, 2048, 16384}) {
    Call c = Call(16384 / length, length, length, 16, 16, 128, FA_E4M3).h200();
    c.params.out.dtype = FA_BF16;
    expect_row(c, length < 2048 ? "wide" : length == 2048 ? "own" : "tall", rows);
    expect_row(c.causal(), length <= 2048 ? "own" : "tall", rows);
  }
  Call window = Call(1, 513, 700, 4, 2, 128, FA_E4M3).h200();
  window.params.out.dtype = FA_BF16;
  window.params.mask.window_left = 100;
  window.params.mask.window_right = 20;
  expect_row(window, "own", rows);
  Call shared = Call(4, 4096, 4096, 32, 8, 128, FA_E4M3).h200();
  shared.params.out.dtype = FA_BF16;
  expect_row(shared, "tall", rows);
  expect_row(shared.causal(), "tall", rows);
}

// V transposed by the attention kernel itself where a call is short, ahead of it where that is a
// small part: long calls, and groups of query heads that share the result. Contiguous keys leave no
// choice.
void rows_that_transpose_values() {
  for (int dim : {64, 128, 256}) {
    KernelConfig config = hopper_row(DType::kE4m3, dim, MaskKind::kBand);
    const KernelEntry ahead = entry("ahead", config, 200000);
    config.v_rows = 4;
    const KernelEntry own = entry("own", config, 200000);
    const std::array<const KernelEntry*, 2> rows = {&ahead, &own};
    const auto call = [dim](int batch, int length_q, int length_k, int group) {
      const int heads = 2048 / dim;
      Call c = Call(batch, length_q, length_k, heads, heads / group, dim, FA_E4M3).h200();
      c.params.out.dtype = FA_BF16;
      return c;
    };
    expect_row(call(16, 1024, 1024, 1), "own", rows);
    expect_row(call(16, 1024, 1024, 1).causal(), "own", rows);
    expect_row(call(1, 16384, 16384, 1), "ahead", rows);
    expect_row(call(8, 128, 8192, 1), "own", rows);
    expect_row(call(4, 4096, 4096, 4), "ahead", rows);
    Call columns = call(16, 1024, 1024, 1);
    columns.params.v.stride_row = 1;
    columns.params.v.stride_dim = 1024;
    columns.params.v.stride_head = int64_t{1024} * dim;
    expect_row(columns, "ahead", rows);
    const std::array<const KernelEntry*, 1> alone = {&own};
    expect_refused(columns, FA_ERROR_UNSUPPORTED, "transposes v itself", alone);
  }
}

// A row that has score policies, and blocks of keys with one descale each.
void descales_per_block() {
  KernelConfig config = hopper_row(DType::kE4m3, 64, MaskKind::kBand);
  const KernelEntry plain = entry("plain", config, 140288);
  config.score = ScoreKind::kAny;
  config.tile_n = 64;
  const KernelEntry any = entry("any", config, 140288);
  const std::array<const KernelEntry*, 2> rows = {&plain, &any};
  const auto call = [](int block_q, int block_k, int block_v) {
    Call c = Call(2, 512, 512, 8, 8, 64, FA_E4M3).h200();
    c.params.out.dtype = FA_BF16;
    c.params.descale.q = {some_array(), 0, 0, 1, FA_FP32, block_q};
    c.params.descale.k = {some_array(), 0, 0, 1, FA_FP32, block_k};
    c.params.descale.v = {some_array(), 0, 0, 1, FA_FP32, block_v};
    return c;
  };
  expect_row(call(0, 0, 0), "plain", rows);
  expect_row(call(10, 0, 0), "any", rows);
  expect_row(call(128, 64, 64), "any", rows);
  expect_row(call(0, 0, 192), "any", rows);
  expect_refused(call(0, 96, 64), FA_ERROR_UNSUPPORTED,
                 "any: descales per 96 keys, which must be a multiple of 64", rows);
  expect_refused(call(0, 128, 32), FA_ERROR_UNSUPPORTED, "any: descales per 32 keys", rows);
  expect_contains(last_error(), ",band,any,tma,tma,192,32,16,");
  expect_refused(call(0, 16, 16), FA_ERROR_UNSUPPORTED,
                 "No line of tools/variants.csv would serve it: ", rows);
  Call padded = call(0, 64, 0);
  padded.params.seq.leftpad_k = some_array();
  expect_refused(padded, FA_ERROR_UNSUPPORTED, "with left padding, which moves the blocks", rows);
  padded.params.descale.k.block = 0;
  padded.params.descale.q.block = 16;
  expect_row(padded, "any", rows);
  // A table without such rows.
  expect_refused(call(0, 128, 128), FA_ERROR_UNSUPPORTED,
                 "Not built yet: descales per block of rows");
  expect_contains(last_error(), "score is `scale`: no descales per block of rows");
  expect_contains(last_error(), ",band,any,");
}

void devices_without_rows() {
  const Table hopper_only = Table(kTable).first(5);
  expect_refused(Call(2, 512, 512, 8, 8, 128).a100(), FA_ERROR_DEVICE,
                 "no kernel of this build runs on a GPU of compute capability 8.0 (nominal): it "
                 "holds 5 rows for 9.x (Hopper). Rebuild",
                 hopper_only);
  expect_contains(last_error(), "FA_ARCHS=\"80\" pip install .");
  expect_refused(Call(2, 512, 512, 8, 8, 128).h200(), FA_ERROR_DEVICE, "it holds no rows. Rebuild",
                 Table());
  // Capabilities that no options can name.
  const Planned p = plan_call(Call(2, 512, 512, 8, 8, 128).h200());
  DeviceInfo device = p.device;
  const KernelEntry* row = nullptr;
  for (int capability : {86, 89, 100, 120}) {
    device.capability = capability;
    expect(select(p.problem, device, kTable, &row) == FA_OK, last_error());
    expect(row->config.arch == 80, "a GPU other than Hopper runs an Ampere row");
  }
  device.capability = 75;
  expect(select(p.problem, device, kTable, &row) == FA_ERROR_DEVICE, "7.5 has no rows");
  expect_contains(last_error(), "compute capability 7.5");
}

// Lengths and batch may not change the row of a batch-invariant call.
void batch_invariance() {
  for (int causal : {0, 1})
    for (int seqlen : {1, 7, 512, 100000})
      for (int batch : {1, 3, 500}) {
        Call call = Call(batch, seqlen, 512, 8, 8, 128).h200();
        call.params.options.batch_invariant = 1;
        if (causal) call.causal();
        expect_row(call, causal ? "sm90_fwd_bf16_d128_band" : "sm90_fwd_bf16_d128_none");
      }
}

}  // namespace

int main() {
  rows_by_mask();
  rows_by_dim();
  rows_of_wide_heads();
  ampere_tiles_by_device();
  backward_tiles_by_device();
  narrowest_backward();
  rows_by_length();
  rows_by_device();
  hopper_takes_device_lengths();
  hopper_falls_back();
  options_of_ampere_rows();
  options_without_rows();
  backward_rows();
  lines_of_missing_rows();
  rows_of_e4m3();
  rows_that_transpose_values();
  descales_per_block();
  devices_without_rows();
  batch_invariance();
  return report("select_test");
}
