#pragma once
#include "../attn/attn.cuh"
#include "../common/raw.cuh"

namespace ksl {

// cos and sin [n][half] of position * frequency, the angle in float64. half: 0 if nobody turns.
struct Rotary {
  const double *frequency;
  int half;
  float *cos, *sin;
};

// x[column] = row `token` of the table; and the rotary factors of the columns.
void embed(Device *device, const Raw &table, const Columns &columns, float *x, int stride,
           const Rotary &rotary);

// The rotary factors alone.
void rotary(Device *device, const Columns &columns, const Rotary &rotary);

}  // namespace ksl
