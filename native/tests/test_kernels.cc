// Checks one kernel table (argument: scalar, avx2 or avx512) against double-precision references on
// fresh inputs, and its determinism properties bit for bit. The optional second argument seeds the
// inputs. Prints what failed; exit status 1 then.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "../common/codec.h"
#include "../common/kv_row.h"
#include "../cpu/kernels.h"

using namespace ksl;

namespace {

typedef std::vector<float> Floats;

int failures = 0;

__attribute__((format(printf, 2, 3))) void check(bool good, const char *format, ...) {
  if (good) return;
  if (++failures > 20) return;
  va_list args;
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fputc('\n', stderr);
}

uint64_t random_state;

uint32_t random_bits() {
  uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (uint32_t)(z >> 32);
}
double uniform() {
  return random_bits() * 0x1p-32 * 2 - 1;
}
int below(int n) {
  return (int)(random_bits() % (uint32_t)n);
}

Floats random_floats(size_t n, double scale = 1) {
  Floats x(n);
  for (float &v : x) v = (float)(uniform() * scale);
  return x;
}

bool same_bits(const float *a, const float *b, size_t n) {
  return !memcmp(a, b, 4 * n);
}

// ---- matrices

struct Encoded {
  int encoding, rows, cols;
  std::vector<uint8_t> codes, scales;
  Floats globals;
  Floats values;  // decode_row of every row
};

// Random codes: every bit pattern may occur, except NaN, so that products stay comparable.
Encoded random_matrix(int encoding, int rows, int cols) {
  Encoded m = {encoding, rows, cols, {}, {}, {}, Floats((size_t)rows * cols)};
  const size_t n = (size_t)rows * cols, row_blocks = (rows + 127) / 128;
  const size_t blocks = row_blocks * ((cols + 127) / 128);
  if (encoding == KSL_ENC_F32) {
    const Floats x = random_floats(n);
    m.codes.resize(4 * n);
    memcpy(m.codes.data(), x.data(), 4 * n);
  } else if (encoding == KSL_ENC_BF16) {
    m.codes.resize(2 * n);
    for (size_t i = 0; i < n; i++) {
      const uint16_t v = f32_to_bf16((float)uniform());
      memcpy(&m.codes[2 * i], &v, 2);
    }
  } else {
    m.codes.resize(encoding == KSL_ENC_FP8 ? n : encoding == KSL_ENC_E2M3 ? n / 4 * 3 : n / 2);
    for (uint8_t &c : m.codes) {
      c = (uint8_t)random_bits();
      if (encoding == KSL_ENC_FP8 && (c & 0x7f) == 0x7f) c ^= 1;
    }
    if (encoding == KSL_ENC_FP8) {
      const Floats x = random_floats(blocks);
      m.scales.resize(4 * blocks);
      memcpy(m.scales.data(), x.data(), 4 * blocks);
    } else if (encoding == KSL_ENC_E2M3) {
      m.scales.resize(blocks);
      for (uint8_t &s : m.scales) s = (uint8_t)(117 + below(20));
    } else {
      m.scales.resize(n / 16);
      for (uint8_t &s : m.scales) s = (uint8_t)below(0x7f);
      m.globals = random_floats(row_blocks, 0.01);
    }
  }
  for (int r = 0; r < rows; r++)
    decode_row(encoding, m.codes.data(), m.scales.data(), m.globals.data(), rows, cols, r,
               &m.values[(size_t)r * cols]);
  return m;
}

// Storage of a packed matrix, aligned.
struct Packed {
  std::vector<uint8_t> bytes;
  Matrix w;

  explicit Packed(const Encoded &m) : bytes(matrix_bytes(m.encoding, m.rows, m.cols) + 64, 0xcd) {
    const MatrixSource source = {m.encoding,     m.rows,          m.cols,
                                 m.codes.data(), m.scales.data(), m.globals.data()};
    matrix_pack(&source, storage(), &w);
  }
  uint8_t *storage() { return bytes.data() + (64 - (uintptr_t)bytes.data() % 64) % 64; }
};

const char *const kEncodings[] = {"f32", "bf16", "fp8", "e2m3", "nvfp4"};

void test_packing(int encoding, int rows, int cols) {
  const Encoded m = random_matrix(encoding, rows, cols);
  Packed packed(m);
  Floats row(cols);
  for (int r = 0; r < rows; r++) {
    matrix_row(&packed.w, r, row.data());
    check(same_bits(row.data(), &m.values[(size_t)r * cols], cols), "%s %dx%d: matrix_row %d",
          kEncodings[encoding], rows, cols, r);
  }
  // By stripes, each a matrix of its own: the same bytes.
  std::vector<uint8_t> other(matrix_bytes(encoding, rows, cols) + 64, 0xab);
  uint8_t *storage = other.data() + (64 - (uintptr_t)other.data() % 64) % 64;
  Matrix w;
  matrix_begin(encoding, rows, cols, storage, &w);
  for (int r0 = 0; r0 < rows; r0 += 128) {
    const size_t row_codes = m.codes.size() / (size_t)rows, blocks = (size_t)(cols + 127) / 128;
    size_t scale_at = 0;
    if (encoding == KSL_ENC_FP8) scale_at = 4 * (r0 / 128) * blocks;
    if (encoding == KSL_ENC_E2M3) scale_at = (r0 / 128) * blocks;
    if (encoding == KSL_ENC_NVFP4) scale_at = (size_t)r0 * cols / 16;
    const MatrixSource stripe = {encoding,
                                 rows - r0 < 128 ? rows - r0 : 128,
                                 cols,
                                 m.codes.data() + r0 * row_codes,
                                 m.scales.data() + scale_at,
                                 m.globals.data() + (encoding == KSL_ENC_NVFP4 ? r0 / 128 : 0)};
    matrix_pack_rows(&stripe, r0, &w);
  }
  const size_t codes = (size_t)(packed.w.scales - packed.w.codes);
  check(!memcmp(w.codes, packed.w.codes, codes), "%s %dx%d: stripes give other codes",
        kEncodings[encoding], rows, cols);
  for (int r = 0; r < rows; r++) {
    matrix_row(&w, r, row.data());
    check(same_bits(row.data(), &m.values[(size_t)r * cols], cols), "%s %dx%d: stripes row %d",
          kEncodings[encoding], rows, cols, r);
  }
}

// A unit vector reads one weight: the kernels decode exactly what the codec does.
void test_decoding(const Kernels &k, int encoding, int rows, int cols) {
  const Encoded m = random_matrix(encoding, rows, cols);
  Packed packed(m);
  Floats x((size_t)cols * cols), y((size_t)cols * rows);
  for (int c = 0; c < cols; c++) x[(size_t)c * cols + c] = 1;
  for (const int n : {1, 2, 3, 4, cols}) {
    for (int c = 0; c + n <= cols; c += n)
      k.gemm(&packed.w, &x[(size_t)c * cols], cols, n, 0, rows, &y[(size_t)c * rows], rows);
    bool good = true;
    for (int c = 0; c < cols / n * n; c++)
      for (int r = 0; r < rows; r++)
        good = good && y[(size_t)c * rows + r] == m.values[(size_t)r * cols + c];
    check(good, "%s %dx%d by %d: decoded weights differ from the codec", kEncodings[encoding], rows,
          cols, n);
  }
}

// Every code, in every position of a group.
void test_all_codes(const Kernels &k, int encoding) {
  const int count = encoding == KSL_ENC_FP8 ? 256 : encoding == KSL_ENC_E2M3 ? 64 : 16;
  const int bits = encoding == KSL_ENC_FP8 ? 8 : encoding == KSL_ENC_E2M3 ? 6 : 4;
  Encoded m = random_matrix(encoding, count, 16);
  for (int r = 0; r < count; r++)
    for (int c = 0; c < 16; c++) {
      const int code = (r + 5 * c) % count;
      for (int b = 0; b < bits; b++) {
        const size_t at = ((size_t)r * 16 + c) * bits + b;
        uint8_t &byte = m.codes[at / 8];
        byte = (uint8_t)((byte & ~(1 << at % 8)) | (code >> b & 1) << at % 8);
      }
    }
  Packed packed(m);
  Floats y((size_t)count), row(16);
  for (int c = 0; c < 16; c++) {
    Floats x(16);
    x[c] = 1;
    k.gemm(&packed.w, x.data(), 16, 1, 0, count, y.data(), count);
    for (int r = 0; r < count; r++) {
      decode_row(encoding, m.codes.data(), m.scales.data(), m.globals.data(), count, 16, r,
                 row.data());
      bool nan = false;  // a NaN anywhere in a row reaches its output
      for (const float v : row) nan = nan || v != v;
      check(nan ? y[r] != y[r] : y[r] == row[c], "%s: row %d column %d gives %a, codec %a",
            kEncodings[encoding], r, c, y[r], row[c]);
    }
  }
}

void test_gemm(const Kernels &k, int encoding, int rows, int cols, int n) {
  const Encoded m = random_matrix(encoding, rows, cols);
  Packed packed(m);
  const size_t xs = (size_t)cols + 16 * below(3), ys = (size_t)rows + below(5);
  Floats x = random_floats(xs * n), y(ys * n, 7.0f);
  for (int c = 0; c < n; c++)  // what lies behind a column is not read
    for (size_t i = cols; i < xs; i++) x[c * xs + i] = NAN;
  k.gemm(&packed.w, x.data(), xs, n, 0, rows, y.data(), ys);
  for (int c = 0; c < n; c++)
    for (int r = 0; r < rows; r++) {
      double sum = 0, size = 0;
      for (int i = 0; i < cols; i++) {
        const double term = (double)m.values[(size_t)r * cols + i] * x[c * xs + i];
        sum += term;
        size += fabs(term);
      }
      check(fabs(y[c * ys + r] - sum) <= 1e-6 * size, "%s %dx%d by %d: [%d, %d] is %g, not %g",
            kEncodings[encoding], rows, cols, n, c, r, y[c * ys + r], sum);
    }
  for (int c = 0; c < n; c++)
    for (size_t r = rows; r < ys; r++) check(y[c * ys + r] == 7.0f, "gemm wrote behind its rows");
  // Any split of columns and rows gives the same bits.
  for (int round = 0; round < 4; round++) {
    Floats z(ys * n, 7.0f);
    for (int c = 0; c < n;) {
      const int width = round == 0 ? 1 : 1 + below(n - c);
      for (int r = 0; r < rows;) {
        int end = r + 16 * (1 + below(4));
        if (end > rows) end = rows;
        k.gemm(&packed.w, &x[c * xs], xs, width, r, end, &z[c * ys], ys);
        r = end;
      }
      c += width;
    }
    check(same_bits(y.data(), z.data(), y.size()), "%s %dx%d by %d: bits depend on the split",
          kEncodings[encoding], rows, cols, n);
  }
}

// ---- int8 activations

struct Quantized {
  std::vector<QuantizedBlock> blocks;
  size_t stride;  // more than the columns, of which nothing else is touched

