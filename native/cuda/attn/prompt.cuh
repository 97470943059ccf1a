// Stored pieces of 16 bytes as halves in swizzled panels, for both attentions of long pieces of
// prompts.
#pragma once
#include "../common/mma.cuh"
#include "attn.cuh"

namespace ksl {

__device__ inline uint32_t two_of(float x, float y) {
  const __half2 v = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t &>(v);
}

// 32 codes of 4 bits of a key, less their zero point and times their scale, into four chunks of its
// row of a panel from `chunk` on. pair: scale and zero point.
__device__ inline void unpack_piece4(const uint4 &codes, const __half2 &pair, uint8_t *panel,
                                     int key, int chunk) {
  const __half2 scale = __low2half2(pair), zero = __high2half2(pair);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int w = 0; w < 4; w++) {
    uint32_t out[4];
    unpack_codes(words[w], out);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      // A code less its zero point is exact in a half.
      const __half2 x = __hmul2(__hsub2(reinterpret_cast<const __half2 &>(out[i]), zero), scale);
      out[i] = reinterpret_cast<const uint32_t &>(x);
    }
    *reinterpret_cast<uint4 *>(panel + swizzled(key, chunk + w)) =
        make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// 16 bytes of e4m3 times their scale into two chunks.
__device__ inline void unpack_piece8(const uint4 &codes, float scale, uint8_t *panel, int key,
                                     int chunk) {
  const __half2 factor = __float2half2_rn(fminf(scale, 128.0f));  // a half holds 448 of these
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t two = e4m3_halves(words[2 * half + i / 2] >> (16 * (i & 1)));
      const __half2 x = __hmul2(reinterpret_cast<const __half2 &>(two), factor);
      out[i] = reinterpret_cast<const uint32_t &>(x);
    }
    *reinterpret_cast<uint4 *>(panel + swizzled(key, chunk + half)) =
        make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// 16 bytes of bf16 in place.
__device__ inline void unpack_piece16(uint8_t *at) {
  uint4 *const words = reinterpret_cast<uint4 *>(at);
  const uint4 v = *words;
  *words = make_uint4(bf16_halves(v.x), bf16_halves(v.y), bf16_halves(v.z), bf16_halves(v.w));
}

}  // namespace ksl
