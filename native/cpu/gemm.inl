// Matrix product over packed panels, for the vector type and decoders of the including object.
//
// One order of additions, shared by both ways below: within a block of 128 columns ascending from
// zero, then total = block * scale + total, block by block. So a column's bits do not depend on how
// many columns or rows a call has.
//
// Few columns: each panel is decoded in registers, several panels at a time to keep independent
// chains in flight. Many columns: a block of a panel is decoded once into L1 and used for all.
#include "kernels.h"

namespace ksl {
namespace {

enum {
  kBlockGroups = kScaleBlock / kGroup,
  kColumnGroup = 96,  // columns whose 128-column block of x is gathered at a time
};

struct PanelView {
  const uint8_t *codes, *scales;
  size_t code_stride, scale_stride;  // bytes between panels
  int groups;                        // of one panel
};

template <class D>
KSL_INLINE PanelView panel_view(const Matrix *w) {
  const int groups = (w->cols + kGroup - 1) / kGroup;
  return {w->codes, w->scales, (size_t)groups * D::kGroupBytes, (size_t)groups * kPanel, groups};
}

// The factor of all weights of a panel in one block, over the decoder's unit.
template <class D>
KSL_INLINE float block_scale(const Matrix *w, int panel, int block) {
  const int row_block = panel / (kScaleBlock / kPanel);
  const size_t at = (size_t)row_block * ((w->cols + kScaleBlock - 1) / kScaleBlock) + block;
  float scale = 1.0f;
  if (w->encoding == KSL_ENC_FP8) {
    scale = ((const float *)w->scales)[at];
  } else if (w->encoding == KSL_ENC_E2M3) {
    const uint32_t e = w->scales[at];
    const uint32_t bits = e == 0 ? 0x00400000u : e << 23;
    __builtin_memcpy(&scale, &bits, 4);
  } else if (w->encoding == KSL_ENC_NVFP4) {
    scale = w->globals[row_block];
  }
  return scale * (1.0f / D::kUnit);
}

// Columns 4 J to 4 J + 3 of a group, times kUnit.
template <class D, int J>
KSL_STEP void decode_quad(const uint8_t *g, typename D::Aux aux, V (&out)[4]) {
  if constexpr (D::kBytes) {
    const U bytes = D::template bytes<J>(g);
    out[0] = v_of_byte<0>(bytes);
    out[1] = v_of_byte<1>(bytes);
    out[2] = v_of_byte<2>(bytes);
    out[3] = v_of_byte<3>(bytes);
    if constexpr (D::kGroupScales) {
      for (int i = 0; i < 4; i++) out[i] = v_mul(out[i], aux);
    }
  } else {
    D::template pair<2 * J>(g, aux, out[0], out[1]);
    D::template pair<2 * J + 1>(g, aux, out[2], out[3]);
  }
}

template <class D, int J, int P, int C>
KSL_STEP void direct_quad(const uint8_t *const *g, const typename D::Aux *aux,
                          const float *const *x, V (&sum)[P][C]) {
  V w[P][4];
#pragma GCC unroll 8
  for (int p = 0; p < P; p++) decode_quad<D, J>(g[p], aux[p], w[p]);
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const V xi = v_set1(x[c][4 * J + i]);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) sum[p][c] = v_fma(w[p][i], xi, sum[p][c]);
    }
  }
}

// Panels [panel, panel + P) times C columns.
template <class D, int P, int C>
static void direct(const Matrix *w, int panel, const float *x, size_t xs, const float *tail,
                   float *y, size_t ys) {
  const PanelView view = panel_view<D>(w);
  const int whole = w->cols / kGroup;  // groups that lie in x completely
  const uint8_t *g[P], *s[P];
  for (int p = 0; p < P; p++) {
    g[p] = view.codes + (size_t)(panel + p) * view.code_stride;
    s[p] = view.scales + (size_t)(panel + p) * view.scale_stride;
  }
  V total[P][C];
  for (int p = 0; p < P; p++)
    for (int c = 0; c < C; c++) total[p][c] = v_zero();
  for (int first = 0, block = 0; first < view.groups; first += kBlockGroups, block++) {
    const int last = first + kBlockGroups < view.groups ? first + kBlockGroups : view.groups;
    V sum[P][C];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sum[p][c] = v_zero();
    for (int group = first; group < last; group++) {
      const float *xg[C];
      typename D::Aux aux[P];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++)
        xg[c] = group < whole ? x + c * xs + (size_t)group * kGroup : tail + c * kGroup;
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) aux[p] = D::aux(s[p]);
      direct_quad<D, 0, P, C>(g, aux, xg, sum);
      direct_quad<D, 1, P, C>(g, aux, xg, sum);
      direct_quad<D, 2, P, C>(g, aux, xg, sum);
      direct_quad<D, 3, P, C>(g, aux, xg, sum);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        g[p] += D::kGroupBytes;
        s[p] += kPanel;
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const V scale = v_set1(block_scale<D>(w, panel + p, block));
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) total[p][c] = v_fma(sum[p][c], scale, total[p][c]);
    }
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

