// The arithmetic of sampling that is equal to the bit in every backend: only exact integer and IEEE
// operations, never fused.
#pragma once
#include <string.h>

#include "hash.h"

namespace ksl {

// log of a normal positive x = m * 2^e, m in [sqrt(1/2), sqrt(2)), s = (m - 1) / (m + 1):
// e * ln2 + 2 s (1 + s^2/3 + s^4/5 + ... + s^22/23), by Horner, within 1e-15.
KSL_HD inline double log_f64(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int64_t e = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x3ff0000000000000);
  double m;
  memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    e++;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double sum = 1.0 / 23.0;
  for (int k = 21; k >= 3; k -= 2) sum = sum * z + 1.0 / static_cast<double>(k);
  const double series = s * z * sum;
  return static_cast<double>(e) * 0.6931471805599453 + 2.0 * (s + series);
}

// exp of x <= 0 (0 below -87): 2^k * p(r), x = k ln2 + r, p the Taylor polynomial of degree 7.
KSL_HD inline float exp_f32(float x) {
  if (!(x > -87.0f)) return 0.0f;
  const float k = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 rounds to an integer
  const float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(k) + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return p * power;
}

// The stream of noise words of one position; word i of it (hash_at) belongs to id i.
KSL_HD inline uint64_t noise_key(uint64_t seed, int64_t position) {
  return mix64(mix64(seed) + static_cast<uint64_t>(position));
}

// Gumbel noise of a word.
KSL_HD inline double noise_of(uint64_t word) {
  const double u = (static_cast<double>(word >> 12) + 0.5) * 0x1p-52;
  return -log_f64(-log_f64(u));
}

}  // namespace ksl
