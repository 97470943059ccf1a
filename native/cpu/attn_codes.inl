// Attention on codes (AVX512-VNNI): keys and queries are bytes, so that scores are exact integers
// times scales; probabilities are bytes of a fixed-point number in [0, 1], relative to the largest
// of the tile, and values are bytes, so that what a tile adds is an exact integer times one scale.
// Sums of integers do not depend on their order: few queries and many take the same path.
//
// A row of values has a scale of its own, 2^v_log. It is folded into the score, whose exponent then
// says how much a key adds at most: what is rounded away of it is small beside what the tile adds,
// however the scales of its rows differ. The denominator takes the scale out again.
namespace ksl {
namespace {

enum { kGroupChannels = 32, kMaxGroups = kMaxHeadDim / kGroupChannels };
enum { kBlockQueries = 48 };         // queries whose probabilities exist at one time
enum { kSomeQueries = 4 };           // those whose scores are in registers at one time
enum { kSteps = 2 * kSomeQueries };  // parts of their exponentials, of a half of the tile

// Behind the codes of a query.
struct CodeQuery {
  float scale;             // NaN where the query is not finite
  int32_t bias;            // -128 times the sum of the codes
  float sums[kMaxGroups];  // of the codes of each 32 channels
};

struct Q4Rows;  // attn_q4.inl

// A tile of keys, in pieces (CodePiece in attn.h). Those behind the last are that again, or
// anything. Its halves have kTilePieces each; groups have one.
struct CodeTile {
  int n, head_dim;
  bool groups;     // keys have a scale per 32 channels
  bool nibbles;    // they are of 4 bits, and groups have a zero point
  int scale_step;  // of groups: 0 if one scale is for all
  const uint8_t *k[kCodePieces];
  const int8_t *v[kCodePieces];
  const uint8_t *next[kCodePieces];  // pieces to fetch meanwhile; null: none
  const KvRun *ahead;                // of groups: rows, n_ahead of them
  int n_ahead, ahead_k, ahead_v;     // bytes of their codes
  Q4Rows *rows;  // of nibbles: null, or what at most kSomeQueries read instead of pieces
  alignas(64) float v_log[kCodeKeys], v_inverse[kCodeKeys];
  alignas(64) float k_scale[kMaxGroups][kCodeKeys], k_zero[kMaxGroups][kTileKeys];
};

// acc + the dot product of four unsigned bytes of `u` and signed ones of `s`. In assembly, as
// i_dot_once.
KSL_INLINE void dot_bytes(Lanes &acc, __m512i u, __m512i s) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
}
KSL_INLINE __m512i four_bytes(const void *at) {
  int32_t x;
  __builtin_memcpy(&x, at, 4);
  return _mm512_set1_epi32(x);
}
KSL_INLINE __m512 floats_of(Lanes x) {
  return _mm512_cvtepi32_ps((__m512i)x);
}
KSL_INLINE const CodeQuery *query_facts(const uint8_t *q, int head_dim) {
  return (const CodeQuery *)(q + head_dim);
}

// ---- scores of R queries, less the scale of the query

// x [R][kTilePieces] vectors of keys, from piece `at` on. `meanwhile` is called kSteps times
// between products, to put other work beside them.
template <int R, class F>
KSL_INLINE void scores_of_bytes(const CodeTile *t, int at, const uint8_t *q, size_t q_step,
                                bool fetch, F meanwhile, __m512 (*x)[kTilePieces]) {
  Lanes sum[R][kTilePieces];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kTilePieces; v++)
      sum[r][v] = (Lanes)_mm512_set1_epi32(query_facts(q + r * q_step, t->head_dim)->bias);
  const uint8_t *k0 = t->k[at], *k1 = t->k[at + 1], *k2 = t->k[at + 2], *k3 = t->k[at + 3];
  const int some = t->head_dim / kSteps;
  for (int step = 0, i = 0; step < kSteps; step++) {
    for (const int end = i + some; i < end; i += 4) {
      const __m512i k[] = {_mm512_load_si512(k0 + 16 * i), _mm512_load_si512(k1 + 16 * i),
                           _mm512_load_si512(k2 + 16 * i), _mm512_load_si512(k3 + 16 * i)};
      if (fetch) {
#pragma GCC unroll 4
        for (int v = 0; v < kTilePieces; v++) __builtin_prefetch(t->next[at + v] + 16 * i, 0, 2);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const __m512i four = four_bytes(q + r * q_step + i);
#pragma GCC unroll 4
        for (int v = 0; v < kTilePieces; v++) dot_bytes(sum[r][v], k[v], four);
      }
    }
    meanwhile(step);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kTilePieces; v++)
      x[r][v] = _mm512_mul_ps(floats_of(sum[r][v]), _mm512_load_ps(t->k_scale[0] + 16 * (at + v)));
}