// Keeps widths that the object does not use from being compiled.
constexpr int direct_width(int columns) {
  return columns < kDirectColumns ? columns : (int)kDirectColumns;
}

template <class D, int C>
static void direct_rows(const Matrix *w, const float *x, size_t xs, int panel, int end, float *y,
                        size_t ys) {
  constexpr int P = direct_panels(C);
  float tail[C * kGroup] = {};
  const int whole = w->cols / kGroup * kGroup;
  for (int c = 0; c < C; c++)
    for (int k = whole; k < w->cols; k++) tail[c * kGroup + k - whole] = x[c * xs + k];
  for (; panel + P <= end; panel += P) direct<D, P, C>(w, panel, x, xs, tail, y, ys);
  for (; panel < end; panel++) direct<D, 1, C>(w, panel, x, xs, tail, y, ys);
}

// ---- many columns

template <class D, int J>
KSL_STEP void store_quad(const uint8_t *g, typename D::Aux aux, float *out, int stride) {
  V w[4];
  decode_quad<D, J>(g, aux, w);
  for (int i = 0; i < 4; i++) v_store(out + (4 * J + i) * stride, w[i]);
}

// Groups [first, last) of a panel: column k at out + k * stride.
template <class D>
static void decode_block(const PanelView &view, int panel, int first, int last, float *out,
                         int stride) {
  const uint8_t *g = view.codes + (size_t)panel * view.code_stride + (size_t)first * D::kGroupBytes;
  const uint8_t *s = view.scales + (size_t)panel * view.scale_stride + (size_t)first * kPanel;
  for (int group = first; group < last; group++) {
    const typename D::Aux aux = D::aux(s);
    store_quad<D, 0>(g, aux, out, stride);
    store_quad<D, 1>(g, aux, out, stride);
    store_quad<D, 2>(g, aux, out, stride);
    store_quad<D, 3>(g, aux, out, stride);
    g += D::kGroupBytes;
    s += kPanel;
    out += kGroup * stride;
  }
}

// One block of P decoded panels times C gathered columns, added to y.
template <int P, int C>
static void tile(const float *weights, const float *x, int n, const float *scale, bool first,
                 float *y, size_t ys, int rows) {
  V sum[P][C];
#pragma GCC unroll 16
  for (int p = 0; p < P; p++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) sum[p][c] = v_zero();
  for (int k = 0; k < n; k++) {
    V w[P];
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) w[p] = v_load(weights + (k * P + p) * kPanel);
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) {
      const V xk = v_set1(x[c * kScaleBlock + k]);
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) sum[p][c] = v_fma(w[p], xk, sum[p][c]);
    }
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; p++) {
    const V s = v_set1(scale[p]);
    const int m = rows - p * kPanel;
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) {
      float *out = y + c * ys + p * kPanel;
      if (m >= kPanel) {
        v_store(out, v_fma(sum[p][c], s, first ? v_zero() : v_load(out)));
      } else {
        v_store_n(out, v_fma(sum[p][c], s, first ? v_zero() : v_load_n(out, m)), m);
      }
    }
  }
}

template <int P>
static void tile_columns(const float *weights, const float *x, int n, const float *scale,
                         bool first, float *y, size_t ys, int rows, int columns) {
  int c = 0;
#define KSL_TILES(C)                                                                    \
  for (; (C) <= kTileColumns && c + (C) <= columns; c += (C))                           \
  tile<P, (C) <= kTileColumns ? (C) : 1>(weights, x + c * kScaleBlock, n, scale, first, \
                                         y + c * ys, ys, rows)
  KSL_TILES(kTileColumns);
  KSL_TILES(8);
  KSL_TILES(4);
  KSL_TILES(2);
  KSL_TILES(1);
#undef KSL_TILES
}

