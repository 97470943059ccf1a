#include "codec.h"

#include <math.h>
#include <string.h>

namespace ksl {
namespace {

constexpr int kBlock = 128;  // rows and columns of a scale block, rows of a global scale
constexpr int kGroup = 16;   // columns of an NVFP4 scale

// Caller data may lie at any address.
template <typename T>
T load(const void *base, int64_t index) {
  T v;
  memcpy(&v, static_cast<const char *>(base) + index * static_cast<int64_t>(sizeof(T)), sizeof v);
  return v;
}

template <typename T>
void store(void *base, int64_t index, T v) {
  memcpy(static_cast<char *>(base) + index * static_cast<int64_t>(sizeof(T)), &v, sizeof v);
}

int64_t blocks(int64_t n) {
  return (n + kBlock - 1) / kBlock;
}

float absmax(const float *src, int64_t cols, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
  float most = 0;
  for (int64_t r = r0; r < r1; r++)
    for (int64_t c = c0; c < c1; c++) {
      const float v = fabsf(load<float>(src, r * cols + c));
      if (v > most) most = v;
    }
  return most;
}

// The smallest e with limit * 2^e >= most, kept in [low, high]; 0 for an all-zero block.
int scale_exponent(float most, double limit, int low, int high) {
  if (most == 0) return 0;
  int e = 0;
  const double fraction = frexp(static_cast<double>(most) / limit, &e);
  if (fraction == 0.5) e--;
  return e < low ? low : (e > high ? high : e);
}

// One block of scales for the encodings that have 128 x 128 blocks.
void encode_block(int encoding, const float *src, int64_t cols, int64_t r0, int64_t r1, int64_t c0,
                  int64_t c1, uint8_t *codes, void *scales) {
  const int64_t at = (r0 / kBlock) * blocks(cols) + c0 / kBlock;
  const float most = absmax(src, cols, r0, r1, c0, c1);
  if (encoding == KSL_ENC_FP8) {
    const int e = scale_exponent(most, 448.0, -126, 127);
    const double inverse = ldexp(1.0, -e);
    store<float>(scales, at, static_cast<float>(ldexp(1.0, e)));
    for (int64_t r = r0; r < r1; r++)
      for (int64_t c = c0; c < c1; c++)
        codes[r * cols + c] =
            f32_to_e4m3(static_cast<float>(load<float>(src, r * cols + c) * inverse));
    return;
  }
  const int e = scale_exponent(most, 7.5, -127, 127);
  const double inverse = ldexp(1.0, -e);
  store<uint8_t>(scales, at, static_cast<uint8_t>(e + 127));
  for (int64_t r = r0; r < r1; r++)
    for (int64_t c = c0; c < c1; c += 4) {
      uint32_t word = 0;
      for (int j = 0; j < 4; j++) {
        const double scaled = load<float>(src, r * cols + c + j) * inverse;
        word |= static_cast<uint32_t>(f32_to_e2m3(static_cast<float>(scaled))) << (6 * j);
      }
      uint8_t *out = codes + (r * cols + c) / 4 * 3;
      out[0] = static_cast<uint8_t>(word);
      out[1] = static_cast<uint8_t>(word >> 8);
      out[2] = static_cast<uint8_t>(word >> 16);
    }
}

void encode_nvfp4(const float *src, int64_t cols, int64_t r0, int64_t r1, uint8_t *codes,
                  uint8_t *scales, float *globals) {
  float global = absmax(src, cols, r0, r1, 0, cols) / 6.0f;
  if (global == 0) global = 1.0f;
  store<float>(globals, r0 / kBlock, global);
  for (int64_t r = r0; r < r1; r++)
    for (int64_t c = 0; c < cols; c += kGroup) {
      const float most = absmax(src, cols, r, r + 1, c, c + kGroup);
      const uint8_t scale = f32_to_ue4m3(most / 6.0f / global);
      scales[(r * cols + c) / kGroup] = scale;
      const float unit = ue4m3_to_f32(scale) * global;
      for (int j = 0; j < kGroup; j += 2) {
        const int64_t at = r * cols + c + j;
        // A unit that underflowed stands for a group of zeros.
        const uint8_t low = unit == 0 ? 0 : f32_to_e2m1(load<float>(src, at) / unit);
        const uint8_t high = unit == 0 ? 0 : f32_to_e2m1(load<float>(src, at + 1) / unit);
        codes[at / 2] = static_cast<uint8_t>(low | high << 4);
      }
    }
}

template <int kUnit>
void reorder_units(const int32_t *order, int64_t n, int64_t runs, const uint8_t *from,
                   uint8_t *to) {
  for (int64_t run = 0; run < runs; run++, from += n * kUnit)
    for (int64_t i = 0; i < n; i++, to += kUnit)
      memcpy(to, from + static_cast<int64_t>(order[i]) * kUnit, kUnit);
}

}  // namespace

void reorder(const int32_t *order, int64_t n, int unit_bytes, int64_t runs, const void *from,
             void *to) {
  const uint8_t *in = static_cast<const uint8_t *>(from);
  uint8_t *out = static_cast<uint8_t *>(to);
  if (unit_bytes == 3)
    reorder_units<3>(order, n, runs, in, out);
  else
    reorder_units<4>(order, n, runs, in, out);
}

void decode_row(int encoding, const void *codes, const void *scales, const float *globals,
                int64_t rows, int64_t cols, int64_t row, float *out) {
  const uint8_t *bytes = static_cast<const uint8_t *>(codes);
  const int64_t first = row * cols;
  const int64_t block_row = (row / kBlock) * blocks(cols);
  switch (encoding) {
    case KSL_ENC_F32:
      memcpy(out, bytes + first * 4, static_cast<size_t>(cols) * 4);
      return;
    case KSL_ENC_BF16:
      for (int64_t c = 0; c < cols; c++) out[c] = bf16_to_f32(load<uint16_t>(codes, first + c));
      return;
    case KSL_ENC_FP8:
      for (int64_t c = 0; c < cols; c++)
        out[c] = e4m3_to_f32(bytes[first + c]) * load<float>(scales, block_row + c / kBlock);
      return;
    case KSL_ENC_E2M3:
      for (int64_t c = 0; c < cols; c += 4) {
        const uint8_t *b = bytes + (first + c) / 4 * 3;
        const uint32_t word =
            b[0] | static_cast<uint32_t>(b[1]) << 8 | static_cast<uint32_t>(b[2]) << 16;
        const float scale = e8m0_to_f32(load<uint8_t>(scales, block_row + c / kBlock));
        for (int j = 0; j < 4; j++)
          out[c + j] = e2m3_to_f32(static_cast<uint8_t>(word >> (6 * j) & 0x3fu)) * scale;
      }
      return;
    case KSL_ENC_NVFP4: {
      const float global = load<float>(globals, row / kBlock);
      for (int64_t c = 0; c < cols; c++) {
        const uint8_t code = bytes[(first + c) / 2] >> (4 * (c & 1)) & 0xfu;
        const float scale = ue4m3_to_f32(load<uint8_t>(scales, (first + c) / kGroup));
        out[c] = e2m1_to_f32(code) * scale * global;  // the first product is exact
      }
      return;
    }
    default:
      return;
  }
}

void encode_rows(int encoding, const float *src, int64_t rows, int64_t cols, int64_t r0, int64_t r1,
                 void *codes, void *scales, float *globals) {
  switch (encoding) {
    case KSL_ENC_F32:
      memcpy(static_cast<char *>(codes) + r0 * cols * 4,
             reinterpret_cast<const char *>(src) + r0 * cols * 4,
             static_cast<size_t>((r1 - r0) * cols) * 4);
      return;
    case KSL_ENC_BF16:
      for (int64_t i = r0 * cols; i < r1 * cols; i++)
        store<uint16_t>(codes, i, f32_to_bf16(load<float>(src, i)));
      return;
    case KSL_ENC_FP8:
    case KSL_ENC_E2M3:
      for (int64_t r = r0; r < r1; r += kBlock)
        for (int64_t c = 0; c < cols; c += kBlock)
          encode_block(encoding, src, cols, r, r + kBlock < r1 ? r + kBlock : r1, c,
                       c + kBlock < cols ? c + kBlock : cols, static_cast<uint8_t *>(codes),
                       scales);
      return;
    case KSL_ENC_NVFP4:
      for (int64_t r = r0; r < r1; r += kBlock)
        encode_nvfp4(src, cols, r, r + kBlock < r1 ? r + kBlock : r1, static_cast<uint8_t *>(codes),
                     static_cast<uint8_t *>(scales), globals);
      return;
    default:
      return;
  }
}

}  // namespace ksl
