// Repacks stored weights into the order in which the matrix kernel reads them.
//
// A tile is 16 rows. Of 64 input elements a lane (g = lane / 4, s = lane % 4) holds the 16 from
// 16 s on of rows g and g + 8: four words, word i for the i-th product of 16. A word has four pairs
// j = 0..3 of (row g, elements 4i, 4i+1), (row g+8, same), (row g, 4i+2, 4i+3), (row g+8, same),
// the first of a pair in the low 16 bits:
//   NVFP4: what nvfp4_pair gives
//   FP6:   see below
//   bf16:  a half; a word is four of them, product by product, see packed_bf16_at. Halves are
//   exact:
//          a row has the power of two that makes its largest 2^14 to 2^15, and what is 2^32 below
//          that is rounded
// FP6 words are bytes, four elements in order: the sign at bit 7, the magnitude at 4 to 0. Two
// words and one of a second plane are those of elements 4i to 4i+3, i even, of row g and row g + 8,
// then of the next four of row g. The next four of row g + 8 are what bits 6 and 5 of the three
// give, see e2m3_fourth.
// Scales: NVFP4 two bytes a lane and piece (row g, row g + 8); FP6 four halves a block, 2^14 times
// the scale relative to the matrix's largest, by 128 elements and half of the tile.
#include "gemm.cuh"
#include "packed_bits.cuh"

namespace ksl {

namespace {

struct PackArgs {
  Raw raw;
  int64_t row0;
  int rows, supers, first, mode, unit;
  uint8_t *data;
  float *scale;
};

__device__ inline float power_of_two(int e) {
  return e < -149 ? 0.0f : exp2f(static_cast<float>(e));
}

// Where a row goes: its tile, and the row in it.
struct PackPlace {
  int tile, row;
};
__device__ inline PackPlace pack_place(const PackArgs &a, int local) {
  const int64_t row = a.row0 + local;
  if (a.mode == 0) return {a.first + static_cast<int>(row / 16), static_cast<int>(row % 16)};
  return {a.first + static_cast<int>(row / 8), static_cast<int>(row % 8) + (a.mode == 2 ? 8 : 0)};
}

__global__ void pack_kernel(PackArgs a) {
  const int64_t per_row = static_cast<int64_t>(a.supers) * 16;
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= a.rows * per_row) return;
  const int local = static_cast<int>(i / per_row);
  const int rest = static_cast<int>(i % per_row);
  const int super = rest / 16, piece = rest / 4 % 4, s = rest % 4;
  const PackPlace place = pack_place(a, local);
  const int tile = place.tile, r = place.row;
  const int upper = r >> 3, k0 = super * kSuper + piece * kPiece + s * 16;
  const bool nvfp4 = a.raw.encoding == KSL_ENC_NVFP4;
  const int bytes = nvfp4 ? kBlockNvfp4 : kBlockE2m3;
  uint8_t *block = a.data + (static_cast<int64_t>(tile) * a.supers + super) * bytes;
  for (int w = 0; w < 4; w++) {
    PackedBits bits = {};
    for (int e = 0; e < 4; e++) {
      const int k = k0 + 4 * w + e;
      const unsigned code = k < a.raw.cols ? raw_code(a.raw, local, k) : 0;
      const PackedBits one = packed_bits(nvfp4, code, r, k % kSuper);
      for (int i = 0; i < 3; i++) {
        bits.at[i] = one.at[i];
        bits.bits[i] ^= one.bits[i];
      }
    }
    for (int i = 0; i < 3; i++)
      if (bits.bits[i]) atomicXor(reinterpret_cast<unsigned *>(block + bits.at[i]), bits.bits[i]);
  }
  if (nvfp4) {
    if (k0 < a.raw.cols) {
      const int64_t at = (static_cast<int64_t>(local) * a.raw.cols + k0) >> 4;
      block[packed_nvfp4_scale(r, k0 % kSuper)] = static_cast<const uint8_t *>(a.raw.scales)[at];
    }
  } else if (s == 0 && (piece & 1) == 0) {
    const int across = (a.raw.cols + 127) >> 7, at = k0 >> 7;
    float value = 0;
    if (at < across) {
      const int e = static_cast<const uint8_t *>(a.raw.scales)[(local >> 7) * across + at];
      value = power_of_two(14 + e - a.unit);
    }
    *reinterpret_cast<__half *>(block + packed_e2m3_scale(piece >> 1, upper)) =
        __float2half_rn(value);
  }
  if (rest == 0) {
    // NVFP4 products carry 2^-7; FP6 ones are in units of the largest scale.
    a.scale[tile * 16 + r] =
        nvfp4 ? a.raw.globals[local >> 7] * 128.0f : power_of_two(a.unit - 127);
  }
}

// A block is a row of bf16.
__global__ void __launch_bounds__(256) pack_bf16_kernel(PackArgs a) {
  __shared__ float scratch[32];
  const PackPlace to = pack_place(a, blockIdx.x);
  const uint16_t *from =
      static_cast<const uint16_t *>(a.raw.codes) + blockIdx.x * static_cast<int64_t>(a.raw.cols);
  float most = 0;
  for (int k = threadIdx.x; k < a.raw.cols; k += blockDim.x)
    most = fmaxf(most, fabsf(bf16_value(from[k])));
  most = block_max(most, scratch);
  const int exponent = most > 0 && most <= 3.4028235e38f ? ilogbf(most) - 14 : 0;
  uint8_t *row = a.data + static_cast<int64_t>(to.tile) * a.supers * kPackedBf16Bytes;
  for (int k = threadIdx.x; k < a.raw.cols; k += blockDim.x)
    *reinterpret_cast<__half *>(row + static_cast<int64_t>(k / kSuper) * kPackedBf16Bytes +
                                packed_bf16_at(to.row, k % kSuper)) =
        __float2half_rn(scalbnf(bf16_value(from[k]), -exponent));
  if (threadIdx.x == 0) a.scale[to.tile * 16 + to.row] = scalbnf(1.0f, exponent);
}

}  // namespace

void pack_rows(Device *device, const Raw &raw, int64_t row0, int rows, Packed *to, int first,
               int mode, int unit) {
  PackArgs a = {raw, row0, rows, to->supers, first, mode, unit, to->data, to->scale};
  if (raw.encoding == KSL_ENC_BF16) {
    KSL_LAUNCH(device, "pack", pack_bf16_kernel, rows, 256, a);
    return;
  }
  KSL_LAUNCH(device, "pack", pack_kernel,
             divide_up(rows * static_cast<int64_t>(to->supers) * 16, 256), 256, a);
}

}  // namespace ksl
