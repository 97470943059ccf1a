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

// The rows of a tile, up to a whole piece the last one again.
struct Q4Rows {
  const uint8_t *k[kTileKeys], *k_scale[kTileKeys], *v[kTileKeys];
  bool spoilt;  // values have a NaN
};

// 128 channels of 16 keys from byte `at` as columns of eight nibbles.
KSL_INLINE void turn_nibbles(const uint8_t *const *k, int at, int d, Words *r) {
  const __mmask64 some = bytes_below(d / 2 - at);
#pragma GCC unroll 16
  for (int j = 0; j < kPieceKeys; j++) r[j] = _mm512_maskz_loadu_epi8(some, k[j] + at);
  turn_words(r);
}

// Keys of a piece as columns [d / 8][16].
static void fill_nibbles(const uint8_t *const *k, int d, uint8_t *out) {
  for (int i = 0; i < d / 2; i += 64) {
    Words r[16];
    turn_nibbles(k, i, d, r);
    const int columns = (d / 2 - i) / 4;
    uint8_t *to = out + (size_t)kPieceKeys * i;
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++)
      if (c < columns) _mm512_store_si512(to + 64 * c, r[c]);
  }
}

// Per 32 channels scales and zero points of a piece from `key` on.
static void fill_scales(const uint8_t *const *scales, int d, CodeTile *t, int key) {
  const __mmask8 some = (__mmask8)((1u << d / kGroupChannels) - 1);
  __m256i rows[kPieceKeys];
#pragma GCC unroll 16
  for (int j = 0; j < kPieceKeys; j++) rows[j] = _mm256_maskz_loadu_epi32(some, scales[j]);
  Words pairs[kMaxGroups];
  turn_eights(rows, pairs);
#pragma GCC unroll 8
  for (int g = 0; g < kMaxGroups; g++) {
    _mm512_store_ps(t->k_scale[g] + key, floats_of_low(pairs[g]));
    _mm512_store_ps(t->k_zero[g] + key, floats_of_high(pairs[g]));
  }
}

struct E4m3Lookup {
  __m512i low, high;
};
KSL_INLINE E4m3Lookup e4m3_lookup() {
  return {_mm512_load_si512(kE4m3Codes.at), _mm512_load_si512(kE4m3Codes.at + 64)};
}
// 64 codes of e4m3 to int8, and their magnitudes.
KSL_INLINE __m512i codes_of_e4m3(const E4m3Lookup &table, __m512i e4m3, __m512i &magnitude) {
  magnitude = _mm512_permutex2var_epi8(table.low, e4m3, table.high);
  return _mm512_mask_sub_epi8(magnitude, _mm512_movepi8_mask(e4m3), _mm512_setzero_si512(),
                              magnitude);
}

// Four rows of e4m3 as codes, side by side as in a piece. Which of the rows have a NaN.
static int fill_e4m3(const uint8_t *const *v, int d, uint8_t *out) {
  const E4m3Lookup table = e4m3_lookup();
  const __m512i order = _mm512_load_si512(kQuadOrder.at), zero = _mm512_setzero_si512();
  __m512i any[4] = {zero, zero, zero, zero};
  for (int i = 0; i < d; i += 64, out += (size_t)kPieceKeys * 64) {
    __m512i x[4], magnitude;
    const __mmask64 some = bytes_below(d - i);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      x[j] = _mm512_permutexvar_epi8(order, _mm512_maskz_loadu_epi8(some, v[j] + i));
      x[j] = codes_of_e4m3(table, x[j], magnitude);
      any[j] = _mm512_or_si512(any[j], magnitude);
    }
    store_quads(x, out);
  }
  int spoilt = 0;
  for (int j = 0; j < 4; j++) spoilt |= (_mm512_movepi8_mask(any[j]) != 0) << j;
  return spoilt;
}

// Scales of values of a piece. Codes are 127 / 448 of the values that e4m3 gives to scales, which
// are powers of two. Rows of a smaller one are as good as zero, and their inverse would leave no
// room for a sum.
KSL_INLINE void e4m3_scales(__m512 scale, __mmask16 spoilt, CodeTile *t, int at) {
  scale = _mm512_max_ps(_mm512_set1_ps(kLeastRow), scale);
  scale = _mm512_mask_mov_ps(scale, spoilt, _mm512_set1_ps(__builtin_nanf("")));
  _mm512_store_ps(t->v_log + at,
                  _mm512_add_ps(_mm512_getexp_ps(scale), _mm512_set1_ps(0x1.d19460p+0f)));
  _mm512_store_ps(t->v_inverse + at, _mm512_div_ps(_mm512_set1_ps(127.0f / 448), scale));
}

