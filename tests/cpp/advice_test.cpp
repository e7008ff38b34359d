// SPDX-License-Identifier: BSD-3-Clause
// Is a refusal's advice true? Every call of a cross product of options that a table refuses is made
// again as the message says.
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cpp/check.h"
#include "tests/cpp/fixture.h"

using namespace fa;
using namespace fa::test;

namespace {

struct Counts {
  long lines = 0, options = 0, tiles = 0, none = 0;
};

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::stringstream stream(line);
  for (std::string cell; std::getline(stream, cell, ',');) cells.push_back(cell);
  return cells;
}

DType dtype_of(const std::string& name) {
  return name == "fp16" ? DType::kFp16 : name == "bf16" ? DType::kBf16 : DType::kE4m3;
}

// What gen_variants.py makes of the columns on which selection depends.
KernelConfig config_of(const std::vector<std::string>& c) {
  const auto number = [&](int column) { return std::atoi(c[static_cast<size_t>(column)].c_str()); };
  KernelConfig row{};
  row.arch = number(1);
  row.op = c[2] == "fwd" ? Op::kForward : Op::kBackward;
  row.dtype = dtype_of(c[3]), row.kv_dtype = dtype_of(c[4]);
  row.head_dim_qk = number(5), row.head_dim_v = number(6);
  row.mask = c[7] == "band" ? MaskKind::kBand : MaskKind::kNone;
  row.score = c[8] == "any" ? ScoreKind::kAny : ScoreKind::kScale;
  row.kv = c[9] == "tma" ? LoadKind::kTma : LoadKind::kCpAsync;
  row.q = row.kv;
  row.tile_m = number(11), row.tile_n = number(12), row.warps = number(13), row.stages = number(14);
  row.pack = c[18].find("pack=1") != std::string::npos;
  row.dropout = c[18].find("dropout=1") != std::string::npos;
  return row;
}

// The rules of the families' config.h that concern how the columns belong together.
void expect_of_its_family(const KernelConfig& row, const std::string& line) {
  const bool forward = row.op == Op::kForward;
  const auto rule = [&](bool holds) {
    expect(holds, std::source_location::current(), "%s", line.c_str());
  };
  rule(row.head_dim_qk <= 256 && row.head_dim_v <= 256);
  if (row.arch == 80) {
    rule(row.dtype != DType::kE4m3 && (!row.dropout || row.score == ScoreKind::kAny));
    rule(forward ? row.tile_n % (4 * row.warps) == 0 && row.tile_m % (16 * row.warps) == 0
                 : row.head_dim_qk == row.head_dim_v && row.tile_n % (8 * row.warps) == 0);
  } else if (forward) {
    rule(!row.dropout && row.tile_m == 16 * (row.warps - 4));
    rule(row.head_dim_v <= row.head_dim_qk || line.find("o_buf=1") != std::string::npos);
  } else {
    const bool shared = row.tile_n == 64;
    rule(!row.dropout && row.warps == 12 && row.dtype != DType::kE4m3);
    rule(shared || (row.tile_m == (row.head_dim_qk == 64 ? 128 : 64)));
    rule(shared || row.score == ScoreKind::kScale);
    rule((line.find("dq_turns=2") != std::string::npos) == (!shared && row.head_dim_qk != 96));
  }
}