  Quantized(const Kernels &k, const Floats &x, size_t xs, int cols, int n)
      : blocks(((size_t)n + 2) * (size_t)quantized_blocks(cols)), stride((size_t)n + 2) {
    memset((void *)blocks.data(), 0xcd, blocks.size() * sizeof(QuantizedBlock));
    for (int c = 0; c < n; c++) k.quantize(&x[c * xs], cols, &blocks[c], stride);
    for (int b = 0; b < quantized_blocks(cols); b++)
      check(blocks[b * stride + n].groups[0] == (int32_t)0xcdcdcdcd, "quantize wrote beside it");
  }
  const QuantizedBlock &of(int c, int i) const { return blocks[i / kScaleBlock * stride + c]; }
  int code(int c, int i) const { return of(c, i).codes[i % kScaleBlock]; }
  float scale(int c, int i) const { return of(c, i).scales[i % kScaleBlock / kActBlock]; }
};

void test_quantize(const Kernels &k, int cols) {
  Floats x = random_floats(cols, exp(8 * uniform()));
  const int B = kActBlock, blocks = (cols + 127) / 128 * 128 / B;
  for (int i = 0; i < cols; i++)
    if (i / B % 3 == 1) x[i] = (float)(i % 5 ? 0 : uniform() * 1e-35);  // nothing, or near it
  Quantized made(k, x, cols, cols, 1);
  for (int b = 0; b < blocks; b++) {
    float most = 0;
    for (int i = B * b; i < cols && i < B * b + B; i++) most = fmaxf(most, fabsf(x[i]));
    int sum = 0;
    for (int i = B * b; i < B * b + B; i++) {
      const double value = i < cols ? x[i] : 0, step = most / 127.0;
      const int code = made.code(0, i);
      const float scale = made.scale(0, i);
      sum += code;
      check(abs(code) <= 127, "quantize: code %d", code);
      if (most > 1e-30f)
        check(fabs(code * (double)scale - value) <= step * 0.50001,
              "quantize %d: [%d] is %d times %g, not %g", cols, i, code, scale, value);
      else
        check(code == 0 && scale == 0, "quantize: a block of nothing is %d times %g", code, scale);
      if (i % 16 == 15) {
        int part = 0;
        for (int j = i - 15; j <= i; j++) part += made.code(0, j);
        check(made.of(0, i).groups[i % 128 / 16] == -64 * part, "quantize %d: group sum %d", cols,
              i / 16);
      }
    }
    check(made.of(0, B * b).blocks[B * b % 128 / B] == -64 * sum, "quantize %d: block sum %d", cols,
          b);
  }
  const Quantized plain(*kernels_for(KSL_ISA_SCALAR), x, cols, cols, 1);
  check(
      !memcmp(made.blocks.data(), plain.blocks.data(), made.blocks.size() * sizeof made.blocks[0]),
      "quantize %d: other bits than the scalar path", cols);
  for (const float bad : {(float)NAN, (float)INFINITY, (float)-INFINITY}) {
    Floats y = x;
    y[below(cols)] = bad;
    Quantized other(k, y, cols, cols, 1);
    int nans = 0;
    for (int b = 0; b < blocks; b++) nans += other.scale(0, B * b) != other.scale(0, B * b);
    check(nans == 1, "quantize: %g gives %d NaN blocks", bad, nans);
  }
}

void test_gemm_int(const Kernels &k, int encoding, int rows, int cols, int n) {
  const Encoded m = random_matrix(encoding, rows, cols);
  Packed packed(m);
  const size_t ys = (size_t)rows + below(5);
  const Floats x = random_floats((size_t)cols * n);
  Quantized q(k, x, cols, cols, n);
  Floats y(ys * n, 7.0f);
  k.gemm_int(&packed.w, q.blocks.data(), q.stride, n, 0, rows, y.data(), ys);
  for (int c = 0; c < n; c++) {
    for (int r = 0; r < rows; r++) {
      double sum = 0, size = 0;
      for (int i = 0; i < cols; i++) {
        const double value = q.code(c, i) * (double)q.scale(c, i);
        const double term = (double)m.values[(size_t)r * cols + i] * value;
        sum += term;
        size += fabs(term);
      }
      check(fabs(y[c * ys + r] - sum) <= 1e-6 * size, "%s %dx%d by %d: int [%d, %d] is %g, not %g",
            kEncodings[encoding], rows, cols, n, c, r, y[c * ys + r], sum);
    }
    for (size_t r = rows; r < ys; r++)
      check(y[c * ys + r] == 7.0f, "gemm_int wrote behind its rows");
  }
  for (int round = 0; round < 4; round++) {
    Floats z(ys * n, 7.0f);
    for (int c = 0; c < n;) {
      const int width = round == 0 ? 1 : 1 + below(n - c);
      for (int r = 0; r < rows;) {
        int end = r + 16 * (1 + below(4));
        if (end > rows) end = rows;
        k.gemm_int(&packed.w, &q.blocks[c], q.stride, width, r, end, &z[c * ys], ys);
        r = end;
      }
      c += width;
    }
    check(same_bits(y.data(), z.data(), y.size()), "%s %dx%d by %d: int bits depend on the split",
          kEncodings[encoding], rows, cols, n);
  }
}

// ---- bf16 activations

struct Rounded {
  std::vector<RoundedBlock> blocks;
  size_t stride;  // more than the columns, of which nothing else is touched

