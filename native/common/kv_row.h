// Rows of the KV cache: one position and head, K or V, in every format. The reference for the
// faster readers; the only writer of the CPU backend.
//
//   f32, bf16      as computed, or rounded to nearest even
//   fp8            e4m3 codes, a float32 scale 2^ceil(log2(absmax / 448)), 1 for a row of zeros, at
//                  least 2^-126
//   q4, K          rotated (kv_rotate); two codes a byte, even channel low; per 32 channels two
//                  halves: scale = half(max((max - min) / 15, max(|min|, |max|) / 2033)),
//                  zero = clamp(rint(-min / scale), -2033, 2048);
//                  code = clamp(rint(k / scale + zero), 0, 15), value = (code - zero) scale.
//                  A group with max = min, or whose scale rounds to 0: half(max), -1, codes 0
//   q4, V          as fp8
//   int8_g64       per 64 channels a half scale: half(min(absmax / 127, 65504)), 1 for zeros;
//                  code = clamp(rint(x / scale), -127, 127), value = code scale
//   int4_g32       per 32 channels the same with 7 for 127; a nibble holds code + 8, even channel
//                  low
//
// All arithmetic is float32 with IEEE division; rint rounds half to even.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ksl {

// Bytes of one row in each plane of a block (budget.h).
struct KvRow {
  int k, k_scale, v, v_scale;
};
// All zero for an unknown format.
KvRow kv_row(int format, int head_dim);
const char *kv_format_name(int format);
// Null, or what heads the format takes, where it does not take these: "heads of ...".
const char *kv_format_limit(int format, int head_dim);

// x [d] := x times the natural-order Hadamard matrix / sqrt(d); d is a power of two. Its own
// inverse: a query rotated in the same way gives the same dot products.
void kv_rotate(float *x, int d);

enum { kKvKey = 0, kKvValue = 1 };
// Writes x [d] (not yet rotated) as a row of `side`. d <= 256 where the format rotates.
void kv_encode(int format, int side, const float *x, int d, void *codes, void *scales);
// The values of a row; a rotated K stays rotated.
void kv_decode(int format, int side, const void *codes, const void *scales, int d, float *out);

}  // namespace ksl
