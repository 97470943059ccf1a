// Matrix product of small-integer weights and int8 activations.
//
// Weights are bytes 64 + v with v an integer (8 times an E2M3, 2 times an E2M1 value), so that one
// instruction multiplies unsigned by signed bytes; sums start at -64 times the sum of the
// activations, which the quantisation left beside them. Inside columns that share all scales
// (kActBlock; NVFP4: a group of 16) sums are integers and exact in any order. They are then added
// in ascending order by multiply-add, first within kScaleBlock columns, so a column's bits do not
// depend on how many columns or rows a call has.
//
// Few columns: a panel is expanded in registers and used once. Many columns: in parts, each of
// which expands it again; or where that is dear (kIntTileColumns > 1), panels are expanded block by
// block into L1 and used for all columns of a chunk.
#include "kernels.h"

namespace ksl {
namespace {

enum {
  kActQuads = kActBlock / 4,
  kActGroups = kActBlock / kGroup,
  kChunkColumns = 32 * kIntTileColumns,  // columns that share an expanded block
  kPartedColumns = 128,                  // columns that stay in L2 while panels pass
};

template <class D>
KSL_STEP void expand_group(const uint8_t *g, U (&w)[4]) {
  w[0] = D::template bytes<0>(g);
  w[1] = D::template bytes<1>(g);
  w[2] = D::template bytes<2>(g);
  w[3] = D::template bytes<3>(g);
}

// The columns of one product.
struct IntInput {
  const QuantizedBlock *x;  // of column 0
  size_t stride;

