// What flash.cu is made of: queries and stored pieces of 16 bytes as halves in swizzled panels, and
// what is written of a row.
#pragma once
#include "../common/mma.cuh"
#include "attn.cuh"

namespace ksl {

__device__ inline uint32_t two_of(float x, float y) {
  const __half2 v = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t &>(v);
}

// Rows [first, first + rows) of a tile's queries by kThreads threads, in units that make a power of
// two the exponential. Dims of q4 are in the order in which codes unpack. to: panels of kFlashRows.
template <int kFormat, int kDim, int kThreads>
__device__ inline void load_queries(const FlashArgs &a, const FlashTile &tile, int head, int first,
                                    int rows, uint8_t *to, int thread) {
  constexpr int kChunks = kDim / 8, kAhead = 4;  // items whose loads are under way
  const float unit = 1.4426950408889634f / sqrtf(static_cast<float>(kDim));
  const int group = a.heads / a.kv.kv_heads;
  for (int from = thread; from < rows * kChunks; from += kAhead * kThreads) {
    float4 q[kAhead][2];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int item = from + i * kThreads, row = first + item / kChunks;
      q[i][0] = q[i][1] = make_float4(0, 0, 0, 0);
      if (item < rows * kChunks && row < tile.columns * group) {
        const float4 *at = reinterpret_cast<const float4 *>(
            a.q + static_cast<int64_t>(tile.column + row / group) * a.q_stride +
            (head * group + row % group) * kDim + item % kChunks * 8);
        q[i][0] = at[0];
        q[i][1] = at[1];
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int item = from + i * kThreads, row = first + item / kChunks, chunk = item % kChunks;
      if (item >= rows * kChunks) break;
      const float4 &x = q[i][0], &y = q[i][1];
      *reinterpret_cast<uint4 *>(to + (chunk >> 3) * (kFlashRows * 128) +
                                 swizzled(row, chunk & 7)) =
          kFormat == KSL_KV_Q4
              ? make_uint4(two_of(x.x * unit, y.x * unit), two_of(x.y * unit, y.y * unit),
                           two_of(x.z * unit, y.z * unit), two_of(x.w * unit, y.w * unit))
              : make_uint4(two_of(x.x * unit, x.y * unit), two_of(x.z * unit, x.w * unit),
                           two_of(y.x * unit, y.y * unit), two_of(y.z * unit, y.w * unit));
    }
  }
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

// A row of a tile when its keys are done, by the four lanes t that have it: greatest score, each
// lane's part of the sum, and by two(j) dims 8 j + 2 t and the next. All lanes of a warp come here.
template <int kDim, class Two>
__device__ inline void finish_row(const FlashArgs &a, const FlashTile &tile, int head, int row,
                                  float most, float total, const Two &two) {
  const int t = threadIdx.x & 3, heads = a.kv.kv_heads, group = a.heads / heads;
  const float sum = quad_sum(total);
  if (row >= tile.columns * group) return;
  if (tile.parts > 1) {
    const int64_t at = flash_partial(a, blockIdx.x / heads, head) + row;
    if (t == 0) a.partial_sums[at] = make_float2(most, sum);
#pragma unroll
    for (int j = 0; j < kDim / 8; j++)
      *reinterpret_cast<float2 *>(a.partial + at * kDim + j * 8 + 2 * t) = two(j);
    return;
  }
  const float scale = sum > 0 ? 1.0f / sum : 0.0f;  // no key: position 0 of a layer without row 0
  const int column = tile.column + row / group, query_head = head * group + row % group;
  // Gates of many dims are under way together: a store does not let later loads pass.
  constexpr int kTogether = kDim / 8 < 16 ? kDim / 8 : 16;
#pragma unroll
  for (int first = 0; first < kDim / 8; first += kTogether) {
    float2 gates[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++)
      gates[j] = gate_of2(a.gate, column, query_head, (first + j) * 8 + 2 * t, kDim);
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const float2 v = two(first + j);
      gate_store2(a.gate, column, query_head, (first + j) * 8 + 2 * t, kDim, v.x * scale,
                  v.y * scale, gates[j]);
    }
  }
}

}  // namespace ksl
