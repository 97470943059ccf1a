// Panels of halves into panels of e4m3 with a power of two a token.
//
// 128 input elements are a row of 128 bytes: element 16 s + 4 i + e of each half of 64 at
// 16 i + 4 s + e, chunks swizzled as those of halves. A block makes one token.
#include "gemm.cuh"

namespace ksl {

namespace {

constexpr int kItems = 4;  // of a thread
static_assert(kItems * 1024 * 16 >= kPanel8Width, "a block has a whole token");

__device__ inline unsigned to_e4m3(unsigned low, unsigned high) {
  unsigned short a, b;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(a) : "r"(low));
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(b) : "r"(high));
  return a | static_cast<unsigned>(b) << 16;
}

__device__ inline __half2 halves(unsigned v) {
  return *reinterpret_cast<__half2 *>(&v);
}
__device__ inline unsigned word(__half2 v) {
  return *reinterpret_cast<unsigned *>(&v);
}

__global__ void __launch_bounds__(1024)
    quantize_kernel(const __grid_constant__ Panel from, const __grid_constant__ Panel8 to,
                    int pieces) {
  begin_chained();
  __shared__ float scratch[32];
  const int token = blockIdx.x, swap = token & 7;
  const uint8_t *row = from.data + static_cast<int64_t>(token >> 3) * 1024 + swap * 128;
  const int64_t piece_bytes = static_cast<int64_t>(from.groups) * 1024;
  // An item: elements 4 i to 4 i + 3 of the four runs of 16 of a piece, in two chunks.
  uint4 values[kItems][2];
  __half2 most = halves(0);
#pragma unroll
  for (int k = 0; k < kItems; k++) {
    const int item = k * blockDim.x + threadIdx.x, i = item & 3;
    const uint8_t *p = row + (item >> 2) * piece_bytes;
#pragma unroll
    for (int c = 0; c < 2; c++)
      values[k][c] = item < pieces * 4
                         ? *reinterpret_cast<const uint4 *>(p + ((2 * i + c) ^ swap) * 16)
                         : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int k = 0; k < kItems; k++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint4 &v = values[k][c];
      most =
          __hmax2_nan(most, __hmax2_nan(__hmax2_nan(__habs2(halves(v.x)), __habs2(halves(v.y))),
                                        __hmax2_nan(__habs2(halves(v.z)), __habs2(halves(v.w)))));
    }
  const float largest = block_max(fmaxf(__low2float(most), __high2float(most)), scratch);
  const int exponent = min(panel8_exponent(largest), 30);
  // Two factors: a half holds neither every scale nor a product in between.
  const int first = exponent / 2;
  const __half2 a = __float2half2_rn(__int_as_float((127 + first) << 23));
  const __half2 b = __float2half2_rn(__int_as_float((127 + exponent - first) << 23));
  uint8_t *out = to.data + static_cast<int64_t>(token >> 3) * 1024 + swap * 128;
#pragma unroll
  for (int k = 0; k < kItems; k++) {
    const int item = k * blockDim.x + threadIdx.x, piece = item >> 2, i = item & 3;
    if (item >= pieces * 4) break;
    const uint4 &even = values[k][0], &odd = values[k][1];
    const unsigned x[4] = {even.x, even.y, even.z, even.w}, y[4] = {odd.x, odd.y, odd.z, odd.w};
    unsigned made[4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const unsigned u = word(__hmul2(__hmul2(halves(x[s]), a), b));
      const unsigned v = word(__hmul2(__hmul2(halves(y[s]), a), b));
      made[s] = to_e4m3(u, v);
    }
    *reinterpret_cast<uint4 *>(out + (piece >> 1) * piece_bytes +
                               panel8_chunk(token, piece & 1, i)) =
        make_uint4(made[0], made[1], made[2], made[3]);
  }
  if (threadIdx.x == 0) to.inverse[token] = __int_as_float((127 - exponent) << 23) / from.scale;
}

}  // namespace

void quantize_panel(Device *device, const Panel &from, const Panel8 &to, int pieces, int tokens) {
  KSL_CHAIN(device, "quantize", quantize_kernel, tokens, padded32(divide_up(pieces * 4, kItems)),
            from, to, pieces);
}

}  // namespace ksl
