// Attention on the codes of q4 rows: keys keep their nibbles, scales and zero points, values of
// e4m3 are rounded to int8 of their row. A tile is brought into the shape of pieces as it is read.
namespace ksl {
namespace {

// 127 / 448 of the magnitude of every e4m3 code; 128 of NaN.
struct E4m3Codes {
  uint8_t at[128];
  constexpr E4m3Codes() : at() {
    for (int m = 0; m < 128; m++) {
      double x = m < 8 ? m : 8 + m % 8;
      for (int e = m < 8 ? 1 : m / 8; e > 1; e--) x *= 2;
      x *= 127.0 / 448 / 512;
      at[m] = m == 127 ? 128 : (uint8_t)(x + 0.5);
    }
  }
};
alignas(64) constexpr E4m3Codes kE4m3Codes;

// Keys of a piece as columns [d / 8][16] of eight nibbles, and per 32 channels scales and zero
// points.
static void fill_nibbles(const uint8_t *const *k, const uint8_t *const *scales, int d, uint8_t *out,
                         CodeTile *t, int key) {
  for (int i = 0; i < d / 2; i += 64) {
    Words r[16];
    const __mmask64 some = bytes_below(d / 2 - i);
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) r[j] = _mm512_maskz_loadu_epi8(some, k[j] + i);
    turn_words(r);
    const int columns = (d / 2 - i) / 4;
    uint8_t *to = out + (size_t)kPieceKeys * i;
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++)
      if (c < columns) _mm512_store_si512(to + 64 * c, r[c]);
  }
  // Rows of at most eight pairs of halves: j and j + 4 in one vector.
  const __mmask8 some = (__mmask8)((1u << d / kGroupChannels) - 1);
  Words r[8], a[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) {
    const int row = j < 4 ? j : j + 4;
    r[j] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi32(some, scales[row])),
                              _mm256_maskz_loadu_epi32(some, scales[row + 4]), 1);
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
#pragma GCC unroll 8
  for (int g = 0; g < kMaxGroups; g++) {
    const Words pairs = g < 4 ? _mm512_shuffle_i32x4(a[g], a[4 + g], 0x88)
                              : _mm512_shuffle_i32x4(a[g - 4], a[g], 0xdd);
    _mm512_store_ps(t->k_scale[g] + key, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)));
    _mm512_store_ps(t->k_zero[g] + key,
                    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16))));
  }
}

// Four rows of e4m3 as codes, side by side as in a piece. Which of the rows have a NaN.
static int fill_e4m3(const uint8_t *const *v, int d, uint8_t *out) {
  const __m512i low = _mm512_load_si512(kE4m3Codes.at);
  const __m512i high = _mm512_load_si512(kE4m3Codes.at + 64);
  const __m512i order = _mm512_load_si512(kQuadOrder.at), zero = _mm512_setzero_si512();
  __m512i any[4] = {zero, zero, zero, zero};
  for (int i = 0; i < d; i += 64, out += (size_t)kPieceKeys * 64) {
    __m512i x[4];
    const __mmask64 some = bytes_below(d - i);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512i codes = _mm512_permutexvar_epi8(order, _mm512_maskz_loadu_epi8(some, v[j] + i));
      const __m512i magnitude = _mm512_permutex2var_epi8(low, codes, high);
      any[j] = _mm512_or_si512(any[j], magnitude);
      x[j] = _mm512_mask_sub_epi8(magnitude, _mm512_movepi8_mask(codes), zero, magnitude);
    }
    store_quads(x, out);
  }
  int spoilt = 0;
  for (int j = 0; j < 4; j++) spoilt |= (_mm512_movepi8_mask(any[j]) != 0) << j;
  return spoilt;
}

