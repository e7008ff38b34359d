/* SPDX-License-Identifier: BSD-3-Clause */
/* Does a C99 program get from fa.h what it promises: versions, sentences, plans, the list of
 * kernels? No GPU needed. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels_common/api/fa.h"

static long checks = 0;

/* assert() is empty in a release build, this is not. */
static void expect(int holds, int line, const char* what) {
  ++checks;
  if (holds) return;
  fprintf(stderr, "abi_test.c:%d: %s; last error: %s\n", line, what, fa_last_error());
  exit(1);
}

static void expect_failure(fa_status got, fa_status wanted, const char* part, int line) {
  char text[256];
  snprintf(text, sizeof(text), "status is %s, expected %s with \"%s\"", fa_status_name(got),
           fa_status_name(wanted), part);
  expect(got == wanted && strstr(fa_last_error(), part) != NULL, line, text);
}

static fa_tensor tensor(uintptr_t address, int64_t rows, int64_t heads, int64_t dim) {
  fa_tensor t;
  memset(&t, 0, sizeof(t));
  t.data = (void*)address;
  t.stride_batch = rows * heads * dim;
  t.stride_row = heads * dim;
  t.stride_head = dim;
  t.stride_dim = 1;
  t.dtype = FA_BF16;
  return t;
}

/* A causal call of 2 x 512 queries, 8 heads of 128, on a nominal H200; the addresses are never
 * read. */
static fa_params valid_params(void) {
  fa_params p;
  fa_params_init(&p, sizeof(p));
  p.q = tensor(0x10000, 512, 8, 128);
  p.k = tensor(0x20000, 512, 4, 128);
  p.v = tensor(0x30000, 512, 4, 128);
  p.out = tensor(0x40000, 512, 8, 128);
  p.shape.batch = 2;
  p.shape.seqlen_q = p.shape.seqlen_k = 512;
  p.shape.heads_q = 8;
  p.shape.heads_k = 4;
  p.shape.dim_qk = p.shape.dim_v = 128;
  p.mask.window_right = 0;
  p.options.sm_count = 132;
  p.options.smem_limit = 232448;
  return p;
}

static void versions(void) {
  struct {
    fa_params known;
    uint64_t later[4];
  } newer;
  unsigned char old_bytes[sizeof(fa_params)];
  fa_params p = valid_params();
  size_t bytes = 77;
  fa_status usual = fa_workspace_size(FA_FORWARD, &p, &bytes);
  expect(usual == FA_OK || usual == FA_ERROR_DEVICE || usual == FA_ERROR_UNSUPPORTED, __LINE__,
         "params are accepted");

  expect(fa_abi_version() == FA_ABI_VERSION, __LINE__,
         "the library speaks the version of the header");
  expect(strlen(fa_version()) >= 5, __LINE__, "the version has a text");
  expect(p.struct_size == sizeof(p) && p.abi_version == FA_ABI_VERSION, __LINE__,
         "init states size and version");

  memset(&p, 0, sizeof(p));
  expect_failure(fa_workspace_size(FA_FORWARD, &p, &bytes), FA_ERROR_ABI, "abi_version is 0",
                 __LINE__);
  expect_failure(fa_forward(&p, NULL, 0, NULL, NULL), FA_ERROR_ABI, "fa_params_init()", __LINE__);
  p = valid_params();
  p.abi_version = FA_ABI_VERSION + 1;
  expect_failure(fa_forward(&p, NULL, 0, NULL, NULL), FA_ERROR_ABI, "abi_version is 2", __LINE__);
  p = valid_params();
  p.struct_size = 12;
  expect_failure(fa_forward(&p, NULL, 0, NULL, NULL), FA_ERROR_ABI, "struct_size is 12", __LINE__);
  p.struct_size = sizeof(p) - 8;
  expect_failure(fa_forward(&p, NULL, 0, NULL, NULL), FA_ERROR_ABI,
                 "no version of the struct had that size", __LINE__);
  expect_failure(fa_forward(NULL, NULL, 0, NULL, NULL), FA_ERROR_INVALID, "params is NULL",
                 __LINE__);

  /* A later caller: fine while what we do not know is zero. */
  memset(&newer, 0, sizeof(newer));
  fa_params_init(&newer.known, sizeof(newer));
  newer.known = valid_params();
  newer.known.struct_size = sizeof(newer);
  expect(fa_workspace_size(FA_FORWARD, &newer.known, &bytes) == usual, __LINE__,
         "a longer struct with a zero tail");
  newer.later[2] = 1;
  expect_failure(fa_workspace_size(FA_FORWARD, &newer.known, &bytes), FA_ERROR_ABI, "is not zero",
                 __LINE__);

  /* An earlier caller: its struct ends before `state`; what follows in memory is not ours to read.
   */
  memset(old_bytes, 0xee, sizeof(old_bytes));
  p = valid_params();
  p.struct_size = (uint32_t)offsetof(fa_params, state);
  memcpy(old_bytes, &p, p.struct_size);
  expect(fa_workspace_size(FA_FORWARD, (const fa_params*)(const void*)old_bytes, &bytes) == usual,
         __LINE__, "a shorter struct");
}

