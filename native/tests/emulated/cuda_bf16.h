// Pairs of bf16 on the host. Names are CUDA's.
#pragma once
#include "small_float.h"

struct alignas(4) __nv_bfloat162 {
  uint16_t x, y;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {ksl::f32_to_bf16(x), ksl::f32_to_bf16(y)};
}
inline float __low2float(__nv_bfloat162 v) {
  return ksl::bf16_to_f32(v.x);
}
inline float __high2float(__nv_bfloat162 v) {
  return ksl::bf16_to_f32(v.y);
}
