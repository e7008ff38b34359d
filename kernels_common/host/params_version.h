// SPDX-License-Identifier: BSD-3-Clause
// Was a params struct made by a compatible fa.h?
#pragma once

#include <cstddef>

#include "kernels_common/api/fa.h"

namespace fa {

// What both sides of the ABI know of a versioned struct.
struct StructVersion {
  const char* name;    // "fa_params"
  const char* init;    // "fa_params_init"
  size_t bytes;        // sizeof in this library
  const size_t* ends;  // sizes that older versions of the struct had, ascending
  size_t num_ends;
};

// Checks struct_size and abi_version, the first two members of every params struct.
// Accepts: this library's size; a size older versions had; a larger one whose unknown tail is zero.
fa_status check_struct(const StructVersion& version, const void* params);

// The caller's params in this library's layout: `params` itself where the sizes agree, else `copy`,
// whose missing groups are zero ("not used").
fa_status current_params(const fa_params* params, fa_params* copy, const fa_params** current);

fa_status check_combine_params(const fa_combine_params* params);
fa_status check_append_kv_params(const fa_append_kv_params* params);

}  // namespace fa
