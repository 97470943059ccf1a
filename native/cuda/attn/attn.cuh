// Gated attention over paged keys. Keys are reduced in chunks of 128 by absolute position, chunks
// in ascending order to spans of eight, spans in ascending order: whoever computes them, the same
// bits.
#pragma once
#include "../common/split.cuh"
#include "../kv/kv.cuh"

namespace ksl {

constexpr int kChunkKeys = 128;
constexpr int kSpanChunks = 8;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroup = 16;

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
  float *k;  // normed and rotated in place
  const float *v;
  int kv_stride;
  float *q, *stored_q;  // queries, and queries as the stored keys want them (q4: rotated)
  int q_stride;
  const float *q_norm, *k_norm, *cos, *sin;
  int heads, half;
  float eps;
  bool kv_only;
};
void attn_heads(Device *device, const HeadsArgs &a);

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

struct CombineArgs {
  Columns columns;
  const float *partial;
  int units, unit_chunks, heads, kv_heads, d, first_key;
  const float *query_gate;
  int query_gate_stride;
  float *pregate, *gated;
  int stride;
  Split split;
};
void attn_combine(Device *device, const CombineArgs &a);

}  // namespace ksl
