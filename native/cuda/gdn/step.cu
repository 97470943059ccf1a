// The token recurrence of scan.cu for heads of 128 keys and 128 value dims. A block has one value
// head of one row; a warp holds 16 keys of the state, a lane four value dims of each, so a state is
// read and written once per row, 16 bytes at a time.
#include "gdn.cuh"

namespace ksl {

namespace {

constexpr int kDim = 128;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kKeys = kDim / kWarps;

struct Shared {
  float keys[2][2][kDim];  // of a token and of the next one: keys, queries
  float4 predicted[kWarps][32], out[kWarps][32];
};

__device__ inline void add(float4 &to, const float4 &v) {
  to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}
__device__ inline void scale_add(float4 &to, float a, const float4 &v) {
  to.x = fmaf(a, v.x, to.x), to.y = fmaf(a, v.y, to.y);
  to.z = fmaf(a, v.z, to.z), to.w = fmaf(a, v.w, to.w);
}
// What the warps have of this lane's dims, in a fixed order.
__device__ inline float4 sum_warps(const float4 (&parts)[kWarps][32], int lane) {
  float4 sums[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    sums[half] = parts[4 * half][lane];
    add(sums[half], parts[4 * half + 1][lane]);
    float4 other = parts[4 * half + 2][lane];
    add(other, parts[4 * half + 3][lane]);
    add(sums[half], other);
    asm volatile("" ::: "memory");  // all eight at once would not fit in registers
  }
  add(sums[0], sums[1]);
  return sums[0];
}

__global__ void __launch_bounds__(kThreads, 2) step_kernel(const __grid_constant__ ScanArgs a) {
  __shared__ Shared s;
  const GdnShape &shape = a.shape;
  const RowInfo &row = a.rows[blockIdx.x];
  const int n = a.keep ? row.committed : row.n;
  if (row.tiled || n == 0 || (a.keep && row.keep < 0)) return;
  const int head = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first = a.keep ? row.keep : row.column;
  const int key_head = head / (shape.value_heads / shape.key_heads);
  const auto state_of = [&](int slab) {
    return a.slabs.data + slab * a.slabs.stride + a.slabs.state_offset +
           ((head * kWarps + warp) * kKeys * kDim + lane * 4);
  };
  float4 state[kKeys];
  allow_next();
  // No kernel of this wave before this one writes the state of this layer.
  {
    const float *from = state_of(row.slab);
#pragma unroll
    for (int i = 0; i < kKeys; i++) state[i] = *reinterpret_cast<const float4 *>(from + i * kDim);
  }
  wait_before();
  const auto store = [&](int slab) {
    float *to = state_of(slab);
#pragma unroll
    for (int i = 0; i < kKeys; i++) *reinterpret_cast<float4 *>(to + i * kDim) = state[i];
  };
  const float *conv = a.conv + static_cast<int64_t>(first) * a.conv_stride;
  // Threads 0 to 127 have a key, the others a query.
  const int own = (threadIdx.x < kDim ? shape.key_heads * kDim : 0) + key_head * kDim +
                  (threadIdx.x & (kDim - 1));
  const int value_at = 2 * shape.key_heads * kDim + head * kDim + lane * 4;
  s.keys[0][threadIdx.x / kDim][threadIdx.x % kDim] = conv[own];
  int64_t gate_at = static_cast<int64_t>(first) * a.head_stride + head;
  __syncthreads();
  int cut = 0;
  for (int t = 0; t < n; t++) {
    const float *const keys = s.keys[t & 1][0] + warp * kKeys;
    const float *const queries = s.keys[t & 1][1] + warp * kKeys;
    const float4 v = *reinterpret_cast<const float4 *>(conv + value_at);
    const float decay = a.decay[gate_at], beta = a.beta[gate_at];
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < kKeys; i++) scale_add(sum, keys[i], state[i]);
    s.predicted[warp][lane] = sum;
    const bool more = t + 1 < n;
    conv += a.conv_stride;
    gate_at += a.head_stride;
    const float next_own = more ? conv[own] : 0.0f;
    __syncthreads();
    sum = sum_warps(s.predicted, lane);
    float4 d;
    d.x = beta * fmaf(-decay, sum.x, v.x), d.y = beta * fmaf(-decay, sum.y, v.y);
    d.z = beta * fmaf(-decay, sum.z, v.z), d.w = beta * fmaf(-decay, sum.w, v.w);
    float4 out = {};
#pragma unroll
    for (int i = 0; i < kKeys; i++) {
      const float k = keys[i];
      state[i].x = fmaf(k, d.x, decay * state[i].x), state[i].y = fmaf(k, d.y, decay * state[i].y);
      state[i].z = fmaf(k, d.z, decay * state[i].z), state[i].w = fmaf(k, d.w, decay * state[i].w);
      scale_add(out, queries[i], state[i]);
      if (i % 4 == 3) asm volatile("" ::: "memory");  // as above
    }
    s.out[warp][lane] = out;
    if (more) s.keys[(t + 1) & 1][threadIdx.x / kDim][threadIdx.x % kDim] = next_own;
    for (; !a.keep && cut < row.n_cuts && row.cut_offset[cut] == t + 1; cut++)
      store(row.cut_slab[cut]);
    __syncthreads();
    // The warps take turns at the tokens.
    if (a.core == nullptr || (t & (kWarps - 1)) != warp) continue;
    out = sum_warps(s.out, lane);
    const float square =
        warp_sum((out.x * out.x + out.y * out.y) + (out.z * out.z + out.w * out.w));
    const int column = first + t, dim = head * kDim + lane * 4;
    const int64_t at = static_cast<int64_t>(column) * a.core_stride + dim;
    const float r = 1.0f / sqrtf(square / static_cast<float>(kDim) + a.eps);
    const float4 gain = *reinterpret_cast<const float4 *>(a.norm + lane * 4);
    const float4 z = *reinterpret_cast<const float4 *>(a.z + at);
    const float4 y = make_float4(out.x * r * gain.x * silu(z.x), out.y * r * gain.y * silu(z.y),
                                 out.z * r * gain.z * silu(z.z), out.w * r * gain.w * silu(z.w));
    *reinterpret_cast<float4 *>(a.core + at) = out;
    *reinterpret_cast<float4 *>(a.gated + at) = y;
    if (a.split.data != nullptr) {
      split_store(a.split, column, dim, y.x);
      split_store(a.split, column, dim + 1, y.y);
      split_store(a.split, column, dim + 2, y.z);
      split_store(a.split, column, dim + 3, y.w);
    }
  }
  if (a.keep || row.keep < 0) store(row.slab);
}

}  // namespace

void gdn_step(Device *device, const ScanArgs &a, int n_rows) {
  KSL_CHAIN(device, "gdn_step", step_kernel, dim3(n_rows, a.shape.value_heads), kThreads, a);
}

}  // namespace ksl
