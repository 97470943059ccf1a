// Rows of any encoding, decoded in the kernel, float32 products: what a warp does. Lane l takes the
// elements 8 l .. 8 l + 7 of every 256 in ascending order, then the lanes are added in a fixed
// tree.
#pragma once
#include "../common/bulk.cuh"
#include "../common/mma.cuh"
#include "gemm.cuh"

namespace ksl {

struct PlainArgs {
  Raw matrices[kGroupParts];
  Output outputs[kGroupParts];
  int first_row[kGroupParts + 1];  // of each matrix in the numbering of rows
  int n;
  const float *x;
  int x_stride, tokens;
};

constexpr int kPlainTokens = 4;  // that a warp takes at once, all products of a weight together

template <int kEncoding>
__device__ inline void eight_values(const Raw &m, int64_t row, int k, float (&w)[8]) {
  if (k + 8 <= m.cols && (m.cols & 7) == 0) {
    if (kEncoding == KSL_ENC_BF16) {
      const uint4 v = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(m.codes) +
                                                       row * m.cols + k);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        w[2 * i] = __uint_as_float(words[i] << 16);
        w[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
      return;
    }
    if (kEncoding == KSL_ENC_F32) {
      const float4 *p =
          reinterpret_cast<const float4 *>(static_cast<const float *>(m.codes) + row * m.cols + k);
      const float4 a = p[0], b = p[1];
      w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
      w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = k + i < m.cols ? raw_value<kEncoding>(m, row, k + i) : 0.0f;
}

// Activations are padded to 16 zeros, so whole eights may be read.
template <int kEncoding, int kTokens, int kUnroll>
__device__ inline void plain_dot(const PlainArgs &a, const float *from, const Raw &m, int64_t row,
                                 int token, int lane, float (&sum)[kTokens]) {
  constexpr bool kHot = kEncoding == KSL_ENC_BF16 || kEncoding == KSL_ENC_F32;
#pragma unroll kHot ? kUnroll : 1
  for (int k = lane * 8; k < m.cols; k += 256) {
    float w[8];
    eight_values<kEncoding>(m, row, k, w);
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      const int at = token + t < a.tokens ? token + t : a.tokens - 1;
      const float4 *x =
          reinterpret_cast<const float4 *>(from + static_cast<int64_t>(at) * a.x_stride + k);
      const float4 low = x[0], high = x[1];
      sum[t] = fmaf(w[0], low.x, sum[t]);
      sum[t] = fmaf(w[1], low.y, sum[t]);
      sum[t] = fmaf(w[2], low.z, sum[t]);
      sum[t] = fmaf(w[3], low.w, sum[t]);
      sum[t] = fmaf(w[4], high.x, sum[t]);
      sum[t] = fmaf(w[5], high.y, sum[t]);
      sum[t] = fmaf(w[6], high.z, sum[t]);
      sum[t] = fmaf(w[7], high.w, sum[t]);
    }
  }
}

template <int kTokens>
__device__ inline void plain_store(const PlainArgs &a, int which, int64_t row, int token, int lane,
                                   const float (&sum)[kTokens]) {
  const Output &to = a.outputs[which];
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
    const float total = warp_sum(sum[t]);
    if (lane == 0 && token + t < a.tokens)
      to.y[static_cast<int64_t>(token + t) * to.stride + row] = total;
  }
}
// The matrix that has row `item` of all.
__device__ inline int plain_which(const PlainArgs &a, int item) {
  int which = 0;
  while (item >= a.first_row[which + 1]) which++;
  return which;
}

// Row `item` of all for tokens [token, token + kTokens). kUnroll: rounds whose loads are in flight
// together; from: read instead of a.x.
template <int kTokens, int kUnroll = 4>
__device__ inline void plain_row(const PlainArgs &a, const float *from, int item, int token,
                                 int lane) {
  if (item >= a.first_row[a.n]) return;
  const int which = plain_which(a, item);
  const Raw &m = a.matrices[which];
  const int64_t row = item - a.first_row[which];
  float sum[kTokens] = {};
  switch (m.encoding) {
    case KSL_ENC_F32:
      plain_dot<KSL_ENC_F32, kTokens, kUnroll>(a, from, m, row, token, lane, sum);
      break;
    case KSL_ENC_BF16:
      plain_dot<KSL_ENC_BF16, kTokens, kUnroll>(a, from, m, row, token, lane, sum);
      break;
    case KSL_ENC_FP8:
      plain_dot<KSL_ENC_FP8, kTokens, kUnroll>(a, from, m, row, token, lane, sum);
      break;
    case KSL_ENC_E2M3:
      plain_dot<KSL_ENC_E2M3, kTokens, kUnroll>(a, from, m, row, token, lane, sum);
      break;
    default:
      plain_dot<KSL_ENC_NVFP4, kTokens, kUnroll>(a, from, m, row, token, lane, sum);
  }
  plain_store<kTokens>(a, which, row, token, lane, sum);
}

template <int kTokens, int kUnroll = 4>
__device__ inline void plain_row(const PlainArgs &a, int item, int token, int lane) {
  plain_row<kTokens, kUnroll>(a, a.x, item, token, lane);
}

// Whether all of them are such rows.
inline bool plain_ring_takes(const PlainArgs &a) {
  for (int i = 0; i < a.n; i++)
    if (a.matrices[i].encoding != KSL_ENC_BF16 || a.matrices[i].cols % 8 != 0) return false;
  return a.n > 0;
}

// Brings row `item` into L2, where that is what is stored.
__device__ inline void plain_ahead(const PlainArgs &a, int item) {
  if (item >= a.first_row[a.n]) return;
  const int which = plain_which(a, item);
  const Raw &m = a.matrices[which];
  if (m.encoding != KSL_ENC_BF16 || (m.cols & 7) != 0) return;
  bulk_ahead(static_cast<const uint16_t *>(m.codes) +
                 static_cast<int64_t>(item - a.first_row[which]) * m.cols,
             m.cols * 2);
}

// A bf16 row by way of shared memory: asked for long before what it meets is there. A lane reads
// what it has asked for itself.
__device__ inline void plain_fetch(const PlainArgs &a, int item, int lane, uint16_t *to) {
  const int which = plain_which(a, item);
  const Raw &m = a.matrices[which];
  const uint16_t *from = static_cast<const uint16_t *>(m.codes) +
                         static_cast<int64_t>(item - a.first_row[which]) * m.cols;
  for (int k = lane * 8; k < m.cols; k += 256) copy_async<16>(to + k, from + k, true);
  copy_commit();
}
template <int kTokens>
__device__ inline void plain_fetched(const PlainArgs &a, const float *x, int item, int lane,
                                     const uint16_t *weights) {
  const int which = plain_which(a, item);
  Raw m = a.matrices[which];
  m.codes = weights;
  copy_wait<0>();
  float sum[kTokens] = {};
  plain_dot<KSL_ENC_BF16, kTokens, 1>(a, x, m, 0, 0, lane, sum);
  plain_store<kTokens>(a, which, item - a.first_row[which], 0, lane, sum);
}
// Bytes of such a row, 0 if not all are such rows. They read one input.
inline int plain_fetch_bytes(const PlainArgs &a) {
  return plain_ring_takes(a) ? a.matrices[0].cols * static_cast<int>(sizeof(uint16_t)) : 0;
}

// The kernels of stream.cuh. plain: rows that read the same input and are computed beside it.
void stream_e2m3(Device *device, const Packed &m, const Split &x, const Output *outputs,
                 const PairOutput *pair, const PlainArgs &plain, int tokens, const InputNorm *norm);
// Of a split with rows.
void stream_quads(Device *device, const Packed &m, const Split &x, const Output *outputs,
                  const PairOutput *pair, const PlainArgs &plain, int tokens);
void stream_nvfp4(Device *device, const Packed &m, const Split &x, const Output *outputs,
                  const PairOutput *pair, const PlainArgs &plain, int tokens,
                  const InputNorm *norm);
void stream_bf16(Device *device, const Packed &m, const Split &x, const Output *outputs,
                 const PairOutput *pair, const PlainArgs &plain, int tokens, const InputNorm *norm);

}  // namespace ksl
