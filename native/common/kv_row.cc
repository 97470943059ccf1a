#include "kv_row.h"

#include <math.h>
#include <string.h>

#include "abi.h"
#include "small_float.h"

namespace ksl {
namespace {

enum { kMaxRotated = 256 };

float low_half(const void *at, int index) {
  uint16_t bits;
  memcpy(&bits, static_cast<const uint8_t *>(at) + 2 * index, 2);
  return f16_to_f32(bits);
}

void put_half(void *at, int index, float value) {
  const uint16_t bits = f32_to_f16(value);
  memcpy(static_cast<uint8_t *>(at) + 2 * index, &bits, 2);
}

// The largest magnitude; NaN if there is one, since its bits are above all others.
float absmax(const float *x, int n) {
  int32_t most = 0;
  for (int i = 0; i < n; i++) {
    const int32_t magnitude = static_cast<int32_t>(float_bits(x[i]) & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  return bits_float(static_cast<uint32_t>(most));
}

// rint of x clamped to [low, high], integers below 2^22: adding 1.5 * 2^23 rounds half to even.
inline float clamp_round(float x, float low, float high) {
  x = x < high ? x : high;
  x = x > low ? x : low;
  return (x + 12582912.0f) - 12582912.0f;
}

// f32_to_e4m3 without branches, which compilers turn into vectors.
inline uint8_t e4m3_of(float v) {
  const uint32_t bits = float_bits(v), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const uint32_t small =
      float_bits(bits_float(magnitude) * 0x1p9f + 12582912.0f) - float_bits(12582912.0f);
  uint32_t code = magnitude < 0x3c800000u ? small : normal;  // 2^-6
  code = magnitude >= 0x43e00000u ? 0x7eu : code;            // 448
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | code);
}

void encode_fp8(const float *x, int d, uint8_t *codes, void *scale_out) {
  const float most = absmax(x, d);
  int e = 0;
  if (most > 0 && most <= 3.402823466e38f) {
    const double fraction = frexp(static_cast<double>(most) / 448.0, &e);
    if (fraction == 0.5) e--;
    e = e < -126 ? -126 : e;
  }
  const float factor = bits_float(static_cast<uint32_t>(127 - e) << 23);
  for (int i = 0; i < d; i++) codes[i] = e4m3_of(x[i] * factor);
  const float scale = bits_float(static_cast<uint32_t>(127 + e) << 23);
  memcpy(scale_out, &scale, 4);
}

void encode_q4(const float *k, int d, uint8_t *codes, void *scales) {
  float x[kMaxRotated];
  memcpy(x, k, d * sizeof(float));
  kv_rotate(x, d);
  for (int g = 0; g < d / 32; g++) {
    const float *group = x + 32 * g;
    float low = group[0], high = group[0];
    for (int i = 1; i < 32; i++) {
      low = group[i] < low ? group[i] : low;
      high = group[i] > high ? group[i] : high;
    }
    const float width = (high - low) / 15.0f;
    const float reach = fabsf(low) > fabsf(high) ? fabsf(low) : fabsf(high);
    const float floor = reach / 2033.0f;
    const float scale = f16_to_f32(f32_to_f16(width > floor ? width : floor));
    if (high == low || scale == 0.0f) {
      put_half(scales, 2 * g, high + 0.0f);  // a negative zero becomes zero
      put_half(scales, 2 * g + 1, -1.0f);
      memset(codes + 16 * g, 0, 16);
      continue;
    }
    const float zero = clamp_round(-low / scale, -2033.0f, 2048.0f);
    put_half(scales, 2 * g, scale);
    put_half(scales, 2 * g + 1, copysignf(zero, -low));  // rint keeps the sign of a zero
    int code[32];
    for (int i = 0; i < 32; i++)
      code[i] = static_cast<int>(clamp_round(group[i] / scale + zero, 0.0f, 15.0f));
    for (int i = 0; i < 16; i++)
      codes[16 * g + i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
  }
}

float symmetric_scale(const float *x, int n, float levels) {
  const float most = absmax(x, n);
  if (most == 0) return 1.0f;
  const float scale = most / levels;
  return f16_to_f32(f32_to_f16(scale < 65504.0f ? scale : 65504.0f));
}

// A scale that rounds to 0 leaves no magnitude: every code is 0.
float step_of(float scale) {
  return scale == 0 ? INFINITY : scale;
}

void encode_int8(const float *x, int d, uint8_t *codes, void *scales) {
  for (int g = 0; g < d / 64; g++) {
    const float scale = symmetric_scale(x + 64 * g, 64, 127.0f), step = step_of(scale);
    put_half(scales, g, scale);
    for (int i = 64 * g; i < 64 * g + 64; i++)
      codes[i] = static_cast<uint8_t>(static_cast<int>(clamp_round(x[i] / step, -127.0f, 127.0f)));
  }
}

void encode_int4(const float *x, int d, uint8_t *codes, void *scales) {
  for (int g = 0; g < d / 32; g++) {
    const float scale = symmetric_scale(x + 32 * g, 32, 7.0f), step = step_of(scale);
    put_half(scales, g, scale);
    int code[32];
    for (int i = 0; i < 32; i++)
      code[i] = static_cast<int>(clamp_round(x[32 * g + i] / step, -7.0f, 7.0f)) + 8;
    for (int i = 0; i < 16; i++)
      codes[16 * g + i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
  }
}

}  // namespace

KvRow kv_row(int format, int head_dim) {
  const int d = head_dim;
  switch (format) {
    case KSL_KV_F32:
      return {4 * d, 0, 4 * d, 0};
    case KSL_KV_BF16:
      return {2 * d, 0, 2 * d, 0};
    case KSL_KV_FP8:
      return {d, 4, d, 4};
    case KSL_KV_Q4:
      return {d / 2, d / 32 * 4, d, 4};
    case KSL_KV_INT8_G64:
      return {d, d / 64 * 2, d, d / 64 * 2};
    case KSL_KV_INT4_G32:
    case KSL_KV_INT8RING_INT4:
      return {d / 2, d / 32 * 2, d / 2, d / 32 * 2};
    default:
      return {0, 0, 0, 0};
  }
}

const char *kv_format_name(int format) {
  static const char *const kNames[] = {"f32",      "bf16",     "fp8",          "q4",
                                       "int8_g64", "int4_g32", "int8ring_int4"};
  return format >= KSL_KV_F32 && format <= KSL_KV_INT8RING_INT4 ? kNames[format] : "unknown";
}

const char *kv_format_limit(int format, int head_dim) {
  const int d = head_dim;
  if (format == KSL_KV_Q4)
    return d == 32 || d == 64 || d == 128 || d == 256 ? nullptr
                                                      : "heads of 32, 64, 128 or 256 dimensions";
  if (format == KSL_KV_INT4_G32)
    return d % 32 == 0 ? nullptr : "heads of a multiple of 32 dimensions";
  if (format == KSL_KV_INT8_G64 || format == KSL_KV_INT8RING_INT4)
    return d % 64 == 0 ? nullptr : "heads of a multiple of 64 dimensions";
  return nullptr;
}

void kv_rotate(float *x, int d) {
  for (int stride = 1; stride < d; stride *= 2)
    for (int at = 0; at < d; at += 2 * stride)
      for (int i = at; i < at + stride; i++) {
        const float a = x[i], b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
  const float norm = static_cast<float>(1.0 / sqrt(static_cast<double>(d)));
  for (int i = 0; i < d; i++) x[i] *= norm;
}

void kv_encode(int format, int side, const float *x, int d, void *codes, void *scales) {
  uint8_t *out = static_cast<uint8_t *>(codes);
  switch (format) {
    case KSL_KV_F32:
      memcpy(out, x, d * sizeof(float));
      break;
    case KSL_KV_BF16:
      for (int i = 0; i < d; i++) {
        const uint16_t v = f32_to_bf16(x[i]);
        memcpy(out + 2 * i, &v, 2);
      }
      break;
    case KSL_KV_Q4:
      if (side == kKvKey) {
        encode_q4(x, d, out, scales);
        break;
      }
      encode_fp8(x, d, out, scales);
      break;
    case KSL_KV_FP8:
      encode_fp8(x, d, out, scales);
      break;
    case KSL_KV_INT8_G64:
      encode_int8(x, d, out, scales);
      break;
    default:
      encode_int4(x, d, out, scales);
  }
}

void kv_decode(int format, int side, const void *codes, const void *scales, int d, float *out) {
  const uint8_t *in = static_cast<const uint8_t *>(codes);
  if (format == KSL_KV_F32) {
    memcpy(out, in, d * sizeof(float));
  } else if (format == KSL_KV_BF16) {
    for (int i = 0; i < d; i++) {
      uint16_t v;
      memcpy(&v, in + 2 * i, 2);
      out[i] = bf16_to_f32(v);
    }
  } else if (format == KSL_KV_FP8 || (format == KSL_KV_Q4 && side == kKvValue)) {
    float scale;
    memcpy(&scale, scales, 4);
    for (int i = 0; i < d; i++) out[i] = e4m3_to_f32(in[i]) * scale;
  } else if (format == KSL_KV_INT8_G64) {
    for (int i = 0; i < d; i++)
      out[i] = static_cast<float>(static_cast<int8_t>(in[i])) * low_half(scales, i / 64);
  } else {
    for (int i = 0; i < d; i++) {
      const float code = static_cast<float>(in[i / 2] >> (i % 2 * 4) & 15);
      const int g = i / 32;
      if (format == KSL_KV_Q4)
        out[i] = (code - low_half(scales, 2 * g + 1)) * low_half(scales, 2 * g);
      else
        out[i] = (code - 8.0f) * low_half(scales, g);
    }
  }
}

}  // namespace ksl
