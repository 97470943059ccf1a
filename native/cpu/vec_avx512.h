// V: 16 float32 lanes in one 512-bit register. Needs AVX-512 F, BW, DQ, VL and F16C.
#pragma once
// GCC's own header trips these: its "undefined" operands are variables set to themselves.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "../common/abi.h"

#define KSL_INLINE static inline __attribute__((always_inline))
#define KSL_STEP KSL_INLINE  // one step of an unrolled loop over column pairs

namespace ksl {
namespace {

struct V {
  __m512 v;
};

// Shapes of the matrix product: the most columns that are multiplied straight from decoded
// registers and with how many panels at once; panels and columns of a tile over a decoded block.
constexpr int direct_panels(int columns) {
  return columns == 1 ? 4 : 2;
}
enum { kDirectColumns = 4, kTilePanels = 2, kTileColumns = 12 };
// Heads handled together in attention; heads and keys whose scores are computed together.
enum { kHeadBlock = 4, kScoreHeads = 4, kScoreKeys = 4 };

KSL_INLINE __mmask16 lanes_below(int n) {
  return (__mmask16)((1u << n) - 1);
}

KSL_INLINE V v_zero() {
  return {_mm512_setzero_ps()};
}
KSL_INLINE V v_set1(float x) {
  return {_mm512_set1_ps(x)};
}
KSL_INLINE V v_load(const float *p) {
  return {_mm512_loadu_ps(p)};
}
KSL_INLINE V v_load_n(const float *p, int n) {
  return {_mm512_maskz_loadu_ps(lanes_below(n), p)};
}
KSL_INLINE void v_store(float *p, V a) {
  _mm512_storeu_ps(p, a.v);
}
KSL_INLINE void v_store_n(float *p, V a, int n) {
  _mm512_mask_storeu_ps(p, lanes_below(n), a.v);
}
KSL_INLINE V v_add(V a, V b) {
  return {_mm512_add_ps(a.v, b.v)};
}
KSL_INLINE V v_sub(V a, V b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
KSL_INLINE V v_mul(V a, V b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
KSL_INLINE V v_div(V a, V b) {
  return {_mm512_div_ps(a.v, b.v)};
}
KSL_INLINE V v_fma(V a, V b, V c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
KSL_INLINE V v_fnma(V a, V b, V c) {
  return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}
// The second operand where either is NaN.
KSL_INLINE V v_max(V a, V b) {
  return {_mm512_max_ps(a.v, b.v)};
}
KSL_INLINE V v_min(V a, V b) {
  return {_mm512_min_ps(a.v, b.v)};
}
KSL_INLINE float v_lane0(V a) {
  return _mm512_cvtss_f32(a.v);
}
KSL_INLINE __m256 high_half(__m512 a) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
}
// Adds the halves (lane i and i + 8), then i and i + 4, then (0 + 1) + (2 + 3).
KSL_INLINE float v_hsum(V a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), high_half(a.v));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehl_ps(q, q)));
}
KSL_INLINE float v_hmax(V a) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), high_half(a.v));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
// a * 2^n for integral lanes n in [-150, 128] and normal a: one rounding.
KSL_INLINE V v_scale2(V a, V n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}

KSL_INLINE V widen_bf16(__m256i x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
KSL_INLINE V v_load_bf16(const uint16_t *p) {
  return widen_bf16(_mm256_loadu_si256((const __m256i *)p));
}
KSL_INLINE V v_load_bf16_n(const uint16_t *p, int n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
KSL_INLINE __m256i round_bf16(V a) {
  const __m512i u = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(u, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i even =
      _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(even, nan, high, _mm512_set1_epi32(0x40)));
}
KSL_INLINE void v_store_bf16(uint16_t *p, V a) {
  _mm256_storeu_si256((__m256i *)p, round_bf16(a));
}
KSL_INLINE void v_store_bf16_n(uint16_t *p, V a, int n) {
  _mm256_mask_storeu_epi16(p, lanes_below(n), round_bf16(a));
}

// ---- decoders: columns 2 J and 2 J + 1 of a group, times kUnit, for the 16 rows of its panel.

struct NoAux {};

// 32-bit lanes hold the bf16 of the even column below that of the odd one.
KSL_INLINE void split_bf16(__m512i x, V &even, V &odd) {
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000u)));
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
    split_bf16(_mm512_loadu_si512(g + 64 * J), even, odd);
  }
};

