// What lies between the projections of a linear layer, for heads of 128 dims and rows that are not
// tiled: convolution, unit norm, gates, the recurrence of scan.cu and the gated norm. A block has
// one value head of one row and reads and writes its state once, however many tokens the row has.
//
// A warp has 16 value dims of all keys: a lane four of the dims and 16 of the keys, so that the
// recurrence needs no more than shuffles. The kernel is kept short: most of its instructions run
// once, so fetching them costs as much as running them.
//
// Blocks of one key head read the same history of queries and keys: the last of them to have read
// it writes the new one.
#include "step.cuh"

namespace ksl {

namespace {

constexpr int kBatch = 1 + KSL_MAX_DRAFT;  // tokens whose inputs are made at one time

enum Input { kQuery, kKey, kValue, kGate, kInputs };
struct Shared {
  // First as they were projected, then the unit queries and keys, the values (at last the outputs)
  // and silu(z).
  float inputs[kInputs][kBatch][kDim];
  float windows[2][kHistory][kThreads];  // of the convolution, behind the batch
  float norm[kDim];
  float decay[kBatch], beta[kBatch];
  bool last;
};

// What makes a query or key in shared memory one of unit length, by a warp; y: a lane's elements of
// it, from x on, 32 apart.
__device__ inline float unit_factor(const float *x, float (&y)[4]) {
  float sum[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    y[k] = x[k * 32];
    sum[k] = y[k] * y[k];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int k = 0; k < 4; k++) sum[k] += __shfl_xor_sync(kAll, sum[k], step);
  }
  return 1.0f / sqrtf((((sum[0] + sum[1]) + sum[2]) + sum[3]) + 1e-6f);
}

// kReplay: of kept rows the committed columns, in all layers of the launch; only the state and its
// history are wanted.
template <bool kReplay>
__global__ void __launch_bounds__(kThreads, 2) step_kernel(const __grid_constant__ StepArgs a) {
  constexpr int kWide = 4;
  typedef Dims<kWide> Lane;
  __shared__ __align__(16) Shared s;
  const GdnShape &shape = a.shape;
  const int head = blockIdx.x, layer = blockIdx.z;
  const RowInfo &row = a.rows[blockIdx.y];
  const int n = kReplay ? row.committed : row.n, slab = row.slab, column = row.column;
  const int n_cuts = kReplay ? 0 : row.n_cuts, first_kept = row.keep;
  const bool kept = first_kept >= 0, commits = kReplay || !kept;
  if (row.tiled || n == 0 || (kReplay && !kept)) return;
  const int group = shape.value_heads / shape.key_heads, key_head = head / group;
  const bool leads = head % group == 0;  // stores what blocks of a key head share
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  allow_next();

  Lane state[kKeys];
  const int dim = warp * (4 * kWide) + (lane & 3) * kWide, key = (lane >> 2) * 4;
  const int state_at = (head * kDim + key) * kDim + dim;
  const auto state_of = [&](int of) {
    return a.slabs.data + of * a.slabs.stride + a.slabs.state_offset + layer * a.state_layer;
  };
  // No kernel of this wave before this one writes what this layer remembers. Key of element i: key
  // + (i / 4) 32 + i % 4.
  {
    const float *const from = state_of(slab) + state_at;
#pragma unroll
    for (int i = 0; i < kKeys; i++)
      state[i] = take<!kReplay, kWide>(from + ((i >> 2) * 32 + (i & 3)) * kDim);
  }
  // What a block that comes up when this one ends will read.
  if (!kReplay && threadIdx.x == 0) {
    const int next = blockIdx.y * gridDim.x + head + a.together, other = next / gridDim.x;
    if (other < static_cast<int>(gridDim.y))
      bulk_ahead(state_of(a.rows[other].slab) + next % gridDim.x * (kDim * kDim),
                 kDim * kDim * sizeof(float));
  }

  // Threads 0 to 127 have a key and a value channel, the others one of the queries.
  const bool is_key = threadIdx.x < kDim;
  const int own = threadIdx.x & (kDim - 1);
  const int value_at = (2 * shape.key_heads + head) * kDim;
  const int channel = ((is_key ? shape.key_heads : 0) + key_head) * kDim + own;
  float *const history =
      a.slabs.data + slab * a.slabs.stride + a.slabs.history_offset + layer * a.history_layer;
  Channel first, second;
  first.load(a.taps[layer] + channel, history + channel, shape.channels, shape.channels);
  if (is_key)
    second.load(a.taps[layer] + value_at + own, history + value_at + own, shape.channels,
                shape.channels);
  float *const keep =
      a.keep + layer * a.keep_layer + static_cast<int64_t>(kept ? first_kept : 0) * a.keep_stride;
  const float *const in = kReplay ? keep : a.qkv + static_cast<int64_t>(column) * a.qkv_stride;
  const int in_stride = kReplay ? a.keep_stride : a.qkv_stride;
  if (!kReplay && threadIdx.x < kDim / 4)
    copy_async<16>(s.norm + threadIdx.x * 4, a.norm + threadIdx.x * 4, true);
  wait_before();

#pragma unroll 1
  for (int cut = 0; cut < n_cuts; cut++) {
    float *const to = a.slabs.data + row.cut_slab[cut] * a.slabs.stride + a.slabs.history_offset;
#pragma unroll 1
    for (int t = 0; t < kHistory; t++) {
      const int at = row.cut_offset[cut] - kHistory + t;
      const float *const from =
          at < 0 ? history + (kHistory + at) * shape.channels : in + at * in_stride;
      if (leads) to[t * shape.channels + channel] = from[channel];
      if (is_key) to[t * shape.channels + value_at + own] = from[value_at + own];
    }
  }
  unsigned before = 0;
#pragma unroll 1
  for (int begin = 0; begin < n; begin += kBatch) {
    const int m = min(kBatch, n - begin);
    if (begin > 0) {
      __syncthreads();
      first.load(a.taps[layer] + channel, s.windows[0][0] + threadIdx.x, shape.channels, kThreads);
      if (is_key)
        second.load(a.taps[layer] + value_at + own, s.windows[1][0] + threadIdx.x, shape.channels,
                    kThreads);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < m * 128; i += kThreads) {
      const int t = i >> 7, input = i >> 5 & 3, at = (i & 31) * 4;
      const int from = input == kValue ? value_at : (input * shape.key_heads + key_head) * kDim;
      const float *source = in + (begin + t) * in_stride + from + at;
      if (!kReplay && input == kGate)
        source = a.z + static_cast<int64_t>(column + begin + t) * a.value_stride + head * kDim + at;
      if (!kReplay || input != kGate) copy_async<16>(&s.inputs[input][t][at], source, true);
    }
    copy_commit();
    // The gates, by the last two warps.
    if (warp >= kWarps - 2 && lane < m) {
      const bool decays = warp == kWarps - 1;
      float *const to = keep + (begin + lane) * a.keep_stride + a.qkv_stride +
                        (decays ? 0 : a.head_stride) + head;
      float gate;
      if (kReplay) {
        gate = *to;
      } else {
        const int64_t at = static_cast<int64_t>(column + begin + lane) * a.head_stride + head;
        float g;
        gate =
            decays ? gdn_decay(a.a[at], a.decay_rate[head], a.dt_bias[head], &g) : sigmoid(a.b[at]);
        if (kept) *to = gate;
      }
      (decays ? s.decay : s.beta)[lane] = gate;
    }
    copy_wait<0>();
    __syncthreads();
#pragma unroll 2
    for (int t = 0; t < m; t++) {
      const float x = s.inputs[is_key ? kKey : kQuery][t][own];
      const float y = s.inputs[is_key ? kValue : kGate][t][own];
      if (!kReplay && kept) {
        float *const to = keep + (begin + t) * a.keep_stride;
        if (leads) to[channel] = x;
        if (is_key) to[value_at + own] = y;
      }
      s.inputs[is_key ? kKey : kQuery][t][own] = first.next(x);
      s.inputs[is_key ? kValue : kGate][t][own] = is_key ? second.next(y) : silu(y);
    }
#pragma unroll
    for (int t = 0; t < kHistory; t++) {
      s.windows[0][t][threadIdx.x] = first.window[t + 1];
      s.windows[1][t][threadIdx.x] = second.window[t + 1];
    }
    __syncthreads();
    // The block has read the history, and used what it read.
    if (begin == 0 && threadIdx.x == 0 && group > 1 && commits)
      before = atomicInc(
          a.arrived + (static_cast<int64_t>(layer) * a.max_rows + blockIdx.y) * shape.key_heads +
              key_head,
          group - 1);
    // Unit queries and keys, one of a token per warp.
#pragma unroll 1
    for (int i = warp; i < 2 * m; i += kWarps) {
      float *const x = s.inputs[i & 1 ? kKey : kQuery][i >> 1] + lane;
      float y[4];
      const float r = unit_factor(x, y);
      const float scale = i & 1 ? 1.0f : 1.0f / sqrtf(static_cast<float>(kDim));
#pragma unroll
      for (int k = 0; k < 4; k++) x[k * 32] = y[k] * r * scale;
    }
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < m; t++) {
      const float *const keys = s.inputs[kKey][t] + key, *const queries = s.inputs[kQuery][t] + key;
      Lane sum = {};
#pragma unroll
      for (int i = 0; i < kKeys; i += 4) {
        const float4 k = *reinterpret_cast<const float4 *>(keys + i * 8);
        scale_add(sum, k.x, state[i]);
        scale_add(sum, k.y, state[i + 1]);
        scale_add(sum, k.z, state[i + 2]);
        scale_add(sum, k.w, state[i + 3]);
      }
      sum_keys(sum);
      const float decay = s.decay[t], beta = s.beta[t];
      const Lane v = *reinterpret_cast<const Lane *>(s.inputs[kValue][t] + dim);
      Lane d;
#pragma unroll
      for (int i = 0; i < kWide; i++) d.v[i] = beta * fmaf(-decay, sum.v[i], v.v[i]);
      Lane out = {};
      const auto update = [&](Lane &at, float k, float q) {
#pragma unroll
        for (int i = 0; i < kWide; i++) at.v[i] = fmaf(k, d.v[i], decay * at.v[i]);
        if (!kReplay) scale_add(out, q, at);
      };
#pragma unroll
      for (int i = 0; i < kKeys; i += 4) {
        const float4 k = *reinterpret_cast<const float4 *>(keys + i * 8);
        const float4 q = *reinterpret_cast<const float4 *>(queries + i * 8);
        update(state[i], k.x, q.x);
        update(state[i + 1], k.y, q.y);
        update(state[i + 2], k.z, q.z);
        update(state[i + 3], k.w, q.w);
        // All loads at once would not fit in registers.
        asm volatile("" ::: "memory");
      }
      if (!kReplay) {
        sum_keys(out);
        // Nobody else reads the values of these dims.
        __syncwarp();
        if (lane < 4)
          *reinterpret_cast<float4 *>(s.inputs[kValue][t] + dim) =
              reinterpret_cast<const float4 &>(out);
      }
      // Where the state goes from here: to the slab, to cuts.
      const bool ends = begin + t + 1 == n && commits;
#pragma unroll 1
      for (int cut = ends ? -1 : 0; cut < n_cuts; cut++) {
        if (cut >= 0 && row.cut_offset[cut] != begin + t + 1) continue;
        float *const to = state_of(cut < 0 ? slab : row.cut_slab[cut]) + state_at;
#pragma unroll
        for (int i = 0; i < kKeys; i++)
          give<!kReplay, kWide>(to + ((i >> 2) * 32 + (i & 3)) * kDim, state[i]);
      }
    }
    if (begin == 0 && threadIdx.x == 0) s.last = before == group - 1u;
    __syncthreads();
#pragma unroll 1
    for (int t = warp; !kReplay && t < m; t += kWarps) {
      const int token = column + begin + t, to = head * kDim + lane * 4;
      const float4 out = *reinterpret_cast<const float4 *>(s.inputs[kValue][t] + lane * 4);
      const float4 gate = *reinterpret_cast<const float4 *>(s.inputs[kGate][t] + lane * 4);
      const float4 gain = *reinterpret_cast<const float4 *>(s.norm + lane * 4);
      write_normed(a, token, to, out, gain, gate);
    }
  }
  if (!commits) return;
#pragma unroll
  for (int t = 0; t < kHistory; t++) {
    if (s.last) history[t * shape.channels + channel] = s.windows[0][t][threadIdx.x];
    if (is_key) history[t * shape.channels + value_at + own] = s.windows[1][t][threadIdx.x];
  }
}

}  // namespace

bool gdn_step_runs(const GdnShape &shape) {
  return shape.key_dim == kDim && shape.value_dim == kDim &&
         shape.value_heads % shape.key_heads == 0;
}

void gdn_step(Device *device, const StepArgs &a) {
  if (a.single) return gdn_single(device, a);
  // Where a device has room for twice as many blocks.
  if (a.long_rows && a.shape.value_heads * a.n_rows <= device->room.processors)
    return gdn_parts(device, a);
  KSL_CHAIN(device, "gdn_step", step_kernel<false>, dim3(a.shape.value_heads, a.n_rows), kThreads,
            a);
}

void gdn_replay(Device *device, const StepArgs &a, int layers) {
  KSL_CHAIN(device, "gdn_replay", step_kernel<true>, dim3(a.shape.value_heads, a.n_rows, layers),
            kThreads, a);
}

}  // namespace ksl
