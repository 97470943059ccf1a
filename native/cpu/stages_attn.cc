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
  bool ring;      // recent keys are read in int8
};

LayerTask layer_task(Backend *b, int layer) {
  const bool mtp = layer == b->spec->layers;
  return {b, &b->layers[layer].full, b->layers[layer].index, mtp ? 1 : 0, !mtp && b->ring_tokens};
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
  const int d = s->head_dim, format = b->config->kv_format;
  for (int c = begin; c < end; c++) {
    const int position = b->batch->position[c];
    const int32_t block =
        b->batch->block ? b->batch->block[c] : block_of(b, b->batch->slot[c], position);
    const KvPlace place = kv_place_in(b, block, t->kv, position);
    for (int h = 0; h < s->kv_heads; h++) {
      uint8_t *plane[kKvPlanes];
      for (int p = 0; p < kKvPlanes; p++) {
        plane[p] = place.layer + b->kv_offset[p] +
                   (place.row + h * b->config->block_tokens) * b->kv_bytes[p];
        if (position < t->first_key) memset(plane[p], 0, b->kv_bytes[p]);
      }
      const int at = position % b->config->block_tokens;
      uint8_t *piece = b->codes ? code_piece_at(b, block, t->kv, h, at) : nullptr;
      if (position < t->first_key) {
        if (piece) b->bf16->codes.hide(d, piece, at % kPieceKeys);
        continue;
      }
      kv_encode(format, kKvKey, b->k + c * b->kv_stride + h * d, d, plane[0], plane[1]);
      kv_encode(format, kKvValue, b->v + c * b->kv_stride + h * d, d, plane[2], plane[3]);
      if (piece)
        b->bf16->codes.encode(reinterpret_cast<uint16_t *>(plane[0]),
                              reinterpret_cast<uint16_t *>(plane[2]), d, piece, at % kPieceKeys);
    }
    if (t->ring) ring_stage(b, c);
  }
}

inline int tile_keys(const Backend *b) {
  return b->codes ? int(kCodeKeys) : int(kTileKeys);
}
inline int tiles_of(const Backend *b, int position) {
  return position / tile_keys(b) + 1;
}

// The group's queries of one column and KV head in the form that tiles take.
void load_query(const Backend *b, int column, int head, float *query) {
  const ModelSpec *s = b->spec;
  const int group = s->heads / s->kv_heads, d = s->head_dim;
  const float *q = b->q + column * b->query_stride + static_cast<size_t>(head) * group * d;
  const float scale = 1.44269504f / sqrtf(static_cast<float>(d));  // log2(e): powers of two
  const bool rotated = b->config->kv_format == KSL_KV_Q4;
  for (int h = 0; h < group; h++, q += d, query += d) {
    float turned[kMaxHeadDim];
    if (rotated) {
      memcpy(turned, q, d * sizeof(float));
      kv_rotate(turned, d);
    }
    if (b->codes)
      b->bf16->codes.query(q, d, scale, query);
    else
      b->attn->query(b->config->kv_format, rotated ? turned : q, d, scale, query);
  }
}

// Pieces of a tile: of blocks, and one more wherever keys begin to come from elsewhere.
enum { kMaxRuns = kTileKeys / kMinBlockTokens + 4 };

// Where keys are found for columns of one row: int8 rows for those from `recent` on.
struct Keys {
  int kv, head, slot, recent;
  RowPlan *row;  // of a ring
};

// The keys [from, to) of a slot, at most kTileKeys of them, as runs of constant distance.
int find_runs(const Backend *b, const Keys &keys, int from, int to, KvRun *runs) {
  const int tokens = b->config->block_tokens;
  const size_t heads = b->spec->kv_heads;
  const int pool_format =
      b->config->kv_format == KSL_KV_INT8RING_INT4 ? KSL_KV_INT4_G32 : b->config->kv_format;
  int n = 0;
  while (from < to) {
    int piece = to - from;
    KvRun *run = &runs[n++];
    const uint8_t *plane[kKvPlanes];
    const size_t *bytes;
    size_t step = 1;  // rows to the next key
    if (from < keys.recent) {
      const KvPlace place = kv_place(b, keys.slot, keys.kv, from);
      bytes = b->kv_bytes;
      for (int p = 0; p < kKvPlanes; p++)
        plane[p] = place.layer + b->kv_offset[p] + (place.row + keys.head * tokens) * bytes[p];
      if (piece > tokens - from % tokens) piece = tokens - from % tokens;
      if (piece > keys.recent - from) piece = keys.recent - from;
      run->format = pool_format;
    } else {
      const int start = keys.row->row->start;
      const bool staged = from >= start;  // the row's own
      uint8_t *layer = staged ? b->ring_stage : ring_layer(b, keys.row->slab, keys.kv);
      const size_t rows = staged ? b->config->wave_columns : b->ring_tokens;
      const size_t at = staged ? keys.row->column + from - start : from % b->ring_tokens;
      bytes = b->ring_bytes;
      step = heads;
      for (int p = 0; p < kKvPlanes; p++)
        plane[p] = ring_row(b, layer, rows, p, at) + keys.head * bytes[p];
      if (!staged && piece > start - from) piece = start - from;
      if (!staged && piece > static_cast<int>(rows - at)) piece = static_cast<int>(rows - at);
      run->format = KSL_KV_INT8_G64;
    }
    run->n = piece;
    run->k = plane[0];
    run->k_scale = plane[1];
    run->v = plane[2];
    run->v_scale = plane[3];
    run->k_step = step * bytes[0];
    run->k_scale_step = step * bytes[1];
    run->v_step = step * bytes[2];
    run->v_scale_step = step * bytes[3];
    from += piece;
  }
  return n;
}

