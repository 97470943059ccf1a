// Products of many tokens on sm_90a. A block has 128 weight rows and kColumns tokens at a time: one
// warp fetches packed weights and activations into shared memory, two groups of four warps expand
// weights into operand A's registers (or read them as they are) and multiply. Blocks stay until
// their share of the tiles is done; two blocks of a cluster have different rows of the same tokens
// and fetch half of those each.
//
// An output element is the sum over its input elements in one order, in float32 inside the matrix
// units: it depends on nothing else in the wave.
#pragma once
#include "expand.cuh"
#include "gemm.cuh"
#include "wgmma.cuh"

namespace ksl {
namespace {

struct WideArgs {
  const uint8_t *data;
  const float *scale;
  const float *token_inverse;  // of e4m3 activations
  int supers, tiles, n_parts;
  PackedPart parts[kGroupParts];
  Output outputs[kGroupParts];  // by part
  const uint8_t *x;             // of a Panel
  int groups;
  float x_inverse;
  int tokens;
  float *act;  // a pair's, null: not wanted
  int act_stride;
  Panel act_panel;
  int row_steps, token_steps;  // pairs of 128 rows, of kColumns tokens
};

constexpr int kWideTiles = 8;  // of 16 rows in a block
constexpr int kWideThreads = 384;
constexpr int kWideCluster = 2;

__device__ inline unsigned wide_multiply(unsigned a, unsigned b) {
  const __half2 r = __hmul2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
  return *reinterpret_cast<const unsigned *>(&r);
}

// A lane's weights of 64 input elements, four fragments; see pack.cu.
template <int kEncoding>
struct Codes;

template <>
struct Codes<KSL_ENC_NVFP4> {
  static constexpr int kBytes = kBlockNvfp4;
  uint4 words;
  unsigned scales, lower, upper;
  __device__ void load(const uint8_t *block, int lane, int piece) {
    words = reinterpret_cast<const uint4 *>(block)[piece * 32 + lane];
    scales = reinterpret_cast<const uint16_t *>(block + 2048)[lane * 4 + piece];
  }
  __device__ void fragment(int i, unsigned (&a)[4]) {
    if (i == 0) {
      const unsigned both =
          wide_multiply((scales & 0x7fu) << 7 | (scales & 0x7f00u) << 15, 0x78007800u);  // 2^15
      lower = __byte_perm(both, 0, 0x1010);
      upper = __byte_perm(both, 0, 0x3232);
    }
    const unsigned w = i == 0 ? words.x : (i == 1 ? words.y : (i == 2 ? words.z : words.w));
#pragma unroll
    for (int pair = 0; pair < 4; pair++)
      a[pair] = wide_multiply(nvfp4_pair(w, pair), pair & 1 ? upper : lower);
  }
};

template <>
struct Codes<KSL_ENC_E2M3> {
  static constexpr int kBytes = kBlockE2m3;
  uint4 words;
  uint2 plane;
  unsigned scales, lower, upper;
  __device__ void load(const uint8_t *block, int lane, int piece) {
    words = reinterpret_cast<const uint4 *>(block)[piece * 32 + lane];
    plane =
        reinterpret_cast<const uint2 *>(block + 2048)[((piece >> 1) * 32 + lane) * 2 + (piece & 1)];
    scales = reinterpret_cast<const unsigned *>(block + 3072)[piece >> 1];
  }
  __device__ void fragment(int i, unsigned (&a)[4]) {
    if (i == 0) {
      lower = __byte_perm(scales, 0, 0x1010);
      upper = __byte_perm(scales, 0, 0x3232);
    }
    unsigned bytes[4];
    e2m3_bytes(i < 2 ? words.x : words.z, i < 2 ? words.y : words.w, i < 2 ? plane.x : plane.y,
               bytes);
    four_halves(bytes[2 * (i & 1)], a[0], a[2]);
    four_halves(bytes[2 * (i & 1) + 1], a[1], a[3]);
    a[0] = wide_multiply(a[0], lower);
    a[1] = wide_multiply(a[1], upper);
    a[2] = wide_multiply(a[2], lower);
    a[3] = wide_multiply(a[3], upper);
  }
};

// Halves as they are: no codes.
template <>
struct Codes<KSL_ENC_BF16> {
  static constexpr int kBytes = kPackedBf16Bytes;
};

// Places in shared memory.
template <int kEncoding, int kColumns, int kBytesPerElement>
struct WideShared {
  static constexpr int kStage = kColumns * 128;  // 64 or 128 input elements
  static constexpr int kSuperStages = kSuper * kBytesPerElement / 128;
  // Weights come by 256 input elements; bf16, which are many bytes, by 64.
  static constexpr int kParts = kEncoding == KSL_ENC_BF16 ? 4 : 1;
  static constexpr int kSuperBytes = Codes<kEncoding>::kBytes, kBlock = kSuperBytes / kParts;
  static constexpr int kWeights = kWideTiles * kBlock;
  static constexpr int kWeightStages = kParts == 1 ? 2 : 4;
  static constexpr int kAct = kColumns * 128;
  static constexpr int kBarriers = 512;
  static constexpr int kRoom = 227 * 1024 - kBarriers - kAct - kWeightStages * kWeights;
  static constexpr int kStages = kRoom / kStage < 8 ? kRoom / kStage : 8;
  static constexpr int kWeightsAt = kStages * kStage + kAct;
  static constexpr int kBarriersAt = kWeightsAt + kWeightStages * kWeights;
  static constexpr int kBytes = kBarriersAt + kBarriers;
  static_assert(kStages >= 3, "too few stages");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Rings of full and empty barriers.
struct Ring {
  unsigned barriers;  // full, then empty
  int n, place;
  unsigned phase;
  __device__ unsigned full() const { return barriers + place * 8; }
  __device__ unsigned empty() const { return barriers + (n + place) * 8; }
  __device__ void next() {
    if (++place == n) {
      place = 0;
      phase ^= 1;
    }
  }
};

template <class Use, int kColumns>
__device__ void wide_fetch(const WideArgs &a, unsigned shared, Ring x, Ring w, unsigned rank) {
  const int lane = threadIdx.x & 31;
  if (threadIdx.x >= 32) return;
  const int steps = a.row_steps * a.token_steps, clusters = gridDim.x / kWideCluster;
  constexpr int kHalf = Use::kStage / kWideCluster;
  bool waited = false;
  for (int step = blockIdx.x / kWideCluster; step < steps; step += clusters) {
    const int first = (step / a.token_steps * kWideCluster + rank) * kWideTiles;
    const int token = step % a.token_steps * kColumns;
    const int tile = min(first + (lane & (kWideTiles - 1)), a.tiles - 1);
    const uint8_t *weights = a.data + static_cast<int64_t>(tile) * a.supers * Use::kSuperBytes;
    const uint8_t *from = a.x + static_cast<int64_t>(token) * 128 + rank * kHalf;
    for (int step = 0; step < a.supers * Use::kParts; step++) {
      barrier_wait(w.empty(), w.phase ^ 1);
      if (lane == 0) barrier_expect(w.full(), Use::kWeights);
      __syncwarp();
      if (lane < kWideTiles)
        bulk_load(shared + Use::kWeightsAt + w.place * Use::kWeights + lane * Use::kBlock,
                  weights + static_cast<int64_t>(step) * Use::kBlock, Use::kBlock, w.full());
      w.next();
      if (!waited) {  // weights are never written
        wait_before();
        waited = true;
      }
      constexpr int kStages = Use::kSuperStages / Use::kParts;
      for (int part = 0; part < kStages; part++) {
        barrier_wait(x.empty(), x.phase ^ 1);
        if (lane == 0) {
          barrier_expect(x.full(), Use::kStage);
          bulk_load_all(shared + x.place * Use::kStage + rank * kHalf,
                        from + (static_cast<int64_t>(step) * kStages + part) * a.groups *
                                   (kPanelTokens * 128),
                        kHalf, x.full(), (1 << kWideCluster) - 1);
        }
        __syncwarp();
        x.next();
      }
    }
  }
}

// To memory that one thread alone adds to, without waiting.
__device__ inline void add_global(float *to, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

template <bool kAdd>
__device__ inline void wide_put(float *to, float value) {
  if (kAdd)
    add_global(to, value);
  else
    *to = value;
}

// Rows from y on of a whole tile: nothing is tested for each element.
template <int kColumns, bool kAdd>
__device__ inline void wide_store_whole(float *y, int stride, float low, float high,
                                        const float (&sum)[kColumns / 2]) {
  float *to[2] = {y, y + stride};
  const int64_t step = static_cast<int64_t>(stride) * 8;
#pragma unroll
  for (int i = 0; i < kColumns / 8; i++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      wide_put<kAdd>(to[e], sum[i * 4 + e] * low);
      wide_put<kAdd>(to[e] + 8, sum[i * 4 + 2 + e] * high);
      to[e] += step;
      asm volatile("" : "+l"(to[e]));  // addresses made ahead would take all registers
    }
  }
}

// Writes what a lane has of a tile: rows g and g + 8, two tokens of every eight.
template <int kColumns>
__device__ inline void wide_store(const WideArgs &a, int tile, int token, int lane,
                                  const float (&sum)[kColumns / 2]) {
  const int g = lane >> 2;
  int part = 0;
  while (part + 1 < a.n_parts && tile >= a.parts[part + 1].first) part++;
  const int row = (tile - a.parts[part].first) * 16 + g, rows = a.parts[part].rows;
  const float low = a.x_inverse * a.scale[tile * 16 + g];
  const float high = a.x_inverse * a.scale[tile * 16 + g + 8];
  const int stride = a.outputs[part].stride;
  const bool add = a.outputs[part].add;
  const bool whole = token + kColumns <= a.tokens && row - g + 16 <= rows;
  token += 2 * (lane & 3);
  float *y = a.outputs[part].y + static_cast<int64_t>(token) * stride + row;
  if (whole && add) return wide_store_whole<kColumns, true>(y, stride, low, high, sum);
  if (whole) return wide_store_whole<kColumns, false>(y, stride, low, high, sum);
#pragma unroll
  for (int i = 0; i < kColumns / 8; i++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (token + i * 8 + e >= a.tokens) continue;
      float *to = y + static_cast<int64_t>(i * 8 + e) * stride;
      const float x = sum[i * 4 + e] * low, z = sum[i * 4 + 2 + e] * high;
      if (add) {
        if (row < rows) add_global(to, x);
        if (row + 8 < rows) add_global(to + 8, z);
      } else {
        if (row < rows) to[0] = x;
        if (row + 8 < rows) to[8] = z;
      }
    }
  }
}

// x / (1 + exp(-x)).
__device__ inline float silu_fast(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return x * inverse;
}

// A pair's: the act of rows g goes to shared memory as a panel's piece, and where else it is
// wanted.
template <int kColumns>
__device__ inline void wide_pair(const WideArgs &a, int tile, int slot, int token, int lane,
                                 uint8_t *staged, const float (&sum)[kColumns / 2]) {
  const int g = lane >> 2, row = tile * 8 + g, k = slot * 8 + g, own = 2 * (lane & 3);
  const bool there = tile < a.tiles && row < a.parts[0].rows;
  const float low = there ? a.x_inverse * a.scale[tile * 16 + g] : 0.0f;
  const float high = there ? a.x_inverse * a.scale[tile * 16 + g + 8] : 0.0f;
  const bool floats = there && (a.outputs[0].y != nullptr || a.act != nullptr);
  uint8_t *const to[2] = {staged + own * 128 + panel_byte(own, k),
                          staged + own * 128 + 128 + panel_byte(own + 1, k)};
  // Together: what is seldom wanted is asked for once for many.
  constexpr int kTogether = 8;
#pragma unroll
  for (int first = 0; first < kColumns / 4; first += kTogether) {
    float act[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const int at = first + i, from = (at >> 1) * 4 + (at & 1);
      act[i] = silu_fast(sum[from] * low) * (sum[from + 2] * high);
      *reinterpret_cast<__half *>(to[at & 1] + (at >> 1) * 1024) =
          panel_half(act[i] * a.act_panel.scale);
    }
    if (!floats) continue;
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const int at = first + i, from = (at >> 1) * 4 + (at & 1);
      const int64_t t = token + own + (at >> 1) * 8 + (at & 1);
      if (t >= a.tokens) break;
      if (a.outputs[0].y != nullptr) {
        a.outputs[0].y[t * a.outputs[0].stride + row] = sum[from] * low;
        a.outputs[1].y[t * a.outputs[1].stride + row] = sum[from + 2] * high;
      }
      if (a.act != nullptr) a.act[t * a.act_stride + row] = act[i];
    }
  }
}

__device__ inline void meet_consumers() {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

// Writes a finished tile of a warp.
template <class Use, int kColumns, bool kPair>
__device__ inline void wide_finish(const WideArgs &a, int first, int slot, int token, int lane,
                                   uint8_t *memory, unsigned shared,
                                   const float (&sum)[kColumns / 2]) {
  const int tile = first + slot;
  if (!kPair) {
    if (tile < a.tiles) wide_store<kColumns>(a, tile, token, lane, sum);
    return;
  }
  if (threadIdx.x == 128) bulk_store_wait();
  meet_consumers();
  wide_pair<kColumns>(a, tile, slot, token, lane, memory + Use::kStages * Use::kStage, sum);
  shared_written();
  meet_consumers();
  if (threadIdx.x == 128 && a.act_panel.data != nullptr && first < a.tiles) {
    const int left = (a.tokens - token + kPanelTokens - 1) / kPanelTokens * kPanelTokens;
    bulk_store(panel_row(a.act_panel, token, first / kWideTiles),
               shared + Use::kStages * Use::kStage, min(left, kColumns) * 128);
  }
}

template <int kEncoding, int kColumns, bool kPair>
__device__ void wide_multiply_tiles(const WideArgs &a, uint8_t *memory, unsigned shared, Ring x,
                                    Ring w, unsigned rank) {
  typedef WideShared<kEncoding, kColumns, 2> Use;
  const int lane = threadIdx.x & 31, slot = (threadIdx.x >> 5) - 4;  // a warp's tile
  const int steps = a.row_steps * a.token_steps, clusters = gridDim.x / kWideCluster;
  wait_before();
  for (int step = blockIdx.x / kWideCluster; step < steps; step += clusters) {
    const int first = (step / a.token_steps * kWideCluster + rank) * kWideTiles;
    const int token = step % a.token_steps * kColumns;
    float sum[kColumns / 2];
    // A product waits for its operand's registers only when it starts, so the next fragment is made
    // while it runs. Four in turn: three may be in use.
    unsigned fragments[4][4];
    unsigned before = 0;  // the empty barrier of the piece in front
    Codes<kEncoding> codes, next;
    barrier_wait(w.full(), w.phase);
    codes.load(memory + Use::kWeightsAt + w.place * Use::kWeights + slot * Use::kBlock, lane, 0);
    codes.fragment(0, fragments[0]);
    for (int super = 0; super < a.supers; super++) {
#pragma unroll
      for (int piece = 0; piece < 4; piece++) {
        if (piece < 3) {
          next.load(memory + Use::kWeightsAt + w.place * Use::kWeights + slot * Use::kBlock, lane,
                    piece + 1);
        } else {
          __syncwarp();
          if (lane == 0) barrier_arrive(w.empty(), rank);
          w.next();
          if (super + 1 < a.supers) {
            barrier_wait(w.full(), w.phase);
            next.load(memory + Use::kWeightsAt + w.place * Use::kWeights + slot * Use::kBlock, lane,
                      0);
          }
        }
        barrier_wait(x.full(), x.phase);
        const uint64_t b = panel_descriptor(shared + x.place * Use::kStage);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          wgmma_begin();
          Wgmma<kColumns>::template run<true>(sum, fragments[i], b + 2 * i,
                                              (super | piece | i) != 0);
          wgmma_commit();
          wgmma_wait<3>();
          if (i == 2) {
            if (before != 0 && lane < kWideCluster) barrier_arrive(before, lane);
            before = x.empty();
          }
          if (i < 3) {
            codes.fragment(i + 1, fragments[i + 1]);
          } else {
            codes = next;
            codes.fragment(0, fragments[0]);
          }
        }
        x.next();
      }
    }
    wgmma_wait<0>();
    if (lane < kWideCluster) barrier_arrive(before, lane);
    wide_finish<Use, kColumns, kPair>(a, first, slot, token, lane, memory, shared, sum);
  }
  if (kPair && threadIdx.x == 128) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The same for weights that are fragments already: those of a piece are read while the products of
// the one before run.
template <int kColumns, bool kPair>
__device__ void wide_multiply_halves(const WideArgs &a, uint8_t *memory, unsigned shared, Ring x,
                                     Ring w, unsigned rank) {
  typedef WideShared<KSL_ENC_BF16, kColumns, 2> Use;
  const int lane = threadIdx.x & 31, slot = (threadIdx.x >> 5) - 4;  // a warp's tile
  const int steps = a.row_steps * a.token_steps, clusters = gridDim.x / kWideCluster;
  const int pieces = a.supers * 4;
  unsigned fragments[2][4][4];
  const auto load = [&](unsigned (&to)[4][4]) {
    barrier_wait(w.full(), w.phase);
    const uint4 *from =
        reinterpret_cast<const uint4 *>(memory + Use::kWeightsAt + w.place * Use::kWeights +
                                        slot * Use::kBlock) +
        lane;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 v = from[i * 32];
      to[i][0] = v.x, to[i][1] = v.y, to[i][2] = v.z, to[i][3] = v.w;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(w.empty(), rank);
    w.next();
  };
  wait_before();
  for (int step = blockIdx.x / kWideCluster; step < steps; step += clusters) {
    const int first = (step / a.token_steps * kWideCluster + rank) * kWideTiles;
    const int token = step % a.token_steps * kColumns;
    float sum[kColumns / 2];
    unsigned before = 0;  // the empty barrier of the piece in front
    load(fragments[0]);
    for (int piece = 0; piece < pieces; piece += 2) {
#pragma unroll
      for (int side = 0; side < 2; side++) {
        barrier_wait(x.full(), x.phase);
        const uint64_t b = panel_descriptor(shared + x.place * Use::kStage);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
          Wgmma<kColumns>::template run<true>(sum, fragments[side][i], b + 2 * i,
                                              (piece | side | i) != 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (before != 0 && lane < kWideCluster) barrier_arrive(before, lane);
        before = x.empty();
        x.next();
        if (side == 0 || piece + 2 < pieces) load(fragments[side ^ 1]);
      }
    }
    wgmma_wait<0>();
    if (lane < kWideCluster) barrier_arrive(before, lane);
    wide_finish<Use, kColumns, kPair>(a, first, slot, token, lane, memory, shared, sum);
  }
  if (kPair && threadIdx.x == 128) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The barriers of a block, and the roles of its warps.
template <class Use, class Multiply, class Fetch>
__device__ inline void wide_roles(unsigned shared, Multiply multiply, Fetch fetch) {
  const Ring x = {shared + Use::kBarriersAt, Use::kStages, 0, 0};
  const Ring w = {x.barriers + 16 * Use::kStages, Use::kWeightStages, 0, 0};
  allow_next();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Use::kStages; i++) {
      barrier_init(x.barriers + i * 8, 1);
      barrier_init(x.barriers + (Use::kStages + i) * 8, kWideTiles * kWideCluster);
    }
    for (int i = 0; i < Use::kWeightStages; i++) {
      barrier_init(w.barriers + i * 8, 1);
      barrier_init(w.barriers + (Use::kWeightStages + i) * 8, kWideTiles);
    }
    barrier_init_done();
  }
  cluster_sync();
  if (threadIdx.x < 128) {
    give_registers<40>();
    fetch(x, w);
  } else {
    take_registers<232>();
    multiply(x, w);
  }
  cluster_sync();  // nobody arrives at barriers of a block that has ended
}

#endif

template <int kEncoding, int kColumns, bool kPair>
__global__ void __cluster_dims__(kWideCluster) __launch_bounds__(kWideThreads, 1)
    wide(const __grid_constant__ WideArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  typedef WideShared<kEncoding, kColumns, 2> Use;
  extern __shared__ __align__(1024) uint8_t memory[];
  const unsigned shared = shared_address(memory), rank = cluster_rank();
  wide_roles<Use>(
      shared,
      [&](Ring x, Ring w) {
        if constexpr (kEncoding == KSL_ENC_BF16)
          wide_multiply_halves<kColumns, kPair>(a, memory, shared, x, w, rank);
        else
          wide_multiply_tiles<kEncoding, kColumns, kPair>(a, memory, shared, x, w, rank);
      },
      [&](Ring x, Ring w) { wide_fetch<Use, kColumns>(a, shared, x, w, rank); });
#endif
}

}  // namespace
}  // namespace ksl
