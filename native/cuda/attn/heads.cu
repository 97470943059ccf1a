// Norm and rotary of query and key heads; stores keys and values.
#include "head_rows.cuh"

namespace ksl {

namespace {

// Heads of whole warps: a warp is one column and one query head, or one KV head behind the query
// heads, a lane kPer dims one behind the other.
constexpr int kWarps = 4;

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
  float heads[1][kPer], gains[1][kPer];
  float (&x)[kPer] = heads[0];
  load(key ? k
           : a.query_gate + static_cast<int64_t>(column) * a.query_gate_stride + 2 * query * d + at,
       x);
  load((key ? a.k_norm : a.q_norm) + at, gains[0]);
  norm_and_turn(heads, gains, Turn<kPer>(a, column, lane), a.eps);
  if (!key) {
    const int64_t row = static_cast<int64_t>(column) * a.q_stride + query * d, to = row + at;
    if constexpr (d == kFragmentDim) {
      if (a.q_sums != nullptr) {
        uint4 *const out = reinterpret_cast<uint4 *>(a.stored_q + row);
        if (a.format == KSL_KV_Q4) {
          rotate_lanes(heads, lane);
          save_fragments<true, false>(
              x, out, 4, a.q_sums + (static_cast<int64_t>(column) * a.heads + query) * 8, 1, lane);
        } else if (a.format == KSL_KV_BF16) {
          save_fragments<false, true>(x, out, 4, nullptr, 0, lane);
        } else {
          save_fragments<false, false>(x, out, 4, nullptr, 0, lane);
        }
        return;
      }
    }
    if (a.q != nullptr) save(a.q + to, x);
    if (a.format == KSL_KV_Q4) {
      rotate_lanes(heads, lane);
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
      rotate_lanes(heads, lane);
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

bool attn_heads_fragments(int head_dim, int half) {
  return head_dim == kFragmentDim && half % (kFragmentDim / 32) == 0;
}

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
