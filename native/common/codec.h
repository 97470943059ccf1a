// Scalar encode and decode of every weight encoding: the reference for all faster versions.
#pragma once
#include "abi.h"
#include "hash.h"
#include "small_float.h"

namespace ksl {

// One row of a matrix to float32 [cols]. `t` has data (not a fill).
void decode_row(int encoding, const void *codes, const void *scales, const float *globals,
                int64_t rows, int64_t cols, int64_t row, float *out);

// Rows [r0, r1) of a matrix. r0 must be a multiple of 128 (scale blocks); r1 a multiple of 128 or
// `rows`. `src` is the whole matrix.
void encode_rows(int encoding, const float *src, int64_t rows, int64_t cols, int64_t r0, int64_t r1,
                 void *codes, void *scales, float *globals);

// Units of 3 or 4 bytes: to[i] = from[order[i]] in each of `runs` runs of n units.
void reorder(const int32_t *order, int64_t n, int unit_bytes, int64_t runs, const void *from,
             void *to);

// Value of element i of a fill tensor.
KSL_HD inline float fill_value(int kind, uint64_t seed, float scale, uint64_t i) {
  if (kind == KSL_FILL_CONSTANT) return scale;
  // 2u - 1 with u = (h + 0.5) / 2^24 is an odd multiple of 2^-24: exact in float32.
  const int64_t h = static_cast<int64_t>(hash_at(mix64(seed), i) >> 40);
  return scale * (static_cast<float>(2 * h + 1 - (INT64_C(1) << 24)) * 0x1p-24f);
}

}  // namespace ksl
