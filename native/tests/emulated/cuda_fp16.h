// Halves on the host, by the conversions of common/small_float.h. Names are CUDA's.
#pragma once
#include <math.h>
#include <stdint.h>

#include "small_float.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline __half __float2half_rn(float v) {
  return {ksl::f32_to_f16(v)};
}
inline float __half2float(__half v) {
  return ksl::f16_to_f32(v.bits);
}
inline __half __ushort_as_half(unsigned short v) {
  return {v};
}
inline __half2 __halves2half2(__half x, __half y) {
  return {x, y};
}
inline __half2 __half2half2(__half v) {
  return {v, v};
}
inline __half2 __low2half2(__half2 v) {
  return {v.x, v.x};
}
inline __half2 __high2half2(__half2 v) {
  return {v.y, v.y};
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline __half2 __float2half2_rn(float v) {
  return __floats2half2_rn(v, v);
}
inline float __low2float(__half2 v) {
  return __half2float(v.x);
}
inline float __high2float(__half2 v) {
  return __half2float(v.y);
}
inline __half2 __hmul2(__half2 a, __half2 b) {
  return __floats2half2_rn(__low2float(a) * __low2float(b), __high2float(a) * __high2float(b));
}
inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(__low2float(a) - __low2float(b), __high2float(a) - __high2float(b));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __floats2half2_rn(fmaf(__low2float(a), __low2float(b), __low2float(c)),
                           fmaf(__high2float(a), __high2float(b), __high2float(c)));
}
