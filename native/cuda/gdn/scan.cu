// The gated delta rule token by token, and the gated norm of its output. A block has one value head
// of one row; its threads hold a quarter of the key dimension of one value column each, so a state
// is read and written once per row.
//
// Per token: d = beta (v - decay (k S)),  S := k d + decay S,  o = q S.
#include "gdn.cuh"

namespace ksl {

namespace {

constexpr int kParts = 4;

// kKeys: elements of the key dimension of one thread. kThreads: most threads of a block.
template <int kKeys, int kThreads>
__global__ void __launch_bounds__(kThreads) scan_kernel(const __grid_constant__ ScanArgs a) {
  begin_chained();
  __shared__ float keys[kMaxKeyDim], queries[kMaxKeyDim], scratch[32];
  __shared__ float sums[kParts][kMaxValueDim];
  const GdnShape &s = a.shape;
  const RowInfo &row = a.rows[blockIdx.x];
  const int n = a.keep ? row.committed : row.n;
  if (row.tiled || n == 0 || (a.keep && row.keep < 0)) return;
  const int head = blockIdx.y, v = threadIdx.x, part = threadIdx.y;
  const int dk = s.key_dim, dv = s.value_dim;
  const int tid = part * blockDim.x + v, threads = blockDim.x * kParts;
  const bool mine = v < dv;
  const bool commit = a.keep || row.keep < 0;
  const int first = a.keep ? row.keep : row.column;
  const int key_at = head / (s.value_heads / s.key_heads) * dk;
  const int value_at = 2 * s.key_heads * dk + head * dv;
  const int64_t state_at = a.slabs.state_offset + static_cast<int64_t>(head) * dk * dv;
  float *slab = a.slabs.data + row.slab * a.slabs.stride + state_at;
  float state[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; i++) {
    const int k = part * kKeys + i;
    state[i] = mine && k < dk ? slab[k * dv + v] : 0.0f;
  }
  const auto store = [&](float *to) {
    if (!mine) return;
#pragma unroll
    for (int i = 0; i < kKeys; i++) {
      const int k = part * kKeys + i;
      if (k < dk) to[k * dv + v] = state[i];
    }
  };
  int cut = 0;
  for (int t = 0; t < n; t++) {
    const int64_t column = first + t;
    const float *conv = a.conv + column * a.conv_stride;
    __syncthreads();
    for (int i = tid; i < kParts * kKeys; i += threads) {
      keys[i] = i < dk ? conv[s.key_heads * dk + key_at + i] : 0.0f;
      queries[i] = i < dk ? conv[key_at + i] : 0.0f;
    }
    const float value = mine ? conv[value_at + v] : 0.0f;
    const float decay = a.decay[column * a.head_stride + head];
    const float beta = a.beta[column * a.head_stride + head];
    __syncthreads();
    float predicted = 0;
#pragma unroll
    for (int i = 0; i < kKeys; i++) predicted = fmaf(keys[part * kKeys + i], state[i], predicted);
    sums[part][v] = predicted;
    __syncthreads();
    predicted = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
    const float d = beta * fmaf(-decay, predicted, value);
    float out = 0;
#pragma unroll
    for (int i = 0; i < kKeys; i++) {
      state[i] = fmaf(keys[part * kKeys + i], d, decay * state[i]);
      out = fmaf(queries[part * kKeys + i], state[i], out);
    }
    __syncthreads();
    sums[part][v] = out;
    for (; !a.keep && cut < row.n_cuts && row.cut_offset[cut] == t + 1; cut++)
      store(a.slabs.data + row.cut_slab[cut] * a.slabs.stride + state_at);
    if (a.core == nullptr) continue;
    __syncthreads();
    out = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
    const float square = block_sum(mine && part == 0 ? out * out : 0.0f, scratch);
    if (!mine || part != 0) continue;
    const int64_t at = column * a.core_stride + head * dv + v;
    const float r = 1.0f / sqrtf(square / static_cast<float>(dv) + a.eps);
    const float gated = out * r * a.norm[v] * silu(a.z[at]);
    a.core[at] = out;
    a.gated[at] = gated;
    if (a.split.data != nullptr)
      split_store(a.split, static_cast<int>(column), head * dv + v, gated);
  }
  if (commit) store(slab);
}

template <int kThreads>
void run(Device *device, const ScanArgs &a, dim3 grid, dim3 block) {
  const int keys = divide_up(a.shape.key_dim, kParts);
  if (keys <= 4)
    KSL_CHAIN(device, "gdn_scan", (scan_kernel<4, kThreads>), grid, block, a);
  else if (keys <= 8)
    KSL_CHAIN(device, "gdn_scan", (scan_kernel<8, kThreads>), grid, block, a);
  else if (keys <= 16)
    KSL_CHAIN(device, "gdn_scan", (scan_kernel<16, kThreads>), grid, block, a);
  else
    KSL_CHAIN(device, "gdn_scan", (scan_kernel<32, kThreads>), grid, block, a);
}

}  // namespace

void gdn_scan(Device *device, const ScanArgs &a, int n_rows) {
  const dim3 grid(n_rows, a.shape.value_heads), block(padded32(a.shape.value_dim), kParts);
  if (block.x <= 128)
    run<512>(device, a, grid, block);
  else
    run<1024>(device, a, grid, block);
}

}  // namespace ksl
