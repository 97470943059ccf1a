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

// Parts of a kept column, behind its pre-conv channels.
inline float *kept_column(const Backend *b, int linear, int column) {
  return b->keep + (static_cast<size_t>(linear) * b->keep_columns + column) * b->keep_floats;
}
inline size_t kept_decay(const Backend *b) {
  return b->conv_stride;
}
inline size_t kept_keys(const Backend *b) {
  return kept_decay(b) + b->head_stride;
}
inline size_t kept_delta(const Backend *b) {
  return kept_keys(b) + b->key_stride;
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

// Where a row with drafts leaves the state that follows if all are accepted; null: nowhere.
float *spare_of(const Backend *b, const RowPlan *row) {
  return row->spare < 0 ? nullptr : b->spares[row->spare];
}

// Whether its kept columns are to be replayed.
bool is_replayed(const RowPlan *row) {
  return row->keep >= 0 && (row->spare < 0 || row->committed < row->n);
}

// Whether a row is one committed token, which is made in place.
bool is_step(const RowPlan *row) {
  return row->n == 1 && row->keep < 0 && row->n_cuts == 0;
}

// Channels [c0, c0 + width) of a row.
void convolve_row(const Backend *b, const LayerTask *t, const RowPlan *row, int c0, int width) {
  const int channels = b->spec->conv_channels;
  const float *columns = b->qkv + row->column * b->conv_stride;
  float *history = slab_history(b, row->slab, t->linear);
  for (int j = 0; j < row->n; j++) {
    convolve(b, t->w, columns, b->conv_stride, history, j, c0, width,
             b->conv + (row->column + j) * b->conv_stride);
  }
  if (row->keep >= 0) {
    if (float *spare = spare_of(b, row)) {
      push_history(columns, b->conv_stride, history, channels, row->n, c0, width,
                   slab_history(b, spare, t->linear));
    }
    for (int j = 0; j < row->n; j++) {
      memcpy(kept_column(b, t->linear, row->keep + j) + c0, columns + j * b->conv_stride + c0,
             width * sizeof(float));
    }
    return;
  }
  for (int k = 0; k < row->n_cuts; k++) {
    push_history(columns, b->conv_stride, history, channels, row->cut_offset[k], c0, width,
                 slab_history(b, row->cut_slab[k], t->linear));
  }
  push_history(columns, b->conv_stride, history, channels, row->n, c0, width, history);
}

// Items are blocks of channels; each takes all rows, so that nobody else reads the history it
// writes. Blocks of a row follow each other, as its history lies in memory.
void conv_task(void *context, int, int begin, int end) {
  const LayerTask *t = static_cast<const LayerTask *>(context);
  Backend *b = t->b;
  const int channels = b->spec->conv_channels;
  const int first = begin * kConvChannels;
  const int last = end * kConvChannels < channels ? end * kConvChannels : channels;
  for (int r = 0; r < b->n_rows; r++) {
    const RowPlan *row = &b->rows[r];
    if (!row->n) continue;
    if (is_step(row)) {
      const size_t at = row->column * b->conv_stride + first;
      const float *next =
          r + 1 < b->n_rows ? slab_history(b, b->rows[r + 1].slab, t->linear) + first : nullptr;
      b->kernels->conv_step(b->qkv + at, t->w->taps + first, channels, last - first,
                            slab_history(b, row->slab, t->linear) + first, next, b->conv + at);
      continue;
    }
    for (int c0 = first; c0 < last; c0 += kConvChannels)
      convolve_row(b, t, row, c0, last - c0 < kConvChannels ? last - c0 : kConvChannels);
  }
}

// Keys and decays of rows with drafts; the corrections follow from the scan.
void keep_columns(Backend *b, int linear) {
  const ModelSpec *s = b->spec;
  const int keys = s->lin_key_heads * s->lin_key_dim;
  for (int r = 0; r < b->n_rows; r++) {
    const RowPlan *row = &b->rows[r];
    if (row->keep < 0) continue;
    for (int j = 0; j < row->n; j++) {
      const size_t c = row->column + j;
      float *kept = kept_column(b, linear, row->keep + j);
      memcpy(kept + kept_decay(b), b->decay + c * b->head_stride,
             s->lin_value_heads * sizeof(float));
      memcpy(kept + kept_keys(b), b->conv + c * b->conv_stride + keys, keys * sizeof(float));
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

// Some value columns of one head, [v0, v0 + width).
struct ScanBlock {
  int head, key_head, v0, width;
  size_t values, keys, state;  // where they begin: in v and d, in q and k, in the state
};

// Of one head, and of all.
int head_blocks(const ModelSpec *s) {
  return (s->lin_value_dim + kScanColumns - 1) / kScanColumns;
}
int scan_blocks(const ModelSpec *s) {
  return s->lin_value_heads * head_blocks(s);
}

// Blocks that stay together: a head, whose rows of the state are whole then, where that divides
// the work evenly enough.
int scan_grain(const Backend *b) {
  const int heads = b->spec->lin_value_heads;
  return heads % b->threads == 0 || heads >= 4 * b->threads ? head_blocks(b->spec) : 1;
}

// Block `item`, counted through all heads, and those behind it in the same head up to `most` in
// all.
ScanBlock scan_block(const ModelSpec *s, int item, int most = 1) {
  const int dk = s->lin_key_dim, dv = s->lin_value_dim;
  const int per_head = head_blocks(s);
  const int width = most * kScanColumns;
  ScanBlock block;
  block.head = item / per_head;
  block.key_head = block.head / (s->lin_value_heads / s->lin_key_heads);
  block.v0 = item % per_head * kScanColumns;
  block.width = dv - block.v0 < width ? dv - block.v0 : width;
  block.values = static_cast<size_t>(block.head) * dv + block.v0;
  block.keys = static_cast<size_t>(block.key_head) * dk;
  block.state = static_cast<size_t>(block.head) * dk * dv + block.v0;
  return block;
}

// A block through the columns of one row. A row with drafts leaves the state, and the one that
// follows if all of them are accepted in its spare slab, and its corrections.
void scan_row(Backend *b, const RowPlan *row, int linear, const ScanBlock *block) {
  const ModelSpec *s = b->spec;
  const int keys = s->lin_key_heads * s->lin_key_dim;
  const size_t c = row->column;
  const float *conv = b->conv + c * b->conv_stride;
  const float *q = conv + block->keys;
  float *state = slab_state(b, row->slab, linear) + block->state, *after = state, *delta = nullptr;
  if (row->keep >= 0) {
    float *spare = spare_of(b, row);
    after = spare ? slab_state(b, spare, linear) + block->state : nullptr;
    delta = kept_column(b, linear, row->keep) + kept_delta(b) + block->values;
  }
  float *cut_state[KSL_MAX_CUTS];
  for (int k = 0; k < row->n_cuts; k++) {
    cut_state[k] = slab_state(b, row->cut_slab[k], linear) + block->state;
  }
  b->kernels->delta_scan(q, q + keys, b->conv_stride, conv + 2 * keys + block->values,
                         b->core + c * b->value_stride + block->values, b->conv_stride,
                         b->value_stride, b->decay + c * b->head_stride + block->head,
                         b->beta + c * b->head_stride + block->head, b->head_stride, row->n,
                         s->lin_key_dim, s->lin_value_dim, block->width, state, after, delta,
                         b->keep_floats, row->n_cuts, row->cut_offset, cut_state);
}

// One committed token of a row, for all value columns of the block. next: the state that follows.
void step_row(Backend *b, const RowPlan *row, int linear, const ScanBlock *block,
              const float *next) {
  const ModelSpec *s = b->spec;
  const int keys = s->lin_key_heads * s->lin_key_dim;
  const size_t c = row->column, gate = c * b->head_stride + block->head;
  const float *conv = b->conv + c * b->conv_stride, *q = conv + block->keys;
  b->kernels->delta_step(q, q + keys, conv + 2 * keys + block->values,
                         b->core + c * b->value_stride + block->values, b->decay[gate],
                         b->beta[gate], s->lin_key_dim, s->lin_value_dim, block->width,
                         slab_state(b, row->slab, linear) + block->state, next);
}

// Where the state lies that follows block `i` of row `r` in a task of blocks [begin, end): of the
// same row, or of the next one.
const float *next_state(const Backend *b, int linear, int r, int i, int begin, int end) {
  if (i >= end) {
    i = begin;
    if (++r == b->n_rows) return nullptr;
  }
  return slab_state(b, b->rows[r].slab, linear) + scan_block(b->spec, i).state;
}

// Items are value column blocks; each is done in all rows, so that rows of any length split evenly.
void scan_task(void *context, int, int begin, int end) {
  const LayerTask *t = static_cast<const LayerTask *>(context);
  Backend *b = t->b;
  for (int r = 0; r < b->n_rows; r++) {
    const RowPlan *row = &b->rows[r];
    if (is_step(row)) {
      for (int i = begin; i < end;) {
        const ScanBlock block = scan_block(b->spec, i, end - i);
        i += (block.width + kScanColumns - 1) / kScanColumns;
        step_row(b, row, t->linear, &block, next_state(b, t->linear, r, i, begin, end));
      }
    } else if (row->n) {
      for (int i = begin; i < end; i++) {
        const ScanBlock block = scan_block(b->spec, i);
        scan_row(b, row, t->linear, &block);
      }
    }
  }
}

struct NormTask {
  const Backend *b;
  const float *gain;
  const Rounding *rounding;
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
    round_column(t->rounding, b->gated + at, c);
  }
}

// Items are blocks of all linear layers; the first one of a layer also moves its history on.
void commit_task(void *context, int, int begin, int end) {
  Backend *b = static_cast<Backend *>(context);
  const ModelSpec *s = b->spec;
  const int blocks = scan_blocks(s);
  for (int i = begin, taken; i < end; i += taken) {
    const int linear = i / blocks;
    const ScanBlock block = scan_block(s, i % blocks, end - i);
    taken = (block.width + kScanColumns - 1) / kScanColumns;
    for (int r = 0; r < b->n_rows; r++) {
      const RowPlan *row = &b->rows[r];
      if (!is_replayed(row)) continue;
      const float *kept = kept_column(b, linear, row->keep);
      b->kernels->delta_replay(kept + kept_keys(b) + block.keys, b->keep_floats,
                               kept + kept_delta(b) + block.values, b->keep_floats,
                               kept + kept_decay(b) + block.head, b->keep_floats, row->committed,
                               s->lin_key_dim, s->lin_value_dim, block.width,
                               slab_state(b, row->slab, linear) + block.state);
      if (i % blocks) continue;
      float *history = slab_history(b, row->slab, linear);
      push_history(kept, b->keep_floats, history, s->conv_channels, row->committed, 0,
                   s->conv_channels, history);
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
           static_cast<int64_t>(b->batch->n) * channels * kConvCost, conv_task, &task);
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
  parallel(b, scan_blocks(b->spec), b->batch->n * per_token, scan_task, &task, scan_grain(b));
}

void stage_gdn_gated_norm(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LinearWeights *w = &b->layers[layer].linear;
  const Matrix *const reader = &w->out;
  const Rounding rounding = begin_rounding(b, b->gated, b->batch->n, &reader, 1);
  NormTask task = {b, w->norm, &rounding};
  const int64_t cost = static_cast<int64_t>(b->batch->n) * b->spec->v_width * kGateCost;
  parallel(b, b->batch->n, cost + rounding_cost(&rounding), gated_norm_task, &task);
}

void stage_gdn_out(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const Projection projection = {&b->layers[layer].linear.out, b->mixed, b->hidden_stride};
  project(b, &projection, 1, b->gated, b->value_stride, b->batch->n);
}

void gdn_commit_kept(Backend *b) {
  int64_t columns = 0;
  for (int r = 0; r < b->n_rows; r++) {
    RowPlan *row = &b->rows[r];
    if (is_replayed(row)) {
      columns += row->committed;
    } else if (row->keep >= 0) {
      // The spare slab is the slab from now on.
      float **place = &b->places[row->row->slab], **spare = &b->spares[row->spare];
      memcpy(slab_hidden(b, *spare), slab_hidden(b, *place), b->spec->hidden * sizeof(float));
      row->slab = *spare;
      *spare = *place;
      *place = row->slab;
    }
  }
  if (!columns || !b->spec->linear_layers) return;
  const int64_t per_token = static_cast<int64_t>(b->spec->v_width) * b->spec->lin_key_dim * 4;
  parallel(b, b->spec->linear_layers * scan_blocks(b->spec),
           columns * per_token * b->spec->linear_layers, commit_task, b, head_blocks(b->spec));
}

}  // namespace ksl