  const QuantizedBlock *at(int block) const { return x + block * stride; }
};

// ---- few columns

// Weights stream from memory: what a core computes on them leaves its own prefetcher too late, the
// more so the more columns there are. Those that are read once in a wave (kOnce) are not to push
// states and keys out of the caches.
enum { kCodesAhead = 4096 };  // bytes

template <class D, bool kOnce>
KSL_STEP void fetch_ahead(const uint8_t *g, const uint8_t *s) {
  constexpr int kLocality = kOnce ? 0 : 3;
#pragma GCC unroll 4
  for (int i = 0; i < D::kGroupBytes; i += 64)
    __builtin_prefetch(g + kCodesAhead + i, 0, kLocality);
  if constexpr (D::kGroupScales)
    __builtin_prefetch(s + kCodesAhead / D::kGroupBytes * kPanel, 0, kLocality);
}

// Partial sums of one column that do not wait for each other.
constexpr int int_chains(int columns) {
  return columns == 1 ? 4 : columns == 2 ? 2 : 1;
}

// One block of one panel with one scale, groups [first, last) at g.
template <class D, int C, bool kOnce>
KSL_INLINE void direct_block(const uint8_t *g, const QuantizedBlock *x, int groups, V scale,
                             V (&total)[C]) {
  constexpr int S = int_chains(C);
  V sum[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) sum[c] = v_zero();
  for (int group = 0, act = 0; group < groups; act++) {
    const int end = group + kActGroups < groups ? group + kActGroups : groups;
    I acc[S][C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      acc[0][c] = i_set1(x[c].blocks[act]);
#pragma GCC unroll 4
      for (int s = 1; s < S; s++) acc[s][c] = i_set1(0);
    }
#pragma GCC unroll 1
    for (; group < end; group++) {
      U w[4];
      fetch_ahead<D, kOnce>(g, g);
      expand_group<D>(g, w);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++)
          acc[j % S][c] = i_dot_once(acc[j % S][c], w[j], x[c].codes + group * kGroup + 4 * j);
      g += D::kGroupBytes;
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
#pragma GCC unroll 4
      for (int s = 1; s < S; s++) acc[0][c] = i_add(acc[0][c], acc[s][c]);
      sum[c] = v_fma(v_of_int(acc[0][c]), v_set1(x[c].scales[act]), sum[c]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) total[c] = v_fma(sum[c], scale, total[c]);
}

// The same where every group of every row has a scale.
template <class D, int C, bool kOnce>
KSL_INLINE void direct_groups(const uint8_t *g, const uint8_t *s, const QuantizedBlock *x,
                              int groups, V scale, V (&total)[C]) {
  V sum[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) sum[c] = v_zero();
  for (int group = 0, act = 0; group < groups; act++) {
    const int end = group + kActGroups < groups ? group + kActGroups : groups;
    V part[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) part[c] = v_zero();
#pragma GCC unroll 1
    for (; group < end; group++) {
      U w[4];
      fetch_ahead<D, kOnce>(g, s);
      expand_group<D>(g, w);
      const V group_scale = D::aux(s);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        I acc = i_set1(x[c].groups[group]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
          acc = i_dot_once(acc, w[j], x[c].codes + group * kGroup + 4 * j);
        part[c] = v_fma(v_of_int(acc), group_scale, part[c]);
      }
      g += D::kGroupBytes;
      s += kPanel;
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sum[c] = v_fma(part[c], v_set1(x[c].scales[act]), sum[c]);
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) total[c] = v_fma(sum[c], scale, total[c]);
}

template <class D, int C, bool kOnce>
static void int_direct(const Matrix *w, const IntInput &in, int panel, int end, float *y,
                       size_t ys) {
  const PanelView view = panel_view<D>(w);
  for (; panel < end; panel++) {
    const uint8_t *g = view.codes + (size_t)panel * view.code_stride;
    const uint8_t *s = view.scales + (size_t)panel * view.scale_stride;
    V total[C];
    for (int c = 0; c < C; c++) total[c] = v_zero();
    for (int first = 0, block = 0; first < view.groups; first += kBlockGroups, block++) {
      const int groups = kBlockGroups < view.groups - first ? kBlockGroups : view.groups - first;
      const V scale = v_set1(block_scale<D>(w, panel, block));
      if constexpr (D::kGroupScales)
        direct_groups<D, C, kOnce>(g, s, in.at(block), groups, scale, total);
      else
        direct_block<D, C, kOnce>(g, in.at(block), groups, scale, total);
      g += kBlockGroups * D::kGroupBytes;
      s += kBlockGroups * kPanel;
    }
    const int row = panel * kPanel, rows = w->rows - row;
    for (int c = 0; c < C; c++) {
      if (rows >= kPanel)
        v_store(y + c * ys + row, total[c]);
      else
        v_store_n(y + c * ys + row, total[c], rows);
    }
  }
}

// ---- many columns

// One block of P expanded panels, their quads side by side, times C columns, added to `out`, rows
// of P panels.
template <int P, int C>
static void int_tile(const uint8_t *weights, int quads, const QuantizedBlock *x, const float *scale,
                     bool begin, float *out) {
  V sum[P][C];
#pragma GCC unroll 16
  for (int c = 0; c < C; c++)
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) sum[p][c] = v_zero();
  for (int quad = 0, act = 0; quad < quads; act++) {
    const int end = quad + kActQuads < quads ? quad + kActQuads : quads;
    I acc[P][C];
#pragma GCC unroll 16
    for (int c = 0; c < C; c++)
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) acc[p][c] = i_set1(x[c].blocks[act]);
    for (; quad < end; quad++) {
      U w[P];
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) w[p] = u_load(weights + (quad * P + p) * 64);
#pragma GCC unroll 16
      for (int c = 0; c < C; c++)
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) acc[p][c] = i_dot(acc[p][c], w[p], x[c].codes + 4 * quad);
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) {
      const V column_scale = v_set1(x[c].scales[act]);
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) sum[p][c] = v_fma(v_of_int(acc[p][c]), column_scale, sum[p][c]);
    }
  }
#pragma GCC unroll 16
  for (int c = 0; c < C; c++) {
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) {
      float *to = out + (c * P + p) * kPanel;
      v_store(to, v_fma(sum[p][c], v_set1(scale[p]), begin ? v_zero() : v_load(to)));
    }
  }
}

// The same where every group of every row has a scale: `scales` per group of each panel.
template <int P, int C>
static void int_tile_groups(const uint8_t *weights, int quads, const float *scales,
                            const QuantizedBlock *x, const float *scale, bool begin, float *out) {
  V sum[P][C];
#pragma GCC unroll 16
  for (int c = 0; c < C; c++)
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) sum[p][c] = v_zero();
  const int groups = quads / 4;
  for (int group = 0, act = 0; group < groups; act++) {
    const int end = group + kActGroups < groups ? group + kActGroups : groups;
    V part[P][C];
#pragma GCC unroll 16
    for (int c = 0; c < C; c++)
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) part[p][c] = v_zero();
    for (; group < end; group++) {
      I acc[P][C];
#pragma GCC unroll 16
      for (int c = 0; c < C; c++)
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) acc[p][c] = i_set1(x[c].groups[group]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        U w[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) w[p] = u_load(weights + ((4 * group + j) * P + p) * 64);
#pragma GCC unroll 16
        for (int c = 0; c < C; c++)
#pragma GCC unroll 16
          for (int p = 0; p < P; p++)
            acc[p][c] = i_dot(acc[p][c], w[p], x[c].codes + group * kGroup + 4 * j);
      }
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) {
        const V group_scale = v_load(scales + (group * P + p) * kPanel);
#pragma GCC unroll 16
        for (int c = 0; c < C; c++)
          part[p][c] = v_fma(v_of_int(acc[p][c]), group_scale, part[p][c]);
      }
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) {
      const V column_scale = v_set1(x[c].scales[act]);
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) sum[p][c] = v_fma(part[p][c], column_scale, sum[p][c]);
    }
  }