  Rounded(const Bf16Kernels &k, const Floats &x, int cols, int n)
      : blocks(((size_t)n + 2) * (size_t)quantized_blocks(cols), RoundedBlock{}),
        stride((size_t)n + 2) {
    for (RoundedBlock &block : blocks) memset((void *)&block, 0xcd, sizeof block);
    for (int c = 0; c < n; c++) k.round(&x[c * (size_t)cols], cols, &blocks[c], stride);
    for (int b = 0; b < quantized_blocks(cols); b++)
      check(blocks[b * stride + n].values[0] == 0xcdcd, "round wrote beside it");
  }
  float value(int c, int i) const {
    const uint32_t bits = (uint32_t)blocks[i / 128 * stride + c].values[i % 128] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
};

void test_round(const Bf16Kernels &k, int cols) {
  Floats x = random_floats(cols, exp(8 * uniform()));
  x[below(cols)] = 1.00390625f;  // a tie: to even, which is 1
  const Rounded made(k, x, cols, 1);
  for (int i = 0; i < quantized_blocks(cols) * 128; i++) {
    const double value = i < cols ? x[i] : 0;
    check(fabs(made.value(0, i) - value) <= fabs(value) * 0x1p-8, "round %d: [%d] is %g, not %g",
          cols, i, made.value(0, i), value);
    if (value == 1.00390625) check(made.value(0, i) == 1.0f, "round: a tie is not to even");
  }
  for (const float bad : {(float)NAN, (float)INFINITY, (float)-INFINITY}) {
    Floats y = x;
    const int at = below(cols);
    y[at] = bad;
    const float found = Rounded(k, y, cols, 1).value(0, at);
    check(bad != bad ? found != found : found == bad, "round: %g becomes %g", bad, found);
  }
}

// The sums of the table's own product, and of doubles, of the same rounded columns.
void test_gemm_bf16(const Kernels &table, const Bf16Kernels &k, int rows, int cols, int n) {
  const Encoded m = random_matrix(KSL_ENC_BF16, rows, cols);
  Packed packed(m);
  const size_t ys = (size_t)rows + below(5);
  const Floats x = random_floats((size_t)cols * n);
  const Rounded rounded(k, x, cols, n);
  Floats y(ys * n, 7.0f), values((size_t)cols * n), plain(ys * n);
  for (int c = 0; c < n; c++)
    for (int i = 0; i < cols; i++) values[c * (size_t)cols + i] = rounded.value(c, i);
  k.gemm(&packed.w, rounded.blocks.data(), rounded.stride, n, 0, rows, y.data(), ys);
  table.gemm(&packed.w, values.data(), cols, n, 0, rows, plain.data(), ys);
  for (int c = 0; c < n; c++) {
    for (int r = 0; r < rows; r++) {
      double sum = 0, size = 0;
      for (int i = 0; i < cols; i++) {
        const double term = (double)m.values[(size_t)r * cols + i] * values[c * (size_t)cols + i];
        sum += term;
        size += fabs(term);
      }
      const float found = y[c * ys + r];
      check(fabs(found - sum) <= 2e-6 * size && fabs(found - plain[c * ys + r]) <= 2e-6 * size,
            "bf16 %dx%d by %d: [%d, %d] is %g, not %g", rows, cols, n, c, r, found, sum);
    }
    for (size_t r = rows; r < ys; r++) check(y[c * ys + r] == 7.0f, "gemm wrote behind its rows");
  }
  for (int round = 0; round < 4; round++) {
    Floats z(ys * n, 7.0f);
    for (int c = 0; c < n;) {
      const int width = round == 0 ? 1 : 1 + below(n - c);
      for (int r = 0; r < rows;) {
        int end = r + 16 * (1 + below(6));
        if (end > rows) end = rows;
        k.gemm(&packed.w, &rounded.blocks[c], rounded.stride, width, r, end, &z[c * ys], ys);
        r = end;
      }
      c += width;
    }
    check(same_bits(y.data(), z.data(), y.size()), "bf16 %dx%d by %d: bits depend on the split",
          rows, cols, n);
  }
}

// Extremes: every weight code against activations of one code, where 16-bit sums would overflow.
void test_int_extremes(const Kernels &k, int encoding) {
  const int count = encoding == KSL_ENC_E2M3 ? 64 : 16;
  for (int code = 0; code < count; code++) {
    Encoded m = random_matrix(encoding, 16, 128);
    const int bits = encoding == KSL_ENC_E2M3 ? 6 : 4;
    for (size_t i = 0; i < 16 * 128 * (size_t)bits; i++) {
      const int bit = code >> i % bits & 1;
      m.codes[i / 8] = (uint8_t)((m.codes[i / 8] & ~(1 << i % 8)) | bit << i % 8);
    }
    Packed packed(m);
    Floats row(128), x(128, 1.0f), y(16), z(16);
    if (code % 2) x.assign(128, -1.0f);
    Quantized q(k, x, 128, 128, 1);
    k.gemm_int(&packed.w, q.blocks.data(), q.stride, 1, 0, 16, y.data(), 16);
    for (int r = 0; r < 16; r++) {
      decode_row(encoding, m.codes.data(), m.scales.data(), m.globals.data(), 16, 128, r,
                 row.data());
      double sum = 0, size = 0;
      for (int i = 0; i < 128; i++) {
        sum += (double)row[i] * x[i];
        size += fabs((double)row[i]);
      }
      check(fabs(y[r] - sum) <= 1e-6 * size, "%s code %d: %g, not %g", kEncodings[encoding], code,
            y[r], sum);
    }
  }
}

// ---- norms and element-wise kernels

double ulps(double value, double expected) {
  if (value == expected) return 0;
  int e;
  frexp(expected, &e);
  return fabs(value - expected) / ldexp(1.0, (e < -125 ? -125 : e) - 24);
}

double sigmoid(double x) {
  return 1 / (1 + exp(-x));
}

void test_functions(const Kernels &k) {
  // x * sigmoid(g) with x = 1, and silu(g) * 1, over the whole range of floats.
  Floats gates = {0.0f,     -0.0f,    1e-40f,    -1e-40f, 1e-30f,  1e4f,    -1e4f,
                  88.5f,    -88.5f,   -87.4f,    -103.0f, -104.5f, -150.0f, 3.4e38f,
                  -3.4e38f, INFINITY, -INFINITY, 16.0f,   -16.0f,  0.5f};
  for (int i = 0; i < 20000; i++) gates.push_back((float)(uniform() * (i % 2 ? 100 : 4)));
  const int n = (int)gates.size();
  Floats ones(n, 1.0f), s(n, 1.0f), silu(n);
  k.sigmoid_mul(s.data(), gates.data(), n);
  k.silu_mul(gates.data(), ones.data(), n, silu.data());
  for (int i = 0; i < n; i++) {
    const double g = gates[i], t = sigmoid(g);
    // Below the range of e^-x in float32 the result is 0 or close to it.
    if (g > -87)
      check(ulps(s[i], t) <= 3, "sigmoid(%a) = %a, %.2f ulp", gates[i], s[i], ulps(s[i], t));
    else
      check(s[i] >= 0 && s[i] <= 1e-37f, "sigmoid(%a) = %a", gates[i], s[i]);
    if (g == INFINITY)
      check(silu[i] == INFINITY, "silu(inf) = %a", silu[i]);
    else if (g > -87)
      check(ulps(silu[i], g * t) <= 3, "silu(%a) = %a, %.2f ulp", gates[i], silu[i],
            ulps(silu[i], g * t));
    else
      check(silu[i] <= 0 && silu[i] >= -1e-35f, "silu(%a) = %a", gates[i], silu[i]);
  }
  // Combining a tile of maximum x into one of maximum 0 scales its accumulator by 2^x.
  for (int i = 0; i < 20000; i++) {
    const float x = (float)((uniform() - 1) * (i % 2 ? 43 : 2)), tile = 1;
    float m = 0, l = 1, acc = 0;
    k.attn.combine(&m, &l, &acc, x, 1, &tile, 1);
    check(ulps(acc, exp2((double)x)) <= 1.25, "exp2(%a) = %a, %.2f ulp", x, acc,
          ulps(acc, exp2((double)x)));
  }
  float nan = NAN, one = 1;
  k.sigmoid_mul(&one, &nan, 1);
  check(one != one, "sigmoid(nan) is not nan");
  one = 1;
  k.silu_mul(&nan, &one, 1, &one);
  check(one != one, "silu(nan) is not nan");
}

void close_to(float value, double expected, double scale, const char *what, int n, int i) {
  check(fabs(value - expected) <= 2e-6 * (fabs(expected) + scale), "%s of %d: [%d] is %g, not %g",
        what, n, i, value, expected);
}

void test_norms(const Kernels &k, int n) {
  const Floats x = random_floats(n, 3), gain = random_floats(n, 2), z = random_floats(n, 6);
  const float guard = 42.0f;
  Floats out(n + 1, guard);
  double square = 0;
  for (const float v : x) square += (double)v * v;
  const double rms = 1 / sqrt(square / n + 1e-6), l2 = 1 / sqrt(square + 1e-6);
  k.rmsnorm(x.data(), gain.data(), n, 1e-6f, out.data());
  for (int i = 0; i < n; i++) close_to(out[i], x[i] * rms * gain[i], 0, "rmsnorm", n, i);
  k.l2norm(x.data(), n, 1e-6f, 0.125f, out.data());
  for (int i = 0; i < n; i++) close_to(out[i], x[i] * l2 * 0.125, 0, "l2norm", n, i);
  k.gated_norm(x.data(), gain.data(), z.data(), n, 1e-6f, out.data());
  for (int i = 0; i < n; i++)
    close_to(out[i], x[i] * rms * gain[i] * z[i] * sigmoid(z[i]), 0, "gated_norm", n, i);
  k.silu_mul(x.data(), z.data(), n, out.data());
  for (int i = 0; i < n; i++) close_to(out[i], x[i] * sigmoid(x[i]) * z[i], 0, "silu_mul", n, i);
  Floats y(x);
  y.push_back(guard);
  k.sigmoid_mul(y.data(), z.data(), n);
  for (int i = 0; i < n; i++) close_to(y[i], x[i] * sigmoid(z[i]), 0, "sigmoid_mul", n, i);
  memcpy(y.data(), x.data(), 4 * (size_t)n);
  k.add(y.data(), z.data(), n);
  for (int i = 0; i < n; i++) check(y[i] == x[i] + z[i], "add of %d: [%d]", n, i);
  const size_t stride = n + 3;
  const Floats taps = random_floats(4 * stride), history = random_floats(4 * (size_t)n);
  const float *window[4];
  for (int j = 0; j < 4; j++) window[j] = &history[(size_t)j * n];
  k.conv_silu(window, taps.data(), stride, n, out.data());
  for (int i = 0; i < n; i++) {
    double sum = 0;
    for (int j = 0; j < 4; j++) sum += (double)taps[j * stride + i] * window[j][i];
    close_to(out[i], sum * sigmoid(sum), 1, "conv_silu", n, i);
  }
  Floats moved(3 * stride, guard), stepped(n + 1, guard);
  for (int j = 0; j < 3; j++) memcpy(&moved[j * stride], window[j], sizeof(float) * (size_t)n);
  k.conv_step(window[3], taps.data(), stride, n, moved.data(), n % 2 ? window[0] : nullptr,
              stepped.data());
  check(same_bits(stepped.data(), out.data(), (size_t)n + 1), "conv_step of %d differs", n);
  for (int j = 0; j < 3; j++)
    check(same_bits(&moved[j * stride], window[j + 1], (size_t)n) &&
              moved[j * stride + (size_t)n] == guard,
          "conv_step of %d: history %d", n, j);
  check(out[n] == guard && y[n] == guard, "an element-wise kernel of %d wrote behind its end", n);
  // In place gives the same bits.
  Floats a(n), b(x);
  k.rmsnorm(x.data(), gain.data(), n, 1e-6f, a.data());
  k.rmsnorm(b.data(), gain.data(), n, 1e-6f, b.data());
  check(same_bits(a.data(), b.data(), n), "rmsnorm of %d in place differs", n);
}

void test_rope(const Kernels &k, int half) {
  const int dim = 2 * half + 8;
  const Floats x = random_floats(dim);
  Floats c(half), s(half), y(x);
  for (int i = 0; i < half; i++) {
    const double angle = uniform() * 10;
    c[i] = (float)cos(angle);
    s[i] = (float)sin(angle);
  }
  k.rope(y.data(), c.data(), s.data(), half);
  for (int i = 0; i < half; i++) {
    const double a = x[i], b = x[half + i];
    close_to(y[i], a * c[i] - b * s[i], 1, "rope", half, i);
    close_to(y[half + i], b * c[i] + a * s[i], 1, "rope", half, half + i);
  }
  check(same_bits(&y[2 * half], &x[2 * half], 8), "rope of %d touched the rest", half);
}

// ---- delta rule

struct ScanCase {
  int n, dk, dv;
  size_t qk_stride, v_stride, out_stride, g_stride;
  Floats q, k, v, decay, beta, state;
};

ScanCase random_scan(int n, int dk, int dv) {
  ScanCase s;
  s.n = n, s.dk = dk, s.dv = dv;
  s.qk_stride = dk + 4, s.v_stride = dv + 3, s.out_stride = dv + 1, s.g_stride = 3;
  s.q = random_floats(n * s.qk_stride, 1 / sqrt(dk));
  s.k = random_floats(n * s.qk_stride, 1 / sqrt(dk));
  s.v = random_floats(n * s.v_stride);
  s.decay = random_floats(n * s.g_stride);
  s.beta = random_floats(n * s.g_stride);
  for (float &x : s.decay) x = 0.5f + 0.5f * fabsf(x);
  for (float &x : s.beta) x = fabsf(x);
  s.state = random_floats((size_t)dk * dv);
  return s;
}

// Tokens [t0, t1) for value columns [v0, v0 + nv).
void run_scan(const Kernels &k, const ScanCase &s, int t0, int t1, int v0, int nv, Floats &out,
              const Floats &state, Floats *after, int n_cuts = 0, const int *cut_at = nullptr,
              float *const *cut_state = nullptr, float *delta = nullptr) {
  k.delta_scan(&s.q[t0 * s.qk_stride], &s.k[t0 * s.qk_stride], s.qk_stride,
               &s.v[t0 * s.v_stride + v0], &out[t0 * s.out_stride + v0], s.v_stride, s.out_stride,
               &s.decay[t0 * s.g_stride], &s.beta[t0 * s.g_stride], s.g_stride, t1 - t0, s.dk, s.dv,
               nv, &state[v0], after ? &(*after)[v0] : nullptr,
               delta ? delta + t0 * s.v_stride + v0 : nullptr, s.v_stride, n_cuts, cut_at,
               cut_state);
}

void test_scan(const Kernels &k, int n, int dk, int dv) {
  const ScanCase s = random_scan(n, dk, dv);
  std::vector<double> state(s.state.begin(), s.state.end());
  std::vector<double> expected((size_t)n * dv);
  for (int t = 0; t < n; t++) {
    const float *q = &s.q[t * s.qk_stride], *key = &s.k[t * s.qk_stride];
    for (int c = 0; c < dv; c++) {
      double pred = 0, o = 0;
      for (int i = 0; i < dk; i++) pred += key[i] * (state[i * dv + c] *= s.decay[t * s.g_stride]);
      const double d = s.beta[t * s.g_stride] * (s.v[t * s.v_stride + c] - pred);
      for (int i = 0; i < dk; i++) o += q[i] * (state[i * dv + c] += key[i] * d);
      expected[(size_t)t * dv + c] = o;
    }
  }
  Floats whole(n * s.out_stride, 9.0f), after(s.state);
  for (int v0 = 0; v0 < dv; v0 += 32)
    run_scan(k, s, 0, n, v0, dv - v0 < 32 ? dv - v0 : 32, whole, after, &after);
  for (int t = 0; t < n; t++) {
    for (int c = 0; c < dv; c++)
      close_to(whole[t * s.out_stride + c], expected[(size_t)t * dv + c], 1, "delta_scan", n, t);
    check(whole[t * s.out_stride + dv] == 9.0f, "delta_scan wrote behind its columns");
  }
  for (size_t i = 0; i < after.size(); i++)
    close_to(after[i], state[i], 1, "delta_scan state", n, (int)i);
  // Any cutting of the row, any split of columns, and cuts: the same bits.
  for (int round = 0; round < 3; round++) {
    Floats out(n * s.out_stride, 9.0f), cut(s.state);
    for (int v0 = 0; v0 < dv;) {
      int nv = round == 0 ? 1 : 1 + below(32);
      if (nv > dv - v0) nv = dv - v0;
      for (int t = 0; t < n;) {
        const int end = round == 0 ? t + 1 : t + 1 + below(n - t);
        run_scan(k, s, t, end, v0, nv, out, cut, &cut);
        t = end;
      }
      v0 += nv;
    }
    check(same_bits(out.data(), whole.data(), out.size()) &&
              same_bits(cut.data(), after.data(), cut.size()),
          "delta_scan %d x %d x %d: bits depend on the cutting", n, dk, dv);
  }
  for (int round = 0; round < 2; round++) {
    Floats out(n * s.out_stride, 9.0f), state_after(s.state);
    for (int v0 = 0, nv; v0 < dv; v0 += nv) {
      nv = round == 0 ? dv : 1 + below(dv - v0);
      for (int t = 0; t < n; t++)
        k.delta_step(&s.q[t * s.qk_stride], &s.k[t * s.qk_stride], &s.v[t * s.v_stride + v0],
                     &out[t * s.out_stride + v0], s.decay[t * s.g_stride], s.beta[t * s.g_stride],
                     dk, dv, nv, &state_after[v0], t % 2 ? nullptr : &state_after[v0]);
    }
    check(same_bits(out.data(), whole.data(), out.size()) &&
              same_bits(state_after.data(), after.data(), after.size()),
          "delta_step %d x %d x %d: other bits than delta_scan", n, dk, dv);
  }
  // A replay of any prefix: the bits of the scan.
  Floats delta(n * s.v_stride, 9.0f);
  for (int kept : {n, 1 + below(n)}) {
    Floats out(n * s.out_stride), untouched(s.state), scanned(s.state), replayed(s.state);
    Floats elsewhere(s.state.size());
    for (int v0 = 0; v0 < dv;) {
      int nv = 1 + below(32);
      if (nv > dv - v0) nv = dv - v0;
      run_scan(k, s, 0, n, v0, nv, out, untouched, &elsewhere, 0, nullptr, nullptr, delta.data());
      run_scan(k, s, 0, kept, v0, nv, out, scanned, &scanned);
      k.delta_replay(s.k.data(), s.qk_stride, &delta[v0], s.v_stride, s.decay.data(), s.g_stride,
                     kept, dk, dv, nv, &replayed[v0]);
      v0 += nv;
    }
    check(same_bits(scanned.data(), replayed.data(), scanned.size()),
          "delta_replay of %d of %d tokens differs from the scan", kept, n);
    check(same_bits(untouched.data(), s.state.data(), s.state.size()),
          "delta_scan with deltas changed the state");
    check(same_bits(elsewhere.data(), after.data(), after.size()),
          "delta_scan of %d tokens leaves another state elsewhere", n);
    check(delta[dv] == 9.0f, "delta_scan wrote corrections behind its columns");
  }
  int cut_at[3] = {1, 1 + n / 2, n};
  Floats snapshots[3] = {Floats((size_t)dk * dv), Floats((size_t)dk * dv), Floats((size_t)dk * dv)};
  Floats untouched(s.state), out(n * s.out_stride, 9.0f);
  const int cuts = n >= 4 ? 3 : 1;
  for (int v0 = 0; v0 < dv; v0 += 32) {
    float *const at[3] = {&snapshots[0][v0], &snapshots[1][v0], &snapshots[2][v0]};
    run_scan(k, s, 0, n, v0, dv - v0 < 32 ? dv - v0 : 32, out, untouched, nullptr, cuts, cut_at,
             at);
  }
  check(same_bits(untouched.data(), s.state.data(), s.state.size()),
        "delta_scan changed a state that it only reads");
  for (int i = 0; i < cuts; i++) {
    Floats prefix(s.state);
    for (int v0 = 0; v0 < dv; v0 += 32)
      run_scan(k, s, 0, cut_at[i], v0, dv - v0 < 32 ? dv - v0 : 32, out, prefix, &prefix);
    check(same_bits(prefix.data(), snapshots[i].data(), prefix.size()),
          "delta_scan: cut after %d of %d differs from that prefix", cut_at[i], n);
  }
}

// ---- attention

// Rows of one KV head in every plane of a pool, with room between them that nothing may touch.
struct KvRows {
  int format, keys;
  KvRow bytes;
  std::vector<uint8_t> plane[4];
  Floats k, v;  // what they decode to

