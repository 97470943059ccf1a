// Packed weights as fragments of half-precision products, exactly; see pack.cu for the layout.
#pragma once
#include "../common/mma.cuh"
#include "gemm.cuh"
#include "packed_bits.cuh"

namespace ksl {
namespace {

__device__ inline unsigned half_multiply(unsigned a, unsigned b) {
  const __half2 r = __hmul2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
  return *reinterpret_cast<const unsigned *>(&r);
}

__device__ inline unsigned word_of(const uint4 &v, int i) {
  return i == 0 ? v.x : (i == 1 ? v.y : (i == 2 ? v.z : v.w));
}

// Four e4m3 bytes as halves.
__device__ inline void four_halves(unsigned bytes, unsigned &lower, unsigned &upper) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(lower), "=r"(upper)
      : "r"(bytes));
}

// A lane's weights of one block, 64 input elements at a time.
template <int kEncoding>
struct Expand;

template <>
struct Expand<KSL_ENC_NVFP4> {
  static constexpr int kBytes = kBlockNvfp4;
  static constexpr bool kLate = false;
  uint2 scales;
  uint4 codes;
  unsigned lower, upper;  // scales of rows g and g + 8, each twice

  __device__ void begin(const uint8_t *block, int lane) {
    scales = *reinterpret_cast<const uint2 *>(block + 2048 + lane * 8);
  }
  __device__ void piece(const uint8_t *block, int lane, int piece) {
    codes = reinterpret_cast<const uint4 *>(block)[piece * 32 + lane];
    // What they multiply is 2^-14 of its value: a product needs no more than a half's last bit.
    const unsigned two = piece < 2 ? scales.x : scales.y;
    const unsigned both = e4m3_halves(piece & 1 ? two >> 16 : two);
    const __half2 halves = *reinterpret_cast<const __half2 *>(&both);
    const __half2 low = __low2half2(halves), high = __high2half2(halves);
    lower = *reinterpret_cast<const unsigned *>(&low);
    upper = *reinterpret_cast<const unsigned *>(&high);
  }
  // Of the i-th product of the piece.
  __device__ void fragment(int i, unsigned (&a)[4]) const {
    const unsigned w = word_of(codes, i);
#pragma unroll
    for (int pair = 0; pair < 4; pair++)
      a[pair] = half_multiply(nvfp4_pair(w, pair), pair & 1 ? upper : lower);
  }
};

template <>
struct Expand<KSL_ENC_E2M3> {
  static constexpr int kBytes = kBlockE2m3;
  static constexpr bool kLate = true;  // its scales multiply sums of 128 elements
  uint2 plane;
  uint4 codes;

  __device__ void begin(const uint8_t *, int) {}
  __device__ void piece(const uint8_t *block, int lane, int piece) {
    codes = reinterpret_cast<const uint4 *>(block)[piece * 32 + lane];
    plane =
        reinterpret_cast<const uint2 *>(block + 2048)[((piece >> 1) * 32 + lane) * 2 + (piece & 1)];
  }
  // The scales of rows g and g + 8 for pieces [2 half, 2 half + 2).
  __device__ float2 factors(const uint8_t *block, int half) const {
    return __half22float2(reinterpret_cast<const __half2 *>(block + 3072)[half]);
  }
  __device__ void fragment(int i, unsigned (&a)[4]) const {
    unsigned bytes[4];
    e2m3_bytes(i < 2 ? codes.x : codes.z, i < 2 ? codes.y : codes.w, i < 2 ? plane.x : plane.y,
               bytes);
    four_halves(bytes[2 * (i & 1)], a[0], a[2]);
    four_halves(bytes[2 * (i & 1) + 1], a[1], a[3]);
  }
};

template <>
struct Expand<KSL_ENC_BF16> {
  static constexpr int kBytes = kPackedBf16Bytes;
  static constexpr bool kLate = false;
  const uint8_t *at;

  __device__ void begin(const uint8_t *, int) {}
  __device__ void piece(const uint8_t *block, int lane, int piece) {
    at = block + (piece * 4 * 32 + lane) * 16;
  }
  __device__ void fragment(int i, unsigned (&a)[4]) const {
    const uint4 words = *reinterpret_cast<const uint4 *>(at + i * 512);
    a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
  }
};

}  // namespace
}  // namespace ksl
