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
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kRegisters = 128;
#else
constexpr int kRegisters = 112;  // what is left beside a product of few tokens, see leaves_room
#endif
typedef Dims<kWide> Lane;

enum Input { kQuery, kKey, kInputs };
struct Shared {
  float units[kInputs][kBatch][kDim];  // of queries and keys
  float values[kBatch][kPartDims];
  float outs[kOwnTokens][kDim];  // of the tokens that this block norms, from both
  float norm[kDim];
  float gates[kBatch][2];          // decay, beta
  uint64_t units_came, outs_came;  // from the other block; from both
  bool last;
};

// The same place of a block of the cluster.
__device__ inline unsigned part_at(const void *p, int part) {
  unsigned at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_at(p)), "r"(part));
  return at;
}
// Stores there, which count on a barrier of that block. Nobody waits for what else is under way, as
// he would where clusters meet.
__device__ inline void give_part(bool gives, unsigned to, float x, unsigned barrier) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.s32 p, %3, 0;\n"
      " @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];\n}" ::"r"(
          to),
      "r"(__float_as_uint(x)), "r"(barrier), "r"(static_cast<int>(gives))
      : "memory");
}
__device__ inline void give_part(unsigned to, const float4 &x, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(__float_as_uint(x.z)),
      "r"(__float_as_uint(x.w)), "r"(barrier)
      : "memory");
}

// The sum of squares of four elements of each lane, in the order of step.cu's unit_factor: over
// lanes whose elements are 16, 8 and 4 apart, then 2 and 1, then over the quarters.
__device__ inline float sum_squares(const float4 &x) {
  float sum[4] = {x.x * x.x, x.y * x.y, x.z * x.z, x.w * x.w};
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
#pragma unroll
    for (int k = 0; k < 4; k++) sum[k] += __shfl_xor_sync(kAll, sum[k], step);
  }
  const float quarter = (sum[0] + sum[2]) + (sum[1] + sum[3]);
  float part[4];
#pragma unroll
  for (int k = 0; k < 4; k++) part[k] = __shfl_sync(kAll, quarter, k * 8);
  return ((part[0] + part[1]) + part[2]) + part[3];
}

// silu of several values side by side, with the same bits. Quotients that need no care are made by
// the steps of a correctly rounded division, without its branch for each.
template <int kMany>
__device__ inline void silu_many(float (&x)[kMany]) {
  float y[kMany];
  bool plain = true;
#pragma unroll
  for (int i = 0; i < kMany; i++) {
    const float size = fabsf(x[i]), b = 1.0f + expf(-x[i]);
    plain = plain && size < 40.0f && (size > 1e-18f || size == 0.0f);
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    r = fmaf(r, fmaf(-b, r, 1.0f), r);
    float q = x[i] * r;
    q = fmaf(r, fmaf(-b, q, x[i]), q);
    q = fmaf(r, fmaf(-b, q, x[i]), q);
    y[i] = copysignf(q, x[i]);
  }
#pragma unroll
  for (int i = 0; i < kMany; i++) x[i] = plain ? y[i] : silu(x[i]);
}

