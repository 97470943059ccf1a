// Attention over the KV pool, as tables of functions: one in every kernel table (kernels.h), in
// float32 arithmetic, and one of bf16 products.
//
// Determinism: the result of a query head depends on that head and on the keys it sees, tile by
// tile of kTileKeys keys in ascending order; not on the heads, columns or tiles of the same call.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../common/abi.h"

namespace ksl {

enum { kTileKeys = 64, kMaxHeadDim = 256, kMaxGroup = 16, kMaxQueries = 256 };

// Consecutive keys of one KV head that lie at constant distances: pointers to the rows of the first
// in each plane, bytes to those of the next.
struct KvRun {
  int format, n;
  const uint8_t *k, *k_scale, *v, *v_scale;
  size_t k_step, k_scale_step, v_step, v_scale_step;
};

struct AttnKernels {
  const char *name;

  // out [head_dim floats of room] := what `tile` reads for the query q, scaled: products with keys
  // are exponents of 2. q is rotated where the format's keys are.
  void (*query)(int format, const float *q, int head_dim, float scale, void *out);

  // Adds one tile to running results of columns * group query heads (at most kMaxQueries), those of
  // a column next to each other: q [.][head_dim floats of room], maximum m, sum l and unnormalised
  // acc [.][head_dim]; a start is m = -inf, l = 0 and any acc. The runs hold the tile's keys in
  // order; column c sees the first n_keys[c] of them (below 1: none), ascending over columns.
  // `next` are the keys of the tile that follows, or none: they are fetched meanwhile.
  // scratch: attn_scratch_bytes, aligned.
  void (*tile)(const KvRun *runs, int n_runs, const KvRun *next, int n_next, const void *q,
               int group, int columns, const int *n_keys, int head_dim, uint8_t *scratch, float *m,
               float *l, float *acc);

  // Adds results `b` of later tiles to running ones `a`, one head.
  void (*combine)(float *ma, float *la, float *acca, float mb, float lb, const float *accb,
                  int head_dim);

  // out = acc / l
  void (*finish)(const float *acc, float l, int head_dim, float *out);
};

// Attention on codes (attn_codes.inl) of keys and values that are held beside bf16 rows, kPieceKeys
// of a KV head together:
//   k  [head_dim / 4][kPieceKeys][4] codes + 128 of four channels; k_scale: of a key
//   v  [head_dim / 64][kPieceKeys / 4][64][4] codes of four keys, the last 64 channels padded;
//      times 2^v_log; v_inverse: 2^-v_log
// Key j is in lane j, value j is byte j % 4 of group j / 4.
// Heads of a multiple of kCodeDims can be read so.
enum { kPieceKeys = 16, kTilePieces = kTileKeys / kPieceKeys, kCodeDims = 32 };
// A tile of them has more keys than others: what is done once for it weighs more.
enum { kCodeKeys = 2 * kTileKeys, kCodePieces = kCodeKeys / kPieceKeys };
struct CodePiece {
  uint8_t *k, *v;
  float *k_scale, *v_log, *v_inverse;
};
constexpr size_t code_value_bytes(int head_dim) {
  return static_cast<size_t>(kPieceKeys) * ((head_dim + 63) / 64 * 64);
}
// A multiple of 64.
constexpr size_t code_piece_bytes(int head_dim) {
  return static_cast<size_t>(kPieceKeys) * (head_dim + 3 * sizeof(float)) +
         code_value_bytes(head_dim);
}
inline CodePiece code_piece(uint8_t *at, int head_dim) {
  uint8_t *v = at + static_cast<size_t>(kPieceKeys) * head_dim;
  float *scales = reinterpret_cast<float *>(v + code_value_bytes(head_dim));
  return {at, v, scales, scales + kPieceKeys, scales + 2 * kPieceKeys};
}

struct CodeKernels {
  // As AttnKernels.query.
  void (*query)(const float *q, int head_dim, float scale, void *out);
  // Key and value `j` of a piece, of bf16 rows. Others of the piece may be written meanwhile.
  void (*encode)(const uint16_t *k, const uint16_t *v, int head_dim, uint8_t *piece, int j);
  // Nobody sees key `j` of the piece.
  void (*hide)(int head_dim, uint8_t *piece, int j);
  // All of a piece.
  void (*encode_piece)(const uint16_t *k, size_t k_step, const uint16_t *v, size_t v_step,
                       int head_dim, uint8_t *piece);
  // As AttnKernels.tile, but of kCodeKeys keys; the pieces hold the keys that the last column sees,
  // n_next those of the next tile.
  void (*tile)(const uint8_t *const *pieces, const uint8_t *const *next, int n_next, const void *q,
               int group, int columns, const int *n_keys, int head_dim, float *m, float *l,
               float *acc);
};

// A tile of keys and values in float32, and a vector more.
constexpr size_t attn_scratch_bytes(int head_dim) {
  return (size_t)2 * kTileKeys * 4 * head_dim + 256;
}

}  // namespace ksl
