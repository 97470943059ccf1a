// Residual add and RMS norm. A row is a block's, or the blocks' of a cluster: small ones find room
// beside those of the products in front and behind, and a row is sooner there where several
// processors bring it. The additions are the same.
#include "../common/bulk.cuh"
#include "norm.cuh"
#include "run.cuh"

namespace ksl {

namespace {

constexpr int kParts = 4;
constexpr int kPartThreads = 256;
// Of a processor: registers for more would keep blocks from coming up beside those of a product.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kPartBlocks = 1;  // it has enough
#else
constexpr int kPartBlocks = 4;
#endif

// Before parts_sum: `came` is where the sums arrive. All blocks of the cluster have begun then.
__device__ inline void begin_parts(unsigned came) {
  if (threadIdx.x == 0) {
    bulk_barrier(came, 1);
    bulk_barriers_made();
    bulk_expect(came, kParts * (blockDim.x >> 5) * sizeof(float));
  }
  cluster_arrive();
  __syncthreads();
  cluster_began();
}
// block_sum over the blocks of a cluster. Nobody waits for what has been stored before, as for a
// barrier of the cluster. gives: false, and it is the sum of nothing.
__device__ inline float parts_sum(float v, int part, const float4 *scratch, unsigned came,
                                  bool gives) {
  const int warps = blockDim.x >> 5, lane = threadIdx.x & 31;
  v = warp_sum(v);
  if (gives) {
    if (lane < kParts)
      cluster_give(shared_at(scratch) + 4 * (part * warps + (threadIdx.x >> 5)), v, came, lane);
    bulk_wait(came, 0);
  }
  constexpr int kFours = kParts * kPartThreads / 32 / 4;
  float4 four[kFours];
#pragma unroll
  for (int i = 0; i < kFours; i++)
    if (4 * i < kParts * warps) four[i] = scratch[i];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kFours; i++)
    if (4 * i < kParts * warps) sum = (((sum + four[i].x) + four[i].y) + four[i].z) + four[i].w;
  return sum;
}

// Loads and stores that may be left out without a branch around what they need or make.
__device__ inline void load8_if(bool wanted, const float *p, float (&v)[kRun]) {
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %9, 0;\n"
      " @wanted ld.global.v4.f32 {%0, %1, %2, %3}, [%8];\n"
      " @wanted ld.global.v4.f32 {%4, %5, %6, %7}, [%8 + 16];\n}"
      : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3]), "+f"(v[4]), "+f"(v[5]), "+f"(v[6]),
        "+f"(v[7])
      : "l"(p), "r"(static_cast<unsigned>(wanted))
      : "memory");
}
__device__ inline void store8_if(bool wanted, float *p, const float (&v)[kRun]) {
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %9, 0;\n"
      " @wanted st.global.v4.f32 [%8], {%0, %1, %2, %3};\n"
      " @wanted st.global.v4.f32 [%8 + 16], {%4, %5, %6, %7};\n}" ::"f"(v[0]),
      "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]), "l"(p),
      "r"(static_cast<unsigned>(wanted))
      : "memory");
}
__device__ inline void store16_if(bool wanted, void *p, const uint4 &v) {
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %5, 0;\n"
      " @wanted st.global.v4.u32 [%4], {%0, %1, %2, %3};\n}" ::"r"(v.x),
      "r"(v.y), "r"(v.z), "r"(v.w), "l"(p), "r"(static_cast<unsigned>(wanted))
      : "memory");
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

// Slices that are on their way at one time.
constexpr int kMostAhead = 4;
// Adds the first slices in the order of all: those that are not there are zeros and left out.
__device__ inline void add_slices(float (&y)[kMostAhead][kRun], const Slices &slices) {
  const auto add = [](bool wanted, float (&to)[kRun], const float (&v)[kRun]) {
#pragma unroll
    for (int k = 0; k < kRun; k++) to[k] = wanted ? to[k] + v[k] : to[k];
  };
  add(slices.n > 3 && slices.pairs, y[2], y[3]);
  add(slices.n > 1, y[0], y[1]);
  add(slices.n > 2, y[0], y[2]);
  add(slices.n > 3 && !slices.pairs, y[0], y[3]);
}

