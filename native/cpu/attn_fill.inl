// Pieces of keys and values as codes, of bf16 rows.
namespace ksl {
namespace {

// Of log2 in [1, 2), the highest power first.
constexpr float kRoughLog2[] = {-0x1.414b02p-4f, 0x1.40874ap-1f, -0x1.0a06e4p+1f, 0x1.01de9ap+2f,
                                -0x1.3fca0ap+1f};
// log2 of a normal number to 1.2e-4, which is no more than a choice of scales.
KSL_INLINE float rough_log2(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const float m = kv_float((bits & 0x7fffff) | 0x3f800000);
  float y = kRoughLog2[0];
  for (int i = 1; i < 5; i++) y = y * m + kRoughLog2[i];
  return (float)((int)(bits >> 23) - 127) + y;
}

// The largest magnitude of a row of bf16.
KSL_INLINE float most_of_words(const uint16_t *row, int d) {
  Words high = _mm512_setzero_si512();  // bf16 without sign compare as integers
  for (int i = 0; i < d; i += 32)
    high = _mm512_max_epu16(
        high, _mm512_and_si512(_mm512_loadu_si512(row + i), _mm512_set1_epi16(0x7fff)));
  const __m256i half =
      _mm256_max_epu16(_mm512_castsi512_si256(high), _mm512_extracti64x4_epi64(high, 1));
  const __m128i eight =
      _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  return kv_float(((uint32_t)(_mm_cvtsi128_si32(least) & 0xffff) ^ 0xffff) << 16);
}

// Codes of a row times `inverse`, in [-127, 127].
KSL_INLINE void codes_of_words(const uint16_t *row, int d, float inverse, uint8_t *out) {
  const __m512i low = _mm512_set1_epi32(-127), high = _mm512_set1_epi32(127);
  for (int i = 0; i < d; i += 16) {
    const __m512i x =
        _mm512_cvtps_epi32(_mm512_mul_ps(v_load_bf16(row + i).v, _mm512_set1_ps(inverse)));
    _mm_storeu_si128((__m128i *)(out + i),
                     _mm512_cvtepi32_epi8(_mm512_max_epi32(low, _mm512_min_epi32(high, x))));
  }
}

// Rows below this count as zero.
constexpr float kLeastRow = 0x1p-60f;

KSL_INLINE void key_codes(const uint16_t *k, int d, uint8_t *codes, float *scale) {
  const float top = most_of_words(k, d);
  const bool some = top >= kLeastRow;
  codes_of_words(k, d, some ? 127 / top : 0, codes);
  *scale = (some ? top * (1.0f / 127) : 0) + (top - top);  // NaN of infinity
}
KSL_INLINE void value_codes(const uint16_t *v, int d, uint8_t *codes, float *log, float *inverse) {
  const float top = most_of_words(v, d);
  const bool some = top >= kLeastRow;
  const float of_scale = some ? rough_log2(top * (1.0f / 127)) : 0;
  const float factor = v_lane0(v_exp2(v_set1(-of_scale)));
  codes_of_words(v, d, some ? factor : 0, codes);
  *log = of_scale + (top - top);
  *inverse = factor + (top - top);
}

// Where value `j` of a piece begins; its channels are 4 bytes apart.
KSL_INLINE uint8_t *value_bytes(const CodePiece &piece, int j) {
  return piece.v + 64 * (j / 4) * 4 + j % 4;
}

static void attn_encode(const uint16_t *k, const uint16_t *v, int d, uint8_t *piece, int j) {
  alignas(64) uint8_t codes[kMaxHeadDim];
  const CodePiece to = code_piece(piece, d);
  key_codes(k, d, codes, &to.k_scale[j]);
  for (int i = 0; i < d; i += 4) {
    uint32_t four;
    __builtin_memcpy(&four, codes + i, 4);
    four ^= 0x80808080u;  // plus 128
    __builtin_memcpy(to.k + (size_t)kPieceKeys * i + 4 * j, &four, 4);
  }
  value_codes(v, d, codes, &to.v_log[j], &to.v_inverse[j]);
  uint8_t *bytes = value_bytes(to, j);
  for (int i = 0; i < d; i++) bytes[(size_t)kPieceKeys * (i & ~63) + 4 * (i & 63)] = codes[i];
}

static void attn_hide(int d, uint8_t *piece, int j) {
  const CodePiece to = code_piece(piece, d);
  to.k_scale[j] = 0;
  to.v_log[j] = -__builtin_inff();
  to.v_inverse[j] = 0;
}

// Which byte of 64 goes where, so that interleaving inside 128-bit lanes leaves channels in order.
struct QuadOrder {
  uint8_t at[64];
  constexpr QuadOrder() : at() {
    for (int k = 0; k < 4; k++)
      for (int o = 0; o < 4; o++)
        for (int i = 0; i < 4; i++) at[16 * k + 4 * o + i] = (uint8_t)(16 * o + 4 * k + i);
  }
};
alignas(64) constexpr QuadOrder kQuadOrder;

// 64 channels of four values, in that order, side by side.
KSL_INLINE void store_quads(const __m512i *x, uint8_t *out) {
  const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
  const __m512i c = _mm512_unpackhi_epi8(x[0], x[1]), d = _mm512_unpackhi_epi8(x[2], x[3]);
  _mm512_store_si512(out, _mm512_unpacklo_epi16(a, b));
  _mm512_store_si512(out + 64, _mm512_unpackhi_epi16(a, b));
  _mm512_store_si512(out + 128, _mm512_unpacklo_epi16(c, d));
  _mm512_store_si512(out + 192, _mm512_unpackhi_epi16(c, d));
}

static void attn_encode_piece(const uint16_t *k, size_t k_step, const uint16_t *v, size_t v_step,
                              int d, uint8_t *piece) {
  alignas(64) uint8_t codes[kPieceKeys][kMaxHeadDim];
  const CodePiece to = code_piece(piece, d);
  for (int j = 0; j < kPieceKeys; j++) key_codes(k + j * k_step, d, codes[j], &to.k_scale[j]);
  for (int i = 0; i < d; i += 64) {
    Words r[kPieceKeys];
#pragma GCC unroll 16
    for (int j = 0; j < kPieceKeys; j++)
      r[j] = _mm512_xor_si512(_mm512_load_si512(codes[j] + i), _mm512_set1_epi8((char)0x80));
    turn_words(r);
    const int columns = d - i < 64 ? (d - i) / 4 : 16;
    for (int c = 0; c < columns; c++)
      _mm512_store_si512(to.k + (size_t)kPieceKeys * i + 64 * c, r[c]);
  }
  for (int j = 0; j < kPieceKeys; j++)
    value_codes(v + j * v_step, d, codes[j], &to.v_log[j], &to.v_inverse[j]);
  const __m512i order = _mm512_load_si512(kQuadOrder.at);
  for (int i = 0; i < d; i += 64)
    for (int j = 0; j < kPieceKeys; j += 4) {
      __m512i x[4];
      for (int r = 0; r < 4; r++)
        x[r] = _mm512_permutexvar_epi8(order, _mm512_load_si512(codes[j + r] + i));
      store_quads(x, to.v + (size_t)kPieceKeys * i + 64 * j);
    }
}

}  // namespace
}  // namespace ksl
