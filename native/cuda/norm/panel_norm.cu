// Residual add and RMS norm of waves of many tokens, whose readers take panels. A block is one
// token; a thread has the elements of whole 16-byte chunks, see panel.cuh and quantize.cu.
#include "norm.cuh"

namespace ksl {

namespace {

constexpr int kItems = 2;  // of a thread: elements 4 i to 4 i + 3 of the four runs of 16 of a piece
constexpr int kMost = kMaxHidden / 16 / kItems;  // threads

__device__ inline float4 add4(const float4 &a, const float4 &b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ inline unsigned two_halves(float x, float y) {
  const __half2 r = __halves2half2(panel_half(x), panel_half(y));
  return *reinterpret_cast<const unsigned *>(&r);
}
__device__ inline unsigned four_e4m3(const float4 &v, float scale) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v.y * scale), "f"(v.x * scale));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v.w * scale), "f"(v.z * scale));
  return low | static_cast<unsigned>(high) << 16;
}

__global__ void __launch_bounds__(kMost, 1) panel_norm_kernel(const __grid_constant__ NormArgs a) {
  begin_chained();
  __shared__ float scratch[32];
  const int token = blockIdx.x, items = a.split.pieces * 4;
  const int64_t row = static_cast<int64_t>(token) * a.stride;
  // Element of run 0 of an item; those of run s are 16 s later.
  const int begin = (threadIdx.x >> 2) * 64 + (threadIdx.x & 3) * 4;
  const auto first = [&](int k) { return begin + k * static_cast<int>(blockDim.x) * 16; };
  float *const at = a.x + row;
  float4 x[kItems][4];
#pragma unroll
  for (int k = 0; k < kItems; k++)
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const int i = first(k) + 16 * s;
      x[k][s] = i < a.width ? *reinterpret_cast<const float4 *>(at + i) : make_float4(0, 0, 0, 0);
    }
  if (a.add != nullptr) {
#pragma unroll
    for (int k = 0; k < kItems; k++)
#pragma unroll
      for (int s = 0; s < 4; s++) {
        const int i = first(k) + 16 * s;
        if (i >= a.width) continue;
        const float4 y = *reinterpret_cast<const float4 *>(a.add + row + i);
        if (a.added != nullptr) *reinterpret_cast<float4 *>(a.added + row + i) = y;
        x[k][s] = add4(x[k][s], y);
        *reinterpret_cast<float4 *>(at + i) = x[k][s];
      }
  }
  float square = 0;
#pragma unroll
  for (int k = 0; k < kItems; k++)
#pragma unroll
    for (int s = 0; s < 4; s++) {
      float4 &v = x[k][s];
      const int left = a.width - first(k) - 16 * s;  // rows are padded to 16 elements
      if (left < 2) v.y = 0;
      if (left < 3) v.z = 0;
      if (left < 4) v.w = 0;
      square = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, square))));
    }
  const float r = 1.0f / sqrtf(block_sum(square, scratch) / static_cast<float>(a.width) + a.eps);
  float most = 0;
#pragma unroll
  for (int k = 0; k < kItems; k++)
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const int i = first(k) + 16 * s;
      if (i >= a.width) continue;
      float4 &v = x[k][s];
      const float4 gain = *reinterpret_cast<const float4 *>(a.gain + i);
      v = make_float4(v.x * r * gain.x, v.y * r * gain.y, v.z * r * gain.z, v.w * r * gain.w);
      most = fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
      if (a.out != nullptr)
        *reinterpret_cast<float4 *>(a.out + static_cast<int64_t>(token) * a.out_stride + i) = v;
    }
  if (!a.split.direct || a.split.halves) {
    const Panel to = panel_of(a.split);
#pragma unroll
    for (int k = 0; k < kItems; k++) {
      const int item = k * blockDim.x + threadIdx.x;
      if (item >= items) break;
      uint8_t *out = panel_row(to, token, item >> 2);
      uint4 low, high;
      unsigned *l = &low.x, *h = &high.x;
#pragma unroll
      for (int s = 0; s < 4; s++) {
        const float4 &v = x[k][s];
        l[s] = two_halves(v.x * to.scale, v.y * to.scale);
        h[s] = two_halves(v.z * to.scale, v.w * to.scale);
      }
      *reinterpret_cast<uint4 *>(out + ((2 * (item & 3)) ^ (token & 7)) * 16) = low;
      *reinterpret_cast<uint4 *>(out + ((2 * (item & 3) + 1) ^ (token & 7)) * 16) = high;
    }
  }
  if (!a.split.direct) return;
  const Panel8 to = panel8_of(a.split);
  const int exponent = panel8_exponent(block_max(most, scratch));
  const float scale = __int_as_float((127 + exponent) << 23);
#pragma unroll
  for (int k = 0; k < kItems; k++) {
    const int item = k * blockDim.x + threadIdx.x, piece = item >> 2;
    if (item >= items) break;
    *reinterpret_cast<uint4 *>(
        to.data + (static_cast<int64_t>(piece >> 1) * to.groups + (token >> 3)) * 1024 +
        (token & 7) * 128 + panel8_chunk(token, piece & 1, item & 3)) =
        make_uint4(four_e4m3(x[k][0], scale), four_e4m3(x[k][1], scale), four_e4m3(x[k][2], scale),
                   four_e4m3(x[k][3], scale));
  }
  if (threadIdx.x == 0) to.inverse[token] = __int_as_float((127 - exponent) << 23);
}

}  // namespace

void panel_norm(Device *device, const NormArgs &a, int columns) {
  KSL_CHAIN(device, "norm", panel_norm_kernel, columns,
            padded32(divide_up(a.split.pieces * 4, kItems)), a);
}

}  // namespace ksl
