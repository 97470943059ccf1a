// Where a weight lies in a packed block of 16 rows and 256 input elements, and as which bits;
// pack.cu describes the layout. FP6 is bytes in three words and a fourth in what those leave free,
// by exclusive or, so that a block is the exclusive or of what each of its weights contributes.
// No device code.
#pragma once
#include <stdint.h>

#include "../../common/device.h"

namespace ksl {

// Bits to be turned over in up to three words, whose bytes from the block's begin are `at`.
struct PackedBits {
  int at[3];
  uint32_t bits[3];
};

KSL_HD inline uint32_t turned_left(uint32_t v, int n) {
  return v << n | v >> (32 - n);
}
// Of a byte bits 4 and 3 are what bits 6 and 5 of the first word's are for, bits 2 and 1 of the
// second's; bit 0, of the next byte, and bit 7 of the third's.
KSL_HD inline uint32_t e2m3_fourth(uint32_t first, uint32_t second, uint32_t third) {
  return (first >> 2 ^ second >> 4 ^ turned_left(third, 2)) & 0x9f9f9f9fu;
}
// Four words of bytes: rows g and g + 8 of a run of four elements, then of the next. A byte is the
// sign, two zeros and the magnitude: in e4m3 2^-6 of the value.
KSL_HD inline void e2m3_bytes(uint32_t first, uint32_t second, uint32_t third, uint32_t (&a)[4]) {
  a[0] = first & 0x9f9f9f9fu;
  a[1] = second & 0x9f9f9f9fu;
  a[2] = third & 0x9f9f9f9fu;
  a[3] = e2m3_fourth(first, second, third);
}

// A word of NVFP4 holds pairs of codes, one of each half, as four words with the sign of a code at
// bit 15 and its magnitude at bits 11 to 9, where a half has them: one shift at most for each.
constexpr uint32_t kPairBits = 0x8e008e00u;
KSL_HD inline uint32_t nvfp4_pair(uint32_t w, int pair) {
  const uint32_t moved = pair == 0   ? w << 2
                         : pair == 1 ? w ^ w << 6
                         : pair == 2 ? w ^ w << 9
                                     : w ^ turned_left(w, 29);
  return moved & kPairBits;
}
// The word that gives these. What it gives of the exclusive or of two words is that of both.
KSL_HD inline uint32_t nvfp4_word(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kSign = 0x80008000u, kHigh = 0x08000800u, kMiddle = 0x04000400u,
                     kLow = 0x02000200u;
  uint32_t w = a >> 2;
  w |= (b ^ w << 6) & kSign;
  w |= ((c ^ w) & kSign) >> 9;
  w |= turned_left((d ^ w) & kSign, 3);
  w |= (c ^ w << 9) & kHigh;
  w |= (d ^ w >> 3) & kMiddle;
  w |= ((b ^ w) & (kHigh | kMiddle | kLow)) >> 6;
  w |= ((c ^ w) & (kMiddle | kLow)) >> 9;
  w |= ((d ^ w) & (kHigh | kLow)) << 3;
  return w;
}

KSL_HD inline PackedBits packed_bits(bool nvfp4, uint32_t code, int row, int k) {
  const int piece = k >> 6, lane = (row & 7) * 4 + (k >> 4 & 3), w = k >> 2 & 3;
  const int main = (piece * 32 + lane) * 16;
  if (nvfp4) {
    const int j = (k >> 1 & 1) * 2 + (row >> 3);
    const uint32_t of = ((code & 7) << 9 | (code >> 3) << 15) << 16 * (k & 1);
    const uint32_t bits =
        nvfp4_word(j == 0 ? of : 0, j == 1 ? of : 0, j == 2 ? of : 0, j == 3 ? of : 0);
    return {{main + w * 4, 0, 0}, {bits, 0, 0}};
  }
  // The third words of pieces 0 and 1 lie in the first 16 bytes of a lane, of 2 and 3 in its
  // second.
  PackedBits bits = {{main + (w & 2) * 4, main + (w & 2) * 4 + 4,
                      2048 + ((piece >> 1) * 128 + lane * 4 + (piece & 1) * 2 + (w >> 1)) * 4},
                     {0, 0, 0}};
  const uint32_t byte = ((code >> 5) << 7 | (code & 31)) << 8 * (k & 3);
  const int word = 2 * (w & 1) + (row >> 3);
  if (word < 3) bits.bits[word] = byte;
  // What a byte of the first three words does to the fourth is undone.
  const uint32_t fourth = word == 3 ? byte : e2m3_fourth(bits.bits[0], bits.bits[1], bits.bits[2]);
  bits.bits[0] |= (fourth & 0x18181818u) << 2;
  bits.bits[1] |= (fourth & 0x06060606u) << 4;
  bits.bits[2] |= turned_left(fourth & 0x81818181u, 30);
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