// Where blocks are smaller than tiles, a part of the next one is fetched.
KSL_INLINE void fetch_from(const KvRun *next, int n_next, CodeTile *t) {
  t->ahead = next;
  t->n_ahead = n_next ? next->n : 0;
  if (!n_next) return;
  const int d = t->head_dim, format = next->format;
  const bool bytes = format == KSL_KV_FP8 || format == KSL_KV_INT8_G64;
  t->ahead_k = bytes ? d : d / 2;
  t->ahead_v = bytes || format == KSL_KV_Q4 ? d : d / 2;
}

// Fetches the key of row i of the next tile, and the scales; its value is fetched between values.
KSL_INLINE void fetch_row(const CodeTile *t, int i) {
  if (i >= t->n_ahead) return;
  const KvRun *run = t->ahead;
  for (int at = 0; at < t->ahead_k; at += 64)
    __builtin_prefetch(run->k + i * run->k_step + at, 0, 2);
  __builtin_prefetch(run->k_scale + i * run->k_scale_step, 0, 2);
  __builtin_prefetch(run->v_scale + i * run->v_scale_step, 0, 2);
}

// [R][kTileKeys]. Two pieces at a time: a vector has eight channels of 16 keys, the even ones in
// the low nibbles.
template <int R>
static void scores_of_nibbles(const CodeTile *t, const uint8_t *q, size_t q_step, bool fetch,
                              float *score) {
  const __m512i low = _mm512_set1_epi8(15);
  const int rows = kMaxHeadDim / t->head_dim;  // to fetch per step
  int row = 0;
  for (int v = 0; v < kTilePieces; v += 2) {
    __m512 total[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
    const uint8_t *k0 = t->k[v], *k1 = t->k[v + 1], *four = q;
    for (int g = 0; g < t->head_dim / kGroupChannels; g++) {
      Lanes sum[R][2];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = (Lanes)_mm512_setzero_si512();
#pragma GCC unroll 4
      for (int i = 0; i < kGroupChannels; i += 8, k0 += 64, k1 += 64, four += 8) {
        for (const int end = row + rows; fetch && row < end; row++) fetch_row(t, row);
        const __m512i a = _mm512_load_si512(k0), b = _mm512_load_si512(k1);
        const __m512i even[] = {_mm512_and_si512(a, low), _mm512_and_si512(b, low)};
        const __m512i odd[] = {_mm512_and_si512(_mm512_srli_epi16(a, 4), low),
                               _mm512_and_si512(_mm512_srli_epi16(b, 4), low)};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const __m512i x = four_bytes(four + r * q_step), y = four_bytes(four + r * q_step + 4);
          dot_bytes(sum[r][0], even[0], x);
          dot_bytes(sum[r][1], even[1], x);
          dot_bytes(sum[r][0], odd[0], y);
          dot_bytes(sum[r][1], odd[1], y);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m512 codes = _mm512_set1_ps(query_facts(q + r * q_step, t->head_dim)->sums[g]);
#pragma GCC unroll 2
        for (int o = 0; o < 2; o++) {
          const __m512 zero = _mm512_load_ps(t->k_zero[g] + 16 * (v + o));
          // Integers below 2^24: exact.
          const __m512 dot = _mm512_fnmadd_ps(zero, codes, floats_of(sum[r][o]));
          total[r][o] =
              _mm512_fmadd_ps(dot, _mm512_load_ps(t->k_scale[g] + 16 * (v + o)), total[r][o]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      _mm512_store_ps(score + r * kTileKeys + 16 * v, total[r][0]);
      _mm512_store_ps(score + r * kTileKeys + 16 * v + 16, total[r][1]);
    }
  }
}

// The same of bytes.
template <int R>
static void scores_of_groups(const CodeTile *t, const uint8_t *q, size_t q_step, bool fetch,
                             float *score) {
  const int rows = kMaxHeadDim / t->head_dim;  // to fetch per eight channels
  int row = 0;
  for (int v = 0; v < kTilePieces; v += 2) {
    __m512 total[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
    const uint8_t *k0 = t->k[v], *k1 = t->k[v + 1], *four = q;
    for (int g = 0; g < t->head_dim / kGroupChannels; g++) {
      Lanes sum[R][2];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const int codes = (int)query_facts(q + r * q_step, t->head_dim)->sums[g];
        sum[r][0] = sum[r][1] = (Lanes)_mm512_set1_epi32(-128 * codes);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kGroupChannels; i += 4, k0 += 64, k1 += 64, four += 4) {
        for (const int end = row + rows; i % 8 == 0 && fetch && row < end; row++) fetch_row(t, row);
        const __m512i a = _mm512_load_si512(k0), b = _mm512_load_si512(k1);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const __m512i x = four_bytes(four + r * q_step);
          dot_bytes(sum[r][0], a, x);
          dot_bytes(sum[r][1], b, x);
        }
      }
      const float *scale = t->k_scale[g * t->scale_step] + 16 * v;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int o = 0; o < 2; o++)
          total[r][o] =
              _mm512_fmadd_ps(floats_of(sum[r][o]), _mm512_load_ps(scale + 16 * o), total[r][o]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      _mm512_store_ps(score + r * kTileKeys + 16 * v, total[r][0]);
      _mm512_store_ps(score + r * kTileKeys + 16 * v + 16, total[r][1]);
    }
  }
}

// ---- probabilities

// 255 times 2^x for x <= 0, to 8e-5 of it, which is less than half of what is rounded away after
// it: a cubic on each [n, n + 1).
KSL_INLINE __m512 short_exp2_255(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 9);  // x - floor(x)
  __m512 q = _mm512_set1_ps(255 * 0x1.3f96a4p-4f);
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(255 * 0x1.cefc4cp-3f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(255 * 0x1.64444cp-1f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(255 * 0x1.fff632p-1f));
  return _mm512_scalef_ps(q, x);  // takes floor(x)
}

// Which keys of vector v are among the first n of the tile.
KSL_INLINE __mmask16 seen_of(int n, int v) {
  const int live = n - 16 * v;
  return live >= 16 ? (__mmask16)0xffff : live > 0 ? lanes_below(live) : (__mmask16)0;
}

// In quad h of lanes of the result: what `join` makes of the lanes of x[h].
template <class F>
KSL_INLINE __m512 reduce_quads(const __m512 *x, F join) {
  const __m512 a =
      join(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xee));
  const __m512 b =
      join(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xee));
  __m512 c = join(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  c = join(c, _mm512_permute_ps(c, 0xb1));
  return join(c, _mm512_permute_ps(c, 0x4e));
}

// The first R of what reduce_quads made.
template <int R>
KSL_INLINE void store_quads_of(__m512 quads, float *to) {
  const __m512 one = _mm512_maskz_compress_ps((__mmask16)0x1111, quads);
  _mm_mask_storeu_ps(to, (__mmask8)((1 << R) - 1), _mm512_castps512_ps128(one));
}

// Which bytes of two vectors of floats 2^15 + x are the integers below x.
struct WholeBytes {
  uint8_t at[64];
  constexpr WholeBytes() : at() {
    for (int i = 0; i < 64; i++) at[i] = (uint8_t)(4 * (i % 32) + 1);
  }
};
alignas(64) constexpr WholeBytes kWholeBytes;

// Queries whose exponents are known, on the way to bytes.
struct Exponents {
  int n;  // of them
  int first;
  alignas(64) float x[kSomeQueries][kCodeKeys];
};

// Of a block's queries: p [.][kCodeKeys] bytes, 255 for what adds most; the exponent that stands
// for; and in 16 parts the sum of probabilities, 255 times relative to it.
struct CodeProbabilities {
  alignas(64) uint8_t p[kBlockQueries * kCodeKeys];
  alignas(64) float sums[kBlockQueries][16];
  alignas(64) float m[kBlockQueries], l[kBlockQueries];
};

// From scores x [R][kTilePieces], of the pieces from `at` on, to exponents of R queries, which see
// the first n_keys of the tile each. of [4]: joined with the largest ones.
template <int R, bool kAll>
KSL_INLINE void exponents_of(const CodeTile *t, int at, const uint8_t *q, size_t q_step,
                             const __m512 (*x)[kTilePieces], const int *n_keys, __m512 *of,
                             Exponents *to) {
#pragma GCC unroll 4
  for (int h = 0; h < R; h++) {
    const __m512 scale = _mm512_set1_ps(query_facts(q + h * q_step, t->head_dim)->scale);
    __m512 e[kTilePieces];
#pragma GCC unroll 4
    for (int v = 0; v < kTilePieces; v++) {
      e[v] = _mm512_fmadd_ps(x[h][v], scale, _mm512_load_ps(t->v_log + 16 * (at + v)));
      if (!kAll)
        e[v] =
            _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), seen_of(n_keys[h], at + v), e[v]);
      _mm512_store_ps(to->x[h] + 16 * (at + v), e[v]);
    }
    // NaN is left out, so that keys which nobody sees change nothing behind it; the sum keeps it.
    of[h] =
        _mm512_max_ps(_mm512_max_ps(_mm512_max_ps(e[0], e[1]), _mm512_max_ps(e[2], e[3])), of[h]);
  }
}

