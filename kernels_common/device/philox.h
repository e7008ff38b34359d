// SPDX-License-Identifier: BSD-3-Clause
// Which weights does dropout keep? Philox4x32-10, sixteen neighbouring keys of a row per call;
// docs/numerics.md, "Dropout". Host-safe but for the last function.
#pragma once

#include <cstddef>

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

// The same for many rows and blocks of a tile: the keys of the rounds, and of the first round what
// the head alone decides.
struct alignas(16) DropoutTile {
  uint32_t first[4];  // lower and upper word of the head's product, key 0 in the latter; offset and
                      // key 1; unused
  uint32_t keys[20];  // of rounds 2 to 10, two words each
};

FA_HOST_DEVICE void fill_dropout_tile(const DropoutPlace& place, DropoutTile& tile) {
  const uint64_t product = uint64_t{0xCD9E8D57u} * place.head;
  tile.first[0] = uint32_t(product);
  tile.first[1] = uint32_t(product >> 32) ^ place.key0;
  tile.first[2] = place.offset ^ place.key1;
  tile.first[3] = 0;
  for (uint32_t round = 1; round <= 10; ++round) {  // the last pair is not used
    tile.keys[2 * round - 2] = place.key0 + round * 0x9E3779B9u;
    tile.keys[2 * round - 1] = place.key1 + round * 0xBB67AE85u;
  }
}

// dropout_words() of kCalls rows and blocks. words4(i): words 4i to 4i + 3 of the DropoutTile.
template <int kCalls, class Words>
FA_HOST_DEVICE void dropout_calls(Words words4, const uint32_t (&rows)[kCalls],
                                  const uint32_t (&blocks)[kCalls], PhiloxWords (&out)[kCalls]) {
  const auto round = [](PhiloxWords& c, uint32_t key0, uint32_t key1) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c.w[0], p1 = uint64_t{0xCD9E8D57u} * c.w[2];
    c = PhiloxWords{{uint32_t(p1 >> 32) ^ c.w[1] ^ key0, uint32_t(p1),
                     uint32_t(p0 >> 32) ^ c.w[3] ^ key1, uint32_t(p0)}};
  };
  const PhiloxWords head = words4(0);
  for (int c = 0; c < kCalls; ++c) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * blocks[c];
    out[c] =
        PhiloxWords{{rows[c] ^ head.w[1], head.w[0], uint32_t(p0 >> 32) ^ head.w[2], uint32_t(p0)}};
  }
  for (int i = 1; i <= 5; ++i) {
    const PhiloxWords k = words4(i);
    for (int c = 0; c < kCalls; ++c) {
      round(out[c], k.w[0], k.w[1]);
      if (i < 5) round(out[c], k.w[2], k.w[3]);
    }
  }
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

// All four bytes at once: bit 7 of each says that its weight is kept, threshold below 256. The
// difference of the lower seven bits does not borrow from the next byte; bit 7 of the threshold
// decides whether it must be met by both or by one of the two.
FA_HOST_DEVICE uint32_t kept_bytes(uint32_t bytes, int threshold) {
  const uint32_t low = uint32_t(threshold & 0x7F) * 0x01010101u;
  const uint32_t either = threshold & 0x80 ? 0u : ~0u;
  const uint32_t d = (bytes | 0x80808080u) - low;
  return (bytes & d) | (either & (bytes | d));
}

// 256 · p rounded half up: a weight is dropped iff its byte is below this.
inline int dropout_threshold(float p) {
  const int t = int(256.0 * double(p) + 0.5);
  return t > 256 ? 256 : t;
}

#if defined(__CUDACC__)

// Words of a DropoutTile in shared memory. Volatile: else the keys of all rounds, the same for
// every call, would occupy 20 registers.
struct SharedDropoutWords {
  uint32_t address;
  FA_DEVICE PhiloxWords operator()(int i) const {
    PhiloxWords k;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(k.w[0]), "=r"(k.w[1]), "=r"(k.w[2]), "=r"(k.w[3])
                 : "r"(address + 16 * i));
    return k;
  }
};

// Calls that share the loads of the keys.
inline constexpr int kDropoutCalls = 2;

// What a warp needs in shared memory.
struct DropoutMemory {
  DropoutTile tile;
  alignas(16) uint32_t words[kDropoutCalls][32][4];  // of one call of each lane
};

// Bits 7, 15, 23 and 31 of kept[r * kBlocks + b] say whether dropout keeps the four weights of this
// lane in row r and 16-key block b of an accumulator of kRows rows and kBlocks blocks; see
// acc_view.h. `memory`: address of a DropoutMemory; `row`: sequence position of the warp's row 0;
// `key`: first key, a multiple of 16. Slabs are kSlabRows apart. All lanes of the warp come here
// together. A call of Philox serves one row, four lanes: each lane makes calls of its own, and
// ldmatrix deals eight rows to the lanes as it deals the accumulator's. A threshold of 256 keeps
// everything here: then keep_scale is 0.
template <int kRows, int kBlocks, int kSlabRows>
FA_DEVICE void kept_weights(uint32_t memory, int threshold, int row, int key, int lane,
                            uint32_t (&kept)[kRows * kBlocks]) {
  constexpr int kCalls = kRows * kBlocks / 4;  // of this lane
  static_assert(kRows * kBlocks % (4 * kDropoutCalls) == 0, "rounds of whole calls");
  const uint32_t scratch = memory + offsetof(DropoutMemory, words) + lane * 16;
#pragma unroll
  for (int first = 0; first < kCalls; first += kDropoutCalls) {
    uint32_t rows[kDropoutCalls], blocks[kDropoutCalls];
#pragma unroll
    for (int c = 0; c < kDropoutCalls; ++c) {
      const int mine = 4 * (first + c) + lane / 8, r = mine / kBlocks;
      rows[c] = uint32_t(row + lane % 8 + r % 2 * 8 + r / 2 * kSlabRows);
      blocks[c] = uint32_t(key / 16 + mine % kBlocks);
    }
    PhiloxWords words[kDropoutCalls];
    dropout_calls(SharedDropoutWords{memory}, rows, blocks, words);
    __syncwarp();  // every lane has its words of the round before
#pragma unroll
    for (int c = 0; c < kDropoutCalls; ++c) {
      uint32_t v[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) v[t] = kept_bytes(quad_bytes(words[c], t), threshold);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(scratch + c * 512), "r"(v[0]),
                   "r"(v[1]), "r"(v[2]), "r"(v[3])
                   : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kDropoutCalls; ++c) {
      uint32_t* k = kept + 4 * (first + c);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(k[0]), "=r"(k[1]), "=r"(k[2]), "=r"(k[3])
                   : "r"(scratch + c * 512)
                   : "memory");
    }
  }
}

// Mask of a pair of packed 16-bit weights whose bytes in a word of kept_weights() are 2 * pair and
// 2 * pair + 1: the sign of each byte, twice.
template <int kPair>
FA_DEVICE uint32_t kept_pair(uint32_t kept) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(kept), "n"(kPair == 0 ? 0x9988 : 0xBBAA));
  return mask;
}

#endif

}  // namespace fa
