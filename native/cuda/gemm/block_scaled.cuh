// Products of many tokens on sm_120a, by block-scaled matrix instructions; lanes.cuh says what lies
// where. FP6 weights meet e4m3 activations with a power of two for every 32; NVFP4 weights meet
// activations in two terms of their own kind, the second what the first leaves, each with an e4m3
// scale for every 16. Codes and scales of weights enter as they are.
//
// A block has 128 weight rows and 128 tokens: one warp fetches packed weights and activations into
// rings, eight warps of 32 rows and 64 tokens expand weights into registers and multiply. Blocks
// stay until their share of the tiles is done. An output element is one chain of products in
// ascending order of its input elements, whatever else is in the wave.
#pragma once
#include "../common/bulk.cuh"
#include "gemm.cuh"
#include "lanes.cuh"

namespace ksl {
namespace {

constexpr int kScaledRows = 8, kScaledTokens = 128;  // tiles of 16 rows, tokens of a block
constexpr int kScaledWarps = 8, kScaledThreads = (kScaledWarps + 1) * 32;

struct ScaledArgs {
  const uint8_t *data;
  const float *scale;
  int supers, tiles, n_parts;
  PackedPart parts[kGroupParts];
  Output outputs[kGroupParts];  // by part
  Scaled x;
  float inverse;  // of what weights and activations carry
  int tokens;
  float *act;  // a pair's, null: not wanted
  int act_stride;
  Panel act_panel;
  int row_steps, token_steps;
};

// Places in shared memory.
template <int kEncoding, bool kPair>
struct ScaledShared {
  static constexpr int kBlock = kEncoding == KSL_ENC_E2M3 ? kBlockE2m3 : kBlockNvfp4;
  static constexpr int kWeights = kScaledRows * kBlock, kWeightStages = 2;
  static constexpr int kTokenScales = kEncoding == KSL_ENC_E2M3 ? kMx8Scales : kNv4Scales;
  static constexpr int kPiece = kScaledTokens * kScaledPiece;
  static constexpr int kStage = kScaledStage * kPiece + kScaledTokens * kTokenScales;
  static constexpr int kSuperStages = kSuper / (64 * kScaledStage);
  static constexpr int kAct = kPair ? kScaledTokens * 128 : 0;
  static constexpr int kBarriers = 128;
  static constexpr int kRoom = kSmallRoom - kBarriers - kAct - kWeightStages * kWeights;
  static constexpr int kStages = kRoom / kStage;
  static constexpr int kWeightsAt = kStages * kStage,
                       kActAt = kWeightsAt + kWeightStages * kWeights;
  static constexpr int kBarriersAt = kActAt + kAct;
  static constexpr int kBytes = kBarriersAt + kBarriers;
  static_assert(kStages >= 2 && (kStages + kWeightStages) * 16 <= kBarriers, "too few stages");
};

// Full barriers, then empty ones.
struct ScaledRing {
  unsigned barriers;
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

// c += a b with the scale byte kByteA of lanes that scale_lane_a names, and kByteB of B's.
template <int kByteA, int kByteB>
__device__ inline void multiply_mx8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    uint32_t scale_a, uint32_t scale_b) {
#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
      ".f32.e2m3.e4m3.f32.ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, "
      "%10, {%11, 0}, %12, {%13, 0};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "n"(kByteA),
        "r"(scale_b), "n"(kByteB));
#endif
}
// The scales' lanes by thread id.
template <int kThreadA, int kThreadB>
__device__ inline void multiply_nv4(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    uint32_t scale_a, uint32_t scale_b) {
#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
      ".f32.e2m1.e2m1.f32.ue4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, "
      "%10, {0, %11}, %12, {0, %13};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "n"(kThreadA),
        "r"(scale_b), "n"(kThreadB));
#endif
}

// A warp's 32 rows and 64 tokens.
typedef float ScaledSums[2][8][4];

