// The CPU layout of weight matrices.
//
// A matrix is a list of panels of 16 rows; a panel is a list of groups of 16 columns; a group is
// one contiguous piece whose order lets a vector of 16 rows be decoded with a few instructions.
// Rows and columns that do not exist are zero codes. Inside a group, with r the row in the panel
// and k the column in the group:
//   F32    float [k][r]
//   BF16   u16 [k / 2][r][k % 2]
//   FP8    u8  [k / 2][r][k % 2]
//   E2M3   u8  [3][r][k % 4]: the low six bits of byte j are the code of column 4 j + k % 4; the
//          high two bits of the three bytes, ascending, are that of column 12 + k % 4
//   NVFP4  u8  [2][r][k % 4]: the low nibble of byte j is the code of column 8 j + k % 4, the high
//          one that of column 8 j + 4 + k % 4; scales u8 [group][r], a NaN as 0xff, so that a scale
//          shifted left by 7 is a half of 2^-8 times its value
#include <string.h>

#include "../common/abi.h"
#include "../common/codec.h"
#include "kernels.h"

namespace ksl {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
size_t align64(size_t n) {
  return (n + 63) / 64 * 64;
}

size_t group_bytes(int encoding) {
  switch (encoding) {
    case KSL_ENC_F32:
      return 1024;
    case KSL_ENC_BF16:
      return 512;
    case KSL_ENC_FP8:
      return 256;
    case KSL_ENC_E2M3:
      return 192;
    default:
      return 128;
  }
}

struct Layout {
  size_t codes, scales, globals;  // bytes
};

Layout layout_of(int encoding, int64_t rows, int64_t cols) {
  const size_t panels = (size_t)ceil_div(rows, kPanel), groups = (size_t)ceil_div(cols, kGroup);
  const size_t row_blocks = (size_t)ceil_div(rows, kScaleBlock);
  const size_t blocks = row_blocks * (size_t)ceil_div(cols, kScaleBlock);
  Layout layout = {panels * groups * group_bytes(encoding), 0, 0};
  if (encoding == KSL_ENC_FP8) layout.scales = blocks * sizeof(float);
  if (encoding == KSL_ENC_E2M3) layout.scales = blocks;
  if (encoding == KSL_ENC_NVFP4) {
    layout.scales = panels * groups * kPanel;
    layout.globals = row_blocks * sizeof(float);
  }
  return layout;
}

// Codes of columns [k, k + n) of a source row, n <= 16, into code[16]; the rest is zero.
void read_e2m3(const uint8_t *row, int64_t k, int n, uint8_t *code) {
  const uint8_t *p = row + k / 4 * 3;
  for (int i = 0; i < 16; i += 4) {
    const uint32_t bits = i < n ? (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 : 0;
    for (int j = 0; j < 4; j++) code[i + j] = (uint8_t)(bits >> (6 * j) & 63);
    p += 3;
  }
}

void pack_e2m3(const uint8_t *row, int64_t k, int n, int r, uint8_t *group) {
  uint8_t code[16];
  read_e2m3(row, k, n, code);
  for (int i = 0; i < 4; i++) {
    const uint8_t last = code[12 + i];
    uint8_t *to = group + 4 * r + i;
    for (int j = 0; j < 3; j++) to[64 * j] = (uint8_t)(code[4 * j + i] | (last >> 2 * j & 3) << 6);
  }
}

uint8_t unpack_e2m3(const uint8_t *group, int r, int k) {
  const uint8_t *at = group + 4 * r + k % 4;
  if (k < 12) return at[64 * (k / 4)] & 63;
  return (uint8_t)(at[0] >> 6 | at[64] >> 6 << 2 | at[128] >> 6 << 4);
}

void pack_nvfp4(const uint8_t *row, int64_t k, int n, int r, uint8_t *group) {
  uint8_t bytes[8] = {};
  if (n) memcpy(bytes, row + k / 2, (size_t)(n + 1) / 2);
  const auto code = [&](int i) { return bytes[i / 2] >> (i % 2 * 4) & 15; };
  for (int j = 0; j < 2; j++) {
    for (int i = 0; i < 4; i++) {
      group[64 * j + 4 * r + i] = (uint8_t)(code(8 * j + i) | code(8 * j + 4 + i) << 4);
    }
  }
}

uint8_t unpack_nvfp4(const uint8_t *group, int r, int k) {
  return group[64 * (k / 8) + 4 * r + k % 4] >> (k / 4 % 2 * 4) & 15;
}

uint8_t pack_scale(uint8_t scale) {
  scale &= 0x7f;
  return scale == 0x7f ? 0xff : scale;
}

// Row r of a panel: n <= 16 columns of `row` from k into one group. A null row packs zeros.
void pack_row(int encoding, const uint8_t *row, int64_t k, int n, int r, uint8_t *group) {
  if (!row) n = 0;
  switch (encoding) {
    case KSL_ENC_F32: {
      float x[16] = {};
      if (n) memcpy(x, row + 4 * k, 4 * (size_t)n);
      for (int i = 0; i < 16; i++) ((float *)group)[16 * i + r] = x[i];
      break;
    }
    case KSL_ENC_BF16: {
      uint16_t x[16] = {};
      if (n) memcpy(x, row + 2 * k, 2 * (size_t)n);
      for (int i = 0; i < 16; i += 2) memcpy(group + 32 * i + 4 * r, x + i, 4);
      break;
    }
    case KSL_ENC_FP8: {
      uint8_t x[16] = {};
      if (n) memcpy(x, row + k, (size_t)n);
      for (int i = 0; i < 16; i += 2) memcpy(group + 16 * i + 2 * r, x + i, 2);
      break;
    }
    case KSL_ENC_E2M3:
      pack_e2m3(row, k, n, r, group);
      break;
    default:
      pack_nvfp4(row, k, n, r, group);
  }
}

size_t row_bytes(int encoding, int64_t cols) {
  switch (encoding) {
    case KSL_ENC_F32:
      return 4 * (size_t)cols;
    case KSL_ENC_BF16:
      return 2 * (size_t)cols;
    case KSL_ENC_FP8:
      return (size_t)cols;
    case KSL_ENC_E2M3:
      return (size_t)cols / 4 * 3;
    default:
      return (size_t)cols / 2;
  }
}

void pack_scales(const MatrixSource *stripe, int64_t r0, Matrix *out) {
  const size_t block_cols = (size_t)ceil_div(out->cols, kScaleBlock);
  const size_t block = (size_t)(r0 / kScaleBlock);
  const size_t blocks = (size_t)ceil_div(stripe->rows, kScaleBlock);
  if (out->encoding == KSL_ENC_FP8) {
    memcpy(out->scales + 4 * block * block_cols, stripe->scales, 4 * blocks * block_cols);
  } else if (out->encoding == KSL_ENC_E2M3) {
    memcpy(out->scales + block * block_cols, stripe->scales, blocks * block_cols);
  } else if (out->encoding == KSL_ENC_NVFP4) {
    memcpy(out->globals + block, stripe->globals, 4 * blocks);
    const int64_t groups = ceil_div(out->cols, kGroup);
    const uint8_t *from = (const uint8_t *)stripe->scales;
    for (int64_t row = 0; row < ceil_div(stripe->rows, kPanel) * kPanel; row++) {
      uint8_t *to = out->scales + ((r0 + row) / kPanel * groups) * kPanel + row % kPanel;
      for (int64_t g = 0; g < groups; g++)
        to[g * kPanel] = row < stripe->rows ? pack_scale(from[row * groups + g]) : 0;
    }
  }
}

}  // namespace

size_t matrix_bytes(int encoding, int64_t rows, int64_t cols) {
  const Layout layout = layout_of(encoding, rows, cols);
  return align64(layout.codes) + align64(layout.scales) + align64(layout.globals);
}

void matrix_begin(int encoding, int64_t rows, int64_t cols, uint8_t *storage, Matrix *out) {
  const Layout layout = layout_of(encoding, rows, cols);
  out->encoding = encoding;
  out->rows = (int32_t)rows;
  out->cols = (int32_t)cols;
  out->codes = storage;
  out->scales = storage + align64(layout.codes);
  out->globals = (float *)(out->scales + align64(layout.scales));
  out->bytes = layout.codes + layout.scales + layout.globals;
}

void matrix_pack_rows(const MatrixSource *stripe, int64_t r0, Matrix *out) {
  const int encoding = out->encoding;
  const int64_t cols = out->cols, groups = ceil_div(cols, kGroup);
  const size_t stride = row_bytes(encoding, cols), bytes = group_bytes(encoding);
  const uint8_t *codes = (const uint8_t *)stripe->codes;
  for (int64_t first = 0; first < stripe->rows; first += kPanel) {
    uint8_t *group = out->codes + (size_t)((r0 + first) / kPanel * groups) * bytes;
    for (int64_t k = 0; k < cols; k += kGroup, group += bytes) {
      const int n = cols - k < kGroup ? (int)(cols - k) : (int)kGroup;
      for (int r = 0; r < kPanel; r++) {
        const bool exists = first + r < stripe->rows;
        const uint8_t *row = exists ? codes + (size_t)(first + r) * stride : nullptr;
        pack_row(encoding, row, k, n, r, group);
      }
    }
  }
  pack_scales(stripe, r0, out);
}

void matrix_pack(const MatrixSource *src, uint8_t *storage, Matrix *out) {
  matrix_begin(src->encoding, src->rows, src->cols, storage, out);
  matrix_pack_rows(src, 0, out);
}

void matrix_row(const Matrix *w, int row, float *out) {
  const int r = row % kPanel, groups = (int)ceil_div(w->cols, kGroup);
  const size_t first_group = (size_t)(row / kPanel) * (size_t)groups;
  const uint8_t *panel = w->codes + first_group * group_bytes(w->encoding);
  const size_t block_row = (size_t)(row / kScaleBlock);
  const size_t blocks = block_row * (size_t)ceil_div(w->cols, kScaleBlock);
  for (int32_t col = 0; col < w->cols; col++) {
    const uint8_t *group = panel + (size_t)(col / kGroup) * group_bytes(w->encoding);
    const int k = col % kGroup;
    switch (w->encoding) {
      case KSL_ENC_F32:
        out[col] = ((const float *)group)[16 * k + r];
        break;
      case KSL_ENC_BF16:
        out[col] = bf16_to_f32(((const uint16_t *)group)[32 * (k / 2) + 2 * r + k % 2]);
        break;
      case KSL_ENC_FP8:
        out[col] = e4m3_to_f32(group[32 * (k / 2) + 2 * r + k % 2]) *
                   ((const float *)w->scales)[blocks + (size_t)(col / kScaleBlock)];
        break;
      case KSL_ENC_E2M3:
        out[col] = e2m3_to_f32(unpack_e2m3(group, r, k)) *
                   e8m0_to_f32(w->scales[blocks + (size_t)(col / kScaleBlock)]);
        break;
      default: {
        const size_t scale = (first_group + (size_t)(col / kGroup)) * kPanel + (size_t)r;
        out[col] = e2m1_to_f32(unpack_nvfp4(group, r, k)) * ue4m3_to_f32(w->scales[scale]) *
                   w->globals[block_row];
      }
    }
  }
}

}  // namespace ksl
