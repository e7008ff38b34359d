// SPDX-License-Identifier: BSD-3-Clause
// The compile-time facts of one kernel, as one plain value that host and device code both read.
#pragma once

namespace fa {

// Numbers equal those of fa.h.
enum class Op : int { kForward = 1, kBackward = 2, kCombine = 3, kAppendKv = 4 };
enum class DType : int { kFp16 = 1, kBf16 = 2, kE4m3 = 3, kFp32 = 4 };

enum class MaskKind : int { kNone = 0, kBand = 1 };   // column `mask`
enum class ScoreKind : int { kScale = 0, kAny = 1 };  // column `score`
// Columns `kv` and `q`. kSelfTma: a thread that computes requests the tiles.
enum class LoadKind : int { kTma = 0, kCpAsync = 1, kPaged = 2, kSelfTma = 3 };
enum class SchedKind : int { kStatic = 0, kDynamic = 1 };  // column `sched`
enum class StepKind : int { kOverlap = 0, kSerial = 1 };   // column `step`

// Columns `knobs`: key=value, each a policy.
enum class Turns : int { kNone = 0, kGemm = 1 };
enum class Rescale : int { kAlways = 0, kVoted = 1, kExact = 2 };
// How a tile of dQ reaches its fp32 sum: single atomics, vector or bulk reduces.
enum class DqAdd : int { kAtomic = 0, kVector = 1, kBulk = 2 };

struct KernelConfig {
  int arch;  // 80, 90
  Op op;
  DType dtype, kv_dtype;
  int head_dim_qk, head_dim_v;
  MaskKind mask;
  ScoreKind score;
  LoadKind kv, q;
  int tile_m, tile_n;  // query rows, keys of one tile
  int warps;           // of the whole thread block, producer included
  int stages;          // slots of K and V; backward: of Q and dO
  int cluster;
  SchedKind sched;
  StepKind step;
  Turns turns = Turns::kNone;
  Rescale rescale = Rescale::kAlways;
  int q_slots = 1;  // Q buffers
  // How O leaves on Hopper: 0 through Q's buffer, 1 through one of its own, 2 from registers.
  int o_buf = 0;
  int dropout = 0;    // 1: drops weights when the call asks for it
  int pack = 0;       // 1: rows of a tile are (position, query head of a key head), and its warps
                      // share them and divide the keys
  int v_rows = 0;     // e4m3: slots of half a block of V, which the kernel transposes itself;
                      // 0: a kernel ahead of it does
  int stages_ds = 1;  // backward: slots of dS
  DqAdd dq = DqAdd::kAtomic;
  int dq_turns = 1;  // counters per dQ tile that order its additions
};

// Whether a row multiplies scores and values by a factor for each block of keys. Beside a wide O
// the factors find no registers.
constexpr bool takes_block_descales(const KernelConfig& row) {
  return row.dtype == DType::kE4m3 && row.score == ScoreKind::kAny && row.head_dim_v <= 128;
}

}  // namespace fa
