// Gated full attention over paged keys and values, for the trunk and the MTP layer.
#include <math.h>
#include <string.h>

#include "state.h"

namespace ksl {

namespace {

struct LayerTask {
  Backend *b;
  const FullWeights *w;
  int kv;         // KV layer
  int first_key;  // 1 for the MTP layer, which has no row 0
};

LayerTask layer_task(Backend *b, int layer) {
  return {b, &b->layers[layer].full, b->layers[layer].index, layer == b->spec->layers ? 1 : 0};
}

// Query and key heads: norm, then rotary.
void heads_task(void *context, int, int begin, int end) {
  const LayerTask *t = static_cast<const LayerTask *>(context);
  Backend *b = t->b;
  const ModelSpec *s = b->spec;
  const int d = s->head_dim, half = s->rotary_dims / 2;
  for (int c = begin; c < end; c++) {
    const float *cos = b->batch->cos + static_cast<size_t>(c) * half;
    const float *sin = b->batch->sin + static_cast<size_t>(c) * half;
    float *k = b->k + c * b->kv_stride;
    for (int h = 0; h < s->kv_heads; h++) {
      b->kernels->rmsnorm(k + h * d, t->w->k_norm, d, s->norm_eps, k + h * d);
      b->kernels->rope(k + h * d, cos, sin, half);
    }
    if (b->kv_only) continue;
    const float *query_gate = b->query_gate + c * b->query_gate_stride;
    float *q = b->q + c * b->query_stride;
    for (int h = 0; h < s->heads; h++) {
      b->kernels->rmsnorm(query_gate + 2 * h * d, t->w->q_norm, d, s->norm_eps, q + h * d);
      b->kernels->rope(q + h * d, cos, sin, half);
    }
  }
}

void store_task(void *context, int, int begin, int end) {
  const LayerTask *t = static_cast<const LayerTask *>(context);
  Backend *b = t->b;
  const ModelSpec *s = b->spec;
  const int d = s->head_dim;
  for (int c = begin; c < end; c++) {
    const int slot = b->batch->slot[c], position = b->batch->position[c];
    for (int h = 0; h < s->kv_heads; h++) {
      uint8_t *row = kv_at(b, slot, t->kv, position, h);
      if (position < t->first_key) {
        memset(row, 0, b->kv_row);
        memset(row + b->kv_side, 0, b->kv_row);
        continue;
      }
      b->kernels->kv_store(b->config->kv_format, b->k + c * b->kv_stride + h * d, d, row);
      b->kernels->kv_store(b->config->kv_format, b->v + c * b->kv_stride + h * d, d,
                           row + b->kv_side);
    }
  }
}

inline int tiles_of(int position) {
  return position / kTileKeys + 1;
}

// The group's queries of one column and KV head, scaled.
void load_query(const Backend *b, int column, int head, float *query) {
  const ModelSpec *s = b->spec;
  const int n = s->heads / s->kv_heads * s->head_dim;
  const float *q = b->q + column * b->query_stride + static_cast<size_t>(head) * n;
  const float scale = 1.0f / sqrtf(static_cast<float>(s->head_dim));
  for (int i = 0; i < n; i++) query[i] = q[i] * scale;
}

// Partial attention over one tile of keys, as far as `column` sees it, of `queries` query heads:
// the group of that column, or groups of several columns that see the same keys.
void run_tile(const LayerTask *t, WorkerScratch *scratch, const float *query, int queries,
              int column, int head, int tile, float *m, float *l, float *acc) {
  Backend *b = t->b;
  const ModelSpec *s = b->spec;
  const int position = b->batch->position[column], slot = b->batch->slot[column];
  const int block_tokens = b->config->block_tokens;
  const size_t step = b->kv_row * s->kv_heads;
  int from = tile * kTileKeys, to = from + kTileKeys;
  if (from < t->first_key) from = t->first_key;
  if (to > position + 1) to = position + 1;
  int n = 0;
  while (from < to) {  // pieces that lie in one block
    const uint8_t *row = kv_at(b, slot, t->kv, from, head);
    int piece = block_tokens - from % block_tokens;
    if (piece > to - from) piece = to - from;
    for (int i = 0; i < piece; i++, n++, row += step) {
      scratch->keys[n] = row;
      scratch->values[n] = row + b->kv_side;
    }
    from += piece;
  }
  b->kernels->attn_tile(b->config->kv_format, query, s->head_dim, queries, s->head_dim,
                        scratch->keys, scratch->values, n, m, l, acc);
}

void start(const ModelSpec *s, int queries, float *m, float *l, float *acc) {
  for (int h = 0; h < queries; h++) {
    m[h] = -INFINITY;
    l[h] = 0;
  }
  memset(acc, 0, sizeof(float) * queries * s->head_dim);
}

void combine(const Backend *b, int queries, float *m, float *l, float *acc, const float *tile_m,
             const float *tile_l, const float *tile_acc) {
  const int d = b->spec->head_dim;
  for (int h = 0; h < queries; h++) {
    b->kernels->attn_combine(&m[h], &l[h], acc + h * d, tile_m[h], tile_l[h], tile_acc + h * d, d);
  }
}

void finish(const Backend *b, int column, int head, const float *l, const float *acc) {
  const ModelSpec *s = b->spec;
  const int group = s->heads / s->kv_heads, d = s->head_dim;
  float *out = b->o + column * b->query_stride + static_cast<size_t>(head) * group * d;
  for (int h = 0; h < group; h++) b->kernels->attn_finish(acc + h * d, l[h], d, out + h * d);
}

void no_keys(const Backend *b, int column, int head) {
  const int n = b->spec->heads / b->spec->kv_heads * b->spec->head_dim;
  memset(b->o + column * b->query_stride + static_cast<size_t>(head) * n, 0, n * sizeof(float));
}

// How many columns from `column` on, at most `most`, are consecutive positions of one row.
int run_of_columns(const Backend *b, int column, int most) {
  const Batch *batch = b->batch;
  int n = 1;
  while (n < most && batch->slot[column + n] == batch->slot[column] &&
         batch->position[column + n] == batch->position[column] + n)
    n++;
  return n;
}

// Items are (KV head, column) pairs, heads outermost: neighbours share keys. Consecutive columns of
// a row go through the tiles that all of them see whole together, so that each key is read and
// widened once for them; a query head's bits do not depend on its company.
void core_task(void *context, int worker, int begin, int end) {
  const LayerTask *t = static_cast<const LayerTask *>(context);
  Backend *b = t->b;
  WorkerScratch *w = &b->workers[worker];
  const int group = b->spec->heads / b->spec->kv_heads, d = b->spec->head_dim;
  const size_t width = static_cast<size_t>(group) * d;
  for (int i = begin; i < end;) {
    const int head = i / b->batch->n, column = i % b->batch->n;
    const int position = b->batch->position[column];
    if (position < t->first_key) {
      no_keys(b, column, head);
      i++;
      continue;
    }
    int most = kMaxGroup / group;
    if (most > end - i) most = end - i;
    if (most > b->batch->n - column) most = b->batch->n - column;
    const int columns = run_of_columns(b, column, most);
    for (int c = 0; c < columns; c++) load_query(b, column + c, head, w->query + c * width);
    start(b->spec, columns * group, w->m, w->l, w->acc);
    const int shared = (position + 1) / kTileKeys;
    for (int tile = 0; tile < shared; tile++) {
      run_tile(t, w, w->query, columns * group, column, head, tile, w->tile_m, w->tile_l,
               w->tile_acc);
      combine(b, columns * group, w->m, w->l, w->acc, w->tile_m, w->tile_l, w->tile_acc);
    }
    for (int c = 0; c < columns; c++) {
      float *m = w->m + c * group, *l = w->l + c * group, *acc = w->acc + c * width;
      for (int tile = shared; tile < tiles_of(position + c); tile++) {
        run_tile(t, w, w->query + c * width, group, column + c, head, tile, w->tile_m, w->tile_l,
                 w->tile_acc);
        combine(b, group, m, l, acc, w->tile_m, w->tile_l, w->tile_acc);
      }
      finish(b, column + c, head, l, acc);
    }
    i += columns;
  }
}

// One pair split over tiles: workers fill partials, the caller combines them in order.
struct TileTask {
  LayerTask layer;
  int column, head, first;  // tile of item 0
  const float *query;
};

size_t partial_floats(const ModelSpec *s) {
  const size_t group = s->heads / s->kv_heads;
  return (group * (s->head_dim + 2) + 15) / 16 * 16;
}

void tile_task(void *context, int worker, int begin, int end) {
  const TileTask *t = static_cast<const TileTask *>(context);
  Backend *b = t->layer.b;
  const ModelSpec *s = b->spec;
  const int group = s->heads / s->kv_heads;
  for (int i = begin; i < end; i++) {
    float *acc = b->partials + i * partial_floats(s);
    float *m = acc + group * s->head_dim;
    run_tile(&t->layer, &b->workers[worker], t->query, group, t->column, t->head, t->first + i, m,
             m + group, acc);
  }
}

void core_by_tiles(const LayerTask *layer, int column, int head) {
  Backend *b = layer->b;
  const ModelSpec *s = b->spec;
  WorkerScratch *w = &b->workers[0];
  const int group = s->heads / s->kv_heads;
  const int tiles = tiles_of(b->batch->position[column]);
  const int64_t cost = static_cast<int64_t>(group) * s->head_dim * kTileKeys * 2;
  load_query(b, column, head, w->query);
  start(s, group, w->m, w->l, w->acc);
  for (int first = 0; first < tiles; first += b->partial_tiles) {
    const int n = tiles - first < b->partial_tiles ? tiles - first : b->partial_tiles;
    TileTask task = {*layer, column, head, first, w->query};
    parallel(b, n, n * cost, tile_task, &task);
    for (int i = 0; i < n; i++) {
      const float *acc = b->partials + i * partial_floats(s);
      const float *m = acc + group * s->head_dim;
      combine(b, group, w->m, w->l, w->acc, m, m + group, acc);
    }
  }
  finish(b, column, head, w->l, w->acc);
}

void gate_task(void *context, int, int begin, int end) {
  const Backend *b = static_cast<const Backend *>(context);
  const int d = b->spec->head_dim;
  for (int c = begin; c < end; c++) {
    for (int h = 0; h < b->spec->heads; h++) {
      b->kernels->sigmoid_mul(b->o + c * b->query_stride + h * d,
                              b->query_gate + c * b->query_gate_stride + (2 * h + 1) * d, d);
    }
  }
}

}  // namespace

void stage_attn_project(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const FullWeights *w = &b->layers[layer].full;
  const Projection projections[] = {{&w->k, b->k, b->kv_stride},
                                    {&w->v, b->v, b->kv_stride},
                                    {&w->q, b->query_gate, b->query_gate_stride}};
  project(b, projections, b->kv_only ? 2 : 3, b->normed, b->hidden_stride, b->batch->n);
}

void stage_attn_heads(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  LayerTask task = layer_task(b, layer);
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->q_width * 2, heads_task,
           &task);
}

void stage_attn_store(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  LayerTask task = layer_task(b, layer);
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->kv_width, store_task,
           &task);
}

void stage_attn_core(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  LayerTask task = layer_task(b, layer);
  const int pairs = b->batch->n * b->spec->kv_heads;
  int64_t keys = 0;
  for (int c = 0; c < b->batch->n; c++) keys += b->batch->position[c] + 1;
  if (b->threads > 1 && pairs < 2 * b->threads && keys > 8 * kTileKeys * b->batch->n) {
    for (int i = 0; i < pairs; i++)
      core_by_tiles(&task, i / b->spec->kv_heads, i % b->spec->kv_heads);
  } else {
    parallel(b, pairs, keys * b->spec->q_width * 2, core_task, &task);
  }
}

void stage_attn_gate(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->q_width * 4, gate_task, b);
}

void stage_attn_out(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const Projection projection = {&b->layers[layer].full.out, b->mixed, b->hidden_stride};
  project(b, &projection, 1, b->o, b->query_stride, b->batch->n);
}

}  // namespace ksl
