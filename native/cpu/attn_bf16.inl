// Attention with bf16 products (AVX512-BF16): queries and probabilities are rounded to bf16, values
// of the compact formats too; sums stay float32. A product adds two channels to the score of a key,
// and two keys to each channel of the values.
//
// A score has 16 partial sums, of the channels that lie in the same lane of a row's vectors, and
// then their sum in the order of v_hsum. Few queries read keys as rows; many read them turned into
// columns, where the partial sums are vectors of keys: the same additions.
//
// Heads whose size is no multiple of 32, and float32 rows, go the way of attn.inl.
namespace ksl {
namespace {

typedef __m512i Words;  // 32 of 16 bits

KSL_INLINE __m512bh as_bf16(Words x) {
  return (__m512bh)x;
}
// 32 floats to bf16, round to nearest even.
KSL_INLINE Words words_of(__m512 low, __m512 high) {
  return (Words)_mm512_cvtne2ps_pbh(high, low);
}

// ---- rows of the compact formats as bf16

// bf16 of every e4m3 code without sign, low and high bytes apart.
struct E4m3Bytes {
  uint8_t low[128], high[128];
  constexpr E4m3Bytes() : low(), high() {
    for (int m = 0; m < 128; m++) {
      uint32_t bits = (uint32_t)((m << 4) + (120 << 7));
      if (m == 127) bits = 0x7fc0;
      if (m == 0) bits = 0;
      if (m > 0 && m < 8) {  // m 2^-9, normalised
        int top = m >= 4 ? 2 : m >= 2 ? 1 : 0;
        bits = (uint32_t)((127 - 9 + top) << 7 | (m << (7 - top) & 0x7f));
      }
      low[m] = (uint8_t)bits;
      high[m] = (uint8_t)(bits >> 8);
    }
  }
};
alignas(64) constexpr E4m3Bytes kE4m3Bytes;

struct E4m3Table {
  __m512i low[2], high[2];
};
KSL_INLINE E4m3Table e4m3_table() {
  return {{_mm512_load_si512(kE4m3Bytes.low), _mm512_load_si512(kE4m3Bytes.low + 64)},
          {_mm512_load_si512(kE4m3Bytes.high), _mm512_load_si512(kE4m3Bytes.high + 64)}};
}
// 64 codes to bf16: bytes of even (low) and odd (high) address apart.
KSL_INLINE void e4m3_bytes(const E4m3Table &t, __m512i codes, __m512i &low, __m512i &high) {
  low = _mm512_permutex2var_epi8(t.low[0], codes, t.low[1]);
  const __m512i magnitude = _mm512_permutex2var_epi8(t.high[0], codes, t.high[1]);
  // magnitude | (codes & 0x80)
  high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8((char)0x80), 0xf8);
}

// Which byte of 64 goes where, so that interleaving inside 128-bit lanes leaves channels in order.
struct LaneOrder {
  uint8_t at[64];
  constexpr LaneOrder() : at() {
    for (int k = 0; k < 4; k++)
      for (int o = 0; o < 2; o++)
        for (int i = 0; i < 8; i++) at[16 * k + 8 * o + i] = (uint8_t)(32 * o + 8 * k + i);
  }
};
alignas(64) constexpr LaneOrder kLaneOrder;

KSL_INLINE __mmask64 bytes_below(int n) {
  return n >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << n) - 1;
}

// d: a multiple of 32.
static void words_of_e4m3(const uint8_t *codes, int d, uint16_t *out) {
  const E4m3Table table = e4m3_table();
  const __m512i order = _mm512_load_si512(kLaneOrder.at);
  for (int i = 0; i < d; i += 64) {
    const __m512i x = _mm512_maskz_loadu_epi8(bytes_below(d - i), codes + i);
    __m512i low, high;
    e4m3_bytes(table, _mm512_permutexvar_epi8(order, x), low, high);
    _mm512_storeu_si512(out + i, _mm512_unpacklo_epi8(low, high));
    if (i + 32 < d) _mm512_storeu_si512(out + i + 32, _mm512_unpackhi_epi8(low, high));
  }
}

static void words_of_int8(const uint8_t *codes, const uint8_t *scales, int d, uint16_t *out) {
  for (int i = 0; i < d; i += 32) {
    const __m512 scale = _mm512_set1_ps(kv_half(scales + i / 64 * 2));
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i + 16)));
    _mm512_storeu_si512(out + i, words_of(_mm512_mul_ps(_mm512_cvtepi32_ps(low), scale),
                                          _mm512_mul_ps(_mm512_cvtepi32_ps(high), scale)));
  }
}