// One piece of FP6. blocks: of two tiles; scale_a: of their lanes, byte `half` of the super.
template <int kPiece, int kHalf>
__device__ inline void scaled_piece_e2m3(const uint8_t *const (&blocks)[2],
                                         const uint32_t (&scale_a)[2], const uint8_t *x,
                                         const uint32_t (&scale_b)[8], int lane, ScaledSums &sum) {
  uint32_t a[2][2][4];
#pragma unroll
  for (int m = 0; m < 2; m++) e2m3_fragments(blocks[m], kHalf * kScaledStage + kPiece, lane, a[m]);
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const uint4 b = *reinterpret_cast<const uint4 *>(x + n * 8 * kScaledPiece);
#pragma unroll
    for (int m = 0; m < 2; m++)
      multiply_mx8<kHalf, mx8_scale_byte(kPiece, 0)>(sum[m][n], a[m][0], b.x, b.y, scale_a[m],
                                                     scale_b[n]);
#pragma unroll
    for (int m = 0; m < 2; m++)
      multiply_mx8<kHalf, mx8_scale_byte(kPiece, 1)>(sum[m][n], a[m][1], b.z, b.w, scale_a[m],
                                                     scale_b[n]);
  }
}

// One piece of NVFP4. scale_a: of both pieces of the stage, by lane.
template <int kPiece>
__device__ inline void scaled_piece_nvfp4(const uint8_t *const (&blocks)[2],
                                          const uint32_t (&scale_a)[2], const uint8_t *x,
                                          const uint32_t (&scale_b)[8], int of_super, int lane,
                                          ScaledSums &sum) {
  uint32_t a[2][4];
#pragma unroll
  for (int m = 0; m < 2; m++) nvfp4_fragment(blocks[m], of_super, lane, a[m]);
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const uint4 b = *reinterpret_cast<const uint4 *>(x + n * 8 * kScaledPiece);
#pragma unroll
    for (int m = 0; m < 2; m++)
      multiply_nv4<kPiece, nv4_scale_thread(kPiece, 0)>(sum[m][n], a[m], b.x, b.y, scale_a[m],
                                                        scale_b[n]);
#pragma unroll
    for (int m = 0; m < 2; m++)
      multiply_nv4<kPiece, nv4_scale_thread(kPiece, 1)>(sum[m][n], a[m], b.z, b.w, scale_a[m],
                                                        scale_b[n]);
  }
}

// What a stage adds. stage: 128 tokens' pieces, then scales; token: the warp's first.
template <int kEncoding, int kHalf>
__device__ inline void scaled_stage(const uint8_t *const (&blocks)[2], uint32_t (&scale_a)[2],
                                    const uint8_t *stage, int token, int lane, ScaledSums &sum) {
  typedef ScaledShared<kEncoding, false> Use;
  const int g = lane >> 2, t = lane & 3;
  const uint8_t *x = stage + (token + g) * kScaledPiece + t * 16;
  const uint8_t *scales = stage + kScaledStage * Use::kPiece + (token + g) * Use::kTokenScales;
  uint32_t scale_b[8];
#pragma unroll
  for (int n = 0; n < 8; n++)
    scale_b[n] = *reinterpret_cast<const uint32_t *>(scales + n * 8 * Use::kTokenScales +
                                                     (kEncoding == KSL_ENC_E2M3 ? 0 : t * 4));
  if constexpr (kEncoding == KSL_ENC_E2M3) {
    scaled_piece_e2m3<0, kHalf>(blocks, scale_a, x, scale_b, lane, sum);
    scaled_piece_e2m3<1, kHalf>(blocks, scale_a, x + Use::kPiece, scale_b, lane, sum);
  } else {
#pragma unroll
    for (int m = 0; m < 2; m++) scale_a[m] = nvfp4_scales(blocks[m], kHalf, lane);
    scaled_piece_nvfp4<0>(blocks, scale_a, x, scale_b, 2 * kHalf, lane, sum);
    scaled_piece_nvfp4<1>(blocks, scale_a, x + Use::kPiece, scale_b, 2 * kHalf + 1, lane, sum);
  }
}

