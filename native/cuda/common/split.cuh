// Activations as the matrix kernels read them.
//
// Waves of few tokens: each float32 value is the sum of two halves, in the order of the B fragments
// of an m16n8k16 product. A product has eight columns: the high and low halves of four tokens. Of a
// piece of 64 input elements a lane (column n = lane / 4, s = lane % 4) holds the 16 from 16 s on,
// as two parts of 8. Waves of many tokens: a panel, in the same memory.
#pragma once
#include "panel.cuh"

namespace ksl {

constexpr int kPiece = 64;   // input elements of one lane round
constexpr int kSuper = 256;  // input elements that a block of packed weights covers
constexpr int kTileTokens = 4;

struct Split {
  __half *data;  // [ceil(tokens / 4)][pieces][2][32][8], null: nobody reads it
  int pieces;    // a multiple of 4
  float scale;   // a power of two that is multiplied in
  int groups;    // 0, or `data` is a panel of so many eights of tokens
  bool e4m3;     // FP6 weights take a panel as e4m3
};

__host__ __device__ inline Panel panel_of(const Split &split) {
  return {reinterpret_cast<uint8_t *>(split.data), split.groups, split.scale};
}

// Behind the panel, in the same memory.
inline Panel8 panel8_of(const Split &split) {
  const int64_t bytes = static_cast<int64_t>(split.pieces) * split.groups * 1024;
  uint8_t *data = reinterpret_cast<uint8_t *>(split.data);
  return {data + bytes, split.groups, reinterpret_cast<float *>(data + bytes / 2 * 3)};
}

__device__ inline void split_store(const Split &to, int token, int k, float value) {
  if (to.groups > 0) {
    panel_store(panel_of(to), token, k, value);
    return;
  }
  const float x = value * to.scale;
  const __half high = __float2half_rn(x);
  const __half low = __float2half_rn(x - __half2float(high));
  const int e = k & 15, lane = (token & 3) * 8 + ((k & 63) >> 4);
  const int64_t at =
      ((static_cast<int64_t>(token >> 2) * to.pieces + (k >> 6)) * 2 + (e >> 3)) * 256 + lane * 8 +
      (e & 7);
  to.data[at] = high;
  to.data[at + 32] = low;
}

// Eight elements from k on, a multiple of 8.
__device__ inline void split_store8(const Split &to, int token, int k, const float (&values)[8]) {
  if (to.groups > 0) {
    panel_store8(panel_of(to), token, k, values);
    return;
  }
  alignas(16) __half2 high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float a = values[2 * i] * to.scale, b = values[2 * i + 1] * to.scale;
    high[i] = __halves2half2(__float2half_rn(a), __float2half_rn(b));
    low[i] = __halves2half2(__float2half_rn(a - __low2float(high[i])),
                            __float2half_rn(b - __high2float(high[i])));
  }
  const int lane = (token & 3) * 8 + ((k & 63) >> 4);
  const int64_t at =
      ((static_cast<int64_t>(token >> 2) * to.pieces + (k >> 6)) * 2 + ((k & 15) >> 3)) * 32 + lane;
  reinterpret_cast<uint4 *>(to.data)[at] = *reinterpret_cast<const uint4 *>(high);
  reinterpret_cast<uint4 *>(to.data)[at + 4] = *reinterpret_cast<const uint4 *>(low);
}

}  // namespace ksl