// The halves beside a row of nibbles, at most 16, as floats.
KSL_INLINE void floats_of_halves(const uint8_t *scales, int n, float *out) {
  const __mmask16 live = (__mmask16)((1u << n) - 1);
  _mm512_store_ps(out, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(live, scales)));
}

// The 16 values of a group: (code - 8) * scale.
KSL_INLINE __m512 nibble_values(float scale) {
  const __m512 steps = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_mul_ps(steps, _mm512_set1_ps(scale));
}
// 32 codes as indices of words.
KSL_INLINE Words nibbles(const uint8_t *codes) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
  // (x | x << 12) & 15 in each word
  return _mm512_ternarylogic_epi32(x, _mm512_slli_epi32(x, 12), _mm512_set1_epi32(0x000f000f),
                                   0xa8);
}

// scales: one per 32 channels. Two groups go by one table of both.
KSL_INLINE void words_of_nibbles(const uint8_t *codes, const float *scales, int d, uint16_t *out) {
  int g = 0;
  for (; 32 * g + 64 <= d; g += 2) {
    const Words values = words_of(nibble_values(scales[g]), nibble_values(scales[g + 1]));
    const Words second = _mm512_or_si512(nibbles(codes + 16 * g + 16), _mm512_set1_epi16(16));
    _mm512_storeu_si512(out + 32 * g, _mm512_permutexvar_epi16(nibbles(codes + 16 * g), values));
    _mm512_storeu_si512(out + 32 * g + 32, _mm512_permutexvar_epi16(second, values));
  }
  if (32 * g < d) {
    const __m512 last = nibble_values(scales[g]);
    _mm512_storeu_si512(out + 32 * g,
                        _mm512_permutexvar_epi16(nibbles(codes + 16 * g), words_of(last, last)));
  }
}

// Any compact row but one of q4.
static void kv_words(int format, const uint8_t *codes, const uint8_t *scales, int d,
                     uint16_t *out) {
  if (format == KSL_KV_FP8) {
    words_of_e4m3(codes, d, out);
  } else if (format == KSL_KV_INT8_G64) {
    words_of_int8(codes, scales, d, out);
  } else {
    alignas(64) float halves[16];
    floats_of_halves(scales, d / 32, halves);
    words_of_nibbles(codes, halves, d, out);
  }
}

// ---- a tile

enum { kTogether = 24 };  // queries whose scores exist at one time

template <int N>
struct Count {
  static constexpr int n = N;
};

struct Tile {
  int n, head_dim;
  const uint16_t *keys[kTileKeys];       // rows of bf16; behind the last, that again
  const uint8_t *values[kTileKeys];      // as stored; the same
  const uint32_t *columns;               // see fill_columns; null: not there
  const uint32_t *pairs;                 // [kTileKeys / 2][head_dim]: two keys' values in each
  const float *key_scale, *value_scale;  // [kTileKeys], null: 1
  // What is fetched while this tile is worked on: its values, and the keys and scales of
  // the next tile.
  int value_bytes, next_bytes, n_next;
  const KvRun *next;
};

// Into the second cache: its queue of misses is the longer one.
KSL_INLINE void fetch(const uint8_t *row, int from, int end, int step) {
  for (int at = from; at < end; at += step) __builtin_prefetch(row + at, 0, 2);
}

// The sums of 16 vectors: in quad h of lanes those of s[h], s[4 + h], s[8 + h], s[12 + h]. The
// additions of v_hsum in its order.
KSL_INLINE __m512 sum_quads(const __m512 *s) {
  __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0x44),
                         _mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0xee));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
  for (int i = 0; i < 2; i++)
    c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
}

