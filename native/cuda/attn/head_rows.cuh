// What a warp does to a head of a column: norm and rotary of queries and keys, and rows of keys and
// values as they are stored. A lane has kPer dims, one behind the other.
#pragma once
#include <cuda_bf16.h>

#include "attn.cuh"

namespace ksl {

namespace {

template <int kPer>
__device__ inline void load(const float *from, float (&x)[kPer]) {
  if constexpr (kPer % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kPer; i += 4)
      *reinterpret_cast<float4 *>(x + i) = *reinterpret_cast<const float4 *>(from + i);
  } else {
#pragma unroll
    for (int i = 0; i < kPer; i++) x[i] = from[i];
  }
}
template <int kPer>
__device__ inline void save(float *to, const float (&x)[kPer]) {
  if constexpr (kPer % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kPer; i += 4)
      *reinterpret_cast<float4 *>(to + i) = *reinterpret_cast<const float4 *>(x + i);
  } else {
#pragma unroll
    for (int i = 0; i < kPer; i++) to[i] = x[i];
  }
}

// The rotation of kv.cuh, of some heads.
template <int kHeads, int kPer>
__device__ inline void rotate_lanes(float (&x)[kHeads][kPer], int lane) {
#pragma unroll
  for (int stride = 1; stride < kPer; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      if (i & stride) continue;
#pragma unroll
      for (int h = 0; h < kHeads; h++) {
        const float low = x[h][i], high = x[h][i + stride];
        x[h][i] = low + high;
        x[h][i + stride] = low - high;
      }
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < kHeads * kPer; i++) {
      float &own = x[i / kPer][i % kPer];
      const float other = __shfl_xor_sync(kAll, own, step);
      own = lane & step ? other - own : own + other;
    }
  }
  const float scale = static_cast<float>(1.0 / sqrt(32.0 * kPer));
#pragma unroll
  for (int i = 0; i < kHeads * kPer; i++) x[i / kPer][i % kPer] *= scale;
}

template <int kPer>
__device__ inline void save_e4m3(const float (&x)[kPer], uint8_t *row, float *scale, int lane) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < kPer; i++) most = fmaxf(most, fabsf(x[i]));
  const int e = fp8_exponent(warp_max(most));
  const float up = exp2i(-e);
  if (lane == 0) *scale = exp2i(e);
  if constexpr (kPer == 1) {
    row[lane] = static_cast<uint8_t>(e4m3_pair(x[0] * up, 0.0f));
  } else {
#pragma unroll
    for (int i = 0; i < kPer; i += 2)
      reinterpret_cast<uint16_t *>(row)[(lane * kPer + i) / 2] =
          e4m3_pair(x[i] * up, x[i + 1] * up);
  }
}

// store_q4 of kv.cuh.
template <int kPer>
__device__ inline void save_q4(const float (&x)[kPer], uint8_t *codes, __half2 *scales, int lane) {
  float low = x[0], high = x[0];
#pragma unroll
  for (int i = 1; i < kPer; i++) {
    low = fminf(low, x[i]);
    high = fmaxf(high, x[i]);
  }
#pragma unroll
  for (int step = 1; step < 32 / kPer; step *= 2) {
    low = fminf(low, __shfl_xor_sync(kAll, low, step));
    high = fmaxf(high, __shfl_xor_sync(kAll, high, step));
  }
  const Q4Group group = q4_group(low, high);
  unsigned packed = 0;
#pragma unroll
  for (int i = 0; i < kPer; i++) packed |= q4_code(group, x[i]) << (4 * i);
  if constexpr (kPer == 1) {
    packed |= __shfl_down_sync(kAll, packed, 1) << 4;
    if ((lane & 1) == 0) codes[lane >> 1] = static_cast<uint8_t>(packed);
  } else if constexpr (kPer == 2) {
    codes[lane] = static_cast<uint8_t>(packed);
  } else if constexpr (kPer == 4) {
    reinterpret_cast<uint16_t *>(codes)[lane] = static_cast<uint16_t>(packed);
  } else {
    reinterpret_cast<uint32_t *>(codes)[lane] = packed;
  }
  if (lane % (32 / kPer) == 0)
    scales[lane / (32 / kPer)] = __halves2half2(group.scale, __float2half_rn(group.zero));
}

