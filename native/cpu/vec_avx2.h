// V: 16 float32 lanes in two 256-bit registers. Needs AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#include "../common/abi.h"

#define KSL_INLINE static inline __attribute__((always_inline))
#define KSL_STEP KSL_INLINE  // one step of an unrolled loop over column pairs

namespace ksl {
namespace {

struct V {
  __m256 a, b;  // lanes 0..7, 8..15
};

// Shapes of the matrix product: the most columns that are multiplied straight from decoded
// registers and with how many panels at once; panels and columns of a tile over a decoded block.
constexpr int direct_panels(int columns) {
  return columns == 1 ? 2 : 1;
}
enum { kDirectColumns = 4, kTilePanels = 1, kTileColumns = 6 };
// Heads handled together in attention; heads and keys whose scores are computed together.
enum { kHeadBlock = 2, kScoreHeads = 2, kScoreKeys = 2 };

// The first n lanes of a half set.
KSL_INLINE __m256i lanes_below(int n) {
  static const int32_t masks[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  n = n < 0 ? 0 : n > 8 ? 8 : n;
  return _mm256_loadu_si256((const __m256i *)(masks + 8 - n));
}

KSL_INLINE V v_zero() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
KSL_INLINE V v_set1(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
KSL_INLINE V v_load(const float *p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
KSL_INLINE V v_load_n(const float *p, int n) {
  return {_mm256_maskload_ps(p, lanes_below(n)), _mm256_maskload_ps(p + 8, lanes_below(n - 8))};
}
KSL_INLINE void v_store(float *p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
KSL_INLINE void v_store_n(float *p, V x, int n) {
  _mm256_maskstore_ps(p, lanes_below(n), x.a);
  _mm256_maskstore_ps(p + 8, lanes_below(n - 8), x.b);
}
KSL_INLINE V v_add(V x, V y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
KSL_INLINE V v_sub(V x, V y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
KSL_INLINE V v_mul(V x, V y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
KSL_INLINE V v_div(V x, V y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
KSL_INLINE V v_fma(V x, V y, V z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
KSL_INLINE V v_fnma(V x, V y, V z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
// The second operand where either is NaN.
KSL_INLINE V v_max(V x, V y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
KSL_INLINE V v_min(V x, V y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
KSL_INLINE float v_lane0(V x) {
  return _mm256_cvtss_f32(x.a);
}
// Adds the halves (lane i and i + 8), then i and i + 4, then (0 + 1) + (2 + 3).
KSL_INLINE float v_hsum(V x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehl_ps(q, q)));
}
KSL_INLINE float v_hmax(V x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
KSL_INLINE __m256 scale2(__m256 x, __m256 n) {
  const __m256i e = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(e, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i f = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i g = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(e, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(f)), _mm256_castsi256_ps(g));
}
// a * 2^n for integral lanes n in [-150, 128] and normal a: one rounding.
KSL_INLINE V v_scale2(V x, V n) {
  return {scale2(x.a, n.a), scale2(x.b, n.b)};
}

KSL_INLINE __m256 widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
KSL_INLINE V v_load_bf16(const uint16_t *p) {
  return {widen_bf16(_mm_loadu_si128((const __m128i *)p)),
          widen_bf16(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
KSL_INLINE V v_load_bf16_n(const uint16_t *p, int n) {
  uint16_t whole[16] = {};
  __builtin_memcpy(whole, p, 2 * (size_t)n);
  return v_load_bf16(whole);
}
KSL_INLINE __m256i round_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i even =
      _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(even, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
KSL_INLINE void v_store_bf16(uint16_t *p, V x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
KSL_INLINE void v_store_bf16_n(uint16_t *p, V x, int n) {
  uint16_t whole[16];
  v_store_bf16(whole, x);
  __builtin_memcpy(p, whole, 2 * (size_t)n);
}

// ---- decoders: columns 2 J and 2 J + 1 of a group, times kUnit, for the 16 rows of its panel.

struct NoAux {};

// 32-bit lanes hold the bf16 of the even column below that of the odd one.
KSL_INLINE void split_bf16(__m256i x, __m256 &even, __m256 &odd) {
  even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)));
}
KSL_INLINE __m256i load256(const uint8_t *p) {
  return _mm256_loadu_si256((const __m256i *)p);
}

struct DecodeF32 {
  enum { kGroupBytes = 1024 };
  static constexpr float kUnit = 1.0f;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    even = v_load((const float *)g + 32 * J);
    odd = v_load((const float *)g + 32 * J + 16);
  }
};

struct DecodeBf16 {
  enum { kGroupBytes = 512 };
  static constexpr float kUnit = 1.0f;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    split_bf16(load256(g + 64 * J), even.a, odd.a);
    split_bf16(load256(g + 64 * J + 32), even.b, odd.b);
  }
};

// An e4m3 code in the high byte of each word, as a half of 2^-8 times its value.
KSL_INLINE V e4m3_high(__m256i x) {
  // s eeee mmm ........ -> s 0 eeee mmm 0000000; all ones must become a NaN, not 480 * 2^-8.
  __m256i h = _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16((short)0xbf80));
  const __m256i carry =
      _mm256_and_si256(_mm256_add_epi16(h, _mm256_set1_epi16(0x0080)), _mm256_set1_epi16(0x4000));
  h = _mm256_or_si256(h, carry);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}

struct DecodeFp8 {
  enum { kGroupBytes = 256 };
  static constexpr float kUnit = 1.0f / 256.0f;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    const __m256i x = load256(g + 32 * J);
    even = e4m3_high(_mm256_slli_epi16(x, 8));
    odd = e4m3_high(x);
  }
};

struct DecodeE2m3 {
  enum { kGroupBytes = 192 };
  static constexpr float kUnit = 8.0f;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  // Codes in the low six bits of words, anything above.
  KSL_INLINE void decode(__m256i code, __m256 &even, __m256 &odd) {
    // Eight times the magnitude: codes below 16 are it, the others are in a table of 16 bytes. A
    // byte shuffle gives 0 for the negative index of the former, and no table value is below code.
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40, 44, 48, 52, 56, 60));
    const __m256i m = _mm256_and_si256(code, _mm256_set1_epi16(0x1f));
    const __m256i magnitude = _mm256_max_epu8(
        m, _mm256_shuffle_epi8(table, _mm256_sub_epi8(m, _mm256_set1_epi16(0x8010 - 0x10000))));
    const __m256i sign = _mm256_or_si256(_mm256_slli_epi16(code, 10), _mm256_set1_epi16(1));
    // 192 + value is exact in bf16: 0x4340 + value.
    const __m256i biased =
        _mm256_add_epi16(_mm256_sign_epi16(magnitude, sign), _mm256_set1_epi16(0x4340));
    split_bf16(biased, even, odd);
    const __m256 bias = _mm256_set1_ps(192.0f);
    even = _mm256_sub_ps(even, bias);
    odd = _mm256_sub_ps(odd, bias);
  }
  template <int J>
  KSL_INLINE __m256i codes(const uint8_t *g) {
    if (J < 6) {
      const __m256i x = load256(g + 64 * (J / 2));
      return J % 2 ? _mm256_srli_epi16(x, 6) : x;
    }
    const __m256i low = _mm256_srli_epi16(load256(g + 64 * (J - 6)), 12), c = load256(g + 128);
    const __m256i high = J == 6 ? _mm256_srli_epi16(c, 8) : _mm256_srli_epi16(c, 10);
    return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi16(0xf0)));
  }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    decode(codes<J>(g), even.a, odd.a);
    decode(codes<J>(g + 32), even.b, odd.b);
  }
};

struct DecodeNvfp4 {
  enum { kGroupBytes = 128 };
  static constexpr float kUnit = 1.0f;
  typedef V Aux;
  KSL_INLINE Aux aux(const uint8_t *scales) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)scales));
    return v_mul(e4m3_high(_mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 8)),
                 v_set1(256.0f));
  }
  // Nibble N of each 32-bit lane: the magnitude by look-up of three bits, then the sign bit.
  template <int N>
  KSL_INLINE __m256 nibble(__m256i x, __m256 scale) {
    const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256 magnitude = _mm256_permutevar8x32_ps(table, N ? _mm256_srli_epi32(x, 4 * N) : x);
    const __m256i shifted = N < 7 ? _mm256_slli_epi32(x, 28 - 4 * N) : x;
    const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(shifted), _mm256_set1_ps(-0.0f));
    return _mm256_mul_ps(_mm256_or_ps(magnitude, sign), scale);
  }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux scale, V &even, V &odd) {
    const __m256i low = load256(g + 64 * (J / 4)), high = load256(g + 64 * (J / 4) + 32);
    even = {nibble<J % 4>(low, scale.a), nibble<J % 4>(high, scale.b)};
    odd = {nibble<J % 4 + 4>(low, scale.a), nibble<J % 4 + 4>(high, scale.b)};
  }
};

}  // namespace
}  // namespace ksl