// The pieces of codes that hold the positions [from, to), at most a tile, from a whole tile on.
int find_pieces(const Backend *b, int kv, int head, int slot, int from, int to,
                const uint8_t **pieces) {
  int n = 0;
  for (int at = from; at < to; at += kPieceKeys)
    pieces[n++] = code_piece_at(b, block_of(b, slot, at), kv, head, at % b->config->block_tokens);
  return n;
}

// run_tile where there are codes.
void run_codes(const LayerTask *t, const float *query, int columns, int column, int head, int tile,
               float *m, float *l, float *acc) {
  Backend *b = t->b;
  const ModelSpec *s = b->spec;
  const int position = b->batch->position[column], slot = b->batch->slot[column];
  const int from = tile * kCodeKeys, end = from + kCodeKeys, last = position + columns;
  int n_keys[kMaxQueries];
  for (int c = 0; c < columns; c++)
    n_keys[c] = (position + c + 1 < end ? position + c + 1 : end) - from;
  const uint8_t *pieces[kCodePieces], *next[kCodePieces];
  find_pieces(b, t->kv, head, slot, from, end < last ? end : last, pieces);
  const int next_end = end + kCodeKeys < last ? end + kCodeKeys : last;
  const int n_next = find_pieces(b, t->kv, head, slot, end, next_end, next);
  b->bf16->codes.tile(pieces, next, n_next, query, s->heads / s->kv_heads, columns, n_keys,
                      s->head_dim, m, l, acc);
}

// Adds one tile, as far as they see it, to the running results of consecutive columns of a row that
// read its keys in the same formats.
void run_columns(const LayerTask *t, WorkerScratch *w, const float *query, int columns, int column,
                 int head, int tile, int recent, float *m, float *l, float *acc) {
  Backend *b = t->b;
  const ModelSpec *s = b->spec;
  const int position = b->batch->position[column];
  const int from = tile ? tile * kTileKeys : t->first_key, end = (tile + 1) * kTileKeys;
  int n_keys[kMaxQueries], to = from;
  for (int c = 0; c < columns; c++) {
    to = position + c + 1 < end ? position + c + 1 : end;
    n_keys[c] = to - from;
  }
  const Keys keys = {t->kv, head, b->batch->slot[column], recent,
                     t->ring ? &b->rows[b->batch->row[column]] : nullptr};
  KvRun runs[kMaxRuns], next[kMaxRuns];
  const int n_runs = find_runs(b, keys, from, to, runs);
  int n_next = 0;
  const int last = position + columns;
  if (end < last) {
    const int next_end = end + kTileKeys < last ? end + kTileKeys : last;
    n_next = find_runs(b, keys, end, next_end, next);
  }
  b->attn->tile(runs, n_runs, next, n_next, query, s->heads / s->kv_heads, columns, n_keys,
                s->head_dim, w->tile, m, l, acc);
}

