// Embedding rows and rotary tables.
#include "embed.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 256;

// A block is a part of a column's row or, the last one, its rotary factors. It comes up when all
// before it is done: kernels behind it read plans before they wait.
__global__ void __launch_bounds__(kThreads)
    embed_kernel(Raw table, Columns columns, float *x, int stride, Rotary rotary) {
  allow_next();
  const int column = blockIdx.x;
  if (blockIdx.y < gridDim.y - 1) {
    const int i = blockIdx.y * kThreads + threadIdx.x;
    if (i < table.cols)
      x[static_cast<int64_t>(column) * stride + i] = raw_any(table, columns.token[column], i);
    return;
  }
  for (int i = threadIdx.x; i < rotary.half; i += kThreads) {
    const double angle = columns.position[column] * rotary.frequency[i];
    rotary.cos[column * rotary.half + i] = static_cast<float>(cos(angle));
    rotary.sin[column * rotary.half + i] = static_cast<float>(sin(angle));
  }
}

}  // namespace

void embed(Device *device, const Raw &table, const Columns &columns, float *x, int stride,
           const Rotary &rotary) {
  KSL_LAUNCH(device, "embed", embed_kernel, dim3(columns.n, divide_up(table.cols, kThreads) + 1),
             kThreads, table, columns, x, stride, rotary);
}

void rotary(Device *device, const Columns &columns, const Rotary &rotary) {
  KSL_LAUNCH(device, "rotary", embed_kernel, dim3(columns.n, 1), kThreads, Raw{}, columns, nullptr,
             0, rotary);
}

}  // namespace ksl