static void defaults(void) {
  fa_params p;
  fa_combine_params combine;
  fa_append_kv_params append;
  memset(&p, 0xff, sizeof(p));
  fa_params_init(&p, sizeof(p));
  expect(isnan(p.score.scale) && p.score.softcap == 0, __LINE__, "the default scale is NaN");
  expect(p.mask.window_left == -1 && p.mask.window_right == -1 && p.mask.chunk == 0, __LINE__,
         "no mask");
  expect(p.q.data == NULL && p.options.force_arch == 0 && p.state.bytes == 0, __LINE__,
         "the rest is zero");
  fa_combine_params_init(&combine, sizeof(combine));
  expect_failure(fa_combine(&combine, NULL), FA_ERROR_INVALID, "count is 0 partial results",
                 __LINE__);
  memset(&combine, 0, sizeof(combine));
  expect_failure(fa_combine(&combine, NULL), FA_ERROR_ABI, "fa_combine_params_init()", __LINE__);
  fa_append_kv_params_init(&append, sizeof(append));
  expect_failure(fa_append_kv(&append, NULL), FA_ERROR_UNSUPPORTED, "fa: not supported: append_kv",
                 __LINE__);
  append.abi_version = 9;
  expect_failure(fa_append_kv(&append, NULL), FA_ERROR_ABI, "abi_version is 9", __LINE__);
}

/* Changes one member of valid params and expects a sentence about it. */
#define INVALID(member, value, part)                                                             \
  do {                                                                                           \
    fa_params changed = valid_params();                                                          \
    size_t size = 0;                                                                             \
    changed.member = value;                                                                      \
    expect_failure(fa_workspace_size(FA_FORWARD, &changed, &size), FA_ERROR_INVALID, part,       \
                   __LINE__);                                                                    \
    expect_failure(fa_forward(&changed, NULL, 0, NULL, NULL), FA_ERROR_INVALID, part, __LINE__); \
  } while (0)