// The probabilities of a query at two vectors of exponents, from the vector `v` of the tile on.
template <bool kAll>
KSL_INLINE void soften_half(const CodeTile *t, __m512 a, __m512 b, __m512 most, int n_keys, int v,
                            uint8_t *p, __m512 &sum) {
  const float *inverse = t->v_inverse + 16 * v;
  a = short_exp2_255(_mm512_sub_ps(a, most));
  b = short_exp2_255(_mm512_sub_ps(b, most));
  if (kAll) {
    sum = _mm512_fmadd_ps(a, _mm512_load_ps(inverse), sum);
    sum = _mm512_fmadd_ps(b, _mm512_load_ps(inverse + 16), sum);
  } else {
    sum = _mm512_fmadd_ps(a, _mm512_maskz_load_ps(seen_of(n_keys, v), inverse), sum);
    sum = _mm512_fmadd_ps(b, _mm512_maskz_load_ps(seen_of(n_keys, v + 1), inverse + 16), sum);
  }
  // In a float at 2^15 the second byte is the integer below.
  const __m512i bytes = _mm512_permutex2var_epi8(
      (__m512i)_mm512_add_ps(a, _mm512_set1_ps(32768.5f)), _mm512_load_si512(kWholeBytes.at),
      (__m512i)_mm512_add_ps(b, _mm512_set1_ps(32768.5f)));
  _mm256_store_si256((__m256i *)(p + 16 * v), _mm512_castsi512_si256(bytes));
}