template <class D, int P>
KSL_INLINE void tile_panels(const Matrix *w, const PanelView &view, int panel, int block, int first,
                            int last, float *weights, const float *x, float *y, size_t ys,
                            int columns) {
  float scale[P];
  for (int p = 0; p < P; p++) {
    decode_block<D>(view, panel + p, first, last, weights + p * kPanel, P * kPanel);
    scale[p] = block_scale<D>(w, panel + p, block);
  }
  tile_columns<P>(weights, x, (last - first) * kGroup, scale, block == 0, y + panel * kPanel, ys,
                  w->rows - panel * kPanel, columns);
}

template <class D>
static void tiled(const Matrix *w, const float *x, size_t xs, int n, int panel0, int panel1,
                  float *y, size_t ys) {
  alignas(64) float weights[kTilePanels * kPanel * kScaleBlock];
  alignas(64) float gathered[kColumnGroup * kScaleBlock];
  const PanelView view = panel_view<D>(w);
  for (int first = 0, block = 0; first < view.groups; first += kBlockGroups, block++) {
    const int last = first + kBlockGroups < view.groups ? first + kBlockGroups : view.groups;
    const int k0 = first * kGroup, k1 = w->cols < last * kGroup ? w->cols : last * kGroup;
    for (int c = 0; c < n; c++) {
      float *to = gathered + c * kScaleBlock;
      const float *from = x + c * xs + k0;
      int k = 0;
      for (; k + 16 <= k1 - k0; k += 16) v_store(to + k, v_load(from + k));
      if (k < k1 - k0) v_store(to + k, v_load_n(from + k, k1 - k0 - k));
    }
    int panel = panel0;
    for (; panel + kTilePanels <= panel1; panel += kTilePanels)
      tile_panels<D, kTilePanels>(w, view, panel, block, first, last, weights, gathered, y, ys, n);
    for (; panel < panel1; panel++)
      tile_panels<D, 1>(w, view, panel, block, first, last, weights, gathered, y, ys, n);
  }
}

template <class D>
static void gemm_of(const Matrix *w, const float *x, size_t xs, int n, int r0, int r1, float *y,
                    size_t ys) {
  const int panel0 = r0 / kPanel, panel1 = (r1 + kPanel - 1) / kPanel;
  if (n > kDirectColumns) {
    for (int c = 0; c < n; c += kColumnGroup) {
      const int columns = n - c < kColumnGroup ? n - c : kColumnGroup;
      tiled<D>(w, x + c * xs, xs, columns, panel0, panel1, y + c * ys, ys);
    }
  } else if (n == 1) {
    direct_rows<D, 1>(w, x, xs, panel0, panel1, y, ys);
  } else if (n == 2) {
    direct_rows<D, direct_width(2)>(w, x, xs, panel0, panel1, y, ys);
  } else if (n == 3) {
    direct_rows<D, direct_width(3)>(w, x, xs, panel0, panel1, y, ys);
  } else {
    direct_rows<D, direct_width(4)>(w, x, xs, panel0, panel1, y, ys);
  }
}

static void gemm(const Matrix *w, const float *x, size_t xs, int n, int r0, int r1, float *y,
                 size_t ys) {
  if (n <= 0 || r1 <= r0) return;
  switch (w->encoding) {
    case KSL_ENC_F32:
      return gemm_of<DecodeF32>(w, x, xs, n, r0, r1, y, ys);
    case KSL_ENC_BF16:
      return gemm_of<DecodeBf16>(w, x, xs, n, r0, r1, y, ys);
    case KSL_ENC_FP8:
      return gemm_of<DecodeFp8>(w, x, xs, n, r0, r1, y, ys);
    case KSL_ENC_E2M3:
      return gemm_of<DecodeE2m3>(w, x, xs, n, r0, r1, y, ys);
    case KSL_ENC_NVFP4:
      return gemm_of<DecodeNvfp4>(w, x, xs, n, r0, r1, y, ys);
    default:
      __builtin_trap();
  }
}

}  // namespace
}  // namespace ksl
