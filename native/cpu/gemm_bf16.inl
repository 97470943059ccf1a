// Matrix product of bf16 weights and bf16 activations (AVX512-BF16): one instruction takes two
// columns of sixteen rows, as the layout of a matrix holds them.
//
// The order of additions: within kScaleBlock columns, pair by pair, ascending from zero, then block
// by block. So a column's bits do not depend on how many columns or rows a call has.
//
// Weights need no expansion: they go to the products as they lie, from memory for the first tile of
// columns and from the second level of the cache for the others.
#include "kernels.h"

namespace ksl {
namespace {

enum {
  kBf16Groups = kScaleBlock / kGroup,
  kBf16Panels = 2,
  kBf16Columns = 6,                       // of a tile
  kBf16PanelBytes = kGroup * kPanel * 2,  // of a group
  kBf16Ahead = 4096,                      // bytes
};

static void round_bf16_column(const float *x, int n, RoundedBlock *out, size_t stride) {
  for (int k0 = 0; k0 < quantized_blocks(n) * kScaleBlock; k0 += kGroup) {
    const int left = n - k0;
    const V values = left >= kGroup ? v_load(x + k0) : left > 0 ? v_load_n(x + k0, left) : v_zero();
    v_store_bf16(out[k0 / kScaleBlock * stride].values + k0 % kScaleBlock, values);
  }
}

// P panels from `panel` times C columns.
template <int P, int C>
static void bf16_tile(const Matrix *w, int panel, const RoundedBlock *x, size_t stride, float *y,
                      size_t ys) {
  const int groups = (w->cols + kGroup - 1) / kGroup;
  const size_t panel_bytes = (size_t)groups * kBf16PanelBytes;
  const uint8_t *g = w->codes + (size_t)panel * panel_bytes;
  V total[P][C];
  for (int p = 0; p < P; p++)
    for (int c = 0; c < C; c++) total[p][c] = v_zero();
  for (int first = 0; first < groups; first += kBf16Groups, x += stride) {
    const int pairs = kGroup / 2 * (groups - first < kBf16Groups ? groups - first : kBf16Groups);
    V sum[P][C];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sum[p][c] = v_zero();
#pragma GCC unroll 2
    for (int pair = 0; pair < pairs; pair++, g += 64) {
      __m512bh weights[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        // Alone, a column leaves the core's own prefetcher enough time.
        if (C > 1) __builtin_prefetch(g + p * panel_bytes + kBf16Ahead);
        weights[p] = (__m512bh)_mm512_loadu_si512(g + p * panel_bytes);
      }
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        int32_t two;
        __builtin_memcpy(&two, x[c].values + 2 * pair, 4);
        const __m512bh column = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) sum[p][c].v = _mm512_dpbf16_ps(sum[p][c].v, weights[p], column);
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) total[p][c] = v_add(total[p][c], sum[p][c]);
  }
  for (int p = 0; p < P; p++) {
    const int row = (panel + p) * kPanel, rows = w->rows - row;
    for (int c = 0; c < C; c++) {
      if (rows >= kPanel)
        v_store(y + c * ys + row, total[p][c]);
      else
        v_store_n(y + c * ys + row, total[p][c], rows);
    }
  }
}

template <int P>
static void bf16_columns(const Matrix *w, int panel, const RoundedBlock *x, size_t stride, int n,
                         float *y, size_t ys) {
  int c = 0;
#define KSL_TILES(C) \
  for (; c + (C) <= n; c += (C)) bf16_tile<P, (C)>(w, panel, x + c, stride, y + c * ys, ys)
  KSL_TILES(kBf16Columns);
  KSL_TILES(5);
  KSL_TILES(4);
  KSL_TILES(3);
  KSL_TILES(2);
  KSL_TILES(1);
#undef KSL_TILES
}

static void gemm_bf16(const Matrix *w, const RoundedBlock *x, size_t stride, int n, int r0, int r1,
                      float *y, size_t ys) {
  if (n <= 0 || r1 <= r0) return;
  int panel = r0 / kPanel;
  const int end = (r1 + kPanel - 1) / kPanel;
  if (n == 1)
    for (; panel + 4 <= end; panel += 4) bf16_tile<4, 1>(w, panel, x, stride, y, ys);
  for (; panel + kBf16Panels <= end; panel += kBf16Panels)
    bf16_columns<kBf16Panels>(w, panel, x, stride, n, y, ys);
  for (; panel < end; panel++) bf16_columns<1>(w, panel, x, stride, n, y, ys);
}

}  // namespace
}  // namespace ksl
