// Which lane, register and byte of the block-scaled products of sm_120a holds what. The kernel of
// block_scaled.cuh and its quantizer move everything by these tables and functions; a host test
// makes registers with them, multiplies as the instruction set defines it and compares with plain
// sums. No device code.
//
// Two products. `mxf8f6f4` (m16n8k32): 6-bit weights in the low bits of bytes, e4m3 activations,
// one ue8m0 scale for 32 slots. `mxf4nvf4` (m16n8k64): nibbles of both, one ue4m3 scale for 16
// slots. A slot is the instruction's input element; which of ours it holds is free, as long as both
// operands and the scales agree.
#pragma once
#include <stdint.h>

#include "../../common/small_float.h"
#include "packed_bits.cuh"

namespace ksl {

// ---- what the instructions define. Lane = 4 g + t.
struct LanePlace {
  int row, slot;  // B: row is the column of the product
};

// Byte i of the registers of A (16 bytes) and B (8 bytes) of m16n8k32.
KSL_HD constexpr LanePlace mx8_a(int lane, int i) {
  return {(lane >> 2) + 8 * (i >> 2 & 1), 4 * (lane & 3) + (i & 3) + 16 * (i >> 3)};
}
KSL_HD constexpr LanePlace mx8_b(int lane, int i) {
  return {lane >> 2, 4 * (lane & 3) + (i & 3) + 16 * (i >> 2)};
}
// Nibble i of the registers of A (32 nibbles) and B (16 nibbles) of m16n8k64.
KSL_HD constexpr LanePlace nv4_a(int lane, int i) {
  return {(lane >> 2) + 8 * (i >> 3 & 1), 8 * (lane & 3) + (i & 7) + 32 * (i >> 4)};
}
KSL_HD constexpr LanePlace nv4_b(int lane, int i) {
  return {lane >> 2, 8 * (lane & 3) + (i & 7) + 32 * (i >> 3)};
}
// Register i of the sums of both: slot is the column.
KSL_HD constexpr LanePlace lane_sum(int lane, int i) {
  return {(lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)};
}
// The lane whose register has the scales of a row of A (selector: thread id 0 or 1) and of a column
// of B (0 to 3). m16n8k32 takes the byte that a second selector names, m16n8k64 all four: byte b
// for slots [16 b, 16 b + 16).
KSL_HD constexpr int scale_lane_a(int row, int thread) {
  return 4 * (row & 7) + 2 * thread + (row >> 3);
}
KSL_HD constexpr int scale_lane_b(int column, int thread) {
  return 4 * column + thread;
}

// ---- what packed weights give a lane, see pack.cu. Of a piece of 64 input elements the four
// groups of 16 are those of lanes t = 0..3.

// The element of a run of eight in each nibble of an expanded word; bytes are in order.
KSL_HD constexpr int nibble_element(int nibble) {
  return 0x51734062 >> 4 * nibble & 7;
}

// The element of the piece in a byte of the j-th product of two.
KSL_HD constexpr int mx8_element(int slot, int product) {
  return 16 * (slot % 16 / 4) + 8 * product + 4 * (slot / 16) + slot % 4;
}
// The group of a lane's nibbles: of registers 0 and 1 (upper 0), 2 and 3 of A (upper 1); of
// registers 0 and 1 of B. Slots that share a scale are lanes 2 p and 2 p + 1, each with half of the
// group.
KSL_HD constexpr int nv4_group(int t, int upper) {
  return (t & 2) + upper;
}
KSL_HD constexpr int nv4_half(int t) {
  return t & 1;
}
// The same from a group and half.
KSL_HD constexpr int nv4_lane(int group, int half) {
  return (group & 2) + half;
}
KSL_HD constexpr int nv4_reg(int group) {
  return group & 1;
}
KSL_HD constexpr int nv4_element(int slot) {
  const int t = slot % 32 / 8;
  return 16 * nv4_group(t, slot / 32) + 8 * nv4_half(t) + nibble_element(slot % 8);
}
// Byte of a group in a register of scales.
KSL_HD constexpr int nv4_scale_byte(int group) {
  return (group >> 1) + 2 * (group & 1);
}

// ---- activations in memory: a token's 64 bytes of a piece, 16 for each lane t, which are the
// registers of B one behind the other; beside them scales, for a stage of two pieces.
constexpr int kScaledPiece = 64, kScaledStage = 2;  // bytes of a token; pieces

// Four words: mxf8f6f4 the two registers of both products; mxf4nvf4 the two of the first term of an
// activation, then of the second.
KSL_HD constexpr int mx8_word(int product, int reg) {
  return 2 * product + reg;
}
KSL_HD constexpr int nv4_word(int term, int reg) {
  return 2 * term + reg;
}

// Bytes of a token's scales of a stage. mxf8f6f4: one word in every lane, byte 2 piece + product.
// mxf4nvf4: a word for each lane t = 2 piece + term.
constexpr int kMx8Scales = 4, kNv4Scales = 16;
KSL_HD constexpr int mx8_scale_byte(int piece, int product) {
  return 2 * piece + product;
}
KSL_HD constexpr int nv4_scale_thread(int piece, int term) {
  return 2 * piece + term;
}

// ---- packed weights as registers of A.
struct alignas(8) TwoWords {
  uint32_t x, y;
};
struct alignas(16) FourWords {
  uint32_t x, y, z, w;
};

KSL_HD inline uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++)
    out |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
