// Where a weight lies in a packed block of 16 rows and 256 input elements, and as which bits;
// pack.cu describes the layout. No device code.
#pragma once
#include <stdint.h>

#include "../../common/device.h"

namespace ksl {

// Bits to be set in two words; `plane` is 0 for NVFP4. Bytes from the block's begin.
struct PackedBits {
  int main_at, plane_at;
  uint32_t main, plane;
};

KSL_HD inline PackedBits packed_bits(bool nvfp4, uint32_t code, int row, int k) {
  const int piece = k >> 6, lane = (row & 7) * 4 + (k >> 4 & 3), w = k >> 2 & 3;
  const int j = (k >> 1 & 1) * 2 + (row >> 3), high = 16 * (k & 1);
  PackedBits bits = {((piece * 32 + lane) * 4 + w) * 4, 0, 0, 0};
  if (nvfp4) {
    const int sign = j == 0 ? 15 : (j == 1 ? 12 : (j == 2 ? 14 : 13));
    bits.main = ((code & 7) << (9 - 3 * j) | (code >> 3) << sign) << high;
    return bits;
  }
  const int at = j == 3 ? 12 : 8 - 4 * j, t = 4 * (w & 1) + j;
  bits.main = ((code >> 1 & 15) << at) << high;
  bits.plane = ((code >> 5) << (15 - t) | (code & 1) << (7 - t)) << high;
  // Pieces 0 and 1 lie in the first 16 bytes of a lane, 2 and 3 in its second.
  bits.plane_at = 2048 + ((piece >> 1) * 128 + lane * 4 + (piece & 1) * 2 + (w >> 1)) * 4;
  return bits;
}
// Byte of the scale of row `row` and the group of 16 with element k.
KSL_HD inline int packed_nvfp4_scale(int row, int k) {
  return 2048 + ((row & 7) * 4 + (k >> 4 & 3)) * 8 + (k >> 6) * 2 + (row >> 3);
}
// Byte of the half for 128 elements and eight rows.
KSL_HD inline int packed_e2m3_scale(int half, int upper) {
  return 3072 + (half * 2 + upper) * 2;
}

}  // namespace ksl
