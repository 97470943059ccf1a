// The ring of int8ring_int4: the last positions of a sequence in int8, beside int4 rows of all. It
// lies in the slab, so that whatever moves a slab moves it.
//
// It holds committed positions only and exactly kv_ring of them, each at its number modulo that:
// its bytes are a function of the sequence. A row's own keys are read from what was staged for the
// wave, and enter the ring behind its attention; those of a row with drafts when it is known which
// of them stay.
#include <string.h>

#include "state.h"

namespace ksl {

namespace {

int ring_layers(const Backend *b) {
  return b->spec->kv_layers - b->spec->mtp_layers;
}

// Bytes of one position in one layer.
size_t position_bytes(const Backend *b) {
  size_t bytes = 0;
  for (int p = 0; p < kKvPlanes; p++) bytes += b->ring_bytes[p];
  return bytes * b->spec->kv_heads;
}

void copy_rows(const Backend *b, uint8_t *to, size_t to_rows, size_t to_row, uint8_t *from,
               size_t from_rows, size_t from_row, size_t n) {
  for (int p = 0; p < kKvPlanes; p++)
    memcpy(ring_row(b, to, to_rows, p, to_row), ring_row(b, from, from_rows, p, from_row),
           n * b->spec->kv_heads * b->ring_bytes[p]);
}

// Positions [start, start + n), which lie at `row` of `from`, into a ring.
void put(const Backend *b, uint8_t *ring, int start, int n, uint8_t *from, size_t from_rows,
         size_t row) {
  const int ring_tokens = b->ring_tokens;
  int j = n > ring_tokens ? n - ring_tokens : 0;
  while (j < n) {
    const int at = (start + j) % ring_tokens;
    const int piece = n - j < ring_tokens - at ? n - j : ring_tokens - at;
    copy_rows(b, ring, ring_tokens, at, from, from_rows, row + j, piece);
    j += piece;
  }
}

uint8_t *kept_layer(const Backend *b, int kv) {
  return b->ring_keep + kv * position_bytes(b) * b->keep_columns;
}

}  // namespace

void ring_init(Backend *b) {
  if (b->config->kv_format != KSL_KV_INT8RING_INT4) return;
  const KvRow row = kv_row(KSL_KV_INT8_G64, b->spec->head_dim);
  const int bytes[kKvPlanes] = {row.k, row.k_scale, row.v, row.v_scale};
  size_t before = 0;
  for (int p = 0; p < kKvPlanes; p++) {
    b->ring_bytes[p] = bytes[p];
    b->ring_before[p] = before;
    before += bytes[p];
  }
  b->ring_tokens = b->config->kv_ring;
  b->ring_layer_bytes = position_bytes(b) * b->ring_tokens;
}

bool ring_scratch(Backend *b) {
  if (!b->ring_tokens) return true;
  const size_t bytes = position_bytes(b);
  b->ring_stage = static_cast<uint8_t *>(own_bytes(b, bytes * b->config->wave_columns));
  b->ring_keep = static_cast<uint8_t *>(own_bytes(b, bytes * b->keep_columns * ring_layers(b)));
  return b->ring_stage && b->ring_keep;
}

void ring_stage(Backend *b, int column) {
  const int d = b->spec->head_dim;
  for (int side = 0; side < 2; side++) {
    const float *x = (side == kKvKey ? b->k : b->v) + column * b->kv_stride;
    uint8_t *plane[2];
    for (int p = 0; p < 2; p++)
      plane[p] = ring_row(b, b->ring_stage, b->config->wave_columns, 2 * side + p, column);
    for (int h = 0; h < b->spec->kv_heads; h++)
      kv_encode(KSL_KV_INT8_G64, side, x + h * d, d, plane[0] + h * b->ring_bytes[2 * side],
                plane[1] + h * b->ring_bytes[2 * side + 1]);
  }
}

void ring_advance(Backend *b, int kv) {
  const size_t staged = b->config->wave_columns;
  for (int i = 0; i < b->n_rows; i++) {
    const RowPlan *row = &b->rows[i];
    if (!row->n) continue;
    if (row->keep >= 0) {
      copy_rows(b, kept_layer(b, kv), b->keep_columns, row->keep, b->ring_stage, staged,
                row->column, row->n);
      continue;
    }
    uint8_t *ring = ring_layer(b, row->slab, kv);
    for (int c = 0; c < row->n_cuts; c++) {
      uint8_t *cut = ring_layer(b, row->cut_slab[c], kv);
      memcpy(cut, ring, b->ring_layer_bytes);
      put(b, cut, row->row->start, row->cut_offset[c], b->ring_stage, staged, row->column);
    }
    put(b, ring, row->row->start, row->n, b->ring_stage, staged, row->column);
  }
}

void ring_commit_kept(Backend *b) {
  if (!b->ring_tokens) return;
  for (int i = 0; i < b->n_rows; i++) {
    const RowPlan *row = &b->rows[i];
    if (!row->n || row->keep < 0) continue;
    for (int kv = 0; kv < ring_layers(b); kv++)
      put(b, ring_layer(b, row->slab, kv), row->row->start, row->committed, kept_layer(b, kv),
          b->keep_columns, row->keep);
  }
}

}  // namespace ksl
