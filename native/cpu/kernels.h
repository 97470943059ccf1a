// Inner kernels of the CPU backend as a table of function pointers, one table per ISA path.
//
// Determinism (the contract of the CPU backend): for one table, every output element is a function
// of its own inputs with one fixed reduction order. gemm gives the same bits for a column whatever
// the number of columns and whatever row range a call covers; scan gives the same bits however a
// row is cut; attention tiles are independent and combined in ascending order.
//
// All pointers are aligned to 64 bytes where the comment says "aligned"; strides are in floats.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../common/abi.h"
#include "attn.h"

namespace ksl {

// A weight matrix [rows, cols] in the CPU layout made by matrix_pack (pack.cc). Rows are grouped in
// panels of kPanel output rows, columns in groups of kGroup; both are padded with zero codes.
enum { kPanel = 16, kGroup = 16, kScaleBlock = 128 };

struct Matrix {
  int32_t encoding;  // KSL_ENC_*
  int32_t rows, cols;
  uint8_t *codes;   // aligned; [panel][group] blocks of one group each, see pack.cc
  uint8_t *scales;  // NVFP4: [panel][group][kPanel]; FP8, E2M3: as in the source
  float *globals;   // NVFP4: as in the source
  size_t bytes;     // of all three, as held
};

// Weights that are small integers times their scale, and can be multiplied by int8 activations. A
// kernel sees them as bytes kOffset + value.
enum { kOffset = 64 };
static inline bool has_small_integers(const Matrix *w) {
  return w->encoding == KSL_ENC_E2M3 || w->encoding == KSL_ENC_NVFP4;
}

// Whether a product takes its input as bf16 where the machine has such products. Matrices of few
// rows, which make gates, do not: rounding would cost more than it saves.
static inline bool has_bf16_products(const Matrix *w) {
  return w->encoding == KSL_ENC_BF16 && w->rows >= kScaleBlock;
}

// kScaleBlock activations of one column of a product as int8: code * scale. What is beyond the end
// of the column is zero. The same block of all columns lies side by side, aligned, so that a kernel
// walks through one piece of memory: block b of column c is x[b * stride + c].
enum { kActBlock = 32 };
struct QuantizedBlock {
  int8_t codes[kScaleBlock];                // in [-127, 127]
  float scales[kScaleBlock / kActBlock];    // NaN where an activation is not finite
  int32_t blocks[kScaleBlock / kActBlock];  // -kOffset times the sum of the codes
  int32_t groups[kScaleBlock / kGroup];     // the same of kGroup columns
};
// The same as bf16.
struct RoundedBlock {
  uint16_t values[kScaleBlock];
};
static inline int quantized_blocks(int n) {
  return (n + kScaleBlock - 1) / kScaleBlock;
}

enum { kScanColumns = 32, kMaxKeyDim = 256 };

struct Kernels {
  const char *name;

  // y[c * ys + r] = sum_k x[c * xs + k] * W[r, k] for r in [r0, r1), c in [0, n). r0 is a multiple
  // of kPanel; r1 a multiple of kPanel or rows. Reads x only at [0, cols), writes y only at [r0,
  // r1). The order of additions: within each block of kScaleBlock columns ascending from zero, then
  // block by block, each multiplied by its scale.
  void (*gemm)(const Matrix *w, const float *x, size_t xs, int n, int r0, int r1, float *y,
               size_t ys);

  // The quantized_blocks(n) of a column, `stride` apart: x rounded to the nearest code, ties to
  // even.
  void (*quantize)(const float *x, int n, QuantizedBlock *out, size_t stride);
  // As gemm, for small-integer weights and the quantized columns from x[0]. The order of additions:
  // integers, exactly, within columns that share all scales; then those sums, ascending, within
  // kScaleBlock columns, and then as above.
  void (*gemm_int)(const Matrix *w, const QuantizedBlock *x, size_t stride, int n, int r0, int r1,
                   float *y, size_t ys);

  // The norms and the element-wise functions take any n >= 1; out may be an input.
  // out = x * rsqrt(mean(x^2) + eps) * gain[i]; gain already holds 1 + w where the model says so.
  void (*rmsnorm)(const float *x, const float *gain, int n, float eps, float *out);
  // out = x * rsqrt(sum(x^2) + eps) * scale
  void (*l2norm)(const float *x, int n, float eps, float scale, float *out);
  // out = x * rsqrt(mean(x^2) + eps) * gain * silu(z)
  void (*gated_norm)(const float *x, const float *gain, const float *z, int n, float eps,
                     float *out);
  void (*add)(float *x, const float *y, int n);                             // x += y
  void (*silu_mul)(const float *gate, const float *up, int n, float *out);  // silu(gate) * up
  void (*sigmoid_mul)(float *x, const float *gate, int n);                  // x *= sigmoid(gate)
  // out[c] = silu(sum_j taps[j * stride + c] * window[j][c]) for c in [0, n): window[j] is the
  // column j - 3 positions before the current one (window[3] is current).
  void (*conv_silu)(const float *const window[4], const float *taps, size_t stride, int n,
                    float *out);
  // The same for one column x that the history then ends with: its three rows, `stride` apart, move
  // on by one. next: null, or the history that the caller takes next; it is fetched meanwhile.
  void (*conv_step)(const float *x, const float *taps, size_t stride, int n, float *history,
                    const float *next, float *out);
  // x [head_dim]: rotates the first 2 * half dims, pairs (j, j + half), with cos/sin [half].
  void (*rope)(float *x, const float *cos, const float *sin, int half);

