// Plain rows in bf16 for waves of more than two tokens: the warps of a block that take them have a
// row each and the same tokens, whose activations come through a ring of shared memory once for all
// of them. The additions are those of plain_row.
#pragma once
#include "plain.cuh"

namespace ksl {
namespace {

// Of 256 elements: activations, weights, two barriers.
__host__ __device__ constexpr int plain_round_bytes(int warps) {
  return kPlainTokens * 1024 + warps * 512 + 16;
}
struct PlainRing {
  int warps, stages;
  uint8_t *memory;
};

// For one thread, before any other comes here.
__device__ inline void plain_ring_barriers(const PlainRing &ring) {
  const int bytes = plain_round_bytes(ring.warps);
  const unsigned base = shared_at(ring.memory);
  for (int i = 1; i <= ring.stages; i++) {
    bulk_barrier(base + i * bytes - 16, 1);          // full
    bulk_barrier(base + i * bytes - 8, ring.warps);  // empty
  }
}

// All rows; a block has every gridDim.x-th set of them.
__device__ inline void plain_rows_ring(const PlainRing &ring, const PlainArgs &p, int warp,
                                       int lane) {
  const int rows = p.first_row[p.n], warps = ring.warps, stages = ring.stages;
  const int cols = p.matrices[0].cols, rounds = (cols + 255) / 256;
  const int sets = (p.tokens + kPlainTokens - 1) / kPlainTokens;
  const int items = (rows + warps - 1) / warps * sets, step = gridDim.x;
  const int total = (items - static_cast<int>(blockIdx.x) + step - 1) / step * rounds;
  const int bytes = plain_round_bytes(warps);
  const unsigned base = shared_at(ring.memory);
  // The first warp fetches: a lane has a token, or a row.
  struct Walk {
    int item, round;
    const uint8_t *from;  // null: nothing
  };
  const bool has_token = lane < kPlainTokens;
  const int element = has_token ? 4 : 2;
  const unsigned to = base + (has_token ? lane * 1024 : kPlainTokens * 512 + lane * 512);
  const auto source = [&](int item) -> const uint8_t * {
    if (item >= items) return nullptr;
    if (has_token) {
      const int token = item % sets * kPlainTokens + lane;
      if (token >= p.tokens) return nullptr;
      return reinterpret_cast<const uint8_t *>(p.x + static_cast<int64_t>(token) * p.x_stride);
    }
    const int own = lane - kPlainTokens, row = item / sets * warps + own;
    if (own >= warps || row >= rows) return nullptr;
    const int which = plain_which(p, row);
    const int64_t at = row - p.first_row[which];
    return static_cast<const uint8_t *>(p.matrices[which].codes) + at * cols * 2;
  };
  const auto fetch = [&](Walk *at, int place, bool announced, bool weights, bool tokens) {
    const bool there = at->from != nullptr;
    const int elements = min(256, cols - at->round * 256);
    const unsigned full = base + (place + 1) * bytes - 16;
    if (announced) {
      const unsigned all = __ballot_sync(kAll, there), first = (1u << kPlainTokens) - 1;
      if (lane == 0)
        bulk_expect(full, (__popc(all & first) * 4 + __popc(all & ~first) * 2) * elements);
      __syncwarp();
    }
    if (there && (has_token ? tokens : weights))
      bulk_load(to + place * bytes, at->from + at->round * 256 * element, elements * element, full);
    if (++at->round == rounds) *at = {at->item + step, 0, source(at->item + step)};
  };
  Walk ahead = {static_cast<int>(blockIdx.x), 0, nullptr};
  if (warp == 0 && total > 0) {
    ahead.from = source(ahead.item);
    Walk tokens = ahead;
    const int ready = min(stages, total);
    for (int i = 0; i < ready; i++) fetch(&ahead, i, true, true, false);
    wait_before();
    for (int i = 0; i < ready; i++) fetch(&tokens, i, false, false, true);
  }
  int place = 0, phase = 0, left = total - stages;
  for (int item = blockIdx.x; item < items; item += step) {
    const int token = item % sets * kPlainTokens, row = item / sets * warps + warp;
    float sum[kPlainTokens] = {};
    for (int round = 0; round < rounds; round++) {
      const unsigned full = base + (place + 1) * bytes - 16;
      bulk_wait(full, phase);
      if (round * 256 + lane * 8 < cols) {
        const uint8_t *from = ring.memory + place * bytes;
        const uint4 v =
            *reinterpret_cast<const uint4 *>(from + kPlainTokens * 1024 + warp * 512 + lane * 16);
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int t = 0; t < kPlainTokens; t++) {
          const float4 *x = reinterpret_cast<const float4 *>(from + t * 1024 + lane * 32);
          const float4 low = x[0], high = x[1];
          const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int i = 0; i < 4; i++) {
            sum[t] = fmaf(__uint_as_float(words[i] << 16), values[2 * i], sum[t]);
            sum[t] = fmaf(__uint_as_float(words[i] & 0xffff0000u), values[2 * i + 1], sum[t]);
          }
        }
      }
      __syncwarp();
      if (lane == 0) bulk_arrive(full + 8);
      if (warp == 0 && left-- > 0) {
        bulk_wait(full + 8, phase);
        fetch(&ahead, place, true, true, true);
      }
      if (++place == stages) {
        place = 0;
        phase ^= 1;
      }
    }
    if (row >= rows) continue;
    const int which = plain_which(p, row);
    plain_store<kPlainTokens>(p, which, row - p.first_row[which], token, lane, sum);
  }
}

}  // namespace
}  // namespace ksl