// Scores [R][kTileKeys] of R queries and the first n_keys keys; behind them anything.
template <int R>
static void scores_bf16(const Tile *t, const uint16_t *q, size_t q_step, int n_keys, float *score) {
  enum { kKeys = 16 / R };
  for (int j0 = 0; j0 < n_keys; j0 += kKeys) {
    for (int j = j0; j < j0 + kKeys; j++) fetch(t->values[j], 0, t->value_bytes, 64);
    __m512 sum[16];  // in sum[4 j + h]: of head h, or part h of the keys
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
    for (int i = 0; i < t->head_dim; i += 32) {
      Words a[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) a[r] = _mm512_loadu_si512(q + r * q_step + i);
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; j++) {
        const Words k = _mm512_loadu_si512(t->keys[j0 + j] + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          __m512 &to = sum[4 * (j % 4) + 4 / R * r + j / 4];
          to = _mm512_dpbf16_ps(to, as_bf16(a[r]), as_bf16(k));
        }
      }
    }
    const __m512 quads = sum_quads(sum);
    if (R == 4) {
      _mm_store_ps(score + j0, _mm512_castps512_ps128(quads));
      _mm_store_ps(score + kTileKeys + j0, _mm512_extractf32x4_ps(quads, 1));
      _mm_store_ps(score + 2 * kTileKeys + j0, _mm512_extractf32x4_ps(quads, 2));
      _mm_store_ps(score + 3 * kTileKeys + j0, _mm512_extractf32x4_ps(quads, 3));
    } else if (R == 2) {
      _mm256_store_ps(score + j0, _mm512_castps512_ps256(quads));
      _mm256_store_ps(score + kTileKeys + j0, high_half(quads));
    } else {
      _mm512_store_ps(score + j0, quads);
    }
  }
}

// ---- the same for many queries of whole tiles: keys turned into columns, so that a vector holds
// the scores of 16 of them and nothing has to be added across lanes

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

// out [16 lanes][head_dim / 32][kTileKeys]: the two channels that a lane of a row has in each of
// its vectors.
static void fill_columns(const Tile *t, uint32_t *out) {
  const size_t lane = (size_t)t->head_dim / 32 * kTileKeys;
  for (int j0 = 0; j0 < kTileKeys; j0 += 16)
    for (int i = 0; i < t->head_dim; i += 32) {
      Words r[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_si512(t->keys[j0 + j] + i);
      turn_words(r);
      uint32_t *to = out + (size_t)i / 32 * kTileKeys + j0;
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) _mm512_store_si512(to + j * lane, r[j]);
    }
}

// What the lane of 64 rows sums, for two queries. kSteps: head_dim / 32, 0 for any.
template <int kSteps>
KSL_INLINE void sum_lane(const uint32_t *k, const uint16_t *a, const uint16_t *b, int head_dim,
                         __m512 *sum) {
#pragma GCC unroll 8
  for (int v = 0; v < 8; v++) sum[v] = _mm512_setzero_ps();
  const int end = kSteps ? 32 * kSteps : head_dim;
#pragma GCC unroll 8
  for (int i = 0; i < end; i += 32, k += kTileKeys) {
    int32_t x, y;
    __builtin_memcpy(&x, a + i, 4);
    __builtin_memcpy(&y, b + i, 4);
    const Words p = _mm512_set1_epi32(x), q = _mm512_set1_epi32(y);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const Words keys = _mm512_load_si512(k + 16 * v);
      sum[v] = _mm512_dpbf16_ps(sum[v], as_bf16(p), as_bf16(keys));
      sum[4 + v] = _mm512_dpbf16_ps(sum[4 + v], as_bf16(q), as_bf16(keys));
    }
  }
}

// Scores of the queries at a and b; the additions of scores_bf16 in its order.
template <int kSteps>
static void scores_of_columns(const Tile *t, const uint16_t *a, const uint16_t *b, float *score_a,
                              float *score_b) {
  __m512 quarter[4][8];
  const size_t lane = (size_t)t->head_dim / 32 * kTileKeys;
  for (int i = 0; i < 4; i++) {
    const uint32_t *k = t->columns + i * lane;
    __m512 x[8], y[8], z[8];
    sum_lane<kSteps>(k, a + 2 * i, b + 2 * i, t->head_dim, x);
    sum_lane<kSteps>(k + 8 * lane, a + 2 * i + 16, b + 2 * i + 16, t->head_dim, y);
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) x[v] = _mm512_add_ps(x[v], y[v]);
    sum_lane<kSteps>(k + 4 * lane, a + 2 * i + 8, b + 2 * i + 8, t->head_dim, y);
    sum_lane<kSteps>(k + 12 * lane, a + 2 * i + 24, b + 2 * i + 24, t->head_dim, z);
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) quarter[i][v] = _mm512_add_ps(x[v], _mm512_add_ps(y[v], z[v]));
  }
