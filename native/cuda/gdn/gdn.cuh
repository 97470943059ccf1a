// Gated DeltaNet between its projections: convolution, gates, token recurrence, gated norm.
#pragma once
#include "../common/rows.cuh"
#include "../common/split.cuh"

namespace ksl {

constexpr int kTaps = 4;
constexpr int kHistory = kTaps - 1;
constexpr int kMaxKeyDim = 128;
constexpr int kMaxValueDim = 256;

struct GdnShape {
  int key_heads, value_heads, key_dim, value_dim, channels;
};

// Slabs: state of a linear layer at state_offset, its history at history_offset.
struct SlabPool {
  float *data;
  int64_t stride;  // floats of one slab
  int64_t state_offset, history_offset;
};

struct ConvArgs {
  GdnShape shape;
  const RowInfo *rows;
  const int32_t *row_of;  // by column
  const int32_t *list;    // the columns that it is for; null: all
  SlabPool slabs;
  const float *qkv;  // before the convolution
  int qkv_stride;
  const float *taps;        // [4][channels]
  float *conv, *conv_silu;  // conv_silu: before the unit norm, null: not wanted
  int conv_stride;
  const float *a, *b, *decay_rate, *dt_bias;
  float *g, *decay, *beta;
  int head_stride;
  bool gates;    // g, decay and beta are wanted
  bool history;  // rows of one column write their history
  bool keep;     // replay of kept rows: columns count from `keep` on, row_of by kept column
};
void gdn_conv(Device *device, const ConvArgs &a, int columns);

// Saves what a replay of VERIFY rows needs: pre-conv columns, decay and beta, one behind the other.
struct KeepArgs {
  const RowInfo *rows;
  const int32_t *row_of;
  const float *qkv, *decay, *beta;
  int channels, heads, qkv_stride, head_stride;
  float *to;  // [keep columns][to_stride]: qkv_stride, head_stride, head_stride
  int64_t to_stride;
};
void gdn_keep(Device *device, const KeepArgs &a, int columns);

// History after rows (and at their cuts). `keep`: only rows with kept columns, else only the others
// of more than one column.
struct HistoryArgs {
  int channels;
  const RowInfo *rows;
  SlabPool slabs;
  const float *qkv;
  int qkv_stride;
  bool keep;
};
void gdn_history(Device *device, const HistoryArgs &a, int n_rows);

struct ScanArgs {
  GdnShape shape;
  const RowInfo *rows;
  SlabPool slabs;
  const float *conv;
  int conv_stride;
  const float *decay, *beta;
  int head_stride;
  float *core;  // null: only the state is wanted
  int core_stride;
  const float *z, *norm;
  float *gated;
  Split split;
  float eps;
  bool keep;  // replay of kept rows: `committed` columns from `keep` on
};
void gdn_scan(Device *device, const ScanArgs &a, int n_rows);
// gdn_scan for heads of 128 dims.
void gdn_step(Device *device, const ScanArgs &a, int n_rows);

}  // namespace ksl
