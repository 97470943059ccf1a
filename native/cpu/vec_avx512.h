// V: 16 float32 lanes in one 512-bit register. Needs AVX-512 F, BW, DQ, VL, VBMI, VNNI and F16C.
// U: 64 unsigned bytes, four a lane; I: 16 int32 lanes.
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
struct U {
  __m512i v;
};
// Typed by element: GCC 12 spills accumulators that it has to reinterpret for every use.
typedef int32_t Lanes __attribute__((vector_size(64)));
struct I {
  Lanes v;
};

// Shapes of the matrix product: the most columns that are multiplied straight from decoded
// registers and with how many panels at once; panels and columns of a tile over a decoded block.
constexpr int direct_panels(int columns) {
  return columns == 1 ? 4 : 2;
}
enum { kDirectColumns = 4, kTilePanels = 2, kTileColumns = 12 };
// The same of the integer product, where a direct pass takes one panel. Looking codes up is so
// cheap that direct passes over parts of many columns, whose sums stay in registers, beat tiles:
// those of one column are none.
enum { kIntDirectColumns = 8, kIntTilePanels = 1, kIntTileColumns = 1 };
// Of tiles whose weights have a scale per group, which keep more sums.
enum { kIntGroupPanels = 1, kIntGroupColumns = 1 };
// Vectors of value columns that one token's delta rule takes together.
enum { kStepVectors = 8 };
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

// ---- integers

KSL_INLINE U u_load(const uint8_t *p) {
  return {_mm512_loadu_si512(p)};
}
KSL_INLINE void u_store(uint8_t *p, U a) {
  _mm512_storeu_si512(p, a.v);
}
KSL_INLINE I i_set1(int32_t x) {
  return {(Lanes)_mm512_set1_epi32(x)};
}
KSL_INLINE I i_add(I a, I b) {
  return {a.v + b.v};
}
// acc + the dot product of the four bytes of each lane with x[0..3]. Bytes of w are below 128.
KSL_INLINE I i_dot(I acc, U w, const int8_t *x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return {(Lanes)_mm512_dpbusd_epi32((__m512i)acc.v, w.v, _mm512_set1_epi32(four))};
}
// The same for quads that are used once: straight from memory. In assembly since GCC 12 loads and
// spills every quad where six columns or so are multiplied.
KSL_INLINE I i_dot_once(I acc, U w, const int8_t *x) {
  typedef int32_t Quad __attribute__((may_alias, aligned(1)));
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*(const Quad *)x));
  return acc;
}
KSL_INLINE V v_of_int(I a) {
  return {_mm512_cvtepi32_ps((__m512i)a.v)};
}
// Lanes are integers in [-127, 127].
KSL_INLINE void v_store_s8(int8_t *p, V a) {
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// Of 16 lanes in four vectors each: what `join` makes of a vector's lanes, four results in turn in
// every quarter.
template <class Join>
KSL_INLINE __m512i reduce_four(const __m512i *a, Join join) {
  const __m512i low = join(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
  const __m512i high = join(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
  __m512i all = join(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  all = join(all, _mm512_shuffle_i32x4(all, all, 0x4e));
  return join(all, _mm512_shuffle_i32x4(all, all, 0xb1));
}
// The sums of the 16 codes of each quarter.
KSL_INLINE __m128i quarter_sums(__m512i codes) {
  __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
  sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, (_MM_PERM_ENUM)0x4e));
  sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, (_MM_PERM_ENUM)0xb1));
  return _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, sum));
}
// quantize() of a whole block at once: the same codes and scales. False, and nothing written, where
// a value is not finite.
KSL_INLINE bool quantize_whole(const float *x, QuantizedBlock *to) {
  static_assert(kScaleBlock == 8 * 16 && kActBlock == 32 && kGroup == 16 && kOffset == 64,
                "vectors of a block");
  __m512 value[8];
  __m512i top[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) value[i] = _mm512_loadu_ps(x + 16 * i);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    top[i] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(value[2 * i]), magnitude),
                              _mm512_and_si512(_mm512_castps_si512(value[2 * i + 1]), magnitude));
  const __m128i bits = _mm512_castsi512_si128(
      reduce_four(top, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }));
  if (_mm_cmpgt_epi32_mask(bits, _mm_set1_epi32(0x7f7fffff))) return false;
  const __m128 most = _mm_castsi128_ps(bits);
  const __mmask8 usable = _mm_cmp_ps_mask(most, _mm_set1_ps(0x1p-100f), _CMP_GT_OQ);
  _mm_storeu_ps(to->scales, _mm_maskz_mul_ps(usable, most, _mm_set1_ps(1.0f / 127.0f)));
  const __m512 inverse =
      _mm512_broadcast_f32x4(_mm_maskz_div_ps(usable, _mm_set1_ps(127.0f), most));
  const __m512 each[4] = {_mm512_permute_ps(inverse, 0x00), _mm512_permute_ps(inverse, 0x55),
                          _mm512_permute_ps(inverse, 0xaa), _mm512_permute_ps(inverse, 0xff)};
  // 1.5 * 2^23 + code: its lowest byte is the code.
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  alignas(64) static const uint8_t kLowBytes[32] = {
      0,  4,  8,  12, 16, 20, 24, 28, 32, 36,  40,  44,  48,  52,  56,  60,
      64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112, 116, 120, 124};
  const __m512i low_bytes = _mm512_castsi256_si512(_mm256_load_si256((const __m256i *)kLowBytes));
  __m256i pair[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_castps_si512(_mm512_fmadd_ps(value[2 * i], each[i], magic));
    const __m512i b = _mm512_castps_si512(_mm512_fmadd_ps(value[2 * i + 1], each[i], magic));
    pair[i] = _mm512_castsi512_si256(_mm512_permutex2var_epi8(a, low_bytes, b));
  }
  const __m512i codes[2] = {_mm512_inserti64x4(_mm512_castsi256_si512(pair[0]), pair[1], 1),
                            _mm512_inserti64x4(_mm512_castsi256_si512(pair[2]), pair[3], 1)};
  const __m128i zero = _mm_setzero_si128();
  const __m128i first = _mm_sub_epi32(zero, _mm_slli_epi32(quarter_sums(codes[0]), 6));
  const __m128i second = _mm_sub_epi32(zero, _mm_slli_epi32(quarter_sums(codes[1]), 6));
  _mm512_storeu_si512(to->codes, codes[0]);
  _mm512_storeu_si512(to->codes + 64, codes[1]);
  _mm_storeu_si128((__m128i *)to->groups, first);
  _mm_storeu_si128((__m128i *)(to->groups + 4), second);
  _mm_storeu_si128((__m128i *)to->blocks, _mm_hadd_epi32(first, second));
  return true;
}
// Byte J of each lane, less kOffset.
template <int J>
KSL_INLINE V v_of_byte(U a) {
  const __m512i x = J ? _mm512_srli_epi32(a.v, 8 * J) : a.v;
  // (x & 255) | bits of 2^23, which is the float 2^23 + byte
  const __m512i biased =
      _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(255), _mm512_set1_epi32(0x4b000000), 0xea);
  return v_sub({_mm512_castsi512_ps(biased)}, v_set1(8388608.0f + kOffset));
}

