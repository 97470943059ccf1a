// Scalar encode and decode of every weight encoding and of the small floats they are made of. The
// reference for all faster versions.
#pragma once
#include "abi.h"

namespace ksl {

float bf16_to_f32(uint16_t v);
uint16_t f32_to_bf16(float v);  // round to nearest even; NaN stays NaN
float e4m3_to_f32(uint8_t v);   // OCP e4m3fn; 0x7f and 0xff are NaN
uint8_t f32_to_e4m3(float v);   // round to nearest even, saturating at 448
float e2m3_to_f32(uint8_t v);   // 6 bits
uint8_t f32_to_e2m3(float v);   // nearest, ties to the smaller magnitude, saturating at 7.5
float e2m1_to_f32(uint8_t v);   // 4 bits
uint8_t f32_to_e2m1(float v);   // nearest, ties away from zero, saturating at 6
float ue4m3_to_f32(uint8_t v);  // unsigned, bias 7, 0x38 = 1.0
uint8_t f32_to_ue4m3(float v);  // round to nearest even, at least code 1, saturating at 448
float e8m0_to_f32(uint8_t v);   // 2^(v-127)

// One row of a matrix to float32 [cols]. `t` has data (not a fill).
void decode_row(int encoding, const void *codes, const void *scales, const float *globals,
                int64_t rows, int64_t cols, int64_t row, float *out);

// Rows [r0, r1) of a matrix. r0 must be a multiple of 128 (scale blocks); r1 a multiple of 128 or
// `rows`. `src` is the whole matrix.
void encode_rows(int encoding, const float *src, int64_t rows, int64_t cols, int64_t r0, int64_t r1,
                 void *codes, void *scales, float *globals);

// Value of element i of a fill tensor.
float fill_value(int kind, uint64_t seed, float scale, uint64_t i);

}  // namespace ksl
