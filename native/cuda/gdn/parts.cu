// step.cu for few rows with many tokens each, as drafts that are verified make them: the dims of a
// value head are divided among the two blocks of a cluster. The sums are the same.
//
// What is one token's work is divided too. Each block makes the unit queries and keys of half of
// the tokens for both, and norms every second token. All inputs come from memory to the registers
// of who uses them, so that little is left to wait for.
#include "step.cuh"

namespace ksl {

namespace {

constexpr int kParts = 2, kWide = 4 / kParts;
constexpr int kPartDims = kDim / kParts;
constexpr int kBatch = 1 + KSL_MAX_DRAFT;  // tokens whose inputs are made at one time
constexpr int kOwnTokens = (kBatch + kParts - 1) / kParts;  // of a block
constexpr int kQuarters = kThreads / kPartDims;
constexpr int kValueTokens = (kBatch + kQuarters - 1) / kQuarters;  // of a thread
constexpr int kEarly = 2;  // tokens that a warp norms, whose gates come early
static_assert(kOwnTokens <= kEarly * kWarps, "a warp norms all of its tokens at once");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kRegisters = 128;
#else
constexpr int kRegisters = 112;  // what 13 warps of 88 leave, see stream_many
#endif
typedef Dims<kWide> Lane;

enum Input { kQuery, kKey, kInputs };
struct Shared {
  float units[kInputs][kBatch][kDim];  // of queries and keys
  float values[kBatch][kPartDims];
  float outs[kOwnTokens][kDim];  // of the tokens that this block norms, from both
  float norm[kDim];
  float decay[kBatch], beta[kBatch];
  bool last;
};

// The same place of a block of the cluster.
__device__ inline unsigned part_at(const float *p, int part) {
  unsigned at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_at(p)), "r"(part));
  return at;
}
__device__ inline void store_at(unsigned to, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
__device__ inline void store_at(unsigned to, const Lane &x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x.v[0]), "f"(x.v[1])
               : "memory");
}

// A channel of tokens [first, first + n) of a row, n at most kMost, from before the convolution.
template <int kMost>
struct Run {
  float window[kHistory], x[kMost];
  int first, n;
  // What the row does not have is in the history, which is asked for first.
  __device__ void load_history(const float *history, int channels) {
#pragma unroll
    for (int t = 0; t < kHistory; t++)
      window[t] = n > 0 && first + t < kHistory ? history[(first + t) * channels] : 0.0f;
  }
  __device__ void load(const float *in, int stride) {
    const float *const from = in + first * stride;
#pragma unroll
    for (int t = 0; t < kHistory; t++)
      if (n > 0 && first + t >= kHistory) window[t] = from[(t - kHistory) * stride];
#pragma unroll
    for (int t = 0; t < kMost; t++) x[t] = t < n ? from[t * stride] : 0.0f;
  }
  __device__ float value(int t) const { return t < 0 ? window[kHistory + t] : x[t]; }
  __device__ float convolved(int t, const float (&taps)[kTaps]) const {
    float sum = taps[0] * value(t - kHistory);
#pragma unroll
    for (int i = 1; i < kTaps; i++) sum = fmaf(taps[i], value(t - kHistory + i), sum);
    return silu(sum);
  }
};

