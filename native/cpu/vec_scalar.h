// V: 16 float32 lanes in portable C++: four of the compiler's own vectors, which any machine has or
// which it splits into scalars. Multiply-add rounds twice here.
#pragma once
#include "../common/abi.h"

#define KSL_INLINE static inline __attribute__((always_inline))
#define KSL_STEP KSL_INLINE  // one step of an unrolled loop over column pairs

namespace ksl {
namespace {

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadMask __attribute__((vector_size(16)));

struct V {
  Quad q[4];
};
// 64 unsigned bytes, four a lane; 16 int32 lanes.
struct U {
  uint8_t b[64];
};
struct I {
  QuadMask q[4];
};

// Shapes of the matrix product: the most columns that are multiplied straight from decoded
// registers and with how many panels at once; panels and columns of a tile over a decoded block.
constexpr int direct_panels(int columns) {
  return 1;
}
enum { kDirectColumns = 1, kTilePanels = 1, kTileColumns = 2 };
// The same of the integer product, where a direct pass takes one panel.
enum { kIntDirectColumns = 1, kIntTilePanels = 1, kIntTileColumns = 2 };
// Of tiles whose weights have a scale per group, which keep more sums.
enum { kIntGroupPanels = 1, kIntGroupColumns = 2 };
// Vectors of value columns that one token's delta rule takes together.
enum { kStepVectors = 2 };
// Heads handled together in attention; heads and keys whose scores are computed together.
enum { kHeadBlock = 2, kScoreHeads = 2, kScoreKeys = 1 };

// The four quads; the 16 lanes, left as a loop to keep this object quick to compile.
#define KSL_QUADS for (int i = 0; i < 4; i++)
#define KSL_LANES _Pragma("GCC unroll 1") for (int i = 0; i < 16; i++)

KSL_INLINE V v_set1(float x) {
  const Quad q = {x, x, x, x};
  return {{q, q, q, q}};
}
KSL_INLINE V v_zero() {
  return v_set1(0.0f);
}
KSL_INLINE V v_load(const float *p) {
  V r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
KSL_INLINE V v_load_n(const float *p, int n) {
  float x[16];
  KSL_LANES x[i] = i < n ? p[i] : 0.0f;
  return v_load(x);
}
KSL_INLINE void v_store(float *p, V a) {
  __builtin_memcpy(p, &a, sizeof a);
}
KSL_INLINE void v_store_n(float *p, V a, int n) {
  float x[16];
  v_store(x, a);
  KSL_LANES if (i < n) p[i] = x[i];
}
KSL_INLINE V v_add(V a, V b) {
  KSL_QUADS a.q[i] += b.q[i];
  return a;
}
KSL_INLINE V v_sub(V a, V b) {
  KSL_QUADS a.q[i] -= b.q[i];
  return a;
}
KSL_INLINE V v_mul(V a, V b) {
  KSL_QUADS a.q[i] *= b.q[i];
  return a;
}
KSL_INLINE V v_div(V a, V b) {
  KSL_QUADS a.q[i] /= b.q[i];
  return a;
}
KSL_INLINE V v_fma(V a, V b, V c) {
  KSL_QUADS c.q[i] += a.q[i] * b.q[i];
  return c;
}
KSL_INLINE V v_fnma(V a, V b, V c) {
  KSL_QUADS c.q[i] -= a.q[i] * b.q[i];
  return c;
}
// a where the mask is set, else b.
KSL_INLINE Quad choose(QuadMask mask, Quad a, Quad b) {
  return (Quad)((mask & (QuadMask)a) | (~mask & (QuadMask)b));
}
// The second operand where either is NaN.
KSL_INLINE V v_max(V a, V b) {
  KSL_QUADS a.q[i] = choose(a.q[i] > b.q[i], a.q[i], b.q[i]);
  return a;
}
KSL_INLINE V v_min(V a, V b) {
  KSL_QUADS a.q[i] = choose(a.q[i] < b.q[i], a.q[i], b.q[i]);
  return a;
}
KSL_INLINE float v_lane0(V a) {
  return a.q[0][0];
}
// Adds the halves (lane i and i + 8), then i and i + 4, then (0 + 1) + (2 + 3).
KSL_INLINE float v_hsum(V a) {
  const Quad h = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
  return (h[0] + h[1]) + (h[2] + h[3]);
}
KSL_INLINE float v_hmax(V a) {
  float x[16];
  v_store(x, a);
  float m = x[0];
  KSL_LANES m = x[i] > m ? x[i] : m;
  return m;
}

KSL_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
KSL_INLINE float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

// a * 2^n for integral lanes n in [-150, 128] and normal a: one rounding.
KSL_INLINE V v_scale2(V a, V n) {
  KSL_QUADS {
    // n + 1.5 * 2^23 has n in its low bits; a NaN gives anything, and the result stays NaN through
    // a.
    const Quad biased = n.q[i] + 12582912.0f;
    const QuadMask e = (QuadMask)biased - 0x4b400000, half = e >> 1;
    a.q[i] = a.q[i] * (Quad)((half + 127) << 23) * (Quad)((e - half + 127) << 23);
  }
  return a;
}

KSL_INLINE V v_load_bf16_n(const uint16_t *p, int n) {
  float x[16];
  KSL_LANES x[i] = i < n ? float_of((uint32_t)p[i] << 16) : 0.0f;
  return v_load(x);
}
KSL_INLINE V v_load_bf16(const uint16_t *p) {
  return v_load_bf16_n(p, 16);
}
KSL_INLINE void v_store_bf16_n(uint16_t *p, V a, int n) {
  float x[16];
  v_store(x, a);
  KSL_LANES if (i < n) {
    const uint32_t u = bits_of(x[i]);
    p[i] = x[i] == x[i] ? (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16)
                        : (uint16_t)((u >> 16) | 0x40);
  }
}
KSL_INLINE void v_store_bf16(uint16_t *p, V a) {
  v_store_bf16_n(p, a, 16);
}

// ---- integers

KSL_INLINE U u_load(const uint8_t *p) {
  U r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
KSL_INLINE void u_store(uint8_t *p, U a) {
  __builtin_memcpy(p, &a, sizeof a);
}
KSL_INLINE I i_set1(int32_t x) {
  const QuadMask q = {x, x, x, x};
  return {{q, q, q, q}};
}
KSL_INLINE I i_add(I a, I b) {
  KSL_QUADS a.q[i] += b.q[i];
  return a;
}
// acc + the dot product of the four bytes of each lane with x[0..3].
KSL_INLINE I i_dot(I acc, U w, const int8_t *x) {
  int32_t sum[16];
  KSL_LANES {
    const uint8_t *b = w.b + 4 * i;
    sum[i] = b[0] * x[0] + b[1] * x[1] + b[2] * x[2] + b[3] * x[3];
  }
  I r;
  __builtin_memcpy(&r, sum, sizeof r);
  return i_add(acc, r);
}
KSL_INLINE I i_dot_once(I acc, U w, const int8_t *x) {
  return i_dot(acc, w, x);
}
KSL_INLINE V v_of_int(I a) {
  V r;
  KSL_QUADS r.q[i] = __builtin_convertvector(a.q[i], Quad);
  return r;
}
// There is no quicker way here.
KSL_INLINE bool quantize_whole(const float *, QuantizedBlock *) {
  return false;
}
// Lanes are integers in [-127, 127].
KSL_INLINE void v_store_s8(int8_t *p, V a) {
  float x[16];
  v_store(x, a);
  KSL_LANES p[i] = (int8_t)x[i];
}
// Byte J of each lane, less kOffset.
template <int J>
KSL_INLINE V v_of_byte(const U &a) {
  float x[16];
  KSL_LANES x[i] = (float)(a.b[4 * i + J] - kOffset);
  return v_load(x);
}

// ---- decoders, for the 16 rows of a panel: columns 2 J and 2 J + 1 of a group, times kUnit; of
// small-integer encodings columns 4 J to 4 J + 3, times kUnit and plus kOffset, as bytes.

// Values of every code of the small floats.
struct SmallFloats {
  uint8_t e2m1[16], e2m3[64];  // kOffset plus 2 and 8 times the value
  float e4m3[256];

  // Sign, `exponents` bits of exponent and `mantissas` bits of mantissa.
  static constexpr float value(int code, int exponents, int mantissas, int bias) {
    const int e = code >> mantissas & ((1 << exponents) - 1), m = code & ((1 << mantissas) - 1);
    float x = (float)(e ? (1 << mantissas) + m : m);
    for (int i = (e ? e : 1) - bias - mantissas; i < 0; i++) x *= 0.5f;
    for (int i = (e ? e : 1) - bias - mantissas; i > 0; i--) x *= 2.0f;
    return code >> (exponents + mantissas) ? -x : x;
  }
  constexpr SmallFloats() : e2m1(), e2m3(), e4m3() {
    for (int i = 0; i < 16; i++) e2m1[i] = (uint8_t)(kOffset + 2 * value(i, 2, 1, 1));
    for (int i = 0; i < 64; i++) e2m3[i] = (uint8_t)(kOffset + 8 * value(i, 2, 3, 1));
    for (int i = 0; i < 256; i++)
      e4m3[i] = (i & 0x7f) == 0x7f ? __builtin_nanf("") : value(i, 4, 3, 7);
  }
};
constexpr SmallFloats kSmall;

struct NoAux {};

struct DecodeF32 {
  enum { kGroupBytes = 1024 };
  static constexpr float kUnit = 1.0f;
  static constexpr bool kBytes = false, kGroupScales = false;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    even = v_load((const float *)g + 32 * J);
    odd = v_load((const float *)g + 32 * J + 16);
  }
};

struct DecodeBf16 {
  enum { kGroupBytes = 512 };
  static constexpr float kUnit = 1.0f;
  static constexpr bool kBytes = false, kGroupScales = false;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    const uint16_t *p = (const uint16_t *)g + 32 * J;
    float x[16], y[16];
    KSL_LANES {
      x[i] = float_of((uint32_t)p[2 * i] << 16);
      y[i] = float_of((uint32_t)p[2 * i + 1] << 16);
    }
    even = v_load(x);
    odd = v_load(y);
  }
};

struct DecodeFp8 {
  enum { kGroupBytes = 256 };
  static constexpr float kUnit = 1.0f;
  static constexpr bool kBytes = false, kGroupScales = false;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE void pair(const uint8_t *g, Aux, V &even, V &odd) {
    float x[16], y[16];
    KSL_LANES {
      x[i] = kSmall.e4m3[g[32 * J + 2 * i]];
      y[i] = kSmall.e4m3[g[32 * J + 2 * i + 1]];
    }
    even = v_load(x);
    odd = v_load(y);
  }
};

struct DecodeE2m3 {
  enum { kGroupBytes = 192 };
  static constexpr float kUnit = 8.0f;
  static constexpr bool kBytes = true, kGroupScales = false;
  typedef NoAux Aux;
  KSL_INLINE Aux aux(const uint8_t *) { return {}; }
  template <int J>
  KSL_INLINE U bytes(const uint8_t *g) {
    U r;
    for (int i = 0; i < 64; i++) {
      const int code =
          J < 3 ? g[64 * J + i] : g[i] >> 6 | g[64 + i] >> 6 << 2 | g[128 + i] >> 6 << 4;
      r.b[i] = kSmall.e2m3[code & 63];
    }
    return r;
  }
};

struct DecodeNvfp4 {
  enum { kGroupBytes = 128 };
  static constexpr float kUnit = 2.0f;
  static constexpr bool kBytes = true, kGroupScales = true;
  typedef V Aux;
  KSL_INLINE Aux aux(const uint8_t *scales) {
    float x[16];
    KSL_LANES x[i] = kSmall.e4m3[scales[i] & 0x7f];
    return v_load(x);
  }
  template <int J>
  KSL_INLINE U bytes(const uint8_t *g) {
    U r;
    for (int i = 0; i < 64; i++) r.b[i] = kSmall.e2m1[g[64 * (J / 2) + i] >> (J % 2 * 4) & 15];
    return r;
  }
};

}  // namespace
}  // namespace ksl
