// Gated DeltaNet: projections, causal convolution, gates, the token recurrence, and the late commit
// of VERIFY rows.
#include <math.h>
#include <string.h>

#include "state.h"

namespace ksl {

namespace {

struct LayerTask {
  Backend *b;
  const LinearWeights *w;
  int linear;  // index among the linear layers
};

// The pre-conv column `offset` positions from the start of the row, -3..-1 from the history.
inline const float *column_at(const float *columns, size_t stride, const float *history,
                              int channels, int offset) {
  return offset >= 0 ? columns + offset * stride : history + (kHistory + offset) * channels;
}

// history := the three columns that end with position `n` of the row, for channels [c0, c0 +
// width). Ascending order keeps what a later step still reads when `to` is `history` itself.
void push_history(const float *columns, size_t stride, const float *history, int channels, int n,
                  int c0, int width, float *to) {
  for (int j = 0; j < kHistory; j++) {
    memmove(to + j * channels + c0,
            column_at(columns, stride, history, channels, n - kHistory + j) + c0,
            width * sizeof(float));
  }
}

void convolve(const Backend *b, const LinearWeights *w, const float *columns, size_t stride,
              const float *history, int offset, int c0, int width, float *out) {
  const int channels = b->spec->conv_channels;
  const float *window[kConvTaps];
  for (int j = 0; j < kConvTaps; j++) {
    window[j] = column_at(columns, stride, history, channels, offset - kHistory + j) + c0;
  }
  b->kernels->conv_silu(window, w->taps + c0, channels, width, out + c0);
}

// Items are blocks of channels; each takes all rows, so that nobody else reads the history it
// writes.
void conv_task(void *context, int, int begin, int end) {
  const LayerTask *t = static_cast<const LayerTask *>(context);
  Backend *b = t->b;
  const int channels = b->spec->conv_channels;
  for (int i = begin; i < end; i++) {
    const int c0 = i * kConvChannels;
    const int width = channels - c0 < kConvChannels ? channels - c0 : kConvChannels;
    for (int r = 0; r < b->n_rows; r++) {
      const RowPlan *row = &b->rows[r];
      if (!row->n) continue;
      const float *columns = b->qkv + row->column * b->conv_stride;
      float *history = slab_history(b, row->slab, t->linear);
      for (int j = 0; j < row->n; j++) {
        convolve(b, t->w, columns, b->conv_stride, history, j, c0, width,
                 b->conv + (row->column + j) * b->conv_stride);
      }
      if (row->keep >= 0) continue;
      for (int k = 0; k < row->n_cuts; k++) {
        push_history(columns, b->conv_stride, history, channels, row->cut_offset[k], c0, width,
                     slab_history(b, row->cut_slab[k], t->linear));
      }
      push_history(columns, b->conv_stride, history, channels, row->n, c0, width, history);
    }
  }
}

inline float *kept_column(const Backend *b, int linear, int column) {
  return b->keep + (static_cast<size_t>(linear) * b->keep_columns + column) * b->keep_floats;
}

void keep_columns(Backend *b, int linear) {
  const ModelSpec *s = b->spec;
  for (int r = 0; r < b->n_rows; r++) {
    const RowPlan *row = &b->rows[r];
    if (row->keep < 0) continue;
    for (int j = 0; j < row->n; j++) {
      const size_t c = row->column + j;
      float *kept = kept_column(b, linear, row->keep + j);
      memcpy(kept, b->qkv + c * b->conv_stride, s->conv_channels * sizeof(float));
      kept += b->conv_stride;
      memcpy(kept, b->decay + c * b->head_stride, s->lin_value_heads * sizeof(float));
      kept += b->head_stride;
      memcpy(kept, b->beta + c * b->head_stride, s->lin_value_heads * sizeof(float));
    }
  }
}

// Unit queries and keys of one column, in place.
void unit_heads(const Backend *b, float *column) {
  const ModelSpec *s = b->spec;
  const int dk = s->lin_key_dim;
  const float scale = 1.0f / sqrtf(static_cast<float>(dk));
  for (int h = 0; h < s->lin_key_heads; h++) {
    float *q = column + h * dk, *k = q + s->lin_key_heads * dk;
    b->kernels->l2norm(q, dk, 1e-6f, scale, q);
    b->kernels->l2norm(k, dk, 1e-6f, 1.0f, k);
  }
}

void unit_task(void *context, int, int begin, int end) {
  const Backend *b = static_cast<const Backend *>(context);
  for (int c = begin; c < end; c++) unit_heads(b, b->conv + c * b->conv_stride);
}

double softplus(double x) {
  return x > 30 ? x : log1p(exp(x));
}

void gates_task(void *context, int, int begin, int end) {
  const LayerTask *t = static_cast<const LayerTask *>(context);
  const Backend *b = t->b;
  for (int c = begin; c < end; c++) {
    const size_t at = c * b->head_stride;
    for (int h = 0; h < b->spec->lin_value_heads; h++) {
      const double a = static_cast<double>(b->gate_a[at + h]) + t->w->dt_bias[h];
      const float g = static_cast<float>(t->w->decay[h] * softplus(a));
      b->g[at + h] = g;
      b->decay[at + h] = static_cast<float>(exp(static_cast<double>(g)));
      b->beta[at + h] =
          static_cast<float>(1.0 / (1.0 + exp(-static_cast<double>(b->gate_b[at + h]))));
    }
  }
}

// Where a scan reads and writes: token t at base + t * stride.
struct ScanInput {
  const float *conv;
  const float *decay, *beta;
  float *out;
  size_t conv_stride, gate_stride, out_stride;
  int n;
};

// Value columns of block `item` (of all heads) through the tokens of one row.
void scan_block(Backend *b, const RowPlan *row, const ScanInput *in, int linear, int item,
                bool commit) {
  const ModelSpec *s = b->spec;
  const int dk = s->lin_key_dim, dv = s->lin_value_dim;
  const int per_head = (dv + kScanColumns - 1) / kScanColumns;
  const int head = item / per_head, v0 = item % per_head * kScanColumns;
  const int width = dv - v0 < kScanColumns ? dv - v0 : kScanColumns;
  const int key_head = head / (s->lin_value_heads / s->lin_key_heads);
  const int keys = s->lin_key_heads * dk;
  const size_t at = static_cast<size_t>(head) * dk * dv + v0;
  float *cut_state[KSL_MAX_CUTS];
  int n_cuts = 0;
  for (; n_cuts < row->n_cuts; n_cuts++) {
    cut_state[n_cuts] = slab_state(b, row->cut_slab[n_cuts], linear) + at;
  }
  const float *q = in->conv + key_head * dk;
  const float *v = in->conv + 2 * keys + head * dv + v0;
  b->kernels->delta_scan(q, q + keys, in->conv_stride, v, in->out + head * dv + v0, in->conv_stride,
                         in->out_stride, in->decay + head, in->beta + head, in->gate_stride, in->n,
                         dk, dv, width, slab_state(b, row->slab, linear) + at, commit, n_cuts,
                         row->cut_offset, cut_state);
}

int scan_blocks(const ModelSpec *s) {
  return s->lin_value_heads * ((s->lin_value_dim + kScanColumns - 1) / kScanColumns);
}

// Items are value column blocks; each takes all rows, so that rows of any length split evenly.
void scan_task(void *context, int, int begin, int end) {
  const LayerTask *t = static_cast<const LayerTask *>(context);
  Backend *b = t->b;
  for (int i = begin; i < end; i++) {
    for (int r = 0; r < b->n_rows; r++) {
      const RowPlan *row = &b->rows[r];
      if (!row->n) continue;
      const size_t c = row->column;
      const ScanInput in = {b->conv + c * b->conv_stride,
                            b->decay + c * b->head_stride,
                            b->beta + c * b->head_stride,
                            b->core + c * b->value_stride,
                            b->conv_stride,
                            b->head_stride,
                            b->value_stride,
                            row->n};
      scan_block(b, row, &in, t->linear, i, row->keep < 0);
    }
  }
}

struct NormTask {
  const Backend *b;
  const float *gain;
};

void gated_norm_task(void *context, int, int begin, int end) {
  const NormTask *t = static_cast<const NormTask *>(context);
  const Backend *b = t->b;
  const int dv = b->spec->lin_value_dim;
  for (int c = begin; c < end; c++) {
    const size_t at = c * b->value_stride;
    for (int h = 0; h < b->spec->lin_value_heads; h++) {
      b->kernels->gated_norm(b->core + at + h * dv, t->gain, b->z + at + h * dv, dv,
                             b->spec->norm_eps, b->gated + at + h * dv);
    }
  }
}

// Items are linear layers.
void commit_task(void *context, int worker, int begin, int end) {
  Backend *b = static_cast<Backend *>(context);
  const ModelSpec *s = b->spec;
  float *conv = b->workers[worker].replay;
  float *out = conv + (1 + KSL_MAX_DRAFT) * b->conv_stride;
  for (int layer = 0; layer < s->layers; layer++) {
    const LayerWeights *w = &b->layers[layer];
    if (w->kind != KSL_LAYER_LINEAR || w->index < begin || w->index >= end) continue;
    for (int r = 0; r < b->n_rows; r++) {
      const RowPlan *row = &b->rows[r];
      if (row->keep < 0) continue;
      const float *kept = kept_column(b, w->index, row->keep);
      float *history = slab_history(b, row->slab, w->index);
      const int channels = s->conv_channels;
      for (int j = 0; j < row->committed; j++) {
        convolve(b, &w->linear, kept, b->keep_floats, history, j, 0, channels,
                 conv + j * b->conv_stride);
        unit_heads(b, conv + j * b->conv_stride);
      }
      const ScanInput in = {conv,
                            kept + b->conv_stride,
                            kept + b->conv_stride + b->head_stride,
                            out,
                            b->conv_stride,
                            b->keep_floats,
                            b->value_stride,
                            row->committed};
      for (int i = 0; i < scan_blocks(s); i++) scan_block(b, row, &in, w->index, i, true);
      push_history(kept, b->keep_floats, history, channels, row->committed, 0, channels, history);
    }
  }
}

}  // namespace

void stage_gdn_project(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LinearWeights *w = &b->layers[layer].linear;
  const Projection projections[] = {{&w->qkv, b->qkv, b->conv_stride},
                                    {&w->z, b->z, b->value_stride},
                                    {&w->b, b->gate_b, b->head_stride},
                                    {&w->a, b->gate_a, b->head_stride}};
  project(b, projections, 4, b->normed, b->hidden_stride, b->batch->n);
}

void stage_gdn_conv(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  LayerTask task = {b, &b->layers[layer].linear, b->layers[layer].index};
  const int channels = b->spec->conv_channels;
  parallel(b, (channels + kConvChannels - 1) / kConvChannels,
           static_cast<int64_t>(b->batch->n) * channels * 4, conv_task, &task);
}

void stage_gdn_unit(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  const int64_t width = 2 * b->spec->lin_key_heads * b->spec->lin_key_dim;
  parallel(b, b->batch->n, b->batch->n * width, unit_task, b);
}

void stage_gdn_gates(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  LayerTask task = {b, &b->layers[layer].linear, b->layers[layer].index};
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->lin_value_heads * 400,
           gates_task, &task);
}

