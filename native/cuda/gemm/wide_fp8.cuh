// Products of FP6 weights with e4m3 activations of many tokens. E2M3 is exact in e4m3, but sums of
// such products have few bits inside the matrix units: every 128 input elements they are added to
// float32 with the weights' scale of that block. Activations have one power of two a token.
#pragma once
#include "wide.cuh"

namespace ksl {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A lane's weights of 64 input elements, two fragments of e4m3 bytes: see e2m3_bytes.
struct Codes8 {
  uint4 words;
  uint2 plane;
  __device__ void load(const uint8_t *block, int lane, int piece) {
    words = reinterpret_cast<const uint4 *>(block)[piece * 32 + lane];
    plane =
        reinterpret_cast<const uint2 *>(block + 2048)[((piece >> 1) * 32 + lane) * 2 + (piece & 1)];
  }
  __device__ void fragment(int i, unsigned (&a)[4]) const {
    e2m3_bytes(i == 0 ? words.x : words.z, i == 0 ? words.y : words.w, i == 0 ? plane.x : plane.y,
               a);
  }
};

// Of many columns one half is added up after the other, in the same registers.
template <int kColumns, bool kPair>
__device__ void wide8_multiply_tiles(const WideArgs &a, uint8_t *memory, unsigned shared, Ring x,
                                     Ring w, unsigned rank) {
  typedef WideShared<KSL_ENC_E2M3, kColumns, 1> Use;
  constexpr int kSlices = kColumns > 160 ? 2 : 1, kSlice = kColumns / kSlices;
  const int lane = threadIdx.x & 31, slot = (threadIdx.x >> 5) - 4;  // a warp's tile
  const int steps = a.row_steps * a.token_steps, clusters = gridDim.x / kWideCluster;
  const auto block = [&] {
    return memory + Use::kWeightsAt + w.place * Use::kWeights + slot * Use::kBlock;
  };
  wait_before();
  for (int step = blockIdx.x / kWideCluster; step < steps; step += clusters) {
    const int first = (step / a.token_steps * kWideCluster + rank) * kWideTiles;
    const int token = step % a.token_steps * kColumns;
    float sum[kColumns / 2], part[kSlice / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; i++) sum[i] = 0;
    unsigned fragments[4][4];
    Codes8 codes[2];
    barrier_wait(w.full(), w.phase);
    uint2 scales = *reinterpret_cast<const uint2 *>(block() + 3072);
    codes[0].load(block(), lane, 0);
    codes[1].load(block(), lane, 1);
    codes[0].fragment(0, fragments[0]);
    for (int super = 0; super < a.supers; super++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const __half2 both = *reinterpret_cast<const __half2 *>(half ? &scales.y : &scales.x);
        const float lower = __low2float(both), upper = __high2float(both);
        barrier_wait(x.full(), x.phase);
#pragma unroll
        for (int slice = 0; slice < kSlices; slice++) {
          const uint64_t b =
              panel_descriptor(shared + x.place * Use::kStage + slice * kSlice * 128);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            wgmma_begin();
            Wgmma<kSlice>::template run<false>(part, fragments[i], b + 2 * i, i != 0);
            wgmma_commit();
            // The next fragment is made while this product runs; its registers were last read by
            // products that have ended.
            if (slice == 0 && i < 3) codes[(i + 1) / 2].fragment((i + 1) & 1, fragments[i + 1]);
          }
          const bool last = slice == kSlices - 1;
          if (last && half == 0) {
            codes[0].load(block(), lane, 2);
            codes[1].load(block(), lane, 3);
          } else if (last) {
            __syncwarp();
            if (lane == 0) barrier_arrive(w.empty(), rank);
            w.next();
            if (super + 1 < a.supers) {
              barrier_wait(w.full(), w.phase);
              scales = *reinterpret_cast<const uint2 *>(block() + 3072);
              codes[0].load(block(), lane, 0);
              codes[1].load(block(), lane, 1);
            }
          }
          wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < kSlice / 2; i++) asm volatile("" : "+f"(part[i]));
          if (last) {
            if (lane < kWideCluster) barrier_arrive(x.empty(), lane);
            x.next();
            codes[0].fragment(0, fragments[0]);
          }
#pragma unroll
          for (int i = 0; i < kSlice / 2; i++) {
            float &to = sum[slice * (kSlice / 2) + i];
            to = __fmaf_rn(part[i], i & 2 ? upper : lower, to);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kColumns / 8; i++) {
      const float2 inverse =
          *reinterpret_cast<const float2 *>(a.token_inverse + token + i * 8 + 2 * (lane & 3));
#pragma unroll
      for (int e = 0; e < 4; e++) sum[i * 4 + e] *= e & 1 ? inverse.y : inverse.x;
    }
    wide_finish<Use, kColumns, kPair>(a, first, slot, token, lane, memory, shared, sum);
  }
  if (kPair && threadIdx.x == 128) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif

template <int kColumns, bool kPair>
__global__ void __cluster_dims__(kWideCluster) __launch_bounds__(kWideThreads, 1)
    wide8(const __grid_constant__ WideArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  typedef WideShared<KSL_ENC_E2M3, kColumns, 1> Use;
  extern __shared__ __align__(1024) uint8_t memory[];
  const unsigned shared = shared_address(memory), rank = cluster_rank();
  wide_roles<Use>(
      shared,
      [&](Ring x, Ring w) { wide8_multiply_tiles<kColumns, kPair>(a, memory, shared, x, w, rank); },
      [&](Ring x, Ring w) { wide_fetch<Use, kColumns>(a, shared, x, w, rank); });
#endif
}

}  // namespace
}  // namespace ksl
