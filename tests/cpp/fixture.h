// SPDX-License-Identifier: BSD-3-Clause
// Which rows, devices and calls do the tests of the host side use? None of them needs CUDA or a
// built kernel.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "kernels_common/host/error.h"
#include "kernels_common/host/plan.h"

namespace fa::test {

constexpr KernelConfig hopper_row(DType dtype, int dim, MaskKind mask) {
  return KernelConfig{.arch = 90,
                      .op = Op::kForward,
                      .dtype = dtype,
                      .kv_dtype = dtype,
                      .head_dim_qk = dim,
                      .head_dim_v = dim,
                      .mask = mask,
                      .score = ScoreKind::kScale,
                      .kv = LoadKind::kTma,
                      .q = LoadKind::kTma,
                      .tile_m = dim == 64 ? 192 : 128,
                      .tile_n = 128,
                      .warps = dim == 64 ? 16 : 12,
                      .stages = 2,
                      .cluster = 1,
                      .sched = SchedKind::kStatic,
                      .step = StepKind::kOverlap,
                      .turns = Turns::kGemm};
}

constexpr KernelConfig ampere_row(DType dtype, int dim) {
  return KernelConfig{.arch = 80,
                      .op = Op::kForward,
                      .dtype = dtype,
                      .kv_dtype = dtype,
                      .head_dim_qk = dim,
                      .head_dim_v = dim,
                      .mask = MaskKind::kBand,
                      .score = ScoreKind::kScale,
                      .kv = LoadKind::kCpAsync,
                      .q = LoadKind::kCpAsync,
                      .tile_m = 128,
                      .tile_n = 64,
                      .warps = 4,
                      .stages = 2,
                      .cluster = 1,
                      .sched = SchedKind::kStatic,
                      .step = StepKind::kSerial};
}

constexpr KernelEntry entry(const char* id, KernelConfig config, int smem_bytes) {
  return KernelEntry{id, config, config.warps * 32, smem_bytes, nullptr, nullptr};
}

inline constexpr auto kBf16 = DType::kBf16;
inline constexpr auto kFp16 = DType::kFp16;

// A table like that of a release build; shared memory as the tiles need it.
inline constexpr std::array kRows = {
    entry("sm90_fwd_bf16_d128_band", hopper_row(kBf16, 128, MaskKind::kBand), 230400),
    entry("sm90_fwd_bf16_d128_none", hopper_row(kBf16, 128, MaskKind::kNone), 230400),
    entry("sm90_fwd_bf16_d64_band", hopper_row(kBf16, 64, MaskKind::kBand), 140288),
    entry("sm90_fwd_bf16_d64_none", hopper_row(kBf16, 64, MaskKind::kNone), 140288),
    entry("sm90_fwd_fp16_d128_band", hopper_row(kFp16, 128, MaskKind::kBand), 230400),
    entry("sm90_fwd_e4m3_d64_band", hopper_row(DType::kE4m3, 64, MaskKind::kBand), 140288),
    entry("sm80_fwd_bf16_d128_band", ampere_row(kBf16, 128), 98816),
    entry("sm80_fwd_bf16_d64_band", ampere_row(kBf16, 64), 49664),
    entry("sm80_fwd_fp16_d128_band", ampere_row(kFp16, 128), 98816),
};

template <size_t... I>
constexpr auto pointers(std::index_sequence<I...>) {
  return std::array<const KernelEntry*, sizeof...(I)>{&kRows[I]...};
}
inline constexpr auto kTable = pointers(std::make_index_sequence<kRows.size()>());

constexpr KernelConfig backward_row(int arch, DType dtype, int dim) {
  KernelConfig row = arch == 90 ? hopper_row(dtype, dim, MaskKind::kBand) : ampere_row(dtype, dim);
  row.op = Op::kBackward;
  row.tile_m = 64;
  row.tile_n = 128;
  row.warps = arch == 90 ? 12 : 8;
  return row;
}

// Rows of a build with backward kernels; the forward rows are none of their business.
inline constexpr std::array kBackwardRows = {
    entry("sm90_fwd_bf16_d128_band", hopper_row(kBf16, 128, MaskKind::kBand), 164864),
    entry("sm90_bwd_bf16_d128_band", backward_row(90, kBf16, 128), 200000),
    entry("sm80_bwd_bf16_d128_band", backward_row(80, kBf16, 128), 150000),
    entry("sm80_bwd_bf16_d64_band", backward_row(80, kBf16, 64), 100000),
};
inline constexpr std::array<const KernelEntry*, 4> kBackwardTable = {
    &kBackwardRows[0], &kBackwardRows[1], &kBackwardRows[2], &kBackwardRows[3]};

// Rows of both directions, for a libfa that is built for tests of Python.
inline constexpr auto kStandIn = [] {
  std::array<const KernelEntry*, kTable.size() + kBackwardTable.size() - 1> all{};
  for (size_t i = 0; i < kTable.size(); ++i) all[i] = kTable[i];
  for (size_t i = 1; i < kBackwardTable.size(); ++i) all[kTable.size() + i - 1] = kBackwardTable[i];
  return all;
}();

// A dense call with contiguous tensors at addresses that nothing reads.
struct Call {
  fa_params params;

