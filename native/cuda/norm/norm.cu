// Residual add and RMS norm. A row is a block's, or the blocks' of a cluster: small ones find room
// beside those of the products in front and behind, and a row is sooner there where several
// processors bring it. The additions are the same.
#include "../common/bulk.cuh"
#include "norm.cuh"
#include "run.cuh"

namespace ksl {

namespace {

constexpr int kParts = 4;

// Before parts_sum: `came` is where the sums arrive.
__device__ inline void begin_parts(unsigned came) {
  if (threadIdx.x == 0) {
    bulk_barrier(came, 1);
    bulk_barriers_made();
    bulk_expect(came, kParts * (blockDim.x >> 5) * sizeof(float));
  }
  cluster_arrive();
}
// block_sum over the blocks of a cluster, which have begun before their warps give each other sums.
// Nobody waits for what has been stored before, as for a barrier of the cluster.
__device__ inline float parts_sum(float v, int part, float *scratch, unsigned came) {
  const int warps = blockDim.x >> 5, lane = threadIdx.x & 31;
  v = warp_sum(v);
  cluster_began();
  if (lane < kParts)
    cluster_give(shared_at(scratch + part * warps + (threadIdx.x >> 5)), v, came, lane);
  bulk_wait(came, 0);
  float sum = 0;
  for (int i = 0; i < kParts * warps; i++) sum += scratch[i];
  return sum;
}

// The hidden state of a column's slab, whose place its row takes.
struct Hidden {
  float *at, *before;
  __device__ Hidden(const NormArgs &a, int column) : at(nullptr), before(nullptr) {
    const int row = a.keep.row_of[column];
    if (row < 0) return;
    at = a.keep.hidden + a.keep.rows[row].slab * a.keep.slab_stride;
    if (a.keep.before != nullptr)
      before = a.keep.before + static_cast<int64_t>(a.keep.entry[column]) * a.out_stride;
  }
  // Elements from i on. Those of slabs lie anywhere.
  __device__ void load(int i, int width, float (&v)[kRun]) const {
#pragma unroll
    for (int k = 0; k < kRun; k++) v[k] = before != nullptr && i + k < width ? at[i + k] : 0.0f;
  }
  __device__ void store(int i, int width, const float (&old)[kRun], const float (&v)[kRun]) const {
    if (at == nullptr) return;
    if (before != nullptr) store8(before + i, old);
#pragma unroll
    for (int k = 0; k < kRun; k++)
      if (i + k < width) at[i + k] = v[k];
  }
};

// The sum of the first slices, all of them on their way at one time; the number of the next.
__device__ inline int add_first(const float *from, const Slices &slices, int64_t stride,
                                float (&y)[kRun]) {
  constexpr int kAhead = 4;
  float more[kAhead - 1][kRun];
  load8(from, y);
#pragma unroll
  for (int k = 1; k < kAhead; k++)
    if (k < slices.n) load8(from + k * stride, more[k - 1]);
  const auto add = [](float (&to)[kRun], const float (&v)[kRun]) {
#pragma unroll
    for (int k = 0; k < kRun; k++) to[k] += v[k];
  };
  if (slices.n > 3 && slices.pairs) add(more[1], more[2]);
  if (slices.n > 1) add(y, more[0]);
  if (slices.n > 2) add(y, more[1]);
  if (slices.n > 3 && !slices.pairs) add(y, more[2]);
  return kAhead;
}

// Rows are padded to 16 elements, so whole runs may be read; what lies behind the width stays zero.
template <int kPasses, bool kParted, bool kKeeps>
__device__ __forceinline__ void norm_row(const NormArgs &a) {
  static_assert(!kParted || kPasses == 1, "a row at once");
  allow_next();
  __shared__ float scratch[32];
  __shared__ uint64_t came;
  if (kParted) {
    begin_parts(shared_at(&came));
    __syncthreads();
  }
  const int column = kParted ? blockIdx.x / kParts : blockIdx.x;
  const int part = kParted ? blockIdx.x % kParts : 0;
  const int first = part * blockDim.x + threadIdx.x;
  // No kernel writes it, so it is fetched before waiting where registers can hold it.
  constexpr bool kEarly = kPasses == 1;
  float gain[kRun];
  if (kEarly && a.gain != nullptr && first * kRun < a.width) load8(a.gain + first * kRun, gain);
  float old[kRun];
  if (kEarly && kKeeps) Hidden(a, column).load(first * kRun, a.width, old);
  wait_before();
  const int64_t at = static_cast<int64_t>(column) * a.stride;
  float x[kPasses][kRun];
  float square = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int i = (pass * blockDim.x + first) * kRun;
    if (i >= a.width) continue;
    load8(a.x + at + i, x[pass]);
    if (a.add != nullptr) {
      float y[kRun];
      const float *from = a.add + at + i;
      int next = 1 + a.slices.pairs;
      if constexpr (kParted) {
        next = add_first(from, a.slices, a.slice_stride, y);
      } else {
        load8(from, y);
        if (a.slices.pairs) add8(from + a.slice_stride, y);
      }
      // Wide rows have no registers for loads of more slices.
#pragma unroll kPasses == 1 && !kParted ? 4 : 1
      for (int slice = next; slice < a.slices.n; slice++) {
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
  square =
      kParted ? parts_sum(square, part, scratch, shared_at(&came)) : block_sum(square, scratch);
  if (a.gain == nullptr) return;
  const float r = norm_factor(square, a.width, a.eps);
  const bool zero = a.zero_at != nullptr && a.zero_at[column] == 0;
  float most = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int i = (pass * blockDim.x + first) * kRun;
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
    if (kKeeps) {
      const Hidden hidden(a, column);
      if (!kEarly) hidden.load(i, a.width, old);
      hidden.store(i, a.width, old, v);
    }
  }
  if (kParted || !a.split.direct) return;
  const Panel8 to = panel8_of(a.split);
  const int exponent = panel8_exponent(block_max(most, scratch));
  const float scale = __int_as_float((127 + exponent) << 23);
#pragma unroll
  for (int pass = 0; pass < kPasses; pass++) {
    const int i = (pass * blockDim.x + first) * kRun;
    if (i < a.width) panel8_store8(to, column, i, x[pass], scale);
  }
  if (threadIdx.x == 0) to.inverse[column] = __int_as_float((127 - exponent) << 23);
}

template <int kPasses, bool kKeeps>
__global__ void __launch_bounds__(1024) norm_kernel(const __grid_constant__ NormArgs a) {
  norm_row<kPasses, false, kKeeps>(a);
}
constexpr int kPartThreads = 256;
template <bool kKeeps>
__global__ void __cluster_dims__(kParts) __launch_bounds__(kPartThreads)
    norm_parts_kernel(const __grid_constant__ NormArgs a) {
  norm_row<1, true, kKeeps>(a);
}
constexpr int kOneBlock = 1024;  // elements that one block has as soon

template <bool kKeeps>
void launch(Device *device, const NormArgs &a, int columns) {
  const int threads = divide_up(a.width, kRun) > 1024 ? 1024 : padded32(divide_up(a.width, kRun));
  const int part = padded32(divide_up(divide_up(a.width, kRun), kParts));
  if (a.width > kOneBlock && part <= kPartThreads && !a.split.direct &&
      2 * columns * kParts <= device->room.processors)
    KSL_CHAIN(device, "norm", norm_parts_kernel<kKeeps>, columns * kParts, part, a);
  else if (a.width <= threads * kRun)
    KSL_CHAIN(device, "norm", (norm_kernel<1, kKeeps>), columns, threads, a);
  else
    KSL_CHAIN(device, "norm", (norm_kernel<2, kKeeps>), columns, threads, a);
}

}  // namespace

void add_norm(Device *device, const NormArgs &a, int columns) {
  if (a.keep.rows != nullptr)
    launch<true>(device, a, columns);
  else
    launch<false>(device, a, columns);
}

}  // namespace ksl