// The same for any consecutive columns of a row. With a ring, the first key that a column reads in
// int8 moves with it: those for which it lies outside of the tile go together.
void run_tile(const LayerTask *t, WorkerScratch *w, const float *query, int columns, int column,
              int head, int tile, float *m, float *l, float *acc) {
  if (t->b->codes) {
    run_codes(t, query, columns, column, head, tile, m, l, acc);
    return;
  }
  if (!t->ring) {
    run_columns(t, w, query, columns, column, head, tile, INT32_MAX, m, l, acc);
    return;
  }
  const Backend *b = t->b;
  const int group = b->spec->heads / b->spec->kv_heads, d = b->spec->head_dim;
  const int from = tile * kTileKeys, end = from + kTileKeys;
  const int first = b->batch->position[column] + 1 - b->ring_tokens;  // of column 0
  for (int c = 0, n; c < columns; c += n) {
    const int recent = first + c;
    if (recent <= from)
      n = from - recent + 1;
    else
      n = recent < end ? 1 : columns;
    if (n > columns - c) n = columns - c;
    const size_t h = static_cast<size_t>(c) * group;
    run_columns(t, w, query + h * d, n, column + c, head, tile, recent <= from ? from : recent,
                m + h, l + h, acc + h * d);
  }
}

void start(int queries, float *m, float *l) {
  for (int h = 0; h < queries; h++) {
    m[h] = -INFINITY;
    l[h] = 0;
  }
}

void finish(const LayerTask *t, int column, int head, const float *l, const float *acc) {
  const Backend *b = t->b;
  const ModelSpec *s = b->spec;
  const int group = s->heads / s->kv_heads, d = s->head_dim;
  float *out = b->o + column * b->query_stride + static_cast<size_t>(head) * group * d;
  if (b->batch->position[column] < t->first_key) {  // it sees no key
    memset(out, 0, sizeof(float) * group * d);
    return;
  }
  for (int h = 0; h < group; h++) b->attn->finish(acc + h * d, l[h], d, out + h * d);
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
// a row go through the tiles together, so that each key is read and widened once for them.
void core_task(void *context, int worker, int begin, int end) {
  const LayerTask *t = static_cast<const LayerTask *>(context);
  Backend *b = t->b;
  WorkerScratch *w = &b->workers[worker];
  const int group = b->spec->heads / b->spec->kv_heads;
  const size_t width = static_cast<size_t>(group) * b->spec->head_dim;
  for (int i = begin; i < end;) {
    const int head = i / b->batch->n, column = i % b->batch->n;
    int most = kMaxQueries / group;
    if (most > end - i) most = end - i;
    if (most > b->batch->n - column) most = b->batch->n - column;
    const int columns = run_of_columns(b, column, most);
    for (int c = 0; c < columns; c++) load_query(b, column + c, head, w->query + c * width);
    start(columns * group, w->m, w->l);
    const int tiles = tiles_of(b, b->batch->position[column] + columns - 1);
    for (int tile = 0; tile < tiles; tile++)
      run_tile(t, w, w->query, columns, column, head, tile, w->m, w->l, w->acc);
    for (int c = 0; c < columns; c++)
      finish(t, column + c, head, w->l + c * group, w->acc + c * width);
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
    start(group, m, m + group);
    run_tile(&t->layer, &b->workers[worker], t->query, 1, t->column, t->head, t->first + i, m,
             m + group, acc);
  }
}

void core_by_tiles(const LayerTask *layer, int column, int head) {
  Backend *b = layer->b;
  const ModelSpec *s = b->spec;
  WorkerScratch *w = &b->workers[0];
  const int group = s->heads / s->kv_heads, d = s->head_dim;
  const int tiles = tiles_of(b, b->batch->position[column]);
  const int64_t cost = static_cast<int64_t>(group) * d * tile_keys(b) * 2;
  load_query(b, column, head, w->query);
  start(group, w->m, w->l);
  for (int first = 0; first < tiles; first += b->partial_tiles) {
    const int n = tiles - first < b->partial_tiles ? tiles - first : b->partial_tiles;
    TileTask task = {*layer, column, head, first, w->query};
    parallel(b, n, n * cost, tile_task, &task);
    for (int i = 0; i < n; i++) {
      const float *acc = b->partials + i * partial_floats(s);
      const float *m = acc + group * d;
      for (int h = 0; h < group; h++)
        b->attn->combine(&w->m[h], &w->l[h], w->acc + h * d, m[h], m[group + h], acc + h * d, d);
    }
  }
  finish(layer, column, head, w->l, w->acc);
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
  // Pairs are equal shares where they divide evenly, and nearly so where there are many.
  const bool uneven = pairs < 4 * b->threads && pairs % b->threads != 0;
  if (uneven && keys > 8 * tile_keys(b) * b->batch->n) {
    for (int i = 0; i < pairs; i++)
      core_by_tiles(&task, i / b->spec->kv_heads, i % b->spec->kv_heads);
  } else {
    parallel(b, pairs, keys * b->spec->q_width * 2, core_task, &task);
  }
  if (task.ring) ring_advance(b, task.kv);
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