// Rows are padded to 16 elements, so whole runs may be read; what lies behind the width stays zero.
template <int kPasses, bool kKeeps>
__global__ void __launch_bounds__(1024) norm_kernel(const __grid_constant__ NormArgs a) {
  allow_next();
  __shared__ float scratch[32];
  const int column = blockIdx.x, first = threadIdx.x;
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
  square = block_sum(square, scratch);
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
  if (!a.split.direct) return;
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

// The same of rows that a cluster divides. A block goes through it twice: the first time it waits
// for nothing, takes nothing and leaves nothing, but for the second time the code is there.
template <bool kKeeps>
__global__ void __cluster_dims__(kParts) __launch_bounds__(kPartThreads, kPartBlocks)
    norm_parts_kernel(const __grid_constant__ NormArgs a) {
  allow_next();
  __shared__ float4 scratch[kParts * kPartThreads / 32 / 4];
  __shared__ uint64_t came;
  begin_parts(shared_at(&came));
  const int column = blockIdx.x / kParts, part = blockIdx.x % kParts;
  const int i = (part * blockDim.x + threadIdx.x) * kRun;
  const bool there = i < a.width;
  float gain[kRun] = {}, old[kRun] = {};
  load8_if(there && a.gain != nullptr, a.gain + i, gain);
  if (kKeeps) Hidden(a, column).load(i, a.width, old);
  const int64_t at = static_cast<int64_t>(column) * a.stride + i;
  const float *const from = a.add + at;
  const bool adds = a.add != nullptr;
#pragma unroll 1
  for (int round = first_round(); round < 2; round++) {
    const bool real = round == 1;
    if (real) wait_before();
    const bool works = real && there;
    float x[kRun] = {}, y[kMostAhead][kRun] = {};
    load8_if(works, a.x + at, x);
#pragma unroll
    for (int k = 0; k < kMostAhead; k++)
      load8_if(works && adds && k < a.slices.n, from + k * a.slice_stride, y[k]);
    if (adds) {
      add_slices(y, a.slices);
      // More of them come one by one, or two by two.
      for (int slice = kMostAhead; works && slice < a.slices.n; slice++) {
        float more[kRun];
        load8(from + slice * a.slice_stride, more);
        if (a.slices.pairs) add8(from + ++slice * a.slice_stride, more);
#pragma unroll
        for (int k = 0; k < kRun; k++) y[0][k] += more[k];
      }
      store8_if(works && a.added != nullptr, a.added + at, y[0]);
#pragma unroll
      for (int k = 0; k < kRun; k++) x[k] += y[0][k];
      store8_if(works, a.x + at, x);
    }
    const float square =
        parts_sum(add_squares(x, i, a.width, 0), part, scratch, shared_at(&came), real);
    if (a.gain == nullptr) continue;
    const float r = norm_factor(square, a.width, a.eps);
    const bool zero = a.zero_at != nullptr && a.zero_at[column] == 0;
#pragma unroll
    for (int k = 0; k < kRun; k++) x[k] = zero || i + k >= a.width ? 0.0f : x[k] * r * gain[k];
    store8_if(works && a.out != nullptr, a.out + static_cast<int64_t>(column) * a.out_stride + i,
              x);
    if (works && a.split.data != nullptr && split_is_rows(a.split))
      split_store8(a.split, column, i, x);
    store16_if(works && a.split.data != nullptr && !split_is_rows(a.split),
               split_at(a.split, column, i), split_halves8(a.split, x));
    if (kKeeps && works) Hidden(a, column).store(i, a.width, old, x);
  }
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