  // Delta rule over n tokens for value columns [v0, v0 + nv) of one head, nv <= kScanColumns, dk <=
  // kMaxKeyDim. Columns are independent of each other.
  //   q, k: token t at q + t * qk_stride, [dk]; v, out: token t at v + t * v_stride, already offset
  //   to v0; decay, beta: token t at decay + t * g_stride. state: [dk][dv] of this head, row stride
  //   dv, offset to v0; read at the start. after: null, or where the state after the last token
  //   goes (same layout), which may be `state`. cuts: after token cut_at[i] (1-based count,
  //   ascending) the columns are also stored at cut_state[i]. delta: null, or token t's correction
  //   goes to delta + t * delta_stride, for a replay.
  void (*delta_scan)(const float *q, const float *k, size_t qk_stride, const float *v, float *out,
                     size_t v_stride, size_t out_stride, const float *decay, const float *beta,
                     size_t g_stride, int n, int dk, size_t dv, int nv, const float *state,
                     float *after, float *delta, size_t delta_stride, int n_cuts, const int *cut_at,
                     float *const *cut_state);
  // What the scan does to the state, from the corrections that it left: bit for bit, at a fraction
  // of its cost. n may be any number of its first tokens, nv any number of columns.
  void (*delta_replay)(const float *k, size_t k_stride, const float *delta, size_t delta_stride,
                       const float *decay, size_t g_stride, int n, int dk, size_t dv, int nv,
                       float *state);
  // The scan of one token, committed, for any nv. next: null, or the state that the caller takes
  // next, alike; it is fetched meanwhile.
  void (*delta_step)(const float *q, const float *k, const float *v, float *out, float decay,
                     float beta, int dk, size_t dv, int nv, float *state, const float *next);

  AttnKernels attn;
};

// Tables by KSL_ISA_*; null where the build or the machine lacks it. AUTO: the best.
const Kernels *kernels_for(int isa);
const char *kernels_list(void);  // "scalar avx2 avx512" as runnable here

// What such machines do beside a table: products of bf16, and attention on codes.
struct Bf16Kernels {
  AttnKernels attn;
  CodeKernels codes;
  // As Kernels.quantize: x rounded to bf16, to nearest even.
  void (*round)(const float *x, int n, RoundedBlock *out, size_t stride);
  // As Kernels.gemm_int, for bf16 weights. Additions: pairs of columns ascending within kScaleBlock
  // columns, then block by block.
  void (*gemm)(const Matrix *w, const RoundedBlock *x, size_t stride, int n, int r0, int r1,
               float *y, size_t ys);
};
// Null where the machine lacks them or the table is another one than AVX-512.
const Bf16Kernels *bf16_for(const Kernels *kernels);

// One table per object, the only symbol it exports.
extern const Kernels kernels_scalar, kernels_avx2, kernels_avx512;
extern const Bf16Kernels kernels_avx512bf16;

// Bytes of a packed matrix, a multiple of 64. (pack.cc; not per ISA.)
size_t matrix_bytes(int encoding, int64_t rows, int64_t cols);
// Source encodings pass through unchanged in value. Source pointers need no alignment.
struct MatrixSource {
  int encoding;
  int64_t rows, cols;
  const void *codes, *scales;
  const float *globals;
};
// Sets the fields of `out` over `storage`, which is aligned and holds matrix_bytes. Every row is
// then to be written by matrix_pack_rows before use.
void matrix_begin(int encoding, int64_t rows, int64_t cols, uint8_t *storage, Matrix *out);
// Packs `stripe` (a matrix of its own: its row 0, scales and globals are those of row r0) into rows
// [r0, r0 + stripe->rows) of `out`. r0 is a multiple of 128, stripe->rows too unless it ends the
// matrix. Calls for different stripes may run at the same time.
void matrix_pack_rows(const MatrixSource *stripe, int64_t r0, Matrix *out);
// matrix_begin, then all rows.
void matrix_pack(const MatrixSource *src, uint8_t *storage, Matrix *out);
// One row back to float32 [cols] (embedding look-up, tests): the values of decode_row.
void matrix_row(const Matrix *w, int row, float *out);

}  // namespace ksl
