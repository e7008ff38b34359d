// SPDX-License-Identifier: BSD-3-Clause
// Which weights does dropout keep? Philox4x32-10, sixteen neighbouring keys of a row per call;
// docs/numerics.md, "Dropout". Host-safe but for the last function.
#pragma once

#include "kernels_common/device/launch_args.h"

namespace fa {

struct PhiloxWords {
  uint32_t w[4];
};

// Seed and offset of a call, and b · Hq + h of a tile: what the bits depend on beside row and key.
struct DropoutPlace {
  uint32_t key0, key1, offset;
  uint32_t head;
};

FA_HOST_DEVICE PhiloxWords philox4x32(PhiloxWords c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c.w[0], p1 = uint64_t{0xCD9E8D57u} * c.w[2];
    c = PhiloxWords{{uint32_t(p1 >> 32) ^ c.w[1] ^ key0, uint32_t(p1),
                     uint32_t(p0 >> 32) ^ c.w[3] ^ key1, uint32_t(p0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// `seed_offset`: two int64 of any sign; `sequence`: index in the call; `head`: query head.
FA_HOST_DEVICE DropoutPlace dropout_place(const int64_t* seed_offset, int sequence, int heads_q,
                                          int head) {
  const uint64_t seed = uint64_t(seed_offset[0]);
  return DropoutPlace{uint32_t(seed), uint32_t(seed >> 32), uint32_t(seed_offset[1]),
                      uint32_t(sequence) * uint32_t(heads_q) + uint32_t(head)};
}

// The bytes of keys [16 · block, 16 · block + 16) of `row`, key 16 · block in the lowest byte of
// w[0].
FA_HOST_DEVICE PhiloxWords dropout_words(const DropoutPlace& place, int row, int block) {
  return philox4x32(PhiloxWords{{uint32_t(block), uint32_t(row), place.head, place.offset}},
                    place.key0, place.key1);
}

// Of 16 keys, those of lane t of a quad in an accumulator: keys 2t, 2t + 1, 2t + 8, 2t + 9, from
// the lowest byte on.
FA_HOST_DEVICE uint32_t quad_bytes(const PhiloxWords& words, int t) {
  const uint32_t low = words.w[t / 2] >> (t % 2 * 16), high = words.w[2 + t / 2] >> (t % 2 * 16);
  return (low & 0xFFFFu) | (high << 16);
}

// Whether the weight of byte e of quad_bytes() is dropped; `threshold` in [0, 256].
FA_HOST_DEVICE bool is_dropped(uint32_t bytes, int e, int threshold) {
  return int((bytes >> (8 * e)) & 0xFFu) < threshold;
}

// 256 · p rounded half up: a weight is dropped iff its byte is below this.
inline int dropout_threshold(float p) {
  const int t = int(256.0 * double(p) + 0.5);
  return t > 256 ? 256 : t;
}

#if defined(__CUDACC__)

// Lane t of a quad holds in v[s] a word for lane s; afterwards v[s] is the word of lane s for this
// lane.
FA_DEVICE void exchange_in_quad(uint32_t (&v)[4], int t) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (t & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t &low = v[i], &high = v[i + step];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? low : high, step);
      (upper ? low : high) = got;
    }
  }
}

// Calls drop(r, c, dropped) for every element of a view (rows, columns) of scores or weights; see
// acc_view.h. `row`: sequence position of the view's row 0, of this lane; `key`: first key of the
// tile, a multiple of 16. Slabs are kSlabRows apart. The four lanes of a quad share the calls of
// Philox, so all lanes of the warp come here together.
template <int kRows, int kColumns, int kSlabRows, class Drop>
FA_DEVICE void for_each_dropout(const DropoutPlace& place, int threshold, int row, int key,
                                int lane, Drop drop) {
  constexpr int kBlocks = kColumns / 4, kPairs = kRows * kBlocks;  // of 16 keys; (row, block)
  const int t = lane % 4;
#pragma unroll
  for (int first = 0; first < kPairs; first += 4) {
    const int mine = first + t, r = mine / kBlocks, block = mine - r * kBlocks;
    // Opaque: else the keys of all ten rounds, the same for every call, occupy 20 registers.
    DropoutPlace at = place;
    asm volatile("" : "+r"(at.key0), "+r"(at.key1));
    const PhiloxWords words =
        dropout_words(at, row + r % 2 * 8 + r / 2 * kSlabRows, key / 16 + block);
    uint32_t bytes[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) bytes[s] = quad_bytes(words, s);
    exchange_in_quad(bytes, t);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int pair = first + s;
      if (pair >= kPairs) break;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        drop(pair / kBlocks, pair % kBlocks * 4 + e, is_dropped(bytes[s], e, threshold));
    }
  }
}

#endif

}  // namespace fa