// One step of kHalves * kSteps: two vectors of a query.
template <bool kAll, int kHalves>
KSL_INLINE void soften_step(const CodeTile *t, const Exponents *e, int step, const int *n_keys,
                            CodeProbabilities *to) {
  const int row = step / (2 * kHalves), v = 2 * (step % (2 * kHalves)), h = e->first + row;
  if (row >= e->n) return;
  const float *x = e->x[row] + 16 * v;
  __m512 sum = v ? _mm512_load_ps(to->sums[h]) : _mm512_setzero_ps();
  soften_half<kAll>(t, _mm512_load_ps(x), _mm512_load_ps(x + 16), _mm512_set1_ps(to->m[h]),
                    n_keys[h], v, to->p + h * kCodeKeys, sum);
  _mm512_store_ps(to->sums[h], sum);
}

// ---- values

// What a tile adds to running results: acc := old acc + fresh sum; a start has no acc.
struct CodeWeights {
  alignas(64) float old[kBlockQueries], fresh[kBlockQueries];
  bool start[kBlockQueries];
};

// Adds 16 N channels from `at` to acc of R queries. A start is what the tile's integers are, so
// that a tile that begins a partial result rounds no more than one that is added.
template <int R, int N>
static __attribute__((noinline)) void values_of_codes(const CodeTile *t, const uint8_t *p, int at,
                                                      bool fetch, const CodeWeights *w, int first,
                                                      float *acc) {
  Lanes sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int o = 0; o < N; o++) sum[r][o] = (Lanes)_mm512_setzero_si512();
  const int pieces = (t->n + kPieceKeys - 1) / kPieceKeys;
  for (int piece = 0; piece < pieces; piece++) {
    const int8_t *v = t->v[piece] + kPieceKeys * at;
    const uint8_t *next =
        fetch && !t->groups ? t->next[piece] + (size_t)kPieceKeys * (t->head_dim + at) : nullptr;
#pragma GCC unroll 4
    for (int j = 0; j < kPieceKeys; j += 4, p += 4, v += 256) {
      __m512i x[N];
#pragma GCC unroll 4
      for (int o = 0; o < N; o++) x[o] = _mm512_load_si512(v + 64 * o);
      if (next) {
#pragma GCC unroll 4
        for (int o = 0; o < N; o++) __builtin_prefetch(next + 64 * (j + o), 0, 2);
      } else if (fetch && at < t->ahead_v) {
        for (int i = kPieceKeys * piece + j, end = i + 4; i < end && i < t->n_ahead; i++)
          __builtin_prefetch(t->ahead->v + i * t->ahead->v_step + at, 0, 2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m512i four = four_bytes(p + r * kCodeKeys);
#pragma GCC unroll 4
        for (int o = 0; o < N; o++) dot_bytes(sum[r][o], four, x[o]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++, acc += t->head_dim) {
    const __m512 fresh = _mm512_set1_ps(w->fresh[first + r]);
    const float old = w->old[first + r];
    __m512 x[N];
#pragma GCC unroll 4
    for (int o = 0; o < N; o++) x[o] = floats_of(sum[r][o]);
    if (w->start[first + r]) {
#pragma GCC unroll 4
      for (int o = 0; o < N; o++) x[o] = _mm512_mul_ps(x[o], fresh);
    } else if (old == 1.0f) {  // as the general case, which is rare
#pragma GCC unroll 4
      for (int o = 0; o < N; o++)
        x[o] = _mm512_fmadd_ps(x[o], fresh, _mm512_loadu_ps(acc + at + 16 * o));
    } else {
#pragma GCC unroll 4
      for (int o = 0; o < N; o++)
        x[o] = _mm512_fmadd_ps(
            x[o], fresh, _mm512_mul_ps(_mm512_loadu_ps(acc + at + 16 * o), _mm512_set1_ps(old)));
    }
#pragma GCC unroll 4
    for (int o = 0; o < N; o++) _mm512_storeu_ps(acc + at + 16 * o, x[o]);
  }
}

// ---- a tile

// All queries of a call on rows of q4 (attn_q4.inl).
static void scores_of_rows(const CodeTile *t, const uint8_t *q, size_t q_step, int queries,
                           float *score);
static void values_of_rows(const CodeTile *t, const uint8_t *p, int queries, const CodeWeights *w,
                           float *acc);

// Probabilities of at most kBlockQueries queries. The exponentials of some are made between the
// scores of the next ones, since the products leave half of the machine idle.
template <bool kGroups, bool kAll, int kHalves>
static void soften_block(const CodeTile *t, const uint8_t *q, size_t q_step, int queries,
                         const int *n_keys, bool ahead, CodeProbabilities *to) {
  alignas(64) float score[kGroups ? kSomeQueries * kTileKeys : 1];
  if (kGroups && t->rows) scores_of_rows(t, q, q_step, queries, score);
  Exponents both[2], *last = both;
  last->n = 0;
  const auto soften = [&](int step) __attribute__((always_inline)) {
    soften_step<kAll, kHalves>(t, last, step, n_keys, to);
  };
  int done = 0;
  const auto some = [&](auto rows) {
    constexpr int R = rows.n;
    for (; done + R <= queries; done += R) {
      const uint8_t *from = q + done * q_step;
      Exponents *now = last == both ? both + 1 : both;
      const __m512 none = _mm512_set1_ps(-__builtin_inff());
      __m512 of[4] = {none, none, none, none};
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; half++) {
        __m512 x[R][kTilePieces];
        if (kGroups) {
          const float *at = score;
          if (t->rows)
            at += done * kTileKeys;
          else if (t->nibbles)
            scores_of_nibbles<R>(t, from, q_step, ahead, score);
          else
            scores_of_groups<R>(t, from, q_step, ahead, score);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < kTilePieces; v++)
              x[r][v] = _mm512_load_ps(at + r * kTileKeys + 16 * v);
        } else {
          scores_of_bytes<R>(
              t, half * kTilePieces, from, q_step, ahead,
              [&](int step) __attribute__((always_inline)) { soften(half * kSteps + step); }, x);
        }
        exponents_of<R, kAll>(t, half * kTilePieces, from, q_step, x, n_keys + done, of, now);
      }
      ahead = false;
      const __m512 most = reduce_quads(of, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
      store_quads_of<R>(most, to->m + done);
      now->n = R;
      now->first = done;
      last = now;
      if (!kGroups) continue;
      for (int step = 0; step < 2 * R; step++) soften(step);
      last->n = 0;
    }
  };
  some(Count<kSomeQueries>());
  some(Count<2>());
  some(Count<1>());
  for (int step = 0; step < 2 * kHalves * last->n; step++) soften(step);
  for (int h = queries; h % 4; h++) _mm512_store_ps(to->sums[h], _mm512_setzero_ps());
  for (int h = 0; h < queries; h += 4) {
    __m512 of[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) of[r] = _mm512_load_ps(to->sums[h + r]);
    store_quads_of<4>(reduce_quads(of, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); }),
                      to->l + h);
  }
}