// ---- decoders, for the 16 rows of a panel: columns 2 J and 2 J + 1 of a group, times kUnit; of
// small-integer encodings columns 4 J to 4 J + 3, times kUnit and plus kOffset, as bytes.

struct NoAux {};

// 32-bit lanes hold the bf16 of the even column below that of the odd one.
KSL_INLINE void split_bf16(__m512i x, V &even, V &odd) {
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000u)));
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
  static constexpr bool kBytes = false, kGroupScales = false;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)(g + 32 * J));
    even = e4m3_high(_mm256_slli_epi16(x, 8));
    odd = e4m3_high(x);
  }
};

// kOffset plus 8 times the value of every E2M3 code.
alignas(64) const uint8_t kE2m3Bytes[64] = {
    64, 65, 66, 67,  68,  69,  70,  71,  72,  73,  74, 75, 76, 77, 78, 79, 80, 82, 84, 86, 88, 90,
    92, 94, 96, 100, 104, 108, 112, 116, 120, 124, 64, 63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53,
    52, 51, 50, 49,  48,  46,  44,  42,  40,  38,  36, 34, 32, 28, 24, 20, 16, 12, 8,  4};

struct DecodeE2m3 {
  enum { kGroupBytes = 192 };
  static constexpr float kUnit = 8.0f;
  static constexpr bool kBytes = true, kGroupScales = false;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  // The look-up reads six bits of a byte and ignores the rest.
  template <int J>
  KSL_INLINE U bytes(const uint8_t *g) {
    __m512i code;
    if (J < 3) {
      code = _mm512_loadu_si512(g + 64 * J);
    } else {
      const __m512i a = _mm512_srli_epi16(_mm512_loadu_si512(g), 6);
      const __m512i b = _mm512_srli_epi16(_mm512_loadu_si512(g + 64), 4);
      const __m512i c = _mm512_srli_epi16(_mm512_loadu_si512(g + 128), 2);
      // Bits of the first operand where the third is set, else of the second.
      code = _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi8(0x03), 0xe4);
      code = _mm512_ternarylogic_epi32(code, c, _mm512_set1_epi8(0x0f), 0xe4);
    }
    return {_mm512_permutexvar_epi8(code, _mm512_load_si512(kE2m3Bytes))};
  }
};

struct DecodeNvfp4 {
  enum { kGroupBytes = 128 };
  static constexpr float kUnit = 2.0f / 256.0f;
  static constexpr bool kBytes = true, kGroupScales = true;
  typedef V Aux;
  KSL_INLINE Aux aux(const uint8_t *scales) {
    // The bits of a half of 2^-8 times the value, see pack_scales.
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)scales));
    return {_mm512_cvtph_ps(_mm256_slli_epi16(x, 7))};
  }
  // The look-up reads six bits of a byte: its table repeats every 16.
  template <int J>
  KSL_INLINE U bytes(const uint8_t *g) {
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(64, 65, 66, 67, 68, 70, 72, 76, 64, 63, 62, 61, 60, 58, 56, 52));
    const __m512i x = _mm512_loadu_si512(g + 64 * (J / 2));
    return {_mm512_permutexvar_epi8(J % 2 ? _mm512_srli_epi16(x, 4) : x, table)};
  }
};

}  // namespace
}  // namespace ksl
