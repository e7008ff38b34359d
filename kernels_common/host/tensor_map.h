// SPDX-License-Identifier: BSD-3-Clause
// Describes a strided [B, S, H, D] tensor to the TMA unit: fills a 128-byte CUtensorMap without
// linking libcuda.
#pragma once

#include <cstdint>

#include "kernels_common/api/fa.h"
#include "kernels_common/host/kernel_config.h"

namespace fa {

inline constexpr int64_t kTensorMapStrideLimit = int64_t{1} << 40;  // bytes; a stride is below it

// Dimension order of every map: (dim, row, head, batch), dim innermost. Extents in elements,
// strides in bytes.
struct TensorMapSpec {
  const char* name;  // "q", for messages
  const void* data;  // 16-byte aligned
  DType dtype;
  int64_t extent[4];        // clamped to >= 1 by the encoder
  int64_t stride_bytes[3];  // of row, head, batch; multiples of 16, below 2^40; ignored where the
                            // extent is <= 1
  int box[4];               // each <= 256; box[0] * element size <= 128 for the 128-byte swizzle
  bool swizzle_128;         // false: no swizzle
  bool swizzle_64 = false;  // instead: box[0] * element size <= 64
};

// `map` points at 128 bytes aligned to 64 (a CUtensorMap).
fa_status encode_tensor_map(const TensorMapSpec& spec, void* map);

}  // namespace fa