// Adds the tile to at most kBlockQueries queries, which see at least one key each.
static void attn_block_codes(const CodeTile *t, const uint8_t *q, size_t q_step, int queries,
                             const int *n_keys, bool fetch, float *m, float *l, float *acc) {
  CodeProbabilities p;
  CodeWeights w;
  // Where nobody sees the second half of a tile, leaving it out changes nothing.
  const bool whole = !t->groups && t->n > kTileKeys;
  const bool all = n_keys[0] >= (whole ? (int)kCodeKeys : (int)kTileKeys);  // ascending
  const auto soften = t->groups ? all ? soften_block<true, true, 1> : soften_block<true, false, 1>
                      : whole   ? all ? soften_block<false, true, 2> : soften_block<false, false, 2>
                      : all     ? soften_block<false, true, 1>
                                : soften_block<false, false, 1>;
  soften(t, q, q_step, queries, n_keys, fetch, &p);
  bool ahead = fetch;
  for (int h = 0; h < queries; h++) w.start[h] = m[h] == -__builtin_inff() && l[h] == 0.0f;
  each_vector(queries, [&](int h, auto load, auto store) {  // as attn_combine
    const V before = load(m + h), now = load(p.m + h), most = v_max(now, before);
    const V old = v_exp2(v_sub(before, most)), fresh = v_exp2(v_sub(now, most));
    store(w.old + h, old);
    store(w.fresh + h, fresh);
    store(m + h, most);
    store(l + h, v_fma(load(p.l + h), fresh, v_mul(load(l + h), old)));
  });
  if (t->rows) {
    values_of_rows(t, p.p, queries, &w, acc);
    return;
  }
  each_rows(queries, [&](auto rows, int r) {
    const uint8_t *of = p.p + r * kCodeKeys;
    float *to = acc + (size_t)r * t->head_dim;
    int at = 0;
    for (; at + 64 <= t->head_dim; at += 64)
      values_of_codes<rows.n, 4>(t, of, at, ahead, &w, r, to);
    if (at < t->head_dim) values_of_codes<rows.n, 2>(t, of, at, ahead, &w, r, to);
    ahead = false;
  });
}

