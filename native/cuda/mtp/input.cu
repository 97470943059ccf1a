// What the MTP layer reads: the embedding and the trunk hidden state before it.
#include "input.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 1024, kPasses = 16;

// A block is one half of one column.
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ JoinArgs a) {
  begin_chained();
  __shared__ float scratch[32];
  const int column = blockIdx.x, half = blockIdx.y;
  const float *x = nullptr;
  if (half) {
    const int source = a.columns.source[column];
    if (source == kSourceColumn)
      x = a.final + static_cast<int64_t>(column - 1) * a.stride;
    else if (source != kSourceZero)
      x = a.hidden + source * a.hidden_stride;
  }
  const int64_t token = a.columns.token[column];
  float v[kPasses], square = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int i = pass * kThreads + threadIdx.x;
    if (i >= a.width) break;
    v[pass] = half ? (x == nullptr ? 0.0f : x[i]) : raw_any(a.embedding, token, i);
    square = fmaf(v[pass], v[pass], square);
  }
  const float r = 1.0f / sqrtf(block_sum(square, scratch) / static_cast<float>(a.width) + a.eps);
  const float *gain = half ? a.norm_hidden : a.norm_embedding;
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int i = pass * kThreads + threadIdx.x;
    if (i >= a.width) break;
    const float y = v[pass] * r * gain[i];
    const int at = half * a.width + i;
    a.out[static_cast<int64_t>(column) * a.out_stride + at] = y;
    if (a.split.data != nullptr) split_store(a.split, column, at, y);
  }
}

}  // namespace

void mtp_join(Device *device, const JoinArgs &a) {
  KSL_CHAIN(device, "mtp_join", join_kernel, dim3(a.columns.n, 2), kThreads, a);
}

}  // namespace ksl
