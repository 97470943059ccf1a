// Products of tile.cu: scores of keys as they are stored, and stored values as fragments.
#pragma once
#include "head_rows.cuh"
#include "tile_keys.cuh"

namespace ksl {

namespace {

// Dim of slot pair `pair` (slots 2 t, 2 t + 1 or 2 t + 8, 2 t + 9) of step s, and the distance to
// the second of the pair: the order in which a lane unpacks stored keys.
template <int kFormat>
__device__ inline int dim_of(int s, int pair, int t) {
  if (kFormat == KSL_KV_Q4) return 32 * (s >> 1) + 8 * t + 2 * (s & 1) + pair;
  return 16 * s + 4 * t + 2 * pair;
}
template <int kFormat>
constexpr int kPairStep = kFormat == KSL_KV_Q4 ? 4 : 1;

// Scores of this warp's keys: of row g and keys 2 t, 2 t + 1 of each eight.
template <class L, int kUsed>
__device__ __forceinline__ void score_keys(const uint8_t *stage, const uint8_t *memory, int warp,
                                           int g, int t, float (&score)[kUsed][L::kScores]) {
  constexpr int kDim = L::kHeadDim, kEights = L::kEights, kScores = L::kScores;
  const int own = warp * 8 * kEights;
  const uint4 *query = reinterpret_cast<const uint4 *>(memory + L::kQuery) + (g * 4 + t);
  const float *sums = reinterpret_cast<const float *>(memory + L::kSums);
  if constexpr (L::kQ4) {
    constexpr int kGroups = kDim / 32, kBatch = kGroups < 4 ? kGroups : 4;
#pragma unroll
    for (int m = 0; m < kUsed; m++)
#pragma unroll
      for (int i = 0; i < kScores; i++) score[m][i] = 0;
#pragma unroll
    for (int first = 0; first < kGroups; first += kBatch) {
      uint32_t pairs[kScores][kBatch];  // scale and zero point of keys 2 t, 2 t + 1 of each eight
#pragma unroll
      for (int i = 0; i < kScores; i++) {
        const uint8_t *from =
            stage + L::kScales + (own + (i >> 1) * 8 + 2 * t + (i & 1)) * L::kKScale + first * 4;
        if constexpr (kBatch == 4)
          *reinterpret_cast<uint4 *>(pairs[i]) = *reinterpret_cast<const uint4 *>(from);
        else
          *reinterpret_cast<uint2 *>(pairs[i]) = *reinterpret_cast<const uint2 *>(from);
      }
#pragma unroll
      for (int k = 0; k < kBatch; k++) {
        const int group = first + k;
        uint32_t b[kEights][4];
#pragma unroll
        for (int j = 0; j < kEights; j++)
          unpack_codes(*reinterpret_cast<const uint32_t *>(stage + (own + j * 8 + g) * L::kKPitch +
                                                           group * 16 + t * 4),
                       b[j]);
#pragma unroll
        for (int m = 0; m < kUsed; m++) {
          const uint4 q0 = query[(m * (kDim / 16) + 2 * group) * 32],
                      q1 = query[(m * (kDim / 16) + 2 * group + 1) * 32];
          const float sum = sums[(m * kGroups + group) * 8 + g];
#pragma unroll
          for (int j = 0; j < kEights; j++) {
            float c[4];
            mma16_first(c, q0, b[j][0], b[j][1]);
            mma16<false>(c, q1, b[j][2], b[j][3]);
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const __half2 pair = reinterpret_cast<const __half2 &>(pairs[2 * j + e][k]);
              score[m][2 * j + e] =
                  fmaf(__low2float(pair), fmaf(-__high2float(pair), sum, c[e] + c[e + 2]),
                       score[m][2 * j + e]);
            }
          }
        }
      }
    }
  } else {
    float c[kUsed][kEights][4] = {};
#pragma unroll
    for (int s = 0; s < kDim / 16; s++) {
      uint32_t b[kEights][2];
#pragma unroll
      for (int j = 0; j < kEights; j++) {
        const uint8_t *row = stage + (own + j * 8 + g) * L::kKPitch;
        if (L::kBf16) {
          const uint2 w = *reinterpret_cast<const uint2 *>(row + s * 32 + t * 8);
          b[j][0] = w.x;
          b[j][1] = w.y;
        } else {
          const uint32_t w = *reinterpret_cast<const uint32_t *>(row + s * 16 + t * 4);
          b[j][0] = e4m3_halves(w);
          b[j][1] = e4m3_halves(w >> 16);
        }
      }
#pragma unroll
      for (int m = 0; m < kUsed; m++) {
        const uint4 q = query[(m * (kDim / 16) + s) * 32];
#pragma unroll
        for (int j = 0; j < kEights; j++) mma16<L::kBf16>(c[m][j], q, b[j][0], b[j][1]);
      }
    }
#pragma unroll
    for (int j = 0; j < kEights; j++) {
      float2 scale = {1, 1};
      if (!L::kBf16)
        scale = *reinterpret_cast<const float2 *>(stage + L::kScales + (own + j * 8 + 2 * t) * 4);
#pragma unroll
      for (int m = 0; m < kUsed; m++) {
        score[m][2 * j] = (c[m][j][0] + c[m][j][2]) * scale.x;
        score[m][2 * j + 1] = (c[m][j][1] + c[m][j][3]) * scale.y;
      }
    }
  }
}

// B fragments of kOwn columns for slots (2 t, 2 t + 1) of a step: the same dims of two keys.
template <bool kBf16, int kOwn>
__device__ inline void value_pair(const uint8_t *first, const uint8_t *second,
                                  uint32_t (&out)[kOwn]) {
  if constexpr (kOwn == 1) {
    if (kBf16)
      out[0] = *reinterpret_cast<const uint16_t *>(first) |
               static_cast<uint32_t>(*reinterpret_cast<const uint16_t *>(second)) << 16;
    else
      out[0] = e4m3_halves(*first | static_cast<uint32_t>(*second) << 8);
  } else if constexpr (kBf16) {
    uint32_t a[kOwn / 2], b[kOwn / 2];
    if constexpr (kOwn == 8) {
      *reinterpret_cast<uint4 *>(a) = *reinterpret_cast<const uint4 *>(first);
      *reinterpret_cast<uint4 *>(b) = *reinterpret_cast<const uint4 *>(second);
    } else {
#pragma unroll
      for (int i = 0; i < kOwn / 2; i++) {
        a[i] = reinterpret_cast<const uint32_t *>(first)[i];
        b[i] = reinterpret_cast<const uint32_t *>(second)[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn / 2; i++) {
      out[2 * i] = __byte_perm(a[i], b[i], 0x5410);
      out[2 * i + 1] = __byte_perm(a[i], b[i], 0x7632);
    }
  } else if constexpr (kOwn == 2) {
    const uint32_t mixed = __byte_perm(*reinterpret_cast<const uint16_t *>(first),
                                       *reinterpret_cast<const uint16_t *>(second), 0x5140);
    out[0] = e4m3_halves(mixed);
    out[1] = e4m3_halves(mixed >> 16);
  } else {
    uint32_t a[kOwn / 4], b[kOwn / 4];
    if constexpr (kOwn == 8) {
      *reinterpret_cast<uint2 *>(a) = *reinterpret_cast<const uint2 *>(first);
      *reinterpret_cast<uint2 *>(b) = *reinterpret_cast<const uint2 *>(second);
    } else {
      a[0] = *reinterpret_cast<const uint32_t *>(first);
      b[0] = *reinterpret_cast<const uint32_t *>(second);
    }
#pragma unroll
    for (int i = 0; i < kOwn / 4; i++) {
      const uint32_t low = __byte_perm(a[i], b[i], 0x5140), high = __byte_perm(a[i], b[i], 0x7362);
      out[4 * i] = e4m3_halves(low);
      out[4 * i + 1] = e4m3_halves(low >> 16);
      out[4 * i + 2] = e4m3_halves(high);
      out[4 * i + 3] = e4m3_halves(high >> 16);
    }
  }
}

}  // namespace
}  // namespace ksl