template <class Use>
__device__ inline void scaled_fetch(const ScaledArgs &a, unsigned shared, ScaledRing x,
                                    ScaledRing w, int lane) {
  const int steps = a.row_steps * a.token_steps;
  bool waited = false;
  for (int step = blockIdx.x; step < steps; step += gridDim.x) {
    const int first = step / a.token_steps * kScaledRows;
    const int token = step % a.token_steps * kScaledTokens;
    const int tile = min(first + (lane & (kScaledRows - 1)), a.tiles - 1);
    const uint8_t *weights = a.data + static_cast<int64_t>(tile) * a.supers * Use::kBlock;
    const int there = min(kScaledTokens, a.x.tokens - token);
    for (int super = 0; super < a.supers; super++) {
      bulk_wait(w.empty(), w.phase ^ 1);
      if (lane == 0) bulk_expect(w.full(), Use::kWeights);
      __syncwarp();
      if (lane < kScaledRows)
        bulk_load(shared + Use::kWeightsAt + w.place * Use::kWeights + lane * Use::kBlock,
                  weights + static_cast<int64_t>(super) * Use::kBlock, Use::kBlock, w.full());
      w.next();
      if (!waited) {  // weights are never written
        wait_before();
        waited = true;
      }
      for (int part = 0; part < Use::kSuperStages; part++) {
        bulk_wait(x.empty(), x.phase ^ 1);
        if (lane == 0) {
          const unsigned to = shared + x.place * Use::kStage;
          const int64_t stage = static_cast<int64_t>(super) * Use::kSuperStages + part;
          bulk_expect(x.full(), there * (kScaledStage * kScaledPiece + Use::kTokenScales));
          for (int piece = 0; piece < kScaledStage; piece++)
            bulk_load(
                to + piece * Use::kPiece,
                a.x.data + ((stage * kScaledStage + piece) * a.x.tokens + token) * kScaledPiece,
                there * kScaledPiece, x.full());
          bulk_load(to + kScaledStage * Use::kPiece,
                    a.x.scales + (stage * a.x.tokens + token) * Use::kTokenScales,
                    there * Use::kTokenScales, x.full());
        }
        __syncwarp();
        x.next();
      }
    }
  }
}

// Writes what one thread alone writes, or adds it without waiting.
__device__ inline void scaled_put(float *to, float value, bool add) {
  if (add)
    atomicAdd(to, value);
  else
    *to = value;
}

// Writes a tile: rows g and g + 8, two tokens of every eight.
__device__ inline void scaled_store(const ScaledArgs &a, int tile, int token, int lane,
                                    const float (&sum)[8][4]) {
  const int g = lane >> 2;
  int part = 0;
  while (part + 1 < a.n_parts && tile >= a.parts[part + 1].first) part++;
  const int row = (tile - a.parts[part].first) * 16 + g;
  const float low = a.inverse * a.scale[tile * 16 + g];
  const float high = a.inverse * a.scale[tile * 16 + g + 8];
  const bool first = row < a.parts[part].rows, second = row + 8 < a.parts[part].rows;
  const bool add = a.outputs[part].add;
  token += 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < 8; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int at = token + n * 8 + e;
      if (at >= a.tokens) continue;
      const float factor = a.x.factors != nullptr ? a.x.factors[at] : 1.0f;
      float *to = a.outputs[part].y + static_cast<int64_t>(at) * a.outputs[part].stride + row;
      if (first) scaled_put(to, sum[n][e] * low * factor, add);
      if (second) scaled_put(to + 8, sum[n][2 + e] * high * factor, add);
    }
  }
}

// A pair's: the act of rows g as a panel's piece in shared memory, and where else it is wanted.
__device__ inline void scaled_pair(const ScaledArgs &a, int tile, int slot, int token, int offset,
                                   int lane, uint8_t *staged, const float (&sum)[8][4]) {
  const int g = lane >> 2, row = tile * 8 + g, k = slot * 8 + g;
  const bool there = tile < a.tiles && row < a.parts[0].rows;
  const float low = there ? a.inverse * a.scale[tile * 16 + g] : 0.0f;
  const float high = there ? a.inverse * a.scale[tile * 16 + g + 8] : 0.0f;
#pragma unroll
  for (int n = 0; n < 8; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int in_block = offset + n * 8 + 2 * (lane & 3) + e, at = token + in_block;
      const float factor = a.x.factors != nullptr && at < a.tokens ? a.x.factors[at] : 1.0f;
      const float gate = sum[n][e] * low * factor, up = sum[n][2 + e] * high * factor;
      const float value = gate * __fdividef(up, 1.0f + __expf(-gate));
      *reinterpret_cast<__half *>(staged + in_block * 128 + panel_byte(in_block, k)) =
          panel_half(value * a.act_panel.scale);
      if (!there || at >= a.tokens) continue;
      if (a.outputs[0].y != nullptr) {
        a.outputs[0].y[static_cast<int64_t>(at) * a.outputs[0].stride + row] = gate;
        a.outputs[1].y[static_cast<int64_t>(at) * a.outputs[1].stride + row] = up;
      }
      if (a.act != nullptr) a.act[static_cast<int64_t>(at) * a.act_stride + row] = value;
    }
  }
}

