// step.cu for waves whose rows have one token each: the same sums, but what a row has alone stays
// in registers, and a block meets three times.
//
// kHeld of the 16 keys that a lane has of a state come into its registers, the others into shared
// memory, by copies that one warp asks for. Registers hold two states of a processor at a time,
// shared memory three; half a state of each fits beside a product that leaves room, so that a few
// rows have read theirs when the product ends.
#include "step.cuh"

namespace ksl {

namespace {

enum Input { kQuery, kKey, kInputs };
struct Shared {
  float units[kInputs][kDim];  // of the query and the key
  float value[kDim], gate[kDim], out[kDim], norm[kDim];
  float squares[kInputs][kDim / 32];
  float decay, beta;
  uint64_t loaded;
  bool last;
};
// Four keys of a state are copied in one piece; the pitch puts neighbours into different banks.
constexpr int kPieceKeys = 4;
constexpr int kPieceBytes = kPieceKeys * kDim * sizeof(float), kPitch = kPieceBytes + 64;
constexpr int stage_bytes(int held) {
  return (kKeys - held) * 2 * kPitch;
}
constexpr int kStagedBlocks = 3;  // of a processor

template <int kHeld>
__device__ __forceinline__ void single_row(const StepArgs &a) {
  typedef Dims<4> Lane;
  static_assert(kHeld % 4 == 0, "keys of a lane that lie together");
  constexpr int kPieces = (kKeys - kHeld) * 2, kFirst = kHeld * 8;  // key that is staged
  constexpr bool kStaged = kHeld < kKeys;
  __shared__ __align__(16) Shared s;
  extern __shared__ __align__(128) uint8_t stage[];
  const GdnShape &shape = a.shape;
  const int head = blockIdx.x;
  const RowInfo &row = a.rows[blockIdx.y];
  allow_next();
  if (row.n == 0) return;
  const int slab = row.slab, column = row.column, first_kept = row.keep;
  const bool kept = first_kept >= 0, commits = !kept;
  const int group = shape.value_heads / shape.key_heads, key_head = head / group;
  const bool leads = head % group == 0;  // stores what blocks of a key head share
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

  const auto state_of = [&](int of) {
    return a.slabs.data + of * a.slabs.stride + a.slabs.state_offset + head * (kDim * kDim);
  };
  // No kernel of this wave before this one writes what this layer remembers. Key of element i: key
  // + (i / 4) 32 + i % 4.
  const int dim = warp * 16 + (lane & 3) * 4, key = (lane >> 2) * 4, state_at = key * kDim + dim;
  const auto place_of = [](int i) { return ((i >> 2) * 32 + (i & 3)) * kDim; };
  Lane registers[kHeld > 0 ? kHeld : 1];
  uint8_t *const staged = stage + (key - kFirst) / kPieceKeys * kPitch + dim * sizeof(float);
  const auto staged_at = [&](int i) -> Lane & {
    return *reinterpret_cast<Lane *>(staged + (i >> 2) * (32 / kPieceKeys) * kPitch +
                                     (i & 3) * kDim * sizeof(float));
  };
  if constexpr (kStaged) {
    const unsigned loaded = shared_at(&s.loaded);
    if (warp == 0) {
      if (lane == 0) {
        bulk_barrier(loaded, 1);
        bulk_barriers_made();
        bulk_expect(loaded, kPieces * kPieceBytes);
      }
      __syncwarp();
      static_assert(kPieces <= 32, "at most one of a lane");
      if (lane < kPieces)
        bulk_load(shared_at(stage) + lane * kPitch,
                  state_of(slab) + (kFirst + lane * kPieceKeys) * kDim, kPieceBytes, loaded);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeld; i++)
    registers[i] = take<true, 4>(state_of(slab) + state_at + place_of(i));
  // What a block that comes up when this one ends will read.
  if (threadIdx.x == 0) {
    const int next = blockIdx.y * gridDim.x + head + a.together, other = next / gridDim.x;
    if (other < static_cast<int>(gridDim.y))
      bulk_ahead(a.slabs.data + a.rows[other].slab * a.slabs.stride + a.slabs.state_offset +
                     next % gridDim.x * (kDim * kDim),
                 kDim * kDim * sizeof(float));
  }

  // Threads 0 to 127 have a key and a value channel, the others one of the queries.
  const bool is_key = threadIdx.x < kDim;
  const int own = threadIdx.x & (kDim - 1), input = is_key ? kKey : kQuery;
  const int value_at = (2 * shape.key_heads + head) * kDim + own;
  const int channel = ((is_key ? shape.key_heads : 0) + key_head) * kDim + own;
  const auto history_of = [&](int of) {
    return a.slabs.data + of * a.slabs.stride + a.slabs.history_offset;
  };
  Channel first, second;
  first.load(a.taps[0] + channel, history_of(slab) + channel, shape.channels, shape.channels);
  if (is_key)
    second.load(a.taps[0] + value_at, history_of(slab) + value_at, shape.channels, shape.channels);
  // The gates, by the last two warps.
  const bool gates = warp >= kWarps - 2 && lane == 0, decays = warp == kWarps - 1;
  float rate = 0, bias = 0;
  if (gates && decays) rate = a.decay_rate[head], bias = a.dt_bias[head];
  if (is_key) s.norm[own] = a.norm[own];
  wait_before();

  const float *const in = a.qkv + static_cast<int64_t>(column) * a.qkv_stride;
  const int64_t head_at = static_cast<int64_t>(column) * a.value_stride + head * kDim;
  const int64_t gate_at = static_cast<int64_t>(column) * a.head_stride + head;
  const float x = in[channel], y = is_key ? in[value_at] : a.z[head_at + own];
  const float raw = gates ? (decays ? a.a : a.b)[gate_at] : 0.0f;
  const float made = first.next(x), square = warp_sum(made * made);
  if (lane == 0) s.squares[input][own >> 5] = square;
  if (is_key)
    s.value[own] = second.next(y);
  else
    s.gate[own] = silu(y);
  float *const keep = a.keep + static_cast<int64_t>(kept ? first_kept : 0) * a.keep_stride;
  if (kept && leads) keep[channel] = x;
  if (kept && is_key) keep[value_at] = y;
  if (gates) {
    float g;
    const float gate = decays ? gdn_decay(raw, rate, bias, &g) : sigmoid(raw);
    (decays ? s.decay : s.beta) = gate;
    if (kept) keep[a.qkv_stride + (decays ? 0 : a.head_stride) + head] = gate;
  }
  __syncthreads();
  // The block has read the history, and used what it read.
  unsigned before = 0;
  if (threadIdx.x == 0 && group > 1 && commits)
    before = atomicInc(a.arrived + static_cast<int64_t>(blockIdx.y) * shape.key_heads + key_head,
                       group - 1);
  // Unit queries and keys.
  const float *const squares = s.squares[input];
  const float sum_squares = ((squares[0] + squares[1]) + squares[2]) + squares[3];
  const float scale = is_key ? 1.0f : 1.0f / sqrtf(static_cast<float>(kDim));
  s.units[input][own] = made * (1.0f / sqrtf(sum_squares + 1e-6f)) * scale;
  __syncthreads();

  if (kStaged) bulk_wait(shared_at(&s.loaded), 0);
  const auto state = [&](int i) -> Lane {
    return i < kHeld ? registers[i < kHeld ? i : 0] : staged_at(i);
  };
  const float *const keys = s.units[kKey] + key, *const queries = s.units[kQuery] + key;
  Lane sum = {};
#pragma unroll
  for (int i = 0; i < kKeys; i += 4) {
    const float4 k = *reinterpret_cast<const float4 *>(keys + i * 8);
    scale_add(sum, k.x, state(i));
    scale_add(sum, k.y, state(i + 1));
    scale_add(sum, k.z, state(i + 2));
    scale_add(sum, k.w, state(i + 3));
  }
  sum_keys(sum);
  const float decay = s.decay, beta = s.beta;
  const Lane v = *reinterpret_cast<const Lane *>(s.value + dim);
  Lane d;
#pragma unroll
  for (int i = 0; i < 4; i++) d.v[i] = beta * fmaf(-decay, sum.v[i], v.v[i]);
  // The state is read again: registers do not hold it.
  if (kStaged) asm volatile("" ::: "memory");
  Lane out = {};
  float *const to = state_of(slab) + state_at;
  const bool cuts = row.n_cuts > 0;  // there is but one, behind the token
  const auto update = [&](int i, float k, float q) {
    Lane at = state(i);
#pragma unroll
    for (int j = 0; j < 4; j++) at.v[j] = fmaf(k, d.v[j], decay * at.v[j]);
    scale_add(out, q, at);
    if (commits) give<true, 4>(to + place_of(i), at);
    if (i < kHeld)
      registers[i < kHeld ? i : 0] = at;
    else if (cuts)
      staged_at(i) = at;
  };
#pragma unroll
  for (int i = 0; i < kKeys; i += 4) {
    const float4 k = *reinterpret_cast<const float4 *>(keys + i * 8);
    const float4 q = *reinterpret_cast<const float4 *>(queries + i * 8);
    update(i, k.x, q.x);
    update(i + 1, k.y, q.y);
    update(i + 2, k.z, q.z);
    update(i + 3, k.w, q.w);
    asm volatile("" ::: "memory");  // all loads at once would not fit in registers
  }
  sum_keys(out);
  if (lane < 4) *reinterpret_cast<Lane *>(s.out + dim) = out;
  // A cut has what the slab gets.
  const auto save_history = [&](float *to, bool shared) {
#pragma unroll
    for (int t = 0; t < kHistory; t++) {
      if (shared) to[t * shape.channels + channel] = first.window[t + 1];
      if (is_key) to[t * shape.channels + value_at] = second.window[t + 1];
    }
  };
  if (cuts) {
    const int cut = row.cut_slab[0];
    float *const copy = state_of(cut) + state_at;
#pragma unroll
    for (int i = 0; i < kHeld; i++) give<true, 4>(copy + place_of(i), registers[i]);
#pragma unroll 1
    for (int i = kHeld; i < kKeys; i++) give<true, 4>(copy + place_of(i), staged_at(i));
    save_history(history_of(cut), leads);
  }
  if (threadIdx.x == 0) s.last = before == group - 1u;
  __syncthreads();
  if (warp == 0) {
    const float4 o = *reinterpret_cast<const float4 *>(s.out + lane * 4);
    const float4 gate = *reinterpret_cast<const float4 *>(s.gate + lane * 4);
    const float4 gain = *reinterpret_cast<const float4 *>(s.norm + lane * 4);
    const float total = warp_sum((o.x * o.x + o.y * o.y) + (o.z * o.z + o.w * o.w));
    const float r = 1.0f / sqrtf(total / static_cast<float>(kDim) + a.eps);
    const float4 gated = make_float4(o.x * r * gain.x * gate.x, o.y * r * gain.y * gate.y,
                                     o.z * r * gain.z * gate.z, o.w * r * gain.w * gate.w);
    const int64_t at = head_at + lane * 4;
    if (a.core != nullptr) *reinterpret_cast<float4 *>(a.core + at) = o;
    if (a.gated != nullptr) *reinterpret_cast<float4 *>(a.gated + at) = gated;
    if (a.split.data != nullptr) split_store4(a.split, column, head * kDim + lane * 4, gated);
  }
  if (commits) save_history(history_of(slab), s.last);
}

__global__ void __launch_bounds__(kThreads, 2) single_kernel(const __grid_constant__ StepArgs a) {
  single_row<kKeys>(a);
}
__global__ void __launch_bounds__(kThreads, kStagedBlocks)
    single_staged_kernel(const __grid_constant__ StepArgs a) {
  single_row<0>(a);
}
constexpr int kHalf = kKeys / 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kHalfRegisters = 112;  // nothing fits beside a product there
#else
constexpr int kHalfRegisters = 88;  // what 22 warps of 56 leave
#endif
__global__ void __maxnreg__(kHalfRegisters) single_half_kernel(const __grid_constant__ StepArgs a) {
  single_row<kHalf>(a);
}

}  // namespace

void gdn_single(Device *device, StepArgs a) {
  const dim3 heads(a.shape.value_heads, a.n_rows);
  const Room &room = device->room;
  const int blocks = static_cast<int>(heads.x * heads.y);
  if (blocks <= room.processors) {
    launch_chained(device, "gdn_step", single_half_kernel, heads, kThreads, stage_bytes(kHalf), a);
    return;
  }
  // Where only shared memory holds all states at once.
  const bool staged = blocks > 2 * room.processors && blocks <= kStagedBlocks * room.processors &&
                      kStagedBlocks * (stage_bytes(0) + 4096) <= room.processor_bytes;
  if (!staged) {
    KSL_CHAIN(device, "gdn_step", single_kernel, heads, kThreads, a);
    return;
  }
  static const bool raised = raise_shared(device, single_staged_kernel, stage_bytes(0));
  (void)raised;  // the engine has one thread
  a.together = kStagedBlocks * room.processors;
  launch_chained(device, "gdn_step", single_staged_kernel, heads, kThreads, stage_bytes(0), a);
}

}  // namespace ksl