#pragma GCC unroll 8
  for (int v = 0; v < 8; v++)
    _mm512_store_ps((v < 4 ? score_a : score_b) + 16 * (v % 4),
                    _mm512_add_ps(_mm512_add_ps(quarter[0][v], quarter[1][v]),
                                  _mm512_add_ps(quarter[2][v], quarter[3][v])));
}

// Probabilities of a query as pairs of keys, times the scales of values; the maximum of its scores
// and the sum of its probabilities.
KSL_INLINE void soften_bf16(const Tile *t, const float *s, int n_keys, uint32_t *p, float *m,
                            float *l) {
  V x[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) {
    const int live = n_keys - 16 * v;
    const __mmask16 mask = live >= 16 ? (__mmask16)0xffff : live > 0 ? lanes_below(live) : 0;
    x[v].v = _mm512_mask_loadu_ps(_mm512_set1_ps(-__builtin_inff()), mask, s + 16 * v);
    if (t->key_scale)
      x[v].v = _mm512_mask_mul_ps(x[v].v, mask, x[v].v, _mm512_load_ps(t->key_scale + 16 * v));
  }
  *m = v_hmax(v_max(v_max(x[0], x[1]), v_max(x[2], x[3])));
  const V shift = v_set1(*m);
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) x[v] = v_exp2(v_sub(x[v], shift));
  *l = v_hsum(v_add(v_add(x[0], x[1]), v_add(x[2], x[3])));
  if (t->value_scale)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++)
      x[v].v = _mm512_mul_ps(x[v].v, _mm512_load_ps(t->value_scale + 16 * v));
  _mm512_store_si512(p, words_of(x[0].v, x[1].v));
  _mm512_store_si512(p + 16, words_of(x[2].v, x[3].v));
}

// ---- values: 64 channels of the pair of keys 2 j and 2 j + 1, 16 in each vector. Channels behind
// the head are anything.

// The pairs of two rows of 32 channels.
KSL_INLINE void pair_words(Words a, Words b, Words &low, Words &high) {
  const Words first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  low = _mm512_permutex2var_epi16(a, first, b);
  high = _mm512_permutex2var_epi16(a, _mm512_add_epi16(first, _mm512_set1_epi16(16)), b);
}

// A source has `load`, and `sort`, which brings what was summed of its 64 channels into their
// order: interleaving inside lanes is cheaper than across them.
struct FromPairs {
  const uint32_t *at;
  int head_dim;
  KSL_INLINE FromPairs of(const Tile *t, int) { return {t->pairs, t->head_dim}; }
  inline __attribute__((always_inline)) void load(int j, int at_channel, Words *out) const {
    const uint32_t *from = at + (size_t)j * head_dim + at_channel;
    for (int o = 0; o < 4; o++) out[o] = _mm512_loadu_si512(from + 16 * o);
  }
  KSL_INLINE void sort(__m512 *) {}
};

struct FromBf16 {
  const uint8_t *const *rows;
  int n;
  KSL_INLINE FromBf16 of(const Tile *t, int n_keys) { return {t->values, n_keys}; }
  inline __attribute__((always_inline)) void load(int j, int at, Words *out) const {
    const uint16_t *a = (const uint16_t *)rows[2 * j] + at;
    const uint16_t *b = (const uint16_t *)rows[2 * j + 1 < n ? 2 * j + 1 : n - 1] + at;
    for (int o = 0; o < 2; o++) {
      const Words x = _mm512_loadu_si512(a + 32 * o), y = _mm512_loadu_si512(b + 32 * o);
      out[2 * o] = _mm512_unpacklo_epi16(x, y);
      out[2 * o + 1] = _mm512_unpackhi_epi16(x, y);
    }
  }
  // Lane k of 32 channels has 8 k to 8 k + 3 in one vector and the next four in the other.
  KSL_INLINE void sort(__m512 *sum) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int o = 0; o < 4; o += 2) {
      const __m512 low = sum[o], high = sum[o + 1];
      sum[o] = _mm512_permutex2var_ps(low, first, high);
      sum[o + 1] = _mm512_permutex2var_ps(low, second, high);
    }
  }
};

