// bf16 weights and many tokens: float32 activations as sums of three bf16, which carry 24 bits, on
// tensor cores.
//
// A block has six tiles of 16 rows and 16 tokens; its eight warps divide the input elements and are
// added in order. Of a piece of 64 elements a lane takes the 16 from 16 s on, as in pack.cu.
#include "gemm.cuh"

namespace ksl {

namespace {

constexpr int kWarps = 8, kTiles = 6, kEights = 2;  // eights of tokens

struct DenseArgs {
  Raw matrices[kGroupParts];
  Output outputs[kGroupParts];
  int first_tile[kGroupParts + 1];
  int n, pieces;
  const float *x;
  int x_stride, tokens;
};

__device__ inline unsigned pack_bf16(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Takes the leading bf16 of two values out of them.
__device__ inline unsigned take_bf16(float &low, float &high) {
  const unsigned r = pack_bf16(low, high);
  low -= __uint_as_float(r << 16);
  high -= __uint_as_float(r & 0xffff0000u);
  return r;
}

__device__ inline void multiply_bf16(float (&c)[4], uint2 lower, uint2 upper, unsigned b0,
                                     unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(lower.x), "r"(upper.x), "r"(lower.y), "r"(upper.y), "r"(b0), "r"(b1));
}

__global__ void __launch_bounds__(kWarps * 32) dense_kernel(const __grid_constant__ DenseArgs a) {
  begin_chained();
  __shared__ float sums[kWarps][kTiles * kEights * 4][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, s = lane & 3;
  const int first = blockIdx.y * kTiles, cols = a.matrices[0].cols;
  const uint16_t *rows[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; t++) {
    int which = 0;
    while (which + 1 < a.n && first + t >= a.first_tile[which + 1]) which++;
    const Raw &m = a.matrices[which];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      // Rows behind the last are computed as the last, and never written.
      const int row = min((first + t - a.first_tile[which]) * 16 + g + 8 * h, m.rows - 1);
      rows[t][h] = static_cast<const uint16_t *>(m.codes) + static_cast<int64_t>(row) * cols;
    }
  }
  const float *x[kEights];
#pragma unroll
  for (int e = 0; e < kEights; e++) {
    const int token = min(static_cast<int>(blockIdx.x) * kEights * 8 + e * 8 + g, a.tokens - 1);
    x[e] = a.x + static_cast<int64_t>(token) * a.x_stride;
  }
  float sum[kTiles][kEights][4] = {};
  // Steps of 16 input elements: the operands of one are on their way while those of the one before
  // are multiplied.
  struct Step {
    float4 x[kEights];
    uint2 weights[kTiles][2];
  };
  const auto load = [&](int at, Step &step) {
    const int k = (at >> 2) * kPiece + 16 * s + 4 * (at & 3);
    const bool there = k < cols;
#pragma unroll
    for (int e = 0; e < kEights; e++)
      step.x[e] = there ? *reinterpret_cast<const float4 *>(x[e] + k) : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        step.weights[t][h] =
            there ? *reinterpret_cast<const uint2 *>(rows[t][h] + k) : make_uint2(0, 0);
  };
  const auto multiply = [&](Step &step) {
    unsigned b[kEights][3][2];
#pragma unroll
    for (int e = 0; e < kEights; e++)
#pragma unroll
      for (int part = 0; part < 3; part++) {
        b[e][part][0] = take_bf16(step.x[e].x, step.x[e].y);
        b[e][part][1] = take_bf16(step.x[e].z, step.x[e].w);
      }
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int e = 0; e < kEights; e++)
#pragma unroll
        for (int part = 2; part >= 0; part--)
          multiply_bf16(sum[t][e], step.weights[t][0], step.weights[t][1], b[e][part][0],
                        b[e][part][1]);
  };
  const int end = a.pieces * (warp + 1) / kWarps * 4;
  int at = a.pieces * warp / kWarps * 4;
  Step steps[2];
  if (at < end) load(at, steps[0]);
  for (; at < end; at += 2) {  // an even number of them
    load(at + 1, steps[1]);
    multiply(steps[0]);
    if (at + 2 < end) load(at + 2, steps[0]);
    multiply(steps[1]);
  }
#pragma unroll
  for (int t = 0; t < kTiles; t++)
#pragma unroll
    for (int e = 0; e < kEights; e++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[warp][(t * kEights + e) * 4 + i][lane] = sum[t][e][i];
  __syncthreads();
  for (int at = threadIdx.x; at < kTiles * kEights * 4 * 32; at += kWarps * 32) {
    // Neighbours have neighbouring rows of one token.
    const int row = at & 15, token_at = at >> 4 & (8 * kEights - 1), t = at / (128 * kEights);
    const int from = (row & 7) * 4 + (token_at & 7) / 2;
    const int item = (t * kEights + (token_at >> 3)) * 4 + (row >> 3) * 2 + (token_at & 1);
    float total = sums[0][item][from];
    for (int w = 1; w < kWarps; w++) total += sums[w][item][from];
    int which = 0;
    while (which + 1 < a.n && first + t >= a.first_tile[which + 1]) which++;
    const int r = (first + t - a.first_tile[which]) * 16 + row;
    const int token = blockIdx.x * kEights * 8 + token_at;
    if (token < a.tokens && r < a.matrices[which].rows)
      a.outputs[which].y[static_cast<int64_t>(token) * a.outputs[which].stride + r] = total;
  }
}

}  // namespace

bool dense_takes(const Raw &m, int tokens) {
  return m.encoding == KSL_ENC_BF16 && tokens > kWideTokens && m.cols % 4 == 0;
}

// Matrices with one input that dense_takes.
void run_dense(Device *device, const Raw *matrices, const Output *outputs, int n, const float *x,
               int x_stride, int tokens) {
  DenseArgs a = {};
  a.n = n;
  for (int i = 0; i < n; i++) {
    a.matrices[i] = matrices[i];
    a.outputs[i] = outputs[i];
    a.first_tile[i + 1] = a.first_tile[i] + divide_up(matrices[i].rows, 16);
  }
  a.pieces = divide_up(matrices[0].cols, kPiece);
  a.x = x;
  a.x_stride = x_stride;
  a.tokens = tokens;
  const dim3 grid(divide_up(tokens, kEights * 8), divide_up(a.first_tile[n], kTiles));
  KSL_CHAIN(device, "dense", dense_kernel, grid, kWarps * 32, a);
}

}  // namespace ksl
