// SwiGLU.
#include "act.cuh"

namespace ksl {

namespace {

__global__ void act_kernel(const float *gate, const float *up, float *act, int stride, int width,
                           Split split) {
  begin_chained();
  const int i = blockIdx.x * blockDim.x + threadIdx.x, column = blockIdx.y;
  if (i >= width) return;
  const int64_t at = static_cast<int64_t>(column) * stride + i;
  const float v = silu(gate[at]) * up[at];
  act[at] = v;
  if (split.data != nullptr) split_store(split, column, i, v);
}

}  // namespace

void mlp_act(Device *device, const float *gate, const float *up, float *act, int stride, int width,
             const Split &split, int columns) {
  KSL_CHAIN(device, "mlp_act", act_kernel, dim3(divide_up(width, 256), columns), 256, gate, up, act,
            stride, width, split);
}

}  // namespace ksl
