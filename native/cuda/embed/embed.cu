// Embedding rows and rotary tables.
#include "embed.cuh"

namespace ksl {

namespace {

__global__ void embed_kernel(Raw table, const int32_t *token, float *x, int stride) {
  const int column = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i < table.cols)
    x[static_cast<int64_t>(column) * stride + i] = raw_any(table, token[column], i);
}

__global__ void rotary_kernel(const int32_t *position, int n, const double *frequency, int half,
                              float *cosine, float *sine) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n * half) return;
  const double angle = position[i / half] * frequency[i % half];
  cosine[i] = static_cast<float>(cos(angle));
  sine[i] = static_cast<float>(sin(angle));
}

}  // namespace

void embed(Device *device, const Raw &table, const Columns &columns, float *x, int stride) {
  KSL_LAUNCH(device, "embed", embed_kernel, dim3(columns.n, divide_up(table.cols, 256)), 256, table,
             columns.token, x, stride);
}

void rotary(Device *device, const Columns &columns, const double *frequency, int half, float *cos,
            float *sin) {
  if (half == 0) return;
  KSL_LAUNCH(device, "rotary", rotary_kernel,
             divide_up(static_cast<int64_t>(columns.n) * half, 128), 128, columns.position,
             columns.n, frequency, half, cos, sin);
}

}  // namespace ksl
