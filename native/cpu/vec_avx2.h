// V: 16 float32 lanes in two 256-bit registers. Needs AVX2, FMA and F16C.
// U: 64 unsigned bytes, four a lane; I: 16 int32 lanes.
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
struct U {
  __m256i a, b;
};
struct I {
  __m256i a, b;
};

// Shapes of the matrix product: the most columns that are multiplied straight from decoded
// registers and with how many panels at once; panels and columns of a tile over a decoded block.
constexpr int direct_panels(int columns) {
  return columns == 1 ? 2 : 1;
}
enum { kDirectColumns = 4, kTilePanels = 1, kTileColumns = 6 };
// The same of the integer product, where a direct pass takes one panel.
enum { kIntDirectColumns = 4, kIntTilePanels = 1, kIntTileColumns = 4 };
// Of tiles whose weights have a scale per group, which keep more sums.
enum { kIntGroupPanels = 1, kIntGroupColumns = 4 };
// Vectors of value columns that one token's delta rule takes together.
enum { kStepVectors = 2 };
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

// ---- integers

KSL_INLINE __m256i load256(const uint8_t *p) {
  return _mm256_loadu_si256((const __m256i *)p);
}
KSL_INLINE U u_load(const uint8_t *p) {
  return {load256(p), load256(p + 32)};
}
KSL_INLINE void u_store(uint8_t *p, U x) {
  _mm256_storeu_si256((__m256i *)p, x.a);
  _mm256_storeu_si256((__m256i *)(p + 32), x.b);
}
KSL_INLINE I i_set1(int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
KSL_INLINE I i_add(I x, I y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
// acc + the dot product of the four bytes of each lane with x[0..3]. Bytes of w are below 128, so
// that the sum of two products fits 16 bits.
KSL_INLINE I i_dot(I acc, U w, const int8_t *x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  const __m256i v = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
  const __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, v), ones);
  const __m256i b = _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, v), ones);
  return {_mm256_add_epi32(acc.a, a), _mm256_add_epi32(acc.b, b)};
}
KSL_INLINE I i_dot_once(I acc, U w, const int8_t *x) {
  return i_dot(acc, w, x);
}
KSL_INLINE V v_of_int(I x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
// There is no quicker way here.
KSL_INLINE bool quantize_whole(const float *, QuantizedBlock *) {
  return false;
}
// Lanes are integers in [-127, 127].
KSL_INLINE void v_store_s8(int8_t *p, V x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  const __m256i order = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(order),
                                                 _mm256_extracti128_si256(order, 1)));
}
template <int J>
KSL_INLINE __m256 half_of_byte(__m256i x) {
  const __m256i byte =
      _mm256_and_si256(J ? _mm256_srli_epi32(x, 8 * J) : x, _mm256_set1_epi32(255));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(byte, _mm256_set1_epi32(kOffset)));
}
// Byte J of each lane, less kOffset.
template <int J>
KSL_INLINE V v_of_byte(U x) {
  return {half_of_byte<J>(x.a), half_of_byte<J>(x.b)};
}

// ---- decoders, for the 16 rows of a panel: columns 2 J and 2 J + 1 of a group, times kUnit; of
// small-integer encodings columns 4 J to 4 J + 3, times kUnit and plus kOffset, as bytes.

struct NoAux {};

// 32-bit lanes hold the bf16 of the even column below that of the odd one.
KSL_INLINE void split_bf16(__m256i x, __m256 &even, __m256 &odd) {
  even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)));
}

struct DecodeF32 {
  enum { kGroupBytes = 1024 };
  static constexpr float kUnit = 1.0f;
  static constexpr bool kBytes = false, kGroupScales = false;
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
  static constexpr bool kBytes = false, kGroupScales = false;
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
  static constexpr bool kBytes = false, kGroupScales = false;
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
  static constexpr bool kBytes = true, kGroupScales = false;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  // Codes in the low six bits of bytes, anything above.
  KSL_INLINE __m256i decode(__m256i code) {
    // Eight times the magnitude: codes below 16 are it, the others are in a table of 16 bytes. A
    // byte shuffle gives 0 for the negative index of the former, and no table value is below code.
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40, 44, 48, 52, 56, 60));
    const __m256i m = _mm256_and_si256(code, _mm256_set1_epi8(0x1f));
    const __m256i magnitude =
        _mm256_max_epu8(m, _mm256_shuffle_epi8(table, _mm256_sub_epi8(m, _mm256_set1_epi8(0x10))));
    const __m256i sign = _mm256_or_si256(_mm256_slli_epi16(code, 2), _mm256_set1_epi8(1));
    return _mm256_add_epi8(_mm256_sign_epi8(magnitude, sign), _mm256_set1_epi8(kOffset));
  }
  template <int J>
  KSL_INLINE __m256i codes(const uint8_t *g) {
    if (J < 3) return load256(g + 64 * J);
    const __m256i a = _mm256_srli_epi16(load256(g), 6), b = _mm256_srli_epi16(load256(g + 64), 4);
    const __m256i c = _mm256_srli_epi16(load256(g + 128), 2);
    return _mm256_or_si256(_mm256_and_si256(a, _mm256_set1_epi8(0x03)),
                           _mm256_or_si256(_mm256_and_si256(b, _mm256_set1_epi8(0x0c)),
                                           _mm256_and_si256(c, _mm256_set1_epi8(0x30))));
  }
  template <int J>
  KSL_INLINE U bytes(const uint8_t *g) {
    return {decode(codes<J>(g)), decode(codes<J>(g + 32))};
  }
};

struct DecodeNvfp4 {
  enum { kGroupBytes = 128 };
  static constexpr float kUnit = 2.0f / 256.0f;
  static constexpr bool kBytes = true, kGroupScales = true;
  typedef V Aux;
  KSL_INLINE Aux aux(const uint8_t *scales) {
    // The bits of halves of 2^-8 times the values, see pack_scales.
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)scales));
    const __m256i h = _mm256_slli_epi16(x, 7);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
  }
  template <int J>
  KSL_INLINE __m256i half(const uint8_t *g) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(64, 65, 66, 67, 68, 70, 72, 76, 64, 63, 62, 61, 60, 58, 56, 52));
    const __m256i x = load256(g + 64 * (J / 2));
    const __m256i code = J % 2 ? _mm256_srli_epi16(x, 4) : x;
    return _mm256_shuffle_epi8(table, _mm256_and_si256(code, _mm256_set1_epi8(15)));
  }
  template <int J>
  KSL_INLINE U bytes(const uint8_t *g) {
    return {half<J>(g), half<J>(g + 32)};
  }
};

}  // namespace
}  // namespace ksl
