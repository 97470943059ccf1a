// Rows of the paged KV cache. budget.h gives the planes of a block; q4 is exact to the bit:
//
//   rotation  size d, butterflies of stride 1, 2, 4, ..., then times float32(1 / sqrt(d))
//   per 32 channels  scale = half(max((max - min) / 15, max(|min|, |max|) / 2033))
//                    zp = clamp(rint(-min / scale), -2033, 2048)
//                    code = clamp(rint(k / scale + zp), 0, 15),  value = (code - zp) scale
//   a group with max = min, or whose scale rounds to 0: scale = half(max), zp = -1, code 0
#pragma once
#include "../common/device.cuh"

namespace ksl {

// Where a layer's rows are.
struct KvLayer {
  uint8_t *blocks;
  const int32_t *tables;  // [slots][table_blocks]
  int64_t block_bytes, layer_offset;
  int k_offset, k_scale_offset, v_offset, v_scale_offset;  // in a layer's part of a block
  int k_bytes, k_scale_bytes, v_bytes, v_scale_bytes;      // of a position and head
  int table_blocks, block_tokens, kv_heads, head_dim;
  int first_key;  // 1 for the MTP layer, which has no row 0
};

// The part of the block that holds `position` of `slot`, and the row in it.
struct KvPlace {
  uint8_t *base;
  int row;
};
__device__ inline KvPlace kv_place(const KvLayer &kv, int slot, int position, int head) {
  const int index = position / kv.block_tokens;
  const int64_t block = kv.tables[static_cast<int64_t>(slot) * kv.table_blocks + index];
  return {kv.blocks + block * kv.block_bytes + kv.layer_offset,
          (position - index * kv.block_tokens) * kv.kv_heads + head};
}

// 2^e for -126 <= e <= 127.
__device__ inline float exp2i(int e) {
  return __int_as_float((e + 127) << 23);
}

// Exponent of the power-of-two scale of an e4m3 row: the least e >= -126 with most <= 448 2^e.
__device__ inline int fp8_exponent(float most) {
  if (most == 0) return 0;
  const int bits = __float_as_int(most);
  // 448 = 1.75 2^8.
  const int e = (bits >> 23) - 127 - 8 + ((bits & 0x7fffff) > 0x600000 ? 1 : 0);
  return e < -126 ? -126 : e;
}

// Two values as e4m3 bytes, the first one in the low byte.
__device__ inline uint16_t e4m3_pair(float first, float second) {
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(second), "f"(first));
  return out;
}

// Stores the value of thread `i` < d of a row as e4m3; every thread of the block takes part.
__device__ inline void store_fp8(float value, int i, int d, uint8_t *codes, float *scale,
                                 float *scratch) {
  const float most = block_max(i < d ? fabsf(value) : 0.0f, scratch);
  const int e = fp8_exponent(most);
  if (i < d) codes[i] = static_cast<uint8_t>(e4m3_pair(value * exp2i(-e), 0.0f));
  if (i == 0) *scale = exp2i(e);
}

// Rotates d values in shared memory, in place; a power of two of them, one per thread.
__device__ inline void rotate(float *values, int i, int d) {
  for (int stride = 1; stride < d; stride *= 2) {
    __syncthreads();
    float mine = 0;
    if (i < d) {
      const float a = values[i], b = values[i ^ stride];
      mine = i & stride ? b - a : a + b;
    }
    __syncthreads();
    if (i < d) values[i] = mine;
  }
  __syncthreads();
  if (i < d) values[i] *= static_cast<float>(1.0 / sqrt(static_cast<double>(d)));
  __syncthreads();
}