static void refusals(void) {
  static const int32_t array[4] = {0};
  fa_params p;
  INVALID(shape.batch, -1, "shape.batch is -1, it must not be negative");
  INVALID(shape.seqlen_k, 1 << 30, "shape.seqlen_k is 1073741824, it must be below 2^30");
  INVALID(shape.heads_k, 3, "heads_q is 8, it must be a multiple of heads_k, which is 3");
  INVALID(shape.heads_k, 0, "shape.heads_k is 0");
  INVALID(shape.dim_qk, 100, "shape.dim_qk is 100, it must be a multiple of 8");
  INVALID(shape.dim_v, 264, "shape.dim_v is 264, it must be between 8 and 256");
  INVALID(shape.dim_v, 0, "shape.dim_v is 0");
  INVALID(shape.total_q, 5, "shape.total_q is 5 without cu_q");
  INVALID(shape.total_k, 5, "shape.total_k is 5 without cu_k");
  INVALID(q.dtype, FA_FP32, "q has dtype fp32");
  INVALID(q.dtype, 77, "q has dtype unknown dtype (77)");
  INVALID(k.dtype, FA_FP16, "k has dtype fp16 (1), it must be bf16 like q");
  INVALID(v.dtype, FA_FP16, "v has dtype fp16 (1), it must be bf16 like k");
  INVALID(out.dtype, FA_FP16, "out has dtype fp16 (1), it must be bf16 or fp32");
  INVALID(q.data, (void*)0x10008, "q: data 0x10008 is not aligned to 16 bytes");
  INVALID(k.stride_dim, 2, "k: the stride of the last dimension is 2, it must be 1");
  INVALID(k.stride_row, 516,
          "k: row stride 516 is not a multiple of 8 elements (16 bytes for bf16)");
  INVALID(v.stride_head, 132, "v: head stride 132 is not a multiple of 8");
  INVALID(q.stride_batch, 4, "q: batch stride 4 is not a multiple of 8");
  INVALID(q.stride_row, -1024, "q: row stride is -1024, it must not be negative");
  INVALID(out.stride_row, 0, "out: a stride is 0");
  INVALID(lse.data, (float*)0x10002, "lse: data 0x10002 is not aligned to 4 bytes");
  INVALID(lse.data, (float*)0x10000, "lse: a stride is 0 (head 0, batch 0)");
  INVALID(mask.window_left, -2, "mask.window_left is -2");
  INVALID(mask.window_right, -7, "mask.window_right is -7");
  INVALID(mask.chunk, -1, "mask.chunk is -1");
  INVALID(mask.align, 2, "mask.align is 2");
  INVALID(score.scale, -1.0f, "score.scale is -1");
  INVALID(score.scale, INFINITY, "score.scale is inf");
  INVALID(score.softcap, -1.0f, "score.softcap is -1");
  INVALID(score.softcap, NAN, "score.softcap is ");
  INVALID(dropout.p, 1.0f, "dropout.p is 1, it must be in [0, 1)");
  INVALID(dropout.p, 0.5f, "without seed_offset");
  INVALID(options.force_arch, 75, "options.force_arch is 75");
  INVALID(options.num_splits, -1, "options.num_splits is -1");
  INVALID(options.sm_count, -1, "sm_count -1");
  INVALID(score.sinks.data, array, "sinks have dtype unknown dtype (0)");
  INVALID(score.alibi_slopes.data, array, "alibi_slopes have dtype");
  INVALID(descale.v.data, array, "v_descale has dtype");
  INVALID(pages.table, array, "page_size is 0 and num_pages is 0");

  p = valid_params();
  p.k.data = NULL;
  expect_failure(fa_forward(&p, NULL, 0, NULL, NULL), FA_ERROR_INVALID, "k: data is NULL",
                 __LINE__);
  p = valid_params();
  p.pages.table = array;
  p.pages.page_size = 64;
  p.pages.num_pages = 8;
  expect_failure(fa_forward(&p, NULL, 0, NULL, NULL), FA_ERROR_INVALID,
                 "a page table is given without used_k", __LINE__);
  p = valid_params();
  p.seq.cu_k = p.seq.batch_index_k = array;
  p.shape.total_k = 100;
  expect_failure(fa_forward(&p, NULL, 0, NULL, NULL), FA_ERROR_INVALID,
                 "batch_index_k is given with cu_k", __LINE__);
  p = valid_params();
  expect_failure(fa_workspace_size(FA_COMBINE, &p, &(size_t){0}), FA_ERROR_INVALID, "op is 3",
                 __LINE__);
  expect_failure(fa_workspace_size(FA_FORWARD, &p, NULL), FA_ERROR_INVALID, "bytes is NULL",
                 __LINE__);
}

/* A build with rows plans for an H200 and an A100 that are not here; one without says how to get
 * rows. */
