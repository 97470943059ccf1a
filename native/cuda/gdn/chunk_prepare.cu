// What a chunk adds before the state is known. A block is one chunk and value head.
#include "../common/mma.cuh"
#include "chunk.cuh"

namespace ksl {

namespace {

constexpr int kThreads = 256;
constexpr int kBlock = 16;  // of the triangular system
constexpr int kBlocks = kChunk / kBlock;
constexpr float kValueScale = 0.0625f;  // values as halves: these reach a million

struct Shared {
  uint8_t k_high[2][kChunk * 128], k_low[2][kChunk * 128], q[2][kChunk * 128];
  // A below the diagonal blocks and the inverses of I + A in them, as two halves.
  uint8_t a_high[kChunk * 128], a_low[kChunk * 128];
  float diagonal[kBlocks][kBlock][kBlock + 1];
  float sum[kChunk], beta[kChunk];    // G, beta
  float grown[kChunk], left[kChunk];  // e^G, e^{G_C - G}
};

__device__ inline uint2 pack4(const float4 &v) {
  const __half2 low = __floats2half2_rn(v.x, v.y), high = __floats2half2_rn(v.z, v.w);
  return make_uint2(reinterpret_cast<const uint32_t &>(low),
                    reinterpret_cast<const uint32_t &>(high));
}
__device__ inline float4 rest4(const float4 &v, const uint2 &packed) {
  const __half2 low = reinterpret_cast<const __half2 &>(packed.x),
                high = reinterpret_cast<const __half2 &>(packed.y);
  return make_float4(v.x - __low2float(low), v.y - __high2float(low), v.z - __low2float(high),
                     v.w - __high2float(high));
}

__device__ inline void split2(float x, float y, Shared &s, int at) {
  const __half2 high = __floats2half2_rn(x, y);
  *reinterpret_cast<__half2 *>(s.a_high + at) = high;
  *reinterpret_cast<__half2 *>(s.a_low + at) =
      __floats2half2_rn(x - __low2float(high), y - __high2float(high));
}

// The results of two products beside each other as the left side of one: high halves and the rest.
__device__ inline uint4 fragment(const float (&c)[2][4], uint4 *low) {
  uint32_t high[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float x = c[i >> 1][2 * (i & 1)], y = c[i >> 1][2 * (i & 1) + 1];
    const __half2 h = __floats2half2_rn(x, y);
    const __half2 l = __floats2half2_rn(x - __low2float(h), y - __high2float(h));
    high[i] = reinterpret_cast<const uint32_t &>(h);
    rest[i] = reinterpret_cast<const uint32_t &>(l);
  }
  *low = make_uint4(rest[0], rest[1], rest[2], rest[3]);
  return make_uint4(high[0], high[1], high[2], high[3]);
}

// Byte of four halves from column 4 part on, in two panels.
__device__ inline int place4(int row, int part) {
  return (part >> 4) * (kChunk * 128) + swizzled(row, part >> 1 & 7) + (part & 1) * 8;
}

__global__ void __launch_bounds__(kThreads, 3) prepare_kernel(const __grid_constant__ ChunkArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared &s = *reinterpret_cast<Shared *>(memory);
  begin_chained();
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int head = blockIdx.y, heads = a.shape.value_heads;
  const ChunkInfo chunk = a.chunks[a.first + blockIdx.x];
  const int key_head = head / (heads / a.shape.key_heads);
  const float *q =
      a.conv + static_cast<int64_t>(chunk.column) * a.conv_stride + key_head * kChunkDim;
  const float *k = q + a.shape.key_heads * kChunkDim;
  const float *v = a.conv + static_cast<int64_t>(chunk.column) * a.conv_stride +
                   2 * a.shape.key_heads * kChunkDim + head * kChunkDim;
  ChunkOperands &out = a.operands[static_cast<int64_t>(blockIdx.x) * heads + head];

  if (warp == 0) {
    float total = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = half * 32 + lane;
      const int64_t at = static_cast<int64_t>(chunk.column + i) * a.head_stride + head;
      float sum = i < chunk.n ? a.g[at] : 0.0f;
      for (int step = 1; step < 32; step *= 2) {
        const float before = __shfl_up_sync(kAll, sum, step);
        if (lane >= step) sum += before;
      }
      sum += total;
      total = __shfl_sync(kAll, sum, 31);
      s.sum[i] = sum;
      s.beta[i] = i < chunk.n ? a.beta[at] : 0.0f;
    }
    for (int i = lane; i < kChunk; i += 32) {
      s.grown[i] = expf(s.sum[i]);
      s.left[i] = expf(total - s.sum[i]);
    }
    if (lane == 0) a.decays[static_cast<int64_t>(blockIdx.x) * heads + head] = expf(total);
  }
  __syncthreads();

