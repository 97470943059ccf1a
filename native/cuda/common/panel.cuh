// Activations of waves with many tokens, as the wide matrix kernels read them: one half per value
// in the order of B operands in shared memory, so that a kernel fetches any run of eights of tokens
// with one copy.
//
// 64 input elements of a token are a row of 128 bytes; eight tokens are 1024 bytes in which 16-byte
// chunk c of row r lies at c ^ r. Inside a row the elements follow the fragments of pack.cu:
// element 16 s + 4 i + e at 16 i + 2 s + (e & 1) + 8 (e >> 1).
#pragma once
#include "device.cuh"

namespace ksl {

constexpr int kPanelTokens = 8;   // that lie together
constexpr int kPanelSlack = 256;  // tokens that a kernel may read behind the last

struct Panel {
  uint8_t *data;  // [pieces of 64][groups][8][128], null: nobody reads it
  int groups;     // of eight tokens
  float scale;    // a power of two that is multiplied in
};

// The same values as e4m3, 128 input elements in a row: see quantize.cu. At most kPanel8Width of
// them.
constexpr int kPanel8Width = 65536;
struct Panel8 {
  uint8_t *data;  // [pieces of 128][groups][8][128]
  int groups;
  float *inverse;  // by token: what a value was multiplied by, undone
};

__device__ inline uint8_t *panel_row(const Panel &to, int token, int piece) {
  return to.data + (static_cast<int64_t>(piece) * to.groups + (token >> 3)) * 1024 +
         (token & 7) * 128;
}

// Values beyond what a half holds become its largest; NaN stays.
__device__ inline __half panel_half(float x) {
  asm("min.NaN.f32 %0, %0, 0f477fe000;\nmax.NaN.f32 %0, %0, 0fc77fe000;" : "+f"(x));
  return __float2half_rn(x);
}

// Byte of element k of a token in its row.
__device__ inline int panel_byte(int token, int k) {
  const int s = (k & 63) >> 4, i = (k & 15) >> 2, e = k & 3;
  return ((2 * i + (e >> 1)) ^ (token & 7)) * 16 + 4 * s + 2 * (e & 1);
}

__device__ inline void panel_store(const Panel &to, int token, int k, float value) {
  *reinterpret_cast<__half *>(panel_row(to, token, k >> 6) + panel_byte(token, k)) =
      panel_half(value * to.scale);
}

// Elements k and k + 1 of an even k.
__device__ inline void panel_store2(const Panel &to, int token, int k, float first, float second) {
  *reinterpret_cast<__half2 *>(panel_row(to, token, k >> 6) + panel_byte(token, k)) =
      __halves2half2(panel_half(first * to.scale), panel_half(second * to.scale));
}

// Eight elements from k on, a multiple of 8.
__device__ inline void panel_store8(const Panel &to, int token, int k, const float (&values)[8]) {
  uint8_t *row = panel_row(to, token, k >> 6);
#pragma unroll
  for (int i = 0; i < 8; i += 2)
    *reinterpret_cast<__half2 *>(row + panel_byte(token, k + i)) =
        __halves2half2(panel_half(values[i] * to.scale), panel_half(values[i + 1] * to.scale));
}

// The exponent of the largest power of two that leaves values up to `most` within e4m3's 448.
__device__ inline int panel8_exponent(float most) {
  if (!(most > 0)) return 0;
  const unsigned bits = __float_as_uint(most);
  const int exponent = 8 - (static_cast<int>(bits >> 23) - 127) - ((bits & 0x7fffff) > 0x600000);
  return exponent < 100 ? exponent : 100;
}

// 16-byte chunk `i` of the four that a token's row of one half of 64 elements has.
__device__ inline int panel8_chunk(int token, int half, int i) {
  return ((half * 4 + i) ^ (token & 7)) * 16;
}

// Eight elements from k on, a multiple of 8, times a power of two.
__device__ inline void panel8_store8(const Panel8 &to, int token, int k, const float (&values)[8],
                                     float scale) {
  uint8_t *row = to.data + (static_cast<int64_t>(k >> 7) * to.groups + (token >> 3)) * 1024 +
                 (token & 7) * 128 + (k >> 4 & 3) * 4;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(low)
        : "f"(values[i + 1] * scale), "f"(values[i] * scale));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(high)
        : "f"(values[i + 3] * scale), "f"(values[i + 2] * scale));
    *reinterpret_cast<unsigned *>(row + panel8_chunk(token, k >> 6 & 1, ((k & 15) + i) >> 2)) =
        low | static_cast<unsigned>(high) << 16;
  }
}

}  // namespace ksl