#pragma GCC unroll 16
  for (int c = 0; c < C; c++) {
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) {
      float *to = out + (c * P + p) * kPanel;
      v_store(to, v_fma(sum[p][c], v_set1(scale[p]), begin ? v_zero() : v_load(to)));
    }
  }
}

// Scratch of one call, in L1 and L2.
struct IntScratch {
  alignas(64) uint8_t weights[kIntTilePanels * kPanel * kScaleBlock];
  alignas(64) float scales[kIntTilePanels * kPanel * kBlockGroups];
  alignas(64) float out[kIntTilePanels * kPanel * kChunkColumns];
};

// Fetches what the expansion of a block reads.
template <class D, int P>
KSL_INLINE void fetch_block(const PanelView &view, int panel, int block) {
  const int first = block * kBlockGroups;
  for (int p = 0; p < P; p++) {
    const uint8_t *g =
        view.codes + (size_t)(panel + p) * view.code_stride + (size_t)first * D::kGroupBytes;
    for (int i = 0; i < kBlockGroups * D::kGroupBytes; i += 64) __builtin_prefetch(g + i);
    if constexpr (D::kGroupScales) {
      const uint8_t *s = view.scales + (size_t)(panel + p) * view.scale_stride + first * kPanel;
      for (int i = 0; i < kBlockGroups * kPanel; i += 64) __builtin_prefetch(s + i);
    }
  }
}

template <class D, int P>
KSL_INLINE void int_block(const Matrix *w, const PanelView &view, const QuantizedBlock *x,
                          int panel, int columns, int block, IntScratch *scratch) {
  const int first = block * kBlockGroups;
  const int last = first + kBlockGroups < view.groups ? first + kBlockGroups : view.groups;
  const int quads = 4 * (last - first);
  float scale[P];
  for (int p = 0; p < P; p++) {
    const uint8_t *g =
        view.codes + (size_t)(panel + p) * view.code_stride + (size_t)first * D::kGroupBytes;
    const uint8_t *s = view.scales + (size_t)(panel + p) * view.scale_stride + first * kPanel;
    for (int group = 0; group < last - first; group++) {
      U bytes[4];
      expand_group<D>(g + group * D::kGroupBytes, bytes);
      for (int j = 0; j < 4; j++)
        u_store(scratch->weights + ((4 * group + j) * P + p) * 64, bytes[j]);
      if constexpr (D::kGroupScales)
        v_store(scratch->scales + (group * P + p) * kPanel, D::aux(s + group * kPanel));
    }
    scale[p] = block_scale<D>(w, panel + p, block);
  }
  // The next block comes from memory while this one is used.
  if (last < view.groups)
    fetch_block<D, P>(view, panel, block + 1);
  else
    fetch_block<D, P>(view, panel + P, 0);
  constexpr int kMost = D::kGroupScales ? (int)kIntGroupColumns : (int)kIntTileColumns;
  int c = 0;
#define KSL_TILES(C)                                                                       \
  for (; (C) <= kMost && c + (C) <= columns; c += (C)) {                                   \
    constexpr int kColumns = (C) <= kMost ? (C) : 1;                                       \
    float *out = scratch->out + c * P * kPanel;                                            \
    if constexpr (D::kGroupScales)                                                         \
      int_tile_groups<P, kColumns>(scratch->weights, quads, scratch->scales, x + c, scale, \
                                   block == 0, out);                                       \
    else                                                                                   \
      int_tile<P, kColumns>(scratch->weights, quads, x + c, scale, block == 0, out);       \
  }
  KSL_TILES(kMost)
  KSL_TILES(8)
  KSL_TILES(4)
  KSL_TILES(2)
  KSL_TILES(1)
#undef KSL_TILES
}