// One tile of q4 rows.
static void attn_tile_q4(const KvRun *runs, int n_runs, const KvRun *next, int n_next,
                         const void *q, int group, int columns, const int *n_keys, int head_dim,
                         uint8_t *scratch, float *m, float *l, float *acc) {
  CodeTile t;
  t.n = n_keys[columns - 1];
  t.head_dim = head_dim;
  t.nibbles = true;
  t.ahead = next;  // where blocks are smaller than tiles, a part of it
  t.n_ahead = n_next ? next->n : 0;
  const uint8_t *k[kTileKeys], *k_scale[kTileKeys], *v[kTileKeys];
  alignas(64) float v_scale[kTileKeys];
  int n = 0;
  for (int r = 0; r < n_runs; r++)
    for (int i = 0; i < runs[r].n && n < t.n; i++, n++) {
      k[n] = runs[r].k + i * runs[r].k_step;
      k_scale[n] = runs[r].k_scale + i * runs[r].k_scale_step;
      v[n] = runs[r].v + i * runs[r].v_step;
      __builtin_memcpy(&v_scale[n], runs[r].v_scale + i * runs[r].v_scale_step, 4);
    }
  const int pieces = (n + kPieceKeys - 1) / kPieceKeys;
  for (; n < pieces * kPieceKeys; n++) {
    k[n] = k[n - 1];
    k_scale[n] = k_scale[n - 1];
    v[n] = v[n - 1];
    v_scale[n] = v_scale[n - 1];
  }
  const size_t key_bytes = (size_t)kPieceKeys * head_dim / 2;
  const size_t value_bytes = code_value_bytes(head_dim);
  uint8_t *values = scratch + kTilePieces * key_bytes;
  for (int i = 0; i < kTilePieces; i++) {
    const int from = i < pieces ? i : pieces - 1;
    t.k[i] = scratch + from * key_bytes;
    t.v[i] = (const int8_t *)(values + from * value_bytes);
    t.next[i] = nullptr;
    if (i >= pieces) continue;
    const int at = kPieceKeys * i;
    fill_nibbles(k + at, k_scale + at, head_dim, scratch + from * key_bytes, &t, at);
    int spoilt = 0;
    for (int j = 0; j < kPieceKeys; j += 4)
      spoilt |= fill_e4m3(v + at + j, head_dim, values + from * value_bytes + 64 * j) << j;
    // Codes are 127 / 448 of the values that e4m3 gives to scales, which are powers of two.
    // Rows of a smaller one are as good as zero, and their inverse would leave no room for a sum.
    const __m512 least = _mm512_max_ps(_mm512_set1_ps(kLeastRow), _mm512_load_ps(v_scale + at));
    const __m512 scale =
        _mm512_mask_mov_ps(least, (__mmask16)spoilt, _mm512_set1_ps(__builtin_nanf("")));
    _mm512_store_ps(t.v_log + at,
                    _mm512_add_ps(_mm512_getexp_ps(scale), _mm512_set1_ps(0x1.d19460p+0f)));
    _mm512_store_ps(t.v_inverse + at, _mm512_div_ps(_mm512_set1_ps(127.0f / 448), scale));
  }
  attn_columns_codes(&t, (const uint8_t *)q, 4 * (size_t)head_dim, group, columns, n_keys, m, l,
                     acc);
}

// ---- any format

static void attn_query_narrow(int format, const float *q, int head_dim, float scale, void *out) {
  if (format == KSL_KV_Q4)
    attn_query_codes(q, head_dim, scale, true, out);
  else
    attn_query_bf16(format, q, head_dim, scale, out);
}

static void attn_tile_narrow(const KvRun *runs, int n_runs, const KvRun *next, int n_next,
                             const void *q, int group, int columns, const int *n_keys, int head_dim,
                             uint8_t *scratch, float *m, float *l, float *acc) {
  if (n_keys[columns - 1] <= 0) return;
  const auto tile = runs[0].format == KSL_KV_Q4 ? attn_tile_q4 : attn_tile_bf16;
  tile(runs, n_runs, next, n_next, q, group, columns, n_keys, head_dim, scratch, m, l, acc);
}

}  // namespace
}  // namespace ksl