__global__ void __cluster_dims__(kParts) __maxnreg__(kRegisters)
    parts_kernel(const __grid_constant__ StepArgs a) {
  __shared__ __align__(16) Shared s;
  const GdnShape &shape = a.shape;
  const int head = blockIdx.x / kParts, part = blockIdx.x % kParts;
  const RowInfo &row = a.rows[blockIdx.y];
  const int n = row.n, slab = row.slab, column = row.column, n_cuts = row.n_cuts;
  const int first_kept = row.keep;
  const bool kept = first_kept >= 0, commits = !kept;
  allow_next();
  if (row.tiled || n == 0) return;
  cluster_arrive();
  const int group = shape.value_heads / shape.key_heads, key_head = head / group;
  const bool leads = head % group == 0;  // stores what blocks of a key head share
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

  Lane state[kKeys];
  const int own_dim = warp * (4 * kWide) + (lane & 3) * kWide, dim = part * kPartDims + own_dim;
  const int key = (lane >> 2) * 4, state_at = (head * kDim + key) * kDim + dim;
  const auto state_of = [&](int of) {
    return a.slabs.data + of * a.slabs.stride + a.slabs.state_offset;
  };
  // No kernel of this wave before this one writes what this layer remembers. Key of element i: key
  // + (i / 4) 32 + i % 4.
  {
    const float *const from = state_of(slab) + state_at;
#pragma unroll
    for (int i = 0; i < kKeys; i++)
      state[i] = take<true, kWide>(from + ((i >> 2) * 32 + (i & 3)) * kDim);
  }
  // Threads 0 to 127 have a channel of the keys, the others one of the queries; and each has one of
  // the block's values for a quarter of the tokens.
  const int input = threadIdx.x < kDim ? kKey : kQuery, own = threadIdx.x & (kDim - 1);
  const int quarter = threadIdx.x / kPartDims, own_value = threadIdx.x % kPartDims;
  const int channel = ((input == kKey ? shape.key_heads : 0) + key_head) * kDim + own;
  const int value_at = (2 * shape.key_heads + head) * kDim + part * kPartDims + own_value;
  const auto history_of = [&](int of) {
    return a.slabs.data + of * a.slabs.stride + a.slabs.history_offset;
  };
  float *const history = history_of(slab);
  float taps[kTaps], value_taps[kTaps];
#pragma unroll
  for (int t = 0; t < kTaps; t++) {
    taps[t] = a.taps[0][t * shape.channels + channel];
    value_taps[t] = a.taps[0][t * shape.channels + value_at];
  }
  // The gates, by the last two warps.
  const bool gates = warp >= kWarps - 2, decays = warp == kWarps - 1;
  float rate = 0, bias = 0;
  if (decays) rate = a.decay_rate[head], bias = a.dt_bias[head];
  if (threadIdx.x < kDim) s.norm[threadIdx.x] = a.norm[threadIdx.x];

  float *const keep = a.keep + static_cast<int64_t>(kept ? first_kept : 0) * a.keep_stride;
  const float *const in = a.qkv + static_cast<int64_t>(column) * a.qkv_stride;
  unsigned before = 0;
#pragma unroll 1
  for (int begin = 0; begin < n; begin += kBatch) {
    const int m = min(kBatch, n - begin), half = (m + 1) / 2,
              piece = (m + kQuarters - 1) / kQuarters;
    Run<kOwnTokens> run;
    Run<kValueTokens> values;
    run.first = begin + part * half, run.n = min(half, m - part * half);
    values.first = begin + quarter * piece, values.n = min(piece, m - quarter * piece);
    run.load_history(history + channel, shape.channels);
    values.load_history(history + value_at, shape.channels);
    if (begin == 0) {
      wait_before();
#pragma unroll 1
      for (int cut = 0; cut < n_cuts; cut++) {
        float *const to = history_of(row.cut_slab[cut]);
#pragma unroll 1
        for (int t = 0; t < kHistory; t++) {
          const int at = row.cut_offset[cut] - kHistory + t;
          const float *const from = at < 0 ? history + (kHistory + at) * shape.channels
                                           : in + static_cast<int64_t>(at) * a.qkv_stride;
          if (leads && part == 0) to[t * shape.channels + channel] = from[channel];
          if (quarter == 0) to[t * shape.channels + value_at] = from[value_at];
        }
      }
    }
    run.load(in + channel, a.qkv_stride);
    values.load(in + value_at, a.qkv_stride);
    const bool has_gate = gates && lane < m;
    const int64_t gate_at = static_cast<int64_t>(column + begin + lane) * a.head_stride + head;
    const float raw = has_gate ? (decays ? a.a : a.b)[gate_at] : 0.0f;
    // Of the tokens that this warp norms.
    float4 z[kEarly];
#pragma unroll
    for (int i = 0; i < kEarly; i++) {
      const int t = (i * kWarps + warp) * kParts + part;
      if (t < m)
        z[i] = *reinterpret_cast<const float4 *>(
            a.z + static_cast<int64_t>(column + begin + t) * a.value_stride + head * kDim +
            lane * 4);
    }
    if (kept) {
      float *const to = keep + begin * a.keep_stride;
#pragma unroll
      for (int t = 0; t < kOwnTokens; t++)
        if (leads && t < run.n) to[(part * half + t) * a.keep_stride + channel] = run.x[t];
#pragma unroll
      for (int t = 0; t < kValueTokens; t++)
        if (t < values.n) to[(quarter * piece + t) * a.keep_stride + value_at] = values.x[t];
    }
#pragma unroll
    for (int t = 0; t < kOwnTokens; t++)
      if (t < run.n) s.units[input][part * half + t][own] = run.convolved(t, taps);
#pragma unroll
    for (int t = 0; t < kValueTokens; t++)
      if (t < values.n) s.values[quarter * piece + t][own_value] = values.convolved(t, value_taps);
    if (has_gate) {
      float g;
      const float gate = decays ? gdn_decay(raw, rate, bias, &g) : sigmoid(raw);
      (decays ? s.decay : s.beta)[lane] = gate;
      if (kept && part == 0)
        keep[(begin + lane) * a.keep_stride + a.qkv_stride + (decays ? 0 : a.head_stride) + head] =
            gate;
    }
    __syncthreads();
    // The block has read the history, and used what it read.
    if (begin == 0 && threadIdx.x == 0 && commits)
      before = atomicInc(a.arrived + static_cast<int64_t>(blockIdx.y) * shape.key_heads + key_head,
                         group * kParts - 1);
    if (begin == 0) cluster_began();
    // Unit queries and keys, one of a token per warp, for both.
#pragma unroll 1
    for (int i = warp; i < 2 * run.n; i += kWarps) {
      float *const x = s.units[i & 1 ? kKey : kQuery][part * half + (i >> 1)] + lane;
      float y[4];
      const float r = unit_factor(x, y);
      const float scale = i & 1 ? 1.0f : 1.0f / sqrtf(static_cast<float>(kDim));
      const unsigned other = part_at(x, part ^ 1);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float unit = y[k] * r * scale;
        x[k * 32] = unit;
        store_at(other + k * 32 * sizeof(float), unit);
      }
    }
    cluster_meet();
    // The outputs of a token are added up beside the sums of the next.
    Lane held = {};
    const auto store_out = [&](int t, const Lane &out) {
      if (lane < 4) store_at(part_at(s.outs[t / kParts] + dim, t % kParts), out);
    };
#pragma unroll 1
    for (int t = 0; t < m; t++) {
      float4 k[kKeys / 4];
#pragma unroll
      for (int i = 0; i < kKeys / 4; i++)
        k[i] = *reinterpret_cast<const float4 *>(s.units[kKey][t] + key + i * 32);
      const float decay = s.decay[t], beta = s.beta[t];
      const Lane v = *reinterpret_cast<const Lane *>(s.values[t] + own_dim);
      Lane sum = {};
#pragma unroll
      for (int i = 0; i < kKeys / 4; i++) {
        scale_add(sum, k[i].x, state[4 * i]);
        scale_add(sum, k[i].y, state[4 * i + 1]);
        scale_add(sum, k[i].z, state[4 * i + 2]);
        scale_add(sum, k[i].w, state[4 * i + 3]);
      }
      sum_keys(held);
      sum_keys(sum);
      if (t > 0) store_out(t - 1, held);
      Lane d;
#pragma unroll
      for (int i = 0; i < kWide; i++) d.v[i] = beta * fmaf(-decay, sum.v[i], v.v[i]);
      held = {};
      const auto update = [&](Lane &at, float k, float q) {
#pragma unroll
        for (int i = 0; i < kWide; i++) at.v[i] = fmaf(k, d.v[i], decay * at.v[i]);
        scale_add(held, q, at);
      };
#pragma unroll
      for (int i = 0; i < kKeys / 4; i++) {
        const float4 q = *reinterpret_cast<const float4 *>(s.units[kQuery][t] + key + i * 32);
        update(state[4 * i], k[i].x, q.x);
        update(state[4 * i + 1], k[i].y, q.y);
        update(state[4 * i + 2], k[i].z, q.z);
        update(state[4 * i + 3], k[i].w, q.w);
      }
      // Where the state goes from here: to the slab, to cuts.
      const bool ends = begin + t + 1 == n && commits;
#pragma unroll 1
      for (int cut = ends ? -1 : 0; cut < n_cuts; cut++) {
        if (cut >= 0 && row.cut_offset[cut] != begin + t + 1) continue;
        float *const to = state_of(cut < 0 ? slab : row.cut_slab[cut]) + state_at;
#pragma unroll
        for (int i = 0; i < kKeys; i++)
          give<true, kWide>(to + ((i >> 2) * 32 + (i & 3)) * kDim, state[i]);
      }
    }
    sum_keys(held);
    store_out(m - 1, held);
    if (begin == 0 && threadIdx.x == 0) s.last = before == group * kParts - 1u;
    cluster_meet();
#pragma unroll
    for (int i = 0; i < kEarly; i++) {
      const int t = (i * kWarps + warp) * kParts + part;
      if (t >= m) break;
      const int token = column + begin + t, to = head * kDim + lane * 4;
      const float4 out = *reinterpret_cast<const float4 *>(s.outs[t / kParts] + lane * 4);
      const float4 gain = *reinterpret_cast<const float4 *>(s.norm + lane * 4);
      write_normed(a, token, to, out, gain,
                   make_float4(silu(z[i].x), silu(z[i].y), silu(z[i].z), silu(z[i].w)));
    }
  }
  if (!commits) return;
  // Of a row that is shorter than the history, the end of what was there comes first.
  const auto renew = [&](int of) {
#pragma unroll 1
    for (int t = 0; t < kHistory; t++) {
      const int at = n - kHistory + t;
      history[t * shape.channels + of] = at < 0 ? history[(kHistory + at) * shape.channels + of]
                                                : in[static_cast<int64_t>(at) * a.qkv_stride + of];
    }
  };
  if (s.last) renew(channel);
  if (quarter == 0) renew(value_at);
}

}  // namespace

void gdn_parts(Device *device, const StepArgs &a) {
  KSL_CHAIN(device, "gdn_step", parts_kernel, dim3(a.shape.value_heads * kParts, a.n_rows),
            kThreads, a);
}

}  // namespace ksl
