// Loops over V; exp and the functions made of it. Defined for every input: no NaN except from NaN.
namespace ksl {
namespace {

// Calls f(i, load, store) for each vector of [0, n), the last one partial.
template <class F>
KSL_INLINE void each_vector(int n, F f) {
  int i = 0;
  for (; i + 16 <= n; i += 16)
    f(i, [](const float *p) { return v_load(p); }, [](float *p, V a) { v_store(p, a); });
  if (i < n) {
    const int m = n - i;
    f(
        i, [m](const float *p) { return v_load_n(p, m); },
        [m](float *p, V a) { v_store_n(p, a, m); });
  }
}

// e^x to about 1 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, then 1 + r + r^2 q(r), q a minimax fit.
// 0 below -104, infinity above 88.8.
KSL_INLINE V v_exp(V x) {
  x = v_min(v_set1(89.0f), v_max(v_set1(-104.0f), x));
  const V magic = v_set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V n = v_sub(v_fma(x, v_set1(1.44269504f), magic), magic);
  // ln 2 in two parts, the first short enough that its product with n is exact.
  V r = v_fnma(n, v_set1(0.693359375f), x);
  r = v_fnma(n, v_set1(-2.12194440e-4f), r);
  V q = v_set1(0x1.6a1d3ap-10f);
  q = v_fma(q, r, v_set1(0x1.123fb6p-7f));
  q = v_fma(q, r, v_set1(0x1.555926p-5f));
  q = v_fma(q, r, v_set1(0x1.55549ep-3f));
  q = v_fma(q, r, v_set1(0x1.fffffcp-2f));
  q = v_fma(v_mul(r, r), q, r);
  return v_scale2(v_add(q, v_set1(1.0f)), n);
}

// 2^x for x <= 0 to about 1 ulp: x = n + r with |r| <= 1/2, then 1 + r q(r), q a minimax fit. 0
// below -150.
KSL_INLINE V v_exp2(V x) {
  x = v_max(v_set1(-150.0f), x);
  const V magic = v_set1(12582912.0f);  // as in v_exp
  const V n = v_sub(v_add(x, magic), magic), r = v_sub(x, n);
  V q = v_set1(0x1.41fbbcp-13f);
  q = v_fma(q, r, v_set1(0x1.5f3e54p-10f));
  q = v_fma(q, r, v_set1(0x1.3b2d4cp-7f));
  q = v_fma(q, r, v_set1(0x1.c6aee8p-5f));
  q = v_fma(q, r, v_set1(0x1.ebfbdcp-3f));
  q = v_fma(q, r, v_set1(0x1.62e430p-1f));
  return v_scale2(v_fma(q, r, v_set1(1.0f)), n);
}

// 1 + e^-x; the reciprocal is sigmoid(x).
KSL_INLINE V v_sigmoid_divisor(V x) {
  return v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), x)));
}
KSL_INLINE V v_sigmoid(V x) {
  return v_div(v_set1(1.0f), v_sigmoid_divisor(x));
}
// The numerator is kept finite: -infinity has the limit 0.
KSL_INLINE V v_silu(V x) {
  return v_div(v_max(v_set1(-0x1.fffffep127f), x), v_sigmoid_divisor(x));
}

}  // namespace
}  // namespace ksl
