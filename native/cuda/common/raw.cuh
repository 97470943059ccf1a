// Weights in their stored encoding, decoded element by element.
#pragma once
#include "device.cuh"

namespace ksl {

// A matrix as ksl.h lays it out, in device memory.
struct Raw {
  int encoding;
  int rows, cols;
  const void *codes;
  const void *scales;
  const float *globals;
};

__device__ inline float bf16_value(uint16_t v) {
  return __uint_as_float(static_cast<uint32_t>(v) << 16);
}

// Bits [0, 4 or 6 or 8) of the code at (row, col) of the packed encodings.
__device__ inline uint32_t raw_code(const Raw &m, int64_t row, int col) {
  const uint8_t *bytes = static_cast<const uint8_t *>(m.codes);
  const int64_t i = row * m.cols + col;
  if (m.encoding == KSL_ENC_FP8) return bytes[i];
  if (m.encoding == KSL_ENC_NVFP4) return bytes[i >> 1] >> (4 * (i & 1)) & 15u;
  const uint8_t *three = bytes + (i >> 2) * 3;
  const uint32_t word = three[0] | three[1] << 8 | three[2] << 16;
  return word >> (6 * (i & 3)) & 63u;
}

template <int kEncoding>
__device__ inline float raw_value(const Raw &m, int64_t row, int col) {
  const int64_t i = row * m.cols + col;
  if (kEncoding == KSL_ENC_F32) return static_cast<const float *>(m.codes)[i];
  if (kEncoding == KSL_ENC_BF16) return bf16_value(static_cast<const uint16_t *>(m.codes)[i]);
  const uint32_t code = raw_code(m, row, col);
  const int64_t block = (row >> 7) * ((m.cols + 127) >> 7) + (col >> 7);
  if (kEncoding == KSL_ENC_FP8)
    return e4m3_to_f32(static_cast<uint8_t>(code)) * static_cast<const float *>(m.scales)[block];
  if (kEncoding == KSL_ENC_E2M3)
    return e2m3_to_f32(static_cast<uint8_t>(code)) *
           e8m0_to_f32(static_cast<const uint8_t *>(m.scales)[block]);
  const uint8_t scale = static_cast<const uint8_t *>(m.scales)[i >> 4];
  return e2m1_to_f32(static_cast<uint8_t>(code)) * ue4m3_to_f32(scale) * m.globals[row >> 7];
}

__device__ inline float raw_any(const Raw &m, int64_t row, int col) {
  switch (m.encoding) {
    case KSL_ENC_F32:
      return raw_value<KSL_ENC_F32>(m, row, col);
    case KSL_ENC_BF16:
      return raw_value<KSL_ENC_BF16>(m, row, col);
    case KSL_ENC_FP8:
      return raw_value<KSL_ENC_FP8>(m, row, col);
    case KSL_ENC_E2M3:
      return raw_value<KSL_ENC_E2M3>(m, row, col);
    default:
      return raw_value<KSL_ENC_NVFP4>(m, row, col);
  }
}

}  // namespace ksl
