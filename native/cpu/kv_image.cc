// Images of blocks. In the pool a head's rows of a block lie side by side, since attention reads
// one head at a time; an image (budget.h) has the heads of a position side by side.
#include <string.h>

#include "state.h"

namespace ksl {
namespace {

// Calls copy(byte of the image, byte of the block, n) for pieces of the bytes [from, from + n) of
// an image that are in one piece in the block.
template <class F>
void each_piece(const Backend *b, size_t from, size_t n, F copy) {
  const size_t heads = b->spec->kv_heads, tokens = b->config->block_tokens;
  for (const size_t end = from + n; from < end;) {
    const size_t layer = from / b->kv_layer_bytes * b->kv_layer_bytes;
    int p = kKvPlanes - 1;
    while (!b->kv_bytes[p] || layer + b->kv_offset[p] > from) p--;
    const size_t plane = layer + b->kv_offset[p], bytes = b->kv_bytes[p];
    size_t row = (from - plane) / bytes, inside = (from - plane) % bytes;
    for (; from < end && row < heads * tokens; row++, inside = 0) {
      const size_t rest = bytes - inside, piece = rest < end - from ? rest : end - from;
      copy(from, plane + (row % heads * tokens + row / heads) * bytes + inside, piece);
      from += piece;
    }
  }
}

}  // namespace

void block_save(const Backend *b, int block, size_t from, size_t n, void *image) {
  const uint8_t *rows = b->blocks + block * b->block_bytes;
  uint8_t *to = static_cast<uint8_t *>(image);
  each_piece(b, from, n,
             [&](size_t i, size_t at, size_t k) { memcpy(to + i - from, rows + at, k); });
}

void block_load(Backend *b, int block, size_t from, size_t n, const void *image) {
  uint8_t *rows = b->blocks + block * b->block_bytes;
  const uint8_t *of = static_cast<const uint8_t *>(image);
  each_piece(b, from, n,
             [&](size_t i, size_t at, size_t k) { memcpy(rows + at, of + i - from, k); });
}

}  // namespace ksl
