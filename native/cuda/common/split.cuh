// Activations as the matrix kernels read them, one half per value.
//
// Waves of few tokens: in the order of the B fragments of an m16n8k16 product, so that the
// fragments of eight tokens and 256 input elements are 4 KiB in one piece. Of 64 input elements a
// lane (token n = lane / 4, s = lane % 4) holds the 16 from 16 s on, as two parts of 8. Where four
// warps multiply together, the same KiB of eight tokens and 64 elements has rows of a panel
// instead. Waves of many tokens: a panel, in the same memory.
#pragma once
#include "panel.cuh"

namespace ksl {

constexpr int kPiece = 64;   // input elements of one lane round
constexpr int kSuper = 256;  // input elements that a block of packed weights covers
constexpr int kTileTokens = 8;

struct Split {
  __half *data;  // [ceil(tokens / 8)][pieces][2][32][8], zeros behind the width; null: nobody reads
  int pieces;    // a multiple of 4
  float scale;   // a power of two that is multiplied in
  int groups;    // 0, or `data` is a panel of so many eights of tokens
  bool e4m3;     // FP6 weights take a panel as e4m3
  bool direct;   // its packed readers all do: who has a whole token writes that at once
  bool scaled;   // a panel is for block_scaled.cuh, and e4m3 is not set
  bool halves = false;  // bf16 rows beside packed ones read the panel: it is written even if direct
  bool rows = false;    // no panel, but its rows, for quads.cuh
};

__host__ __device__ inline Panel panel_of(const Split &split) {
  return {reinterpret_cast<uint8_t *>(split.data), split.groups, split.scale};
}

// Behind the panel, in the same memory.
__host__ __device__ inline Panel8 panel8_of(const Split &split) {
  const int64_t bytes = static_cast<int64_t>(split.pieces) * split.groups * 1024;
  uint8_t *data = reinterpret_cast<uint8_t *>(split.data);
  return {data + bytes, split.groups, reinterpret_cast<float *>(data + bytes / 2 * 3)};
}

// Where the eight elements from k on, a multiple of 8, begin.
__device__ inline __half *split_at(const Split &to, int token, int k) {
  const int lane = (token & 7) * 4 + ((k & 63) >> 4);
  return to.data +
         ((static_cast<int64_t>(token >> 3) * to.pieces + (k >> 6)) * 2 + ((k & 15) >> 3)) * 256 +
         lane * 8;
}

// The row that has element k of a token; panel_byte says where.
__device__ inline uint8_t *split_row(const Split &to, int token, int k) {
  return reinterpret_cast<uint8_t *>(to.data) +
         (static_cast<int64_t>(token >> 3) * to.pieces + (k >> 6)) * 1024 + (token & 7) * 128;
}

__device__ inline void split_store(const Split &to, int token, int k, float value) {
  if (to.groups > 0)
    panel_store(panel_of(to), token, k, value);
  else if (to.rows)
    *reinterpret_cast<__half *>(split_row(to, token, k) + panel_byte(token, k)) =
        __float2half_rn(value * to.scale);
  else
    split_at(to, token, k & ~7)[k & 7] = __float2half_rn(value * to.scale);
}

// Elements k and k + 1 of an even k.
__device__ inline void split_store2(const Split &to, int token, int k, float first, float second) {
  if (to.groups > 0)
    panel_store2(panel_of(to), token, k, first, second);
  else if (to.rows)
    *reinterpret_cast<__half2 *>(split_row(to, token, k) + panel_byte(token, k)) =
        __floats2half2_rn(first * to.scale, second * to.scale);
  else
    *reinterpret_cast<__half2 *>(split_at(to, token, k & ~7) + (k & 7)) =
        __floats2half2_rn(first * to.scale, second * to.scale);
}

// Whether it is one of the forms with rows.
__device__ inline bool split_is_rows(const Split &to) {
  return to.groups > 0 || to.rows;
}

// Eight elements as it has them.
__device__ inline uint4 split_halves8(const Split &to, const float (&values)[8]) {
  alignas(16) __half2 halves[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    halves[i] = __halves2half2(__float2half_rn(values[2 * i] * to.scale),
                               __float2half_rn(values[2 * i + 1] * to.scale));
  return *reinterpret_cast<const uint4 *>(halves);
}

// Eight elements from k on, a multiple of 8.
__device__ inline void split_store8(const Split &to, int token, int k, const float (&values)[8]) {
  if (to.groups > 0) {
    panel_store8(panel_of(to), token, k, values);
    return;
  }
  const uint4 all = split_halves8(to, values);
  const __half2 *const halves = reinterpret_cast<const __half2 *>(&all);
  if (to.rows) {
    uint8_t *const row = split_row(to, token, k);
#pragma unroll
    for (int i = 0; i < 4; i++)
      *reinterpret_cast<__half2 *>(row + panel_byte(token, k + 2 * i)) = halves[i];
    return;
  }
  *reinterpret_cast<uint4 *>(split_at(to, token, k)) = all;
}

}  // namespace ksl
