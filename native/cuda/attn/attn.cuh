// Gated attention over paged keys. Keys are reduced in chunks of 128 by absolute position, chunks
// in ascending order to spans of eight, spans in ascending order: whoever computes them, the same
// bits.
#pragma once
#include "../common/mma.cuh"
#include "../common/rows.cuh"
#include "../common/split.cuh"
#include "../kv/kv.cuh"

namespace ksl {

constexpr int kChunkKeys = 128;
constexpr int kSpanChunks = 8;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroup = 16;

// Columns of no row, which fill up a shape, have slot and row -1: nothing of them is kept.
struct Columns {
  const int32_t *token, *position, *slot, *row, *source;
  int n;
};

struct HeadsArgs {
  Columns columns;
  KvLayer kv;
  int format;
  const float *query_gate;  // [n][heads][2][d]
  int query_gate_stride;
  float *k;  // normed and rotated in place where keep_k
  const float *v;
  int kv_stride;
  // Queries, and queries as the stored keys want them: rotated for q4, where q may be null, not
  // wanted.
  float *q, *stored_q;
  // Null, or the latter are fragments, see head_rows.cuh, and q4 has [n][heads][8] sums of them
  // here.
  float *q_sums;
  int q_stride;
  const float *q_norm, *k_norm, *cos, *sin;
  int heads, half;
  float eps;
  bool kv_only, keep_k;
};
void attn_heads(Device *device, const HeadsArgs &a);
// Whether it makes fragments.
bool attn_heads_fragments(int head_dim, int half);

struct CoreArgs {
  Columns columns;
  KvLayer kv;
  int format;
  const float *q;
  int q_stride, heads;
  float *partial;   // [n][kv_heads][units][group][d + 2]
  int units;        // most units of a column
  int unit_chunks;  // 1, kSpanChunks, or 0: all keys are one unit
};
void attn_core(Device *device, const CoreArgs &a);

// What becomes of a weighted value: its gate, and the form that the next product reads.
struct GateArgs {
  const float *query_gate;
  int query_gate_stride;
  float *pregate, *gated;  // null: not wanted
  int stride;
  Split split;
};

struct CombineArgs {
  Columns columns;
  const float *partial;
  int units, unit_chunks, heads, kv_heads, d, first_key;
  GateArgs gate;
};
void attn_combine(Device *device, const CombineArgs &a);

// Short rows on tensor cores, to the same rule with other sizes: chunks of 64 keys, spans of four.
constexpr int kTileKeys = 64;
constexpr int kTileSpan = 4;
constexpr int kManySpans = 100;  // fewer leave a device idle: then chunks are units

struct TileArgs {
  Columns columns;
  KvLayer kv;
  int format;
  const float *q;
  const float *q_sums;  // see HeadsArgs
  int q_stride, heads;
  const RowInfo *rows;  // null: every column is a row
  const int32_t *list;  // the columns that it is for, whole rows; null: all
  int n;
  int n_rows;      // of `rows`
  float *partial;  // [columns][heads][units][d], dims as partial_place has them
  // attn_tile sets these
  float2 *partial_sums;           // [columns][heads][units]: greatest score, sum
  int units, unit_chunks, first;  // chunks of a unit: kTileSpan or 1
  bool by_tile;                   // the grid has a place for every tile of a row, not column
};
// Where a partial result has dim d, a multiple of 4, and the three behind it. Of 64 dims, every
// fourth four lie together: so the lanes that have a row's store whole sectors.
__device__ inline int partial_place(int d) {
  return (d & ~63) + ((d >> 2 & 3) << 4) + ((d >> 4 & 3) << 2);
}
// Whether it is there for such heads on this device.
bool attn_tile_runs(Device *device, int format, int head_dim);
// Whether it does what attn_heads does of columns that are rows of their own: for heads of whole
// warps, and where blocks have so few keys that this is not small beside them.
bool attn_tile_makes_heads(const Device *device, const KvLayer &kv, int half, int columns,
                           int most_position);
// heads: null, or what is to be made of q, which nobody has then. room: results of a unit and head
// that `partial` holds, d + 2 floats each.
void attn_tile(Device *device, TileArgs a, const HeadsArgs *heads, const GateArgs &o,
               int most_position, int64_t room);
// Joins the units of n columns from a.first on.
void attn_tile_join(Device *device, const TileArgs &a, const GateArgs &o, int n);

// Long pieces of prompts: tiles of as many columns as have kFlashRows query heads of a KV head. A
// tile's keys may be divided into parts, which lie one behind the other.
constexpr int kFlashRows = 128, kFlashKeys = 64;
struct FlashTile {
  int32_t column, columns, position, slot;
  int32_t first, last;  // in tiles of kFlashKeys
  int32_t part, parts;
};
struct FlashArgs {
  KvLayer kv;
  int format;
  const float *q;
  int q_stride, heads;
  const FlashTile *tiles;
  int n_tiles;
  GateArgs gate;
  // [n_tiles][kv_heads][kFlashRows]: sums of parts, [d] each, greatest scores and their sums; null:
  // no tile has parts.
  float *partial;
  float2 *partial_sums;
};
__device__ inline int64_t flash_partial(const FlashArgs &a, int tile, int head) {
  return (static_cast<int64_t>(tile) * a.kv.kv_heads + head) * kFlashRows;
}
// major: compute capability of the device.
bool attn_flash_runs(int major, int format, int head_dim, int group);
void attn_flash(Device *device, const FlashArgs &a);
// The same for heads, formats and devices that attn_flash does not take.
bool attn_prompt_runs(int format, int head_dim, int group);
void attn_prompt(Device *device, const FlashArgs &a);
// Adds what parts have left; the last step of both.
void attn_join_parts(Device *device, const FlashArgs &a);
// How many tiles of keys a part should have, so that the device is done soonest with tiles that are
// not divided yet; the longest tile's where dividing does not pay. most: parts that there is room
// for.
int flash_parts(const FlashTile *tiles, int n, int kv_heads, int processors, int most);

// Joins sums over keys with those of later keys; log2 units. Joined with nothing both stay.
struct Join {
  float most, old, now;
  __device__ Join(float before, float after) {
    most = fmaxf(before, after);
    const float base = most == -INFINITY ? 0.0f : most;
    old = exp2_fast(before - base);
    now = exp2_fast(after - base);
  }
  __device__ float add(float before, float after) const { return fmaf(before, old, after * now); }
};

__device__ inline float gate_of(const GateArgs &o, int column, int head, int i, int d) {
  return o.query_gate[static_cast<int64_t>(column) * o.query_gate_stride + (2 * head + 1) * d + i];
}
__device__ inline void gate_store(const GateArgs &o, int column, int head, int i, int d,
                                  float value, float gate) {
  const int at = head * d + i;
  const int64_t to = static_cast<int64_t>(column) * o.stride + at;
  if (o.pregate != nullptr) o.pregate[to] = value;
  const float gated = value * sigmoid(gate);
  if (o.gated != nullptr) o.gated[to] = gated;
  if (o.split.data != nullptr) split_store(o.split, column, at, gated);
}

// Of dims i and i + 1, an even i.
__device__ inline float2 gate_of2(const GateArgs &o, int column, int head, int i, int d) {
  return *reinterpret_cast<const float2 *>(
      o.query_gate + static_cast<int64_t>(column) * o.query_gate_stride + (2 * head + 1) * d + i);
}
__device__ inline void gate_store2(const GateArgs &o, int column, int head, int i, int d,
                                   float first, float second, const float2 &gate) {
  const int at = head * d + i;
  const int64_t to = static_cast<int64_t>(column) * o.stride + at;
  if (o.pregate != nullptr)
    *reinterpret_cast<float2 *>(o.pregate + to) = make_float2(first, second);
  const float2 gated = make_float2(first * sigmoid(gate.x), second * sigmoid(gate.y));
  if (o.gated != nullptr) *reinterpret_cast<float2 *>(o.gated + to) = gated;
  if (o.split.data != nullptr) split_store2(o.split, column, at, gated.x, gated.y);
}

}  // namespace ksl
