#pragma once
#include "../attn/attn.cuh"
#include "../common/raw.cuh"

namespace ksl {

// x[column] = row `token` of the table.
void embed(Device *device, const Raw &table, const Columns &columns, float *x, int stride);

// cos and sin [n][half] of position * frequency, the angle in float64.
void rotary(Device *device, const Columns &columns, const double *frequency, int half, float *cos,
            float *sin);

}  // namespace ksl
