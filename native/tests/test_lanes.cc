// The block-scaled products of sm_120a on the host: registers are made by the functions that the
// kernel uses, from packed weights and quantized activations in memory, and multiplied as the
// instruction set defines it. The sums must be those of the decoded values.
//
//     test_lanes SEED [a|b|scale_a|scale_b|weights|activations]
//
// A second word swaps two lanes' registers of A, of B or of their scales, or what two lanes have in
// memory: then it must fail.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <vector>

#include "../cuda/gemm/lanes.cuh"
#include "../cuda/gemm/packed_bits.cuh"

namespace ksl {
namespace {

constexpr int kRows = 16, kTokens = 8, kCols = 256;
constexpr int kBlockBytes = 4096;         // room for a packed block
constexpr int kFirst = 13, kSecond = 22;  // lanes that are swapped

struct Warp {
  uint32_t a[32][4], b[32][2], scale_a[32], scale_b[32];
};

enum Swap { kNone, kA, kB, kScaleA, kScaleB, kWeights, kActivations };

void swap_lanes(Warp *w, Swap swap) {
  for (int i = 0; i < 4 && swap == kA; i++) std::swap(w->a[kFirst][i], w->a[kSecond][i]);
  for (int i = 0; i < 2 && swap == kB; i++) std::swap(w->b[kFirst][i], w->b[kSecond][i]);
  // Lanes 4 g and 4 g + 1 alone give scales of A, 4 g those of B, under selector 0.
  if (swap == kScaleA) std::swap(w->scale_a[12], w->scale_a[21]);
  if (swap == kScaleA) std::swap(w->scale_a[14], w->scale_a[23]);
  for (int t = 0; t < 4 && swap == kScaleB; t++) std::swap(w->scale_b[12 + t], w->scale_b[20 + t]);
}

uint32_t byte_of(const uint32_t *registers, int i) {
  return registers[i >> 2] >> 8 * (i & 3) & 255;
}
uint32_t nibble_of(const uint32_t *registers, int i) {
  return registers[i >> 3] >> 4 * (i & 7) & 15;
}

typedef double Sums[kRows][kTokens];

// mma.m16n8k32 kind mxf8f6f4, A e2m3, B e4m3, scales ue8m0. Bits 6 and 7 of a byte of A must be 0.
bool multiply_mx8(const Warp &w, int byte_a, int byte_b, Sums &sums) {
  double a[kRows][32], b[32][kTokens];
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < 16; i++) {
      const uint32_t code = byte_of(w.a[lane], i);
      if (code >> 6) return false;
      const LanePlace at = mx8_a(lane, i);
      a[at.row][at.slot] = e2m3_to_f32(static_cast<uint8_t>(code));
    }
    for (int i = 0; i < 8; i++) {
      const LanePlace at = mx8_b(lane, i);
      b[at.slot][at.row] = e4m3_to_f32(static_cast<uint8_t>(byte_of(w.b[lane], i)));
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < 4; i++) {
      const LanePlace at = lane_sum(lane, i);
      double sum = 0;
      for (int k = 0; k < 32; k++) sum += a[at.row][k] * b[k][at.slot];
      const uint32_t of_a = w.scale_a[scale_lane_a(at.row, 0)] >> 8 * byte_a & 255;
      const uint32_t of_b = w.scale_b[scale_lane_b(at.slot, 0)] >> 8 * byte_b & 255;
      sums[at.row][at.slot] +=
          sum * e8m0_to_f32(static_cast<uint8_t>(of_a)) * e8m0_to_f32(static_cast<uint8_t>(of_b));
    }
  }
  return true;
}

// mma.m16n8k64 kind mxf4nvf4, e2m1, four ue4m3 scales.
void multiply_nv4(const Warp &w, int thread_a, int thread_b, Sums &sums) {
  double a[kRows][64], b[64][kTokens];
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < 32; i++) {
      const LanePlace at = nv4_a(lane, i);
      const uint32_t scale = w.scale_a[scale_lane_a(at.row, thread_a)] >> 8 * (at.slot / 16);
      a[at.row][at.slot] =
          static_cast<double>(e2m1_to_f32(static_cast<uint8_t>(nibble_of(w.a[lane], i)))) *
          ue4m3_to_f32(static_cast<uint8_t>(scale & 255));
    }
    for (int i = 0; i < 16; i++) {
      const LanePlace at = nv4_b(lane, i);
      const uint32_t scale = w.scale_b[scale_lane_b(at.row, thread_b)] >> 8 * (at.slot / 16);
      b[at.slot][at.row] =
          static_cast<double>(e2m1_to_f32(static_cast<uint8_t>(nibble_of(w.b[lane], i)))) *
          ue4m3_to_f32(static_cast<uint8_t>(scale & 255));
    }
  }
  for (int row = 0; row < kRows; row++)
    for (int token = 0; token < kTokens; token++)
      for (int k = 0; k < 64; k++) sums[row][token] += a[row][k] * b[k][token];
}

