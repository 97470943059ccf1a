// Norms, gates and other element-wise kernels. Sums of squares use the 16 lanes of V, each
// ascending, then the fixed tree of v_hsum.
#include "kernels.h"

namespace ksl {
namespace {

KSL_INLINE float sum_of_squares(const float *x, int n) {
  V sum = v_zero();
  each_vector(n, [&](int i, auto load, auto) {
    const V a = load(x + i);
    sum = v_fma(a, a, sum);
  });
  return v_hsum(sum);
}

static void rmsnorm(const float *x, const float *gain, int n, float eps, float *out) {
  const V r = v_set1(1.0f / __builtin_sqrtf(sum_of_squares(x, n) / (float)n + eps));
  each_vector(n, [&](int i, auto load, auto store) {
    store(out + i, v_mul(v_mul(load(x + i), r), load(gain + i)));
  });
}

static void l2norm(const float *x, int n, float eps, float scale, float *out) {
  const V r = v_set1(1.0f / __builtin_sqrtf(sum_of_squares(x, n) + eps)), s = v_set1(scale);
  each_vector(
      n, [&](int i, auto load, auto store) { store(out + i, v_mul(v_mul(load(x + i), r), s)); });
}

static void gated_norm(const float *x, const float *gain, const float *z, int n, float eps,
                       float *out) {
  const V r = v_set1(1.0f / __builtin_sqrtf(sum_of_squares(x, n) / (float)n + eps));
  each_vector(n, [&](int i, auto load, auto store) {
    const V normed = v_mul(v_mul(load(x + i), r), load(gain + i));
    store(out + i, v_mul(normed, v_silu(load(z + i))));
  });
}

static void add(float *x, const float *y, int n) {
  each_vector(n,
              [&](int i, auto load, auto store) { store(x + i, v_add(load(x + i), load(y + i))); });
}

static void silu_mul(const float *gate, const float *up, int n, float *out) {
  each_vector(n, [&](int i, auto load, auto store) {
    store(out + i, v_mul(v_silu(load(gate + i)), load(up + i)));
  });
}

static void sigmoid_mul(float *x, const float *gate, int n) {
  each_vector(n, [&](int i, auto load, auto store) {
    store(x + i, v_mul(load(x + i), v_sigmoid(load(gate + i))));
  });
}

static void conv_silu(const float *const window[4], const float *taps, size_t stride, int n,
                      float *out) {
  each_vector(n, [&](int i, auto load, auto store) {
    V sum = v_mul(load(taps + i), load(window[0] + i));
    sum = v_fma(load(taps + stride + i), load(window[1] + i), sum);
    sum = v_fma(load(taps + 2 * stride + i), load(window[2] + i), sum);
    sum = v_fma(load(taps + 3 * stride + i), load(window[3] + i), sum);
    store(out + i, v_silu(sum));
  });
}

static void conv_step(const float *x, const float *taps, size_t stride, int n, float *history,
                      const float *next, float *out) {
  each_vector(n, [&](int i, auto load, auto store) {
    float *row[3] = {history + i, history + stride + i, history + 2 * stride + i};
    const V first = load(row[0]), second = load(row[1]), third = load(row[2]), last = load(x + i);
    if (next)
      for (int j = 0; j < 3; j++) __builtin_prefetch(next + j * stride + i, 1, 2);
    V sum = v_mul(load(taps + i), first);
    sum = v_fma(load(taps + stride + i), second, sum);
    sum = v_fma(load(taps + 2 * stride + i), third, sum);
    sum = v_fma(load(taps + 3 * stride + i), last, sum);
    store(out + i, v_silu(sum));
    store(row[0], second);
    store(row[1], third);
    store(row[2], last);
  });
}

static void rope(float *x, const float *cos, const float *sin, int half) {
  each_vector(half, [&](int i, auto load, auto store) {
    const V a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, v_fnma(b, s, v_mul(a, c)));
    store(x + half + i, v_fma(a, s, v_mul(b, c)));
  });
}

}  // namespace
}  // namespace ksl