void stage_gdn_scan(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  LayerTask task = {b, &b->layers[layer].linear, b->layers[layer].index};
  const int64_t per_token = static_cast<int64_t>(b->spec->v_width) * b->spec->lin_key_dim * 4;
  keep_columns(b, task.linear);
  parallel(b, scan_blocks(b->spec), b->batch->n * per_token, scan_task, &task);
}

void stage_gdn_gated_norm(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  NormTask task = {b, b->layers[layer].linear.norm};
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->v_width * 4,
           gated_norm_task, &task);
}

void stage_gdn_out(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const Projection projection = {&b->layers[layer].linear.out, b->mixed, b->hidden_stride};
  project(b, &projection, 1, b->gated, b->value_stride, b->batch->n);
}

void gdn_commit_kept(Backend *b) {
  int64_t columns = 0;
  for (int r = 0; r < b->n_rows; r++) {
    if (b->rows[r].keep >= 0) columns += b->rows[r].committed;
  }
  if (!columns || !b->spec->linear_layers) return;
  const int64_t per_token = static_cast<int64_t>(b->spec->v_width) * b->spec->lin_key_dim * 4;
  parallel(b, b->spec->linear_layers, columns * per_token * b->spec->linear_layers, commit_task, b);
}

}  // namespace ksl
