// Attention on rows of fp8, int8_g64 and int4_g32, and a ring of the last two: a tile is brought
// into the shape of pieces as it is read. Keys keep their codes and the scales of their groups;
// those of e4m3, and all values, are rounded to int8 of their row.
namespace ksl {
namespace {

// The rows of a tile, up to a whole piece the last one again.
struct StoredRows {
  const uint8_t *k[kTileKeys], *k_scale[kTileKeys], *v[kTileKeys], *v_scale[kTileKeys];
  uint8_t format[kTileKeys];
};

// What codes of values are multiplied by, per 32 channels: the same number twice, times 2^15, and
// of int4 2^10.
struct ValueFactors {
  alignas(64) int32_t at[kMaxGroups][kTileKeys];
};

// rough_log2 of 16.
KSL_INLINE __m512 rough_log2_of(__m512 x) {
  const __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
  __m512 y = _mm512_set1_ps(kRoughLog2[0]);
  for (int i = 1; i < 5; i++) y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(kRoughLog2[i]));
  return _mm512_add_ps(_mm512_getexp_ps(x), y);
}

// Scales of keys and factors of values of a piece from `at` on, of int8 and int4 rows.
static void fill_groups(const StoredRows *rows, int at, int d, CodeTile *t, ValueFactors *f) {
  const __mmask8 wide = (__mmask8)((1u << d / 64) - 1), narrow = (__mmask8)((1u << d / 32) - 1);
  __m256i words[kPieceKeys];
  __mmask16 int4 = 0;
  for (int j = 0; j < kPieceKeys; j++) {
    const bool four = rows->format[at + j] != KSL_KV_INT8_G64;
    const __mmask8 some = four ? narrow : wide;
    __m128i k = _mm_maskz_loadu_epi16(some, rows->k_scale[at + j]);
    __m128i v = _mm_maskz_loadu_epi16(some, rows->v_scale[at + j]);
    if (!four) {
      k = _mm_unpacklo_epi16(k, k);
      v = _mm_unpacklo_epi16(v, v);
    }
    words[j] = _mm256_set_m128i(v, k);
    int4 |= (__mmask16)(four << j);
  }
  Words pairs[kMaxGroups];
  turn_eights(words, pairs);
  __m512 scale[kMaxGroups], top = _mm512_setzero_ps(), spoilt = top;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm512_store_ps(t->k_scale[2 * i] + at, floats_of_low(pairs[i]));
    _mm512_store_ps(t->k_scale[2 * i + 1] + at, floats_of_high(pairs[i]));
    scale[2 * i] = floats_of_low(pairs[4 + i]);
    scale[2 * i + 1] = floats_of_high(pairs[4 + i]);
    top = _mm512_max_ps(_mm512_max_ps(scale[2 * i], scale[2 * i + 1]), top);
    const __m512 both = _mm512_add_ps(scale[2 * i], scale[2 * i + 1]);
    spoilt = _mm512_add_ps(spoilt, _mm512_sub_ps(both, both));  // NaN of infinities, and stays
  }
  const __m512 levels = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), int4, _mm512_set1_ps(7.0f / 127));
  const __m512 unit = _mm512_mask_mov_ps(_mm512_set1_ps(0x1p15f), int4, _mm512_set1_ps(0x1p10f));
  const __m512 log =
      rough_log2_of(_mm512_max_ps(_mm512_set1_ps(kLeastRow), _mm512_mul_ps(top, levels)));
  const __m512 inverse = v_exp2({_mm512_sub_ps(_mm512_setzero_ps(), log)}).v;
  _mm512_store_ps(t->v_log + at, _mm512_add_ps(log, spoilt));
  _mm512_store_ps(t->v_inverse + at, _mm512_add_ps(inverse, spoilt));
  const __m512 factor = _mm512_mul_ps(inverse, unit);
#pragma GCC unroll 8
  for (int g = 0; g < kMaxGroups; g++) {
    const __m512i x = _mm512_min_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(scale[g], factor)),
                                       _mm512_set1_epi32(32767));
    _mm512_store_si512(f->at[g] + at, _mm512_or_si512(x, _mm512_slli_epi32(x, 16)));
  }
}

// 64 codes of int4, plus 8; those behind the head are 0.
KSL_INLINE __m512i bytes_of_nibbles(const uint8_t *row, int at, int d) {
  const __m256i x = _mm256_maskz_loadu_epi8((__mmask32)bytes_below((d - at) / 2), row + at / 2);
  const __m512i words = _mm512_cvtepu8_epi16(x);
  return _mm512_ternarylogic_epi32(words, _mm512_slli_epi16(words, 4), _mm512_set1_epi8(15), 0xa8);
}

