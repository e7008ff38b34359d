// SPDX-License-Identifier: BSD-3-Clause
// The exported functions of fa.h: check, plan, launch. What each of these means is decided in
// kernels_common/host.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "kernels_common/api/fa.h"
#include "kernels_common/host/combine.h"
#include "kernels_common/host/device_info.h"
#include "kernels_common/host/error.h"
#include "kernels_common/host/params_version.h"
#include "kernels_common/host/plan.h"
#include "kernels_common/host/plan_log.h"
#include "kernels_common/host/problem.h"
#include "kernels_common/host/refusal.h"
#include "kernels_common/host/registry.h"
#include "kernels_common/host/splits.h"

#ifndef FA_VERSION_STRING
#define FA_VERSION_STRING "0.1.0"
#endif

namespace {

using namespace fa;

// Texts are built with std::string; nothing thrown by it may cross the C boundary.
template <class Body>
fa_status guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& e) {
    return fail(FA_ERROR_INTERNAL, "internal error: %s.", e.what());
  }
}

fa_status known_op(fa_op op) {
  if (op == FA_FORWARD || op == FA_BACKWARD) return FA_OK;
  return fail(FA_ERROR_INVALID,
              "op is %d, allowed are FA_FORWARD (1) and FA_BACKWARD (2): these take fa_params.",
              static_cast<int>(op));
}

fa_status plan_for(Op op, const fa_params* params, Purpose purpose, Problem* problem,
                   DeviceInfo* device, Plan* plan) {
  FA_TRY(make_problem(op, params,
                      purpose == Purpose::kLaunch ? DataCheck::kRequired : DataCheck::kOptional,
                      problem));
  FA_TRY(device_info(*problem, purpose, device));
  return make_plan(*problem, *device, kernels(), plan);
}

fa_status check_workspace(const Plan& plan, const void* workspace, size_t bytes, size_t* needed) {
  if (needed != nullptr) *needed = plan.workspace_bytes;
  if (plan.workspace_bytes == 0) return FA_OK;
  if (workspace == nullptr || bytes < plan.workspace_bytes)
    return fail(FA_ERROR_WORKSPACE,
                "the workspace has %zu bytes, the call needs %zu. Ask fa_workspace_size() first.",
                workspace == nullptr ? size_t{0} : bytes, plan.workspace_bytes);
  if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0)
    return fail(FA_ERROR_INVALID, "the workspace %p is not aligned to 256 bytes.", workspace);
  return FA_OK;
}

fa_status run(Op op, const fa_params* params, void* workspace, size_t bytes, size_t* needed,
              void* stream) {
  Problem problem;
  DeviceInfo device;
  Plan plan;
  FA_TRY(plan_for(op, params, Purpose::kLaunch, &problem, &device, &plan));
  FA_TRY(check_workspace(plan, workspace, bytes, needed));
  log_plan(plan, problem, device, kernels());
  const bool nothing = plan.grid == 0 && plan.rows.num_tiles == 0 && problem.grad.dsinks == nullptr;
  if (nothing) return FA_OK;
  if (op == Op::kBackward)
    return plan.main->launch(bind_backward(plan, problem, workspace), stream);
  FA_TRY(plan.main->launch(bind(plan, problem, workspace), stream));
  if (plan.num_splits == 1) return FA_OK;
  return launch_combine(merge_parts(problem, plan.num_splits, workspace), stream);
}

// The text of a plan, or of a refusal with the reasons of every row.
std::string explain(fa_op op, const fa_params* params, fa_status* status) {
  Problem problem;
  DeviceInfo device{};
  Plan plan;
  *status = known_op(op);
  if (*status != FA_OK) return last_error();
  *status = plan_for(static_cast<Op>(op), params, Purpose::kPlan, &problem, &device, &plan);
  if (*status == FA_OK) return describe(plan, problem, device, kernels());
  std::string text = std::string(last_error()) + "\n";
  if (*status == FA_ERROR_UNSUPPORTED && !kernels().empty())
    text += "every row, nearest first:\n  " +
            nearest_rows(problem, device, kernels(), kernels().size(), "\n  ") + "\n";
  return text;
}

// Zeroes a params struct and states its version; the caller's size is the truth, it may be older or
// newer.
void init_header(void* params, size_t struct_size) {
  if (params == nullptr || struct_size < 2 * sizeof(uint32_t)) return;
  std::memset(params, 0, struct_size);
  const uint32_t header[2] = {static_cast<uint32_t>(struct_size), FA_ABI_VERSION};
  std::memcpy(params, header, sizeof(header));
}

}  // namespace

