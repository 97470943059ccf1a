// The ends of a chunk: convolution, unit norm and gates before it, the gated norm behind it. A warp
// has one head and a quarter of a chunk, a lane four of its dims.
#include "chunk.cuh"

namespace ksl {

namespace {

constexpr int kParts = 4, kPart = kChunk / kParts;
constexpr int kAhead = 4;  // tokens whose loads are under way
constexpr int kWarps = 4;

__device__ inline float4 conv_silu(const float4 (&taps)[kTaps], const float4 (&window)[kTaps]) {
  float out[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float sum = (&taps[0].x)[i] * (&window[0].x)[i];
#pragma unroll
    for (int t = 1; t < kTaps; t++) sum = fmaf((&taps[t].x)[i], (&window[t].x)[i], sum);
    out[i] = silu(sum);
  }
  return make_float4(out[0], out[1], out[2], out[3]);
}

__global__ void __launch_bounds__(kWarps * 32)
    conv_kernel(const __grid_constant__ ConvArgs a, const ChunkInfo *chunks) {
  begin_chained();
  const GdnShape &s = a.shape;
  const ChunkInfo chunk = chunks[blockIdx.x / kParts];
  const int from = blockIdx.x % kParts * kPart, n = min(kPart, chunk.n - from);
  const int head = blockIdx.y * kWarps + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (n <= 0 || head >= 2 * s.key_heads + s.value_heads) return;
  const RowInfo &row = a.rows[chunk.row];
  const int channel = head * kChunkDim + lane * 4;
  const float *history = a.slabs.data + row.slab * a.slabs.stride + a.slabs.history_offset;
  const int64_t column = chunk.column + from;
  const float *in = a.qkv + column * a.qkv_stride + channel;
  float4 taps[kTaps], window[kTaps];
#pragma unroll
  for (int t = 0; t < kTaps; t++)
    taps[t] = *reinterpret_cast<const float4 *>(a.taps + t * s.channels + channel);
#pragma unroll
  for (int t = 0; t < kHistory; t++) {
    const int offset = chunk.offset + from - kHistory + t;
    window[t + 1] = *reinterpret_cast<const float4 *>(
        offset >= 0 ? in + static_cast<int64_t>(t - kHistory) * a.qkv_stride
                    : history + (kHistory + offset) * s.channels + channel);
  }
  const bool unit = head < 2 * s.key_heads;
  const float scale = head < s.key_heads ? 1.0f / sqrtf(static_cast<float>(kChunkDim)) : 1.0f;
  if (!unit && lane < n) {
    const int h = head - 2 * s.key_heads;
    const int64_t at = (column + lane) * a.head_stride + h;
    a.decay[at] = gdn_decay(a.a[at], a.decay_rate[h], a.dt_bias[h], a.g + at);
    a.beta[at] = sigmoid(a.b[at]);
  }
  float4 next[kAhead];
  const auto load = [&](int i) {
#pragma unroll
    for (int k = 0; k < kAhead; k++)
      if (i + k < n)
        next[k] =
            *reinterpret_cast<const float4 *>(in + static_cast<int64_t>(i + k) * a.qkv_stride);
  };
  load(0);
  for (int first = 0; first < n; first += kAhead) {
    float4 y[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; k++) {
#pragma unroll
      for (int t = 0; t < kHistory; t++) window[t] = window[t + 1];
      window[kHistory] = next[k];
      y[k] = conv_silu(taps, window);
    }
    load(first + kAhead);
#pragma unroll
    for (int k = 0; k < kAhead; k++) {
      if (first + k >= n) break;
      const int64_t at = (column + first + k) * a.conv_stride + channel;
      if (a.conv_silu != nullptr) *reinterpret_cast<float4 *>(a.conv_silu + at) = y[k];
      if (unit) {
        const float sum =
            warp_sum((y[k].x * y[k].x + y[k].y * y[k].y) + (y[k].z * y[k].z + y[k].w * y[k].w));
        const float r = 1.0f / sqrtf(sum + 1e-6f) * scale;
        y[k].x *= r, y[k].y *= r, y[k].z *= r, y[k].w *= r;
      }
      *reinterpret_cast<float4 *>(a.conv + at) = y[k];
    }
  }
}

__global__ void __launch_bounds__(kWarps * 32)
    norm_kernel(const __grid_constant__ ChunkNormArgs a) {
  begin_chained();
  const ChunkInfo chunk = a.chunks[blockIdx.x / kParts];
  const int from = blockIdx.x % kParts * kPart, n = min(kPart, chunk.n - from);
  const int head = blockIdx.y * kWarps + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (n <= 0 || head >= a.heads) return;
  const float4 gain = *reinterpret_cast<const float4 *>(a.norm + lane * 4);
  const int dim = head * kChunkDim + lane * 4;
  for (int first = 0; first < n; first += kAhead) {
    float4 o[kAhead], z[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; k++) {
      const int64_t at =
          static_cast<int64_t>(chunk.column + from + min(first + k, n - 1)) * a.stride + dim;
      o[k] = *reinterpret_cast<const float4 *>(a.core + at);
      z[k] = *reinterpret_cast<const float4 *>(a.z + at);
    }
#pragma unroll
    for (int k = 0; k < kAhead; k++) {
      if (first + k >= n) break;
      const int column = chunk.column + from + first + k;
      const float square =
          warp_sum((o[k].x * o[k].x + o[k].y * o[k].y) + (o[k].z * o[k].z + o[k].w * o[k].w));
      const float r = 1.0f / sqrtf(square / static_cast<float>(kChunkDim) + a.eps);
      const float4 y =
          make_float4(o[k].x * r * gain.x * silu(z[k].x), o[k].y * r * gain.y * silu(z[k].y),
                      o[k].z * r * gain.z * silu(z[k].z), o[k].w * r * gain.w * silu(z[k].w));
      if (a.gated != nullptr)
        *reinterpret_cast<float4 *>(a.gated + static_cast<int64_t>(column) * a.stride + dim) = y;
      if (a.split.data != nullptr) {
        split_store2(a.split, column, dim, y.x, y.y);
        split_store2(a.split, column, dim + 2, y.z, y.w);
      }
    }
  }
}

}  // namespace

void gdn_chunk_conv(Device *device, const ConvArgs &a, const ChunkInfo *chunks, int n) {
  const int heads = 2 * a.shape.key_heads + a.shape.value_heads;
  KSL_CHAIN(device, "gdn_chunk_conv", conv_kernel, dim3(kParts * n, divide_up(heads, kWarps)),
            kWarps * 32, a, chunks);
}

void gdn_chunk_norm(Device *device, const ChunkNormArgs &a, int n) {
  KSL_CHAIN(device, "gdn_chunk_norm", norm_kernel, dim3(kParts * n, divide_up(a.heads, kWarps)),
            kWarps * 32, a);
}

}  // namespace ksl
