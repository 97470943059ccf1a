// Norm and rotary of query and key heads; stores keys and values.
#include "attn.cuh"

namespace ksl {

namespace {

// Heads of whole warps: a warp is one column and one query head, or one KV head behind the query
// heads, a lane kPer dims one behind the other.
constexpr int kWarps = 4;

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

// The rotation of kv.cuh.
template <int kPer>
__device__ inline void rotate_lanes(float (&x)[kPer], int lane) {
#pragma unroll
  for (int stride = 1; stride < kPer; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      if (i & stride) continue;
      const float low = x[i], high = x[i + stride];
      x[i] = low + high;
      x[i + stride] = low - high;
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      const float other = __shfl_xor_sync(kAll, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
  }
  const float scale = static_cast<float>(1.0 / sqrt(32.0 * kPer));
#pragma unroll
  for (int i = 0; i < kPer; i++) x[i] *= scale;
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

template <int kPer>
__global__ void __launch_bounds__(kWarps * 32)
    warp_heads_kernel(const __grid_constant__ HeadsArgs a) {
  begin_chained();
  constexpr int d = kPer * 32;
  const int lane = threadIdx.x & 31, column = blockIdx.x;
  const int query = blockIdx.y * kWarps + (threadIdx.x >> 5);
  const int head = query - (a.kv_only ? 0 : a.heads);
  const bool key = head >= 0;
  if (head >= a.kv.kv_heads) return;
  const int at = lane * kPer;
  float *k = a.k + static_cast<int64_t>(column) * a.kv_stride + head * d + at;
  float x[kPer], gain[kPer];
  load(key ? k
           : a.query_gate + static_cast<int64_t>(column) * a.query_gate_stride + 2 * query * d + at,
       x);
  load((key ? a.k_norm : a.q_norm) + at, gain);
  float square = 0;
#pragma unroll
  for (int i = 0; i < kPer; i++) square = fmaf(x[i], x[i], square);
  const float r = 1.0f / sqrtf(warp_sum(square) / static_cast<float>(d) + a.eps);
#pragma unroll
  for (int i = 0; i < kPer; i++) x[i] = x[i] * r * gain[i];
  // Dim j of the first half turns with dim j + half, in a lane half / kPer further.
  const bool first = at < a.half, turns = at < 2 * a.half;
  const int step = a.half / kPer, other = first ? lane + step : lane - step;
#pragma unroll
  for (int i = 0; i < kPer; i++) {
    const float y = __shfl_sync(kAll, x[i], other & 31);
    if (!turns) continue;
    const int j = column * a.half + at + i - (first ? 0 : a.half);
    const float c = a.cos[j], s = a.sin[j];
    x[i] = first ? fmaf(-y, s, x[i] * c) : fmaf(y, s, x[i] * c);
  }
  if (!key) {
    const int64_t to = static_cast<int64_t>(column) * a.q_stride + query * d + at;
    if (a.q != nullptr) save(a.q + to, x);
    if (a.format == KSL_KV_Q4) {
      rotate_lanes(x, lane);
      save(a.stored_q + to, x);
    }
    return;
  }
  if (a.keep_k) save(k, x);
  float v[kPer];
  load(a.v + static_cast<int64_t>(column) * a.kv_stride + head * d + at, v);
  const int position = a.columns.position[column], slot = a.columns.slot[column];
  if (slot < 0) return;
  const KvPlace place = kv_place(a.kv, slot, position, head);
  uint8_t *k_row = place.base + a.kv.k_offset + static_cast<int64_t>(place.row) * a.kv.k_bytes;
  uint8_t *k_scale =
      place.base + a.kv.k_scale_offset + static_cast<int64_t>(place.row) * a.kv.k_scale_bytes;
  uint8_t *v_row = place.base + a.kv.v_offset + static_cast<int64_t>(place.row) * a.kv.v_bytes;
  uint8_t *v_scale =
      place.base + a.kv.v_scale_offset + static_cast<int64_t>(place.row) * a.kv.v_scale_bytes;
  if (position < a.kv.first_key) {
    for (int b = lane; b < a.kv.k_bytes; b += 32) k_row[b] = 0;
    for (int b = lane; b < a.kv.k_scale_bytes; b += 32) k_scale[b] = 0;
    for (int b = lane; b < a.kv.v_bytes; b += 32) v_row[b] = 0;
    for (int b = lane; b < a.kv.v_scale_bytes; b += 32) v_scale[b] = 0;
    return;
  }
  switch (a.format) {
    case KSL_KV_F32:
      save(reinterpret_cast<float *>(k_row) + at, x);
      save(reinterpret_cast<float *>(v_row) + at, v);
      return;
    case KSL_KV_BF16:
#pragma unroll
      for (int i = 0; i < kPer; i++) {
        reinterpret_cast<uint16_t *>(k_row)[at + i] = f32_to_bf16(x[i]);
        reinterpret_cast<uint16_t *>(v_row)[at + i] = f32_to_bf16(v[i]);
      }
      return;
    case KSL_KV_FP8:
      save_e4m3(x, k_row, reinterpret_cast<float *>(k_scale), lane);
      break;
    default:
      rotate_lanes(x, lane);
      save_q4(x, k_row, reinterpret_cast<__half2 *>(k_scale), lane);
  }
  save_e4m3(v, v_row, reinterpret_cast<float *>(v_scale), lane);
}

// Any other dims: a block is one column and head.
__global__ void heads_kernel(const __grid_constant__ HeadsArgs a) {
  begin_chained();
  __shared__ float scratch[32], values[kMaxHeadDim];
  const int column = blockIdx.x, i = threadIdx.x, d = a.kv.head_dim;
  const int head = static_cast<int>(blockIdx.y) - (a.kv_only ? 0 : a.heads);
  const bool key = head >= 0;
  const int position = a.columns.position[column];
  float *k = a.k + static_cast<int64_t>(column) * a.kv_stride + head * d;
  const int query = blockIdx.y;
  const float *from =
      key ? k : a.query_gate + static_cast<int64_t>(column) * a.query_gate_stride + 2 * query * d;
  const float x = i < d ? from[i] : 0.0f;
  const float r = 1.0f / sqrtf(block_sum(x * x, scratch) / static_cast<float>(d) + a.eps);
  if (i < d) values[i] = x * r * (key ? a.k_norm[i] : a.q_norm[i]);
  __syncthreads();
  float y = i < d ? values[i] : 0.0f;
  if (i < 2 * a.half) {
    const int j = i < a.half ? i : i - a.half;
    const float c = a.cos[column * a.half + j], s = a.sin[column * a.half + j];
    const float p = values[j], q = values[j + a.half];
    y = i < a.half ? fmaf(-q, s, p * c) : fmaf(p, s, q * c);
  }
  __syncthreads();
  if (i < d) values[i] = y;
  if (!key) {
    const int64_t at = static_cast<int64_t>(column) * a.q_stride + query * d + i;
    if (i < d && a.q != nullptr) a.q[at] = y;
    if (a.format == KSL_KV_Q4) {
      rotate(values, i, d);
      if (i < d) a.stored_q[at] = values[i];
    }
    return;
  }
  if (i < d && a.keep_k) k[i] = y;
  if (a.columns.slot[column] < 0) return;
  const KvPlace place = kv_place(a.kv, a.columns.slot[column], position, head);
  uint8_t *k_row = place.base + a.kv.k_offset + static_cast<int64_t>(place.row) * a.kv.k_bytes;
  uint8_t *k_scale =
      place.base + a.kv.k_scale_offset + static_cast<int64_t>(place.row) * a.kv.k_scale_bytes;
  uint8_t *v_row = place.base + a.kv.v_offset + static_cast<int64_t>(place.row) * a.kv.v_bytes;
  uint8_t *v_scale =
      place.base + a.kv.v_scale_offset + static_cast<int64_t>(place.row) * a.kv.v_scale_bytes;
  if (position < a.kv.first_key) {
    for (int b = i; b < a.kv.k_bytes; b += blockDim.x) k_row[b] = 0;
    for (int b = i; b < a.kv.k_scale_bytes; b += blockDim.x) k_scale[b] = 0;
    for (int b = i; b < a.kv.v_bytes; b += blockDim.x) v_row[b] = 0;
    for (int b = i; b < a.kv.v_scale_bytes; b += blockDim.x) v_scale[b] = 0;
    return;
  }
  const float v = i < d ? a.v[static_cast<int64_t>(column) * a.kv_stride + head * d + i] : 0.0f;
  switch (a.format) {
    case KSL_KV_F32:
      if (i < d) reinterpret_cast<float *>(k_row)[i] = y;
      if (i < d) reinterpret_cast<float *>(v_row)[i] = v;
      return;
    case KSL_KV_BF16:
      if (i < d) reinterpret_cast<uint16_t *>(k_row)[i] = f32_to_bf16(y);
      if (i < d) reinterpret_cast<uint16_t *>(v_row)[i] = f32_to_bf16(v);
      return;
    case KSL_KV_FP8:
      store_fp8(y, i, d, k_row, reinterpret_cast<float *>(k_scale), scratch);
      break;
    default:
      rotate(values, i, d);
      store_q4(i < d ? values[i] : 0.0f, i, d, k_row, reinterpret_cast<__half *>(k_scale));
  }
  store_fp8(v, i, d, v_row, reinterpret_cast<float *>(v_scale), scratch);
}

}  // namespace

void attn_heads(Device *device, const HeadsArgs &a) {
  const int heads = a.kv.kv_heads + (a.kv_only ? 0 : a.heads), d = a.kv.head_dim, per = d / 32;
  const dim3 grid(a.columns.n, divide_up(heads, kWarps));
  if (d % 32 == 0 && a.half % per == 0) {
    switch (per) {
      case 1:
        return KSL_CHAIN(device, "attn_heads", warp_heads_kernel<1>, grid, kWarps * 32, a);
      case 2:
        return KSL_CHAIN(device, "attn_heads", warp_heads_kernel<2>, grid, kWarps * 32, a);
      case 4:
        return KSL_CHAIN(device, "attn_heads", warp_heads_kernel<4>, grid, kWarps * 32, a);
      case 8:
        return KSL_CHAIN(device, "attn_heads", warp_heads_kernel<8>, grid, kWarps * 32, a);
    }
  }
  KSL_CHAIN(device, "attn_heads", heads_kernel, dim3(a.columns.n, heads), padded32(d), a);
}

}  // namespace ksl
