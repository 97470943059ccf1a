// stream_many on sm_90a for more than 16 tokens: four warps, which have a tile each, multiply
// together. Their weights are expanded in the registers of operand A, and activations, rows of
// panels, are read by the matrix units once for all four. The sums are those of stream.cuh: such a
// product of 16 elements has the bits of a warp's own.
//
// Weights and activations have rings of their own, since blocks of weights are large; a stage of
// activations has half the elements of one of weights.
#pragma once
#include "stream.cuh"
#include "wgmma.cuh"

namespace ksl {
namespace {

// A block's warps: all tiles and ways, with what fills up the last four; two that fetch, and two of
// plain rows at least.
constexpr int kMostQuadWarps = 24, kQuadThreads = (kMostQuadWarps + 4) * 32;

__host__ __device__ inline int quad_slots(int set_tiles) {
  return (set_tiles + kQuad - 1) / kQuad * kQuad;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A place in a ring of stages with a full and an empty barrier each.
struct QuadRing {
  unsigned barriers;
  int n, bytes, place, moved, phase;
  __device__ QuadRing(unsigned barriers, int n, int bytes)
      : barriers(barriers), n(n), bytes(bytes), place(0), moved(0), phase(0) {}
  __device__ unsigned full() const { return barriers + place * 16; }
  __device__ unsigned empty() const { return full() + 8; }
  __device__ void next() {
    moved += bytes;
    if (++place == n) {
      place = moved = 0;
      phase ^= 1;
    }
  }
};

template <int kEncoding, int kEights>
__device__ inline void quads(const StreamArgs &a) {
  constexpr int kBytes = Expand<kEncoding>::kBytes, kTokens = 8 * kEights;
  constexpr int kSums = kEights * 4, kHalf = kEights * kHalfBytes;
  constexpr bool kLate = Expand<kEncoding>::kLate;
  extern __shared__ __align__(1024) uint8_t memory[];
  allow_next();
  const int lane = pinned_lane(), warp = threadIdx.x >> 5;
  const int slots = quad_slots(a.set_tiles), consumers = slots * a.ways;
  const int weights_at = a.x_stages * a.ways * kHalf, tiles = a.set_tiles * a.ways;
  const int pitch = Lines<kBytes>::kMoved ? a.pitch : kBytes;
  const int barriers_at = weights_at + a.stages * tiles * pitch;
  const unsigned base = shared_at(memory);
  QuadRing w(base + barriers_at, a.stages, tiles * pitch);
  QuadRing x(w.barriers + a.stages * 16, a.x_stages, a.ways * kHalf);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages + a.x_stages; i++) {
      bulk_barrier(w.barriers + i * 16, 1);
      bulk_barrier(w.barriers + i * 16 + 8, consumers);
    }
    plain_ring_barriers({a.plain_warps, 2 * a.plain_half, memory + a.plain_at});
    bulk_barriers_made();
  }
  __syncthreads();
  if (warp > consumers + 1) {
    if (blockIdx.y > 0) return;
    take_plain_beside(a, memory, warp - consumers - 2, lane);
    return;
  }
  const Share share(a);
  const int token = blockIdx.y * kTokens, steps = a.steps;
  const int total = (share.last - share.first + a.set_tiles - 1) / a.set_tiles * steps;
  if (warp >= consumers) {
    // One fetches weights, a lane has a tile and way; the other activations, a lane has eight
    // tokens of a way.
    const bool weights = warp == consumers;
    const int items = weights ? a.set_tiles : kEights;
    const int way = min(lane / items, a.ways - 1), slot = lane - way * items;
    const Chain chain(a, share, way);
    const int n = chain.n, super = share.begin + chain.skip;
    const uint64_t policy = bulk_policy(weights);
    if (weights) {
      const int64_t tile_bytes = static_cast<int64_t>(a.supers) * kBytes;
      const uint8_t *from =
          a.data + (share.first + slot) * tile_bytes + static_cast<int64_t>(super) * kBytes;
      const unsigned to = base + weights_at + lane * pitch;
      const Lines<kBytes> lines(a, (share.first + slot) * a.supers + super);
      int set = share.first, step = 0;
      for (int i = 0; i < total; i++) {
        if (i == kStagesAhead) wait_before();
        if (lane == 0) bulk_wait(w.empty(), w.phase ^ 1);
        __syncwarp();
        const bool there = lane < tiles && step < n && set + slot < share.last;
        const int blocks = __popc(__ballot_sync(kAll, there));
        if (lane == 0) bulk_expect(w.full(), blocks * kBytes);
        __syncwarp();
        if (there)
          bulk_load(to + w.moved + lines.at((set - share.first) * a.supers + step),
                    from + step * kBytes, kBytes, w.full(), policy);
        w.next();
        if (++step == steps) {
          step = 0;
          set += a.set_tiles;
          from += a.set_tiles * tile_bytes;
        }
      }
      return;
    }
    const int group = (token >> 3) + slot;
    const bool used = lane < kEights * a.ways && group * 8 < a.tokens;
    const uint8_t *const from =
        a.x + group * a.group_bytes + static_cast<int64_t>(super) * kSuperBytes;
    const unsigned to = base + lane * kHalfBytes;
    wait_before();
    int half = 0;
    for (int i = 0; i < 2 * total; i++) {
      if (lane == 0) bulk_wait(x.empty(), x.phase ^ 1);
      __syncwarp();
      const bool there = used && half < 2 * n;
      const int groups = __popc(__ballot_sync(kAll, there));
      if (lane == 0) bulk_expect(x.full(), groups * kHalfBytes);
      __syncwarp();
      if (there) bulk_load(to + x.moved, from + half * kHalfBytes, kHalfBytes, x.full(), policy);
      x.next();
      if (++half == 2 * steps) half = 0;
    }
    return;
  }
  wait_before();
  const int way = warp / slots, slot = warp - way * slots;
  const Chain chain(a, share, way);
  const int n = chain.n;
  // A warp without a tile only keeps the others company.
  const uint8_t *const own =
      memory + weights_at + (way * a.set_tiles + min(slot, a.set_tiles - 1)) * pitch;
  typedef Wgmma<kTokens> Product;
  unsigned before = 0;  // the empty barrier of activations that products may still be reading
  for (int set = share.first; set < share.last; set += a.set_tiles) {
    const int tile = set + slot;
    const bool has_tile = slot < a.set_tiles && tile < share.last;
    const Lines<kBytes> lines(
        a, (set + min(slot, a.set_tiles - 1)) * a.supers + share.begin + chain.skip);
    float sum[1][kEights][4] = {};
    float (&sums)[kSums] = reinterpret_cast<float (&)[kSums]>(sum);
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      bulk_wait(w.full(), w.phase);
      const uint8_t *const block = own + w.moved + lines.at(i);
      Expand<kEncoding> expand;
      expand.begin(block, lane);
#pragma unroll kLate ? 1 : 2
      for (int half = 0; half < 2; half++) {
        bulk_wait(x.full(), x.phase);
        if (i < n) {
          const unsigned at = __shfl_sync(kAll, base + way * kHalf + x.moved, 0);
          const uint64_t b = panel_descriptor(at, kHalfBytes);
          float late[kLate ? kSums : 4];
          // Two of them are used while two are made.
          unsigned fragments[2][2][4];
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            if ((j & 3) == 0) expand.piece(block, lane, 2 * half + (j >> 2));
            unsigned (&pair)[2][4] = fragments[j >> 1 & 1];
            expand.fragment(j & 3, pair[0]);
            expand.fragment((j & 3) + 1, pair[1]);
            wgmma_begin();
#pragma unroll
            for (int k = j; k < j + 2; k++) {
              const uint64_t of = b + (k >> 2) * (1024 >> 4) + 2 * (k & 3);
              if constexpr (kLate)
                Product::template run<true>(late, pair[k & 1], of, k);
              else
                Product::template run<true>(sums, pair[k & 1], of, 1);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (!kLate && j == 0 && before != 0 && lane == 0) bulk_arrive(before);
          }
          if constexpr (kLate) {
            wgmma_wait<0>();
            const float2 factors = expand.factors(block, half);
#pragma unroll
            for (int j = 0; j < kSums; j++)
              sums[j] = fmaf(j & 2 ? factors.y : factors.x, late[j], sums[j]);
          }
        } else if (!kLate && before != 0) {
          wgmma_wait<0>();
          if (lane == 0) bulk_arrive(before);
        }
        if (!kLate && i < n) {
          before = x.empty();
        } else {
          before = 0;
          __syncwarp();
          if (lane == 0) bulk_arrive(x.empty());
        }
        x.next();
      }
      __syncwarp();
      if (lane == 0) bulk_arrive(w.empty());
      w.next();
    }
    if (!kLate) {
      wgmma_wait<0>();
      if (before != 0 && lane == 0) bulk_arrive(before);
      before = 0;
    }
    const int own_lane = pinned_lane();  // so that nothing of this is computed before the loop
    if (a.ways > 1) {
      // [slots][ways - 1][kSums][32]: sums of the ways but the first
      float *to = reinterpret_cast<float *>(memory + barriers_at + (a.stages + a.x_stages) * 16) +
                  slot * (a.ways - 1) * kSums * 32 + own_lane;
      if (way > 0) {
#pragma unroll
        for (int i = 0; i < kSums; i++) to[((way - 1) * kSums + i) * 32] = sum[0][i >> 2][i & 3];
      }
      meet(consumers);
      if (way == 0) add_ways(to, 1, a.slice_ways, sum);
      if (set + a.set_tiles < share.last) meet(consumers);
    }
    if (way != 0 || !has_tile) continue;
    const float2 scales = row_scales(a, tile, share.last, own_lane);
#pragma unroll
    for (int t = 0; t < kEights; t++) {
      scale_group(a, scales, sum[0][t]);
      write_group(a, tile, share.slice, token + t * 8, own_lane, sum[0][t]);
    }
  }
}

#endif

template <int kEncoding, int kEights>
__global__ void __launch_bounds__(kQuadThreads, 1)
    stream_quads(const __grid_constant__ StreamArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  quads<kEncoding, kEights>(a);
#endif
}

}  // namespace
}  // namespace ksl