static void attn_columns_codes(const CodeTile *t, const uint8_t *q, size_t q_step, int group,
                               int columns, const int *n_keys, float *m, float *l, float *acc) {
  int c = 0;
  while (c < columns && n_keys[c] <= 0) c++;
  bool fetch = t->groups ? t->n_ahead > 0 : t->next[0] != nullptr;
  const int end = columns * group;
  int of_column = 0;
  for (int h = c * group, n; h < end; h += n) {
    n = end - h < kBlockQueries ? end - h : (int)kBlockQueries;
    int sees[kBlockQueries];
    for (int i = 0; i < n; i++) {
      sees[i] = n_keys[c];
      if (++of_column == group) of_column = 0, c++;
    }
    attn_block_codes(t, q + h * q_step, q_step, n, sees, fetch, m + h, l + h,
                     acc + (size_t)h * t->head_dim);
    fetch = false;
  }
}

// A query as bytes: code times absmax / 127. `paired`: of each eight channels first the even ones.
static void attn_query_codes(const float *q, int head_dim, float scale, bool paired, void *out) {
  __m512 most = _mm512_setzero_ps(), sum = most;
  for (int i = 0; i < head_dim; i += 16) {
    const __m512 x = _mm512_loadu_ps(q + i);
    most = _mm512_max_ps(most, _mm512_abs_ps(x));
    sum = _mm512_add_ps(sum, _mm512_sub_ps(x, x));  // NaN of infinities, and stays
  }
  const float top = v_hmax({most}), spoilt = v_hsum({sum});
  const bool some = top >= 0x1p-100f;
  const __m512 inverse = _mm512_set1_ps(some ? 127.0f / top : 0.0f);
  uint8_t *to = (uint8_t *)out;
  CodeQuery *facts = (CodeQuery *)(to + head_dim);
  int total = 0;
  for (int g = 0; g < head_dim / kGroupChannels; g++) {
    const float *from = q + kGroupChannels * g;
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from), inverse));
    const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from + 16), inverse));
    const int of_group = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
    __m256i codes = _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
    if (paired)
      codes = _mm256_shuffle_epi8(
          codes, _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4, 6,
                                  1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    _mm256_storeu_si256((__m256i *)(to + kGroupChannels * g), codes);
    facts->sums[g] = (float)of_group;
    total += of_group;
  }
  facts->scale = (some ? top * (1.0f / 127) * scale : 0.0f) + spoilt;
  facts->bias = -128 * total;
}

