// SPDX-License-Identifier: BSD-3-Clause
// Where does every field of fa_params lie? A foreign-language mirror of the struct compares itself
// with this table.
#include "kernels_common/api/fa.h"

namespace {

// One line per field keeps name, offset and size from disagreeing; only the preprocessor can spell
// a path.
#define FA_FIELD(path) \
  {#path, offsetof(fa_params, path), sizeof(static_cast<fa_params*>(nullptr)->path)}
#define FA_TENSOR(path)                                                            \
  FA_FIELD(path.data), FA_FIELD(path.stride_batch), FA_FIELD(path.stride_row),     \
      FA_FIELD(path.stride_head), FA_FIELD(path.stride_dim), FA_FIELD(path.dtype), \
      FA_FIELD(path.reserved)
#define FA_FACTORS(path)                                                        \
  FA_FIELD(path.data), FA_FIELD(path.stride_batch), FA_FIELD(path.stride_head), \
      FA_FIELD(path.stride_block), FA_FIELD(path.dtype), FA_FIELD(path.block)

constexpr fa_field kFields[] = {
    FA_FIELD(struct_size),
    FA_FIELD(abi_version),
    FA_TENSOR(q),
    FA_TENSOR(k),
    FA_TENSOR(v),
    FA_TENSOR(out),
    FA_FIELD(lse.data),
    FA_FIELD(lse.stride_batch),
    FA_FIELD(lse.stride_head),
    FA_FIELD(shape.batch),
    FA_FIELD(shape.seqlen_q),
    FA_FIELD(shape.seqlen_k),
    FA_FIELD(shape.heads_q),
    FA_FIELD(shape.heads_k),
    FA_FIELD(shape.dim_qk),
    FA_FIELD(shape.dim_v),
    FA_FIELD(shape.total_q),
    FA_FIELD(shape.total_k),
    FA_FIELD(shape.reserved),
    FA_FIELD(score.scale),
    FA_FIELD(score.softcap),
    FA_FACTORS(score.alibi_slopes),
    FA_FACTORS(score.sinks),
    FA_FIELD(mask.window_left),
    FA_FIELD(mask.window_right),
    FA_FIELD(mask.chunk),
    FA_FIELD(mask.align),
    FA_FIELD(seq.cu_q),
    FA_FIELD(seq.cu_k),
    FA_FIELD(seq.used_q),
    FA_FIELD(seq.used_k),
    FA_FIELD(seq.leftpad_k),
    FA_FIELD(seq.batch_index_k),
    FA_FIELD(pages.table),
    FA_FIELD(pages.table_stride),
    FA_FIELD(pages.page_size),
    FA_FIELD(pages.num_pages),
    FA_FACTORS(descale.q),
    FA_FACTORS(descale.k),
    FA_FACTORS(descale.v),
    FA_FIELD(dropout.p),
    FA_FIELD(dropout.seed_offset),
    FA_TENSOR(grad.dout),
    FA_TENSOR(grad.dq),
    FA_TENSOR(grad.dk),
    FA_TENSOR(grad.dv),
    FA_FIELD(grad.dlse),
    FA_FIELD(grad.dsinks),
    FA_FIELD(grad.accumulate),
    FA_FIELD(options.num_splits),
    FA_FIELD(options.force_arch),
    FA_FIELD(options.reserve_sms),
    FA_FIELD(options.deterministic),
    FA_FIELD(options.batch_invariant),
    FA_FIELD(options.sm_count),
    FA_FIELD(options.smem_limit),
    FA_FIELD(state.data),
    FA_FIELD(state.bytes),
};

#undef FA_FIELD
#undef FA_TENSOR
#undef FA_FACTORS

}  // namespace

extern "C" size_t fa_abi_layout(const fa_field** fields) {
  if (fields != nullptr) *fields = kFields;
  return sizeof(kFields) / sizeof(kFields[0]);
}