// Calls f(constant, first) for runs of 4, 2 and 1 of at most kFewQueries rows.
enum { kFewQueries = 4 };
template <class F>
KSL_INLINE void each_few(int n, F f) {
  int r = 0;
  if (n == 4) f(Count<4>(), r), r += 4;
  if (r + 2 <= n) f(Count<2>(), r), r += 2;
  if (r < n) f(Count<1>(), r);
}

// ---- few queries: keys are turned and values looked up in registers, where they are used

// As scores_of_nibbles, of one piece.
template <int R>
static void scores_of_rows(const CodeTile *t, int key, const uint8_t *q, size_t q_step, bool fetch,
                           float *score) {
  const __m512i low = _mm512_set1_epi8(15);
  const int d = t->head_dim, to_fetch = kPieceKeys * kGroupChannels / d;  // rows per group
  __m512 total[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
  int g = 0, row = key;
  for (int i = 0; i < d / 2; i += 64) {
    Words column[16];
    turn_nibbles(t->rows->k + key, i, d, column);
#pragma GCC unroll 4
    for (int of = 0; of < 4; of++, g++, q += kGroupChannels) {
      if (of && kGroupChannels * g >= d) break;
      for (const int end = row + to_fetch; fetch && row < end; row++) fetch_row(t, row);
      Lanes even[R], odd[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) even[r] = odd[r] = (Lanes)_mm512_setzero_si512();
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) {
        const __m512i x = column[4 * of + c];
        const __m512i a = _mm512_and_si512(x, low);
        const __m512i b = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          dot_bytes(even[r], a, four_bytes(q + r * q_step + 8 * c));
          dot_bytes(odd[r], b, four_bytes(q + r * q_step + 8 * c + 4));
        }
      }
      const __m512 scale = _mm512_load_ps(t->k_scale[g] + key);
      const __m512 zero = _mm512_load_ps(t->k_zero[g] + key);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const Lanes sum = (Lanes)_mm512_add_epi32((__m512i)even[r], (__m512i)odd[r]);
        const CodeQuery *facts = query_facts(q - kGroupChannels * g + r * q_step, d);
        const __m512 dot = _mm512_fnmadd_ps(zero, _mm512_set1_ps(facts->sums[g]), floats_of(sum));
        total[r] = _mm512_fmadd_ps(dot, scale, total[r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) _mm512_store_ps(score + r * kTileKeys + key, total[r]);
}

static void scores_of_rows(const CodeTile *t, const uint8_t *q, size_t q_step, int queries,
                           float *score) {
  for (int key = 0; key < t->n; key += kPieceKeys) {
    bool ahead = t->n_ahead > 0;
    each_few(queries, [&](auto rows, int r) {
      scores_of_rows<rows.n>(t, key, q + r * q_step, q_step, ahead, score + r * kTileKeys);
      ahead = false;
    });
  }
}

// As values_of_codes, all channels. Every magnitude is joined into `any`.
template <int R>
static void values_of_rows(const CodeTile *t, const uint8_t *p, bool fetch, const CodeWeights *w,
                           int first, __m512i &any, float *acc) {
  const E4m3Lookup table = e4m3_lookup();
  const int d = t->head_dim;
  for (int at = 0; at < d; at += 64) {
    const __mmask64 some = bytes_below(d - at);
    Lanes sum[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int o = 0; o < 4; o++) sum[r][o] = (Lanes)_mm512_setzero_si512();
    for (int j = 0; j < t->n; j += 4) {
      __m512i x[4], quad[4], magnitude[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        x[i] = codes_of_e4m3(table, _mm512_maskz_loadu_epi8(some, t->rows->v[j + i] + at),
                             magnitude[i]);
      any = _mm512_ternarylogic_epi32(any, magnitude[0], magnitude[1], 0xfe);
      any = _mm512_ternarylogic_epi32(any, magnitude[2], magnitude[3], 0xfe);
      if (fetch)
        for (int i = j; i < j + 4 && i < t->n_ahead; i++)
          __builtin_prefetch(t->ahead->v + i * t->ahead->v_step + at, 0, 2);
      const __m512i ab = _mm512_unpacklo_epi8(x[0], x[1]), cd = _mm512_unpacklo_epi8(x[2], x[3]);
      const __m512i ef = _mm512_unpackhi_epi8(x[0], x[1]), gh = _mm512_unpackhi_epi8(x[2], x[3]);
      quad[0] = _mm512_unpacklo_epi16(ab, cd);
      quad[1] = _mm512_unpackhi_epi16(ab, cd);
      quad[2] = _mm512_unpacklo_epi16(ef, gh);
      quad[3] = _mm512_unpackhi_epi16(ef, gh);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const __m512i four = four_bytes(p + r * kCodeKeys + j);
#pragma GCC unroll 4
        for (int o = 0; o < 4; o++) dot_bytes(sum[r][o], four, quad[o]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      __m512 x[4];
#pragma GCC unroll 4
      for (int o = 0; o < 4; o++) x[o] = floats_of(sum[r][o]);
      sort_quads(x);  // lane k of vector o has channels 16 k + 4 o and the next three
      const __m512 old = _mm512_set1_ps(w->old[first + r]);
      const __m512 fresh = _mm512_set1_ps(w->fresh[first + r]);
      const __mmask16 has = w->start[first + r] ? (__mmask16)0 : (__mmask16)0xffff;
      float *to = acc + (size_t)r * d + at;
#pragma GCC unroll 4
      for (int o = 0; o < 4; o++) {
        if (at + 16 * o >= d) break;
        // Added to -0, every sum stays as it is.
        const __m512 before = _mm512_mask_loadu_ps(_mm512_set1_ps(-0.0f), has, to + 16 * o);
        _mm512_storeu_ps(to + 16 * o, _mm512_fmadd_ps(x[o], fresh, _mm512_mul_ps(before, old)));
      }
    }
  }
}

static void values_of_rows(const CodeTile *t, const uint8_t *p, int queries, const CodeWeights *w,
                           float *acc) {
  __m512i any = _mm512_setzero_si512();
  bool ahead = t->n_ahead > 0;
  each_few(queries, [&](auto rows, int r) {
    values_of_rows<rows.n>(t, p + r * kCodeKeys, ahead, w, r, any, acc + (size_t)r * t->head_dim);
    ahead = false;
  });
  t->rows->spoilt = _mm512_movepi8_mask(any) != 0;
}

// ---- a tile

// What a value with a NaN makes of the results of all that see it, where it was not seen before.
static void spoil(const Q4Rows *rows, int d, int group, int columns, const int *n_keys, float *l) {
  for (int c = 0; c < columns; c++)
    for (int j = 0; j < n_keys[c]; j++)
      for (int i = 0; i < d; i++)
        if ((rows->v[j][i] & 0x7f) == 0x7f)
          for (int h = 0; h < group; h++) l[c * group + h] = __builtin_nanf("");
}

// One tile of q4 rows.
static void attn_tile_q4(const KvRun *runs, int n_runs, const KvRun *next, int n_next,
                         const void *q, int group, int columns, const int *n_keys, int head_dim,
                         uint8_t *scratch, float *m, float *l, float *acc) {
  CodeTile t;
  Q4Rows rows;
  t.n = n_keys[columns - 1];
  t.head_dim = head_dim;
  t.groups = t.nibbles = true;
  t.scale_step = 1;
  fetch_from(next, n_next, &t);
  t.rows = group * columns <= kFewQueries ? &rows : nullptr;
  rows.spoilt = false;
  alignas(64) float v_scale[kTileKeys];
  int n = 0;
  for (int r = 0; r < n_runs; r++)
    for (int i = 0; i < runs[r].n && n < t.n; i++, n++) {
      rows.k[n] = runs[r].k + i * runs[r].k_step;
      rows.k_scale[n] = runs[r].k_scale + i * runs[r].k_scale_step;
      rows.v[n] = runs[r].v + i * runs[r].v_step;
      __builtin_memcpy(&v_scale[n], runs[r].v_scale + i * runs[r].v_scale_step, 4);
    }
  const int pieces = (n + kPieceKeys - 1) / kPieceKeys;
  for (; n < pieces * kPieceKeys; n++) {
    rows.k[n] = rows.k[n - 1];
    rows.k_scale[n] = rows.k_scale[n - 1];
    rows.v[n] = rows.v[n - 1];
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
    fill_scales(rows.k_scale + at, head_dim, &t, at);
    int spoilt = 0;
    if (!t.rows) {
      fill_nibbles(rows.k + at, head_dim, scratch + from * key_bytes);
      for (int j = 0; j < kPieceKeys; j += 4)
        spoilt |= fill_e4m3(rows.v + at + j, head_dim, values + from * value_bytes + 64 * j) << j;
    }
    e4m3_scales(_mm512_load_ps(v_scale + at), (__mmask16)spoilt, &t, at);
  }
  attn_columns_codes(&t, (const uint8_t *)q, 4 * (size_t)head_dim, group, columns, n_keys, m, l,
                     acc);
  if (rows.spoilt) spoil(&rows, head_dim, group, columns, n_keys, l);
}

}  // namespace
}  // namespace ksl