struct Random {
  std::mt19937 engine;
  uint32_t below(uint32_t n) { return engine() % n; }
  float normal() { return std::normal_distribution<float>()(engine); }
};

// Weights and activations of one tile, one block of input elements and eight tokens.
struct Case {
  std::vector<uint8_t> block = std::vector<uint8_t>(kBlockBytes);
  double weights[kRows][kCols];
  float given[kTokens][kCols];
  double taken[kTokens][kCols];       // what the quantizer made of it
  std::vector<uint8_t> data, scales;  // [pieces][tokens][64], [stages][tokens][..]
  float factors[kTokens];
};

void make_activations(Random *random, Case *c) {
  for (auto &token : c->given) {
    const float size = exp2f(random->normal() * 4);
    for (float &v : token) v = random->normal() * size * (random->below(50) == 0 ? 30.0f : 1.0f);
    const int zeros = static_cast<int>(random->below(kCols / 32)) * 32;
    for (int k = zeros; k < zeros + 32; k++) token[k] = 0;
  }
}

void put_codes(bool nvfp4, Random *random, Case *c, uint8_t (&codes)[kRows][kCols]) {
  for (int row = 0; row < kRows; row++) {
    for (int k = 0; k < kCols; k++) {
      codes[row][k] = static_cast<uint8_t>(random->below(nvfp4 ? 16 : 64));
      const PackedBits bits = packed_bits(nvfp4, codes[row][k], row, k);
      uint32_t word;
      for (int i = 0; i < (nvfp4 ? 1 : 3); i++) {
        memcpy(&word, &c->block[bits.at[i]], 4);
        word ^= bits.bits[i];
        memcpy(&c->block[bits.at[i]], &word, 4);
      }
    }
  }
}

// ---- FP6
void make_e2m3(Random *random, Case *c) {
  uint8_t codes[kRows][kCols];
  put_codes(false, random, c, codes);
  for (int half = 0; half < 2; half++) {
    for (int upper = 0; upper < 2; upper++) {
      // 2^14 times a power of two of at most 1, subnormal halves too.
      const uint16_t scale = f32_to_f16(ldexpf(1.0f, 14 - static_cast<int>(random->below(37))));
      memcpy(&c->block[packed_e2m3_scale(half, upper)], &scale, 2);
      for (int row = 8 * upper; row < 8 * upper + 8; row++)
        for (int k = 128 * half; k < 128 * half + 128; k++)
          c->weights[row][k] = static_cast<double>(e2m3_to_f32(codes[row][k])) * f16_to_f32(scale);
    }
  }
}

void take_mx8(Case *c) {
  c->data.resize(kCols / 64 * kTokens * kScaledPiece);
  c->scales.resize(kCols / 128 * kTokens * kMx8Scales);
  for (int token = 0; token < kTokens; token++) {
    for (int piece = 0; piece < kCols / 64; piece++) {
      const float *from = c->given[token] + piece * 64;
      uint32_t exponents[2];
      for (int product = 0; product < 2; product++) {
        float most = 0;
        for (int slot = 0; slot < 32; slot++)
          most = fmaxf(most, fabsf(from[mx8_element(slot, product)]));
        exponents[product] = mx8_exponent(most);
        const float unit = e8m0_to_f32(static_cast<uint8_t>(exponents[product]));
        for (int slot = 0; slot < 32; slot++) {
          const int k = mx8_element(slot, product);
          c->taken[token][piece * 64 + k] =
              static_cast<double>(e4m3_to_f32(f32_to_e4m3(from[k] / unit))) * unit;
        }
      }
      for (int group = 0; group < 4; group++) {
        float values[16];
        memcpy(values, from + 16 * group, sizeof values);
        mx8_write(values, exponents, group, piece % 2,
                  &c->data[(piece * kTokens + token) * kScaledPiece],
                  &c->scales[(piece / 2 * kTokens + token) * kMx8Scales]);
      }
    }
  }
}