// An e4m3 code in the high byte of each word, as a half of 2^-8 times its value.
KSL_INLINE V e4m3_high(__m256i x) {
  // s eeee mmm ........ -> s 0 eeee mmm 0000000; all ones must become a NaN, not 480 * 2^-8.
  __m256i h = _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16((short)0xbf80));
  const __m256i carry =
      _mm256_and_si256(_mm256_add_epi16(h, _mm256_set1_epi16(0x0080)), _mm256_set1_epi16(0x4000));
  h = _mm256_or_si256(h, carry);
  return {_mm512_cvtph_ps(h)};
}

struct DecodeFp8 {
  enum { kGroupBytes = 256 };
  static constexpr float kUnit = 1.0f / 256.0f;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)(g + 32 * J));
    even = e4m3_high(_mm256_slli_epi16(x, 8));
    odd = e4m3_high(x);
  }
};

// bf16 of every E2M3 code.
alignas(64) const uint16_t kE2m3Bf16[64] = {
    0x0000, 0x3e00, 0x3e80, 0x3ec0, 0x3f00, 0x3f20, 0x3f40, 0x3f60, 0x3f80, 0x3f90, 0x3fa0,
    0x3fb0, 0x3fc0, 0x3fd0, 0x3fe0, 0x3ff0, 0x4000, 0x4010, 0x4020, 0x4030, 0x4040, 0x4050,
    0x4060, 0x4070, 0x4080, 0x4090, 0x40a0, 0x40b0, 0x40c0, 0x40d0, 0x40e0, 0x40f0, 0x8000,
    0xbe00, 0xbe80, 0xbec0, 0xbf00, 0xbf20, 0xbf40, 0xbf60, 0xbf80, 0xbf90, 0xbfa0, 0xbfb0,
    0xbfc0, 0xbfd0, 0xbfe0, 0xbff0, 0xc000, 0xc010, 0xc020, 0xc030, 0xc040, 0xc050, 0xc060,
    0xc070, 0xc080, 0xc090, 0xc0a0, 0xc0b0, 0xc0c0, 0xc0d0, 0xc0e0, 0xc0f0};

struct DecodeE2m3 {
  enum { kGroupBytes = 192 };
  static constexpr float kUnit = 1.0f;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    // The look-up reads six bits of a word and ignores the rest.
    __m512i code;
    if (J < 6) {
      code = _mm512_loadu_si512(g + 64 * (J / 2));
      if (J % 2) code = _mm512_srli_epi16(code, 6);
    } else {
      const __m512i low = _mm512_srli_epi16(_mm512_loadu_si512(g + 64 * (J - 6)), 12);
      const __m512i c = _mm512_loadu_si512(g + 128);
      const __m512i high = J == 6 ? _mm512_srli_epi16(c, 8) : _mm512_srli_epi16(c, 10);
      // low | (high & 0xf0)
      code = _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi16(0xf0), 0xf8);
    }
    split_bf16(_mm512_permutex2var_epi16(_mm512_load_si512(kE2m3Bf16), code,
                                         _mm512_load_si512(kE2m3Bf16 + 32)),
               even, odd);
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
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux scale, V &even, V &odd) {
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                        -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    const __m512i x = _mm512_loadu_si512(g + 64 * (J / 4));
    const __m512i e = J % 4 ? _mm512_srli_epi32(x, J % 4 * 4) : x;
    even.v = _mm512_mul_ps(_mm512_permutexvar_ps(e, table), scale.v);
    odd.v =
        _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(x, J % 4 * 4 + 16), table), scale.v);
  }
};

}  // namespace
}  // namespace ksl