#endif
}

// FP6 in the low bits of bytes. Rows g in a[0] and a[2], g + 8 in a[1] and a[3].
KSL_HD inline void e2m3_registers(uint32_t first, uint32_t second, uint32_t third,
                                  uint32_t (&a)[4]) {
  e2m3_bytes(first, second, third, a);
  for (int i = 0; i < 4; i++) a[i] = (a[i] & 0x1f1f1f1fu) | (a[i] >> 2 & 0x20202020u);
}
// Both products of a piece of a packed block, 0 to 3.
KSL_HD inline void e2m3_fragments(const uint8_t *block, int piece, int lane, uint32_t (&a)[2][4]) {
  const FourWords words = reinterpret_cast<const FourWords *>(block)[piece * 32 + lane];
  const TwoWords plane = reinterpret_cast<const TwoWords *>(
      block + 2048)[((piece >> 1) * 32 + lane) * 2 + (piece & 1)];
  e2m3_registers(words.x, words.y, plane.x, a[0]);
  e2m3_registers(words.z, words.w, plane.y, a[1]);
}
// The ue8m0 byte of a packed scale, a half that is a power of two; 2^-127 stands for 0.
KSL_HD inline uint32_t e2m3_scale(uint32_t half) {
  if (half >= 0x400u) return (half >> 10) + 112;
  uint32_t exponent = 0;
  for (uint32_t left = half; left != 0; left >>= 1) exponent++;
  return half == 0 ? 0 : exponent + 102;
}

// A lane's scales of a block: byte i for its i-th half.
KSL_HD inline uint32_t e2m3_scales(const uint8_t *block, int lane) {
  const TwoWords halves = *reinterpret_cast<const TwoWords *>(block + 3072);  // rows g, g + 8
  const int shift = 16 * (lane & 1);
  return e2m3_scale(halves.x >> shift & 0xffffu) | e2m3_scale(halves.y >> shift & 0xffffu) << 8;
}

// Four nibbles of row g, or g + 8 (upper 1), at bits 0, 8, 16 and 24: elements 2, 0, 3, 1 of the
// run.
KSL_HD inline uint32_t nvfp4_nibbles(uint32_t w, int upper) {
  const uint32_t first = nvfp4_pair(w, upper), second = nvfp4_pair(w, 2 + upper);
  return (first >> 1 & 0x07000700u) | (first >> 4 & 0x08000800u) | (second >> 9 & 0x00070007u) |
         (second >> 12 & 0x00080008u);
}
// A piece of a packed block, 0 to 3: of two lanes' groups the half that nv4_half says.
KSL_HD inline void nvfp4_fragment(const uint8_t *block, int piece, int lane, uint32_t (&a)[4]) {
  const TwoWords *words =
      reinterpret_cast<const TwoWords *>(block + piece * 512) + nv4_half(lane & 3);
  const int group = lane - (lane & 3) + nv4_group(lane & 3, 0);
  const TwoWords first = words[2 * group], second = words[2 * (group + 1)];
  a[0] = nvfp4_nibbles(first.x, 0) | nvfp4_nibbles(first.y, 0) << 4;
  a[1] = nvfp4_nibbles(first.x, 1) | nvfp4_nibbles(first.y, 1) << 4;
  a[2] = nvfp4_nibbles(second.x, 0) | nvfp4_nibbles(second.y, 0) << 4;
  a[3] = nvfp4_nibbles(second.x, 1) | nvfp4_nibbles(second.y, 1) << 4;
}
// A lane's scales for the two pieces of half `half` of a block: lanes t = 2 piece + upper have
// those of rows g, upper 0, and g + 8, where scale_lane_a wants them.
KSL_HD inline uint32_t nvfp4_scales(const uint8_t *block, int half, int lane) {
  // Two bytes a piece, rows g and g + 8, for each group.
  const uint8_t *groups = block + 2048 + (lane & ~3) * 8 + half * 4;
  uint32_t words[4];
  for (int group = 0; group < 4; group++)
    words[group] = *reinterpret_cast<const uint32_t *>(groups + group * 8);
  const uint32_t at = static_cast<uint32_t>(lane & 3);
  const uint32_t pick = at | (4 + at) << 4;  // in the order of nv4_scale_byte
  return pick_bytes(pick_bytes(words[0], words[2], pick), pick_bytes(words[1], words[3], pick),
                    0x5410);
}

