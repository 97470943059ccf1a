// Residual add and RMS norm.
#include "norm.cuh"
#include "run.cuh"

namespace ksl {

namespace {

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
    load8(a.from + at + i, x[pass]);
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
    square = add_squares(x[pass], i, a.width, square);
  }
  if (a.gain == nullptr) return;
  const float r = norm_factor(block_sum(square, scratch), a.width, a.eps);
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