  size_t step(int p) const { return size(p) + 24; }
  int size(int p) const {
    const int sizes[] = {bytes.k, bytes.k_scale, bytes.v, bytes.v_scale};
    return sizes[p];
  }
  KvRows(int format, int head_dim, int keys)
      : format(format), keys(keys), bytes(kv_row(format, head_dim)) {
    for (int p = 0; p < 4; p++) plane[p].assign(keys * step(p), 0xff);
    k.resize((size_t)keys * head_dim);
    v.resize(k.size());
    for (int j = 0; j < keys; j++) {
      for (int side = 0; side < 2; side++) {
        Floats x = random_floats(head_dim, 2);
        if (below(4) == 0) x[below(head_dim)] = 60;
        uint8_t *codes = &plane[2 * side][j * step(2 * side)];
        uint8_t *scales = &plane[2 * side + 1][j * step(2 * side + 1)];
        kv_encode(format, side, x.data(), head_dim, codes, scales);
        kv_decode(format, side, codes, scales, head_dim, &(side ? v : k)[(size_t)j * head_dim]);
      }
    }
  }
  KvRun run(int from, int n) const {
    return {format,
            n,
            &plane[0][from * step(0)],
            &plane[1][from * step(1)],
            &plane[2][from * step(2)],
            &plane[3][from * step(3)],
            step(0),
            step(1),
            step(2),
            step(3)};
  }
};

// What the table of narrow products reads as codes: rows other than those of bf16, which have codes
// beside them, and of float32.
bool reads_codes(const AttnKernels &k, int format, int head_dim) {
  return !strcmp(k.name, "codes") && format != KSL_KV_F32 && format != KSL_KV_BF16 &&
         head_dim % 32 == 0;
}

// It reads e4m3, and all values, as int8 of their row: code times this. side: 0 keys, 1 values.
float row_unit(const KvRows &rows, int side, int j) {
  const uint8_t *at = &rows.plane[2 * side + 1][j * rows.step(2 * side + 1)];
  if (rows.format == KSL_KV_FP8 || rows.format == KSL_KV_Q4) {
    float scale;
    memcpy(&scale, at, 4);
    return scale * (448.0f / 127);
  }
  float top = 0;
  for (int i = 0; i < rows.size(2 * side + 1); i += 2) {
    uint16_t half;
    memcpy(&half, at + i, 2);
    top = fmaxf(top, f16_to_f32(half));
  }
  return rows.format == KSL_KV_INT8_G64 ? top : top * (7.0f / 127);
}
float value_unit(const KvRows &rows, int j) {
  return row_unit(rows, 1, j);
}

// Keys as they meet queries then.
Floats keys_as_read(const KvRows &rows, int head_dim) {
  Floats k = rows.k;
  for (int j = 0; rows.format == KSL_KV_FP8 && j < rows.keys; j++) {
    const float unit = row_unit(rows, 0, j);
    for (int i = 0; i < head_dim; i++) {
      float &x = k[(size_t)j * head_dim + i];
      x = nearbyintf(x / unit) * unit;
    }
  }
  return k;
}

struct Running {
  Floats m, l, acc;
  Running(int queries, int head_dim)
      : m(queries, -INFINITY), l(queries), acc((size_t)queries * head_dim, NAN) {}
};

// Runs of random lengths over the keys [from, to), which are one tile.
std::vector<KvRun> cut_tile(const KvRows &rows, int from, int to) {
  std::vector<KvRun> runs;
  while (from < to) {
    const int n = 1 + below(to - from);
    runs.push_back(rows.run(from, n));
    from += n;
  }
  return runs;
}

// Results over all keys for columns of which the last sees all and each one less than the next.
Running attend(const AttnKernels &k, const KvRows &rows, const float *q, int group, int columns,
               int head_dim, uint8_t *scratch) {
  Running all(group * columns, head_dim);
  for (int j0 = 0; j0 < rows.keys; j0 += kTileKeys) {
    const int n = rows.keys - j0 < kTileKeys ? rows.keys - j0 : (int)kTileKeys;
    const std::vector<KvRun> runs = cut_tile(rows, j0, j0 + n);
    const int after = rows.keys - j0 - n < kTileKeys ? rows.keys - j0 - n : (int)kTileKeys;
    const std::vector<KvRun> next = cut_tile(rows, j0 + n, j0 + n + after);
    std::vector<int> n_keys(columns);
    for (int c = 0; c < columns; c++) {
      const int sees = rows.keys - (columns - 1 - c) - j0;
      n_keys[c] = sees < n ? sees : n;
    }
    k.tile(runs.data(), (int)runs.size(), next.data(), (int)next.size(), q, group, columns,
           n_keys.data(), head_dim, scratch, all.m.data(), all.l.data(), all.acc.data());
  }
  return all;
}

void test_attention(const AttnKernels &k, int format, int group, int columns, int head_dim,
                    int keys) {
  const int queries = group * columns;
  const size_t d = head_dim;
  const bool codes = reads_codes(k, format, head_dim);
  const KvRows rows(format, head_dim, keys);
  const Floats read = codes ? keys_as_read(rows, head_dim) : rows.k;
  const Floats q = random_floats(queries * d, 2);
  Floats prepared(queries * d);
  const float scale = (float)(1 / sqrt(head_dim));
  for (int h = 0; h < queries; h++) k.query(format, &q[h * d], head_dim, scale, &prepared[h * d]);
  std::vector<uint8_t> bytes(attn_scratch_bytes(head_dim) + 64, 0xff);  // NaN wherever it is read
  uint8_t *scratch = bytes.data() + (64 - (uintptr_t)bytes.data() % 64) % 64;
  const Running all = attend(k, rows, prepared.data(), group, columns, head_dim, scratch);
  for (int h = 0; h < queries; h++) {
    const int sees = keys - (columns - 1 - h / group);
    std::vector<double> p(keys), expected(head_dim), reach(head_dim);
    double most = -INFINITY, sum = 0;
    for (int j = 0; j < sees; j++) {
      double dot = 0;
      for (int i = 0; i < head_dim; i++) dot += (double)q[h * d + i] * scale * read[j * d + i];
      p[j] = dot;
      most = dot > most ? dot : most;
    }
    for (int j = 0; j < sees; j++) sum += (p[j] = exp2(p[j] - most));
    for (int j = 0; j < sees; j++)
      for (int i = 0; i < head_dim; i++) {
        expected[i] += p[j] / sum * rows.v[j * d + i];
        reach[i] += p[j] / sum * fabs(rows.v[j * d + i]);
      }
    // Values read as codes are off by half a code, probabilities by half of 1/255 of the most that
    // a key of the tile adds.
    std::vector<double> slack(head_dim);
    for (int j0 = 0; codes && j0 < sees; j0 += kTileKeys) {
      double adds = 0;
      const int end = j0 + kTileKeys < sees ? j0 + kTileKeys : sees;
      for (int j = j0; j < end; j++) adds = fmax(adds, p[j] / sum * value_unit(rows, j));
      for (int j = j0; j < end; j++)
        for (int i = 0; i < head_dim; i++)
          slack[i] += 0.51 * p[j] / sum * value_unit(rows, j) +
                      0.51 / 255 * adds * (fabs(rows.v[j * d + i]) / value_unit(rows, j) + 0.5);
    }
    Floats out(head_dim);
    k.finish(&all.acc[h * d], all.l[h], head_dim, out.data());
    // Queries in bytes move scores, and so probabilities: a share of what is summed.
    for (int i = 0; i < head_dim; i++) {
      if (codes)
        check(fabs(out[i] - expected[i]) <= 0.1 * reach[i] + slack[i] + 1e-6,
              "attention on codes: format %d, head %d of %d, channel %d: %a, not %a", format, h,
              queries, i, out[i], expected[i]);
      else
        close_to(out[i], expected[i], 4 + 4 * reach[i], "attention", keys, i);
    }
    // A head alone, that sees the same keys, gives the same bits.
    if (sees < keys && h % 3) continue;
    KvRows seen = rows;
    seen.keys = sees;
    const Running one = attend(k, seen, &prepared[h * d], 1, 1, head_dim, scratch);
    check(one.m[0] == all.m[h] && one.l[0] == all.l[h] &&
              same_bits(one.acc.data(), &all.acc[h * d], head_dim),
          "attention: format %d, head %d of %d depends on its neighbours", format, h, queries);
  }
}

// One key: its probability is 1, so the result is the value row; a unit query reads the key row.
void test_kv_reading(const AttnKernels &k, int format, int head_dim) {
  const KvRows rows(format, head_dim, 1);
  const bool codes = reads_codes(k, format, head_dim);
  const Floats read = codes ? keys_as_read(rows, head_dim) : rows.k;
  std::vector<uint8_t> bytes(attn_scratch_bytes(head_dim) + 64, 0xff);
  uint8_t *scratch = bytes.data() + (64 - (uintptr_t)bytes.data() % 64) % 64;
  // Scores of codes carry the logarithm of what codes of values are multiplied by: that of a query
  // of zeros is nothing else.
  float unit_log = 0;
  if (codes) {
    Floats q(head_dim), prepared(head_dim);
    k.query(format, q.data(), head_dim, 1, prepared.data());
    Running all(1, head_dim);
    const KvRun run = rows.run(0, 1);
    const int n_keys[] = {1};
    k.tile(&run, 1, nullptr, 0, prepared.data(), 1, 1, n_keys, head_dim, scratch, all.m.data(),
           all.l.data(), all.acc.data());
    unit_log = all.m[0];
    check(fabsf(unit_log - log2f(value_unit(rows, 0))) < 0.01f,
          "format %d, %d dims: values are in units of 2^%a, not 2^%a", format, head_dim, unit_log,
          log2f(value_unit(rows, 0)));
  }
  for (int columns = 1; columns <= 8; columns += 7) {
    for (int i = 0; i < head_dim; i++) {
      Floats q(head_dim), prepared((size_t)columns * head_dim), out(head_dim);
      q[i] = 1;
      for (int c = 0; c < columns; c++)
        k.query(format, q.data(), head_dim, 1, &prepared[(size_t)c * head_dim]);
      Running all(columns, head_dim);
      const KvRun run = rows.run(0, 1);
      const std::vector<int> n_keys(columns, 1);
      k.tile(&run, 1, nullptr, 0, prepared.data(), 1, columns, n_keys.data(), head_dim, scratch,
             all.m.data(), all.l.data(), all.acc.data());
      if (codes) {
        const float m = all.m[0] - unit_log;
        check(fabsf(m - read[i]) <= 1e-4f * (1 + fabsf(read[i])),
              "format %d, %d dims: key channel %d is read as %a, not %a", format, head_dim, i, m,
              read[i]);
        k.finish(all.acc.data(), all.l[0], head_dim, out.data());
        const float unit = value_unit(rows, 0);
        for (int j = 0; j < head_dim; j++)
          check(fabsf(out[j] - rows.v[j]) <= 0.51f * unit + 1e-4f * fabsf(rows.v[j]),
                "format %d, %d dims: value channel %d is read as %a, not %a", format, head_dim, j,
                out[j], rows.v[j]);
        continue;
      }
      // A scale that is applied to the score is a power of two: nothing is rounded by it.
      check(all.m[0] == rows.k[i], "format %d, %d dims: key channel %d is read as %a, not %a",
            format, head_dim, i, all.m[0], rows.k[i]);
      k.finish(all.acc.data(), all.l[0], head_dim, out.data());
      for (int j = 0; j < head_dim; j++)
        check(out[j] == rows.v[j], "format %d, %d dims: value channel %d is read as %a, not %a",
              format, head_dim, j, out[j], rows.v[j]);
    }
  }
}

// ---- attention on codes

// Keys of one KV head as pieces, and what their codes stand for.
struct CodeRows {
  int head_dim, keys;
  KvRows rows;
  std::vector<uint8_t> bytes;
  Floats k, v, v_scale;