bool run_mx8(const Case &c, Swap swap, Sums &sums) {
  for (int piece = 0; piece < 4; piece++) {
    for (int product = 0; product < 2; product++) {
      Warp w;
      for (int lane = 0; lane < 32; lane++) {
        uint32_t both[2][4];
        e2m3_fragments(c.block.data(), piece, lane, both);
        memcpy(w.a[lane], both[product], sizeof w.a[lane]);
        const int g = lane >> 2, t = lane & 3;
        const uint8_t *row = &c.data[(piece * kTokens + g) * kScaledPiece + t * 16];
        for (int reg = 0; reg < 2; reg++)
          memcpy(&w.b[lane][reg], row + 4 * mx8_word(product, reg), 4);
        w.scale_a[lane] = e2m3_scales(c.block.data(), lane);
        memcpy(&w.scale_b[lane], &c.scales[(piece / 2 * kTokens + g) * kMx8Scales], 4);
      }
      swap_lanes(&w, swap);
      if (!multiply_mx8(w, piece / 2, mx8_scale_byte(piece % 2, product), sums)) return false;
    }
  }
  return true;
}

// ---- NVFP4
void make_nvfp4(Random *random, Case *c) {
  uint8_t codes[kRows][kCols];
  put_codes(true, random, c, codes);
  for (int row = 0; row < kRows; row++) {
    for (int group = 0; group < kCols / 16; group++) {
      const uint8_t scale = static_cast<uint8_t>(random->below(0x7f));
      c->block[packed_nvfp4_scale(row, group * 16)] = scale;
      for (int k = 16 * group; k < 16 * group + 16; k++)
        c->weights[row][k] = static_cast<double>(e2m1_to_f32(codes[row][k])) * ue4m3_to_f32(scale);
    }
  }
}

void take_nv4(Case *c) {
  c->data.resize(kCols / 64 * kTokens * kScaledPiece);
  c->scales.resize(kCols / 128 * kTokens * kNv4Scales);
  for (int token = 0; token < kTokens; token++) {
    float most = 0;
    for (const float v : c->given[token]) most = fmaxf(most, fabsf(v));
    const float factor = c->factors[token] = nv4_factor(most);
    for (int group = 0; group < kCols / 16; group++) {
      const float *from = c->given[token] + 16 * group;
      float values[16], left[16];
      uint8_t first[16], second[16];
      memcpy(values, from, sizeof values);
      memcpy(left, from, sizeof left);
      const uint32_t a = nv4_term(left, factor, first), b = nv4_term(left, factor, second);
      for (int i = 0; i < 16; i++)
        c->taken[token][16 * group + i] =
            static_cast<double>(e2m1_to_f32(first[i])) * ue4m3_to_f32(static_cast<uint8_t>(a)) +
            static_cast<double>(e2m1_to_f32(second[i])) * ue4m3_to_f32(static_cast<uint8_t>(b));
      const int piece = group / 4;
      nv4_write(values, factor, group % 4, piece % 2,
                &c->data[(piece * kTokens + token) * kScaledPiece],
                &c->scales[(piece / 2 * kTokens + token) * kNv4Scales]);
    }
  }
}

void run_nv4(const Case &c, Swap swap, Sums &sums) {
  for (int piece = 0; piece < 4; piece++) {
    for (int term = 0; term < 2; term++) {
      Warp w;
      for (int lane = 0; lane < 32; lane++) {
        nvfp4_fragment(c.block.data(), piece, lane, w.a[lane]);
        const int g = lane >> 2, t = lane & 3;
        const uint8_t *row = &c.data[(piece * kTokens + g) * kScaledPiece + t * 16];
        for (int reg = 0; reg < 2; reg++) memcpy(&w.b[lane][reg], row + 4 * nv4_word(term, reg), 4);
        w.scale_a[lane] = nvfp4_scales(c.block.data(), piece / 2, lane);
        memcpy(&w.scale_b[lane], &c.scales[(piece / 2 * kTokens + g) * kNv4Scales + 4 * t], 4);
      }
      swap_lanes(&w, swap);
      multiply_nv4(w, piece % 2, nv4_scale_thread(piece % 2, term), sums);
    }
  }
}

// ---- comparison
int failures = 0;

void check(bool right, const char *what) {
  if (right) return;
  failures++;
  fprintf(stderr, "wrong: %s\n", what);
}

void compare(const Case &c, const Sums &sums, const char *what) {
  for (int row = 0; row < kRows; row++) {
    for (int token = 0; token < kTokens; token++) {
      double expected = 0, size = 0;
      for (int k = 0; k < kCols; k++) {
        expected += c.weights[row][k] * c.taken[token][k];
        size += fabs(c.weights[row][k] * c.taken[token][k]);
      }
      // Doubles hold every product; sums differ in their order.
      if (fabs(sums[row][token] - expected) <= 1e-12 * size) continue;
      fprintf(stderr, "row %d, token %d: %g, not %g\n", row, token, sums[row][token], expected);
      return check(false, what);
    }
  }
}

