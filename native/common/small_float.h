// Conversions of the small floats that weights and KV rows are made of. The reference for all
// faster versions.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "device.h"

namespace ksl {

KSL_HD inline uint32_t float_bits(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  return bits;
}
KSL_HD inline float bits_float(uint32_t bits) {
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
KSL_HD inline int round_half_even(float q) {  // q >= 0 and small
  int n = static_cast<int>(q);
  const float rest = q - static_cast<float>(n);
  if (rest > 0.5f || (rest == 0.5f && (n & 1))) n++;
  return n;
}

KSL_HD inline float bf16_to_f32(uint16_t v) {
  return bits_float(static_cast<uint32_t>(v) << 16);
}

// Round to nearest even; NaN stays NaN.
KSL_HD inline uint16_t f32_to_bf16(float v) {
  const uint32_t bits = float_bits(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Round to nearest even, beyond the range to infinity; NaN stays NaN.
KSL_HD inline uint16_t f32_to_f16(float v) {
  const uint32_t bits = float_bits(v), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // from 65520 on
  if (magnitude < 0x38800000u)                          // below 2^-14: multiples of 2^-24
    return sign | static_cast<uint16_t>(round_half_even(bits_float(magnitude) * 0x1p24f));
  const uint32_t m = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((m >> 13) - (112u << 10));
}
KSL_HD inline float f16_to_f32(uint16_t v) {
  const uint32_t sign = static_cast<uint32_t>(v & 0x8000u) << 16, magnitude = v & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude << 13));
  if (magnitude < 0x400u)
    return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0x1p-24f));
  return bits_float(sign | ((magnitude << 13) + (112u << 23)));
}

// OCP e4m3fn; 0x7f and 0xff are NaN.
KSL_HD inline float e4m3_to_f32(uint8_t v) {
  const uint32_t sign = static_cast<uint32_t>(v & 0x80u) << 24;
  const uint32_t magnitude = v & 0x7fu;
  if (magnitude == 0x7f) return bits_float(sign | 0x7fc00000u);
  if (magnitude < 8) return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0x1p-9f));
  return bits_float(sign | ((magnitude << 20) + (120u << 23)));
}

// Round to nearest even, saturating at 448.
KSL_HD inline uint8_t f32_to_e4m3(float v) {
  const uint32_t bits = float_bits(v);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const float magnitude = fabsf(v);
  if (magnitude != magnitude) return sign | 0x7fu;
  if (magnitude >= 448.0f) return sign | 0x7eu;
  if (magnitude < 0x1p-6f) return sign | static_cast<uint8_t>(round_half_even(magnitude * 0x1p9f));
  const uint32_t m = bits & 0x7fffffffu;
  const uint32_t code = ((m + 0x7ffffu + ((m >> 20) & 1u)) >> 20) - (120u << 3);
  return sign | static_cast<uint8_t>(code);
}

KSL_HD inline float e2m3_to_f32(uint8_t v) {
  const int exponent = v >> 3 & 3;
  const float mantissa = static_cast<float>(v & 7);
  const float magnitude = exponent == 0
                              ? mantissa * 0.125f
                              : (8.0f + mantissa) * 0.0625f * static_cast<float>(1 << exponent);
  return v & 0x20 ? -magnitude : magnitude;
}

// Nearest, ties to the smaller magnitude, saturating at 7.5. 6 bits.
KSL_HD inline uint8_t f32_to_e2m3(float v) {
  const uint8_t sign = static_cast<uint8_t>(float_bits(v) >> 26 & 0x20u);
  const float magnitude = fabsf(v);
  if (!(magnitude < 7.5f)) return sign | 0x1fu;
  // Codes are linear with step 1/8 below 2, 1/4 below 4, 1/2 above.
  const float steps = magnitude < 2.0f ? 8.0f : (magnitude < 4.0f ? 4.0f : 2.0f);
  const int base = magnitude < 2.0f ? 0 : (magnitude < 4.0f ? 8 : 16);
  const float q = magnitude * steps;
  int n = static_cast<int>(q);
  if (q - static_cast<float>(n) > 0.5f) n++;
  return sign | static_cast<uint8_t>(base + n);
}

KSL_HD inline float e2m1_to_f32(uint8_t v) {
  const int exponent = v >> 1 & 3;
  const float mantissa = static_cast<float>(v & 1);
  const float magnitude = exponent == 0
                              ? mantissa * 0.5f
                              : (2.0f + mantissa) * 0.25f * static_cast<float>(1 << exponent);
  return v & 8 ? -magnitude : magnitude;
}

// Nearest, ties away from zero, saturating at 6. 4 bits.
KSL_HD inline uint8_t f32_to_e2m1(float v) {
  const uint8_t sign = static_cast<uint8_t>(float_bits(v) >> 28 & 8u);
  const float m = fabsf(v);
  const int code = (m >= 0.25f) + (m >= 0.75f) + (m >= 1.25f) + (m >= 1.75f) + (m >= 2.5f) +
                   (m >= 3.5f) + (m >= 5.0f);
  return sign | static_cast<uint8_t>(code);
}

// Unsigned, bias 7, 0x38 = 1.0.
KSL_HD inline float ue4m3_to_f32(uint8_t v) {
  return e4m3_to_f32(v & 0x7fu);
}

// Round to nearest even, at least code 1, saturating at 448.
KSL_HD inline uint8_t f32_to_ue4m3(float v) {
  const uint8_t code = f32_to_e4m3(v > 0 ? v : 0.0f);
  return code == 0 ? 1 : code;
}

// 2^(v-127)
KSL_HD inline float e8m0_to_f32(uint8_t v) {
  return v == 0 ? 0x1p-127f : bits_float(static_cast<uint32_t>(v) << 23);
}

}  // namespace ksl
