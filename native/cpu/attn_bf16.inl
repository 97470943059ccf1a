// Attention with bf16 products (AVX512-BF16): queries and probabilities are rounded to bf16, values
// of the compact formats too; sums stay float32. Keys are read as rows of bf16, values as pairs of
// rows: a product adds two keys to each channel.
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

// Which byte of 64 goes where, so that two levels of interleaving inside 128-bit lanes, of bytes
// and of words, leave channels in order.
struct LaneOrder {
  uint8_t words[64], pairs[64];
  constexpr LaneOrder() : words(), pairs() {
    for (int k = 0; k < 4; k++)
      for (int o = 0; o < 2; o++)
        for (int i = 0; i < 8; i++) words[16 * k + 8 * o + i] = (uint8_t)(32 * o + 8 * k + i);
    for (int k = 0; k < 4; k++)
      for (int o = 0; o < 4; o++)
        for (int i = 0; i < 4; i++) pairs[16 * k + 4 * o + i] = (uint8_t)(16 * o + 4 * k + i);
  }
};
alignas(64) constexpr LaneOrder kLaneOrder;

KSL_INLINE __mmask64 bytes_below(int n) {
  return n >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << n) - 1;
}

// d: a multiple of 32.
static void words_of_e4m3(const uint8_t *codes, int d, uint16_t *out) {
  const E4m3Table table = e4m3_table();
  const __m512i order = _mm512_load_si512(kLaneOrder.words);
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

// The 16 values of a group: (code - zero) * scale.
template <bool kZero>
KSL_INLINE __m512 nibble_values(const float *scales, int group) {
  const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 zero = _mm512_set1_ps(kZero ? scales[2 * group + 1] : 8.0f);
  return _mm512_mul_ps(_mm512_sub_ps(steps, zero), _mm512_set1_ps(scales[(kZero ? 2 : 1) * group]));
}
// 32 codes as indices of words.
KSL_INLINE Words nibbles(const uint8_t *codes) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
  // (x | x << 12) & 15 in each word
  return _mm512_ternarylogic_epi32(x, _mm512_slli_epi32(x, 12), _mm512_set1_epi32(0x000f000f),
                                   0xa8);
}

// scales: per 32 channels a scale, and a zero point if `kZero`, else that is 8.
template <bool kZero>
KSL_INLINE void words_of_nibbles(const uint8_t *codes, const float *scales, int d, uint16_t *out) {
  int g = 0;
  for (; 32 * g + 64 <= d; g += 2) {  // one table of two groups
    const Words values =
        words_of(nibble_values<kZero>(scales, g), nibble_values<kZero>(scales, g + 1));
    const Words second = _mm512_or_si512(nibbles(codes + 16 * g + 16), _mm512_set1_epi16(16));
    _mm512_storeu_si512(out + 32 * g, _mm512_permutexvar_epi16(nibbles(codes + 16 * g), values));
    _mm512_storeu_si512(out + 32 * g + 32, _mm512_permutexvar_epi16(second, values));
  }
  if (32 * g < d) {
    const __m512 last = nibble_values<kZero>(scales, g);
    _mm512_storeu_si512(out + 32 * g,
                        _mm512_permutexvar_epi16(nibbles(codes + 16 * g), words_of(last, last)));
  }
}

// Any compact row but a K of q4.
static void kv_words(int format, const uint8_t *codes, const uint8_t *scales, int d,
                     uint16_t *out) {
  if (format == KSL_KV_FP8 || format == KSL_KV_Q4) {
    words_of_e4m3(codes, d, out);
  } else if (format == KSL_KV_INT8_G64) {
    words_of_int8(codes, scales, d, out);
  } else {
    alignas(64) float halves[16];
    floats_of_halves(scales, d / 32, halves);
    words_of_nibbles<false>(codes, halves, d, out);
  }
}

// ---- a tile

struct Tile {
  int n, head_dim;
  const uint16_t *keys[kTileKeys];       // rows of bf16
  const uint8_t *values[kTileKeys];      // as stored; null where `pairs` has them
  const uint32_t *pairs;                 // [kTileKeys / 2][head_dim]: two keys' values in each
  const float *key_scale, *value_scale;  // [kTileKeys], null: 1
  // What is fetched while this tile is worked on: its values, and the keys and scales of
  // the next tile.
  int value_bytes, next_bytes, n_next;
  const uint8_t *next[kTileKeys], *next_k_scale[kTileKeys], *next_v_scale[kTileKeys];
};

