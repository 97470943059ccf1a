// Residual add and RMS norm.
#include "norm.cuh"

namespace ksl {

namespace {

constexpr int kRun = 8;  // elements that a thread takes at once, kPasses times

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

// Rows are padded to 16 elements, so whole runs may be read; what lies behind the width stays zero.
template <int kPasses>
__global__ void __launch_bounds__(1024) norm_kernel(const __grid_constant__ NormArgs a) {
  allow_next();
  __shared__ float scratch[32];
  // No kernel writes it, so it is fetched before waiting where registers can hold it.
  constexpr bool kEarly = kPasses == 1;
  float gain[kRun];
  if (kEarly && a.gain != nullptr && threadIdx.x * kRun < a.width)
    load8(a.gain + threadIdx.x * kRun, gain);
  wait_before();
  const int column = blockIdx.x;
  const int64_t at = static_cast<int64_t>(column) * a.stride;
  float x[kPasses][kRun];
  float square = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int i = (pass * blockDim.x + threadIdx.x) * kRun;
    if (i >= a.width) continue;
    load8(a.x + at + i, x[pass]);
    if (a.add != nullptr) {
      float y[kRun];
      const float *from = a.add + at + i;
      load8(from, y);
      if (a.slices.pairs) add8(from + a.slice_stride, y);
      // Wide rows have no registers for loads of more slices.
#pragma unroll kPasses == 1 ? 4 : 1
      for (int slice = 1 + a.slices.pairs; slice < a.slices.n; slice++) {
        float more[kRun];
        load8(from + slice * a.slice_stride, more);
        if (a.slices.pairs) add8(from + ++slice * a.slice_stride, more);
#pragma unroll
        for (int k = 0; k < kRun; k++) y[k] += more[k];
      }
      if (a.added != nullptr) store8(a.added + at + i, y);
#pragma unroll
      for (int k = 0; k < kRun; k++) x[pass][k] += y[k];
      store8(a.x + at + i, x[pass]);
    }
#pragma unroll
    for (int k = 0; k < kRun; k++)
      if (i + k < a.width) square = fmaf(x[pass][k], x[pass][k], square);
  }
  if (a.gain == nullptr) return;
  const float r = 1.0f / sqrtf(block_sum(square, scratch) / static_cast<float>(a.width) + a.eps);
  const bool zero = a.zero_at != nullptr && a.zero_at[column] == 0;
  float most = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int i = (pass * blockDim.x + threadIdx.x) * kRun;
    if (i >= a.width) continue;
    float (&v)[kRun] = x[pass];
    if (!kEarly) load8(a.gain + i, gain);
#pragma unroll
    for (int k = 0; k < kRun; k++) {
      v[k] = zero || i + k >= a.width ? 0.0f : v[k] * r * gain[k];
      most = fmaxf(most, fabsf(v[k]));
    }
    if (a.out != nullptr) store8(a.out + static_cast<int64_t>(column) * a.out_stride + i, v);
    if (a.split.data != nullptr && !a.split.direct) split_store8(a.split, column, i, v);
  }
  if (!a.split.direct) return;
  const Panel8 to = panel8_of(a.split);
  const int exponent = panel8_exponent(block_max(most, scratch));
  const float scale = __int_as_float((127 + exponent) << 23);
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int i = (pass * blockDim.x + threadIdx.x) * kRun;
    if (i < a.width) panel8_store8(to, column, i, x[pass], scale);
  }
  if (threadIdx.x == 0) to.inverse[column] = __int_as_float((127 - exponent) << 23);
}

}  // namespace

void add_norm(Device *device, const NormArgs &a, int columns) {
  const int threads = divide_up(a.width, kRun) > 1024 ? 1024 : padded32(divide_up(a.width, kRun));
  if (a.width <= threads * kRun)
    KSL_CHAIN(device, "norm", norm_kernel<1>, columns, threads, a);
  else
    KSL_CHAIN(device, "norm", norm_kernel<2>, columns, threads, a);
}

}  // namespace ksl
