// Attention over one tile of keys, its combination with earlier tiles, and KV row storage.
//
// A score is a dot product with 16 lanes over head_dim, then v_hsum: a function of one query and
// one key. Probabilities of absent keys are exact zeros in fixed lanes, and values are added in
// ascending key order, so a tile's result is a function of its visible keys only.
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

static void kv_store(int format, const float *x, int n, void *row) {
  int i = 0;
  if (format == KSL_KV_BF16) {
    uint16_t *to = (uint16_t *)row;
    for (; i + 16 <= n; i += 16) v_store_bf16(to + i, v_load(x + i));
    if (i < n) v_store_bf16_n(to + i, v_load_n(x + i, n - i), n - i);
  } else {
    float *to = (float *)row;
    for (; i + 16 <= n; i += 16) v_store(to + i, v_load(x + i));
    if (i < n) v_store_n(to + i, v_load_n(x + i, n - i), n - i);
  }
}

// Scores of H heads from `q` and all keys; the columns of absent keys are left alone.
template <class Row, int H>
KSL_INLINE void scores(const float *q, size_t q_stride, int head_dim, const void *const *k_rows,
                       int n_keys, float *score) {
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
        const V a = v_load(q + h * q_stride + i);
        for (int j = 0; j < kScoreKeys; j++) sum[h][j] = v_fma(a, k[j], sum[h][j]);
      }
    }
    if (whole < head_dim) {
      const int m = head_dim - whole;
      for (int h = 0; h < H; h++) {
        const V a = v_load_n(q + h * q_stride + whole, m);
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

template <class Row, int H>
static void attn_heads(const float *q, size_t q_stride, int head_dim, const void *const *k_rows,
                       const void *const *v_rows, int n_keys, float *m, float *l, float *acc) {
  alignas(64) float score[H * kTileKeys];
  const V absent = v_set1(-__builtin_inff());
  for (int i = 0; i < H * kTileKeys; i += 16) v_store(score + i, absent);
  if (H == 1) {
    scores<Row, 1>(q, q_stride, head_dim, k_rows, n_keys, score);
  } else {
    for (int h = 0; h < H; h += kScoreHeads < H ? kScoreHeads : H)
      scores<Row, (kScoreHeads < H ? kScoreHeads : H)>(q + h * q_stride, q_stride, head_dim, k_rows,
                                                       n_keys, score + h * kTileKeys);
  }
  for (int h = 0; h < H; h++) {
    float *s = score + h * kTileKeys;
    V high = v_load(s);
    for (int i = 16; i < kTileKeys; i += 16) high = v_max(high, v_load(s + i));
    m[h] = v_hmax(high);
    const V shift = v_set1(m[h]);
    V sum = v_zero();
    for (int i = 0; i < kTileKeys; i += 16) {
      const V p = v_exp(v_sub(v_load(s + i), shift));
      v_store(s + i, p);
      sum = v_add(sum, p);
    }
    l[h] = v_hsum(sum);
  }
  int at = 0;
  for (; at + 64 <= head_dim; at += 64)
    values<Row, H, 4, false>(score, v_rows, n_keys, at, 16, acc, head_dim);
  for (; at + 16 <= head_dim; at += 16)
    values<Row, H, 1, false>(score, v_rows, n_keys, at, 16, acc, head_dim);
  if (at < head_dim)
    values<Row, H, 1, true>(score, v_rows, n_keys, at, head_dim - at, acc, head_dim);
}

template <class Row>
static void attn_group(const float *q, size_t q_stride, int group, int head_dim,
                       const void *const *k_rows, const void *const *v_rows, int n_keys, float *m,
                       float *l, float *acc) {
  int h = 0;
  for (; h + kHeadBlock <= group; h += kHeadBlock)
    attn_heads<Row, kHeadBlock>(q + h * q_stride, q_stride, head_dim, k_rows, v_rows, n_keys, m + h,
                                l + h, acc + (size_t)h * head_dim);
  for (; h + 2 <= group; h += 2)
    attn_heads<Row, 2>(q + h * q_stride, q_stride, head_dim, k_rows, v_rows, n_keys, m + h, l + h,
                       acc + (size_t)h * head_dim);
  for (; h < group; h++)
    attn_heads<Row, 1>(q + h * q_stride, q_stride, head_dim, k_rows, v_rows, n_keys, m + h, l + h,
                       acc + (size_t)h * head_dim);
}

static void attn_tile(int format, const float *q, size_t q_stride, int group, int head_dim,
                      const void *const *k_rows, const void *const *v_rows, int n_keys, float *m,
                      float *l, float *acc) {
  if (n_keys <= 0) {
    for (int h = 0; h < group; h++) {
      m[h] = -__builtin_inff();
      l[h] = 0.0f;
    }
    for (int i = 0; i < group * head_dim; i++) acc[i] = 0.0f;
  } else if (format == KSL_KV_BF16) {
    attn_group<RowBf16>(q, q_stride, group, head_dim, k_rows, v_rows, n_keys, m, l, acc);
  } else {
    attn_group<RowF32>(q, q_stride, group, head_dim, k_rows, v_rows, n_keys, m, l, acc);
  }
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
  const V ca = v_exp(v_set1(*ma - m)), cb = v_exp(v_set1(mb - m));
  *ma = m;
  *la = v_lane0(v_fma(v_set1(lb), cb, v_mul(v_set1(*la), ca)));
  each_vector(head_dim, [&](int i, auto load, auto store) {
    store(acca + i, v_fma(load(accb + i), cb, v_mul(load(acca + i), ca)));
  });
}

static void attn_finish(const float *acc, float l, int head_dim, float *out) {
  const V divisor = v_set1(l);
  each_vector(head_dim,
              [&](int i, auto load, auto store) { store(out + i, v_div(load(acc + i), divisor)); });
}

}  // namespace
}  // namespace ksl