  Call(int batch, int seqlen_q, int seqlen_k, int heads_q, int heads_k, int dim,
       fa_dtype dtype = FA_BF16) {
    params = fa_params{};
    params.struct_size = sizeof(params);
    params.abi_version = FA_ABI_VERSION;
    params.score.scale = NAN;
    params.mask.window_left = params.mask.window_right = -1;
    fa_shape& s = params.shape;
    s.batch = batch;
    s.seqlen_q = seqlen_q;
    s.seqlen_k = seqlen_k;
    s.heads_q = heads_q;
    s.heads_k = heads_k;
    s.dim_qk = s.dim_v = dim;
    params.q = tensor(0x10000, seqlen_q, heads_q, dim, dtype);
    params.k = tensor(0x20000, seqlen_k, heads_k, dim, dtype);
    params.v = tensor(0x30000, seqlen_k, heads_k, dim, dtype);
    params.out = tensor(0x40000, seqlen_q, heads_q, dim, dtype);
  }

  static fa_tensor tensor(uintptr_t address, int64_t rows, int64_t heads, int64_t dim,
                          fa_dtype dtype) {
    return fa_tensor{
        reinterpret_cast<void*>(address), rows * heads * dim, heads * dim, dim, 1, dtype, 0};
  }

  Call& device(int sm_count, int smem_limit, int force_arch = 0) {
    params.options.sm_count = sm_count;
    params.options.smem_limit = smem_limit;
    params.options.force_arch = force_arch;
    return *this;
  }
  Call& h200(int force_arch = 0) { return device(132, 232448, force_arch); }
  Call& a100() { return device(108, 166912); }
  // Gradients of the same shapes and dtype.
  Call& backward() {
    const fa_shape& s = params.shape;
    const auto dtype = static_cast<fa_dtype>(params.q.dtype);
    params.grad.dout = tensor(0x60000, s.seqlen_q, s.heads_q, s.dim_v, dtype);
    params.grad.dq = tensor(0x70000, s.seqlen_q, s.heads_q, s.dim_qk, dtype);
    params.grad.dk = tensor(0x80000, s.seqlen_k, s.heads_k, s.dim_qk, dtype);
    params.grad.dv = tensor(0x90000, s.seqlen_k, s.heads_k, s.dim_v, dtype);
    params.lse = fa_lse{reinterpret_cast<float*>(uintptr_t{0xA0000}),
                        int64_t{s.heads_q} * s.seqlen_q, s.seqlen_q};
    return *this;
  }
  Call& causal() {
    params.mask.window_right = 0;
    return *this;
  }
};

// An address for arrays that are only there or not.
inline const int32_t* some_array() { return reinterpret_cast<const int32_t*>(uintptr_t{0x50000}); }

struct Planned {
  fa_status status;
  Problem problem;
  DeviceInfo device;
  Plan plan;
  std::string id() const { return status == FA_OK ? plan.main->id : fa_status_text(); }
  static std::string fa_status_text() { return last_error(); }
};

inline Planned plan_call(const Call& call, Table table = kTable, Op op = Op::kForward) {
  Planned r{};
  r.status = make_problem(op, &call.params, DataCheck::kRequired, &r.problem);
  if (r.status == FA_OK) r.status = device_info(r.problem, Purpose::kPlan, &r.device);
  if (r.status == FA_OK) r.status = make_plan(r.problem, r.device, table, &r.plan);
  return r;
}

inline Planned plan_backward_call(const Call& call, Table table = kBackwardTable) {
  return plan_call(call, table, Op::kBackward);
}

}  // namespace fa::test