// Scale, zero point and codes of 32 channels.
struct Q4Group {
  __half scale;
  float zero;
  bool constant;
};
__device__ inline Q4Group q4_group(float low, float high) {
  const float width = (high - low) / 15.0f;
  const float floor = fmaxf(fabsf(low), fabsf(high)) / 2033.0f;
  const __half scale = __float2half_rn(fmaxf(width, floor));
  const float s = __half2float(scale);
  if (high == low || s == 0.0f) return {__float2half_rn(high), -1.0f, true};
  return {scale, fminf(fmaxf(rintf(-low / s), -2033.0f), 2048.0f), false};
}
__device__ inline unsigned q4_code(const Q4Group &group, float value) {
  if (group.constant) return 0;
  const float x = rintf(value / __half2float(group.scale) + group.zero);
  return static_cast<unsigned>(fminf(fmaxf(x, 0.0f), 15.0f));
}

// Stores the rotated value of thread i < d; a warp holds one group.
__device__ inline void store_q4(float value, int i, int d, uint8_t *codes, __half *scales) {
  if (i >= d) return;
  const Q4Group group = q4_group(warp_min(value), warp_max(value));
  const unsigned code = q4_code(group, value), next = __shfl_down_sync(kAll, code, 1);
  if ((i & 1) == 0) codes[i >> 1] = static_cast<uint8_t>(code | next << 4);
  if ((i & 31) == 0) {
    scales[i >> 4] = group.scale;
    scales[(i >> 4) + 1] = __float2half_rn(group.zero);
  }
}

// kCount values of a row from element `at` on (a multiple of kCount), before the row's scale.
template <int kFormat, int kCount>
__device__ inline void load_k(const uint8_t *row, const uint8_t *scales, int at,
                              float (&out)[kCount]) {
  if (kFormat == KSL_KV_F32) {
    for (int i = 0; i < kCount; i++) out[i] = reinterpret_cast<const float *>(row)[at + i];
  } else if (kFormat == KSL_KV_BF16) {
    for (int i = 0; i < kCount; i++)
      out[i] = __uint_as_float(
          static_cast<unsigned>(reinterpret_cast<const uint16_t *>(row)[at + i]) << 16);
  } else if (kFormat == KSL_KV_FP8) {
    const float scale = *reinterpret_cast<const float *>(scales);
    for (int i = 0; i < kCount; i++) out[i] = e4m3_to_f32(row[at + i]) * scale;
  } else {
    const __half2 pair = *reinterpret_cast<const __half2 *>(scales + (at >> 5) * 4);
    const float scale = __low2float(pair), zero = __high2float(pair);
    unsigned bits = 0;
    if (kCount == 8)
      bits = *reinterpret_cast<const unsigned *>(row + (at >> 1));
    else if (kCount == 4)
      bits = *reinterpret_cast<const uint16_t *>(row + (at >> 1));
    else
      bits = row[at >> 1] >> (4 * (at & 1));
    for (int i = 0; i < kCount; i++)
      out[i] = (static_cast<float>(bits >> (4 * i) & 15u) - zero) * scale;
  }
}

__device__ inline float fast_e4m3(unsigned code) {
  // Places exponent and mantissa in a half whose exponent is 8 too low.
  const unsigned bits = (code & 0x80u) << 8 | (code & 0x7fu) << 7;
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) * 256.0f;
}

template <int kFormat, int kCount>
__device__ inline void load_v(const uint8_t *row, const uint8_t *scales, int at,
                              float (&out)[kCount]) {
  if (kFormat == KSL_KV_F32 || kFormat == KSL_KV_BF16) {
    load_k<kFormat, kCount>(row, scales, at, out);
  } else {
    const float scale = *reinterpret_cast<const float *>(scales);
    unsigned bits[(kCount + 3) / 4];
    if (kCount == 8) {
      const uint2 v = *reinterpret_cast<const uint2 *>(row + at);
      bits[0] = v.x;
      bits[(kCount + 3) / 4 - 1] = v.y;
    } else if (kCount == 4) {
      bits[0] = *reinterpret_cast<const unsigned *>(row + at);
    } else {
      bits[0] = 0;
      for (int i = 0; i < kCount; i++) bits[0] |= static_cast<unsigned>(row[at + i]) << (8 * i);
    }
    for (int i = 0; i < kCount; i++)
      out[i] = fast_e4m3(bits[i / 4] >> (8 * (i % 4)) & 255u) * scale;
  }
}

}  // namespace ksl
