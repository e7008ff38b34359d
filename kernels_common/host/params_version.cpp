// SPDX-License-Identifier: BSD-3-Clause
// Was a params struct made by a compatible fa.h? Both the version and the size are checked: padding
// can hide a change.
#include "kernels_common/host/params_version.h"

#include <cstdint>
#include <cstring>

#include "kernels_common/host/error.h"

namespace fa {
namespace {

constexpr size_t kHeaderBytes = 2 * sizeof(uint32_t);  // struct_size, abi_version
constexpr size_t kLargestBytes = 1 << 16;  // beyond this the size is garbage, not a later version

// A group never grows and new ones are appended, so an older struct ends where a group begins. The
// groups up to the mask are in every version: without them a zero would be a meaning (a window of
// one key), not an absence.
constexpr size_t kParamsEnds[] = {offsetof(fa_params, seq),     offsetof(fa_params, pages),
                                  offsetof(fa_params, descale), offsetof(fa_params, dropout),
                                  offsetof(fa_params, grad),    offsetof(fa_params, options),
                                  offsetof(fa_params, state)};

constexpr StructVersion kParams{"fa_params", "fa_params_init", sizeof(fa_params), kParamsEnds,
                                sizeof(kParamsEnds) / sizeof(kParamsEnds[0])};
constexpr StructVersion kCombine{"fa_combine_params", "fa_combine_params_init",
                                 sizeof(fa_combine_params), nullptr, 0};
constexpr StructVersion kAppendKv{"fa_append_kv_params", "fa_append_kv_params_init",
                                  sizeof(fa_append_kv_params), nullptr, 0};

bool is_known_size(const StructVersion& version, size_t bytes) {
  for (size_t i = 0; i < version.num_ends; ++i)
    if (version.ends[i] == bytes) return true;
  return bytes == version.bytes;
}

}  // namespace

fa_status check_struct(const StructVersion& version, const void* params) {
  if (params == nullptr)
    return fail(FA_ERROR_INVALID, "params is NULL. Pass a struct %s prepared by %s().",
                version.name, version.init);
  uint32_t header[2];
  std::memcpy(header, params, sizeof(header));
  const size_t bytes = header[0];
  if (header[1] != FA_ABI_VERSION)
    return fail(FA_ERROR_ABI,
                "%s.abi_version is %u, this library speaks version %d. Prepare the struct with "
                "%s() and compile "
                "against the fa.h of this library.",
                version.name, header[1], FA_ABI_VERSION, version.init);
  if (bytes == version.bytes) return FA_OK;
  if (bytes < version.bytes || bytes > kLargestBytes) {
    if (bytes >= kHeaderBytes && is_known_size(version, bytes)) return FA_OK;
    return fail(FA_ERROR_ABI,
                "%s.struct_size is %zu bytes, this library knows %zu and no version of the struct "
                "had that size. Pass "
                "sizeof(%s) to %s().",
                version.name, bytes, version.bytes, version.name, version.init);
  }
  const unsigned char* tail = static_cast<const unsigned char*>(params);
  for (size_t i = version.bytes; i < bytes; ++i)
    if (tail[i] != 0)
      return fail(FA_ERROR_ABI,
                  "%s.struct_size is %zu bytes, this library knows %zu, and byte %zu beyond them "
                  "is not zero: the caller "
                  "uses an option that this library does not have. Install a library at least as "
                  "new as the caller.",
                  version.name, bytes, version.bytes, i);
  return FA_OK;
}

fa_status current_params(const fa_params* params, fa_params* copy, const fa_params** current) {
  FA_TRY(check_struct(kParams, params));
  *current = params;
  if (params->struct_size >= sizeof(fa_params)) return FA_OK;
  std::memset(copy, 0, sizeof(*copy));
  std::memcpy(copy, params, params->struct_size);
  *current = copy;
  return FA_OK;
}

fa_status check_combine_params(const fa_combine_params* params) {
  return check_struct(kCombine, params);
}
fa_status check_append_kv_params(const fa_append_kv_params* params) {
  return check_struct(kAppendKv, params);
}

}  // namespace fa
