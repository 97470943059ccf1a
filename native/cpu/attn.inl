// Attention in float32 over one tile of keys: scores, softmax, values, and the combination with
// earlier tiles.
//
// A score is a dot product with 16 lanes over head_dim, then v_hsum. Probabilities of absent keys
// are exact zeros in fixed lanes, and values are added in ascending key order.
#include "attn.h"
#include "kernels.h"

namespace ksl {
namespace {

struct RowF32 {
  KSL_INLINE V load(const void *row, int at) { return v_load((const float *)row + at); }
  KSL_INLINE V load_n(const void *row, int at, int n) {
    return v_load_n((const float *)row + at, n);
  }
};
struct RowBf16 {
  KSL_INLINE V load(const void *row, int at) { return v_load_bf16((const uint16_t *)row + at); }
  KSL_INLINE V load_n(const void *row, int at, int n) {
    return v_load_bf16_n((const uint16_t *)row + at, n);
  }
};

// ---- rows of the compact formats in float32

KSL_INLINE float kv_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
KSL_INLINE float kv_half(const uint8_t *at) {
  uint16_t h;
  __builtin_memcpy(&h, at, 2);
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
  const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00 ? 224u << 23 : 112u << 23);
  const float low = (float)(int)magnitude * 0x1p-24f;
  const float value = magnitude < 0x400 ? low : kv_float(normal);
  return sign ? -value : value;
}

static void floats_of_e4m3(const uint8_t *codes, const uint8_t *scale_at, int d, float *out) {
  float scale;
  __builtin_memcpy(&scale, scale_at, 4);
  for (int i = 0; i < d; i++) {
    const uint32_t m = codes[i] & 0x7f;
    const float low = (float)(int)m * 0x1p-9f;
    const float high = m == 0x7f ? kv_float(0x7fc00000) : kv_float((m << 20) + (120u << 23));
    const float value = m < 8 ? low : high;
    out[i] = (codes[i] & 0x80 ? -value : value) * scale;
  }
}
static void floats_of_int8(const uint8_t *codes, const uint8_t *scales, int d, float *out) {
  for (int g = 0; g < d / 64; g++) {
    const float scale = kv_half(scales + 2 * g);
    for (int i = 64 * g; i < 64 * g + 64; i++) out[i] = (float)(int8_t)codes[i] * scale;
  }
}
// Codes of 32 channels, less `zero`, times `scale`.
KSL_INLINE void floats_of_nibbles(const uint8_t *codes, float zero, float scale, float *out) {
  for (int i = 0; i < 16; i++) {
    out[2 * i] = ((float)(codes[i] & 15) - zero) * scale;
    out[2 * i + 1] = ((float)(codes[i] >> 4) - zero) * scale;
  }
}

static void kv_floats(int format, bool value, const uint8_t *codes, const uint8_t *scales, int d,
                      float *out) {
  if (format == KSL_KV_FP8 || (format == KSL_KV_Q4 && value)) {
    floats_of_e4m3(codes, scales, d, out);
  } else if (format == KSL_KV_INT8_G64) {
    floats_of_int8(codes, scales, d, out);
  } else if (format == KSL_KV_Q4) {
    for (int g = 0; g < d / 32; g++)
      floats_of_nibbles(codes + 16 * g, kv_half(scales + 4 * g + 2), kv_half(scales + 4 * g),
                        out + 32 * g);
  } else {
    for (int g = 0; g < d / 32; g++)
      floats_of_nibbles(codes + 16 * g, 8.0f, kv_half(scales + 2 * g), out + 32 * g);
  }
}

// ---- one tile

// Scores of H heads from `q` and all keys; the columns of absent keys are left alone.
template <class Row, int H>
KSL_INLINE void scores(const float *q, int head_dim, const void *const *k_rows, int n_keys,
                       float *score) {
  const int whole = head_dim & ~15;
  for (int j0 = 0; j0 < n_keys; j0 += kScoreKeys) {
    const void *rows[kScoreKeys];
    for (int j = 0; j < kScoreKeys; j++) rows[j] = k_rows[j0 + j < n_keys ? j0 + j : n_keys - 1];
    V sum[H][kScoreKeys];
    for (int h = 0; h < H; h++)
      for (int j = 0; j < kScoreKeys; j++) sum[h][j] = v_zero();
    for (int i = 0; i < whole; i += 16) {
      V k[kScoreKeys];
      for (int j = 0; j < kScoreKeys; j++) k[j] = Row::load(rows[j], i);
      for (int h = 0; h < H; h++) {
        const V a = v_load(q + h * head_dim + i);
        for (int j = 0; j < kScoreKeys; j++) sum[h][j] = v_fma(a, k[j], sum[h][j]);
      }
    }
    if (whole < head_dim) {
      const int m = head_dim - whole;
      for (int h = 0; h < H; h++) {
        const V a = v_load_n(q + h * head_dim + whole, m);
        for (int j = 0; j < kScoreKeys; j++)
          sum[h][j] = v_fma(a, Row::load_n(rows[j], whole, m), sum[h][j]);
      }
    }
    for (int h = 0; h < H; h++)
      for (int j = 0; j < kScoreKeys && j0 + j < n_keys; j++)
        score[h * kTileKeys + j0 + j] = v_hsum(sum[h][j]);
  }
}

// acc of H heads for N vectors of values from `at`; the last vector has `last` lanes.
template <class Row, int H, int N, bool kPartial>
KSL_INLINE void values(const float *p, const void *const *v_rows, int n_keys, int at, int last,
                       float *acc, int head_dim) {
  V sum[H][N];
  for (int h = 0; h < H; h++)
    for (int i = 0; i < N; i++) sum[h][i] = v_zero();
  for (int j = 0; j < n_keys; j++) {
    V v[N];
    for (int i = 0; i < N; i++)
      v[i] =
          kPartial ? Row::load_n(v_rows[j], at + 16 * i, last) : Row::load(v_rows[j], at + 16 * i);
    for (int h = 0; h < H; h++) {
      const V pj = v_set1(p[h * kTileKeys + j]);
      for (int i = 0; i < N; i++) sum[h][i] = v_fma(pj, v[i], sum[h][i]);
    }
  }
  for (int h = 0; h < H; h++)
    for (int i = 0; i < N; i++) {
      float *out = acc + h * head_dim + at + 16 * i;
      if (kPartial)
        v_store_n(out, sum[h][i], last);
      else
        v_store(out, sum[h][i]);
    }
}

// In place: scores of one head become 2^(score - maximum); their maximum and sum.
KSL_INLINE void soften(float *s, float *m, float *l) {
  V high = v_load(s);
  for (int i = 16; i < kTileKeys; i += 16) high = v_max(high, v_load(s + i));
  *m = v_hmax(high);
  const V shift = v_set1(*m);
  V sum = v_zero();
  for (int i = 0; i < kTileKeys; i += 16) {
    const V p = v_exp2(v_sub(v_load(s + i), shift));
    v_store(s + i, p);
    sum = v_add(sum, p);
  }
  *l = v_hsum(sum);
}

static void attn_combine(float *ma, float *la, float *acca, float mb, float lb, const float *accb,
                         int head_dim) {
  const float none = -__builtin_inff();
  if (mb == none && lb == 0.0f) return;
  if (*ma == none && *la == 0.0f) {
    *ma = mb;
    *la = lb;
    each_vector(head_dim, [&](int i, auto load, auto store) { store(acca + i, load(accb + i)); });
    return;
  }
  const float m = *ma > mb ? *ma : mb;
  const V ca = v_exp2(v_set1(*ma - m)), cb = v_exp2(v_set1(mb - m));
  *ma = m;
  *la = v_lane0(v_fma(v_set1(lb), cb, v_mul(v_set1(*la), ca)));
  each_vector(head_dim, [&](int i, auto load, auto store) {
    store(acca + i, v_fma(load(accb + i), cb, v_mul(load(acca + i), ca)));
  });
}

template <class Row, int H>
static void attn_heads(const float *q, int head_dim, const void *const *k_rows,
                       const void *const *v_rows, int n_keys, float *m, float *l, float *acc) {
  enum { kTogether = kScoreHeads < H ? kScoreHeads : H };
  alignas(64) float score[H * kTileKeys], tile_acc[H * kMaxHeadDim];
  const V absent = v_set1(-__builtin_inff());
  for (int i = 0; i < H * kTileKeys; i += 16) v_store(score + i, absent);
  for (int h = 0; h < H; h += kTogether)
    scores<Row, kTogether>(q + h * head_dim, head_dim, k_rows, n_keys, score + h * kTileKeys);
  float tile_m[H], tile_l[H];
  for (int h = 0; h < H; h++) soften(score + h * kTileKeys, &tile_m[h], &tile_l[h]);
  int at = 0;
  for (; at + 64 <= head_dim; at += 64)
    values<Row, H, 4, false>(score, v_rows, n_keys, at, 16, tile_acc, head_dim);
  for (; at + 16 <= head_dim; at += 16)
    values<Row, H, 1, false>(score, v_rows, n_keys, at, 16, tile_acc, head_dim);
  if (at < head_dim)
    values<Row, H, 1, true>(score, v_rows, n_keys, at, head_dim - at, tile_acc, head_dim);
  for (int h = 0; h < H; h++)
    attn_combine(&m[h], &l[h], acc + h * head_dim, tile_m[h], tile_l[h], tile_acc + h * head_dim,
                 head_dim);
}

template <class Row>
static void attn_queries(const float *q, int queries, int head_dim, const void *const *k_rows,
                         const void *const *v_rows, int n_keys, float *m, float *l, float *acc) {
  int h = 0;
  for (; h + kHeadBlock <= queries; h += kHeadBlock)
    attn_heads<Row, kHeadBlock>(q + (size_t)h * head_dim, head_dim, k_rows, v_rows, n_keys, m + h,
                                l + h, acc + (size_t)h * head_dim);
  for (; h + 2 <= queries; h += 2)
    attn_heads<Row, 2>(q + (size_t)h * head_dim, head_dim, k_rows, v_rows, n_keys, m + h, l + h,
                       acc + (size_t)h * head_dim);
  for (; h < queries; h++)
    attn_heads<Row, 1>(q + (size_t)h * head_dim, head_dim, k_rows, v_rows, n_keys, m + h, l + h,
                       acc + (size_t)h * head_dim);
}

// Calls f(first, end, keys) for the columns that see the same keys, if any.
template <class F>
KSL_INLINE void each_span(int columns, const int *n_keys, F f) {
  for (int c = 0, end; c < columns; c = end) {
    for (end = c + 1; end < columns && n_keys[end] == n_keys[c];) end++;
    if (n_keys[c] > 0) f(c, end, n_keys[c]);
  }
}

template <class Row>
static void attn_spans(const float *q, int group, int columns, const int *n_keys, int head_dim,
                       const void *const *k_rows, const void *const *v_rows, float *m, float *l,
                       float *acc) {
  each_span(columns, n_keys, [&](int c, int end, int keys) {
    const size_t h = (size_t)c * group;
    attn_queries<Row>(q + h * head_dim, (end - c) * group, head_dim, k_rows, v_rows, keys, m + h,
                      l + h, acc + h * head_dim);
  });
}

static void attn_query(int, const float *q, int head_dim, float scale, void *out) {
  const V factor = v_set1(scale);
  float *to = (float *)out;
  each_vector(head_dim,
              [&](int i, auto load, auto store) { store(to + i, v_mul(load(q + i), factor)); });
}

static void attn_tile(const KvRun *runs, int n_runs, const KvRun *, int, const void *q, int group,
                      int columns, const int *n_keys, int head_dim, uint8_t *scratch, float *m,
                      float *l, float *acc) {
  const int most = n_keys[columns - 1];
  if (most <= 0) return;
  const void *k_rows[kTileKeys], *v_rows[kTileKeys];
  float *at = (float *)scratch;
  int n = 0;
  for (int r = 0; r < n_runs; r++) {
    const KvRun *run = &runs[r];
    const bool direct = run->format == KSL_KV_F32 || run->format == KSL_KV_BF16;
    for (int i = 0; i < run->n && n < most; i++, n++) {
      k_rows[n] = run->k + i * run->k_step;
      v_rows[n] = run->v + i * run->v_step;
      if (direct) continue;
      kv_floats(run->format, false, (const uint8_t *)k_rows[n],
                run->k_scale + i * run->k_scale_step, head_dim, at);
      k_rows[n] = at;
      at += head_dim;
      kv_floats(run->format, true, (const uint8_t *)v_rows[n], run->v_scale + i * run->v_scale_step,
                head_dim, at);
      v_rows[n] = at;
      at += head_dim;
    }
  }
  if (runs[0].format == KSL_KV_BF16)
    attn_spans<RowBf16>((const float *)q, group, columns, n_keys, head_dim, k_rows, v_rows, m, l,
                        acc);
  else
    attn_spans<RowF32>((const float *)q, group, columns, n_keys, head_dim, k_rows, v_rows, m, l,
                       acc);
}

static void attn_finish(const float *acc, float l, int head_dim, float *out) {
  const V divisor = v_set1(l);
  each_vector(head_dim,
              [&](int i, auto load, auto store) { store(out + i, v_div(load(acc + i), divisor)); });
}

}  // namespace
}  // namespace ksl