static void attn_query_bytes(const float *q, int head_dim, float scale, void *out) {
  attn_query_codes(q, head_dim, scale, false, out);
}

static void attn_tile_codes(const uint8_t *const *pieces, const uint8_t *const *next, int n_next,
                            const void *q, int group, int columns, const int *n_keys, int head_dim,
                            float *m, float *l, float *acc) {
  CodeTile t;
  t.n = n_keys[columns - 1];
  if (t.n <= 0) return;
  t.head_dim = head_dim;
  t.groups = t.nibbles = false;
  t.rows = nullptr;
  const int n = (t.n + kPieceKeys - 1) / kPieceKeys;
  for (int i = 0; i < kCodePieces; i++) {
    // Nothing is written.
    const CodePiece piece = code_piece(const_cast<uint8_t *>(pieces[i < n ? i : n - 1]), head_dim);
    t.k[i] = piece.k;
    t.v[i] = (const int8_t *)piece.v;
    _mm512_store_ps(t.k_scale[0] + kPieceKeys * i, _mm512_load_ps(piece.k_scale));
    _mm512_store_ps(t.v_log + kPieceKeys * i, _mm512_load_ps(piece.v_log));
    _mm512_store_ps(t.v_inverse + kPieceKeys * i, _mm512_load_ps(piece.v_inverse));
    t.next[i] = n_next ? next[i < n_next ? i : n_next - 1] : nullptr;
  }
  attn_columns_codes(&t, (const uint8_t *)q, 4 * (size_t)head_dim, group, columns, n_keys, m, l,
                     acc);
}

}  // namespace
}  // namespace ksl
