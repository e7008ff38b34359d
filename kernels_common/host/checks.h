// SPDX-License-Identifier: BSD-3-Clause
// Is what the caller says one that fa.h allows? Every failure is FA_ERROR_INVALID with a sentence.
#pragma once

#include <cstdint>

#include "kernels_common/api/fa.h"
#include "kernels_common/host/problem.h"

namespace fa {

// Sizes as the checks of one tensor need them.
struct Extent {
  int32_t batch, rows, heads, dim;
  bool packed;       // no batch dimension
  bool batch_known;  // false: an index array picks the batch entries, their number is unknown here
  bool empty() const {
    return rows == 0 || heads == 0 || dim == 0 || (!packed && batch_known && batch == 0);
  }
};

struct Extents {
  Extent q, k, v, out;
};

Extents extents_of(const fa_params& params);

// Sizes, dtypes, arrays, mask, score and options: all that does not need an extent.
fa_status check_values(const fa_params& params);

// Addresses, alignment and strides of q, k, v and out.
fa_status check_tensors(const fa_params& params, const Extents& extents, DataCheck data);

// What a backward adds: dtypes, addresses, alignment and strides of dout, dq, dk, dv, and the LSE
// it reads.
fa_status check_gradients(const fa_params& params, const Extents& extents, DataCheck data);

// No two of the tensors that a call writes begin at one address, nor at that of one it reads.
fa_status check_apart(Op op, const fa_params& params, const Extents& extents);

}  // namespace fa
