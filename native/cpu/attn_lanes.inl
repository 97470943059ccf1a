// What attention on codes does with vectors whatever they hold: turning rows into columns, putting
// sums into order, runs of rows.
namespace ksl {
namespace {

typedef __m512i Words;

KSL_INLINE __mmask64 bytes_below(int n) {
  return n >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << n) - 1;
}

template <int N>
struct Count {
  static constexpr int n = N;
};

// Calls f(constant, first) for runs of 6, 4, 2 and 1 of `n` rows.
template <class F>
KSL_INLINE void each_rows(int n, F f) {
  int r = 0;
  for (; r + 6 <= n; r += 6) f(Count<6>(), r);
  if (r + 4 <= n) f(Count<4>(), r), r += 4;
  if (r + 2 <= n) f(Count<2>(), r), r += 2;
  if (r < n) f(Count<1>(), r);
}

// 16 rows of 16 words of 32 bits become the columns.
KSL_INLINE void turn_words(Words *r) {
  Words a[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const Words ab = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    const Words cd = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]);
    const Words ef = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    const Words gh = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
    a[i] = _mm512_unpacklo_epi64(ab, cd);
    a[i + 1] = _mm512_unpackhi_epi64(ab, cd);
    a[i + 2] = _mm512_unpacklo_epi64(ef, gh);
    a[i + 3] = _mm512_unpackhi_epi64(ef, gh);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Words ab = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x44);
    const Words cd = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x44);
    const Words ef = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xee);
    const Words gh = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xee);
    r[i] = _mm512_shuffle_i32x4(ab, cd, 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
    r[8 + i] = _mm512_shuffle_i32x4(ef, gh, 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(ef, gh, 0xdd);
  }
}

// 16 rows of at most eight words: j and j + 4 of each eight in one vector. out[i]: word i of all.
KSL_INLINE void turn_eights(const __m256i *rows, Words *out) {
  Words r[8], a[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) {
    const int row = j < 4 ? j : j + 4;
    r[j] = _mm512_inserti64x4(_mm512_castsi256_si512(rows[row]), rows[row + 4], 1);
  }
#pragma GCC unroll 2
  for (int j = 0; j < 8; j += 4) {
    const Words ab = _mm512_unpacklo_epi32(r[j], r[j + 1]);
    const Words cd = _mm512_unpacklo_epi32(r[j + 2], r[j + 3]);
    const Words ef = _mm512_unpackhi_epi32(r[j], r[j + 1]);
    const Words gh = _mm512_unpackhi_epi32(r[j + 2], r[j + 3]);
    a[j] = _mm512_unpacklo_epi64(ab, cd);
    a[j + 1] = _mm512_unpackhi_epi64(ab, cd);
    a[j + 2] = _mm512_unpacklo_epi64(ef, gh);
    a[j + 3] = _mm512_unpackhi_epi64(ef, gh);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    out[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
  }
}

// The low and the high halves of words as floats.
KSL_INLINE __m512 floats_of_low(Words pairs) {
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
}
KSL_INLINE __m512 floats_of_high(Words pairs) {
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
}

// Sums of 64 channels, where lane k of vector o has channels 16 k + 4 o and the next three, into
// their order: interleaving inside lanes is cheaper than across them.
KSL_INLINE void sort_quads(__m512 *sum) {
  const __m512 a = _mm512_shuffle_f32x4(sum[0], sum[1], 0x44);
  const __m512 b = _mm512_shuffle_f32x4(sum[2], sum[3], 0x44);
  const __m512 c = _mm512_shuffle_f32x4(sum[0], sum[1], 0xee);
  const __m512 d = _mm512_shuffle_f32x4(sum[2], sum[3], 0xee);
  sum[0] = _mm512_shuffle_f32x4(a, b, 0x88);
  sum[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
  sum[2] = _mm512_shuffle_f32x4(c, d, 0x88);
  sum[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}

}  // namespace
}  // namespace ksl
