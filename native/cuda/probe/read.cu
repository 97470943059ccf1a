// What the device has: free memory, for the plan at start, and what its memory gives a plain
// reader, for the bench.
#include "../common/device.cuh"

namespace {

__global__ void __launch_bounds__(512) read_kernel(const uint4 *data, size_t n, unsigned *sink) {
  unsigned sum = 0;
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __ldcs(data + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; k++) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

}  // namespace

// Bytes per second of reading `bytes` of device memory once, best of five; negative on failure.
extern "C" __attribute__((visibility("default"))) double ksl_cuda_read_bandwidth(size_t bytes) {
  uint4 *data = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  if (cudaMalloc(&data, bytes + 16) != cudaSuccess) return -1;
  cudaMemset(data, 1, bytes);
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float best = 0;
  for (int i = 0; i < 6; i++) {
    cudaEventRecord(begin);
    read_kernel<<<132 * 8, 512>>>(data, bytes / 16, reinterpret_cast<unsigned *>(data) + bytes / 4);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 0 && (best == 0 || ms < best)) best = ms;
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaFree(data);
  return cudaGetLastError() == cudaSuccess && best > 0 ? static_cast<double>(bytes) / best * 1e3
                                                       : -1;
}

// Free bytes of the device, 0 on failure.
extern "C" __attribute__((visibility("default"))) uint64_t ksl_cuda_free_bytes(void) {
  size_t free_bytes = 0, total = 0;
  if (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess) return free_bytes;
  cudaGetLastError();
  return 0;
}

// Why there are none; empty where there are.
extern "C" __attribute__((visibility("default"))) const char *ksl_cuda_problem(void) {
  size_t free_bytes = 0, total = 0;
  const cudaError_t code = cudaMemGetInfo(&free_bytes, &total);
  cudaGetLastError();
  return code == cudaSuccess ? "" : cudaGetErrorString(code);
}
