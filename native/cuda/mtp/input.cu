// What the MTP layer reads: the embedding and the trunk hidden state before it.
#include "input.cuh"

namespace ksl {

namespace {

__global__ void join_kernel(const __grid_constant__ JoinArgs a) {
  __shared__ float scratch[32];
  const int column = blockIdx.x, half = blockIdx.y;
  const float *x = a.embedding + static_cast<int64_t>(column) * a.stride;
  if (half) {
    const int source = a.columns.source[column];
    x = source == kSourceZero
            ? nullptr
            : (source == kSourceColumn ? a.final + static_cast<int64_t>(column - 1) * a.stride
                                       : a.hidden + source * a.hidden_stride);
  }
  const float *gain = half ? a.norm_hidden : a.norm_embedding;
  float square = 0;
  for (int i = threadIdx.x; x != nullptr && i < a.width; i += blockDim.x)
    square = fmaf(x[i], x[i], square);
  const float r = 1.0f / sqrtf(block_sum(square, scratch) / static_cast<float>(a.width) + a.eps);
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const float v = x == nullptr ? 0.0f : x[i] * r * gain[i];
    const int at = half * a.width + i;
    a.out[static_cast<int64_t>(column) * a.out_stride + at] = v;
    if (a.split.data != nullptr) split_store(a.split, column, at, v);
  }
}

}  // namespace

void mtp_join(Device *device, const JoinArgs &a) {
  KSL_LAUNCH(device, "mtp_join", join_kernel, dim3(a.columns.n, 2), 256, a);
}

}  // namespace ksl
