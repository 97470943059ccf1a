// The gated delta rule as a token recurrence over a block of value columns. Lanes are value
// columns, so a column's bits depend on nothing beside it; sums over the key dimension ascend in
// one accumulator.
//
// Per token, with the state S before it:
//   d = beta (v - decay (k S)),  S := k d + decay S,  o = q S
// which is the rule "decay, predict, correct, read" with the decay drawn out of the prediction. One
// pass over S updates it for a token, reads its output and predicts for the next token, so every
// element is loaded and stored once per token. The first prediction is made while S is copied from
// the slab into a block that stays in L1; its order of additions is that of the pass, so cutting a
// row anywhere changes no bit.
//
// A replay does the first half of that again for tokens whose d is known: the same products in the
// same order, so the same bits, without predictions and outputs.
#include "kernels.h"

namespace ksl {
namespace {

// Column vector j of a row: full, partial or empty.
KSL_INLINE V scan_load(const float *p, int j, int nv) {
  const int m = nv - 16 * j;
  return m >= 16 ? v_load(p + 16 * j) : v_load_n(p + 16 * j, m);
}
KSL_INLINE void scan_store(float *p, V a, int j, int nv) {
  const int m = nv - 16 * j;
  if (m >= 16)
    v_store(p + 16 * j, a);
  else
    v_store_n(p + 16 * j, a, m);
}

template <int N>
static void scan_copy_out(const float *block, int dk, size_t dv, int nv, float *state) {
  for (int i = 0; i < dk; i++)
    for (int j = 0; j < N; j++) scan_store(state + i * dv, v_load(block + (i * N + j) * 16), j, nv);
}

// S := k d + decay S and o = q S; with kNext also the prediction for the next token's key. The
// state is read at `from`, rows of `from_stride` floats, and written at `to`, alike.
template <int N, bool kNext>
KSL_INLINE void scan_token(const float *k, const float *q, const float *next, V g, const V *d,
                           int dk, const float *from, size_t from_stride, float *to,
                           size_t to_stride, V *o, V *predicted, const float *fetch = nullptr) {
  V out[N], ahead[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; j++) out[j] = ahead[j] = v_zero();
  for (int i = 0; i < dk; i++) {
    const V ki = v_set1(k[i]), qi = v_set1(q[i]), ni = kNext ? v_set1(next[i]) : v_zero();
    if (fetch)
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) __builtin_prefetch(fetch + i * to_stride + j * 16, 1, 2);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      const V s = v_fma(ki, d[j], v_mul(g, v_load(from + i * from_stride + j * 16)));
      v_store(to + i * to_stride + j * 16, s);
      out[j] = v_fma(qi, s, out[j]);
      if (kNext) ahead[j] = v_fma(ni, s, ahead[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; j++) {
    o[j] = out[j];
    predicted[j] = ahead[j];
  }
}

// N vectors of 16 columns.
template <int N>
static void scan(const float *q, const float *k, size_t qk_stride, const float *v, float *out,
                 size_t v_stride, size_t out_stride, const float *decay, const float *beta,
                 size_t g_stride, int n, int dk, size_t dv, int nv, const float *state,
                 float *after, float *delta, size_t delta_stride, int n_cuts, const int *cut_at,
                 float *const *cut_state) {
  alignas(64) float block[kMaxKeyDim * N * 16];
  // The last token may write where its state goes instead of the block.
  const bool last_out = after && nv == 16 * N && (n_cuts == 0 || cut_at[n_cuts - 1] != n);
  // A single token needs no block at all: the slab's lines are in L1 for its second reading.
  const bool copied = n > 1 || !last_out;
  V predicted[N];
  for (int j = 0; j < N; j++) predicted[j] = v_zero();
  for (int i = 0; i < dk; i++) {
    const V ki = v_set1(k[i]);
    for (int j = 0; j < N; j++) {
      const V s = scan_load(state + i * dv, j, nv);
      if (copied) v_store(block + (i * N + j) * 16, s);
      predicted[j] = v_fma(ki, s, predicted[j]);
    }
  }
  int cut = 0;
  for (int t = 0; t < n; t++) {
    const float *kt = k + t * qk_stride, *qt = q + t * qk_stride;
    const V g = v_set1(decay[t * g_stride]), b = v_set1(beta[t * g_stride]);
    V d[N], o[N];
    for (int j = 0; j < N; j++) {
      d[j] = v_mul(b, v_fnma(g, predicted[j], scan_load(v + t * v_stride, j, nv)));
      if (delta) scan_store(delta + t * delta_stride, d[j], j, nv);
    }
    if (t + 1 < n)
      scan_token<N, true>(kt, qt, kt + qk_stride, g, d, dk, block, 16 * N, block, 16 * N, o,
                          predicted);
    else if (last_out)
      scan_token<N, false>(kt, qt, nullptr, g, d, dk, copied ? block : state, copied ? 16 * N : dv,
                           after, dv, o, predicted);
    else
      scan_token<N, false>(kt, qt, nullptr, g, d, dk, block, 16 * N, block, 16 * N, o, predicted);
    for (int j = 0; j < N; j++) scan_store(out + t * out_stride, o[j], j, nv);
    for (; cut < n_cuts && cut_at[cut] == t + 1; cut++)
      scan_copy_out<N>(block, dk, dv, nv, cut_state[cut]);
  }
  if (after && !last_out) scan_copy_out<N>(block, dk, dv, nv, after);
}

// One token, in place, for 16 N columns: lines come and go in order, as the memory's own prefetcher
// likes them. The same additions as above. The second pass finds its lines in the caches, so the
// memory is free to bring as much of `next`.
template <int N>
static void scan_step(const float *q, const float *k, const float *v, float *out, float decay,
                      float beta, int dk, size_t dv, float *state, const float *next) {
  V predicted[N], d[N], o[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; j++) predicted[j] = v_zero();
  for (int i = 0; i < dk; i++) {
    const V ki = v_set1(k[i]);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++)
      predicted[j] = v_fma(ki, v_load(state + i * dv + 16 * j), predicted[j]);
  }
  const V g = v_set1(decay), b = v_set1(beta);
#pragma GCC unroll 8
  for (int j = 0; j < N; j++) d[j] = v_mul(b, v_fnma(g, predicted[j], v_load(v + 16 * j)));
  scan_token<N, false>(k, q, nullptr, g, d, dk, state, dv, state, dv, o, predicted, next);
#pragma GCC unroll 8
  for (int j = 0; j < N; j++) v_store(out + 16 * j, o[j]);
}

static void delta_scan(const float *q, const float *k, size_t qk_stride, const float *v, float *out,
                       size_t v_stride, size_t out_stride, const float *decay, const float *beta,
                       size_t g_stride, int n, int dk, size_t dv, int nv, const float *state,
                       float *after, float *delta, size_t delta_stride, int n_cuts,
                       const int *cut_at, float *const *cut_state) {
  if (n <= 0) return;
  if (nv <= 16)
    scan<1>(q, k, qk_stride, v, out, v_stride, out_stride, decay, beta, g_stride, n, dk, dv, nv,
            state, after, delta, delta_stride, n_cuts, cut_at, cut_state);
  else
    scan<2>(q, k, qk_stride, v, out, v_stride, out_stride, decay, beta, g_stride, n, dk, dv, nv,
            state, after, delta, delta_stride, n_cuts, cut_at, cut_state);
}

// R rows of the state through all tokens, in registers.
template <int N, int R>
KSL_INLINE void replay_rows(const float *k, size_t k_stride, const float *d, size_t d_stride,
                            const float *decay, size_t g_stride, int n, size_t dv, int nv,
                            float *state) {
  V s[R][N];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j++) s[r][j] = scan_load(state + r * dv, j, nv);
  for (int t = 0; t < n; t++) {
    const V g = v_set1(decay[t * g_stride]);
    V dt[N];
    for (int j = 0; j < N; j++) dt[j] = scan_load(d + t * d_stride, j, nv);
    for (int r = 0; r < R; r++) {
      const V kr = v_set1(k[t * k_stride + r]);
      for (int j = 0; j < N; j++) s[r][j] = v_fma(kr, dt[j], v_mul(g, s[r][j]));
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j++) scan_store(state + r * dv, s[r][j], j, nv);
}

// As many rows as registers hold.
template <int N>
static void replay(const float *k, size_t k_stride, const float *d, size_t d_stride,
                   const float *decay, size_t g_stride, int n, int dk, size_t dv, int nv,
                   float *state) {
  enum { R = N > 2 ? 2 : 4 };
  int i = 0;
  for (; i + R <= dk; i += R)
    replay_rows<N, R>(k + i, k_stride, d, d_stride, decay, g_stride, n, dv, nv, state + i * dv);
  for (; i < dk; i++)
    replay_rows<N, 1>(k + i, k_stride, d, d_stride, decay, g_stride, n, dv, nv, state + i * dv);
}

static void delta_replay(const float *k, size_t k_stride, const float *d, size_t d_stride,
                         const float *decay, size_t g_stride, int n, int dk, size_t dv, int nv,
                         float *state) {
  int c = 0;
  for (; c + 16 * kStepVectors <= nv; c += 16 * kStepVectors)
    replay<kStepVectors>(k, k_stride, d + c, d_stride, decay, g_stride, n, dk, dv,
                         16 * kStepVectors, state + c);
  for (; c + 16 < nv; c += kScanColumns)
    replay<2>(k, k_stride, d + c, d_stride, decay, g_stride, n, dk, dv, nv - c, state + c);
  if (c < nv)
    replay<1>(k, k_stride, d + c, d_stride, decay, g_stride, n, dk, dv, nv - c, state + c);
}

static void delta_step(const float *q, const float *k, const float *v, float *out, float decay,
                       float beta, int dk, size_t dv, int nv, float *state, const float *next) {
  int c = 0;
  for (; c + 16 * kStepVectors <= nv; c += 16 * kStepVectors)
    scan_step<kStepVectors>(q, k, v + c, out + c, decay, beta, dk, dv, state + c,
                            c + 32 * kStepVectors <= nv ? state + c + 16 * kStepVectors : next);
  for (; c < nv; c += kScanColumns)
    delta_scan(q, k, 0, v + c, out + c, 0, 0, &decay, &beta, 0, 1, dk, dv,
               nv - c < kScanColumns ? nv - c : (int)kScanColumns, state + c, state + c, nullptr, 0,
               0, nullptr, nullptr);
}

}  // namespace
}  // namespace ksl