// 64 codes of a key from channel `at`, plus 128. Magnitudes of e4m3 are joined into `any`.
KSL_INLINE __m512i key_bytes(int format, const uint8_t *row, int at, int d, const E4m3Lookup &table,
                             __m512i &any) {
  const __m512i middle = _mm512_set1_epi8((char)0x80);
  if (format == KSL_KV_INT8_G64) return _mm512_xor_si512(_mm512_loadu_si512(row + at), middle);
  if (format != KSL_KV_FP8)
    return _mm512_add_epi8(bytes_of_nibbles(row, at, d), _mm512_set1_epi8(120));
  __m512i magnitude;
  const __m512i x = _mm512_maskz_loadu_epi8(bytes_below(d - at), row + at);
  const __m512i codes = codes_of_e4m3(table, x, magnitude);
  any = _mm512_or_si512(any, magnitude);
  return _mm512_xor_si512(codes, middle);
}

// Keys of a piece as columns [d / 4][16]. Whether there is a NaN. kFormat: of all, or -1.
template <int kFormat>
static bool fill_keys(const StoredRows *rows, int from, int d, uint8_t *out) {
  const E4m3Lookup table = e4m3_lookup();
  __m512i any = _mm512_setzero_si512();
  for (int i = 0; i < d; i += 64) {
    Words r[kPieceKeys];
#pragma GCC unroll 16
    for (int j = 0; j < kPieceKeys; j++)
      r[j] = key_bytes(kFormat < 0 ? rows->format[from + j] : kFormat, rows->k[from + j], i, d,
                       table, any);
    turn_words(r);
    const int columns = (d - i) / 4;
    uint8_t *to = out + (size_t)kPieceKeys * i;
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++)
      if (c < columns) _mm512_store_si512(to + 64 * c, r[c]);
  }
  return _mm512_movepi8_mask(any) != 0;
}

// As kQuadOrder, of what _mm512_packs_epi16 makes of two times 32 channels.
struct PackedOrder {
  uint8_t at[64];
  constexpr PackedOrder() : at() {
    const QuadOrder order;
    for (int i = 0; i < 64; i++) {
      const int c = order.at[i];
      at[i] = (uint8_t)(16 * (c % 32 / 8) + c / 32 * 8 + c % 8);
    }
  }
};
alignas(64) constexpr PackedOrder kPackedOrder;

// 64 codes of value `j` from channel `at`, rounded to int8 of the row, in the order of quads.
KSL_INLINE __m512i value_bytes_of(int format, const uint8_t *row, const ValueFactors *f, int j,
                                  int at, int d) {
  const int g = at / kGroupChannels;
  if (format == KSL_KV_INT8_G64) {  // both groups have one scale
    const __m512i factor = _mm512_set1_epi32(f->at[g][j]);
    const __m512i low = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(row + at)));
    const __m512i high = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(row + at + 32)));
    return _mm512_permutexvar_epi8(
        _mm512_load_si512(kPackedOrder.at),
        _mm512_packs_epi16(_mm512_mulhrs_epi16(low, factor), _mm512_mulhrs_epi16(high, factor)));
  }
  const __m512i factor =
      _mm512_mask_set1_epi32(_mm512_set1_epi32(f->at[g][j]), (__mmask16)0xff00, f->at[g + 1][j]);
  // 32 times the values of the codes 0 to 7, and of the others, since factors are times 2^10.
  const __m512i low =
      _mm512_set4_epi32((int)0xffe0ffc0, (int)0xffa0ff80, (int)0xff60ff40, (int)0xff20ff00);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(256));
  const __m512i values =
      _mm512_packs_epi16(_mm512_mulhrs_epi16(low, factor), _mm512_mulhrs_epi16(high, factor));
  return _mm512_permutexvar_epi8(_mm512_load_si512(kQuadOrder.at),
                                 _mm512_shuffle_epi8(values, bytes_of_nibbles(row, at, d)));
}

// Values of a piece, not of e4m3. kFormat: of all, or -1.
template <int kFormat>
static void fill_values(const StoredRows *rows, int from, int d, const ValueFactors *f,
                        uint8_t *out) {
  for (int i = 0; i < d; i += 64) {
    for (int j = 0; j < kPieceKeys; j += 4) {
      __m512i x[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++)
        x[r] = value_bytes_of(kFormat < 0 ? rows->format[from + j + r] : kFormat,
                              rows->v[from + j + r], f, from + j + r, i, d);
      store_quads(x, out + (size_t)kPieceKeys * i + 64 * j);
    }
  }
}

// A piece of e4m3 rows.
static void fill_piece_fp8(const StoredRows *rows, int at, int d, CodeTile *t, uint8_t *k,
                           uint8_t *v) {
  alignas(64) float k_scale[kPieceKeys], v_scale[kPieceKeys];
  for (int j = 0; j < kPieceKeys; j++) {
    __builtin_memcpy(&k_scale[j], rows->k_scale[at + j], 4);
    __builtin_memcpy(&v_scale[j], rows->v_scale[at + j], 4);
  }
  __mmask16 spoilt = 0;
  if (fill_keys<KSL_KV_FP8>(rows, at, d, k))
    for (int j = 0; j < kPieceKeys; j++)
      for (int i = 0; i < d; i++) spoilt |= (__mmask16)(((rows->k[at + j][i] & 0x7f) == 0x7f) << j);
  const __m512 scale = _mm512_mul_ps(_mm512_load_ps(k_scale), _mm512_set1_ps(448.0f / 127));
  _mm512_store_ps(t->k_scale[0] + at,
                  _mm512_mask_mov_ps(scale, spoilt, _mm512_set1_ps(__builtin_nanf(""))));
  spoilt = 0;
  for (int j = 0; j < kPieceKeys; j += 4) {
    spoilt |= (__mmask16)(fill_e4m3(rows->v + at + j, d, v + 64 * j) << j);
  }
  e4m3_scales(_mm512_load_ps(v_scale), spoilt, t, at);
}