  // A thread has the same four dims of eight tokens; all loads are under way before the first use.
  {
    constexpr int kMine = kChunk * 32 / kThreads;
    const int part = tid & 31;
    float4 x[kMine];
    const auto load = [&](const float *from) {
#pragma unroll
      for (int i = 0; i < kMine; i++) {
        const int row = i * (kThreads / 32) + warp;
        x[i] = row < chunk.n ? *reinterpret_cast<const float4 *>(
                                   from + static_cast<int64_t>(row) * a.conv_stride + part * 4)
                             : make_float4(0, 0, 0, 0);
      }
    };
    load(k);
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      const int to = place4(i * (kThreads / 32) + warp, part);
      const uint2 high = pack4(x[i]);
      *reinterpret_cast<uint2 *>(s.k_high[0] + to) = high;
      *reinterpret_cast<uint2 *>(s.k_low[0] + to) = pack4(rest4(x[i], high));
    }
    load(q);
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      const int row = i * (kThreads / 32) + warp, to = place4(row, part);
      *reinterpret_cast<uint2 *>(s.q[0] + to) = pack4(x[i]);
      const float e = s.grown[row];
      *reinterpret_cast<uint2 *>(out.q[0] + to) =
          pack4(make_float4(x[i].x * e, x[i].y * e, x[i].z * e, x[i].w * e));
    }
  }
  __syncthreads();

  // Products of keys (warps 0 to 3) and of queries with keys, 16 rows a warp, to the diagonal.
  {
    const int tile = warp & 3, g = lane >> 2, t = lane & 3;
    const bool keys = warp < 4;
    float c[8][4] = {};
#pragma unroll
    for (int step = 0; step < 8; step++) {
      const int panel = step >> 2, chunk16 = (step & 3) * 2;
      // Four 8 x 8 matrices: rows 0-7 and 8-15 of the first eight columns, then of the next.
      const int a_at =
          panel * (kChunk * 128) + swizzled(tile * 16 + (lane & 15), chunk16 + (lane >> 4));
      uint4 high, low = {};
      if (keys) {
        high = load_matrices(s.k_high[0] + a_at);
        low = load_matrices(s.k_low[0] + a_at);
      } else {
        high = load_matrices(s.q[0] + a_at);
      }
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        if (j > 2 * tile + 1) break;
        const int b_at = panel * (kChunk * 128) +
                         swizzled(j * 8 + (lane >> 4) * 8 + (lane & 7), chunk16 + (lane >> 3 & 1));
        const uint4 kh = load_matrices(s.k_high[0] + b_at), kl = load_matrices(s.k_low[0] + b_at);
        mma16<false>(c[j], high, kl.x, kl.y);
        mma16<false>(c[j + 1], high, kl.z, kl.w);
        if (keys) {
          mma16<false>(c[j], low, kh.x, kh.y);
          mma16<false>(c[j + 1], low, kh.z, kh.w);
        }
        mma16<false>(c[j], high, kh.x, kh.y);
        mma16<false>(c[j + 1], high, kh.z, kh.w);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (j > 2 * tile + 1) break;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = tile * 16 + g + 8 * r;
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int column = j * 8 + 2 * t + e;
          x[e] = column <= row ? c[j][2 * r + e] * expf(s.sum[row] - s.sum[column]) : 0.0f;
        }
        if (keys) {
          const float beta = s.beta[row];
          if (j >= 2 * tile) {
#pragma unroll
            for (int e = 0; e < 2; e++)
              s.diagonal[tile][row - tile * kBlock][j * 8 + 2 * t + e - tile * kBlock] =
                  beta * x[e];
          } else {
            split2(-beta * x[0], -beta * x[1], s, swizzled(row, j) + t * 4);
          }
        }
        if (!keys)
          *reinterpret_cast<__half2 *>(out.scores + swizzled(row, j) + t * 4) =
              __floats2half2_rn(x[0], x[1]);
      }
    }
  }

  // (e^{G_C - G} K)^T: a thread has one dim and half of the tokens.
  {
    const int dim = tid & 127;
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int octet = (tid >> 7) * 4 + part;
      alignas(16) __half2 packed[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = octet * 8 + 2 * i + e;
          const int at = place4(row, dim >> 2) + (dim & 3) * 2;
          x[e] = (__half2float(*reinterpret_cast<const __half *>(s.k_high[0] + at)) +
                  __half2float(*reinterpret_cast<const __half *>(s.k_low[0] + at))) *
                 s.left[row];
        }
        packed[i] = __floats2half2_rn(x[0], x[1]);
      }
      *reinterpret_cast<uint4 *>(out.keys + swizzled(dim, octet)) =
          *reinterpret_cast<const uint4 *>(packed);
    }
  }
  __syncthreads();

  // Inverses of the diagonal blocks: a lane has one column.
  if (warp < kBlocks && lane < kBlock) {
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
      x[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; j++) x[i] = fmaf(-s.diagonal[warp][i][j], x[j], x[i]);
      const __half high = __float2half_rn(x[i]);
      const int at = swizzled(warp * kBlock + i, warp * 2 + (lane >> 3)) + (lane & 7) * 2;
      *reinterpret_cast<__half *>(s.a_high + at) = high;
      *reinterpret_cast<__half *>(s.a_low + at) = __float2half_rn(x[i] - __half2float(high));
    }
  }
  __syncthreads();

  // The triangular system, transposed: X_b := (R_b - sum over a < b of X_a A_ba^T) T_b^T, a warp
  // with 32 of the columns of R = [beta V | beta e^G K], twice 16.
  {
    const int g = lane >> 2, t = lane & 3;
    const bool values = warp < 4;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
      const int dim = (warp & 3) * 32 + half * 16 + g;  // rows g and g + 8 of products
      const float *from = (values ? v : k) + dim;
      float right[kBlocks][2][4];
#pragma unroll
      for (int b = 0; b < kBlocks; b++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int row = b * kBlock + j * 8 + 2 * t + (i & 1);
            right[b][j][i] = row < chunk.n
                                 ? from[static_cast<int64_t>(row) * a.conv_stride + (i >> 1) * 8]
                                 : 0.0f;
          }
      uint4 high[kBlocks], low[kBlocks];  // X_a as fragments
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        float c[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int row = b * kBlock + j * 8 + 2 * t + (i & 1);
            c[j][i] = right[b][j][i] * s.beta[row] * (values ? kValueScale : s.grown[row]);
          }
#pragma unroll
        for (int other = 0; other <= b; other++) {
          // Columns of the product: rows of A or T, 8 x 8 matrices (0-7, 8-15) x (slots 0-7, 8-15).
          const int at =
              swizzled(b * kBlock + (lane >> 4) * 8 + (lane & 7), other * 2 + (lane >> 3 & 1));
          const uint4 ah = load_matrices(s.a_high + at), al = load_matrices(s.a_low + at);
          if (other == b) {
            high[b] = fragment(c, &low[b]);
            c[0][0] = c[0][1] = c[0][2] = c[0][3] = 0;
            c[1][0] = c[1][1] = c[1][2] = c[1][3] = 0;
          }
          mma16<false>(c[0], low[other], ah.x, ah.y);
          mma16<false>(c[1], low[other], ah.z, ah.w);
          mma16<false>(c[0], high[other], al.x, al.y);
          mma16<false>(c[1], high[other], al.z, al.w);
          mma16<false>(c[0], high[other], ah.x, ah.y);
          mma16<false>(c[1], high[other], ah.z, ah.w);
        }
        high[b] = fragment(c, &low[b]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int row = b * kBlock + j * 8 + 2 * t;
          if (values) {
            float *to = a.core + static_cast<int64_t>(chunk.column + row) * a.core_stride +
                        head * kChunkDim + dim;
#pragma unroll
            for (int i = 0; i < 4; i++)
              if (row + (i & 1) < chunk.n)
                to[(i & 1) * a.core_stride + (i >> 1) * 8] = c[j][i] / kValueScale;
          } else {
            // Lanes of neighbouring columns exchange, so that each has two columns of one token.
            const bool odd = g & 1;
#pragma unroll
            for (int i = 0; i < 2; i++) {
              const float mine = odd ? c[j][2 * i + 1] : c[j][2 * i];
              const float other = __shfl_xor_sync(kAll, odd ? c[j][2 * i] : c[j][2 * i + 1], 4);
              const int column = dim + i * 8 - odd;
              *reinterpret_cast<__half2 *>(out.w[0] + place4(row + odd, column >> 2) +
                                           (column & 3) * 2) =
                  odd ? __floats2half2_rn(other, mine) : __floats2half2_rn(mine, other);
            }
          }
        }
      }
    }
  }
}

static_assert(sizeof(Shared) <= kSmallRoom, "an sm_120 runs it");

}  // namespace

void gdn_chunk_prepare(Device *device, const ChunkArgs &a) {
  static bool raised = false;  // the engine has one thread
  if (!raised)
    raised =
        keep_error(device,
                   cudaFuncSetAttribute(prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        sizeof(Shared)),
                   "gdn_chunk_prepare");
  launch_chained(device, "gdn_chunk_prepare", prepare_kernel, dim3(a.n, a.shape.value_heads),
                 kThreads, sizeof(Shared), a);
}

}  // namespace ksl