void follow(const Call& call, Op op, Table table, Counts* counts) {
  if (plan_call(call, table, op).status != FA_ERROR_UNSUPPORTED) return;
  const std::string text = last_error();
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  const auto expect_runs = [&](const Call& again, Table rows, const char* id) {
    const Planned p = plan_call(again, rows, op);
    expect(p.status == FA_OK && (id == nullptr || p.id() == id), std::source_location::current(),
           "%s, after: %s", p.id().c_str(), text.c_str());
  };
  const size_t runs = text.find("It runs with ");
  if (runs != std::string::npos) {
    ++counts->options;
    const std::string options = text.substr(runs, text.find(". ", runs) - runs);
    Call again = call;
    if (options.find("num_splits 0") != std::string::npos) again.params.options.num_splits = 0;
    if (options.find("force_arch 0") != std::string::npos) again.params.options.force_arch = 0;
    if (options.find("reserve_sms 0") != std::string::npos) again.params.options.reserve_sms = 0;
    expect_runs(again, table, nullptr);
  }
  const char* before = "The row needed in tools/variants.csv: ";
  const size_t at = text.find(before);
  if (at != std::string::npos) {
    ++counts->lines;
    const std::string line = text.substr(at + std::strlen(before));
    const std::vector<std::string> cells = cells_of(line);
    expect(cells.size() == 22, std::source_location::current(), "%s", line.c_str());
    const KernelConfig config = config_of(cells);
    expect_of_its_family(config, line);
    const KernelEntry added = entry(cells[0].c_str(), config, 0);
    std::vector<const KernelEntry*> rows(table.begin(), table.end());
    for (const KernelEntry* e : rows)
      expect(cells[0] != e->id, std::source_location::current(), "in the table: %s", text.c_str());
    rows.push_back(&added);
    expect_runs(call, rows, cells[0].c_str());
    return;
  }
  const bool tiles = says("A row of smaller tiles is needed in tools/variants.csv.");
  const bool none =
      says("No line of tools/variants.csv would serve it: ") && !says("would serve it: .");
  expect(tiles != none, std::source_location::current(), "%s", text.c_str());
  ++(tiles ? counts->tiles : counts->none);
}

const fa_factors kFactors{some_array(), 0, 0, 0, FA_FP32, 0};

// One option, or two that have met in one call before.
void (*const kOptions[])(fa_params&) = {
    [](fa_params&) {},
    [](fa_params& p) { p.mask.window_right = 0; },
    [](fa_params& p) { p.score.softcap = 30; },
    [](fa_params& p) { p.score.alibi_slopes = kFactors; },
    [](fa_params& p) { p.dropout = {0.5f, reinterpret_cast<const int64_t*>(some_array())}; },
    [](fa_params& p) { p.options.num_splits = 4; },
    [](fa_params& p) { p.options.batch_invariant = 1; },
    [](fa_params& p) { p.options.reserve_sms = 20; },
    [](fa_params& p) { p.descale.k = kFactors; },
    [](fa_params& p) { (p.descale.k = kFactors).block = 128; },
    [](fa_params& p) { (p.descale.k = kFactors).block = 100; },
    [](fa_params& p) { p.seq.leftpad_k = some_array(); },
    [](fa_params& p) { p.seq.batch_index_k = some_array(); },
    [](fa_params& p) {
      p.pages = {some_array(), 8, 64, 100};
      p.seq.used_k = some_array();
    },
    [](fa_params& p) { p.k.stride_batch = int64_t{1} << 40; },
};

void follow_everything(Op op, Table table, Counts* counts) {
  const struct {
    int sms, smem;
  } devices[] = {{132, 232448}, {108, 166912}, {128, 101376}, {128, 40000}};
  for (const auto& device : devices)
    for (int arch : {0, 80, 90})
      for (fa_dtype dtype : {FA_BF16, FA_E4M3})
        for (int dim : {64, 80, 192})
          for (int dim_v : {64, 128, 256})
            for (int heads_k : {2, 3, 12})
              for (const auto& first : kOptions)
                for (const auto& second : kOptions) {
                  if (op == Op::kBackward && dtype == FA_E4M3) continue;
                  Call call(2, 512, 512, 12, heads_k, dim, dtype);
                  call.params.shape.dim_v = dim_v;
                  if (dtype == FA_E4M3) call.params.out.dtype = FA_BF16;
                  if (op == Op::kBackward) call.backward();
                  first(call.params);
                  second(call.params);
                  call.device(device.sms, device.smem, arch);
                  follow(call, op, table, counts);
                }
}

}  // namespace

int main() {
  Counts counts;
  follow_everything(Op::kForward, kTable, &counts);
  follow_everything(Op::kForward, kBackwardTable, &counts);
  follow_everything(Op::kBackward, kTable, &counts);
  follow_everything(Op::kBackward, kBackwardTable, &counts);
  expect(counts.lines > 0 && counts.options > 0 && counts.tiles > 0 && counts.none > 0,
         "every kind of advice");
  std::printf("advice_test: %ld checks; advice: %ld lines, %ld options, %ld tiles, %ld none\n",
              checks, counts.lines, counts.options, counts.tiles, counts.none);
  return 0;
}
