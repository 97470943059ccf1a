// Codes of keys and values beside the bf16 rows of the pool, which attention reads in their place
// where the machine has products of bytes (attn_codes.inl). They follow from the rows: no image
// holds them, and what is loaded is encoded when a row first needs it.
#include <string.h>

#include "state.h"

namespace ksl {
namespace {

const uint16_t *pool_row(const Backend *b, int block, int layer, int plane, size_t row) {
  return reinterpret_cast<const uint16_t *>(b->blocks + block * b->block_bytes +
                                            layer * b->kv_layer_bytes + b->kv_offset[plane] +
                                            row * b->kv_bytes[plane]);
}

struct Refresh {
  Backend *b;
  const int32_t *stale;  // a block, times two, and one more if it is a slot's first
};

// Items are (stale block, KV layer) pairs.
void refresh_task(void *context, int, int begin, int end) {
  const Refresh *t = static_cast<const Refresh *>(context);
  Backend *b = t->b;
  const ModelSpec *s = b->spec;
  const int d = s->head_dim;
  for (int i = begin; i < end; i++) {
    const int32_t stale = t->stale[i / s->kv_layers];
    const int block = stale / 2, layer = i % s->kv_layers;
    for (int h = 0; h < s->kv_heads; h++) {
      for (int at = 0; at < b->config->block_tokens; at += kPieceKeys) {
        const size_t row = static_cast<size_t>(h) * b->config->block_tokens + at;
        b->bf16->codes.encode_piece(pool_row(b, block, layer, 0, row), d,
                                    pool_row(b, block, layer, 2, row), d, d,
                                    code_piece_at(b, block, layer, h, at));
      }
      // Position 0 of the MTP layer.
      if (stale % 2 && layer >= s->kv_layers - s->mtp_layers)
        b->bf16->codes.hide(d, code_piece_at(b, block, layer, h, 0), 0);
    }
  }
}

}  // namespace

int kv_code_bytes(int kv_format, int activations, int isa, int head_dim) {
  const Kernels *kernels = kernels_for(isa);
  if (!kernels || activations == KSL_ACT_FLOAT || !bf16_for(kernels)) return 0;
  if (kv_format != KSL_KV_BF16 || head_dim % kCodeDims != 0) return 0;
  return static_cast<int>(code_piece_bytes(head_dim) / kPieceKeys);
}

void codes_init(Backend *b) {
  const ModelSpec *s = b->spec;
  const ksl_config *c = b->config;
  if (!s->kv_layers) return;
  b->code_head_bytes = static_cast<size_t>(c->block_tokens) *
                       kv_code_bytes(c->kv_format, c->activations, c->isa, s->head_dim);
  b->code_block_bytes = b->code_head_bytes * s->kv_heads * s->kv_layers;
}

void codes_mark(Backend *b, int block) {
  if (!b->codes || b->stale[block]) return;
  b->stale[block] = 1;
  b->n_stale++;
}

void codes_copy(Backend *b, int from, int to) {
  if (!b->codes || from == to) return;
  memcpy(b->codes + to * b->code_block_bytes, b->codes + from * b->code_block_bytes,
         b->code_block_bytes);
  if (b->stale[from]) codes_mark(b, to);
}

void codes_drop(Backend *b, int first, int n) {
  if (b->codes) alloc_discard(b->codes + first * b->code_block_bytes, n * b->code_block_bytes);
}

void codes_touch(Backend *b, int first, int n) {
  if (b->codes) alloc_touch(b->codes + first * b->code_block_bytes, n * b->code_block_bytes);
}

void codes_refresh(Backend *b) {
  if (!b->n_stale) return;
  const int tokens = b->config->block_tokens;
  int n = 0;
  for (int i = 0; i < b->n_rows; i++) {
    const ksl_row *row = b->rows[i].row;
    const int32_t *table =
        b->tables + static_cast<size_t>(row->slot) * b->config->max_blocks_per_slot;
    for (int at = 0; at * tokens < row->start; at++) {
      if (!b->stale[table[at]]) continue;
      b->stale[table[at]] = 0;
      b->n_stale--;
      b->refresh[n++] = 2 * table[at] + (at == 0);
    }
  }
  const ModelSpec *s = b->spec;
  Refresh task = {b, b->refresh};
  const int64_t rows = static_cast<int64_t>(n) * s->kv_layers * s->kv_heads * tokens;
  parallel(b, n * s->kv_layers, rows * s->head_dim * 8, refresh_task, &task);
}

}  // namespace ksl