// The high parts of two values and what they leave over.
template <bool kBf16>
__device__ inline void halves(float x, float y, uint32_t *high, uint32_t *low) {
  if (kBf16) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    const __nv_bfloat162 l = __floats2bfloat162_rn(x - __low2float(h), y - __high2float(h));
    *high = reinterpret_cast<const uint32_t &>(h);
    *low = reinterpret_cast<const uint32_t &>(l);
  } else {
    const __half2 h = __floats2half2_rn(x, y);
    const __half2 l = __floats2half2_rn(x - __low2float(h), y - __high2float(h));
    *high = reinterpret_cast<const uint32_t &>(h);
    *low = reinterpret_cast<const uint32_t &>(l);
  }
}

// Queries as the products of tile.cu take them, of heads of 256 dims: pieces of 16 bytes [16 steps]
// [4], of which a lane makes two, in units that make a power of two the exponential. sums: null, or
// [8] sums of 32 channels each.
constexpr int kFragmentDim = 256;
template <bool kQ4, bool kBf16>
__device__ inline void save_fragments(const float (&x)[8], uint4 *row, int row_step, float *sums,
                                      int sum_step, int lane) {
  constexpr float kUnit = 1.4426950408889634f / 16;
  static_assert(kFragmentDim == 16 * 16, "the root of it");
  float u[8];
#pragma unroll
  for (int i = 0; i < 8; i++) u[i] = x[i] * kUnit;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 out;
    if (kQ4) {
      halves<kBf16>(u[2 * i], u[2 * i + 4], &out.x, &out.y);
      halves<kBf16>(u[2 * i + 1], u[2 * i + 5], &out.z, &out.w);
      row[(2 * (lane >> 2) + i) * row_step + (lane & 3)] = out;
    } else {
      halves<kBf16>(u[4 * i], u[4 * i + 1], &out.x, &out.y);
      halves<kBf16>(u[4 * i + 2], u[4 * i + 3], &out.z, &out.w);
      row[(lane >> 1) * row_step + 2 * (lane & 1) + i] = out;
    }
  }
  if (!kQ4) return;
  const float part[2] = {(u[0] + u[1]) + (u[2] + u[3]), (u[4] + u[5]) + (u[6] + u[7])};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += __shfl_sync(kAll, part[i & 1], (lane & 28) + i / 2);
  if ((lane & 3) == 0) sums[(lane >> 2) * sum_step] = sum;
}

// The rotary factors of a lane's dims of a head; dims that do not turn have none.
template <int kPer>
struct Turn {
  float cos[kPer], sin[kPer];
  bool first, turns;
  int other;  // the lane with the dims that turn with these: half further, or before
  __device__ Turn(const HeadsArgs &a, int column, int lane) {
    const int at = lane * kPer, step = a.half / kPer;
    first = at < a.half;
    turns = at < 2 * a.half;
    other = (first ? lane + step : lane - step) & 31;
    if (!turns) return;
    const int from = column * a.half + at - (first ? 0 : a.half);
    load(a.cos + from, cos);
    load(a.sin + from, sin);
  }
};

// Of some heads at one time, since each is a chain of exchanges.
template <int kHeads, int kPer>
__device__ inline void norm_and_turn(float (&x)[kHeads][kPer], const float (&gain)[kHeads][kPer],
                                     const Turn<kPer> &turn, float eps) {
  float square[kHeads] = {};
#pragma unroll
  for (int i = 0; i < kHeads * kPer; i++) {
    const float v = x[i / kPer][i % kPer];
    square[i / kPer] = fmaf(v, v, square[i / kPer]);
  }
#pragma unroll
  for (int step = 16; step > 0; step >>= 1)  // warp_sum
#pragma unroll
    for (int h = 0; h < kHeads; h++) square[h] += __shfl_xor_sync(kAll, square[h], step);
#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    const float r = 1.0f / sqrtf(square[h] / static_cast<float>(32 * kPer) + eps);
#pragma unroll
    for (int i = 0; i < kPer; i++) x[h][i] = x[h][i] * r * gain[h][i];
  }
#pragma unroll
  for (int i = 0; i < kHeads * kPer; i++) {
    float &own = x[i / kPer][i % kPer];
    const float y = __shfl_sync(kAll, own, turn.other);
    if (!turn.turns) continue;
    const float c = turn.cos[i % kPer], s = turn.sin[i % kPer];
    own = turn.first ? fmaf(-y, s, own * c) : fmaf(y, s, own * c);
  }
}

}  // namespace
}  // namespace ksl
