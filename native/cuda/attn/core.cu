// Scores, softmax and weighted values of one column, one KV head and one unit of keys.
#include "attn.cuh"

namespace ksl {

namespace {

constexpr int kWarps = 8;
constexpr int kWarpKeys = kChunkKeys / kWarps;
static_assert(kWarpKeys == 16, "the keys of a warp lie in one block");

// Running softmax: m, l of each head and acc [group][d] in shared memory.
template <int kGroup, int kDims>
struct Sum {
  float m[kGroup], l[kGroup], acc[kGroup * kDims];
};

template <int kGroup, int kDims>
__device__ void clear(Sum<kGroup, kDims> *to) {
  for (int i = threadIdx.x; i < kGroup * kDims; i += kWarps * 32) to->acc[i] = 0;
  if (threadIdx.x < kGroup) {
    to->m[threadIdx.x] = -INFINITY;
    to->l[threadIdx.x] = 0;
  }
}

// to := to combined with what comes after it. `from` has keys. scale: [2][group] scratch.
template <int kGroup, int kDims>
__device__ void add(Sum<kGroup, kDims> *to, const Sum<kGroup, kDims> *from, float *scale) {
  __syncthreads();
  if (threadIdx.x < kGroup) {
    const int h = threadIdx.x;
    const float m = fmaxf(to->m[h], from->m[h]);
    const float old = expf(to->m[h] - m), now = expf(from->m[h] - m);
    scale[h] = old;
    scale[kGroup + h] = now;
    to->l[h] = fmaf(to->l[h], old, from->l[h] * now);
    to->m[h] = m;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kGroup * kDims; i += kWarps * 32) {
    const int h = i / kDims;
    to->acc[i] = fmaf(to->acc[i], scale[h], from->acc[i] * scale[kGroup + h]);
  }
  __syncthreads();
}

// Sums kValues values over the lanes of a warp; the value of index i ends in the lanes whose bits
// 4, 3 and 2 are i / (kValues / 8), as values[i % (kValues / 8)].
template <int kValues>
__device__ inline void sum_lanes(float (&values)[kValues], int lane) {
  int n = kValues;
#pragma unroll
  for (int offset = 16; offset >= 4; offset >>= 1) {
    n /= 2;
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < kValues / 2; i++) {
      if (i >= n) break;
      const float mine = upper ? values[i + n] : values[i];
      const float other = upper ? values[i] : values[i + n];
      values[i] = mine + __shfl_xor_sync(kAll, other, offset);
    }
  }
#pragma unroll
  for (int i = 0; i < kValues / 8; i++) {
    values[i] += __shfl_xor_sync(kAll, values[i], 2);
    values[i] += __shfl_xor_sync(kAll, values[i], 1);
  }
}

// kCount: elements of a head that a lane holds, kGroup: query heads that are taken at once.
template <int kFormat, int kCount, int kGroup>
__global__ void __launch_bounds__(kWarps * 32) core_kernel(const __grid_constant__ CoreArgs a) {
  begin_chained();
  constexpr int kDims = kCount * 32;
  extern __shared__ float4 memory[];
  typedef Sum<kGroup, kDims> State;
  State *chunk = reinterpret_cast<State *>(memory), *span = chunk + 1, *total = chunk + 2;
  float *partial = reinterpret_cast<float *>(chunk + 3);  // [warps][group][dims]
  float *score = partial + kWarps * kGroup * kDims;       // [group][keys]
  __shared__ float scale[2 * kGroup];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, d = a.kv.head_dim;
  const int column = blockIdx.y, position = a.columns.position[column];
  const int slot = a.columns.slot[column];
  const int all_heads = a.heads / a.kv.kv_heads;
  const int batches = (all_heads + kGroup - 1) / kGroup;
  const int head = blockIdx.z / batches, batch = blockIdx.z % batches;
  const int heads = min(kGroup, all_heads - batch * kGroup);
  const int keys = position + 1;
  const int chunks = (keys + kChunkKeys - 1) / kChunkKeys;
  const int begin = a.unit_chunks ? blockIdx.x * a.unit_chunks : 0;
  if (slot < 0 || position < a.kv.first_key || begin >= chunks) return;
  const int end = a.unit_chunks ? min(chunks, begin + a.unit_chunks) : chunks;
  const int at = lane * kCount;

  float q[kGroup][kCount];
  const float norm = 1.0f / sqrtf(static_cast<float>(d));
#pragma unroll
  for (int h = 0; h < kGroup; h++)
#pragma unroll
    for (int i = 0; i < kCount; i++)
      q[h][i] = h < heads && at + i < d
                    ? a.q[static_cast<int64_t>(column) * a.q_stride +
                          (head * all_heads + batch * kGroup + h) * d + at + i] *
                          norm
                    : 0.0f;

  clear(total);
  clear(span);
  for (int c = begin; c < end; c++) {
    const int first = c * kChunkKeys + warp * kWarpKeys;
    for (int i = threadIdx.x; i < kGroup * kChunkKeys; i += kWarps * 32) score[i] = -INFINITY;
    __syncthreads();
    if (first < keys) {
      // The 16 keys of a warp lie in one block; four are taken at once.
      const KvPlace place = kv_place(a.kv, slot, first, head);
      const int n = min(kWarpKeys, keys - first);
      for (int j = 0; j < n; j += 4) {
        float sums[kGroup * 4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
          float k[kCount];
          const int64_t row = place.row + min(j + u, n - 1) * a.kv.kv_heads;
          if (at < d) {
            load_k<kFormat, kCount>(place.base + a.kv.k_offset + row * a.kv.k_bytes,
                                    place.base + a.kv.k_scale_offset + row * a.kv.k_scale_bytes, at,
                                    k);
          } else {
            for (int i = 0; i < kCount; i++) k[i] = 0;
          }
#pragma unroll
          for (int h = 0; h < kGroup; h++) {
            float s = 0;
#pragma unroll
            for (int i = 0; i < kCount; i++) s = fmaf(q[h][i], k[i], s);
            sums[h * 4 + u] = s;
          }
        }
        sum_lanes(sums, lane);
        constexpr int kOwn = kGroup / 2;
        if ((lane & 3) == 0) {
#pragma unroll
          for (int i = 0; i < kOwn; i++) {
            const int index = (lane >> 2) * kOwn + i, key = first + j + index % 4;
            if (key < keys && key >= a.kv.first_key)
              score[index / 4 * kChunkKeys + warp * kWarpKeys + j + index % 4] = sums[i];
          }
        }
      }
    }
    __syncthreads();
    for (int h = warp; h < kGroup; h += kWarps) {
      float s[kChunkKeys / 32], most = -INFINITY, sum = 0;
#pragma unroll
      for (int i = 0; i < kChunkKeys / 32; i++) {
        s[i] = score[h * kChunkKeys + i * 32 + lane];
        most = fmaxf(most, s[i]);
      }
      most = warp_max(most);
#pragma unroll
      for (int i = 0; i < kChunkKeys / 32; i++) {
        s[i] = expf(s[i] - most);
        score[h * kChunkKeys + i * 32 + lane] = s[i];
        sum += s[i];
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        chunk->m[h] = most;
        chunk->l[h] = sum;
      }
    }
    __syncthreads();
    float acc[kGroup][kCount] = {};
    if (first < keys) {
      const KvPlace place = kv_place(a.kv, slot, first, head);
      const int n = min(kWarpKeys, keys - first);
#pragma unroll 4
      for (int j = 0; j < n; j++) {
        if (first + j < a.kv.first_key) continue;
        const int64_t row = place.row + j * a.kv.kv_heads;
        float v[kCount];
        if (at < d) {
          load_v<kFormat, kCount>(place.base + a.kv.v_offset + row * a.kv.v_bytes,
                                  place.base + a.kv.v_scale_offset + row * a.kv.v_scale_bytes, at,
                                  v);
        } else {
          for (int i = 0; i < kCount; i++) v[i] = 0;
        }
#pragma unroll
        for (int h = 0; h < kGroup; h++) {
          const float p = score[h * kChunkKeys + warp * kWarpKeys + j];
#pragma unroll
          for (int i = 0; i < kCount; i++) acc[h][i] = fmaf(p, v[i], acc[h][i]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kGroup; h++)
#pragma unroll
      for (int i = 0; i < kCount; i++) partial[(warp * kGroup + h) * kDims + at + i] = acc[h][i];
    __syncthreads();
    for (int i = threadIdx.x; i < kGroup * kDims; i += kWarps * 32) {
      float sum = partial[i];
      for (int w = 1; w < kWarps; w++) sum += partial[w * kGroup * kDims + i];
      chunk->acc[i] = sum;
    }
    // What a unit is made of one of needs no adding: joined with nothing it stays as it is.
    if (a.unit_chunks != 1) add(span, chunk, scale);
    if (a.unit_chunks == 0 && (c + 1 == end || (c + 1) % kSpanChunks == 0)) {
      add(total, span, scale);
      clear(span);
    }
    __syncthreads();
  }
  const State *result = a.unit_chunks == 1 ? chunk : (a.unit_chunks == 0 ? total : span);
  float *out = a.partial + ((static_cast<int64_t>(column) * a.kv.kv_heads + head) * a.units +
                            (a.unit_chunks ? blockIdx.x : 0)) *
                               all_heads * (d + 2);
  for (int h = 0; h < heads; h++) {
    float *to = out + (batch * kGroup + h) * (d + 2);
    for (int i = threadIdx.x; i < d; i += kWarps * 32) to[i] = result->acc[h * kDims + i];
    if (threadIdx.x == 0) {
      to[d] = result->m[h];
      to[d + 1] = result->l[h];
    }
  }
}

template <int kFormat, int kCount, int kGroup>
void run(Device *device, const CoreArgs &a) {
  constexpr int kDims = kCount * 32;
  constexpr size_t shared = 3 * sizeof(Sum<kGroup, kDims>) +
                            (kWarps * kGroup * kDims + kGroup * kChunkKeys) * sizeof(float);
  static_assert(shared <= kSmallRoom, "every device runs it");
  const int group = a.heads / a.kv.kv_heads;
  const dim3 grid(a.unit_chunks ? a.units : 1, a.columns.n,
                  a.kv.kv_heads * divide_up(group, kGroup));
  static bool raised = false;  // per instance; the engine has one thread
  if (!raised) {
    keep_error(
        device,
        cudaFuncSetAttribute(core_kernel<kFormat, kCount, kGroup>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "attn_core");
    raised = true;
  }
  launch_chained(device, "attn_core", core_kernel<kFormat, kCount, kGroup>, grid, kWarps * 32,
                 shared, a);
}

template <int kFormat, int kCount>
void by_group(Device *device, const CoreArgs &a) {
  const int group = a.heads / a.kv.kv_heads;
  if (group <= 2)
    run<kFormat, kCount, 2>(device, a);
  else if (group <= 4)
    run<kFormat, kCount, 4>(device, a);
  else
    run<kFormat, kCount, 6>(device, a);
}

template <int kFormat>
void by_size(Device *device, const CoreArgs &a) {
  if (a.kv.head_dim <= 32)
    by_group<kFormat, 1>(device, a);
  else if (a.kv.head_dim <= 64)
    by_group<kFormat, 2>(device, a);
  else if (a.kv.head_dim <= 128)
    by_group<kFormat, 4>(device, a);
  else
    by_group<kFormat, 8>(device, a);
}

}  // namespace

void attn_core(Device *device, const CoreArgs &a) {
  switch (a.format) {
    case KSL_KV_F32:
      return by_size<KSL_KV_F32>(device, a);
    case KSL_KV_BF16:
      return by_size<KSL_KV_BF16>(device, a);
    case KSL_KV_FP8:
      return by_size<KSL_KV_FP8>(device, a);
    default:
      return by_size<KSL_KV_Q4>(device, a);
  }
}

}  // namespace ksl