// Into the second cache: its queue of misses is the longer one.
KSL_INLINE void fetch(const uint8_t *row, int from, int end, int step) {
  for (int at = from; at < end; at += step) __builtin_prefetch(row + at, 0, 2);
}

// The sums of 16 vectors, four in each quad of lanes: those of s[h], s[4 + h], s[8 + h], s[12 + h]
// in quad h. The additions of v_hsum in its order.
KSL_INLINE __m512 sum_quads(const __m512 *s) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0x44),
                         _mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0xee));
  for (int i = 0; i < 4; i++)
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
  for (int i = 0; i < 2; i++)
    c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
}

// Scores of H <= 4 heads of bf16 queries; n_keys of the tile's keys, the rest -inf.
template <int H>
KSL_INLINE void scores_bf16(const Tile *t, const uint16_t *q, size_t q_step, int n_keys,
                            float *score) {
  const V absent = v_set1(-__builtin_inff());
  for (int i = 0; i < H * kTileKeys; i += 16) v_store(score + i, absent);
  for (int j0 = 0; j0 < n_keys; j0 += 4) {
    const uint16_t *rows[4];
    for (int j = 0; j < 4; j++) rows[j] = t->keys[j0 + j < n_keys ? j0 + j : n_keys - 1];
    for (int j = j0; j < j0 + 4 && j < t->n; j++) fetch(t->values[j], 0, t->value_bytes, 64);
    __m512 sum[4][4];
    for (int j = 0; j < 4; j++)
      for (int h = 0; h < 4; h++) sum[j][h] = _mm512_setzero_ps();
    for (int i = 0; i < t->head_dim; i += 32) {
      Words k[4];
      for (int j = 0; j < 4; j++) k[j] = _mm512_loadu_si512(rows[j] + i);
      for (int h = 0; h < H; h++) {
        const Words a = _mm512_loadu_si512(q + h * q_step + i);
        for (int j = 0; j < 4; j++)
          sum[j][h] = _mm512_dpbf16_ps(sum[j][h], as_bf16(a), as_bf16(k[j]));
      }
    }
    __m512 quads = sum_quads(sum[0]);
    if (t->key_scale)
      quads = _mm512_mul_ps(quads, _mm512_broadcast_f32x4(_mm_loadu_ps(t->key_scale + j0)));
    const __mmask8 live = (__mmask8)(n_keys - j0 >= 4 ? 15 : (1 << (n_keys - j0)) - 1);
    _mm_mask_storeu_ps(score + j0, live, _mm512_castps512_ps128(quads));
    if (H > 1) _mm_mask_storeu_ps(score + kTileKeys + j0, live, _mm512_extractf32x4_ps(quads, 1));
    if (H > 2)
      _mm_mask_storeu_ps(score + 2 * kTileKeys + j0, live, _mm512_extractf32x4_ps(quads, 2));
    if (H > 3)
      _mm_mask_storeu_ps(score + 3 * kTileKeys + j0, live, _mm512_extractf32x4_ps(quads, 3));
  }
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

struct FromPairs {
  const uint32_t *at;
  int head_dim;
  KSL_INLINE FromPairs of(const Tile *t, int) { return {t->pairs, t->head_dim}; }
  inline __attribute__((always_inline)) void load(int j, int at_channel, Words *out) const {
    const uint32_t *from = at + (size_t)j * head_dim + at_channel;
    for (int o = 0; o < 4; o++) out[o] = _mm512_loadu_si512(from + 16 * o);
  }
};

struct FromBf16 {
  const uint8_t *const *rows;
  int n, head_dim;
  KSL_INLINE FromBf16 of(const Tile *t, int n_keys) { return {t->values, n_keys, t->head_dim}; }
  inline __attribute__((always_inline)) void load(int j, int at, Words *out) const {
    const uint16_t *a = (const uint16_t *)rows[2 * j] + at;
    const uint16_t *b = (const uint16_t *)rows[2 * j + 1 < n ? 2 * j + 1 : n - 1] + at;
    pair_words(_mm512_loadu_si512(a), _mm512_loadu_si512(b), out[0], out[1]);
    const __mmask32 rest = at + 32 < head_dim ? ~(__mmask32)0 : 0;
    pair_words(_mm512_maskz_loadu_epi16(rest, a + 32), _mm512_maskz_loadu_epi16(rest, b + 32),
               out[2], out[3]);
  }
};

struct FromE4m3 {
  const uint8_t *const *rows;
  int n, head_dim;
  E4m3Table table;
  KSL_INLINE FromE4m3 of(const Tile *t, int n_keys) {
    return {t->values, n_keys, t->head_dim, e4m3_table()};
  }
  inline __attribute__((always_inline)) void load(int j, int at, Words *out) const {
    const __mmask64 mask = bytes_below(head_dim - at);
    const __m512i order = _mm512_load_si512(kLaneOrder.pairs);
    const __m512i a = _mm512_maskz_loadu_epi8(mask, rows[2 * j] + at);
    const __m512i b = _mm512_maskz_loadu_epi8(mask, rows[2 * j + 1 < n ? 2 * j + 1 : n - 1] + at);
    __m512i al, ah, bl, bh;
    e4m3_bytes(table, _mm512_permutexvar_epi8(order, a), al, ah);
    e4m3_bytes(table, _mm512_permutexvar_epi8(order, b), bl, bh);
    const __m512i a0 = _mm512_unpacklo_epi8(al, ah), b0 = _mm512_unpacklo_epi8(bl, bh);
    const __m512i a1 = _mm512_unpackhi_epi8(al, ah), b1 = _mm512_unpackhi_epi8(bl, bh);
    out[0] = _mm512_unpacklo_epi16(a0, b0);
    out[1] = _mm512_unpackhi_epi16(a0, b0);
    out[2] = _mm512_unpacklo_epi16(a1, b1);
    out[3] = _mm512_unpackhi_epi16(a1, b1);
  }
};

// 16 N channels from `at` of acc [H][head_dim]; p: probabilities [H][kTileKeys / 2 pairs].
template <class Source, int H, int N>
KSL_INLINE void values_bf16(const Tile *t, const Source &source, const uint32_t *p, int pairs,
                            int at, float *acc) {
  const int d = t->head_dim;
  __m512 sum[H][N];
  for (int h = 0; h < H; h++)
    for (int o = 0; o < N; o++) sum[h][o] = _mm512_setzero_ps();
  for (int j = 0; j < pairs; j++) {
    for (int i = 2 * j; i < 2 * j + 2 && i < t->n_next; i++) {
      fetch(t->next[i], at, t->next_bytes, d);
      if (at == 0) {
        __builtin_prefetch(t->next_k_scale[i], 0, 2);
        __builtin_prefetch(t->next_v_scale[i], 0, 2);
      }
    }
    Words v[4];
    source.load(j, at, v);
    for (int h = 0; h < H; h++) {
      const Words two = _mm512_set1_epi32((int)p[h * (kTileKeys / 2) + j]);
      for (int o = 0; o < N; o++)
        sum[h][o] = _mm512_dpbf16_ps(sum[h][o], as_bf16(two), as_bf16(v[o]));
    }
  }
  for (int h = 0; h < H; h++)
    for (int o = 0; o < N; o++) _mm512_storeu_ps(acc + h * d + at + 16 * o, sum[h][o]);
}

template <class Source, int H>
static void attn_heads_bf16(Tile *t, const uint16_t *q, size_t q_step, int n_keys, float *m,
                            float *l, float *acc) {
  alignas(64) float score[H * kTileKeys], tile_acc[H * kMaxHeadDim];
  alignas(64) uint32_t p[H * kTileKeys / 2];
  float tile_m[H], tile_l[H];
  scores_bf16<H>(t, q, q_step, n_keys, score);
  for (int h = 0; h < H; h++) {
    float *s = score + h * kTileKeys;
    soften(s, &tile_m[h], &tile_l[h]);
    for (int i = 0; i < kTileKeys; i += 32) {
      __m512 low = _mm512_load_ps(s + i), high = _mm512_load_ps(s + i + 16);
      if (t->value_scale) {
        low = _mm512_mul_ps(low, _mm512_loadu_ps(t->value_scale + i));
        high = _mm512_mul_ps(high, _mm512_loadu_ps(t->value_scale + i + 16));
      }
      _mm512_store_si512(p + h * (kTileKeys / 2) + i / 2, words_of(low, high));
    }
  }
  const Source source = Source::of(t, n_keys);
  const int pairs = (n_keys + 1) / 2;
  int at = 0;
  for (; at + 64 <= t->head_dim; at += 64)
    values_bf16<Source, H, 4>(t, source, p, pairs, at, tile_acc);
  if (at < t->head_dim) values_bf16<Source, H, 2>(t, source, p, pairs, at, tile_acc);
  t->value_bytes = t->n_next = 0;  // once is enough
  for (int h = 0; h < H; h++)
    attn_combine(&m[h], &l[h], acc + h * t->head_dim, tile_m[h], tile_l[h],
                 tile_acc + h * t->head_dim, t->head_dim);
}

template <class Source>
static void attn_spans_bf16(Tile *t, const uint16_t *q, size_t q_step, int group, int columns,
                            const int *n_keys, float *m, float *l, float *acc) {
  each_span(columns, n_keys, [&](int c, int end, int keys) {
    size_t h = (size_t)c * group;
    const size_t last = (size_t)end * group, d = t->head_dim;
    for (; h + 4 <= last; h += 4)
      attn_heads_bf16<Source, 4>(t, q + h * q_step, q_step, keys, m + h, l + h, acc + h * d);
    for (; h + 2 <= last; h += 2)
      attn_heads_bf16<Source, 2>(t, q + h * q_step, q_step, keys, m + h, l + h, acc + h * d);
    for (; h < last; h++)
      attn_heads_bf16<Source, 1>(t, q + h * q_step, q_step, keys, m + h, l + h, acc + h * d);
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
  alignas(64) float key_scale[kTileKeys], value_scale[kTileKeys], halves[kTileKeys][16];
  for (int j = 0; j < kTileKeys; j += 16) {  // what absent keys multiply is zero, or unused
    _mm512_store_ps(key_scale + j, _mm512_set1_ps(1.0f));
    _mm512_store_ps(value_scale + j, _mm512_set1_ps(1.0f));
  }
  uint16_t *words = (uint16_t *)scratch;
  int n = 0;
  for (int r = 0; r < n_runs; r++) {
    const KvRun *run = &runs[r];
    for (int i = 0; i < run->n && n < t.n; i++, n++) {
      const uint8_t *k = run->k + i * run->k_step, *k_scale = run->k_scale + i * run->k_scale_step;
      t.values[n] = run->v + i * run->v_step;
      t.keys[n] = (const uint16_t *)k;
      if (run->format == KSL_KV_FP8 || run->format == KSL_KV_Q4)
        __builtin_memcpy(&value_scale[n], run->v_scale + i * run->v_scale_step, 4);
      if (run->format == KSL_KV_FP8) __builtin_memcpy(&key_scale[n], k_scale, 4);
      if (run->format == KSL_KV_BF16) continue;
      t.keys[n] = words + n * head_dim;
      if (run->format == KSL_KV_Q4)  // ahead of their use, which would wait for the store
        floats_of_halves(k_scale, head_dim / 16, halves[n]);
      else
        kv_words(run->format, k, k_scale, head_dim, words + n * head_dim);
    }
  }
  if (runs[0].format == KSL_KV_Q4) {
    n = 0;
    for (int r = 0; r < n_runs; r++)
      for (int i = 0; i < runs[r].n && n < t.n; i++, n++)
        words_of_nibbles<true>(runs[r].k + i * runs[r].k_step, halves[n], head_dim,
                               words + n * head_dim);
  }
  const int format = runs[0].format;
  t.value_bytes = format == KSL_KV_BF16 ? 2 * head_dim : head_dim;
  t.next_bytes = format == KSL_KV_BF16                               ? 2 * head_dim
                 : format == KSL_KV_FP8 || format == KSL_KV_INT8_G64 ? head_dim
                                                                     : head_dim / 2;
  t.n_next = 0;
  for (int r = 0; r < n_next; r++)
    for (int i = 0; i < next[r].n && t.n_next < kTileKeys; i++, t.n_next++) {
      t.next[t.n_next] = next[r].k + i * next[r].k_step;
      t.next_k_scale[t.n_next] = next[r].k_scale + i * next[r].k_scale_step;
      t.next_v_scale[t.n_next] = next[r].v_scale + i * next[r].v_scale_step;
    }
  const bool e4m3 = format == KSL_KV_FP8 || format == KSL_KV_Q4;
  t.key_scale = format == KSL_KV_FP8 ? key_scale : nullptr;
  t.value_scale = e4m3 ? value_scale : nullptr;
  const uint16_t *queries = (const uint16_t *)q;
  const size_t q_step = 2 * (size_t)head_dim;
  if (group * columns <= 4 && format == KSL_KV_BF16) {
    attn_spans_bf16<FromBf16>(&t, queries, q_step, group, columns, n_keys, m, l, acc);
  } else if (group * columns <= 4 && e4m3) {
    attn_spans_bf16<FromE4m3>(&t, queries, q_step, group, columns, n_keys, m, l, acc);
  } else {
    uint32_t *pairs = (uint32_t *)(scratch + (size_t)kTileKeys * head_dim * 2);
    fill_pairs(&t, runs, pairs);
    t.pairs = pairs;
    attn_spans_bf16<FromPairs>(&t, queries, q_step, group, columns, n_keys, m, l, acc);
  }
}

}  // namespace
}  // namespace ksl