extern "C" {

void fa_params_init(fa_params* params, size_t struct_size) {
  init_header(params, struct_size);
  if (params == nullptr || struct_size < offsetof(fa_params, seq)) return;
  params->score.scale = NAN;
  params->mask.window_left = params->mask.window_right = -1;
}

void fa_combine_params_init(fa_combine_params* params, size_t struct_size) {
  init_header(params, struct_size);
}

void fa_append_kv_params_init(fa_append_kv_params* params, size_t struct_size) {
  init_header(params, struct_size);
}

fa_status fa_workspace_size(fa_op op, const fa_params* params, size_t* bytes) {
  return guarded([&]() -> fa_status {
    if (bytes == nullptr)
      return fail(FA_ERROR_INVALID, "bytes is NULL. Pass the address of a size_t.");
    Problem problem;
    DeviceInfo device;
    Plan plan;
    FA_TRY(known_op(op));
    FA_TRY(plan_for(static_cast<Op>(op), params, Purpose::kPlan, &problem, &device, &plan));
    *bytes = plan.workspace_bytes;
    return FA_OK;
  });
}

fa_status fa_forward(const fa_params* params, void* workspace, size_t bytes, size_t* needed,
                     void* stream) {
  return guarded([&] { return run(Op::kForward, params, workspace, bytes, needed, stream); });
}

fa_status fa_backward(const fa_params* params, void* workspace, size_t bytes, size_t* needed,
                      void* stream) {
  return guarded([&] { return run(Op::kBackward, params, workspace, bytes, needed, stream); });
}

fa_status fa_combine(const fa_combine_params* params, void* stream) {
  CombineArgs args;
  FA_TRY(bind_combine(params, &args));
  return launch_combine(args, stream);
}

fa_status fa_append_kv(const fa_append_kv_params* params, void*) {
  FA_TRY(check_append_kv_params(params));
  return fail(FA_ERROR_UNSUPPORTED,
              "fa: not supported: append_kv on a GPU, this build has no row for it. Write the keys "
              "with torch operations.");
}

fa_status fa_explain(fa_op op, const fa_params* params, char* text, size_t capacity) {
  return guarded([&]() -> fa_status {
    if (text == nullptr || capacity == 0)
      return fail(FA_ERROR_INVALID,
                  "text is NULL or capacity 0. Pass a buffer; 65536 bytes hold every text.");
    fa_status status = FA_OK;
    std::snprintf(text, capacity, "%s", explain(op, params, &status).c_str());
    return status;
  });
}

int fa_kernel_count(void) { return static_cast<int>(kernels().size()); }

fa_status fa_kernel_info(int index, fa_kernel_desc* desc) {
  if (desc == nullptr)
    return fail(FA_ERROR_INVALID, "desc is NULL. Pass a fa_kernel_desc with struct_size set.");
  if (desc->struct_size < sizeof(uint32_t) || desc->struct_size > 4096)
    return fail(FA_ERROR_ABI,
                "fa_kernel_desc.struct_size is %u. Set it to sizeof(fa_kernel_desc), %zu here.",
                desc->struct_size, sizeof(fa_kernel_desc));
  if (index < 0 || index >= fa_kernel_count())
    return fail(FA_ERROR_INVALID, "index is %d, this build has %d rows.", index, fa_kernel_count());
  const KernelEntry& entry = *kernels()[static_cast<size_t>(index)];
  const KernelConfig& row = entry.config;
  fa_kernel_desc full{};
  full.struct_size = desc->struct_size;
  std::snprintf(full.id, sizeof(full.id), "%s", entry.id);
  full.op = static_cast<int32_t>(row.op);
  full.arch = row.arch;
  full.dtype = static_cast<int32_t>(row.dtype);
  full.dim_qk = row.head_dim_qk;
  full.dim_v = row.head_dim_v;
  full.mask = static_cast<int32_t>(row.mask);
  full.kv = static_cast<int32_t>(row.kv);
  full.tile_m = row.tile_m;
  full.tile_n = row.tile_n;
  full.stages = row.stages;
  full.threads = entry.threads;
  full.smem_bytes = entry.smem_bytes;
  full.registers = full.local_bytes = -1;
  // Asking loads the kernel, and compiles it first where the device has to start from PTX.
  if (entry.function != nullptr && full.struct_size > offsetof(fa_kernel_desc, registers))
    function_resources(entry.function(), &full.registers, &full.local_bytes);
  std::memset(desc, 0, full.struct_size);
  std::memcpy(desc, &full, std::min<size_t>(full.struct_size, sizeof(full)));
  return FA_OK;
}

int fa_abi_version(void) { return FA_ABI_VERSION; }

const char* fa_version(void) { return FA_VERSION_STRING; }

const char* fa_status_name(fa_status status) {
  switch (status) {
    case FA_OK:
      return "FA_OK";
    case FA_ERROR_INVALID:
      return "FA_ERROR_INVALID";
    case FA_ERROR_UNSUPPORTED:
      return "FA_ERROR_UNSUPPORTED";
    case FA_ERROR_WORKSPACE:
      return "FA_ERROR_WORKSPACE";
    case FA_ERROR_ABI:
      return "FA_ERROR_ABI";
    case FA_ERROR_DEVICE:
      return "FA_ERROR_DEVICE";
    case FA_ERROR_CUDA:
      return "FA_ERROR_CUDA";
    case FA_ERROR_INTERNAL:
      return "FA_ERROR_INTERNAL";
  }
  return "unknown fa_status";
}

const char* fa_last_error(void) { return last_error(); }

}  // extern "C"