  size_t step() const { return code_piece_bytes(head_dim); }
  uint8_t *piece(int i) {
    return bytes.data() + (64 - (uintptr_t)bytes.data() % 64) % 64 + i * step();
  }
  const uint16_t *row(int plane, int j) const {
    return (const uint16_t *)&rows.plane[plane][j * rows.step(plane)];
  }
  // Written one by one into memory of NaNs.
  CodeRows(const CodeKernels &codes, int head_dim, int keys)
      : head_dim(head_dim), keys(keys), rows(KSL_KV_BF16, head_dim, keys) {
    bytes.assign((keys + 15) / 16 * step() + 64, 0xff);
    for (int j = 0; j < keys; j++)
      codes.encode(row(0, j), row(2, j), head_dim, piece(j / 16), j % 16);
    k.resize((size_t)keys * head_dim);
    v.resize(k.size());
    v_scale.resize(keys);
    for (int j = 0; j < keys; j++) {
      const CodePiece p = code_piece(piece(j / 16), head_dim);
      const int lane = j % 16;
      v_scale[j] = (float)exp2((double)p.v_log[lane]);
      close_to(p.v_inverse[lane] * v_scale[j], 1, 4, "scale of values", head_dim, j);
      for (int i = 0; i < head_dim; i++) {
        const int key = p.k[i / 4 * 64 + 4 * lane + i % 4] - 128;
        const int value = (int8_t)p.v[i / 64 * 1024 + lane / 4 * 256 + i % 64 * 4 + lane % 4];
        const size_t at = (size_t)j * head_dim + i;
        k[at] = key * p.k_scale[lane];
        v[at] = value * v_scale[j];
        check(fabsf(k[at] - rows.k[at]) <= 0.501f * p.k_scale[lane], "key %d is %a, not %a", j,
              k[at], rows.k[at]);
        check(fabsf(v[at] - rows.v[at]) <= 0.501f * v_scale[j], "value %d is %a, not %a", j, v[at],
              rows.v[at]);
      }
    }
  }
};

// As attend.
Running attend_codes(const CodeKernels &k, CodeRows &rows, const float *q, int group, int columns,
                     int keys) {
  Running all(group * columns, rows.head_dim);
  std::vector<const uint8_t *> pieces;
  for (int j = 0; j < keys + kCodeKeys; j += 16)
    pieces.push_back(j < keys ? rows.piece(j / 16) : nullptr);
  for (int j0 = 0; j0 < keys; j0 += kCodeKeys) {
    std::vector<int> n_keys(columns);
    for (int c = 0; c < columns; c++) {
      const int sees = keys - (columns - 1 - c) - j0;
      n_keys[c] = sees < kCodeKeys ? sees : (int)kCodeKeys;
    }
    const int after = (keys - j0 - kCodeKeys + 15) / 16;
    const int n_next = after < 0 ? 0 : after < kCodePieces ? after : (int)kCodePieces;
    k.tile(&pieces[j0 / 16], pieces.data() + (n_next ? j0 / 16 + kCodePieces : 0), n_next, q, group,
           columns, n_keys.data(), rows.head_dim, all.m.data(), all.l.data(), all.acc.data());
  }
  return all;
}

void test_codes(const AttnKernels &a, const CodeKernels &k, int group, int columns, int head_dim,
                int keys) {
  const int queries = group * columns;
  const size_t d = head_dim;
  CodeRows rows(k, head_dim, keys);
  const Floats q = random_floats(queries * d, 2);
  std::vector<float> room(queries * d + 16);
  float *prepared = room.data() + (64 - (uintptr_t)room.data() % 64) % 64 / 4;
  const float scale = (float)(1 / sqrt(head_dim));
  for (int h = 0; h < queries; h++) k.query(&q[h * d], head_dim, scale, &prepared[h * d]);
  const Running all = attend_codes(k, rows, prepared, group, columns, keys);
  for (int h = 0; h < queries; h++) {
    const int sees = keys - (columns - 1 - h / group);
    float top = 0;
    for (size_t i = 0; i < d; i++) top = fmaxf(top, fabsf(q[h * d + i]));
    std::vector<double> p(keys), expected(d), slack(d);
    double most = -INFINITY, sum = 0;
    for (int j = 0; j < sees; j++) {
      double dot = 0;
      for (size_t i = 0; i < d; i++)
        dot += nearbyint(q[h * d + i] * (127.0f / top)) * rows.k[j * d + i];
      p[j] = dot * top / 127 * scale;
      most = fmax(most, p[j]);
    }
    for (int j = 0; j < sees; j++) sum += (p[j] = exp2(p[j] - most));
    // A byte is off by half of 1/255 of the most that a key of its tile adds.
    for (int j0 = 0; j0 < sees; j0 += kCodeKeys) {
      const int end = j0 + kCodeKeys < sees ? j0 + kCodeKeys : sees;
      double adds = 0;
      for (int j = j0; j < end; j++) adds = fmax(adds, p[j] / sum * rows.v_scale[j]);
      for (int j = j0; j < end; j++)
        for (size_t i = 0; i < d; i++) {
          const double v = rows.v[j * d + i];
          expected[i] += p[j] / sum * v;
          slack[i] += 3e-4 * p[j] / sum * fabs(v) + 0.51 / 255 * adds * fabs(v) / rows.v_scale[j];
        }
    }
    Floats out(head_dim);
    a.finish(&all.acc[h * d], all.l[h], head_dim, out.data());
    for (size_t i = 0; i < d; i++)
      check(fabs(out[i] - expected[i]) <= slack[i] + 1e-6,
            "attention on codes: %d dims, head %d of %d, channel %d: %a, not %a within %a",
            head_dim, h, queries, (int)i, out[i], expected[i], slack[i]);
    // A head alone, that sees the same keys, gives the same bits.
    if (sees < keys && h % 3) continue;
    const Running one = attend_codes(k, rows, &prepared[h * d], 1, 1, sees);
    check(one.m[0] == all.m[h] && one.l[0] == all.l[h] &&
              same_bits(one.acc.data(), &all.acc[h * d], head_dim),
          "attention on codes: head %d of %d depends on its neighbours", h, queries);
  }
}

// A piece made at once has the bytes of one made row by row.
void test_pieces(const CodeKernels &k, int head_dim) {
  CodeRows rows(k, head_dim, 32);
  std::vector<uint8_t> room(2 * rows.step() + 64, 0xff);
  uint8_t *whole = room.data() + (64 - (uintptr_t)room.data() % 64) % 64;
  for (int i = 0; i < 2; i++)
    k.encode_piece(rows.row(0, 16 * i), rows.rows.step(0) / 2, rows.row(2, 16 * i),
                   rows.rows.step(2) / 2, head_dim, whole + i * rows.step());
  CodeRows same = rows;
  const Floats q = random_floats(head_dim, 2);
  Floats room_q(head_dim + 16);
  float *prepared = room_q.data() + (64 - (uintptr_t)room_q.data() % 64) % 64 / 4;
  k.query(q.data(), head_dim, 0.1f, prepared);
  memcpy(same.piece(0), whole, 2 * rows.step());
  const Running a = attend_codes(k, rows, prepared, 1, 1, 32);
  const Running b = attend_codes(k, same, prepared, 1, 1, 32);
  check(a.m[0] == b.m[0] && a.l[0] == b.l[0] && same_bits(a.acc.data(), b.acc.data(), head_dim),
        "a piece of %d dims has other codes than its rows", head_dim);
  // A key that is hidden is as none; one that is not finite reaches those that see it, no others.
  k.hide(head_dim, same.piece(0), 0);
  const Running hidden = attend_codes(k, same, prepared, 1, 1, 32);
  check(isfinite(hidden.l[0]) && hidden.l[0] < a.l[0] * exp2f(a.m[0] - hidden.m[0]),
        "a hidden key of %d dims counts", head_dim);
  for (const int side : {0, 1}) {
    std::vector<uint16_t> infinite(rows.row(2 * side, 20), rows.row(2 * side, 20) + head_dim);
    infinite[3] = 0x7f80;
    k.encode(side ? rows.row(0, 20) : infinite.data(), side ? infinite.data() : rows.row(2, 20),
             head_dim, rows.piece(1), 4);
    const Running before = attend_codes(k, rows, prepared, 1, 1, 20);
    const Running after = attend_codes(k, rows, prepared, 1, 1, 21);
    check(isfinite(before.l[0]) && isnan(after.l[0]), "an infinite key or value of %d dims: %a, %a",
          head_dim, before.l[0], after.l[0]);
    k.encode(rows.row(0, 20), rows.row(2, 20), head_dim, rows.piece(1), 4);
  }
}

void test_code_tables(const AttnKernels &a, const CodeKernels &k) {
  for (const int d : {32, 64, 96, 128, 256}) {
    test_pieces(k, d);
    test_codes(a, k, 2, 1, d, 65);
    test_codes(a, k, 5, 3, d, 70);
  }
  test_codes(a, k, 3, 2, 64, 64);
  test_codes(a, k, 6, 10, 256, 200);
  test_codes(a, k, 16, 4, 64, 131);
  test_codes(a, k, 4, 1, 256, 7);
  test_codes(a, k, 1, 1, 128, 1);
  test_codes(a, k, 2, 20, 96, 100);
}

// Rows of values that are next to nothing, or all zero bytes, are read as zero.
void test_empty_values(const AttnKernels &k, int format) {
  const int d = 64, keys = 64;
  KvRows rows(format, d, keys);
  std::vector<uint8_t> bytes(attn_scratch_bytes(d) + 64, 0xff);
  uint8_t *scratch = bytes.data() + (64 - (uintptr_t)bytes.data() % 64) % 64;
  for (const float tiny : {0.0f, 1e-37f}) {
    for (int j = 0; j < keys; j++) {
      uint8_t *codes = &rows.plane[2][j * rows.step(2)], *scales = &rows.plane[3][j * rows.step(3)];
      const Floats x(d, tiny);
      kv_encode(format, 1, x.data(), d, codes, scales);
      if (tiny == 0) memset(codes, 0, rows.size(2)), memset(scales, 0, rows.size(3));
    }
    Floats prepared(d), out(d);
    k.query(format, random_floats(d).data(), d, 0.1f, prepared.data());
    const Running all = attend(k, rows, prepared.data(), 1, 1, d, scratch);
    k.finish(all.acc.data(), all.l[0], d, out.data());
    for (int i = 0; i < d; i++)
      check(fabsf(out[i]) <= 1e-12f, "format %d: values of %a are read as %a", format, tiny,
            out[i]);
  }
}

void test_attention_tables(const AttnKernels &k) {
  for (int format = KSL_KV_F32; format <= KSL_KV_INT4_G32; format++) {
    for (const int d : {32, 64, 96, 128, 256})
      if (!kv_format_limit(format, d)) test_kv_reading(k, format, d);
    test_empty_values(k, format);
    test_attention(k, format, 2, 1, 128, 65);
    test_attention(k, format, 3, 2, 64, 64);
    test_attention(k, format, 6, 10, 256, 200);
    test_attention(k, format, 16, 4, 64, 131);
    test_attention(k, format, 4, 1, 256, 7);
    test_attention(k, format, 1, 1, 128, 1);
    if (!kv_format_limit(format, 32)) test_attention(k, format, 5, 3, 32, 70);
    if (!kv_format_limit(format, 96)) test_attention(k, format, 2, 20, 96, 100);
    if (!kv_format_limit(format, 36)) {
      test_attention(k, format, 1, 1, 4, 1);
      test_attention(k, format, 3, 1, 20, 64);
      test_attention(k, format, 16, 4, 36, 131);
    }
  }
  // No keys, and results of none: neutral.
  Running none(1, 64), some(1, 64);
  some.m[0] = 1;
  some.l[0] = 2;
  const int n_keys[] = {0};
  k.tile(nullptr, 0, nullptr, 0, nullptr, 1, 1, n_keys, 64, nullptr, none.m.data(), none.l.data(),
         none.acc.data());
  check(none.m[0] == -INFINITY && none.l[0] == 0, "attention over no keys");
  k.combine(&some.m[0], &some.l[0], some.acc.data(), none.m[0], none.l[0], none.acc.data(), 64);
  check(some.m[0] == 1 && some.l[0] == 2, "attention combined with that over no keys");
}

}  // namespace

int main(int argc, char **argv) {
  if (argc < 2) {
    puts(kernels_list());
    return 0;
  }
  const Kernels *table = nullptr;
  for (int isa = KSL_ISA_SCALAR; isa <= KSL_ISA_AVX512; isa++) {
    const Kernels *candidate = kernels_for(isa);
    if (candidate && !strcmp(candidate->name, argv[1])) table = candidate;
  }
  if (!table) {
    fprintf(stderr, "no table named %s here\n", argv[1]);
    return 2;
  }
  random_state = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  const Kernels &k = *table;
  for (int encoding = KSL_ENC_F32; encoding <= KSL_ENC_NVFP4; encoding++) {
    const int step = encoding <= KSL_ENC_BF16 ? 1 : encoding == KSL_ENC_NVFP4 ? 16 : 4;
    for (const int rows : {1, 4, 16, 40, 128, 130, 272}) {
      const int cols = step * (1 + below(300 / step));
      test_packing(encoding, rows, cols);
      test_gemm(k, encoding, rows, cols, 1 + below(7));
    }
    if (encoding >= KSL_ENC_FP8) test_all_codes(k, encoding);
    test_decoding(k, encoding, 64, 32);
    test_decoding(k, encoding, 20, 16 + step);
    for (const int n : {1, 2, 3, 4, 5, 13, 27, 100}) test_gemm(k, encoding, 72, 272, n);
    test_gemm(k, encoding, 260, 512, 30);
  }
  for (const int cols : {1, 15, 16, 127, 128, 129, 400, 1000}) test_quantize(k, cols);
  for (const int encoding : {(int)KSL_ENC_E2M3, (int)KSL_ENC_NVFP4}) {
    const int step = encoding == KSL_ENC_NVFP4 ? 16 : 4;
    for (const int rows : {1, 16, 40, 130}) {
      for (const int n : {1, 2, 3, 5, 7})
        test_gemm_int(k, encoding, rows, step * (1 + below(500 / step)), n);
    }
    for (const int n : {4, 6, 8, 9, 13, 24, 27, 100, 131}) test_gemm_int(k, encoding, 72, 272, n);
    test_gemm_int(k, encoding, 260, 512, 30);
    test_int_extremes(k, encoding);
  }
  test_functions(k);
  for (const int n : {1, 4, 15, 16, 17, 32, 100, 128, 256, 900}) test_norms(k, n);
  for (const int half : {1, 2, 8, 16, 20, 32, 64}) test_rope(k, half);
  test_scan(k, 1, 16, 16);
  test_scan(k, 7, 4, 5);
  test_scan(k, 9, 32, 48);
  test_scan(k, 20, 128, 128);
  test_scan(k, 5, 256, 33);
  test_attention_tables(k.attn);
  if (const Bf16Kernels *bf16 = bf16_for(&k)) {
    test_attention_tables(bf16->attn);
    test_code_tables(bf16->attn, bf16->codes);
    for (const int cols : {1, 16, 100, 128, 130, 272, 1030}) test_round(*bf16, cols);
    for (const int n : {1, 2, 3, 5, 6, 7, 13, 30}) {
      test_gemm_bf16(k, *bf16, 16 * (1 + below(9)) - below(15), 1 + below(600), n);
      test_gemm_bf16(k, *bf16, 16 * (1 + below(9)), 16 * (1 + below(40)), n);
    }
  }
  if (failures) fprintf(stderr, "%s: %d checks failed\n", k.name, failures);
  return failures ? 1 : 0;
}