// A channel of tokens [first, first + n) of a row, n at most kMost, from before the convolution.
template <int kMost>
struct Run {
  static constexpr int kGroup = 4;  // tokens convolved side by side
  float window[kHistory], x[kMost];
  int first, n;
  // What the row does not have is in the history, which is asked for first.
  __device__ void load_history(const float *history, int channels) {
#pragma unroll
    for (int t = 0; t < kHistory; t++)
      window[t] = n > 0 && first + t < kHistory ? history[(first + t) * channels] : 0.0f;
  }
  __device__ void load(const float *in, int64_t stride) {
    const float *from = in + first * stride;
#pragma unroll
    for (int t = 0; t < kMost; t++) {
      x[t] = t < n ? *from : 0.0f;
      from += stride;
    }
    from = in + (first - kHistory) * stride;
#pragma unroll
    for (int t = 0; t < kHistory; t++) {
      if (n > 0 && first + t >= kHistory) window[t] = *from;
      from += stride;
    }
  }
  __device__ float value(int t) const { return t < 0 ? window[kHistory + t] : x[t]; }
  // store(t, y) for each.
  template <typename Store>
  __device__ void convolve(const float (&taps)[kTaps], Store store) const {
#pragma unroll
    for (int begin = 0; begin < kMost; begin += kGroup) {
      if (begin >= n) break;
      float y[kGroup] = {};
#pragma unroll
      for (int i = 0; i < kGroup && begin + i < kMost; i++) {
        const int t = begin + i;
        float sum = taps[0] * value(t - kHistory);
#pragma unroll
        for (int k = 1; k < kTaps; k++) sum = fmaf(taps[k], value(t - kHistory + k), sum);
        y[i] = sum;
      }
      silu_many(y);
#pragma unroll
      for (int i = 0; i < kGroup && begin + i < kMost; i++)
        if (begin + i < n) store(begin + i, y[i]);
    }
  }
  __device__ void keep(bool keeps, float *to, int64_t stride) const {
#pragma unroll
    for (int t = 0; t < kMost; t++) {
      if (keeps && t < n) *to = x[t];
      to += stride;
    }
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
  const bool kept = first_kept >= 0, commits = !kept, stores = commits || n_cuts > 0;
  allow_next();
  if (row.tiled || n == 0) return;
  if (threadIdx.x == 0) {
    bulk_barrier(shared_at(&s.units_came), 1);
    bulk_barrier(shared_at(&s.outs_came), 1);
    bulk_barriers_made();
  }
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
  if (warp == 0) copy_async<16>(s.norm + lane * 4, a.norm + lane * 4, true);
  copy_commit();

  cluster_began();
  // Outputs of a token pair, added up: a lane has one of its dims of one of the tokens. The first
  // of a pair goes to the first block.
  const int of_pair = lane >> 2 & 1, out_dim = dim + (lane >> 3 & 1);
  const unsigned outs = part_at(s.outs[0] + out_dim, of_pair);
  const unsigned outs_came = part_at(&s.outs_came, of_pair);

  float *const keep = a.keep + static_cast<int64_t>(kept ? first_kept : 0) * a.keep_stride;
  const float *const in = a.qkv + static_cast<int64_t>(column) * a.qkv_stride;
  unsigned before = 0, phase = 0;
#pragma unroll 1
  for (int begin = 0; begin < n; begin += kBatch, phase ^= 1) {
    const int m = min(kBatch, n - begin), half = (m + 1) / 2,
              piece = (m + kQuarters - 1) / kQuarters;
    Run<kOwnTokens> run;
    Run<kValueTokens> values;
    run.first = begin + part * half, run.n = min(half, m - part * half);
    values.first = begin + quarter * piece, values.n = min(piece, m - quarter * piece);
    run.load_history(history + channel, shape.channels);
    values.load_history(history + value_at, shape.channels);
    if (threadIdx.x == 0) {
      bulk_expect(shared_at(&s.units_came), (m - run.n) * kInputs * kDim * sizeof(float));
      bulk_expect(shared_at(&s.outs_came), (m + 1 - part) / kParts * kDim * sizeof(float));
    }
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
    const int64_t raw_at = static_cast<int64_t>(column + begin + lane) * a.head_stride + head;
    const float raw = has_gate ? (decays ? a.a : a.b)[raw_at] : 0.0f;
    // Of the tokens that this warp norms; the gate of the first comes early.
    const float *const z =
        a.z + static_cast<int64_t>(column + begin) * a.value_stride + head * kDim;
    const auto gate_at = [&](int t) {
      return *reinterpret_cast<const float4 *>(z + static_cast<int64_t>(t) * a.value_stride +
                                               lane * 4);
    };
    const int first_normed = warp * kParts + part;
    float4 z_first = {};
    if (first_normed < m) z_first = gate_at(first_normed);
    run.convolve(taps, [&](int t, float y) { s.units[input][part * half + t][own] = y; });
    values.convolve(value_taps,
                    [&](int t, float y) { s.values[quarter * piece + t][own_value] = y; });
    float gate = 0;
    if (has_gate) {
      float g;
      gate = decays ? gdn_decay(raw, rate, bias, &g) : sigmoid(raw);
      s.gates[lane][decays ? 0 : 1] = gate;
    }
    __syncthreads();
    // The block has read the history, and used what it read.
    if (begin == 0 && threadIdx.x == 0 && commits)
      before = atomicInc(a.arrived + static_cast<int64_t>(blockIdx.y) * shape.key_heads + key_head,
                         group * kParts - 1);
    // Unit queries and keys for both: of each token a warp has one, half of the warps the keys.
    {
      float *const from = s.units[warp & 1 ? kKey : kQuery][part * half] + lane * 4;
      const unsigned there = part_at(from, part ^ 1), came = part_at(&s.units_came, part ^ 1);
      const float scale = warp & 1 ? 1.0f : 1.0f / sqrtf(static_cast<float>(kDim));
      constexpr int kStep = kWarps / kInputs;
#pragma unroll 1
      for (int t = warp / kInputs; t < run.n; t += 2 * kStep) {
        const bool two = t + kStep < run.n;
        float4 y[2];
        y[0] = *reinterpret_cast<const float4 *>(from + t * kDim);
        y[1] = *reinterpret_cast<const float4 *>(from + (two ? t + kStep : t) * kDim);
        const float one = sum_squares(y[0]), other = sum_squares(y[1]);
        const float both = 1.0f / sqrtf((lane < 16 ? one : other) + 1e-6f);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float r = __shfl_sync(kAll, both, i * 16);
          const float4 unit = make_float4(y[i].x * r * scale, y[i].y * r * scale,
                                          y[i].z * r * scale, y[i].w * r * scale);
          if (i > 0 && !two) break;
          const int at = (t + i * kStep) * kDim;
          *reinterpret_cast<float4 *>(from + at) = unit;
          give_part(there + at * sizeof(float), unit, came);
        }
      }
    }
    // While those of the other block are under way.
    if (kept) {
      float *const to = keep + static_cast<int64_t>(begin) * a.keep_stride;
      run.keep(leads, to + part * half * a.keep_stride + channel, a.keep_stride);
      values.keep(true, to + quarter * piece * a.keep_stride + value_at, a.keep_stride);
      if (has_gate && part == 0)
        to[lane * a.keep_stride + a.qkv_stride + (decays ? 0 : a.head_stride) + head] = gate;
    }
    const auto silu4 = [](const float4 &x) {
      float y[4] = {x.x, x.y, x.z, x.w};
      silu_many(y);
      return make_float4(y[0], y[1], y[2], y[3]);
    };
    const float4 first_gate = silu4(z_first);
    copy_wait<0>();
    __syncthreads();
    bulk_wait(shared_at(&s.units_came), phase);

    const float *units = s.units[0][0] + key;
    const float *value = s.values[0] + own_dim;
    const float *gate_of = s.gates[0];
    // Takes the next token into the state; what comes out of a lane's keys.
    const auto take_token = [&](int t) {
      float4 k[kKeys / 4];
#pragma unroll
      for (int i = 0; i < kKeys / 4; i++)
        k[i] = *reinterpret_cast<const float4 *>(units + kKey * (kBatch * kDim) + i * 32);
      const float decay = gate_of[0], beta = gate_of[1];
      const Lane v = *reinterpret_cast<const Lane *>(value);
      Lane sum = {};
#pragma unroll
      for (int i = 0; i < kKeys / 4; i++) {
        scale_add(sum, k[i].x, state[4 * i]);
        scale_add(sum, k[i].y, state[4 * i + 1]);
        scale_add(sum, k[i].z, state[4 * i + 2]);
        scale_add(sum, k[i].w, state[4 * i + 3]);
      }
      sum_keys(sum);
      Lane d;
#pragma unroll
      for (int i = 0; i < kWide; i++) d.v[i] = beta * fmaf(-decay, sum.v[i], v.v[i]);
      Lane out = {};
      const auto update = [&](Lane &at, float k, float q) {
#pragma unroll
        for (int i = 0; i < kWide; i++) at.v[i] = fmaf(k, d.v[i], decay * at.v[i]);
        scale_add(out, q, at);
      };
#pragma unroll
      for (int i = 0; i < kKeys / 4; i++) {
        const float4 q =
            *reinterpret_cast<const float4 *>(units + kQuery * (kBatch * kDim) + i * 32);
        update(state[4 * i], k[i].x, q.x);
        update(state[4 * i + 1], k[i].y, q.y);
        update(state[4 * i + 2], k[i].z, q.z);
        update(state[4 * i + 3], k[i].w, q.w);
      }
      units += kDim, value += kPartDims, gate_of += 2;
      // Where the state goes from here: to the slab, to cuts.
      if (stores) {
        const bool ends = begin + t + 1 == n && commits;
#pragma unroll 1
        for (int cut = ends ? -1 : 0; cut < n_cuts; cut++) {
          if (cut >= 0 && row.cut_offset[cut] != begin + t + 1) continue;
          float *const to = state_of(cut < 0 ? slab : row.cut_slab[cut]) + state_at;
#pragma unroll
          for (int i = 0; i < kKeys; i++)
            give<true, kWide>(to + ((i >> 2) * 32 + (i & 3)) * kDim, state[i]);
        }
        __syncwarp();
      }
      return out;
    };
    unsigned to = outs;
    __syncwarp();  // so that sums of lanes need not ask who is there
#pragma unroll 1
    for (int t = 0; t < m; t += 2, to += kDim * sizeof(float)) {
      const Lane first = take_token(t);
      Lane second = {};
      if (t + 1 < m) second = take_token(t + 1);
      // As sum_keys does it, but where that has the same sums in lanes, these have others.
      Lane x;
#pragma unroll
      for (int i = 0; i < kWide; i++)
        x.v[i] = (of_pair ? second.v[i] : first.v[i]) +
                 __shfl_xor_sync(kAll, of_pair ? first.v[i] : second.v[i], 4);
      const bool odd = lane >> 3 & 1;
      float y = (odd ? x.v[1] : x.v[0]) + __shfl_xor_sync(kAll, odd ? x.v[0] : x.v[1], 8);
      y += __shfl_xor_sync(kAll, y, 16);
      give_part(lane < 16 && t + of_pair < m, to, y, outs_came);
    }
    if (begin == 0 && threadIdx.x == 0) s.last = before == group * kParts - 1u;
    bulk_wait(shared_at(&s.outs_came), phase);
#pragma unroll 1
    for (int t = first_normed; t < m; t += kWarps * kParts) {
      const int token = column + begin + t, to = head * kDim + lane * 4;
      const float4 out = *reinterpret_cast<const float4 *>(s.outs[t / kParts] + lane * 4);
      const float4 gain = *reinterpret_cast<const float4 *>(s.norm + lane * 4);
      write_normed(a, token, to, out, gain, t == first_normed ? first_gate : silu4(gate_at(t)));
    }
    // Before the other block's next tokens come.
    if (begin + m < n) cluster_meet();
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
  __syncthreads();
  if (s.last) renew(channel);
  if (quarter == 0) renew(value_at);
}

}  // namespace

void gdn_parts(Device *device, const StepArgs &a) {
  const dim3 blocks(a.shape.value_heads * kParts, a.n_rows);
  // Two blocks on one processor would end last. Beside a product there is no room for a second one;
  // else they ask for so much.
  const int most = device->room.processor_bytes / 2;
  static const bool raised = raise_shared(device, parts_kernel, most);
  (void)raised;  // the engine has one thread
  const bool apart = !a.beside && static_cast<int>(blocks.x * blocks.y) <= device->room.processors;
  launch_chained(device, "gdn_step", parts_kernel, blocks, kThreads, apart ? most : 0, a);
}

}  // namespace ksl
