// What every kernel file shares: launches whose errors are kept, and reductions with a fixed order.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../../common/abi.h"
#include "../../common/small_float.h"
#include "room.cuh"

namespace ksl {

// The stream that everything runs on, and the first error on it.
struct Device {
  cudaStream_t stream;
  cudaError_t error;
  const char *what;  // the operation that failed
  Room room;
};

inline bool keep_error(Device *device, cudaError_t code, const char *what) {
  if (code != cudaSuccess && device->error == cudaSuccess) {
    device->error = code;
    device->what = what;
  }
  return code == cudaSuccess;
}

// kernel<<<grid, block, 0, stream>>>(...) with its error under the kernel's name.
#define KSL_LAUNCH(device, name, kernel, grid, block, ...)         \
  do {                                                             \
    kernel<<<(grid), (block), 0, (device)->stream>>>(__VA_ARGS__); \
    ksl::keep_error((device), cudaGetLastError(), (name));         \
  } while (0)

// The same for kernels that begin with begin_chained: their blocks may come up while the kernel
// before them ends. In clusters of so many blocks of a row of the grid, if more than one.
template <class... P, class... A>
inline void launch_clusters(Device *device, const char *name, void (*kernel)(P...), dim3 grid,
                            dim3 block, size_t shared, int cluster, const A &...arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = device->stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  keep_error(device, cudaLaunchKernelEx(&config, kernel, P(arguments)...), name);
}
template <class... P, class... A>
inline void launch_chained(Device *device, const char *name, void (*kernel)(P...), dim3 grid,
                           dim3 block, size_t shared, const A &...arguments) {
  launch_clusters(device, name, kernel, grid, block, shared, 1, arguments...);
}
// Lets a kernel have `bytes` of shared memory.
template <class... P>
inline bool raise_shared(Device *device, void (*kernel)(P...), size_t bytes) {
  return keep_error(device,
                    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)),
                    "preparing a kernel");
}

// Lets a processor that runs a kernel have as much shared memory as it can: what is to come up
// beside it may need what the kernel itself does not.
template <class... P>
inline bool prefer_shared(Device *device, void (*kernel)(P...)) {
  return keep_error(device,
                    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared),
                    "preparing a kernel");
}

#define KSL_CHAIN(device, name, kernel, grid, block, ...) \
  ksl::launch_chained((device), (name), (kernel), (grid), (block), 0, __VA_ARGS__)

// Lets the next kernel come up, then waits until everything before this one is done and visible.
// Only what no kernel writes may be read before.
__device__ inline void allow_next() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ inline void wait_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ inline void begin_chained() {
  allow_next();
  wait_before();
}

// Zero, which the compiler does not know. Of kernels that go through what they do twice: the first
// time before they wait, of nothing, so that the code is there when they need it.
__device__ inline int first_round() {
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return zero;
}

constexpr unsigned kAll = 0xffffffffu;

// Sum over a warp: every lane gets the same bits.
__device__ inline float warp_sum(float v) {
  for (int i = 16; i > 0; i >>= 1) v += __shfl_xor_sync(kAll, v, i);
  return v;
}
__device__ inline float warp_max(float v) {
  for (int i = 16; i > 0; i >>= 1) v = fmaxf(v, __shfl_xor_sync(kAll, v, i));
  return v;
}
__device__ inline float warp_min(float v) {
  for (int i = 16; i > 0; i >>= 1) v = fminf(v, __shfl_xor_sync(kAll, v, i));
  return v;
}

// Over the four lanes that have a row of a product's fragment.
__device__ inline float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(kAll, v, 1));
  return fmaxf(v, __shfl_xor_sync(kAll, v, 2));
}
__device__ inline float quad_sum(float v) {
  v += __shfl_xor_sync(kAll, v, 1);
  return v + __shfl_xor_sync(kAll, v, 2);
}

// Sum over a block whose size is a multiple of 32. scratch: [32] shared floats.
__device__ inline float block_sum(float v, float *scratch) {
  const int tid = threadIdx.x + blockDim.x * threadIdx.y;
  const int warps = (blockDim.x * blockDim.y) >> 5;
  v = warp_sum(v);
  __syncthreads();
  if ((tid & 31) == 0) scratch[tid >> 5] = v;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < warps; i++) sum += scratch[i];
  return sum;
}
__device__ inline float block_max(float v, float *scratch) {
  const int tid = threadIdx.x + blockDim.x * threadIdx.y;
  const int warps = (blockDim.x * blockDim.y) >> 5;
  v = warp_max(v);
  __syncthreads();
  if ((tid & 31) == 0) scratch[tid >> 5] = v;
  __syncthreads();
  float most = scratch[0];
  for (int i = 1; i < warps; i++) most = fmaxf(most, scratch[i]);
  return most;
}

__device__ inline float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}
// The numerator is kept finite: -infinity has the limit 0.
__device__ inline float silu(float x) {
  return fmaxf(-3.4028235e38f, x) / (1.0f + expf(-x));
}

inline int padded32(int n) {
  return (n + 31) / 32 * 32;
}
inline int divide_up(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

}  // namespace ksl