template <class D, int P>
KSL_INLINE void int_panels(const Matrix *w, const PanelView &view, const IntInput &in, int panel,
                           int column0, int columns, IntScratch *scratch, float *y, size_t ys) {
  for (int block = 0; block * kBlockGroups < view.groups; block++)
    int_block<D, P>(w, view, in.at(block) + column0, panel, columns, block, scratch);
  const int row = panel * kPanel;
  for (int c = 0; c < columns; c++) {
    for (int p = 0; p < P; p++) {
      const V sum = v_load(scratch->out + (c * P + p) * kPanel);
      float *to = y + (column0 + c) * ys + row + p * kPanel;
      const int rows = w->rows - row - p * kPanel;
      if (rows >= kPanel)
        v_store(to, sum);
      else
        v_store_n(to, sum, rows);
    }
  }
}

template <class D>
static void int_tiled(const Matrix *w, const IntInput &in, int n, int panel0, int panel1, float *y,
                      size_t ys) {
  constexpr int P = D::kGroupScales ? (int)kIntGroupPanels : (int)kIntTilePanels;
  IntScratch scratch;
  const PanelView view = panel_view<D>(w);
  for (int c = 0; c < n; c += kChunkColumns) {
    const int columns = n - c < kChunkColumns ? n - c : (int)kChunkColumns;
    int panel = panel0;
    for (; panel + P <= panel1; panel += P)
      int_panels<D, P>(w, view, in, panel, c, columns, &scratch, y, ys);
    for (; panel < panel1; panel++)
      int_panels<D, 1>(w, view, in, panel, c, columns, &scratch, y, ys);
  }
}

constexpr int int_direct_width(int columns) {
  return columns < kIntDirectColumns ? columns : (int)kIntDirectColumns;
}

template <class D, bool kOnce>
static void int_few(const Matrix *w, const IntInput &in, int n, int p0, int p1, float *y,
                    size_t ys) {
  switch (n) {
    case 1:
      return int_direct<D, 1, kOnce>(w, in, p0, p1, y, ys);
    case 2:
      return int_direct<D, int_direct_width(2), kOnce>(w, in, p0, p1, y, ys);
    case 3:
      return int_direct<D, int_direct_width(3), kOnce>(w, in, p0, p1, y, ys);
    case 4:
      return int_direct<D, int_direct_width(4), kOnce>(w, in, p0, p1, y, ys);
    case 5:
      return int_direct<D, int_direct_width(5), kOnce>(w, in, p0, p1, y, ys);
    case 6:
      return int_direct<D, int_direct_width(6), kOnce>(w, in, p0, p1, y, ys);
    case 7:
      return int_direct<D, int_direct_width(7), kOnce>(w, in, p0, p1, y, ys);
    default:
      return int_direct<D, int_direct_width(8), kOnce>(w, in, p0, p1, y, ys);
  }
}

template <class D>
static void gemm_int_of(const Matrix *w, const IntInput &in, int n, int r0, int r1, float *y,
                        size_t ys) {
  const int p0 = r0 / kPanel, p1 = (r1 + kPanel - 1) / kPanel;
  if (n <= kIntDirectColumns) return int_few<D, true>(w, in, n, p0, p1, y, ys);
  if constexpr (kIntTileColumns > 1) {
    int_tiled<D>(w, in, n, p0, p1, y, ys);
  } else {
    // A panel for a part of the columns after the other: it comes from memory for the first one
    // only.
    for (int column = 0; column < n; column += kPartedColumns) {
      const int columns = n - column < kPartedColumns ? n - column : (int)kPartedColumns;
      const int parts = (columns + kIntDirectColumns - 1) / kIntDirectColumns;
      for (int panel = p0; panel < p1; panel++) {
        for (int i = 0; i < parts; i++) {
          const int c = column + columns * i / parts, end = column + columns * (i + 1) / parts;
          int_few<D, false>(w, {in.x + c, in.stride}, end - c, panel, panel + 1, y + c * ys, ys);
        }
      }
    }
  }
}

static void gemm_int(const Matrix *w, const QuantizedBlock *x, size_t stride, int n, int r0, int r1,
                     float *y, size_t ys) {
  if (n <= 0 || r1 <= r0) return;
  const IntInput in = {x, stride};
  if (w->encoding == KSL_ENC_E2M3)
    gemm_int_of<DecodeE2m3>(w, in, n, r0, r1, y, ys);
  else if (w->encoding == KSL_ENC_NVFP4)
    gemm_int_of<DecodeNvfp4>(w, in, n, r0, r1, y, ys);
  else
    __builtin_trap();
}

}  // namespace
}  // namespace ksl