static void fill_piece(const StoredRows *rows, int at, int d, CodeTile *t, ValueFactors *f,
                       uint8_t *k, uint8_t *v) {
  if (rows->format[at] == KSL_KV_FP8) {
    fill_piece_fp8(rows, at, d, t, k, v);
    return;
  }
  fill_groups(rows, at, d, t, f);
  int others = 0;
  for (int j = 0; j < kPieceKeys; j++) others |= rows->format[at + j] != rows->format[at];
  if (others) {
    fill_keys<-1>(rows, at, d, k);
    fill_values<-1>(rows, at, d, f, v);
  } else if (rows->format[at] == KSL_KV_INT8_G64) {
    fill_keys<KSL_KV_INT8_G64>(rows, at, d, k);
    fill_values<KSL_KV_INT8_G64>(rows, at, d, f, v);
  } else {
    fill_keys<KSL_KV_INT4_G32>(rows, at, d, k);
    fill_values<KSL_KV_INT4_G32>(rows, at, d, f, v);
  }
}

// One tile of rows of these formats. Heads are a multiple of kCodeDims.
static void attn_tile_rows(const KvRun *runs, int n_runs, const KvRun *next, int n_next,
                           const void *q, int group, int columns, const int *n_keys, int head_dim,
                           uint8_t *scratch, float *m, float *l, float *acc) {
  CodeTile t;
  t.n = n_keys[columns - 1];
  t.head_dim = head_dim;
  t.groups = true;
  t.nibbles = false;
  t.scale_step = runs[0].format == KSL_KV_FP8 ? 0 : 1;
  t.rows = nullptr;
  fetch_from(next, n_next, &t);
  StoredRows rows;
  int n = 0;
  const auto add = [&](const uint8_t *k, const uint8_t *k_scale, const uint8_t *v,
                       const uint8_t *v_scale, int format) {
    rows.k[n] = k;
    rows.k_scale[n] = k_scale;
    rows.v[n] = v;
    rows.v_scale[n] = v_scale;
    rows.format[n++] = (uint8_t)format;
  };
  for (int r = 0; r < n_runs; r++) {
    const KvRun *run = &runs[r];
    for (int i = 0; i < run->n && n < t.n; i++)
      add(run->k + i * run->k_step, run->k_scale + i * run->k_scale_step, run->v + i * run->v_step,
          run->v_scale + i * run->v_scale_step, run->format);
  }
  for (const int last = n - 1; n % kPieceKeys;)
    add(rows.k[last], rows.k_scale[last], rows.v[last], rows.v_scale[last], rows.format[last]);
  const int pieces = n / kPieceKeys;
  const size_t key_bytes = (size_t)kPieceKeys * head_dim;
  const size_t value_bytes = code_value_bytes(head_dim);
  ValueFactors factors;
  for (int i = 0; i < kTilePieces; i++) {
    const int from = i < pieces ? i : pieces - 1;
    uint8_t *k = scratch + from * key_bytes;
    uint8_t *v = scratch + kTilePieces * key_bytes + from * value_bytes;
    t.k[i] = k;
    t.v[i] = (const int8_t *)v;
    t.next[i] = nullptr;
    if (i < pieces) fill_piece(&rows, kPieceKeys * i, head_dim, &t, &factors, k, v);
  }
  attn_columns_codes(&t, (const uint8_t *)q, 4 * (size_t)head_dim, group, columns, n_keys, m, l,
                     acc);
}

// ---- any format

// Whether rows are read as codes. Those of bf16 are encoded when they are written (attn_fill.inl).
KSL_INLINE bool as_codes(int format, int head_dim) {
  return format != KSL_KV_F32 && format != KSL_KV_BF16 && head_dim % kCodeDims == 0;
}

static void attn_query_rows(int format, const float *q, int head_dim, float scale, void *out) {
  if (as_codes(format, head_dim))
    attn_query_codes(q, head_dim, scale, format == KSL_KV_Q4, out);
  else
    attn_query(format, q, head_dim, scale, out);
}

static void attn_tile_any(const KvRun *runs, int n_runs, const KvRun *next, int n_next,
                          const void *q, int group, int columns, const int *n_keys, int head_dim,
                          uint8_t *scratch, float *m, float *l, float *acc) {
  if (n_keys[columns - 1] <= 0) return;
  const int format = runs[0].format;
  const auto tile = !as_codes(format, head_dim) ? attn_tile
                    : format == KSL_KV_Q4       ? attn_tile_q4
                                                : attn_tile_rows;
  tile(runs, n_runs, next, n_next, q, group, columns, n_keys, head_dim, scratch, m, l, acc);
}

}  // namespace
}  // namespace ksl