struct FromE4m3 {
  const uint8_t *const *rows;
  int n;
  E4m3Table table;
  KSL_INLINE FromE4m3 of(const Tile *t, int n_keys) { return {t->values, n_keys, e4m3_table()}; }
  inline __attribute__((always_inline)) void load(int j, int at, Words *out) const {
    const __m512i a = _mm512_loadu_si512(rows[2 * j] + at);
    const __m512i b = _mm512_loadu_si512(rows[2 * j + 1 < n ? 2 * j + 1 : n - 1] + at);
    __m512i low, high;
    e4m3_bytes(table, _mm512_unpacklo_epi8(a, b), low, high);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
    e4m3_bytes(table, _mm512_unpackhi_epi8(a, b), low, high);
    out[2] = _mm512_unpacklo_epi8(low, high);
    out[3] = _mm512_unpackhi_epi8(low, high);
  }
  // Lane k has channels 16 k + 4 o to 16 k + 4 o + 3 in vector o.
  KSL_INLINE void sort(__m512 *sum) {
    const __m512 a = _mm512_shuffle_f32x4(sum[0], sum[1], 0x44);
    const __m512 b = _mm512_shuffle_f32x4(sum[2], sum[3], 0x44);
    const __m512 c = _mm512_shuffle_f32x4(sum[0], sum[1], 0xee);
    const __m512 d = _mm512_shuffle_f32x4(sum[2], sum[3], 0xee);
    sum[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    sum[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    sum[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    sum[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
};

// One pass over the channels of `at` fetches a part of every row.
KSL_INLINE void fetch_next(const Tile *t, int pair, int at) {
  const KvRun *next = t->next;
  for (int i = 2 * pair; i < 2 * pair + 2 && i < t->n_next; i++) {
    fetch(next->k + i * next->k_step, at, t->next_bytes, t->head_dim);
    if (at == 0 && next->k_scale_step)
      __builtin_prefetch(next->k_scale + i * next->k_scale_step, 0, 2);
    if (at == 0 && next->v_scale_step)
      __builtin_prefetch(next->v_scale + i * next->v_scale_step, 0, 2);
  }
}

// What a tile adds to running results: acc := old acc + fresh sum; a start has no acc.
struct Weights {
  alignas(64) float old[kTogether], fresh[kTogether];
  bool start[kTogether];
};

// Adds 16 N channels from `at` to acc of R queries from `first`; p: probabilities
// [.][kTileKeys / 2 pairs].
template <class Source, int R, int N>
static void values_bf16(const Tile *t, const Source &source, const uint32_t *p, int pairs, int at,
                        const Weights *w, int first, float *acc) {
  const int d = t->head_dim;
  __m512 sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int o = 0; o < N; o++) sum[r][o] = _mm512_setzero_ps();
  p += first * (kTileKeys / 2);
  for (int j = 0; j < pairs; j++) {
    if (t->n_next) fetch_next(t, j, at);
    Words v[4];
    source.load(j, at, v);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Words two = _mm512_set1_epi32((int)p[r * (kTileKeys / 2) + j]);
#pragma GCC unroll 4
      for (int o = 0; o < N; o++)
        sum[r][o] = _mm512_dpbf16_ps(sum[r][o], as_bf16(two), as_bf16(v[o]));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const __m512 old = _mm512_set1_ps(w->old[first + r]),
                 fresh = _mm512_set1_ps(w->fresh[first + r]);
    // Added to -0, every sum stays as it is.
    if (N == 4) Source::sort(sum[r]);
    const __mmask16 has = w->start[first + r] ? (__mmask16)0 : (__mmask16)0xffff;
#pragma GCC unroll 4
    for (int o = 0; o < N; o++) {
      float *to = acc + (size_t)(first + r) * d + at + 16 * o;
      const __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-0.0f), has, to);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(sum[r][o], fresh, _mm512_mul_ps(x, old)));
    }
  }
}

// Calls f(constant, first) for runs of 6, 4, 2 and 1 of `n` rows.
template <class F>
KSL_INLINE void each_rows(int n, F f) {
  int r = 0;
  for (; r + 6 <= n; r += 6) f(Count<6>(), r);
  if (r + 4 <= n) f(Count<4>(), r), r += 4;
  if (r + 2 <= n) f(Count<2>(), r), r += 2;
  if (r < n) f(Count<1>(), r);
}

// At most kTogether queries that see the same keys.
template <class Source>
static void attn_block_bf16(Tile *t, const uint16_t *q, size_t q_step, int queries, int n_keys,
                            float *m, float *l, float *acc) {
  alignas(64) float score[kTogether * kTileKeys];
  alignas(64) uint32_t p[kTogether * kTileKeys / 2];
  alignas(64) float tile_m[kTogether], tile_l[kTogether];
  Weights w;
  int r = 0;
  if (t->columns && n_keys == kTileKeys) {
    const auto two = t->head_dim == 256   ? scores_of_columns<8>
                     : t->head_dim == 128 ? scores_of_columns<4>
                                          : scores_of_columns<0>;
    for (; r + 2 <= queries; r += 2)
      two(t, q + r * q_step, q + (r + 1) * q_step, score + r * kTileKeys,
          score + (r + 1) * kTileKeys);
  }
  for (; r < queries;) {
    const int rows = queries - r >= 4 ? 4 : queries - r >= 2 ? 2 : 1;
    const auto some = rows == 4 ? scores_bf16<4> : rows == 2 ? scores_bf16<2> : scores_bf16<1>;
    some(t, q + r * q_step, q_step, n_keys, score + r * kTileKeys);
    r += rows;
  }
  t->value_bytes = 0;  // once is enough
  for (int h = 0; h < queries; h++)
    soften_bf16(t, score + h * kTileKeys, n_keys, p + h * (kTileKeys / 2), &tile_m[h], &tile_l[h]);
  for (int h = 0; h < queries; h++) w.start[h] = m[h] == -__builtin_inff() && l[h] == 0.0f;
  each_vector(queries, [&](int h, auto load, auto store) {  // as attn_combine
    const V before = load(m + h), now = load(tile_m + h), most = v_max(now, before);
    const V old = v_exp2(v_sub(before, most)), fresh = v_exp2(v_sub(now, most));
    store(w.old + h, old);
    store(w.fresh + h, fresh);
    store(m + h, most);
    store(l + h, v_fma(load(tile_l + h), fresh, v_mul(load(l + h), old)));
  });
  const Source source = Source::of(t, n_keys);
  const int pairs = (n_keys + 1) / 2;
  each_rows(queries, [&](auto rows, int r) {
    int at = 0;
    for (; at + 64 <= t->head_dim; at += 64)
      values_bf16<Source, rows.n, 4>(t, source, p, pairs, at, &w, r, acc);
    if (at < t->head_dim) values_bf16<Source, rows.n, 2>(t, source, p, pairs, at, &w, r, acc);
    t->n_next = 0;
  });
}

template <class Source>
static void attn_spans_bf16(Tile *t, const uint16_t *q, size_t q_step, int group, int columns,
                            const int *n_keys, float *m, float *l, float *acc) {
  each_span(columns, n_keys, [&](int c, int end, int keys) {
    for (int h = c * group; h < end * group; h += kTogether) {
      const int n = end * group - h < kTogether ? end * group - h : (int)kTogether;
      attn_block_bf16<Source>(t, q + h * q_step, q_step, n, keys, m + h, l + h,
                              acc + (size_t)h * t->head_dim);
    }
  });
}

// Pairs of values of all keys, for many queries.
static void fill_pairs(const Tile *t, const KvRun *runs, uint32_t *out) {
  const int d = t->head_dim;
  alignas(64) uint16_t words[2][kMaxHeadDim];
  int n = 0;
  for (const KvRun *run = runs; n < t->n; run++) {
    for (int i = 0; i < run->n && n < t->n; i++, n++) {
      uint16_t *row = words[n & 1];
      if (run->format == KSL_KV_BF16)
        __builtin_memcpy(row, t->values[n], 2 * (size_t)d);
      else
        kv_words(run->format, t->values[n], run->v_scale + i * run->v_scale_step, d, row);
      if ((n & 1) == 0 && n + 1 < t->n) continue;
      const uint16_t *other = n & 1 ? row : words[0];
      for (int c = 0; c < d; c += 32) {
        Words low, high;
        pair_words(_mm512_load_si512(words[0] + c), _mm512_load_si512(other + c), low, high);
        _mm512_storeu_si512(out + c, low);
        _mm512_storeu_si512(out + c + 16, high);
      }
      out += d;
    }
  }
}

KSL_INLINE bool in_bf16(int format, int head_dim) {
  return format != KSL_KV_F32 && head_dim % 32 == 0;
}

static void attn_query_bf16(int format, const float *q, int head_dim, float scale, void *out) {
  if (!in_bf16(format, head_dim)) {
    attn_query(format, q, head_dim, scale, out);
    return;
  }
  const __m512 factor = _mm512_set1_ps(scale);
  for (int i = 0; i < head_dim; i += 32)
    _mm512_storeu_si512((uint16_t *)out + i,
                        words_of(_mm512_mul_ps(_mm512_loadu_ps(q + i), factor),
                                 _mm512_mul_ps(_mm512_loadu_ps(q + i + 16), factor)));
}

static void attn_tile_bf16(const KvRun *runs, int n_runs, const KvRun *next, int n_next,
                           const void *q, int group, int columns, const int *n_keys, int head_dim,
                           uint8_t *scratch, float *m, float *l, float *acc) {
  if (n_keys[columns - 1] <= 0) return;
  if (!in_bf16(runs[0].format, head_dim)) {
    attn_tile(runs, n_runs, next, n_next, q, group, columns, n_keys, head_dim, scratch, m, l, acc);
    return;
  }
  Tile t;
  t.n = n_keys[columns - 1];
  t.head_dim = head_dim;
  alignas(64) float key_scale[kTileKeys], value_scale[kTileKeys];
  for (int j = 0; j < kTileKeys; j += 16) {  // what absent keys multiply is zero, or unused
    _mm512_store_ps(key_scale + j, _mm512_set1_ps(1.0f));
    _mm512_store_ps(value_scale + j, _mm512_set1_ps(1.0f));
  }
  uint16_t *words = (uint16_t *)scratch;
  const bool few = group * columns <= 4 && head_dim % 64 == 0;
  int n = 0;
  for (int r = 0; r < n_runs; r++) {
    const KvRun *run = &runs[r];
    for (int i = 0; i < run->n && n < t.n; i++, n++) {
      const uint8_t *k = run->k + i * run->k_step, *k_scale = run->k_scale + i * run->k_scale_step;
      t.values[n] = run->v + i * run->v_step;
      t.keys[n] = (const uint16_t *)k;
      if (run->format == KSL_KV_FP8) {
        __builtin_memcpy(&value_scale[n], run->v_scale + i * run->v_scale_step, 4);
        __builtin_memcpy(&key_scale[n], k_scale, 4);
      }
      if (run->format == KSL_KV_BF16) continue;
      t.keys[n] = words + n * head_dim;
      kv_words(run->format, k, k_scale, head_dim, words + n * head_dim);
    }
  }
  const int format = runs[0].format;
  t.value_bytes = format == KSL_KV_BF16 ? 2 * head_dim : head_dim;
  t.next_bytes = format == KSL_KV_BF16                               ? 2 * head_dim
                 : format == KSL_KV_FP8 || format == KSL_KV_INT8_G64 ? head_dim
                                                                     : head_dim / 2;
  t.next = next;  // where blocks are smaller than tiles, a part of it
  t.n_next = n_next ? next->n : 0;
  for (int j = t.n; j < kTileKeys && j % 16; j++) {
    t.keys[j] = t.keys[t.n - 1];
    t.values[j] = t.values[t.n - 1];
  }
  const bool e4m3 = format == KSL_KV_FP8;
  t.key_scale = e4m3 ? key_scale : nullptr;
  t.value_scale = e4m3 ? value_scale : nullptr;
  t.columns = nullptr;
  const uint16_t *queries = (const uint16_t *)q;
  const size_t q_step = 2 * (size_t)head_dim;
  if (few && format == KSL_KV_BF16) {
    attn_spans_bf16<FromBf16>(&t, queries, q_step, group, columns, n_keys, m, l, acc);
  } else if (few && e4m3) {
    attn_spans_bf16<FromE4m3>(&t, queries, q_step, group, columns, n_keys, m, l, acc);
  } else {
    uint32_t *pairs = (uint32_t *)(scratch + (size_t)kTileKeys * head_dim * 4);
    fill_pairs(&t, runs, pairs);
    if (t.n == kTileKeys) {
      uint32_t *columns = (uint32_t *)(scratch + (size_t)kTileKeys * head_dim * 2);
      fill_columns(&t, columns);
      t.columns = columns;
    }
    t.pairs = pairs;
    attn_spans_bf16<FromPairs>(&t, queries, q_step, group, columns, n_keys, m, l, acc);
  }
}

}  // namespace
}  // namespace ksl