static void plans(void) {
  char text[16384];
  fa_params p = valid_params();
  fa_status status = fa_explain(FA_FORWARD, &p, text, sizeof(text));
  int kernels = fa_kernel_count();
  if (kernels == 0) {
    expect_failure(status, FA_ERROR_DEVICE, "Rebuild with FA_ARCHS", __LINE__);
    expect(strstr(text, "Rebuild with FA_ARCHS") != NULL, __LINE__,
           "the text says how to get kernels");
  } else if (status == FA_OK) {
    expect(strstr(text, "row        sm") != NULL && strstr(text, "grid       ") != NULL, __LINE__,
           text);
  } else {
    expect(strlen(text) > 20, __LINE__, "a refusal has a text");
  }
  printf("abi_test: %d kernels, explain: %s\n%s", kernels, fa_status_name(status), text);

  p.options.force_arch = 90;
  p.options.num_splits = 2;
  p.score.softcap = 5.0f;
  status = fa_explain(FA_FORWARD, &p, text, sizeof(text));
  expect(status != FA_OK, __LINE__, "no Hopper row with a softcap splits the keys");
  if (status == FA_ERROR_UNSUPPORTED) {
    expect(strncmp(text, "fa: not supported: ", 19) == 0, __LINE__, text);
    expect(strstr(text, "every row, nearest first:") != NULL, __LINE__, text);
  }
  p.options.force_arch = p.options.num_splits = 0;
  p.score.softcap = 0.0f;
  expect_failure(fa_backward(&p, NULL, 0, NULL, NULL), FA_ERROR_INVALID, "dout has dtype",
                 __LINE__);
  p.q.data = p.k.data = p.v.data = p.out.data = NULL;
  expect(fa_explain(FA_FORWARD, &p, text, sizeof(text)) != FA_ERROR_INVALID, __LINE__,
         "planning needs no addresses");
  expect_failure(fa_explain(FA_FORWARD, &p, NULL, 0), FA_ERROR_INVALID, "text is NULL", __LINE__);
  fa_explain(FA_FORWARD, &p, text, 10);
  expect(strlen(text) == 9, __LINE__, "a small buffer gets the beginning");
}

static void kernel_list(void) {
  fa_kernel_desc desc;
  int count = fa_kernel_count(), i;
  for (i = 0; i < count; ++i) {
    memset(&desc, 0xff, sizeof(desc));
    desc.struct_size = sizeof(desc);
    expect(fa_kernel_info(i, &desc) == FA_OK, __LINE__, "a kernel describes itself");
    expect(strncmp(desc.id, "sm", 2) == 0 && strlen(desc.id) < sizeof(desc.id), __LINE__, desc.id);
    expect((desc.arch == 80 || desc.arch == 90) && desc.threads % 32 == 0 && desc.tile_m > 0,
           __LINE__, desc.id);
    expect(desc.registers == -1 || (desc.registers > 0 && desc.registers <= 255), __LINE__,
           desc.id);
    memset(&desc, 0x55, sizeof(desc));
    desc.struct_size = offsetof(fa_kernel_desc, registers);
    expect(fa_kernel_info(i, &desc) == FA_OK && desc.threads > 0, __LINE__, "a shorter struct");
    expect(desc.registers == 0x55555555, __LINE__, "nothing is written behind it");
  }
  desc.struct_size = sizeof(desc);
  expect_failure(fa_kernel_info(count, &desc), FA_ERROR_INVALID, "index is ", __LINE__);
  expect_failure(fa_kernel_info(-1, &desc), FA_ERROR_INVALID, "index is -1", __LINE__);
  expect_failure(fa_kernel_info(0, NULL), FA_ERROR_INVALID, "desc is NULL", __LINE__);
  desc.struct_size = 0;
  expect_failure(fa_kernel_info(0, &desc), FA_ERROR_ABI, "struct_size is 0", __LINE__);
}

static void layout(void) {
  const fa_field* fields = NULL;
  size_t count = fa_abi_layout(&fields), end = 0, i;
  for (i = 0; i < count; ++i) {
    expect(fields[i].offset >= end, __LINE__, fields[i].name);
    end = fields[i].offset + fields[i].size;
  }
  expect(end == sizeof(fa_params), __LINE__, "the last field ends the struct");
  expect(strcmp(fields[3].name, "q.stride_batch") == 0 && fields[3].offset == 16, __LINE__,
         "a field has its path");
}

int main(void) {
  versions();
  defaults();
  refusals();
  plans();
  kernel_list();
  layout();
  printf("abi_test: %ld checks hold\n", checks);
  return 0;
}
