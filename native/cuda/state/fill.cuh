#pragma once
#include "../common/raw.cuh"

namespace ksl {

// Rows [row0, row0 + rows) of a fill tensor in their stored encoding. row0: a multiple of 128. The
// buffers hold just these rows. most: scratch, [ceil(rows / 128)] words.
struct FillArgs {
  int kind;
  uint64_t seed;
  float scale;
  int encoding;
  int64_t row0;
  int rows, cols;
  uint8_t *codes;
  void *scales;
  float *globals;
  unsigned *most;
};
void fill_rows(Device *device, const FillArgs &a);

// out[i] = value i of the raw vector or matrix + offset, in float32.
void decode_values(Device *device, const Raw &raw, float offset, float *out);

// float32 finishing of loaded values: out = -exp(in); and taps [channels][4] -> [4][channels].
void negative_exp(Device *device, float *values, int n);
void transpose_taps(Device *device, const float *from, float *to, int channels, int taps);

}  // namespace ksl
