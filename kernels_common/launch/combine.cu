// SPDX-License-Identifier: BSD-3-Clause
// Which kernel merges partial results, and how is it launched? It belongs to no row of the table.
#include <limits>

#include "kernels_common/device/combine_kernel.h"
#include "kernels_common/host/combine.h"
#include "kernels_common/host/error.h"

namespace fa {
namespace {

template <class Part>
const void* kernel_of(int dim) {
  if (dim <= 64) return reinterpret_cast<const void*>(&fa_combine_parts<Part, 2>);
  if (dim <= 128) return reinterpret_cast<const void*>(&fa_combine_parts<Part, 4>);
  return reinterpret_cast<const void*>(&fa_combine_parts<Part, 8>);
}

const void* kernel_of(const CombineArgs& args) {
  if (args.partial_dtype == FA_FP32) return kernel_of<float>(args.dim_v);
  if (args.partial_dtype == FA_BF16) return kernel_of<cutlass::bfloat16_t>(args.dim_v);
  return kernel_of<cutlass::half_t>(args.dim_v);
}

}  // namespace

fa_status launch_combine(const CombineArgs& args, void* stream) {
  const int64_t rows = int64_t{args.batch} * args.rows * args.heads;
  const int64_t blocks = (rows + kCombineWarps - 1) / kCombineWarps;
  if (blocks == 0) return FA_OK;
  if (blocks > std::numeric_limits<int32_t>::max())
    return fail(FA_ERROR_UNSUPPORTED,
                "fa: not supported: combine of %lld rows (batch * seqlen_q * heads_q), at most "
                "2^33 in one call. Split the call along the batch.",
                static_cast<long long>(rows));
  void* parameters[] = {const_cast<CombineArgs*>(&args)};
  const cudaError_t error =
      cudaLaunchKernel(kernel_of(args), dim3(unsigned(blocks)), dim3(32 * kCombineWarps),
                       parameters, 0, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return FA_OK;
  cudaGetLastError();  // reported here; the caller's next call must not meet it again
  return fail(FA_ERROR_CUDA, "launch of combine (grid %lld): %s.", static_cast<long long>(blocks),
              cudaGetErrorString(error));
}

}  // namespace fa
