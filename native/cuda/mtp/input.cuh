#pragma once
#include "../attn/attn.cuh"
#include "../common/raw.cuh"

namespace ksl {

// Sources of the hidden state before a column: the column before it in `final`, zeros, or one of
// the buffers below.
enum : int32_t { kSourceColumn = -1, kSourceZero = -2 };

struct JoinArgs {
  Columns columns;  // source: a slab or draft index, kSourceColumn or kSourceZero
  Raw embedding;
  const float *final;
  int stride, width;
  const float *hidden;  // [source] hidden_stride
  int64_t hidden_stride;
  const float *norm_embedding, *norm_hidden;
  float eps;
  float *out;  // [n][2 width]
  int out_stride;
  Split split;
};
// out = [rms(embedding of the token) | rms(hidden before)]. width: at most 16384.
void mtp_join(Device *device, const JoinArgs &a);

}  // namespace ksl
