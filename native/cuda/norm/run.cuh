// Runs of a residual's row: what the kernels that make RMS norms do to eight elements of a thread.
#pragma once
#include "../common/device.cuh"

namespace ksl {

constexpr int kRun = 8;  // elements that a thread takes at once

__device__ inline void load8(const float *p, float (&v)[kRun]) {
  const float4 a = *reinterpret_cast<const float4 *>(p);
  const float4 b = *reinterpret_cast<const float4 *>(p + 4);
  v[0] = a.x;
  v[1] = a.y;
  v[2] = a.z;
  v[3] = a.w;
  v[4] = b.x;
  v[5] = b.y;
  v[6] = b.z;
  v[7] = b.w;
}
__device__ inline void store8(float *p, const float (&v)[kRun]) {
  *reinterpret_cast<float4 *>(p) = make_float4(v[0], v[1], v[2], v[3]);
  *reinterpret_cast<float4 *>(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ inline void add8(const float *p, float (&v)[kRun]) {
  float more[kRun];
  load8(p, more);
#pragma unroll
  for (int k = 0; k < kRun; k++) v[k] += more[k];
}

// Of elements i to i + 7 of a row.
__device__ inline float add_squares(const float (&v)[kRun], int i, int width, float sum) {
#pragma unroll
  for (int k = 0; k < kRun; k++)
    if (i + k < width) sum = fmaf(v[k], v[k], sum);
  return sum;
}
__device__ inline float norm_factor(float squares, int width, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(width) + eps);
}

}  // namespace ksl