// What quantizing may cost: half a step of e4m3; of two terms, the sixth of a sixth of the largest.
void check_loss(const Case &c, bool terms) {
  for (int token = 0; token < kTokens; token++) {
    for (int group = 0; group < kCols / 16; group++) {
      double most = 0, loss = 0;
      for (int k = 16 * group; k < 16 * group + 16; k++) {
        const double made = c.taken[token][k] * (terms ? c.factors[token] : 1.0f);
        loss = fmax(loss, fabs(made - c.given[token][k]));
        most = fmax(most, fabs(c.given[token][k]));
      }
      // Scales have steps of a sixteenth, and an end: 2^-9 of the token's factor.
      const double bound = terms ? most * 0.03 + c.factors[token] * 0x1p-9 * 6 : 0;
      if (terms) check(loss <= bound, "loss of two terms");
    }
    for (int k = 0; k < kCols && !terms; k++) {
      double most = 0;
      for (int other = k / 64 * 64; other < k / 64 * 64 + 64; other++)
        most = fmax(most, fabs(c.given[token][other]));
      const double bound = fmax(fabs(c.given[token][k]) / 16, most * 0x1p-17);
      check(fabs(c.taken[token][k] - c.given[token][k]) <= bound, "loss of e4m3");
    }
  }
}

void swap_memory(Case *c, Swap swap) {
  for (int i = 0; i < 16 && swap == kWeights; i++)
    std::swap(c->block[kFirst * 16 + i], c->block[kSecond * 16 + i]);
  for (int i = 0; i < 16 && swap == kActivations; i++)
    std::swap(c->data[kFirst * 16 + i], c->data[kSecond * 16 + i]);
}

void run(uint32_t seed, Swap swap) {
  Random random{std::mt19937(seed)};
  {
    Case c;
    make_e2m3(&random, &c);
    make_activations(&random, &c);
    take_mx8(&c);
    check_loss(c, false);
    swap_memory(&c, swap);
    Sums sums = {};
    check(run_mx8(c, swap, sums), "bits outside of a code");
    compare(c, sums, "mxf8f6f4");
  }
  {
    Case c;
    make_nvfp4(&random, &c);
    make_activations(&random, &c);
    take_nv4(&c);
    check_loss(c, true);
    swap_memory(&c, swap);
    Sums sums = {};
    run_nv4(c, swap, sums);
    compare(c, sums, "mxf4nvf4");
  }
}

// Every slot holds one element, and every element has one slot.
void check_maps() {
  int seen[64] = {};
  for (int product = 0; product < 2; product++)
    for (int slot = 0; slot < 32; slot++) seen[mx8_element(slot, product)]++;
  for (const int n : seen) check(n == 1, "mx8_element");
  memset(seen, 0, sizeof seen);
  for (int slot = 0; slot < 64; slot++) seen[nv4_element(slot)]++;
  for (const int n : seen) check(n == 1, "nv4_element");
  for (int slot = 0; slot < 64; slot++)
    check(nv4_scale_byte(nv4_element(slot) / 16) == slot / 16, "nv4_scale_byte");
  for (int exponent = -24; exponent < 16; exponent++) {
    const uint16_t half = f32_to_f16(ldexpf(1.0f, exponent));
    check(e2m3_scale(half) == static_cast<uint32_t>(127 + exponent), "e2m3_scale");
  }
  check(e2m3_scale(0) == 0, "e2m3_scale of 0");
  check(e8m0_to_f32(static_cast<uint8_t>(mx8_exponent(448.0f))) == 1.0f, "mx8_exponent");
  check(e8m0_to_f32(static_cast<uint8_t>(mx8_exponent(449.0f))) == 2.0f, "mx8_exponent above");
  check(nv4_factor(2688.0f) == 1.0f && nv4_factor(2689.0f) == 2.0f, "nv4_factor");
  check(isnan(nv4_factor(NAN)), "nv4_factor of NaN");
}

}  // namespace
}  // namespace ksl

int main(int argc, char **argv) {
  static const char *const kNames[] = {"",        "a",       "b",          "scale_a",
                                       "scale_b", "weights", "activations"};
  if (argc < 2) return 2;
  int swap = 0;
  if (argc > 2) {
    for (swap = 1; swap < 7 && strcmp(argv[2], kNames[swap]) != 0;) swap++;
    if (swap == 7) return 2;
  }
  ksl::check_maps();
  ksl::run(static_cast<uint32_t>(atoi(argv[1])), static_cast<ksl::Swap>(swap));
  if (ksl::failures > 0) fprintf(stderr, "%d failures\n", ksl::failures);
  return ksl::failures > 0 ? 1 : 0;
}
