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
// of more than one column; `tiled`: only rows that are.
struct HistoryArgs {
  int channels;
  const RowInfo *rows;
  SlabPool slabs;
  const float *qkv;
  int qkv_stride;
  bool keep, tiled;
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

// Everything between the projections of a linear layer in one kernel, for rows that are not tiled.
constexpr int kStepLayers = 64;
struct StepArgs {
  GdnShape shape;
  const RowInfo *rows;
  SlabPool slabs;  // offsets of the first layer
  int64_t state_layer, history_layer;
  const float *qkv;
  int qkv_stride;
  const float *taps[kStepLayers];  // by layer of the launch
  const float *a, *b, *decay_rate, *dt_bias;
  int head_stride;
  const float *z, *norm;
  float *core, *gated;  // null: not wanted
  int value_stride;
  Split split;
  float eps;
  // What a replay of VERIFY rows needs, as in KeepArgs, from layer to layer keep_layer floats.
  float *keep;
  int64_t keep_layer;
  int keep_stride;
  unsigned *arrived;  // [layers][max_rows][key_heads], zeros
  int n_rows, max_rows;
  bool single;     // no row has more than one token
  bool long_rows;  // so many tokens that two blocks a head are sooner done
  bool beside;     // the product in front leaves room for a block of a processor
  int together;    // blocks that the device takes at one time
};
// Whether it is there for such heads.
bool gdn_step_runs(const GdnShape &shape);
void gdn_step(Device *device, const StepArgs &a);
void gdn_single(Device *device, StepArgs a);        // what gdn_step does with single rows
void gdn_parts(Device *device, const StepArgs &a);  // and with few long ones
// Takes the committed columns of kept rows into the state and history of so many layers.
void gdn_replay(Device *device, const StepArgs &a, int layers);

// exp(g) with g = decay_rate softplus(a + dt_bias).
__device__ inline float gdn_decay(float a, float decay_rate, float dt_bias, float *g) {
  const float x = a + dt_bias;
  *g = decay_rate * (x > 20.0f ? x : log1pf(expf(x)));
  return expf(*g);
}

// Four elements from k on, a multiple of 4.
__device__ inline void split_store4(const Split &to, int token, int k, const float4 &v) {
  if (to.groups > 0) {
    const Panel panel = panel_of(to);
    uint8_t *const row = panel_row(panel, token, k >> 6);
    *reinterpret_cast<__half2 *>(row + panel_byte(token, k)) =
        __halves2half2(panel_half(v.x * to.scale), panel_half(v.y * to.scale));
    *reinterpret_cast<__half2 *>(row + panel_byte(token, k + 2)) =
        __halves2half2(panel_half(v.z * to.scale), panel_half(v.w * to.scale));
    return;
  }
  alignas(8)
      const __half halves[4] = {__float2half_rn(v.x * to.scale), __float2half_rn(v.y * to.scale),
                                __float2half_rn(v.z * to.scale), __float2half_rn(v.w * to.scale)};
  const uint2 both = *reinterpret_cast<const uint2 *>(halves);
  if (to.rows) {
    uint8_t *const row = split_row(to, token, k);
    *reinterpret_cast<unsigned *>(row + panel_byte(token, k)) = both.x;
    *reinterpret_cast<unsigned *>(row + panel_byte(token, k + 2)) = both.y;
    return;
  }
  *reinterpret_cast<uint2 *>(split_at(to, token, k & ~7) + (k & 4)) = both;
}

}  // namespace ksl