// The eight warps that multiply meet.
__device__ inline void scaled_meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(kScaledWarps * 32) : "memory");
}

// Writes the panel piece of all of them.
__device__ inline void scaled_write_panel(const ScaledArgs &a, int first, int token,
                                          const uint8_t *staged) {
  scaled_meet();
  if (a.act_panel.data != nullptr && first < a.tiles) {
    const int left = (a.tokens - token + kPanelTokens - 1) / kPanelTokens * kPanelTokens;
    const int chunks = min(left, kScaledTokens) * 8;
    uint4 *to = reinterpret_cast<uint4 *>(panel_row(a.act_panel, token, first / kScaledRows));
    for (int i = threadIdx.x; i < chunks; i += kScaledWarps * 32)
      to[i] = reinterpret_cast<const uint4 *>(staged)[i];
  }
  scaled_meet();
}

template <int kEncoding, bool kPair>
__device__ inline void scaled_multiply(const ScaledArgs &a, uint8_t *memory, ScaledRing x,
                                       ScaledRing w, int warp, int lane) {
  typedef ScaledShared<kEncoding, kPair> Use;
  const int slot = warp / 2 * 2, offset = warp % 2 * 64;  // tiles; tokens
  const int steps = a.row_steps * a.token_steps;
  wait_before();
  for (int step = blockIdx.x; step < steps; step += gridDim.x) {
    const int first = step / a.token_steps * kScaledRows;
    const int token = step % a.token_steps * kScaledTokens;
    ScaledSums sum = {};
    for (int super = 0; super < a.supers; super++) {
      bulk_wait(w.full(), w.phase);
      const uint8_t *own = memory + Use::kWeightsAt + w.place * Use::kWeights + slot * Use::kBlock;
      const uint8_t *const blocks[2] = {own, own + Use::kBlock};
      uint32_t scale_a[2];
      if (kEncoding == KSL_ENC_E2M3) {
#pragma unroll
        for (int m = 0; m < 2; m++) scale_a[m] = e2m3_scales(blocks[m], lane);
      }
      bulk_wait(x.full(), x.phase);
      scaled_stage<kEncoding, 0>(blocks, scale_a, memory + x.place * Use::kStage, offset, lane,
                                 sum);
      __syncwarp();
      if (lane == 0) bulk_arrive(x.empty());
      x.next();
      bulk_wait(x.full(), x.phase);
      scaled_stage<kEncoding, 1>(blocks, scale_a, memory + x.place * Use::kStage, offset, lane,
                                 sum);
      __syncwarp();
      if (lane == 0) {
        bulk_arrive(x.empty());
        bulk_arrive(w.empty());
      }
      x.next();
      w.next();
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const int tile = first + slot + m;
      if (kPair)
        scaled_pair(a, tile, slot + m, token, offset, lane, memory + Use::kActAt, sum[m]);
      else if (tile < a.tiles)
        scaled_store(a, tile, token + offset, lane, sum[m]);
    }
    if (kPair) scaled_write_panel(a, first, token, memory + Use::kActAt);
  }
}

template <int kEncoding, bool kPair>
__global__ void __launch_bounds__(kScaledThreads, 1)
    block_scaled(const __grid_constant__ ScaledArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
  typedef ScaledShared<kEncoding, kPair> Use;
  extern __shared__ __align__(128) uint8_t memory[];
  allow_next();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const unsigned shared = shared_at(memory);
  const ScaledRing x = {shared + Use::kBarriersAt, Use::kStages, 0, 0};
  const ScaledRing w = {x.barriers + 16 * Use::kStages, Use::kWeightStages, 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Use::kStages; i++) {
      bulk_barrier(x.barriers + i * 8, 1);
      bulk_barrier(x.barriers + (Use::kStages + i) * 8, kScaledWarps);
    }
    for (int i = 0; i < Use::kWeightStages; i++) {
      bulk_barrier(w.barriers + i * 8, 1);
      bulk_barrier(w.barriers + (Use::kWeightStages + i) * 8, kScaledWarps);
    }
    bulk_barriers_made();
  }
  __syncthreads();
  if (warp == kScaledWarps)
    scaled_fetch<Use>(a, shared, x, w, lane);
  else
    scaled_multiply<kEncoding, kPair>(a, memory, x, w, warp, lane);
#endif
}

}  // namespace
}  // namespace ksl