// ---- activations, quantized: 16 values of a group, in order, by which the piece's row and its
// scales of the stage are written. piece: of the stage.

// The exponent byte of the smallest power of two that brings `most` to within 448.
KSL_HD inline uint32_t mx8_exponent(float most) {
  if (!(most > 0)) return 127;
  const uint32_t bits = float_bits(most);
  const int e = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u);
  return static_cast<uint32_t>(e < 1 ? 1 : (e > 253 ? 253 : e));
}
KSL_HD inline float power_of(int exponent) {  // normal
  return bits_float(static_cast<uint32_t>(127 + exponent) << 23);
}
KSL_HD inline uint32_t mx8_register(const float (&values)[16], int product, int reg,
                                    uint32_t exponent) {
  const float inverse = power_of(127 - static_cast<int>(exponent));
  uint32_t out = 0;
  for (int i = 0; i < 4; i++)
    out |= static_cast<uint32_t>(f32_to_e4m3(values[8 * product + 4 * reg + i] * inverse)) << 8 * i;
  return out;
}

// exponents: of both products, over all groups of the piece.
KSL_HD inline void mx8_write(const float (&values)[16], const uint32_t (&exponents)[2], int group,
                             int piece, uint8_t *row, uint8_t *scales) {
  uint32_t words[4];
  for (int product = 0; product < 2; product++) {
    for (int reg = 0; reg < 2; reg++)
      words[mx8_word(product, reg)] = mx8_register(values, product, reg, exponents[product]);
    if (group == 0)
      scales[mx8_scale_byte(piece, product)] = static_cast<uint8_t>(exponents[product]);
  }
  reinterpret_cast<FourWords *>(row)[group] = {words[0], words[1], words[2], words[3]};
}

// A token's factor: the power of two that brings `most` / 6 to within what a scale holds.
KSL_HD inline float nv4_factor(float most) {
  if (most != most) return most;
  if (!(most > 0)) return 1.0f;
  const uint32_t bits = float_bits(most);  // 2688 = 6 x 448 = 1.3125 x 2^11
  const int e = static_cast<int>(bits >> 23) - 127 - 11 + ((bits & 0x7fffffu) > 0x280000u);
  return power_of(e < -100 ? -100 : e);
}
// One term of 16 values: its scale byte and codes, by element; leaves what it does not say.
KSL_HD inline uint32_t nv4_term(float (&values)[16], float factor, uint8_t (&codes)[16]) {
  float most = 0;
  for (int i = 0; i < 16; i++) most = fmaxf(most, fabsf(values[i]));
  const uint8_t scale = f32_to_e4m3(most / 6.0f / factor);
  const float unit = e4m3_to_f32(scale) * factor;
  for (int i = 0; i < 16; i++) {
    codes[i] = scale == 0 ? 0 : f32_to_e2m1(values[i] / unit);
    values[i] -= e2m1_to_f32(codes[i]) * unit;
  }
  return scale;
}
KSL_HD inline uint32_t nv4_register(const uint8_t (&codes)[16], int half) {
  uint32_t out = 0;
  for (int i = 0; i < 8; i++)
    out |= static_cast<uint32_t>(codes[8 * half + nibble_element(i)] & 15) << 4 * i;
  return out;
}
KSL_HD inline void nv4_write(float (&values)[16], float factor, int group, int piece, uint8_t *row,
                             uint8_t *scales) {
  uint8_t codes[16];
  for (int term = 0; term < 2; term++) {
    scales[4 * nv4_scale_thread(piece, term) + nv4_scale_byte(group)] =
        static_cast<uint8_t>(nv4_term(values, factor, codes));
    for (int half = 0; half < 2; half++)
      reinterpret_cast<uint32_t *>(
          row)[4 * nv4_lane(group, half) + nv4_word(term, nv4_reg(group))] =
          nv4_register(codes, half);
  }
}

}  // namespace ksl
