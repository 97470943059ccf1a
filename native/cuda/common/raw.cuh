// Weights in their stored encoding, decoded element by element.
#pragma once
#include "device.cuh"

namespace ksl {

// A matrix as ksl.h lays it out, in device memory.
struct Raw {
  int encoding;  // of ksl.h, or kRawPackedBf16
  int rows, cols;
  const void *codes;
  const void *scales;
  const float *globals;
};

// bf16 that pack.cu made, which is read by raw_any alone: scales is Packed::scale.
constexpr int kRawPackedBf16 = 64, kPackedBf16Bytes = 8192;
// Byte of a weight in a block of 16 rows and 256 input elements.
__device__ inline int packed_bf16_at(int row, int k) {
  const int piece = k >> 6, i = k >> 2 & 3, lane = (row & 7) * 4 + (k >> 4 & 3);
  return ((piece * 4 + i) * 32 + lane) * 16 + ((k >> 1 & 1) * 2 + (row >> 3)) * 4 + 2 * (k & 1);
}

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
    case kRawPackedBf16: {
      const int64_t block = (row >> 4) * ((m.cols + 255) >> 8) + (col >> 8);
      const uint8_t *at = static_cast<const uint8_t *>(m.codes) + block * kPackedBf16Bytes +
                          packed_bf16_at(static_cast<int>(row & 15), col & 255);
      return __half2float(*reinterpret_cast<const __half *>(at)) *
             static_cast<const float *>(m.scales)[row];
    }
    default:
      return raw_value<KSL_ENC_NVFP4>(m, row, col);
  }
}

}  // namespace ksl
